"""The plan of a run: the arguments of ``fit``, checked; its phases and its hooks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs
import torch

from fnloop._core.history import (
    WHOLE_RUN,
    History,
    Phase,
    keys_of,
)
from fnloop._core.optimizers import groups_in
from fnloop._core.records import Record
from fnloop._core.runs import LEFT_OUT, Live, RunInfo, Stop, Windows, local_clock, reason_of
from fnloop._core.settings import forget_schedules
from fnloop._core.several import Several
from fnloop._core.state import (
    TrainState,
    begin_count,
    changed,
    check_not_stale,
    count_items,
    items_of_call,
    left_out,
    unwrap,
    updates_of_call,
    without_metrics,
)
from fnloop._core.types import START, Middleware, Step, name_of
from fnloop._data.loaders import Loaders, read_loaders, sharded
from fnloop._data.source import Source
from fnloop._display import checks
from fnloop._extensions import extensions
from fnloop._hooks.hook import (
    BuiltIn,
    ConditionalHook,
    Hook,
    HookFn,
    Moment,
    Trigger,
    as_hook,
    check_beside,
    every_layer,
    is_moment,
    is_of_user,
    layers,
    may_be_due,
    show_call,
    slots_of,
    unwrap_hook,
)
from fnloop._loop.boundary import Moments, check_moment, own_clock, read_moments, resumed
from fnloop._loop.errors import warn_on_main
from fnloop._step.pipeline import PipelineStep


@attrs.frozen(slots=False)  # what is cached has its place among the attributes
class Plan:
    """What a run is to do.

    Args:
        step: the step.
        loaders: the loader to train on, and those to evaluate.
        epochs, steps, items: the targets for ``state.epoch``, ``state.step`` and ``state.items``;
            None: not a target.
        hooks: the hooks, in the order in which they are called.
        evaluations: when to evaluate, and which loaders; and when to make the numbers of a hook.
        record_every: when to make a record in any case; None means never.
        prefetch: how many windows are fetched ahead.
        phase: the name of the phase, or None.
        assumed_items: what schedules see as the target for ``state.items`` where there is none, in
            a trial of a run; or None.
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
    items: int | None = None
    assumed_items: int | None = None

    @staticmethod
    def of(
        step: Step,
        state: TrainState,
        loaders: object,
        epochs: int | None = None,
        steps: int | None = None,
        hooks: Sequence[HookFn] | None = (),
        evaluate_every: Moments = None,
        record_every: Trigger | None = None,
        prefetch: int = 1,
        phase: str | None = None,
        items: int | None = None,
    ) -> Plan:
        """Check the arguments of ``fit`` and return the plan.

        Raises:
            StaleStateError: the state has been advanced already.
            TypeError, ValueError: an argument has the wrong type or value.
        """
        step = PipelineStep.checked(step, "fit")
        check_not_stale(state, "fit", trains=True)
        check_phase(phase, state)
        found = read_loaders(loaders)
        epochs = _target("epochs", "epoch", epochs)
        steps = _target("steps", "step", steps)
        items = _target("items", "items", items)
        prefetch = checks.integer("fit", "prefetch", prefetch, "the windows that are fetched ahead")
        if step.fetches_late and prefetch > 1:
            raise ValueError(
                'alternate(batch="late") fetches each batch when its turn comes, and '
                f"prefetch={prefetch} would fetch it ahead: leave prefetch= out"
            )
        if hooks is None:
            hooks = [make() for make in extensions("hooks of a run by default")]
        checked = read_hooks(hooks)
        evaluations = read_moments(evaluate_every, tuple(found.evaluated))
        for hook in checked:
            evaluations += tuple(
                (own_clock(at), (name,)) for name, at in hook.makes_records.items()
            )
        check_moment("record_every", record_every)
        if phase is not None:
            epochs, steps, items = absolute_targets(state, phase, epochs, steps, items)
        elif epochs is None and steps is None and items is None:
            epochs = state.epoch + 1
        moment = None if record_every is None else own_clock(record_every)
        return Plan(
            step, found, epochs, steps, checked, evaluations, moment, prefetch, phase, items=items
        )

    def begin(self, state: TrainState) -> TrainState:
        """Return the state with which the run begins; a new phase begins here.

        What has only interrupted the run before is forgotten.
        """
        if Stop.interrupts(state.stop):
            state = attrs.evolve(state, stop=reason_of(state.todo))
        for hook in BuiltIn.among(self.hooks):
            state = hook.take_back(state)
        for put_back_restored in extensions("what a phase trains"):
            state = put_back_restored(state, self.phase)
        if self.counts_items:
            state = count_items(state)
            check_knows_items(state)
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

    def resumed(self, state: TrainState) -> TrainState:
        """Return the state with what this run does first; with nothing, if there is nothing to do.

        Past the target of this run, or in a later phase, what is next is that of a later call of
        the same script.
        """
        if self.is_past(state) or not is_newest(state, self.phase):
            return changed(state, todo=())
        return resumed(state, self.is_reached(state), self.begins_before(state))

    def passes_over(self, state: TrainState) -> bool:
        """Return whether a script that was started again passes over a phase on its way."""
        phase = self.begun(state)
        return phase.done and not phase.named and phase != state.phases[-1]

    def is_reached(self, state: TrainState) -> bool:
        """Return whether a state is at the target of the run."""
        return (
            (self.steps is not None and state.step >= self.steps)
            or (self.epochs is not None and state.epoch >= self.epochs)
            or (self.items is not None and (state.items or 0) >= self.items)
            or self.begun(state).done
        )

    def is_past(self, state: TrainState) -> bool:
        """Return whether a state is further than this run would have got.

        Its last call of the step may have gone beyond the target, with several updates of a batch.
        """
        before = state.step - updates_of_call(state)
        return (
            (self.steps is not None and before >= self.steps)
            or (self.epochs is not None and (state.epoch, state.batch) > (self.epochs, 0))
            or (self.items is not None and items_of_call(state)[0] >= self.items)
        )

    def begun(self, state: TrainState) -> Phase:
        """Return the phase of this run; the whole run, without a name, if it has none or is new."""
        return phase_of(state, self.phase) or WHOLE_RUN

    @functools.cached_property
    def counts_items(self) -> bool:
        """Whether something depends on ``state.items``, which is then read after each update."""
        return (
            self.items is not None
            or any(moment.counts_items for moment in self.moments)
            or any("counts_items" in member.traits for member in self.step.members)
        )

    @property
    def total(self) -> int | None:
        """The samples of an update, of all processes together, if the step says so."""
        return self.step.total

    def windows(
        self, state: TrainState, source: Source, later: int = 0, updates: int = 0
    ) -> Windows:
        """Return how the batches of an epoch are grouped into updates.

        Args:
            state: the state.
            source: the training loader.
            later: how many epochs later than the running one.
            updates: those from now up to the beginning of that epoch.
        """
        at = self._counted(state, later, updates)
        return self.step.windows(*at, 0 if later else state.batch, source.batches_in_update)

    def _counted(self, state: TrainState, later: int, updates: int) -> tuple[int, int]:
        """Return an epoch, and the updates tried before it, as the phase counts them."""
        begun, tried = self.begun(state), state.step + state.skipped + updates
        return state.epoch + later - begun.epoch, tried - begun.step - begun.skipped

    def updates_in(self, batches: int | None, windows: Windows) -> int | None:
        """Return how many updates an epoch has, if that is known: one that carries makes more."""
        return None if self.step.carries or batches is None else windows.updates(batches)

    def updates_later(self, state: TrainState, source: Source, updates: int, epochs: int) -> int:
        """Return the updates of the epochs after the running one.

        Args:
            state: the state.
            source: the training loader.
            updates: those that are left of the running epoch.
            epochs: how many epochs, with the running one.
        """
        before = updates
        for later in range(1, epochs):
            windows = self.windows(state, source, later, updates)
            length = windows.updates_of(source.length_in(state.epoch + later) or 0)
            counted = self._counted(state, later, updates)
            if not source.reader.varies and self.step.settles(*counted):
                return updates - before + (epochs - later) * length  # the others are like this one
            updates += length
        return updates - before

    def describe(
        self,
        state: TrainState,
        source: Source,
        evaluated: tuple[str, ...],
        clock: Callable[[], float] | None = None,
    ) -> RunInfo:
        """Return the facts about a run.

        Args:
            state: the state that it begins with.
            source: the training loader.
            evaluated: the names of the loaders that it evaluates.
            clock: the time that all processes agree on; by default that of this process.
        """
        windows = self.windows(state, source)
        begun = self.begun(state)
        batches = source.length_in(state.epoch)
        per_epoch = self.updates_in(batches, windows)
        # A step that carries makes as many updates as a batch has windows.
        total = self.steps if self.items is None else None
        if self.epochs is not None and per_epoch is not None and self.items is None:
            batches_left = source.left(state.epoch, state.batch, state.samples) or 0
            left = windows.updates_of(batches_left, state.batch)
            left += self.updates_later(state, source, left, self.epochs - state.epoch)
            # Skipped updates count, and those left out: so a run that is resumed after some has the
            # same total. Those of earlier phases do not.
            total = state.step + state.skipped - begun.skipped + left_out(state) + left
            total = total if self.steps is None else min(total, self.steps)
        given = self.step, unwrap(state), state.backend.device, self.hooks
        tells = [functools.partial(tell, *given) for tell in extensions("what a run is made with")]
        made_with = functools.cache(next(iter(tells), dict))
        return RunInfo(
            self.epochs, total, per_epoch, batches, windows.largest, evaluated,
            precision=self.step.precision_in(state), first_step=begun.step,
            turns=tuple(self.step.turns),
            total_items=self.assumed_items if self.items is None else self.items,
            first_items=begun.items or 0,
            models=Several.names_of(state.model),
            hook_slots=slots_of(self.hooks) | {LEFT_OUT},
            reported=names_reported(self.hooks), windows=windows,
            live=Live(clock or local_clock, source.positions.at, source.indices, made_with),
        )  # fmt: skip

    def check(self, info: RunInfo, history: History) -> None:
        """Raise if a hook or a trigger cannot work in this run.

        Raises:
            ValueError: two hooks share a slot or a folder, a trigger would never be due, or a
                job would be requeued that is not saved.
            KeyError: a hook monitors a metric that this run does not have, or a middleware is for
                a loader that it does not have.
        """
        check_beside(self.hooks)
        check_makers(self.hooks, ("train", "recent", *self.loaders.evaluated))
        self.check_metrics(info.evaluated, history, info.models)
        self.step.check_loaders(("train", *self.loaders.evaluated))
        self.step.check_evaluation(info.evaluated)
        for moment in self.moments:
            moment.check(info)

    def check_metrics(
        self,
        evaluated: Collection[str],
        history: History,
        models: Sequence[str],
    ) -> None:
        """Raise KeyError for a metric that is watched, and that this run does not have.

        Args:
            evaluated: the names of the loaders that are evaluated.
            history: the records so far. What is in one of them may come from an earlier run.
            models: the names of the models of a stack.
        """
        known = (*self.trained, *evaluated, *names_made(self.hooks))
        loaders = known, self.loaders.evaluated, evaluated
        for check in extensions("metrics that are watched"):
            check(self.watched, self.step, *loaders, history, models)

    @functools.cached_property
    def watched(self) -> tuple[Watched, ...]:
        """Which metrics the middleware and the hooks look at."""
        return tuple(_watched(self.step, self.hooks))

    @functools.cached_property
    def trained(self) -> tuple[str, ...]:
        """What the names of metrics of training begin with in records."""
        return Record.TRAINED if self.record_every is not None else Record.TRAINED[:1]

    @functools.cached_property
    def triggers(self) -> tuple[Moment, ...]:
        """What says when to evaluate and to make a record."""
        own = () if self.record_every is None else (self.record_every,)
        return (*(trigger for trigger, _ in self.evaluations), *own)

    @functools.cached_property
    def moments(self) -> tuple[Moment, ...]:
        """All that the run and its hooks ask."""
        of_hooks = (moment for layer in every_layer(self.hooks) for moment in layer.moments)
        return (*self.triggers, *of_hooks)

    def hooks_at(self, event: str) -> list[Hook]:
        """Return the hooks that may be due at a boundary without an update: "start" or "end"."""
        return [hook for hook in self.hooks if may_be_due(hook, event)]

    def begins_before(self, state: TrainState) -> bool:
        """Return whether no update was tried yet, and something is due before the first."""
        begun = state.step or state.skipped or len(state.history)
        return not begun and (bool(self.hooks_at(START)) or self.evaluates_at(START))

    def evaluates_at(self, event: str) -> bool:
        """Return whether an evaluation, or a number, may be due at a boundary without an update."""
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
        begun = self.begun(state)
        if begun.done:
            return f"fit: nothing to do: the phase {self.phase!r} has ended"
        if state.stop is not None:
            advice = "To continue anyway, pass attrs.evolve(state, stop=None)"
            if Stop.kind_of(state.stop) == "limit":
                advice = "To continue, raise the limit: time_limit(...)"
            return f"fit: nothing to do: the run was stopped ({state.stop}). {advice}"
        given = [
            (f"{name}=", target, first, now)
            for name, target, first, now in (
                ("epochs", self.epochs, begun.epoch, state.epoch),
                ("steps", self.steps, begun.step, state.step),
                ("items", self.items, begun.items or 0, (state.items or 0) if self.items else 0),
            )
            if target is not None
        ]
        targets = [f"{name}{target - first}" for name, target, first, _ in given]
        if begun.name:
            return (
                f"fit: nothing to do: the phase {begun.name!r} began at epoch {begun.epoch}, step "
                f"{begun.step}, and is at its target, {', '.join(targets)}. It ends here"
            )
        at = "" if self.items is None else f", {state.items} items"
        longer = [f"{name}{now + max(n, 1)}" for name, n, _, now in given if n <= now]
        return (
            f"fit: nothing to do: the state is at epoch {state.epoch}, step {state.step}{at}, and "
            f"the target is {', '.join(targets)}. To train longer, raise it: {', '.join(longer)}"
        )


