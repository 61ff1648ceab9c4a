"""The plan of a run: the arguments of ``fit``, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from fnloop._core.average import check_not_averaged
from fnloop._core.call import name_of
from fnloop._core.carry import updates_of_call
from fnloop._core.events import START
from fnloop._core.frozen import put_back_restored
from fnloop._core.history import History
from fnloop._core.left_out import left_out
from fnloop._core.middleware import Middleware
from fnloop._core.monitor import check_names
from fnloop._core.optimizers import forget_schedules, groups_in
from fnloop._core.run_info import RunInfo
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.stops import BOUNDARY, end_in, is_interruption, kind_of
from fnloop._data.loaders import Loaders, read_loaders, sharded
from fnloop._data.source import Source, num_updates
from fnloop._display import checks
from fnloop._hooks.early_stop import halt_on_nonfinite
from fnloop._hooks.moments import Moment, Trigger
from fnloop._hooks.progress import progress
from fnloop._hooks.wrapper import Hook, HookFn, layers, slots_of
from fnloop._loop.boundary import (
    Moments,
    check_moment,
    own_clock,
    read_moments,
)
from fnloop._loop.check_hooks import check_metrics, check_together, read_hooks
from fnloop._loop.errors import warn_on_main
from fnloop._loop.phases import (
    absolute_targets,
    begin_phase,
    check_phase,
    name_phase,
    phase_of,
    skipped_phase,
)
from fnloop._step.alternate import AlternateStep
from fnloop._step.composition import total_in
from fnloop._step.pipeline import Pipeline, PipelineStep

__all__ = ["Plan", "check_step", "describe", "make_plan"]


@attrs.frozen
class Plan:
    """What a run is to do.

    Args:
        step: the step.
        loaders: the loader to train on, and those to evaluate.
        epochs, steps: the targets for ``state.epoch`` and ``state.step``; None: not a target.
        hooks: the hooks, in the order in which they are called.
        evaluations: when to evaluate, and which loaders.
        record_every: when to make a record in any case; None means never.
        prefetch: how many windows are fetched ahead.
        phase: the name of the phase, or None.
        may_stall: whether all updates of two epochs may be left out before a target in steps.
    """

    step: PipelineStep
    loaders: Loaders
    epochs: int | None
    steps: int | None
    hooks: tuple[Hook, ...]
    evaluations: tuple[tuple[Moment, tuple[str, ...]], ...]
    record_every: Moment | None
    prefetch: int
    phase: str | None
    may_stall: bool = False

    def begin(self, state: TrainState) -> TrainState:
        """Return the state with which the run begins; a new phase begins here.

        What has only interrupted the run before is forgotten. What was left of its end is due only
        if it is still over: its target may have been raised, or its stop taken back.
        """
        if is_interruption(state.stop):
            end = end_in(state.left)
            state = attrs.evolve(state, stop=None if end is None else end.stop)
        state = self._begin(state)
        if state.left and not self.is_over(state):
            state = attrs.evolve(state, left=tuple(x for x in state.left if x == BOUNDARY))
        return state

    def _begin(self, state: TrainState) -> TrainState:
        for hook in self.hooks:
            state = hook.take_back(state)
        state = put_back_restored(state, self.phase)
        if self.phase is None:
            return state
        if phase_of(state, self.phase) is not None:
            return name_phase(state, self.phase)
        if (skipped := skipped_phase(state.phases, self.phase)) is not None:
            warn_on_main(
                state,
                f"fit: the phase {self.phase!r} begins where {skipped.name!r} ended, which this "
                f"program has not named. If it comes later in the program, stop here: "
                f"{self.phase!r} would have to begin before it, in another folder",
            )
        forget_schedules(groups_in(state.optimizer))
        return begin_phase(self.step.renew_slots(state), self.phase)

    def passes_over(self, state: TrainState) -> bool:
        """Return whether a script that was started again passes over a phase on its way."""
        phase = None if self.phase is None else phase_of(state, self.phase)
        return phase is not None and phase.done and not phase.named and phase != state.phases[-1]

    def is_over(self, state: TrainState) -> bool:
        """Return whether a run that has reached this state is at its end."""
        return state.stop is not None or self.is_reached(state)

    def is_reached(self, state: TrainState) -> bool:
        """Return whether a state is at the target of the run."""
        return (
            (self.steps is not None and state.step >= self.steps)
            or (self.epochs is not None and state.epoch >= self.epochs)
            or self._is_done(state)
        )

    def is_past(self, state: TrainState) -> bool:
        """Return whether a state is further than this run would have got.

        Its last call of the step may have gone beyond the target, with the windows of ``tbptt``.
        """
        before = state.step - updates_of_call(state)
        return (self.steps is not None and before >= self.steps) or (
            self.epochs is not None and (state.epoch, state.batch) > (self.epochs, 0)
        )

    def _is_done(self, state: TrainState) -> bool:
        phase = None if self.phase is None else phase_of(state, self.phase)
        return phase is not None and phase.done

    @property
    def total(self) -> int | None:
        """The samples of an update, of all processes together, if the step says so."""
        return total_in(self.step.pipeline.middleware)

    def window_in(self, state: TrainState, later: int = 0) -> int:
        """Return how many batches the step takes in this process, at most.

        Args:
            state: the state.
            later: how many epochs later than now.
        """
        phase = None if self.phase is None else phase_of(state, self.phase)
        return self.step.window_in(state.epoch + later - (0 if phase is None else phase.epoch))

    def check(self, info: RunInfo, history: History) -> None:
        """Raise if a hook or a trigger cannot work in this run.

        Raises:
            ValueError: two hooks share a slot or a folder, a trigger would never be due, or a
                job would be requeued that is not saved.
            KeyError: a hook monitors a metric that this run does not have, or a middleware is for
                a loader that it does not have.
        """
        check_together(self.hooks)
        every_layer = [layer for hook in self.hooks for layer in layers(hook)]
        recent = () if self.record_every is None else ("recent",)
        known = ("train", *recent, *info.evaluated)
        check_names(every_layer, known, self.loaders.evaluated)
        check_metrics(self.step, self.hooks, info.evaluated, history)
        self.step.check_loaders(("train", *self.loaders.evaluated))
        self.step.check_evaluation(info.evaluated)
        for trigger in self.triggers:
            trigger.check(info)

    @property
    def triggers(self) -> tuple[Moment, ...]:
        """What says when to evaluate and to make a record."""
        own = () if self.record_every is None else (self.record_every,)
        return (*(trigger for trigger, _ in self.evaluations), *own)

    def hooks_at(self, event: str) -> list[Hook]:
        """Return the hooks that may be due at a boundary without an update: "start" or "end"."""
        return [
            hook for hook in self.hooks if any(event in layer.outside for layer in layers(hook))
        ]

    def begins_before(self, state: TrainState) -> bool:
        """Return whether no update was tried yet, and something is due before the first."""
        begun = state.step or state.skipped or len(state.history)
        return not begun and (bool(self.hooks_at(START)) or self.evaluates_at(START))

    def evaluates_at(self, event: str) -> bool:
        """Return whether an evaluation may be due at a boundary without an update."""
        return any(event in trigger.outside for trigger, _ in self.evaluations)

    def check_position(self, state: TrainState) -> None:
        """Raise if the position within the epoch means nothing to this many processes."""
        now = state.backend.data_size
        in_shards = isinstance(self.loaders.train, sharded) and state.batch > 0
        if in_shards and state.saved_on not in (None, now):
            raise ValueError(
                f"this checkpoint was written in mid-epoch by {state.saved_on} processes, but this "
                f"run has {now}, whose shards of the loader differ: resume on {state.saved_on} "
                "processes, or from the end of an epoch"
            )

    def why_nothing_to_do(self, state: TrainState) -> str:
        """Return the message for a state that is at its end already."""
        if self._is_done(state):
            return f"fit: nothing to do: the phase {self.phase!r} has ended"
        if state.stop is not None:
            advice = "To continue anyway, pass attrs.evolve(state, stop=None)"
            if kind_of(state.stop) == "limit":
                advice = "To continue, raise the limit: time_limit(...)"
            return f"fit: nothing to do: the run was stopped ({state.stop}). {advice}"
        phase = None if self.phase is None else phase_of(state, self.phase)
        epoch, step = (0, 0) if phase is None else (phase.epoch, phase.step)
        given = (("epochs", self.epochs, epoch), ("steps", self.steps, step))
        targets = [f"{k}={target - first}" for k, target, first in given if target is not None]
        if phase is not None:
            return (
                f"fit: nothing to do: the phase {phase.name!r} began at epoch {epoch}, step "
                f"{step}, and is at its target, {', '.join(targets)}. It ends here"
            )
        return (
            f"fit: nothing to do: the state is at epoch {state.epoch}, step {state.step}, and the "
            f"target is {', '.join(targets)}. Targets are absolute: increase one to continue"
        )


def make_plan(
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    epochs: int | None,
    steps: int | None,
    hooks: Sequence[HookFn] | None,
    evaluate_every: Moments,
    record_every: Trigger | None,
    prefetch: int,
    phase: str | None,
) -> Plan:
    """Check the arguments of ``fit`` and return the plan.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError, ValueError: an argument is not what it should be.
    """
    check_step(step, "fit")
    check_not_stale(state, "fit")
    check_not_averaged("fit", state)
    check_phase(phase, state)
    found = read_loaders(loaders)
    for name, target in (("epochs", epochs), ("steps", steps)):
        if target is not None:
            meaning = f"the target for state.{name[:-1]}, or None"
            checks.integer("fit", name, target, meaning, least=0)
    checks.integer("fit", "prefetch", prefetch, "the windows that are fetched ahead")
    checked = read_hooks((progress(), halt_on_nonfinite()) if hooks is None else hooks)
    evaluations = read_moments(evaluate_every, tuple(found.evaluated))
    check_moment("record_every", record_every)
    if phase is not None:
        epochs, steps = absolute_targets(state, phase, epochs, steps)
    elif epochs is None and steps is None:
        epochs = state.epoch + 1
    moment = None if record_every is None else own_clock(record_every)
    return Plan(step, found, epochs, steps, checked, evaluations, moment, prefetch, phase)


def describe(
    plan: Plan,
    state: TrainState,
    source: Source,
    evaluated: tuple[str, ...],
    clock: Callable[[], float] | None,
) -> RunInfo:
    """Return the facts about a run.

    Args:
        plan: what the run is to do.
        state: the state that it begins with.
        source: the training loader.
        evaluated: the names of the loaders that it evaluates.
        clock: the time that all processes agree on, if there are several.
    """
    window = source.batches_in_update(plan.window_in(state))
    phase = None if plan.phase is None else phase_of(state, plan.phase)
    batches = source.length_in(state.epoch)
    per_epoch = None if plan.step.carries else num_updates(batches, window)
    total = plan.steps  # tbptt makes as many updates as a batch has windows
    if plan.epochs is not None and per_epoch is not None:
        left = num_updates(source.left(state.epoch, state.batch, state.samples), window) or 0
        left += _updates_later(plan, state, source, plan.epochs - state.epoch)
        # Skipped updates count, and those left out: so a run that is resumed after some has the
        # same total. Those of earlier phases do not.
        lost = state.skipped + left_out(state) - (0 if phase is None else phase.skipped)
        total = state.step + lost + left
        total = total if plan.steps is None else min(total, plan.steps)
    return RunInfo(
        plan.epochs, total, per_epoch, batches, window, evaluated, clock,
        precision=plan.step.precision_in(state), first_step=0 if phase is None else phase.step,
        position_at=source.positions.at, indices_at=source.indices,
        hook_slots=slots_of(plan.hooks),
        turns=tuple(plan.step.settings.steps) if isinstance(plan.step, AlternateStep) else (),
    )  # fmt: skip


def _updates_later(plan: Plan, state: TrainState, source: Source, epochs: int) -> int:
    """Return the updates of the next epochs but the running one."""

    def updates(later: int) -> int:
        window = source.batches_in_update(plan.window_in(state, later))
        return num_updates(source.length_in(state.epoch + later), window) or 0

    # From then on neither the window nor the length changes any more.
    settled = max([1, *(first for m in plan.step.pipeline.middleware for first in m.windows)])
    settled = settled if source.lengths is None else max(settled, epochs)
    varying = sum(updates(later) for later in range(1, min(epochs, settled)))
    return varying + max(epochs - settled, 0) * updates(settled)


def check_step(step: object, caller: str) -> None:
    """Raise unless this is a step, as a pipeline makes it.

    Raises:
        TypeError: it is something else; the message says what to write.
    """
    if isinstance(step, PipelineStep):
        return
    name = name_of(step)
    if isinstance(step, TrainState):
        hint = f"The step comes first: {caller}(step, state, ...)"
    elif isinstance(step, Pipeline):
        hint = f"It lacks its loss function: write {name}(loss_fn)"
    elif isinstance(step, Middleware):
        hint = f"Write pipeline({name})(loss_fn)"
    elif callable(step) and not isinstance(step, torch.nn.Module):
        hint = f"If {name} is a loss function, write {caller}(pipeline()({name}), ...)"
    else:
        hint = "Write pipeline()(loss_fn)"
    raise TypeError(
        f"{caller} expects a step, as pipeline(...)(loss_fn) returns it; got {name:.60} "
        f"({type(step).__name__}). {hint}"
    )
