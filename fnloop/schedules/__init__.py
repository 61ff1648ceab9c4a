"""Schedules: pure functions ``(step, total_steps) -> factor`` on a group's initial value.

Update i, counted from 0, uses ``f(i, total)``. The first update never has a factor of zero, and the
last one is near the minimum, not at it: in a decay over T updates, update t is at ``t/T``; in a
warmup over W updates, it is at ``(t + 1)/W``.

Lengths are numbers of updates (an int: ``warmup=100``) or fractions of the run (a float from 0 to
1: ``warmup=0.1``).

    >>> f = cosine(warmup=2)
    >>> [round(f(i, 6), 3) for i in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, cast

import attrs
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from fnloop._extensions import extensions
from fnloop.extend import Call, checks, containers, name_of, tables, warn_once

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fnloop._core.state import TrainState

__docformat__ = "google"

__all__ = [
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "join",
    "linear",
    "multistep",
    "one_cycle",
    "plot",
    "polynomial",
    "step_decay",
    "warmup",
    "wsd",
]


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


# --------------------------------------------------------------------------------------------------
# What a schedule is, how one is made, and what a length means.

Length = int | float  # updates, or a fraction of the run
Factor = Callable[[int, int | None], float]  # (step, total_steps) -> factor
P = ParamSpec("P")


@attrs.frozen(repr=False)
class Schedule:
    """A function ``(step, total_steps) -> factor`` that shows and compares as its call.

    Args:
        call: the call.
        factor: the function.
        text: how it shows, if not as the call.
    """

    call: Call
    factor: Factor = attrs.field(eq=False)
    text: str | None = attrs.field(default=None, eq=False)

    def __call__(self, step: int, total_steps: int | None) -> float:
        __tracebackhide__ = True
        if step.__class__ is not int or step < 0:
            step = checks.integer(repr(self), "step", step, "the updates applied before", least=0)
        if total_steps is not None and total_steps.__class__ is not int:
            total_steps = checks.plain(total_steps)
            if total_steps.__class__ is not int:
                meaning = "the updates of the run, or None"
                checks.integer(repr(self), "total_steps", total_steps, meaning)
        return self.factor(step, total_steps)

    def __repr__(self) -> str:
        return self.text or repr(self.call)

    def _repr_html_(self) -> str:
        # Long enough to show every length that is given in updates.
        total = max(200, 4 * max(_ints(self.call), default=0))
        try:
            values = [self(i * total // 200, total) for i in range(200)]
        except Exception:  # such as from a user's function that does not accept this length
            return tables.curve(repr(self), [], "")
        note = f"factor over {total:,} updates, at most {max(values):.4g}"
        return tables.curve(repr(self), values, note)

    def __hash__(self) -> int:
        return hash(self.call.factory)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[Call, str | None]]:
        return (_remake, (self.call, self.text))


checks.hide_fields(Schedule)


def _remake(call: Call, text: str | None) -> Schedule:
    made = call()
    assert isinstance(made, Schedule)
    return attrs.evolve(made, text=text)


def _ints(call: Call) -> Iterator[int]:
    """Yield the ints in a call, and in the schedules within it."""
    waiting: list[object] = [*call.args, *call.kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Schedule):
            yield from _ints(value.call)
        elif checks.is_list(value):
            waiting.extend(value)
        elif isinstance(value, int):
            yield value


def schedule_factory(make: Callable[P, Factor]) -> Callable[P, Schedule]:
    """Turn a function that returns a factor function into one that returns a :class:`Schedule`."""

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        args, kwargs = checks.plain(args), checks.plain(kwargs)
        return Schedule(Call(made, args, kwargs), make(*args, **kwargs))

    # schedule(cosine) looks for this to say that the call is missing
    vars(made)["is_schedule_factory"] = True
    return made


def check_schedule(owner: str, schedule: object) -> None:
    """Raise TypeError unless something can be called as ``schedule(step, total_steps)``."""
    wanted = "a function (step, total_steps) -> factor, such as cosine()"
    if "is_schedule_factory" in containers.vars_of(schedule):
        name = name_of(schedule)
        raise TypeError(f"{owner} expects {wanted}; got {name}. Call it: {name}()")
    refuse_torch_scheduler(owner, wanted, schedule)
    checks.function(owner, "a schedule", schedule, wanted, 2)


def takes_state(given: object) -> bool:
    """Return whether something is a function of one argument, the state, and not a schedule."""
    ours = checks.module_of(given) == __name__
    if not callable(given) or isinstance(given, type) or ours:  # warmup(2) takes a schedule
        return False
    try:
        signature = inspect.signature(given)
        signature.bind(None)
    except (TypeError, ValueError):  # it takes another number, or is a builtin without a signature
        return False
    try:
        signature.bind(None, None)
    except TypeError:
        return True
    return False


def refuse_torch_scheduler(owner: str, wanted: str, given: object) -> None:
    """Raise TypeError if something is a scheduler of torch, or its class, and say what to write."""
    kind = given if isinstance(given, type) else type(given)
    if not issubclass(kind, LRScheduler):
        return
    name = kind.__name__
    if issubclass(kind, ReduceLROnPlateau):
        hint = f'Instead of {name}, list plateau("valid/loss") in the pipeline'
    else:
        settings = "10" if kind is StepLR else "..."
        hint = f"Write torch_scheduler(lambda optimizer, run: {name}(optimizer, {settings}))"
    got = name if kind is given else f"a {name}"
    raise TypeError(f"{owner} expects {wanted}; got {got}. {hint}")


def check_length(owner: str, name: str, value: object) -> None:
    """Raise unless something is a length.

    Raises:
        TypeError: it is not a number.
        ValueError: it is below 0, or a float above 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "updates (an int) or as a fraction of the run (a float)"
        raise TypeError(f"{owner} expects {name} as {wanted}; got {checks.describe(value)}")
    if not value >= 0:
        raise ValueError(f"{owner} expects {name} >= 0; got {value!r}")
    if isinstance(value, float) and value > 1:
        hint = f". For updates, write an int: {round(value)}" if math.isfinite(value) else ""
        raise ValueError(
            f"{owner} expects {name} as a fraction of the run, from 0.0 to 1.0; got {value!r}{hint}"
        )


