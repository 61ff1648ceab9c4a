"""How far a run is, how fast it is, and how long it will still take."""

from __future__ import annotations

import math
import time

import attrs

from fnloop._core.events import EPOCH
from fnloop._core.history import records_since
from fnloop._core.history_table import is_evaluated, is_row
from fnloop._core.record import Record, number_of_epoch
from fnloop._core.run_info import RunInfo
from fnloop._core.state import TrainState

__all__ = ["Entry", "Pace", "Position", "is_over", "is_stream"]


@attrs.frozen
class Entry:
    """A new record.

    Args:
        record: the record.
        epoch: the number, from 1, of its epoch; 0 before the first update.
        epochs: the number of the last epoch, or None if there is no such target.
        seconds: the time since the row above it, or since the run began.
        skipped: updates skipped so far.
    """

    record: Record
    epoch: int
    epochs: int | None
    seconds: float
    skipped: int = 0


@attrs.frozen
class Position:
    """Where a run is.

    Args:
        epoch: the number, from 1, of the epoch that is running or has just ended.
        epochs: the number of the last one, or None if there is no such target.
        step: updates applied.
        done: updates of this epoch, including skipped ones.
        total: updates of this epoch at its end, or None if that is unknown.
        rate: updates per second of this epoch, without evaluations and hooks; None if unknown.
        left: the seconds until the end of the run; None if that is unknown.
        skipped: updates skipped so far.
    """

    epoch: int
    epochs: int | None
    step: int
    done: int
    total: int | None
    rate: float | None = None
    left: float | None = None
    skipped: int = 0


@attrs.frozen
class _Evaluated:
    """The newest evaluation of a loader.

    Args:
        seconds: how long it took.
        before: the updates that had been made at the one before it, or as the run began.
        newest: the updates that had been made at it.
    """

    seconds: float
    before: int
    newest: int


