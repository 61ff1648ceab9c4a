"""Experiment trackers: those of accelerate, and what they ask for."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from fnloop._backend.launch import trackers

__all__ = ["Tracker", "read_tracker"]

_EXTRAS = ("tensorboard", "wandb", "mlflow")
_FOLDERS = {
    "wandb": "dir",
    "mlflow": "logging_dir",
    "dvclive": "dir",
    "swanlab": "logdir",
}  # what they call it


@attrs.define
class Tracker:
    """One of accelerate's trackers, used without accelerate's process-wide state. Make it with :func:`read_tracker`.

    Args:
        name: what it is called.
        kind: its class, or the tracker itself.
        args, settings: what the class is made with.
    """

    name: str
    kind: Any
    args: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    _running: Any = None

    def start(self, step: int) -> None:
        """Start it; what it has of this step and later is of a run that died, and is overwritten."""
        with trackers() as known:
            self._running = self.kind
            if isinstance(self.kind, type):
                purge = {"purge_step": step} if self.kind is known.TensorBoardTracker else {}
                self._running = self.kind(*self.args, **{**purge, **self.settings})
            self._running.main_process_only = (
                False  # else each call makes accelerate's process-wide state
            )
            self._running.start()

    def configure(self, values: Mapping[str, Any]) -> None:
        """Log hyper-parameters."""
        with trackers():
            self._running.store_init_configuration(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        with trackers():
            self._running.log(dict(values), step=step)

    def finish(self) -> None:
        """Close it. Where the service has a name for the run, the next start goes on with it."""
        with trackers() as known:
            if self.kind is known.WandBTracker:
                self.settings = {"resume": "allow", **self.settings, "id": self._running.tracker.id}
            elif self.kind is known.MLflowTracker:
                self.settings = {**self.settings, "run_id": self._running.tracker.info.run_id}
            self._running.finish()


def read_tracker(
    tracker: Any, project: str | None, folder: str | None, settings: Mapping[str, Any]
) -> Tracker:
    """Return a tracker that isn't started yet.

    Args:
        tracker: a name that accelerate knows, a class of trackers, or one tracker.
        project: what the run is filed under; None for a name that does.
        folder: where it writes, or None.
        settings: the other arguments of its class.

    Raises:
        ValueError: there is no tracker of that name, it needs a folder, or takes none.
        ImportError: its package isn't installed.
        TypeError: it is something else.
    """
    with trackers() as known:
        classes, base = known.LOGGER_TYPE_TO_CLASS, known.GeneralTracker
    if isinstance(tracker, base):
        if project is not None or folder is not None or settings:
            raise TypeError(
                f"track({_named(tracker)}) is made already: give its class, or its settings where you make it"
            )
        return Tracker(_named(tracker), tracker)
    if isinstance(tracker, str):
        if tracker not in classes:
            names = ", ".join(f'"{name}"' for name in classes)
            raise ValueError(
                f"track expects one of {names}, or a tracker of yours; got {tracker!r}"
            )
        kind = classes[tracker]
    elif isinstance(tracker, type) and issubclass(tracker, base):
        kind = tracker
    else:
        raise TypeError(
            'track expects the name of a tracker, such as "tensorboard", or a GeneralTracker of accelerate; '
            f"got {tracker!r:.60}"
        )
    if kind.__module__ == base.__module__:
        _check_installed(kind.name)
    name, in_folder = _named(kind), getattr(kind, "requires_logging_directory", False)
    args, settings = _arguments(name, in_folder, project, folder, settings)
    try:
        inspect.signature(kind).bind(*args, **settings)
    except TypeError as error:
        raise TypeError(
            f"track({name!r}) makes a {kind.__name__}{inspect.signature(kind)}, but {error}"
        ) from None
    return Tracker(name, kind, args, settings)


def _arguments(
    name: str, in_folder: bool, project: str | None, folder: str | None, settings: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return what a class of trackers is made with."""
    if in_folder:
        if folder is None:
            raise ValueError(f'track({name!r}) needs a folder: track({name!r}, folder="runs/a")')
        return (project or "", folder), settings
    if folder is not None and name not in _FOLDERS:
        raise ValueError(
            f"track({name!r}) takes no folder: leave it out, or give what its class takes by its name"
        )
    return (project or "fnloop",), settings if folder is None else {
        _FOLDERS[name]: folder,
        **settings,
    }


def _named(tracker: Any) -> str:
    return getattr(tracker, "name", None) or getattr(tracker, "__name__", type(tracker).__name__)


def _check_installed(name: str) -> None:
    found = importlib.util.find_spec(name)
    if (
        found is None or found.origin is None
    ):  # a folder of that name, such as the one that wandb makes, is no package
        package = f"'fnloop[{name}]'" if name in _EXTRAS else name.replace("_", "-")
        raise ImportError(
            f"track({name!r}) needs a package that is not installed: pip install {package}"
        )