def check_lengths(owner: str, name: str, values: object) -> list[Length]:
    """Return lengths as a list of one's own, having checked each."""
    if not checks.is_list(values):
        raise TypeError(
            f"{owner} expects {name} as a list of lengths; got {checks.describe(values)}"
        )
    lengths = [checks.plain(value) for value in values]
    for length in lengths:
        check_length(owner, name, length)
    return lengths


def updates_in(length: Length, total: int | None) -> int:
    """Return a length in updates."""
    return length if isinstance(length, int) else round(length * known_total(total))


def known_total(total: int | None) -> int:
    """Return the length of a run, having checked that it is known.

    Raises:
        ValueError: it is not.
    """
    if total is None:
        raise ValueError(
            "this schedule needs the length of the run: call it through "
            "fit(step, state, loaders, steps=...)"
        )
    return total


# --------------------------------------------------------------------------------------------------
# The shapes of schedules: constant, decays from 1 to a minimum, cycles and stairs.


def _check_parts(owner: str, min_ratio: object, **lengths: Length) -> None:
    """Raise unless these are the lengths of two parts of a run, and a minimum."""
    for name, length in lengths.items():
        check_length(owner, name, length)
    first, last = lengths.values()
    if isinstance(first, float) and isinstance(last, float) and first + last > 1:
        raise ValueError(
            f"{owner}: its first part, {first}, and its last, {last}, make more than the whole run"
        )
    _check_ratio(owner, "min_ratio", min_ratio)


def _check_ratio(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{owner} expects {name} from 0 to 1, a factor on the initial value; "
            f"got {checks.describe(value)}"
        )


def _warmup_in(owner: str, warmup: Length, total: int | None) -> int:
    """Return the updates of a warmup. Warn if they are more than the run has."""
    up = updates_in(warmup, total)
    if isinstance(total, int) and 0 < total < up:
        warn_once(
            f"{owner}: the warmup takes {up} updates, and the run has {total}, so it ends at "
            f"{total / up:.0%} of the initial value: give a fraction of the run, such as 0.1"
        )
    return up


Decay = Callable[[float], float]  # from 1 at 0 to 0 at 1


def _fall(step: int, begin: int, length: int, decay: Decay, min_ratio: float) -> float:
    """Return the factor of an update: 1 before a fall of some length, ``min_ratio`` after it."""
    if step < begin:
        return 1.0
    if step >= begin + length:
        return min_ratio
    return min_ratio + (1 - min_ratio) * decay((step - begin) / length)


def _cosine(t: float) -> float:
    return (1 + math.cos(math.pi * t)) / 2


