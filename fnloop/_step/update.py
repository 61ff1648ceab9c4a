"""From the gradients to the weights: the optimizers, and what is reported of an update."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container, Iterable, Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.torch_compat import apply_optimizer
from fnloop._core.optimizers import (
    Handle,
    Optimizers,
    check_used,
    explain_untrained,
    optimizers_in,
    wants_closure,
)
from fnloop._core.records import Record
from fnloop._core.several import Several
from fnloop._core.state import (
    Ownership,
    TrainState,
    advance_used,
    current_parameters,
    parameters,
    with_used,
)
from fnloop._core.types import Batch, Metric, Middleware, Output, Step
from fnloop._display import checks
from fnloop._display.screen import log
from fnloop._step.engine import engine_of
from fnloop._step.gradients import fail_to_train
from fnloop._step.transaction import HOST

# --------------------------------------------------------------------------------------------------
# The outermost of the three steps, that of the optimizers, and what becomes of its output.

OPTIMIZER = "the optimizer's step"  # the name of that layer in messages


def update(
    step: Step, name: str, by_closure: bool = False, used: tuple[str, ...] | None = None
) -> Step:
    """Return the step that applies the gradients, unless they are left out, and then clears them.

    Args:
        step: the gradient step: a :func:`transaction`, if it may skip an update.
        name: the name of the loss function.
        by_closure: whether to give the optimizer a closure that it could do without.
        used: the names of the optimizers to update with; None: all.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        cache = current_parameters(state, beginning=True)
        params = cache.found
        for p in params:
            p.grad = None  # of an earlier batch, if any
        try:
            own = state if used is None else with_used(state, used)
            cache = cache if used is None else current_parameters(own)
            if not cache.apart:
                check_used(state.model, state.optimizer, used)
                cache.apart = True
            if by_closure or _evaluates(own.optimizer):  # then there is only one
                new, out = _by_closure(step, own, batch)
            else:
                new, out = step(own, batch)
                if out.skip is None:
                    if not cache.checked:
                        _check_gradients(new, out, name, state.optimizer)
                    Ownership.give_up(new)  # until all of the parameters have changed
                    apply, given = HOST.apply, new.optimizer
                    ones = [*given.values()] if type(given) is Optimizers else [given]
                    if isinstance(new.model, Several):
                        new.model.update(ones, apply, apply is not apply_optimizer)
                    else:
                        for one in ones:
                            apply(one)
        finally:
            for p in params:
                p.grad = None
        applied = out.skip is None
        if used is not None:
            return advance_used(state, new, applied), out
        return Ownership.advance(new, applied), out

    return update


def _evaluates(optimizer: Handle) -> bool:
    """Return whether the only optimizer evaluates the loss by itself."""
    if type(optimizer) is Optimizers:
        return len(optimizer) == 1 and wants_closure(type(next(iter(optimizer.values()))))
    return wants_closure(type(optimizer))


def _check_gradients(state: TrainState, out: Output, name: str, whole: Handle) -> None:
    """Check which parameters have a gradient, in the first update and after each change of them.

    Raises:
        ValueError: none of those that the optimizers update has one.
    """
    __tracebackhide__ = True
    if out.weight.__class__ is int and not out.weight:  # this process had no batch
        return
    cache, optimizers = current_parameters(state), optimizers_in(whole).values()
    if all(p.grad is None for p in cache.trained):
        fail_to_train(state, name, any(p.grad is not None for p in cache.found))
    cache.checked = True
    if not cache.has_changed or not state.backend.main:  # a run says it when it begins
        return
    if (untrained := explain_untrained(state.model, optimizers)) is not None:
        log.warning("update %d: %s", state.step + 1, untrained)


def _only(optimizer: Handle) -> Handle:
    """Return the only optimizer of an update that calls it with a closure."""
    if type(optimizer) is not Optimizers:
        return optimizer
    if len(optimizer) > 1:
        raise TypeError(
            "closure() calls the step of one optimizer, but this state has several: say which one, "
            f'using("{next(iter(optimizer))}"), or leave closure() out of the pipeline'
        )
    return next(iter(optimizer.values()))


