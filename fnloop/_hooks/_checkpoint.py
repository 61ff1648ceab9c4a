"""Saving a run as it goes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path

from fnloop._checkpoint import contents
from fnloop._files import Contents, prune, write
from fnloop._history import better
from fnloop._processes import main_only
from fnloop._resumable import check_resumable
from fnloop._state import RECORD, TrainState

__all__ = ["checkpoint"]


class checkpoint:
    """Save a checkpoint: ``every(epochs=1)(checkpoint("runs/a", best="valid/loss"))``.

    Besides, the state is saved when a run ends, by whatever reason but an exception, and on SIGUSR1. Each is a folder
    ``step-00000812`` in ``folder``, whole or not there. What is kept is decided by what is on the disk, so it holds after a
    resume too. :func:`fnloop.resume` goes on from the newest. With several processes the main one writes.

    Args:
        folder: where to; made if it isn't there.
        keep: how many of the newest to keep; at least 1.
        best: a metric such as "valid/loss", of which the best are kept too. A checkpoint has a value of it only if it was
            saved at the boundary of that evaluation; NaN is never the best.
        mode: "min" if lower is better, "max" if higher.
        keep_best: how many of the best to keep; at least 1.
        background: copy the state to host memory, and write it beside training. At most one is written at a time; what goes
            wrong there is raised at the next boundary, and the end of the run waits.

    Returns:
        A hook.

    Raises:
        ValueError: keep, keep_best or mode is out of range.
        CheckpointError: before the first update: a run with this optimizer could not be resumed. When it saves: something in
            the state can't be saved.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=2)(checkpoint(folder, keep=1))
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, steps=3, hooks=(saves,))
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, epochs=1, hooks=(saves,))
        ...     state.model.w.item(), fl.latest(folder).name
        (-4.0, 'step-00000004')
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        best: str | None = None,
        mode: str = "min",
        *,
        keep_best: int = 1,
        background: bool = False,
    ) -> None:
        for name, value in (("keep", keep), ("keep_best", keep_best)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"checkpoint expects {name} >= 1, a number of checkpoints; got {value!r}")
        if best is not None and not isinstance(best, str):
            raise TypeError(f'checkpoint expects best as the name of a metric, such as "valid/loss"; got {best!r}')
        better(0.0, 0.0, mode)  # checks the mode
        self.folder, self.keep, self.best, self.mode = Path(folder), keep, best, mode
        self.keep_best, self.background = keep_best, background
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: weakref.ref[TrainState] | None = None  # the state that was saved last
        self._buffers: Contents | None = None  # host memory of the copy before, to copy into again

    def __repr__(self) -> str:
        best = f", best={self.best!r}, mode={self.mode!r}" if self.best else ""
        return f"checkpoint({str(self.folder)!r}, keep={self.keep}{best})"

    def __call__(self, state: TrainState) -> TrainState:
        self._wait()
        self._check_best(state)
        if self._saved is None or self._saved() is not state:
            self._saved = weakref.ref(state)
            what = contents(state)
            if not self.background:
                main_only(lambda: self._write(what, state), "the hook checkpoint")
            elif state.backend.main:
                what = self._buffers = what.copied(self._buffers)
                self._writer = threading.Thread(target=self._write_and_note, args=(what, state), name="checkpoint")
                self._writer.start()
        return state

    def begin(self, state: TrainState) -> TrainState:
        """Check that the optimizer can be resumed, before it has made an update."""
        check_resumable(state)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Save the state if it isn't saved yet, and wait until it is."""
        self(state)
        main_only(self._wait, "the hook checkpoint")
        return state

    def poll(self, state: TrainState) -> TrainState:
        """Raise what has gone wrong in the background, at every boundary."""
        if self._error is not None:
            self._wait()
        return state

    def close(self) -> None:
        """Wait for the writer, when the run is left; what goes wrong with that is logged, since nobody is there to catch it."""
        try:
            self._wait()
        except Exception as error:
            logging.getLogger("fnloop").error("checkpoint: the last one could not be written: %s", error)

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
        self._writer, error, self._error = None, self._error, None
        if error is not None:
            self._saved = None
            raise error

    def _check_best(self, state: TrainState) -> None:
        """Raise if an evaluation has other metrics than the one that the best are kept by."""
        if self.best is None or RECORD not in state.news or self.best in state.history:
            return
        metrics, loader = state.history[-1].metrics, self.best.split("/", 1)[0]
        if any(name.startswith(f"{loader}/") for name in metrics):
            raise KeyError(f"checkpoint: there is no metric {self.best!r}; there are: {', '.join(metrics)}")

    def _write_and_note(self, what: Contents, state: TrainState) -> None:
        try:
            self._write(what, state)
        except BaseException as error:
            self._error = error

    def _write(self, what: Contents, state: TrainState) -> None:
        facts = {"best": self.best, "mode": self.mode} if self.best else {}
        written = write(what, self.folder / _name(state), facts)
        prune(written, self.keep, self.best, self.mode, self.keep_best)


def _name(state: TrainState) -> str:
    return f"step-{state.step:08d}" + (f"+{state.skipped}" if state.skipped else "")
