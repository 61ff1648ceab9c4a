"""The loop: a fold over actions. What a run does next is in its state, see ``_core/runs.py``."""

from __future__ import annotations

import contextlib
import functools
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
from contextlib import nullcontext

import attrs
import torch

from fnloop._backend.containers import reusing_pages
from fnloop._core.metrics import (
    ITEMS,
    RECENT,
    Max,
    Metrics,
    items_so_far,
)
from fnloop._core.optimizers import labelled_groups, optimizers_in
from fnloop._core.records import Record, loaders_in
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_host, torch_seeder
from fnloop._core.runs import (
    CLOCK,
    INTERRUPTED,
    RAN,
    Action,
    Append,
    Boundary,
    Call,
    Collect,
    End,
    Flush,
    Meet,
    Start,
    Stop,
    Todo,
    Update,
    first_stop,
    pending,
    with_reason,
)
from fnloop._core.settings import Setting
from fnloop._core.state import (
    Ownership,
    TrainState,
    changed,
    check_not_stale,
    consume,
    count_items,
    count_left_out,
    counted_of,
    items_to_send,
    newest,
    went_back,
    with_record,
)
from fnloop._core.types import END, EPOCH, RECORD, START, Batch, Metric, Output, name_of
from fnloop._core.view import hand_over
from fnloop._data.loaders import NONE_LEFT
from fnloop._data.source import Source
from fnloop._extensions import extensions
from fnloop._hooks.hook import (
    BuiltIn,
    Hook,
    call_hook,
    collects_outputs,
    defines,
    may_be_due,
    unwrap_hook,
)
from fnloop._loop.beginning import check_length, complete, first_state
from fnloop._loop.boundary import Answers, ask, due, ends_apart, onward
from fnloop._loop.errors import (
    check_not_empty,
    check_numbers,
    check_returned,
    explain,
    explain_no_batches,
    explain_no_updates,
    inform_on_main,
    note_failed_too,
    note_pair,
    tell_hooks,
    tell_on_main,
)
from fnloop._loop.evaluate import gather_outputs, measure, open_loader
from fnloop._loop.peers import (
    Abandoned,
    Interrupts,
    handling,
    is_alone,
    peers_of,
)
from fnloop._loop.plan import Plan, check_knows_items, end_phase, is_newest, names_made
from fnloop._step.engine import engine_of
from fnloop._step.pipeline import PipelineStep

# --------------------------------------------------------------------------------------------------
# A run: do what is next, until nothing is.
#
#     Start -> Update -> Boundary -> Append, Collect, Call, Call, ... -> Update
#                                                                     -> Meet -> Update
#                                                                     -> Meet -> End -> Flush
#
# Evaluation, records and hooks happen between two updates and nowhere else, so they never see a
# half-finished state. The next batch is fetched while the device still works on the step.


def fold(
    plan: Plan, state: TrainState, interrupts: Interrupts | None = None
) -> Generator[TrainState]:
    """Yield the state after every epoch, and at the end of the run.

    Args:
        plan: what to do.
        state: the state to begin with.
        interrupts: where signals are recorded; None handles them during each epoch only.
    """
    __tracebackhide__ = True
    tell = inform_on_main if plan.passes_over(state) else tell_on_main
    state = plan.begin(state)
    if not (begun := plan.resumed(state)).todo:
        tell(state, plan.why_nothing_to_do(state))
        hand_over(state)
        yield state if plan.is_past(state) else _settle_hooks(plan, state)
        return
    if not any(action.of_boundary or action.updates for action in begun.todo):
        tell(state, plan.why_nothing_to_do(state))  # only its end is left, such as a last flush
    world = World(plan, begun)
    device, over = state.backend.device, False
    with _closing_hooks(world):
        while not over:
            listening = handling(is_alone(state)) if interrupts is None else nullcontext(interrupts)
            with isolated(device), listening as world.interrupts:
                with reusing_pages(device):
                    world.run()
                state = Ownership.leave_run(world.state)
            over = not state.todo or Stop.interrupts(state.stop)
            if interrupts is None or over:  # fit shows its caller the last one alone
                hand_over(state)
            yield state
            check_not_stale(state)  # the caller may have advanced it
            if not over:
                world.state = changed(state, run=world.info)


def _settle_hooks(plan: Plan, state: TrainState) -> TrainState:
    """Let hooks complete what a process left that was killed at the end of this run."""
    if not is_newest(state, plan.phase):
        return state
    state = end_phase(state, plan.phase)
    state = changed(state, todo=()) if state.todo else state
    for hook in plan.hooks:
        if isinstance(hook, BuiltIn):
            state = check_returned(hook, state, hook.settle(state), "settle")
    return state


