"""The turns of an alternating step: the state that each step is given, and what becomes of it."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from fnloop._core.call import Call
from fnloop._core.metrics import Mean, combine
from fnloop._core.middleware import Middleware
from fnloop._core.ownership import Ownership, ParameterCache
from fnloop._core.phase import unfinished
from fnloop._core.rng import fold_in
from fnloop._core.run_info import RunInfo
from fnloop._core.running import update_loss_
from fnloop._core.state import (
    TrainState,
    all_parameters,
    give_up_ownership,
    ownership_of,
    owns_handles,
    parameters,
)
from fnloop._core.types import Aux, Batch, Metric, Output, Step
from fnloop._step.averaging import EvaluateAverage
from fnloop._step.engine import engine_of
from fnloop._step.pipeline import PipelineStep
from fnloop._step.reports import prefixed

__all__ = ["Round", "Settings", "Turn", "Turns", "call", "check_with_turns", "turn_of"]


class Turn(NamedTuple):
    """One turn of a round.

    Args:
        name: the name of its optimizer.
        position: how many turns come before it.
        batches: which batches of a round's window it takes.
    """

    name: str
    position: int
    batches: slice


@attrs.frozen
class Settings:
    """The steps that take turns, and their order.

    Args:
        steps: name to step.
        turns: the turns of a round, in order.
        window: how many batches a round takes.
        evaluated: the names whose losses are evaluated.
        call: the call that was typed.
    """

    steps: Mapping[str, PipelineStep]
    turns: tuple[Turn, ...]
    window: int
    evaluated: tuple[str, ...]
    call: Call

    @classmethod
    def of(
        cls,
        steps: Mapping[str, PipelineStep],
        order: Sequence[str],
        one_batch: bool,
        evaluated: tuple[str, ...],
        call: Call,
    ) -> Settings:
        """Return the settings of an order; all turns of a round take one batch, or each its own."""
        windows = [steps[name].window for name in order]
        begins = [0] * len(order) if one_batch else [0, *itertools.accumulate(windows)]
        turns = tuple(
            Turn(name, i, slice(begin, begin + window))
            for i, (name, begin, window) in enumerate(zip(order, begins, windows, strict=False))
        )
        return cls(dict(steps), turns, turns[-1].batches.stop, evaluated, call)

    @property
    def order(self) -> str:
        """The order of the turns in words, such as "5 × d, g"."""
        names = itertools.groupby(turn.name for turn in self.turns)
        counts = ((name, len([*same])) for name, same in names)
        return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in counts)

    def updates(self, name: str, batches: int) -> int:
        """Return how many turns a name has in a round, by its number of batches."""
        return sum(turn.name == name and turn.batches.start < batches for turn in self.turns)

    def run_of(self, run: RunInfo, name: str, first: int) -> RunInfo:
        """Return the facts about a run, counted in the updates of a name in place of rounds.

        Args:
            run: the facts.
            name: the name.
            first: its updates when the phase began; 0 without phases.
        """
        each, rounds = self.updates(name, self.window), run.steps_per_epoch
        total, in_epoch = run.total_steps, None
        if rounds and run.batches_per_epoch is not None:
            left = run.batches_per_epoch - (rounds - 1) * run.window
            processes = run.window // self.window
            in_epoch = (rounds - 1) * each + self.updates(name, -(-left // processes))
        if total is not None:
            total -= run.first_step
            epochs, more = divmod(total, rounds) if rounds else (0, total)
            total = first + epochs * (in_epoch or 0) + more * each
        return attrs.evolve(run, total_steps=total, steps_per_epoch=in_epoch, first_step=first)


def check_with_turns(around: Sequence[Middleware], steps: Mapping[str, PipelineStep]) -> None:
    """Raise if middleware around a round and middleware of its steps cannot be together.

    Raises:
        ValueError: both set one number of an optimizer, or an average has the name of a step.
    """
    inside = [
        _for_one(member, name)
        for name, step in steps.items()
        for member in step.pipeline.middleware
        if _sets_numbers(member)
    ]
    for member in around:
        average = member.evaluation
        if isinstance(average, EvaluateAverage) and not average.only and member.name in steps:
            raise ValueError(
                f"alternate: {member!r} has the name of a step, and the metrics of both would be "
                f'"valid/{member.name}/loss": give it another one, name="..."'
            )
        if _sets_numbers(member):
            for checked in (member, *inside):
                if checked.check is not None:
                    checked.check([member, *inside])


def _sets_numbers(member: Middleware) -> bool:
    """Return whether a middleware sets numbers of the optimizers that it names, as ``schedule``."""
    call = member.call if member.step is not None else None
    return call is not None and "only" in inspect.signature(call.factory).parameters


def _for_one(member: Middleware, name: str) -> Middleware:
    """Return a middleware of a step as it would be listed around all: for one optimizer."""
    given = member.call
    assert given is not None
    bound = inspect.signature(given.factory).bind_partial(*given.args, **given.kwargs)
    if "only" in bound.arguments:  # which is refused when a run starts
        return member
    return attrs.evolve(member, call=attrs.evolve(given, kwargs={**given.kwargs, "only": name}))


def call(name: str, step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Call the step of a name. That name can be found in a traceback."""
    __tracebackhide__ = True
    return step(state, batch)