def _target(name: str, field: str, given: int | None) -> int | None:
    meaning = f"the target for state.{field}, or None"
    return None if given is None else checks.integer("fit", name, given, meaning, least=0)


# --------------------------------------------------------------------------------------------------
# Phases: a run made of stretches, each with targets of its own, that can be started again.


def check_phase(name: str | None, state: TrainState) -> None:
    """Raise if a run of this phase cannot begin, or continue, with a state.

    Args:
        name: the name of the phase, or None.
        state: the state.

    Raises:
        TypeError: the name is not a str.
        ValueError: it is empty; another phase has not ended, and no hook has stopped it; or this
            program has named a later phase before this one.
    """
    if name is not None:
        checks.text("fit", "phase", name, "the name of a phase, or None")
        _check_order(state.phases, name)
    running = Phase.running(state.phases)
    ended = state.stop is not None and Stop.ends_phase(state.stop)
    if not running.name or phase_of(state, name) is not None or (ended and name is not None):
        return
    why, advice = "" if state.stop is None else f" ({state.stop})", "To continue it, call"
    if Stop.interrupts(state.stop):
        why = f": it was interrupted at step {state.step} ({state.stop})"
        advice = "Start the script again to continue it, or, with this state, call"
    wanted = "fit was called without a phase" if name is None else f"{name!r} cannot begin"
    raise ValueError(
        f"the phase {running.name!r}, begun at step {running.step}, has not ended{why}, so "
        f"{wanted}. {advice} fit(..., phase={running.name!r}). To end it here, pass "
        'attrs.evolve(state, stop="enough") to the fit of the next phase'
    )


