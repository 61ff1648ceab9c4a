"""The hook that saves a run while it trains."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.atomic_write import Writing, remove_leftovers, write_checkpoint
from fnloop._checkpoint.files import manifest_or_none
from fnloop._checkpoint.format import PARTS, CheckpointError, Contents
from fnloop._checkpoint.history_blocks import make_history_encoder, write_blocks
from fnloop._checkpoint.parts import parts_to_save
from fnloop._checkpoint.retention import (
    CHECKPOINT_NAME,
    candidates,
    claim_folder,
    prune,
    read_claim,
    release_claim,
    run_of,
)
from fnloop._checkpoint.save import collect_contents, position_of
from fnloop._checkpoint.shared import warn_unless_shared
from fnloop._checkpoint.shared_write import SharedWrite
from fnloop._checkpoint.trial import check_resumable
from fnloop._core.events import RECORD
from fnloop._core.history import History
from fnloop._core.monitor import better, check_monitored, metrics_here, mode_of
from fnloop._core.phase import SINCE
from fnloop._core.state import TrainState
from fnloop._display.checks import choice, describe, flag, folder_path, integer, metric_name
from fnloop._display.log import log
from fnloop._hooks.wrapper import Hook

__all__ = ["checkpoint"]

HOOK = "the hook checkpoint"  # its name in messages about processes that wait


class checkpoint(Hook):
    """Save a checkpoint: ``every(epochs=1)(checkpoint("runs/a", best="valid/loss"))``.

    List it after the other hooks, but before ``requeue``: what a later hook changes at that
    boundary is not in the checkpoint. The state is also saved when a run ends, for any reason
    except an exception (see ``on_exception``), and on SIGUSR1. Each checkpoint is a folder such as
    ``step-00000812`` in ``folder``, which is either complete or absent. What is kept is decided by
    what is on the disk, so it also holds after a resume. :func:`fnloop.resume` continues from the
    newest. With several processes the main process writes; of a sharded model each process writes
    its own part.

    A folder belongs to one run. A run that was not resumed from it is refused before its first
    update, and nothing in the folder is touched.

    Args:
        folder: where to save; created if it does not exist. It is made absolute at once, with ``~``
            expanded.
        keep: how many of the newest to keep, at least 1; None keeps all.
        best: a metric such as "valid/loss", of which the best checkpoints are kept too. A
            checkpoint between two evaluations has no value of it, so the state of the next
            evaluation is saved as well. NaN is never the best. The untrained model, if it is
            evaluated, counts if it is saved: ``(at_start() | every(epochs=1))(checkpoint(...))``.
        mode: "min" if lower is better, "max" if higher is; by default as the name of the metric
            says.
        keep_best: how many of the best to keep; at least 1.
        since: which are the best: those of each "phase", if the run has phases, or of the whole
            "run".
        background: copy the state, and write it while training continues. The copy is made in host
            memory, or first on the GPU if that has room for it, which takes milliseconds. At most
            one checkpoint is written at a time. An error is raised at the next boundary, and the
            end of the run waits for the writer. A checkpoint of a sharded model is complete at the
            boundary at which all processes have written; an exception before leaves it out.
        on_exception: also save when the run fails, as ``step-00000812-exception_ValueError``: the
            last consistent state, if there is one and it is not saved yet. The exception is raised
            as it is. In one process only.
        only: the parts to save, as in :func:`fnloop.save`; all of them by default. A run cannot be
            resumed from such a partial checkpoint: list two hooks, ``checkpoint("runs/a")`` and
            ``checkpoint("runs/a/best", best="valid/loss", only=("model",))``.
        named: metrics to put into the names, where they were measured: ``("valid/loss",)`` names
            ``step-00000812-valid-loss=0.4312``.

    Returns:
        A hook.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
        CheckpointError: when a run begins: another run has checkpoints in the folder, or the
            optimizer cannot be saved and restored exactly. When it saves: something in the state
            cannot be saved.
        RuntimeError: when it saves: the weights differ between processes. Nothing is saved then.

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
        since: str = "phase",
        background: bool = False,
        on_exception: bool = False,
        only: Sequence[str] | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self.folder, self._typed = folder_path("checkpoint", "folder", folder), os.fspath(folder)
        if keep is not None:
            integer("checkpoint", "keep", keep, "a number of checkpoints, or None for all")
        self.keep = keep
        self.keep_best = integer("checkpoint", "keep_best", keep_best, "a number of checkpoints")
        self.since = choice("checkpoint", "since", since, SINCE)
        self.background = flag("checkpoint", "background", background)
        self.on_exception = flag("checkpoint", "on_exception", on_exception)
        self.best = None if best is None else metric_name("checkpoint", "best", best)
        self.parts = parts_to_save("checkpoint", only)
        self.named = _read_names(named)
        if mode is not None:
            better(0.0, 0.0, mode)  # checks it
        if best is None and (mode is not None or keep_best != 1 or since != "phase"):
            raise ValueError(
                "checkpoint ranks by nothing, so mode, keep_best and since mean nothing: add "
                'best="valid/loss", or the metric that ranks'
            )
        self.mode = "min" if self.best is None else mode_of("checkpoint", self.best, mode)
        self._awaits_metric = False  # whether a save since the last evaluation lacks ``best``
        self._writer: threading.Thread | None = None
        self._shared: SharedWrite | None = None  # which all processes write in the background
        self._error: BaseException | None = None  # of the writer
        self._saved: weakref.ref[TrainState] | None = None  # the state that was saved last
        self._position: list[int] | None = None  # of the state that this run saved last
        self._encode_history = make_history_encoder()
        self._known_blocks: set[str] = set()
        self._buffers: Contents | None = None  # host memory of the last copy, for reuse

    @property
    def monitors(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metrics that rank and name the checkpoints."""
        return self.named if self.best is None else (self.best, *self.named)

    def __repr__(self) -> str:
        best = f", best={self.best!r}, mode={self.mode!r}" if self.best else ""
        since = f", since={self.since!r}" if self.since != "phase" else ""
        only = f", only={self.parts!r}" if self.parts != PARTS else ""
        named = f", named={self.named!r}" if self.named else ""
        return f"checkpoint({self._typed!r}, keep={self.keep}{best}{since}{only}{named})"

    # --- called by the run

    def begin(self, state: TrainState) -> TrainState:
        """Claim the folder for this run, and check that the optimizer can be resumed.

        Raises:
            CheckpointError: another run has checkpoints there, or the optimizer cannot be resumed.
        """
        if "optimizer" in self.parts:
            check_resumable(state)
        self._awaits_metric = on_main_process(lambda: self._claim(state), HOOK)
        warn_unless_shared(self.folder)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        self._complete_shared()
        self._wait()
        self._check_metric(state)
        if self._saved is None or self._saved() is not state:
            self._saved, self._awaits_metric = weakref.ref(state), not self._has_metric(state)
            self._position = position_of(state)
            self._save(state)
        return state

    def poll(self, state: TrainState) -> TrainState:
        """Raise an error of the writer, and save the evaluation that an earlier save waits for."""
        if self._shared is not None and self._shared.poll():
            self._complete_shared()
        if self._error is not None:
            self._wait()
        self._check_metric(state)
        return self(state) if self._awaits_metric and self._has_metric(state) else state

    def flush(self, state: TrainState) -> TrainState:
        """Save the state if it is not saved yet, and wait until it is written."""
        self(state)
        self._complete_shared()
        on_main_process(self._wait, HOOK)
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Save the last consistent state of a failed run, if asked for and not saved yet."""
        self._abandon_shared()
        self._wait()
        if self.on_exception and self._position != position_of(state):
            name = f"{_name_of(state)}-exception_{type(error).__name__}"
            self._write(self._collect(state), state.history, name)

    def settle(self, state: TrainState) -> TrainState:
        """Remove what a process left that was killed at the end of this run."""
        if state.backend.main and self.folder.is_dir():
            remove_leftovers(self.folder, CHECKPOINT_NAME)
        return state

    def close(self) -> None:
        """Wait for the writer when the run is left. An error can only be logged here."""
        self._abandon_shared()
        try:
            self._wait()
        except Exception as error:
            log.error("checkpoint: the last checkpoint could not be written: %s", error)

    # --- the metric that ranks

    def _check_metric(self, state: TrainState) -> None:
        for metric in self.monitors if RECORD in state.events else ():
            check_monitored("checkpoint", metric, state)

    def _has_metric(self, state: TrainState) -> bool:
        """Return whether the metric was measured at this boundary, or none was asked for."""
        return self.best is None or self.best in metrics_here(state)

    # --- writing

    def _claim(self, state: TrainState) -> bool:
        """Claim the folder. Return whether its newest checkpoint lacks the metric that ranks."""
        claim_folder(self.folder, state.run_id)
        manifests = map(manifest_or_none, candidates(self.folder))
        newest = next((manifest for manifest in manifests if manifest is not None), None)
        if newest is None:
            self._position = None
            return False
        self._position = newest["position"]
        return self.best is not None and self.best not in newest["measured"]

    def _save(self, state: TrainState) -> None:
        contents, history = self._collect(state), state.history
        name = _name_of(state) + _name_metrics(state, self.named)
        if contents.index:
            self._save_shared(contents, history, name)
        elif not self.background:
            on_main_process(lambda: self._write(contents, history, name), HOOK)
        elif state.backend.main:
            to_host = contents.copy_aside(self._buffers)
            self._start(lambda: self._write_copy(to_host, history, name))

    def _collect(self, state: TrainState) -> Contents:
        return collect_contents(state, self._encode_history, self.parts)

    def _wait(self) -> None:
        """Wait for the writer, and raise its error."""
        if self._writer is not None:
            self._writer.join()
        self._writer, error, self._error = None, self._error, None
        if error is not None:
            self._saved = None
            raise error

    def _start(self, write: Callable[[], None]) -> None:
        """Write while training continues."""

        def write_and_note() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=write_and_note, name="checkpoint")
        self._writer.start()

    def _write_copy(self, to_host: Callable[[], Contents], history: History, name: str) -> None:
        copied = self._buffers = to_host()
        self._write(copied, history, name)

    def _write(self, contents: Contents, history: History, name: str) -> None:
        path, ranking = self._prepare(contents, history, name)
        self._tidy(write_checkpoint(contents, path, ranking, in_own_folder=True), contents)

    def _prepare(
        self, contents: Contents, history: History, name: str
    ) -> tuple[Path, dict[str, object]]:
        """Return where to write, and what the manifest says in addition. Write the history."""
        run, path = contents.facts["run"], self.folder / name
        existing = manifest_or_none(path)
        if existing is not None and run_of(path, existing) != run:
            raise CheckpointError(
                f"{path} is a checkpoint of another run: give each run a folder of its own"
            )
        if read_claim(self.folder) not in (None, run):
            raise CheckpointError(
                f"another run has begun in {self.folder}: give each run a folder of its own"
            )
        write_blocks(self.folder, contents.facts["blocks"], history, self._known_blocks)
        names = ("best", "mode", "since")
        return path, {name: getattr(self, name) for name in names} if self.best else {}

    def _tidy(self, written: Path, contents: Contents) -> None:
        """Remove what a checkpoint that was written replaces."""
        release_claim(self.folder)
        run = contents.facts["run"]
        prune(written, run, self.keep, self.best, self.mode, self.keep_best, self.since)

    # --- writing by all processes

    def _save_shared(self, contents: Contents, history: History, name: str) -> None:
        """Write a checkpoint, each process its own files; in the background, begin to."""

        def begin() -> Writing:
            path, ranking = self._prepare(contents, history, name)
            return Writing(contents, path, ranking, in_own_folder=True)

        if self.background:
            contents = self._buffers = contents.copied(self._buffers)
        shared = self._shared = SharedWrite(contents, begin, HOOK)
        if self.background:
            shared.start()
        else:
            shared.write()
            self._complete_shared()
            on_main_process(self._wait, HOOK)

    def _complete_shared(self) -> None:
        """Complete what all processes write, if anything. Every process must call it."""
        if (shared := self._shared) is None:
            return
        try:
            files = shared.agree()
        except BaseException:
            self._saved = None
            shared.abandon()
            raise
        finally:
            self._shared = None
        if shared.writing is not None:
            self._start(lambda: self._tidy(shared.commit(files), shared.contents))

    def _abandon_shared(self) -> None:
        """Give up what all processes write, because the others may have ended."""
        shared, self._shared = self._shared, None
        if shared is not None and shared.abandon():
            log.error("checkpoint: the last checkpoint was not completed by all processes")


def _read_names(named: Sequence[str]) -> tuple[str, ...]:
    if isinstance(named, str) or not isinstance(named, Sequence):
        raise TypeError(
            'checkpoint expects named as a tuple of metrics, such as ("valid/loss",); got '
            f"{describe(named)}"
        )
    return tuple(metric_name("checkpoint", "named", name) for name in named)


def _name_metrics(state: TrainState, named: Sequence[str]) -> str:
    """Return the part of a name that shows metrics, those that were recorded at this boundary."""
    values = metrics_here(state)
    return "".join(
        f"-{re.sub(r'[^A-Za-z0-9_.]+', '-', name)}={values[name]:.4g}"
        for name in named
        if name in values
    )


def _name_of(state: TrainState) -> str:
    return f"step-{state.step:08d}" + (f"+{state.skipped}" if state.skipped else "")
