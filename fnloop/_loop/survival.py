"""What becomes of a run in which an exception is raised: no update that was made is lost."""

from __future__ import annotations

from types import TracebackType

import attrs

from fnloop._core.events import END, EPOCH
from fnloop._core.state import TrainState, newest, owns_handles
from fnloop._core.stops import BOUNDARY, FLUSH, INTERRUPTED, End, Left, end_in, ends_run
from fnloop._loop.errors import explain, tell_hooks
from fnloop._loop.interrupts import Abandoned
from fnloop._loop.peers import is_alone
from fnloop._loop.run import LOADER, Run
from fnloop._step.layers import STEP

__all__ = ["Survival"]


class Survival:
    """Ends a run normally on an interruption; adds a note to any other exception.

    The note says where it happened; the exception also gets the state that was reached.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        __tracebackhide__ = True
        return error is not None and _survive(self._run, error)


def _survive(run: Run, error: BaseException) -> bool:
    """Return whether the run ends as it would without this error: after a signal."""
    __tracebackhide__ = True
    state, phase = run.state, run.phase
    if phase is None:  # the step may have applied its update already
        state = newest(state, run.taken, run.taken * (run.source.batch_size or 0))
    applied = state is not run.state
    state = attrs.evolve(state, left=_left(state, BOUNDARY if applied else run.unfinished))
    # With several processes, fail: the others cannot know of it, and the launcher ends them.
    alone = is_alone(state)
    interrupted = _is_interruption(run, error) and owns_handles(state)
    lost = alone and (interrupted or _has_lost_its_workers(run, error))
    if lost or isinstance(error, Abandoned):
        run.interrupts.done, run.rolled_back = True, False
        if state.stop is None or end_in(state.left) is not None:
            state = attrs.evolve(state, stop=run.interrupts.stop or INTERRUPTED)
        run.state = attrs.evolve(state, left=()) if state.left == (FLUSH,) else state
        run.flush_hooks()
        return True
    batch = run.batches_in_epoch if EPOCH in state.events else state.batch
    last = explain(error, state, run.plan.step, phase, batch)
    run.peers.explain(error)
    if last is not None and applied:
        error.add_note(
            "the update was applied before this; middleware around it may not have finished "
            "their work"
        )
    elif last is not None and alone and isinstance(error, Exception):
        tell_hooks(run.plan.hooks, last, error)
    return False


def _left(state: TrainState, unfinished: object) -> Left:
    """Return what the run leaves, given what it was about to finish."""
    end = End(state.stop if ends_run(state.stop) else None)
    if unfinished is BOUNDARY:
        return (BOUNDARY,) if end.stop is None else (BOUNDARY, end)
    if unfinished is FLUSH:
        return state.left or (FLUSH,)
    return (end,) if unfinished is END else state.left


def _is_interruption(run: Run, error: BaseException) -> bool:
    """Return whether Ctrl-C came where no handler could be installed."""
    return isinstance(error, KeyboardInterrupt) and run.interrupts.stop is None


def _has_lost_its_workers(run: Run, error: BaseException) -> bool:
    """Return whether the signal that stops the run has killed the workers of a loader.

    No further batch is needed then.
    """
    loading = isinstance(run.phase, str) and run.phase in (LOADER, *run.evaluated)
    if not (loading and isinstance(error, Exception) and run.interrupts.stop is not None):
        return False
    return run.plan.step.layer_of(error) == STEP