def _phases(owner: str, decay: Decay, warmup: Length, cooldown: Length, min_ratio: float) -> Factor:
    """Warm up, decay from 1 to ``min_ratio`` along ``decay``, and stay there for the cooldown."""
    _check_parts(owner, min_ratio, warmup=warmup, cooldown=cooldown)

    def factor(step: int, total: int | None) -> float:
        total = known_total(total)
        up, down = _warmup_in(owner, warmup, total), updates_in(cooldown, total)
        if step < up:
            return (step + 1) / up
        # Without a warmup the first update is not at the minimum, however long the cooldown.
        length = max(total - up - down, 0 if up else 1)
        return _fall(step, up, length, decay, min_ratio)

    return factor


@schedule_factory
def constant() -> Factor:
    """Return the schedule that is always 1.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Example:
        >>> constant()(7, 10)
        1.0
    """
    return lambda step, total: 1.0


@schedule_factory
def linear(warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0) -> Factor:
    """Return a linear decay from 1 to ``min_ratio`` over the run.

    Args:
        warmup: length of a linear warmup before the decay.
        cooldown: length of the final phase at ``min_ratio``.
        min_ratio: the minimum, as a factor on the initial value.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, the lengths exceed the run, or min_ratio is not from 0 to
            1.
        TypeError: a length is not a number.

    Example:
        >>> [linear()(i, 4) for i in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    return _phases("linear", lambda t: 1 - t, warmup, cooldown, min_ratio)


@schedule_factory
def cosine(
    warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0, k: float = 1.0
) -> Factor:
    """Return a cosine decay from 1 to ``min_ratio`` over the run: ``(1 + cos(π tᵏ)) / 2``.

    Args:
        warmup: length of a linear warmup before the decay.
        cooldown: length of the final phase at ``min_ratio``.
        min_ratio: the minimum, as a factor on the initial value.
        k: the exponent of k-decay, above 0; larger keeps the factor high for longer.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, the lengths exceed the run, min_ratio is not from 0 to 1,
            or k is not above 0.
        TypeError: a length is not a number.

    Example:
        >>> [round(cosine()(i, 4), 3) for i in range(4)]
        [1.0, 0.854, 0.5, 0.146]

    Source: Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983; k-decay:
    https://arxiv.org/abs/2004.05909
    """
    checks.number("cosine", "k", k, "the exponent of k-decay", above=0)
    return _phases("cosine", lambda t: _cosine(t**k), warmup, cooldown, min_ratio)


@schedule_factory
def polynomial(
    power: float = 2.0, warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0
) -> Factor:
    """Return a decay ``(1 - t)ᵖ`` from 1 to ``min_ratio`` over the run.

    Args:
        power: p, above 0; 1 is linear.
        warmup: length of a linear warmup before the decay.
        cooldown: length of the final phase at ``min_ratio``.
        min_ratio: the minimum, as a factor on the initial value.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, the lengths exceed the run, min_ratio is not from 0 to 1,
            or power is not above 0.
        TypeError: a length is not a number.

    Example:
        >>> [polynomial(2.0)(i, 4) for i in range(4)]
        [1.0, 0.5625, 0.25, 0.0625]
    """
    checks.number("polynomial", "power", power, "1 is linear", above=0)
    return _phases("polynomial", lambda t: (1 - t) ** power, warmup, cooldown, min_ratio)


@schedule_factory
def one_cycle(peak: Length = 0.3, start_ratio: float = 0.04, min_ratio: float = 4e-6) -> Factor:
    """Return one cycle: up from ``start_ratio`` to 1 along a cosine, then down to ``min_ratio``.

    Args:
        peak: length of the rise.
        start_ratio: the first factor, above 0.
        min_ratio: the value that the fall ends near.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: peak is below 0, a ratio is not from 0 to 1, or start_ratio is 0.
        TypeError: peak is not a number.

    Example:
        >>> [round(one_cycle(peak=0.5, start_ratio=0.5, min_ratio=0.0)(i, 4), 3) for i in range(4)]
        [0.5, 0.75, 1.0, 0.5]

    Source: Smith and Topin, 2018, https://arxiv.org/abs/1708.07120
    """
    check_length("one_cycle", "peak", peak)
    _check_ratio("one_cycle", "start_ratio", start_ratio)
    _check_ratio("one_cycle", "min_ratio", min_ratio)
    if start_ratio == 0:
        raise ValueError("one_cycle expects start_ratio > 0: the first update would change nothing")

    def factor(step: int, total: int | None) -> float:
        total, up = known_total(total), updates_in(peak, total)
        if step < up:
            return 1.0 + (start_ratio - 1.0) * _cosine(step / up)
        return _fall(step, up, total - up, _cosine, min_ratio)

    return factor


_DECAYS: dict[str, Decay] = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": _cosine,
}


@schedule_factory
def wsd(
    warmup: Length = 0, decay: Length = 0.1, min_ratio: float = 0.0, kind: str = "sqrt"
) -> Factor:
    """Return warmup, stable, decay: rise to 1, stay there, and fall in the last part of the run.

    Args:
        warmup: length of the linear warmup.
        decay: length of the decay.
        min_ratio: the value that the decay ends near.
        kind: "sqrt", "linear" or "cosine".

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, the lengths exceed the run, min_ratio is not from 0 to 1,
            or there is no such kind.
        TypeError: a length is not a number.

    Example:
        >>> [wsd(decay=2, kind="linear")(i, 4) for i in range(4)]
        [1.0, 1.0, 1.0, 0.5]

    Source: Hägele et al., 2024, https://arxiv.org/abs/2405.18392
    """
    _check_parts("wsd", min_ratio, warmup=warmup, decay=decay)
    checks.choice("wsd", "kind", kind, _DECAYS)

    def factor(step: int, total: int | None) -> float:
        up, total = _warmup_in("wsd", warmup, total), known_total(total)
        down = updates_in(decay, total)
        if step < up:
            return (step + 1) / up
        return _fall(step, total - down, down, _DECAYS[kind], min_ratio)

    return factor


@schedule_factory
def exponential(gamma: float) -> Factor:
    """Return ``gamma ** step``.

    Args:
        gamma: the factor per update, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: gamma is not above 0.

    Example:
        >>> exponential(0.5)(3, None)
        0.125
    """
    checks.number("exponential", "gamma", gamma, above=0)
    return lambda step, total: gamma**step


@schedule_factory
def step_decay(every: Length, gamma: float = 0.1) -> Factor:
    """Return a factor that is multiplied by ``gamma`` at regular intervals.

    Args:
        every: length of an interval.
        gamma: the factor per interval, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: every or gamma is not above 0.
        TypeError: every is not a number.

    Example:
        >>> [step_decay(2, gamma=0.5)(i, None) for i in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    check_length("step_decay", "every", every)
    checks.number("step_decay", "gamma", gamma, above=0)
    if every == 0:
        raise ValueError("step_decay expects every > 0, got 0")
    return lambda step, total: float(gamma ** (step // max(updates_in(every, total), 1)))


@schedule_factory
def multistep(milestones: Sequence[Length], gamma: float = 0.1) -> Factor:
    """Return a factor that is multiplied by ``gamma`` at each milestone.

    Args:
        milestones: when, as updates or fractions of the run.
        gamma: the factor at each, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a milestone is below 0, or gamma is not above 0.
        TypeError: the milestones are not a list of numbers.

    Example:
        >>> [multistep([1, 3], gamma=0.5)(i, None) for i in range(4)]
        [1.0, 0.5, 0.5, 0.25]
    """
    found = check_lengths("multistep", "milestones", milestones)
    checks.number("multistep", "gamma", gamma, above=0)
    return lambda step, total: float(gamma ** sum(step >= updates_in(m, total) for m in found))


@schedule_factory
def inverse_sqrt(warmup: Length) -> Factor:
    """Return a linear warmup, then ``sqrt(warmup / (step + 1))``.

    Args:
        warmup: length of the warmup, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: warmup is not above 0.
        TypeError: warmup is not a number.

    Example:
        >>> [inverse_sqrt(4)(i, None) for i in (0, 3, 15)]
        [0.25, 1.0, 0.5]

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762
    """
    check_length("inverse_sqrt", "warmup", warmup)
    if warmup == 0:
        raise ValueError("inverse_sqrt expects warmup > 0, got 0")

    def factor(step: int, total: int | None) -> float:
        up = max(updates_in(warmup, total), 1)
        return min((step + 1) / up, math.sqrt(up / (step + 1)))

    return factor


# --------------------------------------------------------------------------------------------------
# Schedules made of schedules.


def warmup(n: Length) -> Callable[[Factor], Schedule]:
    """Put a linear warmup before any schedule, which then covers the rest of the run.

    Args:
        n: length of the warmup.

    Returns:
        A function that takes a schedule and returns one.

    Raises:
        ValueError: n is below 0.
        TypeError: n is not a number; or, when called, the argument is not a schedule.

    Example:
        >>> from fnloop.schedules import linear
        >>> f = warmup(2)(linear())
        >>> f, [f(i, 6) for i in range(6)]
        (warmup(2)(linear()), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    """
    n = checks.plain(n)
    check_length("warmup", "n", n)
    return lambda schedule: attrs.evolve(
        _warmed(n, schedule), text=f"warmup({n})({name_of(schedule)})"
    )


@schedule_factory
def _warmed(n: Length, schedule: Factor) -> Factor:
    check_schedule("warmup", schedule)

    def factor(step: int, total: int | None) -> float:
        __tracebackhide__ = True
        up = _warmup_in("warmup", n, total)
        rest = None if total is None else max(total - up, 1)
        return schedule(0, rest) * (step + 1) / up if step < up else schedule(step - up, rest)

    return factor


@schedule_factory
def join(*schedules: Factor, at: Sequence[Length]) -> Factor:
    """Run schedules one after the other. Each counts its own steps and knows its own length.

    Args:
        *schedules: two or more.
        at: where each but the first begins, as updates or fractions of the run, in increasing
            order.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        TypeError: something is not a schedule, or at is not a list of lengths.
        ValueError: there are too few schedules or boundaries. When called: the boundaries do not
            increase.

    Example:
        >>> from fnloop.schedules import constant, linear
        >>> [join(constant(), linear(), at=[2])(i, 6) for i in range(6)]
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    for schedule in schedules:
        check_schedule("join", schedule)
    boundaries = check_lengths("join", "at", at)
    if len(boundaries) != len(schedules) - 1 or not boundaries:
        raise ValueError(
            "join expects two schedules or more, and in at= where each but the first begins; got "
            f"{len(schedules)} and {len(boundaries)}"
        )

    def factor(step: int, total: int | None) -> float:
        __tracebackhide__ = True
        starts = [0, *(updates_in(boundary, total) for boundary in boundaries)]
        if starts != sorted(starts):
            raise ValueError(
                f"join expects rising boundaries; at={boundaries} begins at updates {starts[1:]}"
            )
        if total is None:
            schedules[-1](0, None)  # raises now, not only when its turn comes, if it needs a total
        i = max(n for n, start in enumerate(starts) if step >= start)
        end = starts[i + 1] if i + 1 < len(starts) else total
        return schedules[i](step - starts[i], None if end is None else end - starts[i])

    return factor


# --------------------------------------------------------------------------------------------------
# Schedules as a figure.

Schedules = Factor | list[Factor] | tuple[Factor, ...] | Mapping[str, Factor]


def plot(schedules: Schedules, total_steps: int) -> Figure:
    """Draw schedules: the factor of each update of a run.

    Args:
        schedules: a schedule, a list or a tuple of them, or a mapping from labels to schedules. Any
            function ``(step, total_steps) -> factor`` is a schedule.
        total_steps: how many updates the run has, at least 1.

    Returns:
        A matplotlib Figure; ``figure.savefig("schedule.png")`` writes it.

    Raises:
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        TypeError: something is not a schedule.
        ValueError: there is no schedule, or total_steps is below 1.

    Example:
        >>> from fnloop.schedules import cosine
        >>> figure = plot({"short": cosine(warmup=10), "long": cosine(warmup=0.5)}, total_steps=100)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['short', 'long']
    """
    total_steps = checks.integer("plot", "total_steps", total_steps, "the updates of a run")
    named = _with_labels(schedules)
    if not named:
        raise ValueError("plot expects at least one schedule, such as cosine(); got none")
    for schedule in named.values():
        check_schedule("plot", schedule)
    (plot_factors,) = extensions("figure of schedules")
    return plot_factors(named, total_steps)


def _with_labels(schedules: Schedules) -> Mapping[str, Factor]:
    if isinstance(schedules, Mapping):
        return schedules
    several = cast("Sequence[Factor]", schedules if checks.is_list(schedules) else [schedules])
    return {name_of(schedule): schedule for schedule in several}


def explain_unknown_length(what: str, state: TrainState) -> str:
    """Return why the length of the run is unknown, and what to do about it.

    Args:
        what: what needs the length, such as "schedule(cosine())".
        state: a state of the run, or of a bare step.
    """
    if state.run is None:
        return (
            f"{what} needs the length of the run, which a bare step does not know: call fit(step, "
            "state, loaders, ...), or give every length in steps"
        )
    run = state.run
    if run.total_items is not None and (run.epochs is None or run.batches_per_epoch is not None):
        return (
            f"{what} needs the updates of the run, but items= ends it: write schedule(..., "
            'by="items"), or give every length in steps'
        )
    varies = run.batches_per_epoch is not None
    why = (
        "a batch makes an update for each of its windows"
        if varies
        else "the training loader has none"
    )
    return (
        f"{what} needs the length of the run, but {why}: call fit(step, state, loaders, steps=...)"
    )