def turn_of(error: BaseException) -> str | None:
    """Return the name of the step in whose turn an exception was raised; None if in none."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is call.__code__:
            return trace.tb_frame.f_locals["name"]
        trace = trace.tb_next
    return None


class _Handles:
    """What the states of one optimizer's turns share, for as long as the run's states live."""

    def __init__(self) -> None:
        self.ownership: Ownership[TrainState] = Ownership()
        self.parameters = ParameterCache()
        self.run: tuple[RunInfo | None, RunInfo | None] = (None, None)  # the run's, and their own


class Turns:
    """Takes turns, and makes the states that the steps of turns are given.

    Args:
        run_of: ``(facts about the run, name, its updates when the phase began) -> those for the
            turns of an optimizer``.
    """

    def __init__(self, run_of: Callable[[RunInfo, str, int], RunInfo]) -> None:
        self._run_of = run_of
        self._handles: WeakKeyDictionary[Ownership[TrainState], dict[str, _Handles]] = (
            WeakKeyDictionary()
        )

    def state_of(self, state: TrainState, name: str, position: int = 0) -> TrainState:
        """Return a state of the same model whose only optimizer is that of a name.

        It has the slots of that name, and its step is the number of updates of that optimizer. With
        several processes each turn draws other numbers, because of its seed.
        """
        found = self._handles.setdefault(ownership_of(state), {})
        handles = found.get(name) or found.setdefault(name, _Handles())
        if state.run is not handles.run[0]:
            phase = unfinished(state.phases)
            first = 0 if phase is None else phase.updates.get(name, 0)
            own = None if state.run is None else self._run_of(state.run, name, first)
            handles.run = state.run, own
        prefix = f"{name}/"
        slots = {
            key.removeprefix(prefix): value
            for key, value in state.slots.items()
            if key.startswith(prefix)
        }
        return attrs.evolve(
            state, optimizer=state.optimizer[name], step=state.updates[name], updates={},
            slots=slots, run=handles.run[1],
            seed=fold_in(state.seed, position) if position else state.seed,
            ownership=handles.ownership, generation=handles.ownership.generation,
            parameters=handles.parameters,
        )  # fmt: skip

    def with_slots(self, state: TrainState, name: str, own: TrainState) -> TrainState:
        """Return the state with the slots that a state of a turn has."""
        return attrs.evolve(state, slots=_merged(state, name, own))

    def take(
        self, turn: Turn, step: Step, state: TrainState, batch: Batch, done: Round
    ) -> TrainState:
        """Take a turn. Only the parameters of its optimizer need gradients meanwhile.

        Args:
            turn: the turn.
            step: the step of its name.
            state: the state after the turns before it.
            batch: what the step takes.
            done: these turns; receives the output of this one.
        """
        __tracebackhide__ = True
        name, own = turn.name, self.state_of(state, turn.name, turn.position)
        engine_of(state).start_turn(name, engine_of(own), own, state, turn.batches)
        trained = {id(p) for p in parameters(own)}
        resting = [p for p in all_parameters(state) if p.requires_grad and id(p) not in trained]
        for p in resting:
            p.requires_grad_(False)
        try:
            new, out = call(name, step, own, batch)
        except BaseException:
            if done.applied or not owns_handles(own):
                give_up_ownership(state)  # the weights are between two rounds
            raise
        finally:
            for p in resting:
                p.requires_grad_(True)
        ownership_of(own).newest = None
        done.add(name, out)
        updates = {**state.updates, name: state.updates[name] + (out.skip is None)}
        slots = _merged(state, name, new)
        return attrs.evolve(state, updates=updates, slots=slots, extra=new.extra, stop=new.stop)


def _merged(state: TrainState, name: str, own: TrainState) -> dict[str, object]:
    """Return the slots of a state with those of a state of a turn."""
    return {**state.slots, **{f"{name}/{key}": value for key, value in own.slots.items()}}


class Round:
    """The turns that were taken of one round, and their outputs."""

    def __init__(self) -> None:
        self._losses: dict[str, Mean] = {}
        self._metrics: dict[str, Metric] = {}
        self._aux: dict[str, Aux] = {}
        self._skipped: Output | None = None

    @property
    def applied(self) -> bool:
        """Whether any of the turns was not skipped."""
        return bool(self._losses)

    def add(self, name: str, out: Output) -> None:
        """Count the output of a turn, unless it was skipped."""
        __tracebackhide__ = True
        if out.skip is not None:
            self._skipped = out
            return
        self._losses[name] = update_loss_(self._losses.get(name), out.loss, out.weight)
        self._aux[name] = out.aux
        if out.metrics:
            named = {prefixed(name, key): metric for key, metric in out.metrics.items()}
            self._metrics = combine(self._metrics, named)

    def output(self) -> Output:
        """Return the mean loss over the items of all turns, and the metrics of each name."""
        if not self._losses:
            assert self._skipped is not None, "no turn was taken"
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach())
        first, *others = self._losses.values()
        total, weight = first.total, first.weight
        for loss in others:
            total, weight = total + loss.total, weight + loss.weight
        items = torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
        metrics = {f"{name}/loss": loss for name, loss in self._losses.items()} | self._metrics
        return Output(total / items, weight, self._aux, metrics)
