"""What the kernel takes from extensions: for each task, a name and its module.

This and ``_LATER`` in ``fnloop/__init__.py`` are the only places that know of them. An extension
that is taken away takes its rows along, and a run does without it.
"""

from __future__ import annotations

from importlib import import_module

# For each task, the names by their modules.
_ROWS: dict[str, dict[str, str]] = {
    "hooks of a run by default": {
        "._hooks.progress": "progress",
        "._hooks.stop": "halt_on_nonfinite",
    },
    "checkpoints at an address": {
        "._checkpoint.remote": "Remote",
    },
}


def extensions(task: str) -> list:
    """Return what does a task."""
    return [getattr(import_module(at, "fnloop"), name) for at, name in _ROWS[task].items()]