def _closing_hooks(world: World) -> contextlib.ExitStack:
    """Return what closes all hooks at the end of a ``with`` block, even if one of them raises."""
    stack = contextlib.ExitStack()
    stack.callback(world.stopwatch.end)
    for hook in reversed(world.plan.hooks):  # the stack calls them back in the order listed
        stack.push(functools.partial(_close, world, hook))
    return stack


def _close(
    world: World, hook: Hook, kind: object, error: BaseException | None, traceback: object
) -> None:
    """Close a hook. An error of it does not take the place of one that ends the run already."""
    try:
        unwrap_hook(hook).close()
    except Exception as another:
        if error is not None and not isinstance(error, GeneratorExit):
            note_failed_too(error, hook, another)
            return
        another.add_note(f"while in the method close of {name_of(hook)}, after the run")
        if Ownership.belongs_to(world.state):
            with contextlib.suppress(AttributeError):
                another.state = Ownership.leave_run(world.state)  # type: ignore[attr-defined]
        raise


@contextlib.contextmanager
def _naming(hook: Hook) -> Iterator[None]:
    """Name a hook in an exception that it raises."""
    __tracebackhide__ = True
    try:
        yield
    except Exception as error:
        error.add_note(f"while in {name_of(hook)}")
        raise


# --------------------------------------------------------------------------------------------------
# What a run has besides its state, and what each action does.

LOADER = "the training loader"  # as messages say what a run was doing