class Pace:
    """Follows a run from its first boundary to its last.

    Args:
        state: a state of the run, of before its first update.
    """

    def __init__(self, state: TrainState) -> None:
        self.began = time.monotonic()
        self._first = self._count(state)
        self._known = len(state.history)  # how many records are taken into account
        self._is_stream = is_stream(state)
        self._ended = state.epoch
        # Where the running epoch began, or a later step of it.
        self._ended_at = state.step - bool(state.batch)
        rows = (record.seconds for record in reversed(state.history) if is_row(record))
        self._row_at = next(rows, 0.0)  # the seconds of the newest row
        self._length: int | None = None  # of an epoch, if it is not known beforehand
        self._evaluated: dict[str, _Evaluated] = {}  # by loader
        self._began: dict[str, float] = {}  # when the evaluation of each loader of a record did
        self._evaluations = 0.0  # seconds of all evaluations
        self._begin_epoch(state, _done(state))

    def look(self, state: TrainState) -> Position:
        """Return the position at a boundary. After the end of an epoch, measure the next one."""
        run, ended = _run(state), EPOCH in state.events
        if state.epoch - ended != self._epoch or (not ended and _done(state) < self._initial):
            self._begin_epoch(state, 0 if ended else _done(state))  # of a snapshot, or not seen
        made = self._count(state) - self._epoch_first
        done = (run.steps_per_epoch or self._initial + made) if ended else _done(state)
        made, seconds = done - self._initial, self._active(state)
        position = Position(
            state.epoch + (not ended),
            run.epochs,
            state.step,
            done,
            done if ended else self._total(state, done),
            made / seconds if made > 0 and seconds > 0 else None,
            self._left(state, 0 if ended else done),
            state.skipped,
        )
        if ended:
            self._length = self._length if self._initial else done
            self._begin_epoch(state, 0)
        return position

    def _begin_epoch(self, state: TrainState, done: int) -> None:
        """Measure the rate from here on; ``done`` updates of the epoch were made before."""
        self._epoch, self._initial = state.epoch, done
        self._epoch_first = self._count(state)
        self._trained = _run(state).stopwatch.trained
        self._epoch_began: float | None = None  # when it was, as far as hooks can know
        self._evaluations_before = self._evaluations

    def _active(self, state: TrainState) -> float:
        """Return the seconds of this epoch without evaluations and hooks.

        On an accelerator, hooks count: the device may still be at work on updates, and it is a hook
        that waits for it.
        """
        now, trained = time.monotonic(), _run(state).stopwatch.trained - self._trained
        if self._epoch_began is None:
            self._epoch_began = now - trained
        if state.backend.device.type == "cpu":
            return trained
        return now - self._epoch_began - (self._evaluations - self._evaluations_before)

    def _count(self, state: TrainState) -> int:
        return state.step + state.skipped

    def begin_evaluation(self, loader: str) -> None:
        """Note that the evaluation of a loader begins."""
        self._began[loader] = time.monotonic()

    def left_in_evaluation(
        self,
        state: TrainState,
        loader: str,
        before: Position,
        trained: float,
        passed: float,
        rest: float | None,
    ) -> float | None:
        """Return how many seconds the rest of a run takes that is evaluating, if that is known.

        Args:
            state: the state that is evaluated.
            loader: the name of the loader.
            before: the position at the last boundary that was looked at.
            trained: the seconds from then to the beginning of the evaluation.
            passed: the seconds since it began.
            rest: the seconds that the rest of it takes, or None.
        """
        if before.left is None:
            return None
        left = max(before.left - trained, 0.0)
        if loader in self._evaluated:  # this one is a part of the estimate
            return max(left - passed, rest or 0.0)
        if rest is None:
            return None
        updates = self._updates_left(state, 0 if EPOCH in state.events else _done(state)) or 0
        between = self._count(state) - self._first or self._usual_length(state) or math.inf
        return left + rest + updates // between * (passed + rest)

    def read_records(self, state: TrainState) -> list[Entry]:
        """Return the new records. Call this before :meth:`look`."""
        history, epochs = state.history, _run(state).epochs
        self._known = min(self._known, len(history))  # a hook may have returned a snapshot
        new = []
        for record in records_since(history, self._known):
            number = number_of_epoch(record, self._ended, self._ended_at)
            seconds = max(record.seconds - self._row_at, 0.0)
            new.append(Entry(record, number, epochs, seconds, state.skipped))
            if record.epoch > self._ended:
                self._ended, self._ended_at = record.epoch, record.step
            self._row_at = record.seconds if is_row(record) or self._is_stream else self._row_at
            if loaders := {k.partition("/")[0]: None for k in record.metrics if is_evaluated(k)}:
                self._note_evaluations(state, [*loaders])
        self._known = len(history)
        return new

    def _note_evaluations(self, state: TrainState, loaders: list[str]) -> None:
        """Note when the loaders of a record were evaluated, and how long each of them took."""
        took, now = _run(state).stopwatch.evaluated or 0.0, self._count(state)
        self._evaluations += took
        began = {loader: at for loader, at in self._began.items() if loader in loaders}
        self._began = {}
        if began.keys() != {*loaders}:  # not all were seen: let each take as long
            began = {loader: i * took / len(loaders) for i, loader in enumerate(loaders)}
        ends = [*[*began.values()][1:], next(iter(began.values())) + took]
        for (loader, at), end in zip(began.items(), ends, strict=True):
            known = self._evaluated.get(loader)
            newest = self._first if known is None else known.newest
            self._evaluated[loader] = _Evaluated(max(end - at, 0.0), newest, now)

    def _usual_length(self, state: TrainState) -> int | None:
        """Return the updates of an epoch, if they are known."""
        return _run(state).steps_per_epoch or self._length

    def _total(self, state: TrainState, done: int) -> int | None:
        """Return the updates of the epoch, or those until the target, if it is reached before."""
        run, length = _run(state), _run(state).steps_per_epoch or self._length
        if run.total_steps is None:
            return length
        until = done + max(run.total_steps - state.step, 0)
        return until if length is None else min(length, until)

    def _left(self, state: TrainState, done: int) -> float | None:
        """Return how many seconds the rest of the run takes, if that is known."""
        made, updates = self._count(state) - self._first, self._updates_left(state, done)
        if updates is None or made <= 0:
            return None
        passed = time.monotonic() - self.began - self._evaluations
        seconds = updates * passed / made
        end = self._count(state) + updates
        for each in self._evaluated.values():
            # After one at the start alone, assume that there is one at the end of each epoch.
            if between := each.newest - each.before or self._usual_length(state):
                seconds += (end - each.newest) // between * each.seconds
        return max(seconds, 0.0)

    def _updates_left(self, state: TrainState, done: int) -> int | None:
        """Return how many updates the run will still make, if that is known."""
        run, left = _run(state), []
        length = run.steps_per_epoch or self._length
        if run.epochs is not None and length is not None:
            left.append((run.epochs - state.epoch) * length - done)
        if run.total_steps is not None:
            left.append(run.total_steps - state.step)
        return max(min(left), 0) if left else None


def is_over(state: TrainState) -> bool:
    """Return whether a run is at its end."""
    run = _run(state)
    reached = run.epochs is not None and state.epoch >= run.epochs
    made = run.total_steps is not None and state.step >= run.total_steps
    return state.stop is not None or reached or made


def _run(state: TrainState) -> RunInfo:
    return state.run or RunInfo()


def _done(state: TrainState) -> int:
    """Return the updates of the running epoch, including skipped ones."""
    return -(-state.batch // _run(state).window)


def is_stream(state: TrainState) -> bool:
    """Return whether there may be no other records than those of intervals."""
    run = state.run
    return run is not None and run.batches_per_epoch is None and not run.evaluated
