"""Sending what is recorded to an experiment tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from fnloop._core.call import Call
from fnloop._core.metrics import Last, read
from fnloop._core.record import Record
from fnloop._core.state import RECORD, TrainState
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._hooks.trackers import read_tracker

__all__ = ["track"]


class track:
    """Send every record to a tracker: ``track("tensorboard", folder="runs/a", config={"lr": 0.1})``.

    Each metric goes to ``state.step``, and so does the learning rate of each parameter group, by the names that ``schedule``
    gives them ("train/lr", "train/lr/1", ...). The tracker is opened behind the first update and closed when the run ends, by
    an exception too; a later run goes on where it ended. Only the first of several processes does anything.

    Args:
        tracker: "tensorboard", "wandb", "mlflow" or any other name that accelerate knows; or a class or an instance of
            ``accelerate.tracking.GeneralTracker``.
        folder: where it writes. tensorboard and aim need one; wandb, mlflow (for artifacts), dvclive and swanlab take one.
        config: hyper-parameters, sent once: plain data, in nested mappings or not; ``{"a": {"b": 1}}`` becomes ``a.b``.
        project: what the run is filed under: a project, an experiment, or (tensorboard) a folder in ``folder``.
        **settings: other arguments of its class, such as ``name="a"`` for ``wandb.init``.

    Returns:
        A hook.

    Raises:
        ValueError: there is no tracker of that name, or it needs a folder, or takes none.
        TypeError: an argument is something else.
        ImportError: its package isn't installed; the message says what to install.

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
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(lr=0.5), [torch.ones(1)] * 2, epochs=1, hooks=(hook,))
        {'model.width': 1}
        2 {'train/loss': -0.25, 'train/lr': 0.5}

    Source: https://huggingface.co/docs/accelerate/usage_guides/tracking
    """

    def __init__(
        self,
        tracker: Any,
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        **settings: Any,
    ) -> None:
        if folder is not None:
            folder = checks.typed_path("track", "folder", folder)
        if project is not None:
            checks.text("track", "project", project, "the name of a project")
        self.config = _flat({} if config is None else config)
        self._tracker = read_tracker(tracker, project, folder, settings)
        given = {
            "folder": folder,
            "project": project,
        }  # and nothing else: there may be keys among the settings
        self._call = Call(
            track, (self._tracker.name,), {k: v for k, v in given.items() if v is not None}
        )
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
        """Send the record that the end of the run has made, if it has made one."""
        if self._open and RECORD in state.events and state.history[-1].closing:
            self._log(state)
        return state

    def close(self) -> None:
        """Close the tracker, when the run ends; what goes wrong with that is logged, since nobody is there to catch it."""
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
            self._tracker.log({**record.metrics, **_rates(state, record.metrics)}, record.step)

    def _start(self, state: TrainState) -> None:
        self._tracker.start(state.step)
        self._open = True
        if self.config and not self._configured:
            self._tracker.configure(self.config)
        self._configured = True


def _rates(state: TrainState, known: Mapping[str, float]) -> dict[str, float]:
    """Return the learning rate of each parameter group that the record doesn't have."""
    groups = state.optimizer.param_groups
    names = (f"train/lr/{i}" if i else "train/lr" for i in range(len(groups)))
    return read(
        {
            name: Last(group["lr"])
            for name, group in zip(names, groups, strict=True)
            if name not in known
        }
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, of values that every tracker takes."""
    if not isinstance(config, Mapping):
        raise TypeError(
            f"track expects config as a mapping, such as {{'lr': 0.1}}; got {checks.described(config)}. Of an object: vars(it)"
        )
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        flat.update(
            _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: _plain(name, value)}
        )
    return flat


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):  # numpy's too
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, list | tuple):
        return str([_plain(name, item) for item in value])
    raise TypeError(
        f"track expects plain data in config; got {name}={value!r:.60} ({type(value).__name__}). Write str(...)"
    )
