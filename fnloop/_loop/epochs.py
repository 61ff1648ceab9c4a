"""The loop: epochs of updates. Top to bottom, this is what ``fit`` does.

    position the generators -> step -> fetch the next window -> boundary

The next window is fetched while the device still works on the step. A boundary is the point between
two updates (see ``Run.boundary``): evaluation, records and hooks happen there and nowhere else, so
they never see a half-finished state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from fnloop._backend.memory import reusing_pages
from fnloop._core.rng import isolated, mix, torch_seeder
from fnloop._core.run_info import Stopwatch
from fnloop._core.snapshot import detached_from_run
from fnloop._core.state import TrainState, check_not_stale, consume
from fnloop._core.stops import BOUNDARY
from fnloop._data.prefetch import windows
from fnloop._data.window import END
from fnloop._hooks.wrapper import Hook
from fnloop._loop.errors import check_returned, inform_on_main, warn_on_main
from fnloop._loop.interrupts import Interrupts, handling
from fnloop._loop.peers import is_alone
from fnloop._loop.phases import end_phase, has_left, is_newest
from fnloop._loop.plan import Plan
from fnloop._loop.run import LOADER, Run
from fnloop._loop.survival import Survival
from fnloop._step.engine import engine_of

__all__ = ["train_epochs"]


def train_epochs(
    plan: Plan, state: TrainState, interrupts: Interrupts | None = None
) -> Iterator[TrainState]:
    """Yield the state after every epoch, and at the end of the run.

    Args:
        plan: what to do.
        state: the state to begin with.
        interrupts: where signals are recorded; None handles them during each epoch only.
    """
    __tracebackhide__ = True
    tell = inform_on_main if plan.passes_over(state) else warn_on_main
    state = plan.begin(state)
    past = plan.is_past(state)
    if past or (plan.is_over(state) and not has_left(state, plan.phase)):
        tell(state, plan.why_nothing_to_do(state))
        # Past its target it is in the middle of another run, of a later call of the same script:
        # what is left is that run's.
        yield state if past else _settle(plan, state)
        return
    run, backend = Run(plan, state), state.backend
    window, source = plan.step.window, run.source
    batch_size, position = source.batch_size or 0, torch_seeder(backend.device)
    recent, stopwatch = plan.record_every is not None, run.info.stopwatch
    with _closing(plan.hooks, stopwatch):
        while True:
            with isolated(backend.device), _listening(state, interrupts) as run.interrupts:
                with reusing_pages(backend.device), Survival(run):
                    seed, state = run.begin_epoch(), run.state
                    at = (state.epoch, state.batch, state.samples)
                    size = None if window == 1 else source.rounds_in_update(plan.window_in(state))
                    nothing: Any = None
                    batch = feed = step = nothing
                    # An epoch that will not be trained is not begun, but one that was left in the
                    # middle is, for the position of its loader and its generators.
                    over = run.only_ends() and not state.batch
                    if not over:
                        feed = windows(source, size, backend.device, *at, plan.prefetch)
                        batch = stopwatch.next(feed, END)
                        over = run.enter(seed, ended=batch is END)
                        step = engine_of(run.state).read_from(source, plan.step.train, window)
                    while not over:
                        state = run.state
                        position(mix(seed, state.batch))
                        taken = backend.data_size * (1 if window == 1 else len(batch))
                        run.taken = min(taken, run.info.window)  # without padding, if known
                        run.phase = None  # the step
                        new, out = step(state, batch)
                        run.state = consume(new, out, run.taken, run.taken * batch_size, recent)
                        run.phase, run.unfinished, run.left_out = LOADER, BOUNDARY, out.skip
                        batch = stopwatch.next(feed, END)
                        over = run.boundary(ended=batch is END)
                    run.end_epoch(ended=batch is END)
                reached = detached_from_run(run.state)
            if not run.rolled_back or run.is_over():
                yield reached
                check_not_stale(reached)  # the caller may have advanced it
            if run.is_over():
                return
            run.state = attrs.evolve(reached, run=run.info)


def _settle(plan: Plan, state: TrainState) -> TrainState:
    """Let hooks complete what a process left that was killed at the end of this run."""
    if not is_newest(state, plan.phase):
        return state
    state = end_phase(state, plan.phase)
    for hook in plan.hooks:
        state = check_returned(hook, hook.settle(state), "settle")
    return state


@contextlib.contextmanager
def _closing(hooks: Sequence[Hook], stopwatch: Stopwatch) -> Iterator[None]:
    """Close all hooks at the end, even if one of them raises."""
    __tracebackhide__ = True
    with contextlib.ExitStack() as stack:
        stack.callback(stopwatch.end)
        for hook in reversed(hooks):  # the stack calls them back in the order listed
            stack.callback(hook.close)
        yield


def _listening(
    state: TrainState, interrupts: Interrupts | None
) -> contextlib.AbstractContextManager[Interrupts]:
    """Return where signals are recorded during an epoch."""
    return handling(is_alone(state)) if interrupts is None else contextlib.nullcontext(interrupts)
