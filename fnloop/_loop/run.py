"""What a run has besides its state, and what happens at its boundaries."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import attrs

from fnloop._core.copies import with_record
from fnloop._core.events import AGAIN, END, EPOCH, PENDING, START
from fnloop._core.left_out import count_left_out
from fnloop._core.left_to_do import events_to_keep, mark_stop, owes_end
from fnloop._core.metrics import Max, read
from fnloop._core.record import Record
from fnloop._core.rng import COMPUTE, fold_in, mix, seed_host
from fnloop._core.running import without_recent
from fnloop._core.state import TrainState, ownership_of
from fnloop._core.stops import is_interruption
from fnloop._core.types import Metric
from fnloop._data.source import num_updates
from fnloop._hooks.wrapper import Hook
from fnloop._loop.beginning import complete, first_state
from fnloop._loop.errors import (
    check_counters,
    check_returned,
    explain_no_batches,
    explain_no_updates,
)
from fnloop._loop.evaluate import open_loader
from fnloop._loop.hints import check_length
from fnloop._loop.interrupts import Abandoned, Interrupts
from fnloop._loop.moments import loaders_due, without_end
from fnloop._loop.peers import is_alone, peers_of
from fnloop._loop.phases import end_phase
from fnloop._loop.plan import Plan, describe
from fnloop._loop.report import (
    asking,
    evaluation_metrics,
    is_full,
    not_in,
    recent_metrics,
    train_metrics,
)
from fnloop._step.engine import engine_of

__all__ = ["LOADER", "Run"]

LOADER = "the training loader"


class Run:
    """A run: the state that it has reached, and everything that is not in the state.

    ``state`` is always safe to continue from if something raises. During an update it is the state
    before the update. At a boundary it is the state before the boundary, until the record has been
    appended; then the one that each hook returned.

    Args:
        plan: what the run is to do.
        state: the state that it begins with.

    Raises:
        ValueError, KeyError: the plan does not fit the state or the loaders.
    """

    def __init__(self, plan: Plan, state: TrainState) -> None:
        __tracebackhide__ = True
        plan.check_position(state)
        self.plan = plan
        self.source = open_loader(plan.loaders.train, state, plan.total)
        evaluated = [name for _, names in plan.evaluations for name in names]
        self.evaluated = {k: open_loader(plan.loaders.evaluated[k], state) for k in evaluated}
        self.peers = peers_of(state)
        self.info = describe(plan, state, self.source, tuple(self.evaluated), self.peers.clock)
        plan.check(self.info)
        self._collectors = [hook for hook in plan.hooks if hook.wants_outputs]
        self.last_step = math.inf if plan.steps is None else plan.steps
        self._quiet = [each.quiet_until for each in plan.triggers]
        self.interrupts = Interrupts()
        self.phase: object = None  # what it is doing; None: the step, whose layers name themselves
        self.taken = 0  # batches that the update takes, in all processes
        self.left_out: str | None = None  # why the newest update was left out, if it was
        self.first_batch = 0  # with which the run began or continued the epoch
        self.batches_in_epoch = 0  # of the epoch that has just ended
        self.before_record = False  # whether an update is applied whose boundary has no record yet
        self.rolled_back = False  # whether a hook went back to a snapshot
        self.asked_at = self.quiet_until = 0.0  # in between nothing is due, unless the epoch ends
        known = state.history[-1].seconds if len(state.history) else 0.0
        self.seconds = max(known, ownership_of(state).seconds)  # of all runs, at the newest record
        self.info.stopwatch.begin(self.seconds)
        self.state = first_state(plan, attrs.evolve(state, run=self.info))
        self._usr1_stops = any(hook.ends_run_on_usr1 for hook in plan.hooks)

    def is_over(self) -> bool:
        """Return whether the run is at its end."""
        return self.plan.is_over(self.state)

    # --- an epoch

    def begin_epoch(self) -> int:
        """Begin an epoch, or continue the one that was left. Return the seed of its draws."""
        self.phase, self.rolled_back = LOADER, False
        self.quiet_until = 0.0
        if len(self.state.history):  # which may be that of another state, after a hook
            self.seconds = max(self.seconds, self.state.history[-1].seconds)
        if self._usr1_stops:
            self.interrupts.stop_on_usr1()
        self.info.stopwatch.newest = None
        if self.plan.step.window > 1 or self.source.lengths is not None:
            self._count_windows()
        self.first_batch, self.batches_in_epoch = self.state.batch, 0
        left = events_to_keep(self.state)
        ahead = self.plan.prefetch * self.info.window
        self.source.positions.begin(self.state.position, ahead)
        self.state = mark_stop(attrs.evolve(self.state, events=left, position=None))
        if self.plan.begins_before(self.state):
            self._start()
        self.info.stopwatch.resume()
        return fold_in(self.state.seed, COMPUTE, self.state.epoch)

    def _count_windows(self) -> None:
        """Note how many batches an update takes in this epoch, and so how many updates it has."""
        window = self.source.batches_in_update(self.plan.window_in(self.state))
        batches = self.source.length_in(self.state.epoch)
        if (window, batches) != (self.info.window, self.info.batches_per_epoch):
            length = None if self.plan.step.carries else num_updates(batches, window)
            self.info = attrs.evolve(
                self.info, window=window, steps_per_epoch=length, batches_per_epoch=batches
            )
            self.state = attrs.evolve(self.state, run=self.info)

    def enter(self, seed: int, ended: bool) -> bool:
        """Install the generators. Return whether the epoch, or the run, is over at once.

        It is called after the first fetch, because the generators that a checkpoint holds were
        captured after the same fetch.

        Args:
            seed: the seed of the epoch's draws.
            ended: whether there was no batch left.
        """
        __tracebackhide__ = True
        state = self.state
        if ended and not state.batch:
            raise ValueError(explain_no_batches(state, self.source))
        if state.generators is not None:
            state.generators.install()
        else:
            rank = state.backend.data_rank
            seed_host(mix(fold_in(seed, rank) if rank else seed, state.batch))
        self.state = attrs.evolve(state, events=state.events - {PENDING})
        if state.stop is not None and PENDING not in state.events:  # by a hook, as the run began
            return True
        if state.ends is not None:
            return self._end_epoch_early(over=False)
        return (ended or PENDING in state.events) and self.boundary(ended)

    def end_epoch(self, ended: bool) -> None:
        """End an epoch, or what was run of it; and the run, if it is over."""
        __tracebackhide__ = True
        self.phase = "the exchange between processes"
        if ended and self.batches_in_epoch and self.state.backend.main:
            check_length(self.source, self.first_batch, self.batches_in_epoch)
        order = self.source.order if ended else 0
        self.peers.barrier(self.state, self.interrupts, order)
        self.state = self.interrupts.apply(self.state)
        if owes_end(self.state):
            self._end_early()
        if self.is_over():
            self.state = end_phase(self.state, self.plan.phase)
        elif EPOCH in self.state.events and not (self.plan.epochs or self.plan.may_stall):
            self.phase = "the end of the epoch"
            if (why := explain_no_updates(self.state, self.left_out)) is not None:
                raise ValueError(why)
        if self.interrupts.save or self.is_over():
            self.phase = "the end of the run"
            self.flush_hooks()
            self.interrupts.done &= is_interruption(self.state.stop)  # a hook may have changed it

    def _start(self) -> None:
        """Evaluate and call the hooks that are due before the first update."""
        __tracebackhide__ = True
        state = attrs.evolve(self.state, events=frozenset({START}))
        due, _ = self._ask(state)
        hooks: Sequence[Hook] = self.plan.hooks_at(START)
        if due is not None:
            state, hooks = self._append_record(state, due), self.plan.hooks
        self.state = state
        self._call_hooks(hooks)
        self.state = attrs.evolve(self.state, events=events_to_keep(self.state))
        self.phase = LOADER

    def _end_early(self) -> None:
        """Make the closing record and call what is due at the end, when a hook has stopped."""
        __tracebackhide__ = True
        self.interrupts.check_time_left(over=True)
        made = is_full(self.state)
        events = self.state.events - {START} | {END, AGAIN}
        state = mark_stop(attrs.evolve(self.state, events=events))
        due, _ = self._ask(state) if self.plan.evaluates_at(END) else (None, False)
        names = not_in(state.history[-1] if made else None, due or ())
        if names or not made:
            state = self._append_record(state, names if made else [*self.evaluated], closing=True)
        self._collect(state, self.evaluated)
        self.state = state
        self._call_hooks(self.plan.hooks_at(END))
        self.state = attrs.evolve(self.state, events=self.state.events - {AGAIN})

    def _collect(self, state: TrainState, loaders: Iterable[str]) -> None:
        """Evaluate loaders for the hooks that ask for outputs at the end. No record has this."""
        __tracebackhide__ = True
        hooks = [hook for hook in self.plan.hooks_at(END) if hook in self._collectors]
        for loader in loaders:
            if asking(hooks, state, loader):
                self._evaluate(state, loader)

    # --- a boundary

    def boundary(self, ended: bool) -> bool:
        """Evaluate and record, if that is due, and call the hooks.

        Args:
            ended: whether the epoch has no batch left.

        Returns:
            Whether the epoch, or the run, is over.
        """
        __tracebackhide__ = True
        self.before_record = True
        if self.state.stop is not None:  # by a guard, in the step
            self.state = mark_stop(self.state)
        state = self._complete_epoch() if ended else self.state
        last = ended or state.step >= self.last_step
        if last and self.plan.is_over(state):
            state = attrs.evolve(state, events=state.events | {END})
        if last or not self.asked_at <= state.step < self.quiet_until:
            due, recent = self._ask(state, within=not ended)
            if last or due is not None or recent:
                state = self._report(state, due, recent, ended)
            if END in state.events:
                self._collect(state, not_in(state.history[-1], self.evaluated))
        self.state, self.before_record = state, False
        self.phase = "the exchange between processes"
        self.peers.poll(state, self.interrupts)
        if self.interrupts.stop is not None:
            self.state = self.interrupts.apply(state)
        if self.plan.hooks:
            self._call_hooks(self.plan.hooks)
        if self.interrupts.stop is not None:  # a signal may have come during the hooks
            self.state = self.interrupts.apply(self.state)
        if self.interrupts.save:
            self.flush_hooks()
        stopped = self.state.stop is not None or self.state.step >= self.last_step
        self.info.stopwatch.resume()
        if self.state.ends is not None:
            return self._end_epoch_early(ended or self.rolled_back or stopped)
        return ended or self.rolled_back or stopped

    def _end_epoch_early(self, over: bool) -> bool:
        """End the epoch, because a hook has said so, unless it is over. Return whether it is."""
        __tracebackhide__ = True
        if over:  # the epoch, or only the run: then the next one ends the epoch
            ended = EPOCH in self.state.events
            self.state = attrs.evolve(self.state, ends=None if ended else self.state.ends)
            return True
        self.state = attrs.evolve(self.state, events=frozenset())
        return self.boundary(ended=True)

    def _ask(self, state: TrainState, within: bool = False) -> tuple[tuple[str, ...] | None, bool]:
        """Return the names of the loaders to evaluate, and whether a record is due in any case.

        The names are None if no evaluation is due. If one trigger is asked, all are. ``within`` is
        whether this is not the end of an epoch.
        """
        __tracebackhide__ = True
        due, recent = loaders_due(self.plan.evaluations, state, within, self._note), False
        if self.plan.record_every is not None:
            self.phase = self.plan.record_every
            recent = self.plan.record_every.due(without_end(state) if within else state)
        self.asked_at = state.step  # a step of the pipeline may go back before it
        self.quiet_until = min([quiet(state) for quiet in self._quiet], default=math.inf)
        return due, recent

    def _note(self, phase: object) -> None:
        self.phase = phase

    def _call_hooks(self, hooks: Sequence[Hook]) -> None:
        """Call hooks, each with the state that the one before it returned."""
        __tracebackhide__ = True
        before = self.state
        for hook in hooks:
            self.phase = hook
            new = check_returned(hook, hook(self.state))
            if new is not self.state:
                check_counters(hook, self.state, new)
                new = mark_stop(new)
            self.state = new
        self.rolled_back = self.state.model is not before.model
        if self.state.run is None:
            self.state = attrs.evolve(self.state, run=self.info)
        if self.state.slots is not before.slots:  # they may be those of a checkpoint
            self.state = complete(self.plan.step, self.state)

    def _complete_epoch(self) -> TrainState:
        """Return the state with its epoch counted. ``self.state`` stays until there is a record."""
        state, self.batches_in_epoch = self.state, self.state.batch
        if state.ends is not None and not self.plan.step.carries:
            at = (state.epoch, state.batch, state.samples)
            state = count_left_out(state, num_updates(self.source.left(*at), self.info.window) or 0)
        return attrs.evolve(
            state, epoch=state.epoch + 1, batch=0, samples=0, metrics={}, ends=None,
            events=state.events | {EPOCH}, saved_on=None,
        )  # fmt: skip

    def _report(
        self, state: TrainState, due: tuple[str, ...] | None, recent: bool, ended: bool
    ) -> TrainState:
        """Return the state with the records that are due.

        Args:
            state: the state.
            due: the names of the loaders whose evaluation is due; None if none is.
            recent: whether a record is due in any case.
            ended: whether the epoch has ended.
        """
        __tracebackhide__ = True
        if due is not None or ended:
            return self._append_record(state, due or ())
        at_target = state.step >= self.last_step
        if at_target and self.interrupts.stop is not None:
            # A signal came during the last update: the run that continues has its boundary.
            raise Abandoned
        if recent:
            state = self._append_record(state, (), train=False)
        return self._append_record(state, [*self.evaluated], closing=True) if at_target else state

    def _append_record(
        self, state: TrainState, names: Sequence[str], *, train: bool = True, closing: bool = False
    ) -> TrainState:
        """Return the state with one more record in its history, unless there is nothing to record.

        Args:
            state: the state.
            names: the names of the loaders to evaluate.
            train: whether the record has the metrics since the epoch began.
            closing: whether the run ends here, between two records.
        """
        __tracebackhide__ = True
        running = (self.state if EPOCH in state.events else state).metrics
        report = train_metrics(state, running) if train else {}
        report |= recent_metrics(state, running if self.plan.record_every is not None else {})
        began = time.perf_counter()
        for loader in names:
            report |= self._evaluate(state, loader)
        self.phase = "the record"
        seconds = max(self.info.stopwatch.spent(), self.seconds)  # another process may be ahead
        if not is_alone(state):
            report["seconds"] = Max(seconds)
        if names:
            report["evaluated"] = Max(time.perf_counter() - began)
        values = read(engine_of(state).reduce_report(report, "train/"))
        self.seconds = seconds = values.pop("seconds", seconds)
        if not (values or train or closing):
            return state  # since the last record, every update was skipped
        if names:
            self.info.stopwatch.evaluated = values.pop("evaluated")
            self.info.stopwatch.newest = None
        self.info.stopwatch.recorded = True
        values = self.plan.step.derive(values, self.plan.loaders.evaluated, state.history)
        record = Record(state.epoch, state.step, values, seconds, closing)
        metrics = state.metrics if closing else without_recent(state.metrics)
        return with_record(state, state.history.append(record), metrics)

    def _evaluate(self, state: TrainState, loader: str) -> dict[str, Metric]:
        """Return the metrics of a loader by their names in a record."""
        __tracebackhide__ = True
        self.phase, source = loader, self.evaluated[loader]
        self.peers.hurry()  # its batches may take longer than updates
        given = (self.plan.step, state, loader, source, self._watch)
        found = evaluation_metrics(*given, self._collectors)
        self.peers.hurry()  # or updates longer than its batches
        return found

    def _watch(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Abandon an evaluation that has no time left. Tell the hooks how far it is."""
        __tracebackhide__ = True
        self.peers.poll(state, self.interrupts)
        self.interrupts.check_time_left(over=state.stop is not None)
        for hook in self.plan.hooks:
            self.phase = hook
            hook.evaluating(state, loader, done, total)
        self.phase = loader

    def flush_hooks(self) -> None:
        """Let the hooks finish what they keep: at the end of a run, and on SIGUSR1."""
        __tracebackhide__ = True
        for hook in self.plan.hooks:
            self.state = check_returned(hook, hook.flush(self.state), "flush")
        self.interrupts.save = False