@functools.cache
def _check_takes_closure(optimizer: type[Optimizer]) -> None:
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"{optimizer.__name__}.step takes no closure: leave closure() out of the pipeline"
        )


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it needs (LBFGS).

    The first evaluation is reported.
    """
    __tracebackhide__ = True
    optimizer = _only(state.optimizer)
    _check_takes_closure(type(optimizer))
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        __tracebackhide__ = True
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(
                f"{type(optimizer).__name__} cannot skip an update ({replies[-1][1].skip})"
            )
        return engine_of(state).mean_loss(replies[-1][1])

    # The optimizer may change the parameters before, between and after its evaluations.
    Ownership.give_up(state)
    optimizer.step(closure)
    return replies[0]


# --------------------------------------------------------------------------------------------------
# The numbers that middleware add to a report, made from those of the report.


def report(out: Output, metrics: Mapping[str, Metric], by: str) -> Output:
    """Return an output with more metrics. A skipped update reports none.

    Args:
        out: the output of the step inside.
        metrics: name to metric, such as ``fl.Mean(norm, 1)``. None may be read to the host.
        by: who reports them, for messages.

    Returns:
        The new output.

    Raises:
        ValueError: it has a metric of that name already.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import spy, toy
        >>> state, out = spy()(toy(), torch.ones(1))
        >>> report(out, {"norm": fl.Mean(2.0, 1)}, "mine").metrics["norm"].compute()
        2.0
    """
    if out.skip is not None:
        return out
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(
            f"{by} reports the metric {name!r}, which another middleware inside it reports "
            "already: rename one"
        )
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics})


class MissingNumberError(KeyError):
    """Raised for a number that a loader does not have. Another loader may have it.

    The numbers that a ``report`` is given raise it. Let it pass: then nothing is added to the
    numbers of this loader.

    Args:
        message: what is missing.
        name: the name that was looked up.

    Example:
        >>> import fnloop as fl
        >>> from fnloop.testing import toy_loss
        >>> def per_token(loader, numbers):
        ...     return {"per_token": numbers["loss"] / numbers["tokens"]}
        >>> step = fl.pipeline(fl.Middleware("per_token", report=per_token))(toy_loss)
        >>> values = {"train/loss": 6.0, "valid/loss": 8.0, "valid/tokens": 4.0}
        >>> step.derive(values, ["valid"])["valid/per_token"]      # that of train lacks a number
        2.0
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Numbers(dict[str, float]):
    """The numbers that are known of a loader. It notes the names that were looked up in vain.

    Args:
        loader: the name of the loader, or None.
        values: name to number.
        missed: receives the names that ``numbers[name]`` does not find, and who looked them up.
        owner: who looks numbers up.
    """

    def __init__(
        self,
        loader: str | None,
        values: Mapping[str, float],
        missed: dict[str, object] | None = None,
        owner: object = None,
    ) -> None:
        super().__init__(values)
        self.loader, self.owner = loader, owner
        self.missed = {} if missed is None else missed

    def __missing__(self, name: str) -> float:
        self.missed[name] = self.owner
        place = f" of {self.loader}" if self.loader else ""
        raise MissingNumberError(
            f"there is no metric {name!r} among the numbers{place}; there are: {', '.join(self)}",
            name,
        )


def add_reported(
    members: Sequence[Middleware],
    values: Mapping[str, float],
    loaders: Iterable[str] | None = None,
    known: Container[str] = (),
) -> dict[str, float]:
    """Return the numbers of a report with those that middleware add, after those of their loader.

    A name that a middleware looks up may be there for another loader only. It is an error if a
    report of all loaders does not have it, and no earlier report had it.

    Args:
        members: middleware with a ``report``, in the order in which they are asked.
        values: name to number; the names begin with that of a loader.
        loaders: the names of all loaders that the run evaluates; None: names have no prefix.
        known: the names of numbers of earlier reports.

    Raises:
        KeyError: no loader has a name that a middleware looks up.
        ValueError: a name is there already, or was looked up before it is added.
        TypeError: a middleware does not return numbers by name.
    """
    __tracebackhide__ = True
    if loaders is None:
        return {**values, **_added(members, Numbers(None, values))}
    parts: dict[str, dict[str, float]] = {name: {} for name in (*Record.TRAINED, *loaders)}
    last: dict[str, str] = {}  # the last name of each loader
    for name, value in values.items():
        loader, _, rest = name.partition("/")
        if loader in parts:
            parts[loader][rest], last[loader] = value, name
    numbers = [Numbers(loader, part) for loader, part in parts.items() if part]
    added = {part.loader: _added(members, part) for part in numbers}
    if last.keys() >= parts.keys() - {"recent"}:
        _check_missed(numbers, known)
    found: dict[str, float] = {}
    for name, value in values.items():
        found[name] = value
        loader = name.partition("/")[0]
        if last.get(loader) == name:
            found |= {f"{loader}/{more}": number for more, number in added[loader].items()}
    return found


def _added(members: Sequence[Middleware], numbers: Numbers) -> dict[str, float]:
    """Return what middleware add to the numbers of a loader. ``numbers`` gets it too."""
    __tracebackhide__ = True
    added: dict[str, float] = {}
    for member in members:
        assert member.report is not None
        given = Numbers(numbers.loader, numbers, numbers.missed, member)
        try:
            more = member.report(numbers.loader, given)
        except MissingNumberError:
            continue
        checks.mapping(repr(member), "its report", more, "name to number")
        for name, value in more.items():
            checks.metric_name(repr(member), "a name of its report", name)
            if name in numbers:
                raise ValueError(
                    f"{member!r} reports the metric {name!r}, which is there already: rename one"
                )
            if name in numbers.missed:
                raise ValueError(
                    f"{numbers.missed[name]!r} looks up {name!r}, which {member!r} adds after it: "
                    f"list {member!r} first"
                )
            added[name] = numbers[name] = checks.as_number(f"{member!r}: {name!r}", value)
    return added


def _check_missed(numbers: Sequence[Numbers], known: Container[str]) -> None:
    """Raise if no loader has a name that a middleware looks up."""
    for name in numbers[0].missed:
        if not all(name in part.missed for part in numbers):
            continue
        if any(f"{part.loader}/{name}" in known for part in numbers):
            continue
        there = "; ".join(f"{part.loader}: {', '.join(part)}" for part in numbers)
        names = {other: None for part in numbers for other in part}
        raise KeyError(
            f"{numbers[0].missed[name]!r}: no loader of this run has the metric {name!r}; there "
            f"are, of {there}{checks.suggestion(name, names)}"
        )
