"""What the kernel takes from extensions: for each task, a name and its module.

This and ``_LATER`` in ``fnloop/__init__.py`` are the only places that know of them. An extension
that is taken away takes its rows along, and a run does without it.
"""

from __future__ import annotations

from importlib import import_module

# For each task, the names by their modules.
_ROWS: dict[str, dict[str, str]] = {
    "hooks of a run by default": {
        "._extensions.hooks.progress": "progress",
        "._extensions.hooks.stop": "halt_on_nonfinite",
    },
    "checkpoints at an address": {
        "._extensions.checkpoints.remote": "Remote",
    },
    "averages of the weights": {
        "._extensions.middleware.ema": "ema swa",
    },
    "graphs of an update": {
        "._extensions.graphs.capture": "explain_uncapturable",
    },
}


def extensions(task: str) -> list:
    """Return what does a task."""
    rows = ((import_module(at, "fnloop"), names) for at, names in _ROWS[task].items())
    return [getattr(module, name) for module, names in rows for name in names.split()]