class World:
    """What a run has besides its state: handles, each of which is opened again from the state.

    ``state`` is what a run continues from if something raises: the state before the action that is
    being done, or after its last complete part.

    Args:
        plan: what the run is to do.
        state: the state that it begins with.

    Raises:
        ValueError, KeyError: the plan does not fit the state or the loaders.
    """

    def __init__(self, plan: Plan, state: TrainState) -> None:
        __tracebackhide__ = True
        plan.check_position(state)
        self.peers = peers_of(state)
        saving = [hook for hook in plan.hooks if BuiltIn.parts_saved([hook])]
        self.peers.compare(type(plan.step).__name__, plan.step.members, saving)
        self.plan = plan
        self.source = open_loader(plan.loaders.train, state, plan.total)
        due = [name for _, names in plan.evaluations for name in names]
        loaders = plan.loaders.evaluated
        self.evaluated = {k: open_loader(loaders[k], state) for k in due if k in loaders}
        check_not_empty(self.evaluated)
        self.peers.begin(state)
        self.info = plan.describe(state, self.source, tuple(self.evaluated), self.peers.clock)
        plan.check(self.info, state.history)
        self._collectors = [hook for hook in plan.hooks if collects_outputs(hook)]
        self._adders = [hook for hook in plan.hooks if defines(hook, "numbers")]
        self._given: list[Hook] = []  # those that have received outputs at this boundary
        self._late = [hook for hook in self._collectors if may_be_due(hook, END)]
        self._makers = names_made(plan.hooks)
        self._adds_at_end = any(hook in self._adders for hook in self._late)
        self._last_step = math.inf if plan.steps is None else plan.steps
        self._counts_items = plan.counts_items
        self._last_item = math.inf if plan.items is None else plan.items
        self._quiet = [each.quiet_until for each in plan.triggers]
        self._asked_at = self._quiet_until = 0.0  # nothing is due in between, in mid-epoch
        self._position, self._seed = torch_seeder(state.backend.device), 0
        self._in_windows, self._share = plan.step.window > 1, state.backend.data_size
        self._size, self._recent = self.source.reader.batch_size or 0, plan.record_every is not None
        self._calls_always = bool(plan.hooks) or not self.peers.alone
        calls = [Call("boundary", n) for n in range(max(len(plan.hooks), 1))]
        self._hooks_then_update: list[Todo] = [*((each, Update()) for each in calls), (Update(),)]
        self.interrupts = Interrupts()
        self.doing: object = None  # for messages; None: the step, whose layers name themselves
        self.feed: Iterator[Batch] | None = None  # the batches, or windows, of the running epoch
        self.batch: Batch = NONE_LEFT  # the next of them
        self.rests = False  # whether an epoch has ended, and the next one is to begin
        self.taken = 0  # batches that the update takes, in all processes
        self.left_out: str | None = None  # why the newest update was left out, if it was
        self.opened_at = (0, 0, 0)  # epoch, batch and sample where the run has begun to read
        self.batches_in_epoch = 0  # of the epoch that has just ended
        self.read_whole = False  # whether the loader had no further batch then
        self.first_update = state.step + state.skipped
        known = state.history[-1].seconds if len(state.history) else 0.0
        self.seconds = max(known, Ownership.of(state).seconds)  # of all runs, at the newest record
        self.stopwatch = self.info.live.stopwatch
        self.stopwatch.begin(self.seconds)
        begun = first_state(plan, changed(state, run=self.info))
        begun = self._count_items(begun)
        self._usr1_stops = any(hook.ends_run_on_usr1 for hook in BuiltIn.among(plan.hooks))
        for n, clock in enumerate(clock for moment in plan.moments for clock in moment.clocks):
            clock.begin(begun, f"{CLOCK} {n}", self.info.live.clock() - self.seconds)
        self._clocks = tuple(clock for moment in plan.triggers for clock in moment.clocks)
        todo = state.todo  # also if a hook has gone to another state
        if Stop.ends_run(begun.stop) and state.stop is None:
            todo = (*pending(todo), *onward(begun, plan.is_reached(begun), ended=False))
        self.state = changed(begun, todo=todo)
        # Whether hooks that are still to be called have lost outputs with an earlier process.
        self._lost = bool(self._collectors) and type(todo[0]) is Call

    def run(self) -> None:
        """Do what is next, until the run is left, or another epoch is to begin."""
        __tracebackhide__ = True
        try:
            self.reopen()
            while (action := self.next()) is not None:
                if type(action) is Update:
                    new, out = self.step(self.state, self.batch)
                    self.state = self.count(new, out)
                else:
                    todo = self.state.todo[1:]
                    self.state = DO[type(action)](self, self.state, action, todo)
            if self.is_left():
                self.leave()
        except BaseException as error:
            if not _survive(self, error):
                raise

    def next(self) -> Action | None:
        """Return what is next; None where the run is left, or another epoch is to begin.

        Before an update the generators are positioned, so that all its draws are a function of the
        seed and of its place.
        """
        __tracebackhide__ = True
        todo, stop = self.state.todo, self.interrupts.stop or self.state.stop
        if not todo or (stop is not None and self.is_left()):
            return None
        if type(todo[0]) is not Update:
            return todo[0]
        if self.batch is NONE_LEFT:
            if self.rests:
                return None
            if self.feed is None:
                self.state = self.open(changed(self.state, events=frozenset()))
            if self.batch is NONE_LEFT:  # the run was left where a loader has come to its end
                return Boundary(ended=True)
        self._position(mix(self._seed, self.state.batch))
        self.count_taken()
        self.stopwatch.resumed = time.perf_counter()
        self.doing = None
        return todo[0]

    def count_taken(self) -> None:
        """Count the batches that an update takes, in all processes: without padding, if known."""
        batches = len(self.batch) if self._in_windows else 1
        self.taken = min(self._share * batches, self.info.window)

    # --- signals

    def is_left(self) -> bool:
        """Return whether the run ends here for now: what is next is left to one that continues."""
        interrupted = self.interrupts.stop is not None or Stop.interrupts(self.state.stop)
        return interrupted and all(action.can_wait for action in self.state.todo[:1])

    def leave(self, together: bool = True) -> None:
        """End the run for now, and save it. ``together``: all processes do."""
        __tracebackhide__ = True
        if not self.state.todo:  # it has ended
            return
        self.doing = "the exchange between processes"
        if together:
            self.state = self._barrier(self.state, 0)
        self.interrupts.done = True
        state = self.state
        if isinstance(state.todo[0], Flush):  # the run has ended, but for that
            self.state = changed(state, todo=())
        else:  # the end of the run is not made, and hooks are not to see it
            stop, todo = self.interrupts.stop or state.stop, with_reason(state.todo, state.stop)
            self.state = changed(state, stop=stop, todo=todo, events=state.events - {END})
        self.flush_hooks()

    def flush_hooks(self) -> None:
        """Let the hooks complete what they keep: at the end of a run, and on SIGUSR1."""
        __tracebackhide__ = True
        self.doing = "the end of the run"
        for hook in self.plan.hooks:
            with _naming(hook):
                self.state = check_returned(hook, self.state, hook.flush(self.state), "flush")
        self.interrupts.save = False
        self.interrupts.done &= Stop.interrupts(self.state.stop)  # a hook may have changed it

    def obey(self, state: TrainState) -> TrainState:
        """Return the state with what signals ask for: to stop, or to save it first."""
        if self.interrupts.stop is None and not self.interrupts.save:
            return state
        state = self.interrupts.apply(state)
        if not self.interrupts.save or any(isinstance(action, Flush) for action in state.todo):
            return state
        return changed(state, todo=(Flush(), *state.todo))

    # --- updates

    def reopen(self) -> None:
        """Go to where the state was left: with the batches of its epoch, and the generators.

        Generators were captured after the fetch of the next batch, in mid-epoch.
        """
        __tracebackhide__ = True
        if self._usr1_stops:
            self.interrupts.stop_on_usr1()
        self.close_feed()
        self.rests = self.read_whole = False
        if self.state.batch:
            self.state = self.open(self.state)
        elif self.state.generators is not None:
            self.state.generators.install()
            self.state = changed(self.state, generators=None)

    def close_feed(self) -> None:
        """Stop reading the epoch."""
        self.feed, self.batch = None, NONE_LEFT

    def open(self, state: TrainState) -> TrainState:
        """Fetch the first batch of what is left of the epoch, and install the generators."""
        __tracebackhide__ = True
        plan, source = self.plan, self.source
        self.doing = LOADER
        if len(state.history):  # which may be that of another state, after a hook
            self.seconds = max(self.seconds, state.history[-1].seconds)
        self._quiet_until = 0.0
        self.stopwatch.newest = None
        self.stopwatch.resumed = time.perf_counter()
        if plan.step.window > 1 or source.reader.varies:
            state = self._count_windows(state)
        self.opened_at = at = state.epoch, state.batch, state.samples
        self.batches_in_epoch = 0
        self.read_whole = False
        source.begin(state.position, plan.prefetch * self.info.window, at)
        sizes = None if plan.step.window == 1 else self.info.windows.sizes(state.batch)
        late = plan.step.fetches_late
        self.feed = source.windows(sizes, state.backend.device, *at, plan.prefetch, late)
        self.fetch()
        if self.batch is NONE_LEFT and not state.batch:
            raise ValueError(explain_no_batches(state, source))
        # Before an update, in which processes whose batches differ in size might wait for ever.
        source.check_order(whole=False)
        self._seed = fold_in(state.seed, COMPUTE, state.epoch)
        if state.generators is not None:
            state.generators.install()
        else:
            rank = state.backend.data_rank
            seed_host(mix(fold_in(self._seed, rank) if rank else self._seed, state.batch))
        self.step = engine_of(state).read_from(source, plan.step.train, plan.step.window)
        return changed(state, generators=None, position=None)

    def fetch(self) -> None:
        """Fetch the next batch or window, or ``NONE_LEFT``. Note how long it was waited for."""
        __tracebackhide__ = True
        assert self.feed is not None
        watch, began = self.stopwatch, time.perf_counter()
        self.batch = next(self.feed, NONE_LEFT)
        now = time.perf_counter()
        watch.waited = now - began
        watch.trained += now - watch.resumed
        watch.resumed = now

    def _count_windows(self, state: TrainState) -> TrainState:
        """Note how many batches an update takes in this epoch, and so how many updates it has."""
        windows = self.plan.windows(state, self.source)
        batches = self.source.length_in(state.epoch)
        if (windows, batches) == (self.info.windows, self.info.batches_per_epoch):
            return state
        self.info = attrs.evolve(
            self.info, window=windows.largest, windows=windows, batches_per_epoch=batches,
            steps_per_epoch=self.plan.updates_in(batches, windows),
        )  # fmt: skip
        return changed(state, run=self.info)

    def start(self, state: TrainState, action: Start, todo: Todo) -> TrainState:
        """Find out what is due before the first update."""
        __tracebackhide__ = True
        state = changed(state, events=frozenset({START}))
        return changed(state, todo=(*due("start", state, self._ask(state), self.evaluated), *todo))

    def count(self, new: TrainState, out: Output) -> TrainState:
        """Return the state with an update counted, and what may be due after it. Fetch the next."""
        __tracebackhide__ = True
        if self.plan.step.fetches_late:
            self.count_taken()
        state = self.state = consume(new, out, self.taken, self.taken * self._size, self._recent)
        self.doing, self.left_out = LOADER, out.skip
        if out.skip is not None:
            self.info.live.notices.tell(state, "skip", reason=out.skip)
        try:
            if self._counts_items:
                state = self.state = self._count_items(state)
            self.fetch()
        except BaseException:
            self.state = changed(state, todo=(Boundary(),))
            raise
        ended = self.batch is NONE_LEFT
        asked = self.interrupts.stop is not None or self.interrupts.save
        quiet = self._asked_at <= state.step < self._quiet_until and not self._has_all_items(state)
        if not quiet or ended or asked or state.stop is not None or state.noted:
            return changed(state, todo=(Boundary(ended),))
        return changed(state, todo=self._hooks_then_update[0]) if self._calls_always else state

    def _has_all_items(self, state: TrainState) -> bool:
        """Return whether a state has reached the target in items."""
        return self._counts_items and (counted_of(state).now or 0) >= self._last_item

    def _count_items(self, state: TrainState) -> TrainState:
        """Return the state that knows its items, if the run depends on them."""
        if not self._counts_items:
            return state
        state = count_items(state, follow=True)
        if (now := counted_of(state).now) != now:  # NaN
            check_knows_items(state)
        return state

    # --- a boundary

    def boundary(self, state: TrainState, action: Boundary, todo: Todo) -> TrainState:
        """Decide what is due after an update."""
        __tracebackhide__ = True
        self._given = []
        if ended := action.ended or self.batch is NONE_LEFT:
            state = self._complete_epoch(state)
        if reached := self.plan.is_reached(state):
            state = changed(state, events=state.events | {END})
        if state.noted:
            noted = {mark: v for mark, v in state.noted.items() if not mark.startswith(RAN)}
            state = changed(state, noted=noted)
        actions, apart = (_CALL,), False
        if reached or not self._asked_at <= state.step < self._quiet_until:
            answers = self._ask(state)
            for clock in self._clocks:
                state = clock.noted(state)
            apart = reached and ends_apart(state, answers, self._adds_at_end)
            actions = due("boundary", state, answers, self.evaluated, apart)
        return changed(state, todo=(*actions, *onward(state, reached, ended, apart)))

    def _complete_epoch(self, state: TrainState) -> TrainState:
        """Return the state with its epoch counted, and close what has read it."""
        self.batches_in_epoch, self.read_whole = state.batch, self.batch is NONE_LEFT
        self._quiet_until = 0.0
        self.close_feed()
        events = state.events
        if state.ends is not None:  # a hook of this update has ended it, and saw its events
            events = frozenset()
            if not self.plan.step.carries:
                left = self.source.left(state.epoch, state.batch, state.samples) or 0
                state = count_left_out(state, self.info.windows.updates_of(left, state.batch))
        return changed(
            state, epoch=state.epoch + 1, batch=0, samples=0, ends=None,
            events=events | {EPOCH}, saved_on=None,
        )  # fmt: skip

    def _ask(self, state: TrainState) -> Answers:
        """Return what the moments say. Note until when they need not be asked."""
        __tracebackhide__ = True
        plan = self.plan
        answers = ask(plan.evaluations, plan.record_every, state, self._note, self._makers)
        self._asked_at = state.step  # a step of the pipeline may go back before it
        self._quiet_until = min([self._last_step, *(quiet(state) for quiet in self._quiet)])
        return answers

    def _note(self, doing: object) -> None:
        self.doing = doing

    def call(self, state: TrainState, action: Call, todo: Todo) -> TrainState:
        """Call a hook. Those after it are on the list already when it is called."""
        __tracebackhide__ = True
        plan, stage, nth = self.plan, action.stage, action.nth
        if stage == "boundary":
            hooks = plan.hooks
            if nth == 0:
                state = self._before_hooks(state, todo)
        else:
            every = stage == "start" and RECORD in state.events
            hooks = plan.hooks if every else plan.hooks_at(stage)
        if nth >= len(hooks):
            return self.obey(changed(state, todo=todo))
        if self._lost:
            self._lost, late = False, [each for each in hooks[nth:] if each not in self._adders]
            names = self.evaluated if END in state.events else self._evaluated_here(state)
            self._collect_for(late, state, names)
        hook = self.doing = hooks[nth]
        is_last = nth + 1 == len(hooks)
        if stage == "boundary" and type(todo[0]) is Update:
            after = self._hooks_then_update[nth + 1]
        else:
            after = todo if is_last else (Call(stage, nth + 1), *todo)
        given = changed(state, todo=after)
        new = check_returned(hook, given, call_hook(hook, given))
        if new is not given:
            new = self._as_continued(given, new, stage, after[: len(after) - len(todo)], todo)
        return self.obey(new) if is_last else new

    def _before_hooks(self, state: TrainState, todo: Todo) -> TrainState:
        """Exchange signals before the hooks of an update are called: they see a stop."""
        self.doing = "the exchange between processes"
        if asked := self.peers.poll(state, self.interrupts.requested):
            self.interrupts.obey(*asked)
        if self.interrupts.stop is not None:
            state = self.interrupts.apply(state)
        if End() in todo:  # they are called again then
            state = changed(state, events=state.events - {END})
        return state

    def _as_continued(
        self, given: TrainState, new: TrainState, stage: str, calls: Todo, todo: Todo
    ) -> TrainState:
        """Return what a hook has returned as the run continues with it.

        What is next is that of the run: a snapshot has its own.
        """
        __tracebackhide__ = True
        gone_back = went_back(given, new)
        if gone_back:
            self.close_feed()
            new = self._count_items(new)
        stop = first_stop(given.stop, new.stop)
        # Where the epoch has just ended, there is none to end.
        new = changed(new, stop=stop, ends=new.ends if new.batch else None, run=self.info)
        reached = self.plan.is_reached(new)
        if stage == "end":
            todo = (Flush(stop),) if reached or stop is not None else (Update(),)
        else:
            ended = todo[0] == Meet(ended=True)
            gone_back = gone_back or todo[0] == Meet(ended=False)
            todo = onward(new, reached, ended, gone_back=gone_back)
        new = changed(new, todo=(*calls, *todo))
        # The slots may be those of a checkpoint.
        return new if new.slots is given.slots else complete(self.plan.step, new)

    def meet(self, state: TrainState, action: Meet, todo: Todo) -> TrainState:
        """Leave an epoch, or what was run of it."""
        __tracebackhide__ = True
        self.doing, plan = "the exchange between processes", self.plan
        self.rests = action.ended
        if self.read_whole and self.batches_in_epoch and state.backend.main:
            check_length(self.source, *self.opened_at, self.batches_in_epoch)
        made = state.step + state.skipped - self.first_update
        for suggest in extensions("hints after an epoch"):
            suggest(plan.step.pipeline.middleware, state, self.stopwatch.trained, made)
        order = self.source.order if self.read_whole else 0
        state = self._barrier(state, order)
        state = self.obey(changed(state, todo=todo))
        if action.ended and state.stop is None and not plan.epochs:
            self.state, self.doing = state, "the end of the epoch"
            if (why := explain_no_updates(state, self.left_out)) is not None:
                raise ValueError(why)
        return state

    def _barrier(self, state: TrainState, order: int) -> TrainState:
        """Wait for the other processes. Return the state, which then knows the items of all."""
        if self.peers.alone:
            return state
        given = state, self.interrupts.requested, order, items_to_send(state)
        asked, items = self.peers.barrier(*given)
        if asked:
            self.interrupts.obey(*asked)
        return count_items(state, sent=items)

    def end(self, state: TrainState, action: End, todo: Todo) -> TrainState:
        """Decide what is due because the run ends."""
        __tracebackhide__ = True
        self.interrupts.check_time_left(over=True)
        state = changed(state, events=state.events - {START} | {END})
        answers = self._ask(state) if self.plan.evaluates_at(END) else Answers()
        return changed(state, todo=(*due("end", state, answers, self.evaluated), *todo))

    def flush(self, state: TrainState, action: Flush, todo: Todo) -> TrainState:
        """Let the hooks complete what they keep. At the end of a run, nothing is next."""
        __tracebackhide__ = True
        self.state = changed(state if todo else end_phase(state, self.plan.phase), todo=todo)
        try:
            self.flush_hooks()
        except BaseException:
            self.state = changed(self.state, todo=(action, *todo))
            raise
        return self.state

    # --- records

    def collect(self, state: TrainState, action: Collect, todo: Todo) -> TrainState:
        """Evaluate loaders for the hooks that ask for outputs at the end."""
        __tracebackhide__ = True
        self._collect_for(self._late, state, action.loaders)
        if adders := [hook for hook in self._late if hook in self._adders]:
            last = state.history[-1] if len(state.history) else None
            items = last.items if last is not None and last.step == state.step else None
            record = Record(state.epoch, state.step, {}, self.seconds, closing=True, items=items)
            full = self._with_numbers(state, record, state.metrics, (), adders)
            if full is not record:
                state = with_record(state, state.history.append(full), state.metrics)
        return changed(state, todo=todo)

    def _collect_for(self, hooks: Sequence[Hook], state: TrainState, names: Iterable[str]) -> None:
        """Evaluate loaders for those of some hooks that ask for the outputs."""
        __tracebackhide__ = True
        hooks = [hook for hook in hooks if hook in self._collectors]
        for name in names:
            if receivers := asking(hooks, state, name):
                self._evaluate(state, name, receivers)

    def _evaluated_here(self, state: TrainState) -> list[str]:
        """Return the loaders that the record of this boundary is of."""
        made = state.history[-1].metrics if RECORD in state.events else ()
        loaders = loaders_in(made)
        return [name for name in self.evaluated if name in loaders]

    def append(self, state: TrainState, action: Append, todo: Todo) -> TrainState:
        """Append a record, unless there is nothing to record."""
        __tracebackhide__ = True
        kind, closing = Append.KINDS[action.kind], action.kind == "closing"
        if closing:  # it has the numbers of what was evaluated before, maybe in another process
            lost = [each for each in self._late if each in self._adders and each not in self._given]
            self._collect_for(lost, state, self._evaluated_here(state))
        report: dict[str, Metric] = {}
        for name in self.plan.trained:
            report |= training_metrics(name, state) if name in kind.trained else {}
        began = time.perf_counter()
        loaders = [name for name in action.names if name in self.evaluated]
        for loader in loaders:
            report |= self._evaluate(state, loader, asking(self._collectors, state, loader))
        self.doing = "the record"
        seconds = max(self.stopwatch.spent(), self.seconds)  # another process may be ahead
        report["seconds"] = Max(seconds)
        in_first_epoch = state.epoch + bool(state.batch) <= 1
        report["items"] = items_so_far(state.metrics, in_first_epoch)
        if loaders:
            report["evaluated"] = Max(time.perf_counter() - began)
        values = Metrics(engine_of(state).reduce(report, "train/")).read()
        self.seconds = seconds = values.pop("seconds")
        items = values.pop("items")
        state = changed(state, todo=todo)
        if not (values or action.names or "train" in kind.trained):
            return state  # since the last record, every update was skipped
        if loaders:
            self.stopwatch.evaluated = values.pop("evaluated")
            self.stopwatch.newest = None
        self.stopwatch.recorded = True
        values = self.plan.step.derive(values, self.plan.loaders.evaluated, state.history)
        known = None if math.isnan(items) else items
        record = Record(state.epoch, state.step, values, seconds, closing, known)
        metrics = state.metrics
        if kind.begins_interval:
            metrics = Metrics(metrics).without_recent()
        record = self._with_numbers(state, record, metrics, action.names, self._adders)
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
            made = hook.makes_records
            given = hook in self._given or hook not in self._collectors
            if not (any(name in names for name in made) if made else given):
                continue
            self.doing = hook
            self.peers.hurry()  # it may take longer than an update
            # In a history of its own: that of the run does not have the record yet.
            numbers = hook.numbers(with_record(state, state.history[:].append(record), metrics))
            check_numbers(hook, numbers, record)
            if numbers:
                record = attrs.evolve(record, metrics={**record.metrics, **numbers})
        return record

    def _evaluate(
        self, state: TrainState, loader: str, receivers: Sequence[Hook]
    ) -> dict[str, Metric]:
        """Return the metrics of a loader by their names in a record. Hand out the outputs."""
        __tracebackhide__ = True
        self.doing, source = loader, self.evaluated[loader]
        self.peers.hurry()  # its batches may take longer than updates
        given = (self.plan.step, state, loader, source, self._watch)
        found = evaluation_metrics(*given, receivers)
        self._given += receivers
        self.peers.hurry()  # or updates longer than its batches
        return found

    def _watch(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Abandon an evaluation that has no time left. Tell the hooks how far it is."""
        __tracebackhide__ = True
        if asked := self.peers.poll(state, self.interrupts.requested):
            self.interrupts.obey(*asked)
        self.interrupts.check_time_left(over=state.stop is not None)
        for hook in self.plan.hooks:
            self.doing = hook
            hook.evaluating(state, loader, done, total)
        self.doing = loader


DO: Mapping[type[Action], Callable[..., TrainState]] = {
    Start: World.start, Boundary: World.boundary, Append: World.append,
    Collect: World.collect, Call: World.call, Meet: World.meet, End: World.end, Flush: World.flush,
}  # fmt: skip
_CALL = Call("boundary")


# --------------------------------------------------------------------------------------------------
# The metrics of a record.


def training_metrics(of: str, state: TrainState) -> dict[str, Metric]:
    """Return the metrics of training by their names in a record, the loss first.

    Learning rates are those of the optimizers, unless a middleware that sets them has reported what
    an update used.

    Args:
        of: "train": those since the epoch began. "recent": those since the last record.
        state: the state.
    """
    prefix, found = f"{of}/", state.metrics
    if prefix != RECENT:
        found = {
            f"{prefix}{k}": m for k, m in Metrics(found).without_recent().items() if k != ITEMS
        }
    named = {name: metric for name, metric in found.items() if name.startswith(prefix)}
    if not named:
        return {}
    if (loss := f"{prefix}loss") in named:
        named = {loss: named[loss], **named}
    rates = Setting.used(labelled_groups(optimizers_in(state.optimizer)), "lr")
    return {**named, **{f"{prefix}{k}": r for k, r in rates.items() if f"{prefix}{k}" not in named}}


def evaluation_metrics(
    step: PipelineStep,
    state: TrainState,
    loader: str,
    source: Source,
    watch: Callable[[TrainState, str, int, int | None], object],
    receivers: Sequence[Hook] = (),
) -> dict[str, Metric]:
    """Evaluate a loader. Return its metrics by their names in a record.

    ``watch`` is called with the state, the name, the number of batches that this process has
    evaluated, from 0, and how many there are, if that is known. ``receivers`` are the hooks that
    ask for the outputs.
    """
    __tracebackhide__ = True
    run = None if state.run is None else attrs.evolve(state.run, loader=loader)
    length = source.length_in(0)
    share = None if length is None else -(-length // state.backend.data_size)
    tell = lambda done: watch(state, loader, done, share)
    outputs: list[list[Output]] | None = [] if receivers else None
    device = state.backend.device
    began = _wait_and_read_clock(device) if step.is_timed else 0.0
    with isolated(device):
        found = measure(step, changed(state, run=run), source, True, tell, outputs)
    if step.is_timed:
        if "time/evaluate" in found:
            raise ValueError(
                "timings reports the metric 'time/evaluate', which another middleware reports "
                "already: rename that metric"
            )
        found["time/evaluate"] = Max(_wait_and_read_clock(device) - began)
    gathered = [] if outputs is None else gather_outputs(outputs)
    for hook in receivers:
        with _naming(hook):
            hook.receive(state, gathered)
    return {f"{loader}/{name}": metric for name, metric in found.items()}


def _wait_and_read_clock(device: torch.device) -> float:
    """Return the time of the host when a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def asking(collectors: Sequence[Hook], state: TrainState, loader: str) -> list[Hook]:
    """Return the hooks that ask for the outputs of a loader."""
    found = []
    for hook in collectors:
        with _naming(hook):
            if hook.collects(state, loader):
                found.append(hook)
    return found


# --------------------------------------------------------------------------------------------------
# What becomes of a run in which an exception is raised: no update that was made is lost.


def _survive(world: World, error: BaseException) -> bool:
    """Return whether the run ends as it would without this error: after a signal."""
    __tracebackhide__ = True
    before, alone = world.state, world.peers.alone
    if world.doing is None:  # the step may have applied its update already
        if world.plan.step.fetches_late and world.batch is not NONE_LEFT:
            world.count_taken()
        made = newest(before, world.taken, world.taken * (world.source.reader.batch_size or 0))
        if made is not before:
            world.state = changed(made, todo=(Boundary(),))
    state = world.state
    # With several processes, fail: the others cannot know of it, and the launcher ends them.
    interrupted = _is_interruption(world, error) and Ownership.belongs_to(state)
    lost = alone and (interrupted or _has_lost_its_workers(world, error))
    if lost or isinstance(error, Abandoned):
        world.interrupts.stop = world.interrupts.stop or INTERRUPTED
        world.leave(together=False)
        return True
    batch = world.batches_in_epoch if EPOCH in state.events else state.batch
    if world.doing is None and not state.step:
        note_pair(error, world.plan.loaders.train)
    last = explain(error, state, world.plan.step, world.doing, batch)
    world.peers.explain(error)
    if last is not None and state is not before:
        error.add_note(
            "the update was applied before this; middleware around it may not have finished "
            "their work"
        )
    elif last is not None and alone and isinstance(error, Exception):
        tell_hooks(world.plan.hooks, last, error)
    return False


def _is_interruption(world: World, error: BaseException) -> bool:
    """Return whether Ctrl-C came where no handler could be installed."""
    return isinstance(error, KeyboardInterrupt) and world.interrupts.stop is None


def _has_lost_its_workers(world: World, error: BaseException) -> bool:
    """Return whether the signal that stops the run has killed the workers of a loader.

    No further batch is needed then.
    """
    loading = isinstance(world.doing, str) and world.doing in (LOADER, *world.evaluated)
    if not (loading and isinstance(error, Exception) and world.interrupts.stop is not None):
        return False
    return not world.plan.step.layer_of(error, "")