def _check_order(phases: Sequence[Phase], name: str) -> None:
    """Raise if a program names a phase after one that began later in the run.

    A script names its phases in order, and passes over those that have ended. So the order in which
    it names phases for the first time is that in which they began, unless one was put before
    another that had ended already. A script may begin with any of them.
    """
    names = [phase.name for phase in phases]
    after = names.index(name) + 1 if name in names else len(names)
    later = next((phase for phase in phases[after:] if phase.named), None)
    if later is None or phases[after - 1].named:
        return
    raise ValueError(
        f"the phases are out of order: this program names {later.name!r} before {name!r}, but in "
        f"this run {name!r} had ended when {later.name!r} began, at step {later.step}. To keep the "
        f"run, write fit(..., phase={name!r}) before fit(..., phase={later.name!r}). To train "
        f"{later.name!r} before {name!r}, begin with a checkpoint from before {name!r}, and save "
        "to another folder"
    )


def skipped_phase(phases: Sequence[Phase], name: str) -> Phase | None:
    """Return the newest phase if a new one follows it in the run, and an earlier one in a program.

    Then the program does not have the newest phase any more, or names it later, out of order.
    """
    new = all(phase.name != name for phase in phases)
    follows_another = bool(phases) and any(phase.named for phase in phases)
    return phases[-1] if new and follows_another and not phases[-1].named else None


