"""Why two makings of one update differ: what an error says, from two more makings."""

from __future__ import annotations

import contextlib

import attrs

from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Step
from fnloop._display.html import format_number
from fnloop.debug._bits import (
    BUFFER,
    GRADIENT,
    LOSS,
    OPTIMIZER,
    SLOT,
    WEIGHT,
    Difference,
    Differences,
    Gradients,
    Result,
    find_differences,
    result_of,
    without_gradients,
)
from fnloop.debug._copies import Before
from fnloop.debug._references import Facts
from fnloop.debug._sources import find_sources
from fnloop.debug._trace import OUTSIDE, Called, Trace, first_other_operator

__all__ = ["Makings", "describe", "explain"]

_STAGES = {
    LOSS: "the forward differs",
    BUFFER: "the loss is the same, but the forward leaves other buffers",
    GRADIENT: "the loss is the same, the backward differs",
    WEIGHT: "the loss is the same, the weights after it differ",
    OPTIMIZER: "the weights are the same, the state of the optimizer differs",
    SLOT: "the weights are the same, what a middleware keeps differs",
}
_UNSEEN = "a kernel that is not deterministic (try torch.use_deterministic_algorithms(True)), or "
_UNSEEN += "something that the run does not position, such as a clock"
MOST_SOURCES = 3


@attrs.frozen(eq=False)
class Makings:
    """Ways to make one update again.

    Args:
        step: what makes it.
        state: the state before it.
        batch: what the step takes.
        before: puts that state back.
        first, second: the results of the first two makings.
    """

    step: Step
    state: TrainState
    batch: Batch
    before: Before
    first: Result
    second: Result

    def make(self, facts: Facts) -> Result:
        """Make the update, and return a copy of its result, with the gradients if they are seen.

        A replay of a graph calls no hooks, and a capture would record them.
        """
        __tracebackhide__ = True
        with contextlib.nullcontext() if facts.captures else Gradients(self.state) as gradients:
            new, out = self.step(self.state, self.batch)
        return result_of(new, out, gradients, copied=True)


def explain(makings: Makings, found: Differences | None, facts: Facts) -> tuple[str, str | None]:
    """Say why the makings of an update differ. It makes the update twice more.

    Args:
        makings: how. The state before the update has been put back.
        found: where the first two differ; None: they differ in another process.
        facts: what is known about the pipeline.

    Returns:
        The message, and the name of the first parameter that differs, or None.
    """
    __tracebackhide__ = True
    state = makings.state
    roots = {"model": state.model, "loss function": makings.step}
    before = find_sources(roots)
    third, fourth, called = _trace(makings, facts)
    after = find_sources(roots)
    title = f"audit: two makings of update {state.step + 1} from the same state differ"
    if found is None:
        return f"{title} in another process, whose message says where", None
    again = find_differences(third, fourth)  # with the gradients
    seen = again or found
    parts = [f"{title}. {describe(seen)}"]
    changed = [
        source
        for name, source in before.items()
        if name in after and after[name].fingerprint != source.fingerprint
    ]
    if changed:
        names = "; ".join(str(source) for source in changed[:MOST_SOURCES])
        parts.append(f"Between the makings this changes, which a checkpoint does not hold: {names}")
    if called is not None:
        where = f"at {called.line}" if called.line else OUTSIDE
        parts.append(f"The first operator whose result differs is {called.operator}, {where}")
    if not changed and called is None:
        parts.append(_vote(makings, without_gradients(third), found))
    return ". ".join(parts), seen.parameter.name if seen.parameter else None


def _trace(makings: Makings, facts: Facts) -> tuple[Result, Result, Called | None]:
    """Make the update twice more. Return the results, and the first operator that differs."""
    __tracebackhide__ = True
    # torch.compile does not work while operators are watched.
    watch = contextlib.nullcontext if facts.compiles else Trace
    with watch() as one:
        third = makings.make(facts)
    makings.before.put_back()
    with watch() as other:
        fourth = makings.make(facts)
    called = None
    if isinstance(one, Trace) and isinstance(other, Trace):
        called = first_other_operator(one, other)
    return third, fourth, called


def _vote(makings: Makings, third: Result, found: Differences) -> str:
    """Return what to say if nothing else is known: whether one of the makings was disturbed."""
    for agrees, other, result in (
        ("first", "second", makings.first),
        ("second", "first", makings.second),
    ):
        if find_differences(result, third) is None:
            return (
                f"A third making agrees with the {agrees} one, so the {other} one was disturbed: "
                f"{_disturbed(found)}"
            )
    return f"Likely: {_UNSEEN}"


def _disturbed(found: Differences) -> str:
    first = found.first
    if first.kind != LOSS and first.elements == first.bits == 1 and found.parameters <= 1:
        return "one bit of one element is flipped, as a fault of the memory or of the device does"
    return (
        "a fault of the memory or of the device, a race of a kernel, or code that does something "
        "else at times"
    )


def describe(found: Differences) -> str:
    """Return where two results differ, and how much."""
    first, parameter = found.first, found.parameter
    stage = _STAGES[first.kind]
    if first.kind == WEIGHT and found.gradients:
        stage = "the loss and the gradients are the same, the step of the optimizer differs"
    text = f"{stage[0].upper()}{stage[1:]}"
    if first.values is not None:
        text = f"{text}: the loss is {first.values[0]!r} and {first.values[1]!r}"
    elif first is not parameter and first != parameter:
        text = f"{text}: {_amount(first)}"
    if parameter is None:
        return f"{text}. No parameter differs"
    more = f", one of {found.parameters} parameters that do" if found.parameters > 1 else ""
    return (
        f"{text}. The first parameter that differs is {parameter.name}{more}: {_amount(parameter)}"
    )


def _amount(one: Difference) -> str:
    what = {
        GRADIENT: f"the gradient of {one.name}",
        WEIGHT: f"the value of {one.name}",
        BUFFER: f"the buffer {one.name}",
        OPTIMIZER: f"{one.inside!r} in the optimizer's state of {one.name}",
        SLOT: f"slots[{one.name!r}] {one.inside}".rstrip(),
    }.get(one.kind, "the loss")
    if not one.size:
        return f"{what} is not in both, or has another shape"
    bits = f"{one.bits} bit{'s' * (one.bits != 1)}"
    return (
        f"{what} differs in {one.elements} of {one.size} elements ({bits}), by at most "
        f"{format_number(one.most)}"
    )
