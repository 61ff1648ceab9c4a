"""What a run has besides its state, and what happens at its boundaries."""

from __future__ import annotations

import math
import time

import attrs

from fnloop._core.metrics import Max, read
from fnloop._core.record import Record
from fnloop._core.rng import COMPUTE, fold_in, isolated, mix, seed_host
from fnloop._core.run_info import RunInfo
from fnloop._core.state import (
    EPOCH,
    PENDING,
    RECORD,
    UPDATE,
    TrainState,
    clear_parameter_cache,
    newest,
    owns_handles,
)
from fnloop._core.types import Metric
from fnloop._data.source import num_updates
from fnloop._loop.errors import (
    check_returned,
    explain,
    explain_no_batches,
    tell_hooks,
    warn_on_main,
)
from fnloop._loop.evaluate import measure, open_loader
from fnloop._loop.hints import suggest_fused
from fnloop._loop.interrupts import INTERRUPTED, TERMINATED, Interrupts
from fnloop._loop.peers import is_alone, peers_of
from fnloop._loop.plan import Plan
from fnloop._step.engine import engine_of
from fnloop._step.layers import STEP

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
        self.source = open_loader(plan.loaders.train, state)
        evaluated = {k: open_loader(v, state) for k, v in plan.loaders.evaluated.items()}
        self.evaluated = {} if plan.evaluate_every is None else evaluated
        self.peers = peers_of(state)
        self.info = self._describe(state)
        plan.check(self.info)
        self.last_step = math.inf if plan.steps is None else plan.steps
        self.interrupts = Interrupts()
        self.phase: object = None  # what it is doing; None: the step, whose layers name themselves
        self.taken = 0  # batches that the update takes, in all processes
        self.batches_in_epoch = 0  # of the epoch that has just ended
        self.before_record = False  # whether an update is applied whose boundary has no record yet
        self.rolled_back = False  # whether a hook went back to a snapshot
        known = state.history[-1].seconds if len(state.history) else 0.0
        self.started = time.monotonic() - known
        self.state = self._first_state(attrs.evolve(state, run=self.info))

    def _describe(self, state: TrainState) -> RunInfo:
        """Return the facts about the run."""
        plan, source = self.plan, self.source
        window = plan.step.window * state.backend.world_size
        per_epoch = num_updates(source.length, window)
        total = plan.steps
        if plan.epochs is not None and per_epoch is not None:
            left = num_updates(source.left(state.batch, state.samples), window) or 0
            left += (plan.epochs - state.epoch - 1) * per_epoch
            # Skipped updates count: so a run that is resumed after some has the same total.
            total = state.step + state.skipped + left
            total = total if plan.steps is None else min(total, plan.steps)
        evaluated, clock = tuple(self.evaluated), self.peers.clock
        return RunInfo(plan.epochs, total, per_epoch, source.length, window, evaluated, clock)

    def _first_state(self, state: TrainState) -> TrainState:
        """Return the state with which the run begins."""
        __tracebackhide__ = True
        for hook in self.plan.hooks:
            if (begin := getattr(hook, "begin", None)) is not None:
                state = check_returned(hook, begin(state))
        if not state.model.training:
            warn_on_main(
                state,
                "fit: the model was in evaluation mode as a whole; it is trained in training mode "
                "(model.train())",
            )
            state.model.train()
        clear_parameter_cache(state)
        engine_of(state).begin_run(state)
        suggest_fused(state.optimizer, state.backend.device)
        try:
            return self.plan.step.init_slots(state)
        except Exception as error:
            explain(error, state, self.plan.step, "the making of slots", state.batch)
            raise

    def is_over(self) -> bool:
        """Return whether the run is at its end."""
        return self.plan.is_over(self.state)

    # --- an epoch

    def begin_epoch(self) -> int:
        """Begin an epoch, or continue the one that was left. Return the seed of its draws."""
        events, self.phase, self.rolled_back = self.state.events, LOADER, False
        left = events & {UPDATE, PENDING} if PENDING in events else frozenset()
        self.state = attrs.evolve(self.state, events=left)
        return fold_in(self.state.seed, COMPUTE, self.state.epoch)

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
            rank = state.backend.rank
            seed_host(mix(fold_in(seed, rank) if rank else seed, state.batch))
        self.state = attrs.evolve(state, events=state.events - {PENDING})
        return (ended or PENDING in state.events) and self.boundary(ended)

    def end_epoch(self, ended: bool) -> None:
        """End an epoch, or what was run of it; and the run, if it is over."""
        __tracebackhide__ = True
        self.phase = "the exchange between processes"
        order = self.source.order if ended else 0
        self.peers.barrier(self.state, self.interrupts, order)
        self.state = self.interrupts.apply(self.state)
        stopped_by_hook = self.state.stop not in (None, INTERRUPTED, TERMINATED)
        if stopped_by_hook and RECORD not in self.state.events:
            self.before_record = True
            self.state = self._append_record(self.state, evaluate=True, closing=True)
            self.before_record = False
        if self.interrupts.save or self.is_over():
            self.phase = "the end of the run"
            self._flush_hooks()

    # --- a boundary

    def boundary(self, ended: bool) -> bool:
        """Evaluate and record, if that is due, and call the hooks.

        Args:
            ended: whether the epoch has no batch left.

        Returns:
            Whether the epoch, or the run, is over.
        """
        __tracebackhide__ = True
        self.phase, self.before_record = self.plan.evaluate_every or "the record", True
        state = self._complete_epoch() if ended else self.state
        due = self.plan.is_due(state)
        if due or ended or state.step >= self.last_step:
            state = self._record(state, due, ended)
        self.state, self.before_record = state, False
        self.phase = "the exchange between processes"
        self.peers.poll(state, self.interrupts)
        if self.interrupts.stop is not None:
            self.state = self.interrupts.apply(state)
        before = self.state
        for hook in self.plan.hooks:
            self.phase = hook
            self.state = check_returned(hook, hook(self.state))
        if self.interrupts.stop is not None:  # a signal may have come during the hooks
            self.state = self.interrupts.apply(self.state)
        if self.interrupts.save:
            self._flush_hooks()
        self.rolled_back = self.state.model is not before.model
        if self.state.run is None:
            self.state = attrs.evolve(self.state, run=self.info)
        if self.state.slots is not before.slots:  # they may be those of a checkpoint
            self.state = self.plan.step.init_slots(self.state)
        stopped = self.state.stop is not None or self.state.step >= self.last_step
        return ended or self.rolled_back or stopped

    def _complete_epoch(self) -> TrainState:
        """Return the state with its epoch counted. ``self.state`` stays until there is a record."""
        self.batches_in_epoch = self.state.batch
        return attrs.evolve(
            self.state, epoch=self.state.epoch + 1, batch=0, samples=0, metrics={},
            events=self.state.events | {EPOCH}, saved_on=None,
        )  # fmt: skip

    def _record(self, state: TrainState, due: bool, ended: bool) -> TrainState:
        """Return the state with a record, if one is due: by its trigger, the epoch or the run."""
        __tracebackhide__ = True
        closing = not (due or ended)
        if closing and self.interrupts.stop is not None:
            # A signal came during the last update: the run that continues makes the record.
            return attrs.evolve(state, events=state.events | {PENDING})
        return self._append_record(state, evaluate=due or closing, closing=closing)

    def _append_record(self, state: TrainState, *, evaluate: bool, closing: bool) -> TrainState:
        """Return the state with one more record in its history.

        Args:
            state: the state.
            evaluate: whether to evaluate the other loaders.
            closing: whether the run ends here, between two records.
        """
        __tracebackhide__ = True
        running = self.state.metrics  # of the epoch, which ``state`` may have completed
        names = sorted(running, key=lambda name: name != "loss")  # the loss first
        report: dict[str, Metric] = {f"train/{name}": running[name] for name in names}
        for loader, source in self.evaluated.items() if evaluate else ():
            self.phase = loader
            with isolated(state.backend.device):
                found = measure(self.plan.step, state, source)
            report |= {f"{loader}/{name}": metric for name, metric in found.items()}
        self.phase = "the record"
        known = state.history[-1].seconds if len(state.history) else 0.0
        seconds = max(time.monotonic() - self.started, known)  # a clock may be set back
        values = read(engine_of(state).reduce_report(report | {"seconds": Max(seconds)}, "train/"))
        seconds = values.pop("seconds")
        history = state.history.append(Record(state.epoch, state.step, values, seconds, closing))
        return attrs.evolve(state, history=history, events=state.events | {RECORD})

    def _flush_hooks(self) -> None:
        """Let the hooks finish what they keep: at the end of a run, and on SIGUSR1."""
        __tracebackhide__ = True
        for hook in self.plan.hooks:
            if (flush := getattr(hook, "flush", None)) is not None:
                self.state = check_returned(hook, flush(self.state))
        self.interrupts.save = False

    # --- an exception

    def survive(self, error: BaseException) -> bool:
        """Return whether the run ends as it would without this error: after a signal.

        If not, the error gets a note of where it happened, and the state that was reached.
        """
        __tracebackhide__ = True
        state, phase = self.state, self.phase
        if phase is None:  # the step may have applied its update already
            state = newest(state, self.taken, self.taken * (self.source.batch_size or 0))
        applied = state is not self.state
        if applied or (phase is not None and self.before_record):
            state = attrs.evolve(state, events=state.events | {PENDING})
        # With several processes, fail: the others cannot know of it, and the launcher ends them.
        alone = is_alone(state)
        interrupted = self._is_interruption(error) and owns_handles(state)
        if alone and (interrupted or self._has_lost_its_workers(error)):
            self.interrupts.done, self.rolled_back = True, False
            stop = state.stop or self.interrupts.stop or INTERRUPTED
            self.state = attrs.evolve(state, stop=stop)
            self._flush_hooks()
            return True
        batch = self.batches_in_epoch if EPOCH in state.events else state.batch
        last = explain(error, state, self.plan.step, phase, batch)
        self.peers.explain(error)
        if last is not None and applied:
            error.add_note(
                "the update was applied before this; middleware around it may not have finished "
                "their work"
            )
        elif last is not None and alone and isinstance(error, Exception):
            tell_hooks(self.plan.hooks, last, error)
        return False

    def _is_interruption(self, error: BaseException) -> bool:
        """Return whether Ctrl-C came where no handler could be installed."""
        return isinstance(error, KeyboardInterrupt) and self.interrupts.stop is None

    def _has_lost_its_workers(self, error: BaseException) -> bool:
        """Return whether the signal that stops the run has killed the workers of a loader.

        No further batch is needed then.
        """
        loading = isinstance(self.phase, str) and self.phase in (LOADER, *self.evaluated)
        if not (loading and isinstance(error, Exception) and self.interrupts.stop is not None):
            return False
        return self.plan.step.layer_of(error) == STEP
