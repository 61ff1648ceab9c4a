"""The loop. Top to bottom, this is what ``fit`` does: epochs, updates, boundaries."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from types import TracebackType
from typing import Any

import attrs

from fnloop._backend.containers import reusing_pages
from fnloop._core.apart import rest
from fnloop._core.history import Record
from fnloop._core.metrics import (
    ITEMS,
    RECENT,
    Max,
    items_so_far,
    read,
    wait_and_read_clock,
    without_recent,
)
from fnloop._core.optimizers import labelled_groups, numbers_used, optimizers_in
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_host, torch_seeder
from fnloop._core.runs import (
    BOUNDARY,
    FLUSH,
    INTERRUPTED,
    End,
    Left,
    Stopwatch,
    end_in,
    ends_run,
    first_stop,
    is_interruption,
)
from fnloop._core.state import (
    TrainState,
    changed,
    check_not_stale,
    consume,
    count_left_out,
    detached_from_run,
    newest,
    ownership_of,
    owns_handles,
    went_back,
    with_record,
)
from fnloop._core.types import END, EPOCH, RECORD, START, UPDATE, Metric, Output, name_of
from fnloop._data.loaders import NONE_LEFT
from fnloop._data.source import Source, windows
from fnloop._hooks.hook import Hook, Wrapper, call_hook
from fnloop._loop.beginning import check_length, complete, first_state, suggest_fused
from fnloop._loop.boundary import Action, Answers, Append, Collect, Leave, ask, due
from fnloop._loop.errors import (
    check_counters,
    check_not_empty,
    check_returned,
    explain,
    explain_no_batches,
    explain_no_updates,
    inform_on_main,
    tell_hooks,
    warn_on_main,
)
from fnloop._loop.evaluate import gather_outputs, measure, open_loader
from fnloop._loop.peers import (
    Abandoned,
    Interrupts,
    check_same_step,
    handling,
    is_alone,
    peers_of,
)
from fnloop._loop.plan import Plan, describe, end_phase, has_left, is_newest, names_made
from fnloop._step.engine import engine_of
from fnloop._step.pipeline import STEP, PipelineStep

# --------------------------------------------------------------------------------------------------
# The loop: epochs of updates. Top to bottom, this is what `fit` does.
#
#     position the generators -> step -> fetch the next window -> boundary
#
# The next window is fetched while the device still works on the step. A boundary is the point
# between two updates (see `Run.boundary`): evaluation, records and hooks happen there and nowhere
# else, so they never see a half-finished state.


LOADER = "the training loader"  # as messages say what a run was doing


def train_epochs(
    plan: Plan, state: TrainState, interrupts: Interrupts | None = None
) -> Generator[TrainState]:
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
        rest(state)
        yield state if past else _settle_hooks(plan, state)
        return
    run, backend = Run(plan, state), state.backend
    window, source = plan.step.window, run.source
    batch_size, position = source.batch_size or 0, torch_seeder(backend.device)
    recent = plan.record_every is not None
    with _closing_hooks(plan.hooks, run.stopwatch):
        while True:
            with isolated(backend.device), _listening(state, interrupts) as run.interrupts:
                with reusing_pages(backend.device), Survival(run):
                    seed, state = run.begin_epoch(), run.state
                    at = (state.epoch, state.batch, state.samples)
                    nothing: Any = None
                    batch = feed = step = nothing
                    # An epoch that will not be trained is not begun, but one that was left in the
                    # middle is, for the position of its loader and its generators.
                    over = run.only_ends() and not state.batch
                    if not over:
                        sizes = None if window == 1 else run.info.windows.sizes(state.batch)
                        feed = windows(source, sizes, backend.device, *at, plan.prefetch)
                        batch = run.fetch(feed)
                        over = run.enter(seed, ended=batch is NONE_LEFT)
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
                        if out.skip is not None:
                            run.info.notices.tell(run.state, "skip", reason=out.skip)
                        batch = run.fetch(feed)
                        over = run.boundary(ended=batch is NONE_LEFT)
                    run.end_epoch(ended=batch is NONE_LEFT)
                reached = detached_from_run(run.state)
            over = run.is_over()
            if not run.rolled_back or over:
                if interrupts is None or over:  # fit shows its caller the last one alone
                    rest(reached)
                yield reached
                check_not_stale(reached)  # the caller may have advanced it
            if over:
                return
            run.state = changed(reached, run=run.info)


def _settle_hooks(plan: Plan, state: TrainState) -> TrainState:
    """Let hooks complete what a process left that was killed at the end of this run."""
    if not is_newest(state, plan.phase):
        return state
    state = end_phase(state, plan.phase)
    for hook in plan.hooks:
        state = check_returned(hook, state, hook.settle(state), "settle")
    return state


@contextlib.contextmanager
def _closing_hooks(hooks: Sequence[Hook], stopwatch: Stopwatch) -> Iterator[None]:
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


# --------------------------------------------------------------------------------------------------
# What a run has besides its state, and what happens at its boundaries.


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
        check_same_step(plan.step, state)
        self.plan = plan
        self.source = open_loader(plan.loaders.train, state, plan.total)
        due = [name for _, names in plan.evaluations for name in names]
        loaders = plan.loaders.evaluated
        self.evaluated = {k: open_loader(loaders[k], state) for k in due if k in loaders}
        check_not_empty(self.evaluated)
        self.peers = peers_of(state)
        self.info = describe(plan, state, self.source, tuple(self.evaluated), self.peers.clock)
        plan.check(self.info, state.history)
        self._collectors = [hook for hook in plan.hooks if hook.wants_outputs]
        late = [hook for hook in self._collectors if not isinstance(hook, Wrapper)]
        self._makers = names_made(plan.hooks)
        self._adds_at_end = any(END in hook.outside for hook in late)
        self.last_step = math.inf if plan.steps is None else plan.steps
        self._quiet = [each.quiet_until for each in plan.triggers]
        self.interrupts = Interrupts()
        self.phase: object = None  # what it is doing; None: the step, whose layers name themselves
        self.taken = 0  # batches that the update takes, in all processes
        self.left_out: str | None = None  # why the newest update was left out, if it was
        self.begun = (
            0,
            0,
            0,
        )  # the epoch, and the batch and sample where the run began or continued it
        self.first_update = state.step + state.skipped
        self.batches_in_epoch = 0  # of the epoch that has just ended
        self.unfinished: object = None  # what a failure would leave: BOUNDARY, END or FLUSH
        self.rolled_back = False  # whether a hook went back to a snapshot
        self.asked_at = self.quiet_until = 0.0  # in between nothing is due, unless the epoch ends
        known = state.history[-1].seconds if len(state.history) else 0.0
        self.seconds = max(known, ownership_of(state).seconds)  # of all runs, at the newest record
        self.stopwatch = self.info.stopwatch
        self.stopwatch.begin(self.seconds)
        self.state = first_state(plan, changed(state, run=self.info))
        self._usr1_stops = any(hook.ends_run_on_usr1 for hook in plan.hooks)
        self._calls_always = bool(plan.hooks) or not is_alone(state)

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
        self.stopwatch.newest = None
        if self.plan.step.window > 1 or self.source.lengths is not None:
            self._count_windows()
        self.begun = (self.state.epoch, self.state.batch, self.state.samples)
        self.batches_in_epoch = 0
        ahead = self.plan.prefetch * self.info.window
        self.source.begin(self.state.position, ahead, self.begun)
        self.state = self._leave_end(
            changed(
                self.state, events=_events(self.state), position=None,
                ends=self.state.ends if self.state.batch else None,
            )
        )  # fmt: skip
        if self.plan.begins_before(self.state):
            self._start()
        self.stopwatch.resumed = time.perf_counter()
        return fold_in(self.state.seed, COMPUTE, self.state.epoch)

    def fetch(self, feed: Iterator[Any]) -> Any:
        """Return the next batch or window, or ``NONE_LEFT``. Note how long it was waited for."""
        __tracebackhide__ = True
        watch, began = self.stopwatch, time.perf_counter()
        fetched = next(feed, NONE_LEFT)
        now = time.perf_counter()
        watch.waited = now - began
        watch.trained += now - watch.resumed
        watch.resumed = now
        return fetched

    def _count_windows(self) -> None:
        """Note how many batches an update takes in this epoch, and so how many updates it has."""
        windows = self.plan.windows(self.state, self.source)
        batches = self.source.length_in(self.state.epoch)
        if (windows, batches) != (self.info.windows, self.info.batches_per_epoch):
            self.info = attrs.evolve(
                self.info, window=windows.largest, windows=windows, batches_per_epoch=batches,
                steps_per_epoch=self.plan.updates_in(batches, windows),
            )  # fmt: skip
            self.state = changed(self.state, run=self.info)

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
            self.state = changed(state, generators=None)
            return True
        self.state = changed(state, generators=None, left=())
        if state.ends is not None:  # what is left of the boundary is that of this end
            return self._end_epoch_early(over=False)
        return (ended or BOUNDARY in state.left) and self.boundary(ended)

    def end_epoch(self, ended: bool) -> None:
        """End an epoch, or what was run of it; and the run, if it is over."""
        __tracebackhide__ = True
        self.phase = "the exchange between processes"
        if ended and self.batches_in_epoch and self.state.backend.main:
            check_length(self.source, *self.begun, self.batches_in_epoch)
        made = self.state.step + self.state.skipped - self.first_update
        suggest_fused(self.plan.step.pipeline.middleware, self.state, self.stopwatch.trained, made)
        order = self.source.order if ended else 0
        self.peers.barrier(self.state, self.interrupts, order)
        self.state = self.interrupts.apply(self.state)
        if end_in(self.state.left) is not None:
            self._end()
        over = self.is_over()
        if over:
            self.state = end_phase(self.state, self.plan.phase)
        elif EPOCH in self.state.events and not (self.plan.epochs or self.plan.may_stall):
            self.phase = "the end of the epoch"
            if (why := explain_no_updates(self.state, self.left_out)) is not None:
                raise ValueError(why)
        if self.interrupts.save or over:
            self.phase = "the end of the run"
            if self.state.left:
                self.state = changed(self.state, left=())
            self.flush_hooks()
            self.interrupts.done &= is_interruption(self.state.stop)  # a hook may have changed it

    def _start(self) -> None:
        """Evaluate and call the hooks that are due before the first update."""
        __tracebackhide__ = True
        state = changed(self.state, events=frozenset({START}))
        self._carry_out(due("start", state, self._ask(state), self.evaluated), state)
        self.state = changed(self.state, events=_events(self.state))
        self.phase = LOADER

    def _end(self) -> None:
        """Make the end of a run that was left for after its hooks, or by the run before."""
        __tracebackhide__ = True
        self.interrupts.check_time_left(over=True)
        state = changed(self.state, events=self.state.events - {START} | {END})
        answers = self._ask(state) if self.plan.evaluates_at(END) else Answers()
        self._carry_out(due("end", state, answers, self.evaluated), state)
        self.state = changed(self.state, left=())

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
            state = changed(state, events=state.events | {END})
        if last or not self.asked_at <= state.step < self.quiet_until:
            given = (state, self._ask(state), self.evaluated, self._adds_at_end)
            self._carry_out(due("boundary", *given), state)
        else:  # nothing is due but the hooks
            self.state, self.unfinished = state, None
            if self._calls_always or state.stop is not None:
                self._call("boundary")
        if self.interrupts.stop is not None:  # a signal may have come during the hooks
            self.state = self.interrupts.apply(self.state)
        if self.interrupts.save:
            self.flush_hooks()
        stopped = self.state.stop is not None or self.state.step >= self.last_step
        over = ended or self.rolled_back or stopped
        self.stopwatch.resumed = time.perf_counter()
        return self._end_epoch_early(over) if self.state.ends is not None else over

    def _end_epoch_early(self, over: bool) -> bool:
        """End the epoch, because a hook has said so, unless it is over. Return whether it is."""
        __tracebackhide__ = True
        if over:  # if only the run is, the next one ends the epoch
            return True
        self.state = changed(self.state, events=frozenset())
        return self.boundary(ended=True)

    def _ask(self, state: TrainState) -> Answers:
        """Return what the moments say. Note until when they need not be asked."""
        __tracebackhide__ = True
        plan = self.plan
        answers = ask(plan.evaluations, plan.record_every, state, self._note, self._makers)
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
                state = self._collect(state, action.loaders)
            elif isinstance(action, Leave):
                state = changed(state, left=(action.end,), events=state.events - {END})
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
            new = check_returned(hook, self.state, call_hook(hook, self.state))
            if new is not self.state:
                check_counters(hook, self.state, new)
                new = self._as_continued(self.state, new)
            self.state = new
        self.rolled_back = went_back(before, self.state)
        if self.state.run is None:
            self.state = changed(self.state, run=self.info)
        if self.state.slots is not before.slots:  # they may be those of a checkpoint
            self.state = complete(self.plan.step, self.state)

    def _as_continued(self, before: TrainState, new: TrainState) -> TrainState:
        """Return the state that a hook has returned as the run continues with it."""
        stop = first_stop(before.stop, new.stop)
        if stop is not new.stop:
            new = changed(new, stop=stop)
        if new.ends is not None and not new.batch:  # the epoch has just ended: there is none to end
            new = changed(new, ends=None)
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
            return state if end is None else changed(state, left=())
        if end is not None and end.stop == state.stop:
            return state
        others = tuple(action for action in state.left if action is not end)
        return changed(state, left=(*others, End(state.stop)))

    def _collect(self, state: TrainState, loaders: Iterable[str]) -> TrainState:
        """Evaluate loaders for the hooks that ask for outputs at the end.

        No record has this, but for the numbers that hooks make of the outputs.
        """
        __tracebackhide__ = True
        hooks = [hook for hook in self.plan.hooks_at(END) if hook in self._collectors]
        for loader in loaders:
            if asking(hooks, state, loader):
                self._evaluate(state, loader)
        items = next((each.items for each in state.history[-1:] if each.step == state.step), None)
        record = Record(state.epoch, state.step, {}, self.seconds, closing=True, items=items)
        full = self._with_numbers(state, record, state.metrics, (), hooks)
        return (
            state
            if full is record
            else with_record(state, state.history.append(full), state.metrics)
        )

    def _complete_epoch(self) -> TrainState:
        """Return the state with its epoch counted. ``self.state`` stays until there is a record."""
        state, self.batches_in_epoch = self.state, self.state.batch
        if state.ends is not None and not self.plan.step.carries:
            left = self.source.left(state.epoch, state.batch, state.samples) or 0
            state = count_left_out(state, self.info.windows.updates_of(left, state.batch))
        return changed(
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
        numbers, closing = action.kind == "numbers", action.kind == "closing"
        train = not numbers and action.kind != "recent"
        if closing and self.interrupts.stop is not None:
            raise Abandoned
        report = train_metrics(state) if train else {}
        recent = self.plan.record_every is not None and not numbers
        report |= recent_metrics(state) if recent else {}
        began = time.perf_counter()
        loaders = [name for name in action.names if name in self.evaluated]
        for loader in loaders:
            report |= self._evaluate(state, loader)
        self.phase = "the record"
        seconds = max(self.stopwatch.spent(), self.seconds)  # another process may be ahead
        if not is_alone(state):
            report["seconds"] = Max(seconds)
        in_first_epoch = state.epoch + bool(state.batch) <= 1
        report["items"] = items_so_far(state.metrics, in_first_epoch)
        if loaders:
            report["evaluated"] = Max(time.perf_counter() - began)
        values = read(engine_of(state).reduce_report(report, "train/"))
        self.seconds = seconds = values.pop("seconds", seconds)
        items = values.pop("items")
        if not (values or train or closing or action.names):
            return state  # since the last record, every update was skipped
        if loaders:
            self.stopwatch.evaluated = values.pop("evaluated")
            self.stopwatch.newest = None
        self.stopwatch.recorded = True
        values = self.plan.step.derive(values, self.plan.loaders.evaluated, state.history)
        known = None if math.isnan(items) else items
        record = Record(state.epoch, state.step, values, seconds, closing, known)
        metrics = state.metrics if closing or numbers else without_recent(state.metrics)
        record = self._with_numbers(state, record, metrics, action.names, self.plan.hooks)
        return with_record(state, state.history.append(record), metrics)

    def _with_numbers(
        self,
        state: TrainState,
        record: Record,
        metrics: Mapping[str, Metric],
        names: Collection[str],
        hooks: Iterable[Hook],
    ) -> Record:
        """Return a record with the numbers that hooks add to it: the same if there are none.

        Args:
            state: the state, without the record.
            record: the record as it is so far.
            metrics: the running metrics after it.
            names: the loaders that were evaluated for it, and the hooks whose numbers are due.
            hooks: the hooks to ask.
        """
        __tracebackhide__ = True
        for hook in hooks:
            self.phase = hook
            if not hook.adds_numbers(state, record, names):
                continue
            self.peers.hurry()  # it may take longer than an update
            # In a history of its own: that of the run does not have the record yet.
            numbers = hook.numbers(with_record(state, state.history[:].append(record), metrics))
            if taken := [name for name in numbers if name in record.metrics]:
                raise ValueError(
                    f"{name_of(hook)} adds the number {taken[0]!r}, which the record has already: "
                    "choose another name"
                )
            if numbers:
                record = attrs.evolve(record, metrics={**record.metrics, **numbers})
        return record

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
            self.state = check_returned(hook, self.state, hook.flush(self.state), "flush")
        self.interrupts.save = False


def _events(state: TrainState) -> frozenset[str]:
    """Return the events of a boundary that the run which continues has to complete."""
    if BOUNDARY in state.left:
        return state.events & {UPDATE}
    return state.events if state.left else frozenset()


# --------------------------------------------------------------------------------------------------
# The metrics of a record.


def train_metrics(state: TrainState) -> dict[str, Metric]:
    """Return the metrics since the epoch began, by their names in a record."""
    named = {f"train/{k}": m for k, m in without_recent(state.metrics).items() if k != ITEMS}
    return _with_rates("train/", state, named)


def recent_metrics(state: TrainState) -> dict[str, Metric]:
    """Return the metrics since the last record, by their names in a record."""
    named = {name: m for name, m in state.metrics.items() if name.startswith(RECENT)}
    return _with_rates(RECENT, state, named)


def _with_rates(prefix: str, state: TrainState, named: dict[str, Metric]) -> dict[str, Metric]:
    """Return metrics, the loss first; and the learning rates, where none is known.

    A middleware that sets the rates reports what an update used.
    """
    if not named:
        return {}
    if (loss := f"{prefix}loss") in named:
        named = {loss: named[loss], **named}
    rates = numbers_used(labelled_groups(optimizers_in(state.optimizer)), "lr")
    missing = {f"{prefix}{k}": rate for k, rate in rates.items() if f"{prefix}{k}" not in named}
    return {**named, **missing}


def evaluation_metrics(
    step: PipelineStep,
    state: TrainState,
    loader: str,
    source: Source,
    watch: Callable[[TrainState, str, int, int | None], object],
    collectors: Sequence[Any] = (),
) -> dict[str, Metric]:
    """Evaluate a loader. Return its metrics by their names in a record.

    ``watch`` is called with the state, the name, the number of batches that this process has
    evaluated, from 0, and how many there are, if that is known. ``collectors`` are the hooks that
    may ask for the outputs.
    """
    __tracebackhide__ = True
    run = None if state.run is None else attrs.evolve(state.run, loader=loader)
    length = source.length_in(0)
    share = None if length is None else -(-length // state.backend.data_size)
    tell = lambda done: watch(state, loader, done, share)
    asked_by = asking(collectors, state, loader)
    outputs: list[list[Output]] | None = [] if asked_by else None
    device = state.backend.device
    began = wait_and_read_clock(device) if step.is_timed else 0.0
    with isolated(device):
        found = measure(step, changed(state, run=run), source, True, tell, outputs)
    if step.is_timed:
        if "time/evaluate" in found:
            raise ValueError(
                "timings reports the metric 'time/evaluate', which another middleware reports "
                "already: rename that metric"
            )
        found["time/evaluate"] = Max(wait_and_read_clock(device) - began)
    gathered = [] if outputs is None else gather_outputs(outputs)
    for hook in asked_by:
        hook.receive(state, gathered)
    return {f"{loader}/{name}": metric for name, metric in found.items()}


def asking(collectors: Sequence[Any], state: TrainState, loader: str) -> list[Any]:
    """Return the hooks that ask for the outputs of a loader."""
    found = []
    for hook in collectors:
        try:
            if hook.collects(state, loader):
                found.append(hook)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}")
            raise
    return found


# --------------------------------------------------------------------------------------------------
# What becomes of a run in which an exception is raised: no update that was made is lost.


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
    state = changed(state, left=_left(state, BOUNDARY if applied else run.unfinished))
    # With several processes, fail: the others cannot know of it, and the launcher ends them.
    alone = is_alone(state)
    interrupted = _is_interruption(run, error) and owns_handles(state)
    lost = alone and (interrupted or _has_lost_its_workers(run, error))
    if lost or isinstance(error, Abandoned):
        run.interrupts.done, run.rolled_back = True, False
        if state.stop is None or end_in(state.left) is not None:
            state = changed(state, stop=run.interrupts.stop or INTERRUPTED)
        run.state = changed(state, left=()) if state.left == (FLUSH,) else state
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
