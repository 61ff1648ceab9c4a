"""Send records to an experiment tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real

from toolz import keyfilter

from fnloop._core.call import Call
from fnloop._core.metrics import Last, read
from fnloop._core.record import Record
from fnloop._core.state import RECORD, TrainState
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._hooks.trackers import read_tracker

__all__ = ["track"]

_Plain = str | bool | int | float | None


class track:
    """Send every record to a tracker: ``track("tensorboard", folder="runs/a")``.

    Each metric is sent with ``state.step``. So is the learning rate of each parameter group, under
    the names that ``schedule`` uses ("train/lr", "train/lr/1", ...). The tracker is opened after
    the first update and closed when the run ends, also on an exception; a later run continues in
    it. When there are several processes, only the first one sends.

    Args:
        tracker: "tensorboard", "wandb", "mlflow" or any other name that accelerate knows; or a
            class or an instance of ``accelerate.tracking.GeneralTracker``.
        folder: where it writes. tensorboard and aim need one; wandb, mlflow (for artifacts),
            dvclive and swanlab take one.
        config: hyperparameters, sent once: plain data, possibly in nested mappings;
            ``{"a": {"b": 1}}`` becomes ``a.b``.
        project: the project or experiment that the run belongs to; for tensorboard, a folder in
            ``folder``.
        **settings: other arguments of the class, such as ``name="a"`` for ``wandb.init``.

    Returns:
        A hook.

    Raises:
        ValueError: there is no tracker of that name, it needs a folder, or it does not take one.
        TypeError: an argument has the wrong type.
        ImportError: the package of the tracker is not installed; the message says what to install.

    Example:
        >>> import fnloop as fl, torch
        >>> from accelerate.tracking import GeneralTracker
        >>> from fnloop.testing import toy, toy_loss
        >>> class Show(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "show", False, None
        ...     def store_init_configuration(self, values):
        ...         print(values)
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> hook = track(Show(), config={"model": {"width": 1}})
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 2
        >>> state = fl.fit(step, toy(lr=0.5), batches, hooks=(hook,))
        {'model.width': 1}
        2 {'train/loss': -0.25, 'train/lr': 0.5}

    Source: https://huggingface.co/docs/accelerate/usage_guides/tracking
    """

    def __init__(
        self,
        tracker: object,
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        project: str | None = None,
        **settings: object,
    ) -> None:
        if folder is not None:
            folder = checks.typed_path("track", "folder", folder)
        if project is not None:
            checks.text("track", "project", project, "the name of a project")
        self.config = _flatten({} if config is None else config)
        self._tracker = read_tracker(tracker, project, folder, settings)
        given = {
            "folder": folder,
            "project": project,
        }  # not the settings: they may contain API keys
        shown = {name: value for name, value in given.items() if value is not None}
        self._call = Call(track, (self._tracker.name,), shown)
        self._open = self._configured = False
        self._sent: Record | None = None  # the last one

    def __repr__(self) -> str:
        return repr(self._call)

    def __call__(self, state: TrainState) -> TrainState:
        if state.backend.rank == 0:
            if not self._open:
                self._start(state)
            if RECORD in state.events:
                self._log(state)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Send the closing record, if there is one."""
        if self._open and RECORD in state.events and state.history[-1].closing:
            self._log(state)
        return state

    def close(self) -> None:
        """Close the tracker. A failure is logged, because no caller could catch it."""
        if self._open:
            self._open = False
            try:
                self._tracker.finish()
            except Exception as error:
                log.error("%r: could not be closed: %s", self, error)

    def _log(self, state: TrainState) -> None:
        record = state.history[-1]
        if record is not self._sent:
            self._sent = record
            rates = _missing_rates(state, record.metrics)
            self._tracker.log({**record.metrics, **rates}, record.step)

    def _start(self, state: TrainState) -> None:
        self._tracker.start(state.step)
        self._open = True
        if self.config and not self._configured:
            self._tracker.configure(self.config)
        self._configured = True


def _missing_rates(state: TrainState, known: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rates of the parameter groups that a record lacks."""
    groups = enumerate(state.optimizer.param_groups)
    rates = {f"train/lr/{i}" if i else "train/lr": Last(group["lr"]) for i, group in groups}
    return read(keyfilter(lambda name: name not in known, rates))


def _flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, _Plain]:
    """Return nested mappings as one, with values that every tracker takes."""
    if not isinstance(config, Mapping):
        raise TypeError(
            "track expects config as a mapping, such as {'lr': 0.1}; got "
            f"{checks.describe(config)}. For an object, write vars(config)"
        )
    flat: dict[str, _Plain] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = _to_plain(name, value)
    return flat


def _to_plain(name: str, value: object) -> _Plain:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):  # also a number of NumPy
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, list | tuple):
        return str([_to_plain(name, item) for item in value])
    raise TypeError(
        f"track expects plain data in config; got {name}={value!r:.60} ({type(value).__name__}). "
        "Write str(...) around it"
    )
