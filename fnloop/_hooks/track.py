"""Send records to an experiment tracker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from fnloop._core.call import Call, name_of
from fnloop._core.history import records_since
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._hooks.trackers import read_tracker
from fnloop._hooks.wrapper import Hook

__all__ = ["track"]

# fn(client, state): the client of each tracker has a class of its own.
Also = Callable[[Any, TrainState], object]
_Plain = str | bool | int | float | None


class track(Hook):
    """Send every record to a tracker: ``track("tensorboard", folder="runs/a")``.

    Each metric is sent with the step of its record. The tracker is opened after the first update
    and closed when the run ends, also on an exception; a later run continues in it. When there are
    several processes, only the first one sends.

    Args:
        tracker: "tensorboard", "wandb", "mlflow" or any other name that accelerate knows; or a
            class or an instance of ``accelerate.tracking.GeneralTracker``.
        folder: where it writes. tensorboard and aim need one; wandb, mlflow (for artifacts),
            dvclive and swanlab take one.
        config: hyperparameters, sent once: plain data, possibly in nested mappings;
            ``{"a": {"b": 1}}`` becomes ``a.b``.
        also: ``fn(client, state)``, called after the numbers of a record are sent, for what is not
            a number: pictures, histograms, the graph. ``client`` is the tracker's own object, which
            writes to the same run: the ``SummaryWriter`` of tensorboard, the run of wandb, the
            active run of mlflow (``mlflow.log_figure`` writes to it), and what the ``tracker`` of
            another GeneralTracker is. ``"epoch" in state.events`` says whether an epoch has ended.
            Only the process that sends calls it, so it must not wait for the others.
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

        A histogram of the weights, at every epoch::

            def weights(writer, state):
                for name, weight in state.model.named_parameters():
                    writer.add_histogram(name, weight, state.step)

            track("tensorboard", folder="runs/a", also=weights)

    Source: https://huggingface.co/docs/accelerate/usage_guides/tracking
    """

    def __init__(
        self,
        tracker: object,
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        also: Also | None = None,
        project: str | None = None,
        **settings: object,
    ) -> None:
        if also is not None:
            checks.function("track", "also", also, "a function (client, state)", 2)
        if folder is not None:
            folder = checks.typed_path("track", "folder", folder)
        if project is not None:
            checks.text("track", "project", project, "the name of a project")
        self.config = _flatten({} if config is None else config)
        self._tracker = read_tracker(tracker, project, folder, settings)
        given = {
            "folder": folder,
            "also": also,
            "project": project,
        }  # not the settings: they may contain API keys
        shown = {name: value for name, value in given.items() if value is not None}
        self._call = Call(track, (self._tracker.name,), shown)
        self.also = also
        self._open = self._configured = False
        self._first_step = 0  # of the run
        self._known = 0  # the number of records that were sent, or are not to be sent
        self._last: Record | None = None  # of those

    def __repr__(self) -> str:
        return repr(self._call)

    def begin(self, state: TrainState) -> TrainState:
        """Note which records were made before this run."""
        self._first_step = state.step
        self._note(state)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if state.backend.rank == 0:
            records = self._new_records(state)
            if not self._open:
                self._start(min([state.step, *(record.step for record in records)]))
            self._send(state, records)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Send the closing record, if there is one."""
        if self._open:
            closing = [record for record in self._new_records(state) if record.closing]
            self._send(state, closing)
        return state

    def close(self) -> None:
        """Close the tracker. A failure is logged, because no caller could catch it."""
        if self._open:
            self._open = False
            try:
                self._tracker.finish()
            except Exception as error:
                log.error("%r: could not be closed: %s", self, error)

    def _new_records(self, state: TrainState) -> list[Record]:
        """Return the records that this boundary made, and those made before the first update.

        A boundary may make two. If ``every`` skips the hook, it skips the records too.
        """
        history, known = state.history, self._known
        if known > len(history) or (known and history[known - 1] is not self._last):
            known = 0  # a hook went back to a snapshot
            first_steps: tuple[int, ...] = ()
        else:
            first_steps = (self._first_step,)
        steps = (state.step, *first_steps)
        return [record for record in records_since(history, known) if record.step in steps]

    def _send(self, state: TrainState, records: list[Record]) -> None:
        for record in records:
            self._tracker.log(record.metrics, record.step)
        self._note(state)
        if records and self.also is not None:
            try:
                self.also(self._tracker.client, state)
            except Exception as error:
                error.add_note(f"while in {name_of(self.also)}(client, state) of {self!r}")
                raise

    def _note(self, state: TrainState) -> None:
        """Note the records so far as known."""
        self._known = len(state.history)
        self._last = state.history[-1] if self._known else None

    def _start(self, step: int) -> None:
        self._tracker.start(step)
        self._open = True
        if self.config and not self._configured:
            self._tracker.configure(self.config)
        self._configured = True


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
