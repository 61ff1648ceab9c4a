"""What a run has besides its state, and what happens at its boundaries."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import attrs

from fnloop._core.copies import with_record
from fnloop._core.events import END, EPOCH, RECORD, START, UPDATE
from fnloop._core.left_out import count_left_out
from fnloop._core.metrics import Max, read
from fnloop._core.record import Record
from fnloop._core.rng import COMPUTE, fold_in, mix, seed_host
from fnloop._core.running import without_recent
from fnloop._core.state import TrainState, ownership_of
from fnloop._core.stops import BOUNDARY, FLUSH, End, end_in, first_stop, is_interruption
from fnloop._core.types import Metric
from fnloop._data.source import num_updates
from fnloop._hooks.wrapper import Hook
from fnloop._loop.beginning import complete, first_state
from fnloop._loop.boundary import Action, Answers, Append, Collect, Leave, ask, due
from fnloop._loop.errors import (
    check_counters,
    check_returned,
    explain_no_batches,
    explain_no_updates,
)
from fnloop._loop.evaluate import open_loader
from fnloop._loop.hints import check_length, suggest_fused
from fnloop._loop.interrupts import Abandoned, Interrupts
from fnloop._loop.peers import is_alone, peers_of
from fnloop._loop.phases import end_phase
from fnloop._loop.plan import Plan, describe
from fnloop._loop.report import (
    asking,
    evaluation_metrics,
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
        plan.check(self.info, state.history)
        self._collectors = [hook for hook in plan.hooks if hook.wants_outputs]
        self.last_step = math.inf if plan.steps is None else plan.steps
        self._quiet = [each.quiet_until for each in plan.triggers]
        self.interrupts = Interrupts()
        self.phase: object = None  # what it is doing; None: the step, whose layers name themselves
        self.taken = 0  # batches that the update takes, in all processes
        self.left_out: str | None = None  # why the newest update was left out, if it was
        self.first_batch = 0  # with which the run began or continued the epoch
        self.first_update = state.step + state.skipped
        self.batches_in_epoch = 0  # of the epoch that has just ended
        self.unfinished: object = None  # what a failure would leave: BOUNDARY, END or FLUSH
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
        ahead = self.plan.prefetch * self.info.window
        self.source.positions.begin(self.state.position, ahead)
        self.state = self._leave_end(
            attrs.evolve(
                self.state, events=_events(self.state), position=None,
                ends=self.state.ends if self.state.batch else None,
            )
        )  # fmt: skip
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

    def only_ends(self) -> bool:
        """Return whether nothing but the end of the run is left to do."""
        return BOUNDARY not in self.state.left and self.is_over()

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
        # Before an update, in which processes whose batches differ in size might wait for ever.
        self.source.check_order(whole=False)
        if state.generators is not None:
            state.generators.install()
        else:
            rank = state.backend.data_rank
            seed_host(mix(fold_in(seed, rank) if rank else seed, state.batch))
        if self.only_ends():
            self.state = attrs.evolve(state, generators=None)
            return True
        self.state = attrs.evolve(state, generators=None, left=())
        if state.ends is not None:  # what is left of the boundary is that of this end
            return self._end_epoch_early(over=False)
        return (ended or BOUNDARY in state.left) and self.boundary(ended)

    def end_epoch(self, ended: bool) -> None:
        """End an epoch, or what was run of it; and the run, if it is over."""
        __tracebackhide__ = True
        self.phase = "the exchange between processes"
        if ended and self.batches_in_epoch and self.state.backend.main:
            check_length(self.source, self.first_batch, self.batches_in_epoch)
        made = self.state.step + self.state.skipped - self.first_update
        suggest_fused(
            self.plan.step.pipeline.middleware, self.state, self.info.stopwatch.trained, made
        )
        order = self.source.order if ended else 0
        self.peers.barrier(self.state, self.interrupts, order)
        self.state = self.interrupts.apply(self.state)
        if end_in(self.state.left) is not None:
            self._end()
        if self.is_over():
            self.state = end_phase(self.state, self.plan.phase)
        elif EPOCH in self.state.events and not (self.plan.epochs or self.plan.may_stall):
            self.phase = "the end of the epoch"
            if (why := explain_no_updates(self.state, self.left_out)) is not None:
                raise ValueError(why)
        if self.interrupts.save or self.is_over():
            self.phase = "the end of the run"
            if self.state.left:
                self.state = attrs.evolve(self.state, left=())
            self.flush_hooks()
            self.interrupts.done &= is_interruption(self.state.stop)  # a hook may have changed it

    def _start(self) -> None:
        """Evaluate and call the hooks that are due before the first update."""
        __tracebackhide__ = True
        state = attrs.evolve(self.state, events=frozenset({START}))
        self._carry_out(due("start", state, self._ask(state), self.evaluated), state)
        self.state = attrs.evolve(self.state, events=_events(self.state))
        self.phase = LOADER

    def _end(self) -> None:
        """Make the end of a run that was left for after its hooks, or by the run before."""
        __tracebackhide__ = True
        self.interrupts.check_time_left(over=True)
        state = attrs.evolve(self.state, events=self.state.events - {START} | {END})
        answers = self._ask(state) if self.plan.evaluates_at(END) else Answers()
        self._carry_out(due("end", state, answers, self.evaluated), state)
        self.state = attrs.evolve(self.state, left=())

    # --- a boundary

    def boundary(self, ended: bool) -> bool:
        """Evaluate and record, if that is due, and call the hooks.

        Args:
            ended: whether the epoch has no batch left.

        Returns:
            Whether the epoch, or the run, is over.
        """
        __tracebackhide__ = True
        self.unfinished = BOUNDARY
        state = self._complete_epoch() if ended else self.state
        last = ended or state.step >= self.last_step
        if last and self.plan.is_reached(state):
            state = attrs.evolve(state, events=state.events | {END})
        if last or not self.asked_at <= state.step < self.quiet_until:
            self._carry_out(due("boundary", state, self._ask(state), self.evaluated), state)
        else:  # nothing is due but the hooks
            self.state, self.unfinished = state, None
            self._call("boundary")
        if self.interrupts.stop is not None:  # a signal may have come during the hooks
            self.state = self.interrupts.apply(self.state)
        if self.interrupts.save:
            self.flush_hooks()
        stopped = self.state.stop is not None or self.state.step >= self.last_step
        over = ended or self.rolled_back or stopped
        self.info.stopwatch.resume()
        return self._end_epoch_early(over) if self.state.ends is not None else over

    def _end_epoch_early(self, over: bool) -> bool:
        """End the epoch, because a hook has said so, unless it is over. Return whether it is."""
        __tracebackhide__ = True
        if over:  # if only the run is, the next one ends the epoch
            return True
        self.state = attrs.evolve(self.state, events=frozenset())
        return self.boundary(ended=True)

    def _ask(self, state: TrainState) -> Answers:
        """Return what the moments say. Note until when they need not be asked."""
        __tracebackhide__ = True
        answers = ask(self.plan.evaluations, self.plan.record_every, state, self._note)
        self.asked_at = state.step  # a step of the pipeline may go back before it
        self.quiet_until = min([quiet(state) for quiet in self._quiet], default=math.inf)
        return answers

    def _note(self, phase: object) -> None:
        self.phase = phase

    def _carry_out(self, actions: Sequence[Action], state: TrainState) -> None:
        """Do what is due at a stage of a boundary.

        ``self.state`` stays as it is until all records are made: if one of them fails, the run that
        continues makes all of them.
        """
        __tracebackhide__ = True
        for action in actions:
            if isinstance(action, Append):
                state = self._append_record(state, action)
            elif isinstance(action, Collect):
                self._collect(state, action.loaders)
            elif isinstance(action, Leave):
                state = attrs.evolve(state, left=(action.end,), events=state.events - {END})
            else:
                self.state = state
                self.unfinished = END if END in state.events else None
                self._call(action.stage)
                self.unfinished = FLUSH if END in state.events else None

    def _call(self, stage: str) -> None:
        """Call the hooks of a stage; after an update, exchange signals before."""
        __tracebackhide__ = True
        if stage != "boundary":
            record = RECORD in self.state.events and stage == "start"
            self._call_hooks(self.plan.hooks if record else self.plan.hooks_at(stage))
            return
        self.phase = "the exchange between processes"
        self.peers.poll(self.state, self.interrupts)
        if self.interrupts.stop is not None:
            self.state = self.interrupts.apply(self.state)
        if self.state.stop is not None:  # by a guard, in the step
            self.state = self._leave_end(self.state)
        if self.plan.hooks:
            self._call_hooks(self.plan.hooks)

    def _call_hooks(self, hooks: Sequence[Hook]) -> None:
        """Call hooks, each with the state that the one before it returned."""
        __tracebackhide__ = True
        before = self.state
        for hook in hooks:
            self.phase = hook
            new = check_returned(hook, hook(self.state))
            if new is not self.state:
                check_counters(hook, self.state, new)
                new = self._settled(self.state, new)
            self.state = new
        self.rolled_back = self.state.model is not before.model
        if self.state.run is None:
            self.state = attrs.evolve(self.state, run=self.info)
        if self.state.slots is not before.slots:  # they may be those of a checkpoint
            self.state = complete(self.plan.step, self.state)

    def _settled(self, before: TrainState, new: TrainState) -> TrainState:
        """Return the state that a hook has returned as the run continues with it."""
        stop = first_stop(before.stop, new.stop)
        if stop is not new.stop:
            new = attrs.evolve(new, stop=stop)
        if new.ends is not None and not new.batch:  # the epoch has just ended: there is none to end
            new = attrs.evolve(new, ends=None)
        return self._leave_end(new)

    def _leave_end(self, state: TrainState) -> TrainState:
        """Return the state with the end of the run left to do, if it is over, and why.

        There is nothing to leave where the boundary itself makes the end, at the target. A hook may
        take a stop back; a target stays reached.
        """
        if END in state.events or is_interruption(state.stop):
            return state
        end = end_in(state.left)
        if state.stop is None and (end is None or not self.plan.is_reached(state)):
            return state if end is None else attrs.evolve(state, left=())
        if end is not None and end.stop == state.stop:
            return state
        others = tuple(action for action in state.left if action is not end)
        return attrs.evolve(state, left=(*others, End(state.stop)))

    def _collect(self, state: TrainState, loaders: Iterable[str]) -> None:
        """Evaluate loaders for the hooks that ask for outputs at the end. No record has this."""
        __tracebackhide__ = True
        hooks = [hook for hook in self.plan.hooks_at(END) if hook in self._collectors]
        for loader in loaders:
            if asking(hooks, state, loader):
                self._evaluate(state, loader)

    def _complete_epoch(self) -> TrainState:
        """Return the state with its epoch counted. ``self.state`` stays until there is a record."""
        state, self.batches_in_epoch = self.state, self.state.batch
        if state.ends is not None and not self.plan.step.carries:
            at = (state.epoch, state.batch, state.samples)
            state = count_left_out(state, num_updates(self.source.left(*at), self.info.window) or 0)
        return attrs.evolve(
            state, epoch=state.epoch + 1, batch=0, samples=0, ends=None,
            events=state.events | {EPOCH}, saved_on=None,
        )  # fmt: skip

    def _append_record(self, state: TrainState, action: Append) -> TrainState:
        """Return the state with one more record in its history, unless there is nothing to record.

        Raises:
            Abandoned: a signal came during the last update of a run that ends within an epoch: the
                run that continues has its boundary.
        """
        __tracebackhide__ = True
        train, closing = action.kind != "recent", action.kind == "closing"
        if closing and self.interrupts.stop is not None:
            raise Abandoned
        report = train_metrics(state) if train else {}
        report |= recent_metrics(state) if self.plan.record_every is not None else {}
        began = time.perf_counter()
        for loader in action.loaders:
            report |= self._evaluate(state, loader)
        self.phase = "the record"
        seconds = max(self.info.stopwatch.spent(), self.seconds)  # another process may be ahead
        if not is_alone(state):
            report["seconds"] = Max(seconds)
        if action.loaders:
            report["evaluated"] = Max(time.perf_counter() - began)
        values = read(engine_of(state).reduce_report(report, "train/"))
        self.seconds = seconds = values.pop("seconds", seconds)
        if not (values or train or closing):
            return state  # since the last record, every update was skipped
        if action.loaders:
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


def _events(state: TrainState) -> frozenset[str]:
    """Return the events of a boundary that the run which continues has to complete."""
    if BOUNDARY in state.left:
        return state.events & {UPDATE}
    return state.events if state.left else frozenset()
