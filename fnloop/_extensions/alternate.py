"""Whole steps in turn, each with an optimizer of its own, such as those of a GAN."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from fnloop._core.history import Phase
from fnloop._core.metrics import Mean
from fnloop._core.optimizers import first_shared
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step
from fnloop._step.pipeline import PipelineStep
from fnloop.extend import (
    Batch,
    Call,
    Metrics,
    Ownership,
    all_parameters,
    check_not_stale,
    checks,
    engine_of,
    fold_in,
    optimizers,
    parameters,
    refuse,
    tables,
)

log = logging.getLogger("fnloop")

SAME, NEXT, LATE = "same", "next", "late"
# What acts on one backward or one forward: the steps list it themselves.
_OF_STEPS = ("loss_fn", "forward", "loss", "gradient", "device")
_EXAMPLE = '{"d": pipeline()(d_loss), "g": pipeline()(g_loss)}'


def alternate(
    steps: Mapping[str, Step],
    order: Sequence[str] | None = None,
    batch: str | Mapping[str, str] = SAME,
    evaluate: str | Sequence[str] | None = None,
) -> AlternateStep:
    """Take whole steps in turn, each with its own optimizer, such as those of a GAN.

    Their names are those of the optimizers: ``TrainState.create(model, {"d": ..., "g": ...})``. In
    a turn, only the parameters of its optimizer get gradients. What was frozen stays frozen. Each
    step has its own middleware, such as ``clip``, ``amp`` and ``schedule``, with its own slots and
    metrics: "train/d/loss", "train/d/grad_norm". The rates are "train/lr/d", ... as in every run
    with several optimizers. ``aux`` has that of each name. A middleware of a step gets a state of
    that turn: ``state.optimizer`` is its optimizer, ``state.step`` the number of its updates, and
    ``state.slots`` its slots.

    Args:
        steps: name to step.
        order: the names in the order of their turns, such as ``("d",) * 5 + ("g",)``; by default
            each once.
        batch: "same" gives all turns of a round one batch; "next" gives each turn the next one. Or
            one of both for each name: ``{"d": "next", "g": "same"}`` gives a turn of g the batch of
            the turn before it. The first turn of a round takes a new batch in any case. A round
            never crosses the end of an epoch: in the last one, turns without a batch are skipped.
            With ``accumulate(n)`` a turn takes up to n batches. The batches of a round are fetched
            before its first turn. "late" is like "next", but a batch is fetched when its turn
            comes, for a loader that uses the model as the previous turn left it. In a mapping it
            can be combined with "same".
        evaluate: the names whose losses are evaluated, in this order; by default all.

    Returns:
        A step.

    Raises:
        TypeError: ``steps`` is not a mapping of steps, or a name is not a str.
        ValueError: ``order``, ``batch`` or ``evaluate`` has an unknown name, ``batch`` lacks one, a
            step has no turn, turns of one batch have other windows, "late" is beside "next" or has
            ``accumulate``, or a step has a middleware that cannot be in a turn (``tbptt``,
            ``cuda_graph``, averages). When composing: a middleware around it would be ignored, sets
            a rate that one in a step sets, or is an average with the name of a step. When a run
            starts: the state has no optimizer of a name, or "late" is given ``prefetch=2``.
        NotImplementedError: when a run starts: the model is under ``fully_shard``.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
        >>> optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in ("a", "b")}
        >>> state = fl.TrainState.create(model, optimizers)
        >>> down = fl.pipeline()(lambda model, x: (model["a"] * x).mean())          # gradient: x
        >>> after = fl.pipeline()(lambda model, x: (model["b"] * model["a"]).mean())   # gradient: a
        >>> step = alternate({"a": down, "b": after}, order=("a", "a", "b"))
        >>> state, out = step(state, torch.tensor([1.0]))
        >>> model["a"].item(), model["b"].item(), state.step, dict(state.updates)
        (-2.0, 2.0, 1, {'a': 2, 'b': 1})

    Notes:
        One call is a *round*: all turns of ``order``. ``state.step`` counts rounds, and
        ``state.updates`` the updates of each optimizer; a schedule in a step counts those of its
        own. A skipped update is that of its turn. The round counts as skipped if all are. If a turn
        fails after another one has updated, the weights are between two rounds, and the state can
        no longer be used.

        The losses without a name, "train/loss" and "valid/loss", are means over the items of all
        turns, or of all names that are evaluated. Watch those with a name.

        Middleware of the update ring (such as ``ema``), the step ring and the ring "evaluation",
        and ``derive``, can be put around it, and act once per round:
        ``pipeline(ema(0.999))(alternate(...))``. All others belong into the steps.

    Source: Goodfellow et al., 2014, https://arxiv.org/abs/1406.2661
    """
    checked = _check_steps(steps)
    names = [*checked]
    turns = _names("order", names if order is None else order, names)
    if idle := [name for name in names if name not in turns]:
        raise ValueError(
            f"alternate: order={turns} leaves out {checks.join_names(idle)}: name each step at "
            "least once, or leave it out of steps"
        )
    rules = _rules(batch, names)
    _check_windows(checked, turns, rules)
    single = (evaluate,) if isinstance(evaluate, str) else evaluate
    evaluated = _names("evaluate", names if single is None else single, names)
    evaluated = tuple(dict.fromkeys(evaluated))
    given = {
        "order": order if order is None else turns,
        "batch": None if batch == SAME else batch if isinstance(batch, str) else dict(batch),
        "evaluate": evaluate if evaluate is None or isinstance(evaluate, str) else evaluated,
    }
    typed = {name: value for name, value in given.items() if value is not None}
    made = Call(alternate, (dict(steps),), typed)
    return AlternateStep((), Settings.of(checked, turns, rules, evaluated, made))


class AlternateStep(PipelineStep):
    """Steps in turn. See :func:`alternate`.

    Args:
        listed: the middleware around all turns of a round.
        settings: the steps, and their order.
    """

    has_all_rings = False

    def __init__(self, listed: Sequence[Middleware], settings: Settings) -> None:
        self.settings, self._turns = settings, Turns(settings.run_of)
        self._round = functools.partial(self._take_turns)
        super().__init__(listed)
        self.window, self.fetches_late = settings.window, settings.late
        inner = [
            _of_turn(member, name)
            for name, step in settings.steps.items()
            for member in step.pipeline.middleware
            if member.report is not None
        ]
        self._reporting = (*inner, *self._reporting)

    def inside(self, listed: tuple[Middleware, ...]) -> AlternateStep:
        """Return the same step with middleware around its rounds.

        Raises:
            ValueError: it would ignore one of them.
        """
        self._check_around(listed, _OF_STEPS)
        check_with_turns(listed, self.settings.steps)
        return AlternateStep((*self.pipeline.middleware, *listed), self.settings)

    def _explain(self, member: Middleware, acts: str, ignored: Sequence[str]) -> str:
        names, hint = checks.join_names([*self.settings.steps]), ""
        if [*ignored] == ["forward"] and member.name.startswith("metric"):
            hint = '; or write metric(..., on="evaluation") for the aux of all, by name'
        return (
            f"{member!r} {acts}, but each of the steps {names} runs its own forward, backward and "
            f"update: list it in their pipelines, {{{next(iter(self.settings.steps))!r}: "
            f"pipeline({member!r})(...), ...}}{hint}"
        )

    @property
    def functions(self) -> tuple[object, ...]:
        return ()

    @property
    def evaluates(self) -> str:
        return checks.join_names(
            [self.settings.steps[name].evaluates for name in self.settings.evaluated]
        )

    def _compose_innermost(self) -> Step:
        return self._evaluate_each

    def _compose_training(self) -> Step:
        return self._chain(self._round, "update", "step")

    # --- a round

    def _take_turns(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        check_not_stale(state)
        steps, done = self.settings.steps, Round()
        window = self._window(batch)
        turns = self.settings.turns
        for turn in state.run.live.stopwatch.waiting_once(turns) if state.run else turns:
            try:
                part = window[turn.batches]
            except BaseException:  # of a batch that is fetched now
                if done.applied:
                    Ownership.give_up(state)  # the weights are between two rounds
                raise
            if part:
                step = steps[turn.name]
                given = part[0] if step.window == 1 else part
                state = self._turns.take(turn, step.train, state, given, done)
        return Ownership.advance(state, done.applied, state.updates), done.output()

    def _passed(self, state: TrainState, counts: bool) -> TrainState:
        made = Counter(turn.name for turn in self.settings.turns if counts)
        updates = {name: n + made[name] for name, n in state.updates.items()}
        return Ownership.advance(state, counts, updates)

    def _window(self, batch: Batch) -> Sequence[Batch]:
        """Return the batches of a round."""
        if self.window == 1:
            return (batch,)
        if not isinstance(batch, Sequence) or not 0 < len(batch) <= self.window:
            given = f"{len(batch)}" if isinstance(batch, list | tuple) else checks.describe(batch)
            raise ValueError(
                f"a round of {self!r} takes a list or a tuple of 1 to {self.window} batches; got "
                f"{given}"
            )
        return batch

    def _evaluate_each(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        done = Round()
        for name in self.settings.evaluated:
            own = self._turns.state_of(state, name)
            done.add(name, call(name, self.settings.steps[name].evaluation, own, batch)[1])
        return state, done.output()

    @contextlib.contextmanager
    def _calls_noted(self) -> Iterator[list[int]]:
        calls: list[int] = []
        with self._noting(self._round) as rounds, super()._calls_noted() as evaluations:
            yield calls
        calls += rounds + evaluations

    # --- a run

    @property
    def turns(self) -> Mapping[str, PipelineStep]:
        return self.settings.steps

    def with_turns(self, steps: Mapping[str, PipelineStep]) -> PipelineStep:
        return alternate(steps, **self.settings.call.kwargs)

    def precision_in(self, state: TrainState) -> str | None:
        found = {step.precision_in(state): None for step in self.settings.steps.values()}
        return ", ".join(name for name in found if name is not None) or None

    @property
    def watched(self) -> list[tuple[str, str]]:
        turns = self.settings.steps.values()
        return super().watched + [pair for step in turns for pair in step.watched]

    def check_loaders(self, loaders: Sequence[str]) -> None:
        super().check_loaders(loaders)
        for step in self.settings.steps.values():
            step.check_loaders(loaders)

    def check_evaluation(self, loaders: Sequence[str]) -> None:
        for name in self.settings.evaluated:
            self.settings.steps[name].check_evaluation(loaders)

    def begin_run(self, state: TrainState) -> None:
        self._check_state(state)
        super().begin_run(state)
        for name, step in self.settings.steps.items():
            own = self._turns.state_of(state, name)
            step.begin_run(own)
            engine_of(state).start_turn(name, engine_of(own), own, state, slice(0))
        idle = [name for name in state.optimizer if name not in self.settings.steps]
        if idle and state.backend.main:
            log.warning(
                f"alternate: these optimizers have no turn, so their parameters stay as they are: "
                f"{checks.join_names(idle)}"
            )

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        __tracebackhide__ = True
        self._refuse_stack(state)
        self._check_state(state)
        if not evaluation:
            takes = "takes the parameters that need gradients as they are at first"
            why = f"does not work with fully_shard, which {takes}: leave fully_shard out"
            refuse(state, "alternate", sharded=why)
        state = super().init_slots(state, evaluation=evaluation)
        for name in self.settings.evaluated if evaluation else self.settings.steps:
            own = self._turns.state_of(state, name)
            made = self.settings.steps[name].init_slots(own, evaluation=evaluation)
            if made is not own:
                state = self._turns.with_slots(state, name, made)
        return state

    def renew_slots(self, state: TrainState, prefix: str = "") -> TrainState:
        state = super().renew_slots(state, prefix)
        for name, step in self.settings.steps.items():
            state = step.renew_slots(state, f"{prefix}{name}/")
        return state

    def _check_state(self, state: TrainState) -> None:
        """Raise ValueError if the state lacks an optimizer."""
        refuse(state, "alternate", exact="its turns share a window. Leave exact=True out")
        found = optimizers(state)
        missing = [name for name in self.settings.steps if name not in found]
        if not missing:
            if (shared := first_shared(state.model, found)) is not None:
                raise ValueError(
                    f"the parameter {shared.name} is in two optimizers, {shared.one!r} and "
                    f"{shared.other!r}, and a round of alternate would change it by both: leave it "
                    "out of one"
                )
            return
        has = (
            "has one optimizer, without a name"
            if "" in found
            else f"has {checks.join_names([*found])}"
        )
        given = ", ".join(f"{name!r}: ..." for name in self.settings.steps)
        raise ValueError(
            f"alternate has a step for {checks.join_names(missing)}, but the state {has}. Name an "
            f"optimizer for each step: TrainState.create(model, {{{given}}})"
        )

    # --- what an exception is told

    def layer_of(self, error: BaseException, otherwise: str = "the step") -> str:
        name = turn_of(error)
        if name is None:
            return super().layer_of(error, otherwise)
        layer = self.settings.steps[name].layer_of(error, "")
        return f"{name}, {layer}" if layer else name

    def explain(self, error: BaseException, of_gradient: str = "") -> None:
        super().explain(error, of_gradient)
        if (name := turn_of(error)) is not None:
            note = f"in the turn of {name} only the parameters of its optimizer need gradients"
            self.settings.steps[name].explain(error, note)

    # --- how it shows

    def __repr__(self) -> str:
        shown = repr(self.settings.call)
        return f"{self.pipeline!r}({shown})" if self.pipeline.middleware else shown

    def _title(self) -> str:
        around = ", ".join(map(repr, self.pipeline.middleware))
        return f"in turn: {self.settings.order}" + (f"; around: {around}" if around else "")

    def __str__(self) -> str:
        parts = (f"{name}:\n{step}" for name, step in self.settings.steps.items())
        return "\n".join([self._title(), *parts])

    def _repr_html_(self) -> str:
        parts = [tables.line(self._title())]
        for name, step in self.settings.steps.items():
            parts += [tables.faint(name), step._repr_html_()]
        return tables.stack(*parts)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self.pipeline.middleware:
            return self.pipeline, (AlternateStep((), self.settings),)
        return self.settings.call, ()


# --- what may be given


def _check_steps(steps: object) -> Mapping[str, PipelineStep]:
    if not isinstance(steps, Mapping) or not steps:
        raise TypeError(
            f"alternate expects steps as a mapping from names to steps, {_EXAMPLE}; got "
            f"{checks.describe(steps)}"
        )
    for name, step in steps.items():
        checks.text("alternate", "steps", name, "names of optimizers")
        if "/" in name or f"{name}/" == Metrics.RECENT:
            raise ValueError(
                f'alternate expects names without "/", and none of them "recent"; got {name!r}'
            )
        if not isinstance(step, PipelineStep):
            raise TypeError(
                f"alternate expects steps, {_EXAMPLE}; got {checks.describe(step)} under {name!r}"
            )
        _check_in_turn(name, step)
    return steps


_NOT_IN_TURN = {
    "cuda_graph": (
        "would capture which parameters need gradients, and that changes with each turn: leave it "
        "out"
    ),
    "local_sgd": "averages weights over processes, and alternate gradients: leave one out",
}


def _check_in_turn(name: str, step: PipelineStep) -> None:
    """Raise ValueError if a step cannot be that of a turn."""
    if isinstance(step, AlternateStep):
        raise ValueError(
            f"alternate: {name!r} is {step!r}, which takes turns itself: list all steps in one "
            "alternate, and repeat names in order="
        )
    for member in step.pipeline.middleware:
        if member.windows or member.total is not None:
            by = "epoch" if member.windows else "number of processes"
            why = f"changes its window with the {by}: write accumulate(n)"
        elif "carries" in member.traits:
            why = "makes several updates in one turn: leave it out"
        elif member.name in _NOT_IN_TURN:
            why = _NOT_IN_TURN[member.name]
        elif member.name == "spike_guard" and member.check_state is not None:
            why = 'goes back with the whole model: write then="skip" or then="stop"'
        elif member.uses:
            why = "names optimizers, and a turn has only its own: leave it out"
        elif member.view or (member.update and member.is_ours):
            why = "averages the whole model: list it around all turns, "
            why += f"pipeline({member!r})(alternate(...))"
        else:
            continue
        raise ValueError(f"alternate: {member!r}, in the step {name!r}, {why}")


def _rules(batch: str | Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return for each name whether its turns take the next batch, or that of the turn before."""
    if not isinstance(batch, Mapping):
        also = ", or a mapping from each name to one of them"
        rule = checks.choice("alternate", "batch", batch, (SAME, NEXT, LATE), also)
        return dict.fromkeys(names, rule)
    if unknown := [name for name in batch if name not in names]:
        raise ValueError(
            "alternate expects batch with names of steps, which are "
            f"{checks.join_names([*names])}; got {checks.describe(unknown[0])}"
        )
    if missing := [name for name in names if name not in batch]:
        given = ", ".join(f'"{name}": "{batch.get(name, "...")}"' for name in names)
        raise ValueError(
            f"alternate: batch lacks {checks.join_names(missing)}: say for each name whether it "
            f'takes the "next" batch or the "same" as the turn before, batch={{{given}}}'
        )
    rules = {
        name: checks.choice("alternate", f"batch[{name!r}]", batch[name], (SAME, NEXT, LATE))
        for name in names
    }
    if {NEXT, LATE} <= {*rules.values()}:
        late = [name for name, rule in rules.items() if rule == LATE]
        raise ValueError(
            f'alternate: batch has "late" for {checks.join_names(late)} and "next" for another '
            'step, but all take from one loader: write "late" for both'
        )
    return rules


