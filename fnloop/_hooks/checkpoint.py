"""Saving a run while it trains."""

from __future__ import annotations

import logging
import os
import threading
import weakref

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.files import clean, manifest_of, write
from fnloop._checkpoint.format import CheckpointError, Contents
from fnloop._checkpoint.history_blocks import encoder, write_blocks
from fnloop._checkpoint.retention import NAME, candidates, claim, claimed, prune, release, run_of
from fnloop._checkpoint.save import contents, position_of
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.history import History
from fnloop._core.monitor import better, check_monitored, mode_of
from fnloop._core.state import RECORD, TrainState
from fnloop._display.checks import described, folder_path, integer, metric_name

__all__ = ["checkpoint"]


class checkpoint:
    """Save a checkpoint: ``every(epochs=1)(checkpoint("runs/a", best="valid/loss"))``.

    The state is also saved when a run ends, for any reason but an exception (see ``on_exception``), and on SIGUSR1. Each
    checkpoint is a folder ``step-00000812`` in ``folder``, whole or not there. What is kept is decided by what is on the disk,
    so it holds after a resume too. :func:`fnloop.resume` continues from the newest. With several processes the main one writes.

    A folder belongs to one run. A run that was not resumed from it is refused before its first update, and nothing in it is
    touched.

    Args:
        folder: where to; made if it is not there. It is made absolute at once, with ``~`` expanded.
        keep: how many of the newest to keep, at least 1; None keeps all.
        best: a metric such as "valid/loss", of which the best are kept too. A checkpoint that falls between two evaluations has
            no value of it; the state of the next evaluation is saved then as well. NaN is never the best.
        mode: "min" if lower is better, "max" if higher; by default what the metric's name says.
        keep_best: how many of the best to keep; at least 1.
        background: copy the state to host memory, and write it beside training. At most one is written at a time; what goes
            wrong there is raised at the next boundary, and the end of the run waits.
        on_exception: also save when the run fails, as ``step-00000812-exception_ValueError``: the last consistent state, if
            there is one and it is not saved yet. The exception is raised as it is. In one process only.

    Returns:
        A hook.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        CheckpointError: when a run begins: another run has checkpoints in the folder, or the optimizer can't be saved and
            restored exactly. When it saves: something in the state can't be saved.

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
        keep: int | None = 3,
        best: str | None = None,
        mode: str | None = None,
        *,
        keep_best: int = 1,
        background: bool = False,
        on_exception: bool = False,
    ) -> None:
        self.folder, self._typed = folder_path("checkpoint", "folder", folder), os.fspath(folder)
        self.keep = (
            None
            if keep is None
            else integer("checkpoint", "keep", keep, "a number of checkpoints, or None for all")
        )
        self.keep_best = integer("checkpoint", "keep_best", keep_best, "a number of checkpoints")
        for name, value in (("background", background), ("on_exception", on_exception)):
            if not isinstance(value, bool):
                raise TypeError(
                    f"checkpoint expects {name} as True or False; got {described(value)}"
                )
        self.background, self.on_exception = background, on_exception
        self.best = None if best is None else metric_name("checkpoint", "best", best)
        if mode is not None:
            better(0.0, 0.0, mode)  # checks it
        self.mode = "min" if self.best is None else mode_of("checkpoint", self.best, mode)
        self._owed = False  # whether a save was due since the last evaluation, which the metric is not known of
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved: weakref.ref[TrainState] | None = None  # the state that was saved last
        self._encode_history, self._blocks = encoder(), set()
        self._position: list[int] | None = None  # of the state that was saved last, by this run
        self._buffers: Contents | None = None  # host memory of the copy before, to copy into again

    @property
    def monitors(self) -> str | None:
        """The metric that the best are kept by."""
        return self.best

    def __repr__(self) -> str:
        best = f", best={self.best!r}, mode={self.mode!r}" if self.best else ""
        return f"checkpoint({self._typed!r}, keep={self.keep}{best})"

    def begin(self, state: TrainState) -> TrainState:
        """Claim the folder for this run, and check that the optimizer can be resumed.

        Raises:
            CheckpointError: another run has checkpoints there, or the optimizer can't be resumed.
        """
        check_resumable(state)
        self._owed = on_main_process(lambda: self._claim(state), "the hook checkpoint")
        return state

    def _claim(self, state: TrainState) -> bool:
        """Claim the folder; return whether its newest checkpoint has no value of the metric that the best are kept by."""
        claim(self.folder, state.run_id)
        manifest = next(
            (m for path in candidates(self.folder) if (m := manifest_of(path)) is not None), None
        )
        self._position = None if manifest is None else manifest["position"]
        return (
            manifest is not None and self.best is not None and self.best not in manifest["measured"]
        )

    def __call__(self, state: TrainState) -> TrainState:
        self._wait()
        if self.best is not None and RECORD in state.events:
            check_monitored("checkpoint", self.best, state)
        if self._saved is None or self._saved() is not state:
            self._saved, self._owed = weakref.ref(state), not self._has_value(state)
            self._position = position_of(state)
            what, history = contents(state, self._encode_history), state.history
            if not self.background:
                on_main_process(
                    lambda: self._write(what, history, _name(state)), "the hook checkpoint"
                )
            elif state.backend.main:
                what = self._buffers = what.copied(self._buffers)
                arguments = (what, history, _name(state))
                self._writer = threading.Thread(
                    target=self._write_and_note, args=arguments, name="checkpoint"
                )
                self._writer.start()
        return state

    def poll(self, state: TrainState) -> TrainState:
        """Raise what has gone wrong in the background, and save the evaluation that an earlier save has waited for."""
        if self._error is not None:
            self._wait()
        if self.best is not None and RECORD in state.events:
            check_monitored("checkpoint", self.best, state)
        return self(state) if self._owed and self._has_value(state) else state

    def flush(self, state: TrainState) -> TrainState:
        """Save the state if it is not saved yet, and wait until it is."""
        self(state)
        on_main_process(self._wait, "the hook checkpoint")
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Save the last consistent state of a run that has failed, if that was asked for and it is not saved yet."""
        self._wait()
        if self.on_exception and self._position != position_of(state):
            name = f"{_name(state)}-exception_{type(error).__name__}"
            self._write(contents(state, self._encode_history), state.history, name)

    def settle(self, state: TrainState) -> None:
        """Clear up what a process has left that was killed at the end of this run."""
        if state.backend.main and self.folder.is_dir():
            clean(self.folder, NAME)

    def close(self) -> None:
        """Wait for the writer when the run is left. What goes wrong with that is logged, since it can't be caught any more."""
        try:
            self._wait()
        except Exception as error:
            logging.getLogger("fnloop").error(
                "checkpoint: the last one could not be written: %s", error
            )

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
        self._writer, error, self._error = None, self._error, None
        if error is not None:
            self._saved = None
            raise error

    def _has_value(self, state: TrainState) -> bool:
        """Return whether the metric that the best are kept by was measured at this boundary, or none was asked for."""
        return self.best is None or (
            RECORD in state.events and self.best in state.history[-1].metrics
        )

    def _write_and_note(self, what: Contents, history: History, name: str) -> None:
        try:
            self._write(what, history, name)
        except BaseException as error:
            self._error = error

    def _write(self, what: Contents, history: History, name: str) -> None:
        run, path = what.facts["run"], self.folder / name
        there = manifest_of(path)
        if there is not None and run_of(path, there) != run:
            raise CheckpointError(
                f"{path} is a checkpoint of another run: give each run a folder of its own"
            )
        if claimed(self.folder) not in (None, run):
            raise CheckpointError(
                f"another run has begun in {self.folder}: give each run a folder of its own"
            )
        write_blocks(self.folder, what.facts["blocks"], history, self._blocks)
        written = write(
            what,
            path,
            {"best": self.best, "mode": self.mode} if self.best else {},
            in_own_folder=True,
        )
        release(self.folder)
        prune(written, run, self.keep, self.best, self.mode, self.keep_best)


def _name(state: TrainState) -> str:
    return f"step-{state.step:08d}" + (f"+{state.skipped}" if state.skipped else "")
