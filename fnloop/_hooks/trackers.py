"""Experiment trackers: those of accelerate, and the arguments that they need."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from fnloop._backend.launch import trackers

__all__ = ["Tracker", "read_tracker"]

_EXTRAS = ("tensorboard", "wandb", "mlflow")
# By tracker, the argument that takes a folder.
_FOLDERS = {"wandb": "dir", "mlflow": "logging_dir", "dvclive": "dir", "swanlab": "logdir"}


@attrs.define
class Tracker:
    """One of accelerate's trackers, used without its process-wide state. See :func:`read_tracker`.

    Args:
        name: its name.
        kind: its class, or the tracker itself.
        args, settings: the arguments of its class.
    """

    name: str
    kind: Any  # a class is called with arguments that only it knows
    args: tuple[str, ...] = ()
    settings: Mapping[str, object] = attrs.field(factory=dict)
    _running: Any = None  # what accelerate makes; ``tracker`` differs from class to class

    def start(self, step: int) -> None:
        """Start the tracker. Values from this step on, left by a run that died, are overwritten."""
        with trackers() as known:
            self._running = self.kind
            if isinstance(self.kind, type):
                purge = {"purge_step": step} if self.kind is known.TensorBoardTracker else {}
                self._running = self.kind(*self.args, **{**purge, **self.settings})
            # Otherwise each call would create accelerate's process-wide state.
            self._running.main_process_only = False
            self._running.start()

    @property
    def client(self) -> Any:
        """The tracker's own object: a SummaryWriter of tensorboard, a run of wandb, ..."""
        return self._running.tracker

    def configure(self, values: Mapping[str, object]) -> None:
        """Log hyperparameters."""
        with trackers() as known:
            if type(self._running) is known.TensorBoardTracker:
                _write_hparams(self._running, known.yaml, values)
            else:
                self._running.store_init_configuration(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        with trackers():
            self._running.log(dict(values), step=step)

    def finish(self) -> None:
        """Close the tracker.

        If the service has given the run an identity, the next start continues that run.
        """
        with trackers() as known:
            if self.kind is known.WandBTracker:
                self.settings = {"resume": "allow", **self.settings, "id": self._running.tracker.id}
            elif self.kind is known.MLflowTracker:
                self.settings = {**self.settings, "run_id": self._running.tracker.info.run_id}
            self._running.finish()


def _write_hparams(running: Any, yaml: ModuleType, values: Mapping[str, object]) -> None:
    """Write hyperparameters into tensorboard's file of the run, and into ``hparams.yml``.

    Accelerate and ``SummaryWriter.add_hparams`` make a folder each, which tensorboard shows as a
    run of its own.
    """
    writer = running.tracker
    # torch.utils.tensorboard, or tensorboardX where that is missing.
    package = type(writer).__module__.rpartition(".")[0]
    summaries = importlib.import_module(f"{package}.summary")
    for summary in summaries.hparams(dict(values), {}):
        writer.file_writer.add_summary(summary)
    writer.flush()
    text = yaml.safe_dump(dict(values))
    Path(running.logging_dir, "hparams.yml").write_text(text, encoding="utf-8")


def read_tracker(
    tracker: object, project: str | None, folder: str | None, settings: Mapping[str, object]
) -> Tracker:
    """Return a tracker that is not started yet.

    Args:
        tracker: a name that accelerate knows, a class of trackers, or one tracker.
        project: the project that the run belongs to; None for a default.
        folder: where it writes, or None.
        settings: the other arguments of its class.

    Raises:
        ValueError: there is no tracker of that name, it needs a folder, or it does not take one.
        ImportError: its package is not installed.
        TypeError: it is none of these, or an argument is wrong.
    """
    with trackers() as known:
        classes, base = known.LOGGER_TYPE_TO_CLASS, known.GeneralTracker
    if isinstance(tracker, base):
        if project is not None or folder is not None or settings:
            raise TypeError(
                f"track expects no further arguments for the instance {_name_of(tracker)}: pass "
                "them where you make it, or pass its class"
            )
        return Tracker(_name_of(tracker), tracker)
    if isinstance(tracker, str):
        if tracker not in classes:
            names = ", ".join(f'"{name}"' for name in classes)
            raise ValueError(
                f"track expects one of {names}, or your own GeneralTracker; got {tracker!r}"
            )
        kind = classes[tracker]
    elif isinstance(tracker, type) and issubclass(tracker, base):
        kind = tracker
    else:
        raise TypeError(
            'track expects the name of a tracker, such as "tensorboard", or a GeneralTracker of '
            f"accelerate; got {tracker!r:.60}"
        )
    if kind.__module__ == base.__module__:
        _check_installed(kind.name)
    name, needs_folder = _name_of(kind), getattr(kind, "requires_logging_directory", False)
    args, settings = _collect_arguments(name, needs_folder, project, folder, settings)
    try:
        inspect.signature(kind).bind(*args, **settings)
    except TypeError as error:
        raise TypeError(
            f"track({name!r}) calls {kind.__name__}{inspect.signature(kind)}, but {error}"
        ) from None
    return Tracker(name, kind, args, settings)


def _collect_arguments(
    name: str,
    needs_folder: bool,
    project: str | None,
    folder: str | None,
    settings: Mapping[str, object],
) -> tuple[tuple[str, ...], Mapping[str, object]]:
    """Return the arguments of a class of trackers."""
    if needs_folder:
        if folder is None:
            raise ValueError(f'track({name!r}) needs a folder: track({name!r}, folder="runs/a")')
        return (project or "", folder), settings
    if folder is None:
        return (project or "fnloop",), settings
    if name not in _FOLDERS:
        raise ValueError(
            f"track({name!r}) takes no folder: leave it out, or use the argument of its class by "
            "name"
        )
    return (project or "fnloop",), {_FOLDERS[name]: folder, **settings}


def _name_of(tracker: object) -> str:
    return getattr(tracker, "name", None) or getattr(tracker, "__name__", type(tracker).__name__)


def _check_installed(name: str) -> None:
    found = importlib.util.find_spec(name)
    # A folder of that name, such as the one that wandb makes, is found too, but without an origin.
    if found is None or found.origin is None:
        package = f"'fnloop[{name}]'" if name in _EXTRAS else name.replace("_", "-")
        raise ImportError(
            f"track({name!r}) needs a package that is not installed: pip install {package}"
        )