def _check_windows(
    steps: Mapping[str, PipelineStep], turns: Sequence[str], rules: Mapping[str, str]
) -> None:
    """Raise ValueError if a turn has another window than the turn whose batch it takes."""
    for name in turns:
        if rules[name] == LATE and steps[name].window > 1:
            raise ValueError(
                f'alternate: batch="late" gives a turn one batch, but {name} accumulates '
                f'{steps[name].window}: write batch="next", or leave accumulate out'
            )
    for before, name in itertools.pairwise(turns):
        one, other = steps[before].window, steps[name].window
        if rules[name] == SAME and one != other:
            raise ValueError(
                f'alternate: with batch="same" a turn takes the batches of the turn before it, '
                f"but {before} takes {one} and {name} takes {other}: list the same accumulate(n) "
                f'in both steps, or write batch="next"'
            )


def _names(argument: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    if not checks.is_list(given) or not given:
        raise TypeError(
            f"alternate expects {argument} as names of steps, such as {(*known,)}; got "
            f"{checks.describe(given)}"
        )
    for name in given:
        if name not in known:
            raise ValueError(
                f"alternate expects {argument} as names of steps, which are "
                f"{checks.join_names([*known])}; got {checks.describe(name)}"
            )
    return tuple(given)


# --------------------------------------------------------------------------------------------------
# The turns of an alternating step: the state that each step is given, and what becomes of it.


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
        late: whether the batch of a turn is fetched when the turn comes.
    """

    steps: Mapping[str, PipelineStep]
    turns: tuple[Turn, ...]
    window: int
    evaluated: tuple[str, ...]
    call: Call
    late: bool = False

    @classmethod
    def of(
        cls,
        steps: Mapping[str, PipelineStep],
        order: Sequence[str],
        rules: Mapping[str, str],
        evaluated: tuple[str, ...],
        call: Call,
    ) -> Settings:
        """Return the settings of an order; by name, a turn takes the next batches or the same."""
        turns: list[Turn] = []
        batches = slice(0)
        for i, name in enumerate(order):
            if not i or rules[name] != SAME:
                batches = slice(batches.stop, batches.stop + steps[name].window)
            turns.append(Turn(name, i, batches))
        late = LATE in rules.values()
        return cls(dict(steps), tuple(turns), batches.stop, evaluated, call, late)

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
        NotImplementedError: processes would update by themselves.
    """
    inside = [
        _for_one(member, name)
        for name, step in steps.items()
        for member in step.pipeline.middleware
        if _sets_numbers(member)
    ]
    for member in around:
        if member.name == "local_sgd":
            raise NotImplementedError(
                f"alternate averages the gradients of each turn over processes, and {member!r} the "
                "weights: leave one of them out"
            )
        if member.view is not None and member.view.beside and member.name in steps:
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
    call = member.call if member.step is not None and member.update is None else None
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
        self.ownership: Ownership = Ownership()
        self.run: tuple[RunInfo | None, RunInfo | None] = (None, None)  # the run's, and their own


class Turns:
    """Takes turns, and makes the states that the steps of turns are given.

    Args:
        run_of: ``(facts about the run, name, its updates when the phase began) -> those for the
            turns of an optimizer``.
    """

    def __init__(self, run_of: Callable[[RunInfo, str, int], RunInfo]) -> None:
        self._run_of = run_of
        self._handles: WeakKeyDictionary[Ownership, dict[str, _Handles]] = WeakKeyDictionary()

    def state_of(self, state: TrainState, name: str, position: int = 0) -> TrainState:
        """Return a state of the same model whose only optimizer is that of a name.

        It has the slots of that name, and its step is the number of updates of that optimizer. With
        several processes each turn draws other numbers, because of its seed.
        """
        found = self._handles.setdefault(Ownership.of(state), {})
        handles = found.get(name) or found.setdefault(name, _Handles())
        if state.run is not handles.run[0]:
            first = Phase.running(state.phases).updates.get(name, 0)
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
            parameters=handles.ownership.parameters,
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
            if done.applied or not Ownership.belongs_to(own):
                Ownership.give_up(state)  # the weights are between two rounds
            raise
        finally:
            for p in resting:
                p.requires_grad_(True)
        Ownership.of(own).newest = None
        done.add(name, out)
        updates = {**state.updates, name: state.updates[name] + (out.skip is None)}
        slots = _merged(state, name, new)
        return attrs.evolve(state, updates=updates, slots=slots, extra=new.extra, stop=new.stop)


def _merged(state: TrainState, name: str, own: TrainState) -> dict[str, object]:
    """Return the slots of a state with those of a state of a turn."""
    return {**state.slots, **{f"{name}/{key}": value for key, value in own.slots.items()}}


# --- the numbers of a turn


def _of_turn(member: Middleware, name: str) -> Middleware:
    """Return a middleware that adds to the numbers of a turn what another one adds to all."""
    given = member.report
    assert given is not None

    def report(loader: str | None, numbers: dict[str, float]) -> Mapping[str, float]:
        __tracebackhide__ = True
        more: object = given(loader, _OfTurn(numbers, name))
        if isinstance(more, Mapping):
            return {PipelineStep.prefixed(name, key): value for key, value in more.items()}
        return more  # type: ignore[return-value]  # which is checked

    return attrs.evolve(member, report=report)


class _OfTurn(dict[str, float]):
    """The numbers of a turn, without its name. Those that it lacks are looked up among all.

    Args:
        numbers: all numbers of a loader.
        name: the name of the turn.
    """

    def __init__(self, numbers: Mapping[str, float], name: str) -> None:
        prefix = f"{name}/"
        super().__init__(
            {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
        )
        self._all, self._name = numbers, name

    def __missing__(self, key: str) -> float:
        return self._all[PipelineStep.prefixed(self._name, key)]


# --- the outputs of turns


class Round:
    """The turns that were taken of one round, and their outputs."""

    def __init__(self) -> None:
        self._losses: dict[str, Metrics] = {}
        self._metrics = Metrics()
        self._weight: float | Tensor = 0  # of the newest turn
        self._aux: dict[str, Mapping[str, object]] = {}
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
        self._losses.setdefault(name, Metrics()).add_(Output(out.loss, out.weight))
        self._weight = out.weight
        self._aux[name] = out.aux
        named = {PipelineStep.prefixed(name, key): metric for key, metric in out.metrics.items()}
        self._metrics = self._metrics.combined(named)

    def output(self) -> Output:
        """Return the mean loss over the items of all turns, and the metrics of each name."""
        if not self._losses:
            assert self._skipped is not None, "no turn was taken"
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach())
        found = {f"{name}/loss": of["loss"] for name, of in self._losses.items()}
        metrics = {**found, **self._metrics}
        losses = [loss for loss in found.values() if isinstance(loss, Mean)]
        if len(losses) < len(found):  # in an evaluation
            return Output(cast(Tensor, None), self._weight, self._aux, metrics)
        first, *others = losses
        total, weight = first.total, first.weight
        for loss in others:
            total, weight = total + loss.total, weight + loss.weight
        items = torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
        return Output(total / items, weight, self._aux, metrics)