def name_phase(state: TrainState, name: str) -> TrainState:
    """Return the state in which a phase has been named by this program."""
    phases = (
        attrs.evolve(phase, named=True) if phase.name == name else phase for phase in state.phases
    )
    return attrs.evolve(state, phases=tuple(phases))


def phase_of(state: TrainState, name: str | None) -> Phase | None:
    """Return the phase of a state with a name; None if it has not begun."""
    return next((phase for phase in state.phases if phase.name == name), None)


def absolute_targets(
    state: TrainState, name: str, epochs: int | None, steps: int | None, items: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the targets of a phase, counted from where it began, as targets for the state.

    With none, it is one epoch. With ``items`` this is a collective.
    """
    begun = phase_of(state, name)
    epoch = state.epoch + (state.batch > 0) if begun is None else begun.epoch
    step = state.step if begun is None else begun.step
    if epochs is None and steps is None and items is None:
        epochs = 1
    if items is not None:
        first = check_knows_items(count_items(state)) if begun is None else begun.items
        if first is None:
            raise ValueError(
                f"the phase {name!r} began in an older version of fnloop, which did not count its "
                "items: give epochs= or steps= in place of items="
            )
        items = math.ceil(first + items)
    return (
        None if epochs is None else epoch + epochs,
        None if steps is None else step + steps,
        items,
    )


def check_knows_items(state: TrainState) -> float:
    """Return the items of a state that has counted them.

    Raises:
        ValueError: they are unknown.
    """
    if (items := state.items) is None:
        raise ValueError(
            "this state does not know how many items it was trained on, because a version of "
            "fnloop that did not count them began it, or a weight was negative or NaN: count "
            "epochs= or steps= in place of items="
        )
    return items


def begin_phase(state: TrainState, name: str) -> TrainState:
    """Return the state at the beginning of a phase: that of a new epoch.

    A phase that was stopped is over, and so is an epoch that was left in the middle: it counts.
    """
    if (running := Phase.running(state.phases)).name:
        state = end_phase(state, running.name)
    left = state.batch > 0
    epoch = state.epoch + left
    state = count_items(state)
    counts = {"skipped": state.skipped, "updates": dict(state.updates), "items": state.items}
    phase = Phase(name, state.step, epoch, len(state.history), **counts, named=True)
    phases = (*state.phases, phase)
    state = attrs.evolve(
        begin_count(state), phases=phases, stop=None, ends=None, events=frozenset(), todo=()
    )
    if not left:
        return state
    return attrs.evolve(
        without_metrics(state), epoch=epoch, batch=0, samples=0, generators=None, saved_on=None
    )


def is_newest(state: TrainState, name: str | None) -> bool:
    """Return whether no other phase has begun since this one, or since the run of no phase."""
    begun = phase_of(state, name)
    return begun is None or begun is state.phases[-1]


def end_phase(state: TrainState, name: str | None) -> TrainState:
    """Return the state with a phase ended, unless the run was only interrupted."""
    running = Phase.running(state.phases)
    if running.name != name or not Stop.ends_phase(state.stop):
        return state
    ended = attrs.evolve(running, done=True, stop=state.stop)
    return attrs.evolve(state, phases=(*state.phases[:-1], ended))


# --------------------------------------------------------------------------------------------------
# The hooks of a run: each by itself, and those that would get in each other's way.


def read_hooks(hooks: object) -> tuple[Hook, ...]:
    """Return the argument ``hooks`` of ``fit`` as a tuple, each of them checked.

    Raises:
        TypeError: it is not a sequence of hooks.
    """
    if callable(hooks) or isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise TypeError(
            "fit expects hooks as a tuple, such as hooks=(progress(), early_stop(...)); got "
            f"{checks.describe(hooks)}"
        )
    for hook in hooks:
        _check_hook(hook)
        for layer in layers(hook):
            begin = as_hook(layer).begin
            checks.function(name_of(layer), "begin", begin, "a method (state) -> state", 1)
    return tuple(map(as_hook, hooks))


def check_makers(hooks: Sequence[Hook], taken: Collection[str]) -> None:
    """Raise if a hook makes numbers under a name of others, or cannot because it is in another one.

    Args:
        hooks: the hooks.
        taken: the first parts of other names of metrics.

    Raises:
        TypeError: it is within another hook.
        ValueError: the name is taken.
    """
    seen = {*taken}
    for hook in hooks:
        for layer in layers(hook):
            if not layer.makes_records.keys() <= hook.makes_records.keys():
                raise TypeError(
                    f"{hook!r} has {name_of(layer)} inside, which says by itself when it is due "
                    "and on which processes it runs: list it alone"
                )
        for name in hook.makes_records:
            if name in seen:
                of = "a loader" if name in taken else "another hook"
                raise ValueError(
                    f"{name_of(hook)} would give its numbers names that begin with {name!r}, as "
                    f"those of {of} do: choose another name"
                )
            seen.add(name)


def names_reported(hooks: Iterable[Hook]) -> frozenset[str]:
    """Return the names of the numbers that hooks say they add to records."""
    return frozenset(name for layer in every_layer(hooks) for name in layer.reports)


def names_made(hooks: Iterable[Hook]) -> list[str]:
    """Return what the names of the numbers begin with that hooks make records for."""
    return [name for hook in hooks for name in hook.makes_records]


class Watched(NamedTuple):
    """A metric that something looks at.

    Args:
        owner: what looks at it.
        key: its name.
        is_certain: whether nothing may add it that says no names: a middleware or a step of the
            user's own may, and so may a hook of the user's, for the hooks after it.
    """

    owner: str
    key: str
    is_certain: bool


def _watched(step: PipelineStep, hooks: Sequence[Hook]) -> Iterator[Watched]:
    """Yield which metrics are watched, without those that a hook says it adds to records."""
    reported, is_certain = names_reported(hooks), True
    for hook in hooks:
        for layer in layers(hook):
            certain = is_certain and not is_of_user(layer)
            for key in keys_of(layer):
                if key not in reported:
                    yield Watched(checks.known_as(layer), key, certain)
        is_certain = is_certain and not is_of_user(unwrap_hook(hook))
    for owner, key in step.watched:
        if key not in reported:
            yield Watched(owner, key, is_certain)


_OF_HOOKS = ("begin", "evaluating", "receive", "numbers", "failed", "flush")


def _check_hook(hook: object) -> None:
    if isinstance(hook, type | torch.nn.Module) or not callable(hook):
        hint = f". Call it: {hook.__name__}(...)" if isinstance(hook, type) else ""
        members = [name for name in _OF_HOOKS if checks.has_methods(hook, name)]
        if members and not hint:
            hint = (
                f", which has a method {members[0]}, but no method __call__(state). Write one that "
                "returns the state, or make it a subclass of Hook with one"
            )
        if isinstance(hook, Middleware):
            hint = f", which is middleware: write pipeline({name_of(hook)})(loss_fn)"
        got = checks.describe(hook) if checks.record_in(hook) else name_of(hook)
        raise TypeError(f"a hook is a function state -> state; got {got}{hint}")
    if is_moment(hook) and not isinstance(hook, ConditionalHook):
        raise TypeError(f"{hook!r} says when, but not what: write {show_call(hook, 'hook')}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(hook)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"a hook takes the state and nothing else, but {name_of(hook)} takes {signature}"
            ) from error
