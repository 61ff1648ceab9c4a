"""All that the kernel can do without. Here: what a run takes from it, a row for each task.

This and ``_LATER`` in ``fnloop/__init__.py`` are the only places that know of them. An extension
that is taken away takes its rows along, and a run does without it.
"""

from __future__ import annotations

from importlib import import_module

# For each task, the names by their modules.
_ROWS: dict[str, dict[str, str]] = {
    "readers of loaders": {
        "._extensions.loaders.map_style": "reader_of_map_style",
    },
    "table of a history": {
        "._extensions.histories.table": "table",
    },
    "metrics that are watched": {
        "._extensions.histories.watched": "check_watched",
    },
    "hint at a metric": {
        "._extensions.histories.watched": "hint",
    },
    "figure of a history": {
        "._extensions.histories.curves": "plot_records",
    },
    "figure of schedules": {
        "._extensions.histories.curves": "plot_factors",
    },
    "hooks of a run by default": {
        "._extensions.hooks.progress": "progress",
        "._extensions.hooks.stop": "halt_on_nonfinite",
    },
    "what a run is made with": {
        "._extensions.checkpoints.made_with": "describe_making",
    },
    "what is noted before a run": {
        "._extensions.checkpoints.model": "note_buffers",
    },
    "what a checkpoint can hold": {
        "._extensions.checkpoints.save": "check_encodable",
    },
    "checkpoints at an address": {
        "._extensions.checkpoints.remote": "Remote",
    },
    "averages of the weights": {
        "._extensions.middleware.ema": "ema swa",
    },
    "what is not to be trained": {
        "._extensions.middleware.ema": "check_not_averaged",
    },
    "several processes": {
        "._extensions.engines.exchanges": "several",
    },
    "several processes are joined": {
        "._extensions.engines.join": "join",
    },
    "shares of several processes": {
        "._extensions.engines.shares": "share",
    },
    "peers of a run": {
        "._extensions.engines.consensus": "Consensus",
    },
    "engine of several processes": {
        "._extensions.engines.distributed": "DistributedEngine",
    },
    "engine that is exact": {
        "._extensions.engines.exact": "exact_engine",
    },
    "metrics known before any batch": {
        "._extensions.middleware.metric": "unseen_metrics",
        "._extensions.middleware.times": "unseen_times",
    },
    "part counters": {
        "._core.state": "COUNTED",
    },
    "part averages": {
        "._extensions.middleware.ema": "AVERAGES",
    },
    "part apart": {
        "._extensions.engines.apart": "APART",
    },
    "part exact": {
        "._extensions.engines.exact": "EXACT",
    },
    "hints as a run begins": {
        "._extensions.tools.hints": "suggest",
    },
    "hints after an epoch": {
        "._extensions.tools.hints": "suggest_fused",
    },
    "norm layers that are frozen": {
        "._extensions.freeze": "keep_statistics",
    },
    "what a restored state trains": {
        "._extensions.freeze": "note_restored",
    },
    "what a phase trains": {
        "._extensions.freeze": "put_back_restored",
    },
    "groups of a checkpoint": {
        "._extensions.freeze": "regroup",
    },
    "graphs of an update": {
        "._extensions.graphs.capture": "explain_uncapturable",
    },
}


def extensions(task: str) -> list:
    """Return what does a task, which may be nothing."""
    rows = ((import_module(at, "fnloop"), names) for at, names in _ROWS.get(task, {}).items())
    return [getattr(module, name) for module, names in rows for name in names.split()]
