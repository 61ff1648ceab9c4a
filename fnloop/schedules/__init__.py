"""Schedules: pure functions ``(step, total_steps) -> factor`` on a group's initial value.

Update i, from 0, uses ``f(i, total)``. No first update has a factor of zero, and the last one is near the minimum,
not at
it: a decay over T updates is at ``t/T`` in its update t, from 0 to T - 1; a warmup over W updates is at ``(t + 1)/W``.

Lengths are updates (an int: ``warmup=100``) or fractions of the run (a float from 0 to 1: ``warmup=0.1``).

    >>> f = cosine(warmup=2)
    >>> [round(f(i, 6), 3) for i in range(6)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from fnloop._core.call import Call, name_of
from fnloop._display import checks, html
from fnloop._display import plot as _plot

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

Length = int | float


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


@attrs.frozen(repr=False)
class Schedule:
    """A function ``(step, total_steps) -> factor`` that shows, compares and pickles as the call that made it."""

    call: Call
    factor: Callable[[int, int | None], float] = attrs.field(eq=False)
    text: str | None = attrs.field(default=None, eq=False)

    def __call__(self, step: int, total_steps: int | None) -> float:
        __tracebackhide__ = True
        if step.__class__ is not int or step < 0:
            checks.integer(repr(self), "step", step, "the updates applied before", least=0)
        if total_steps is not None and total_steps.__class__ is not int:
            checks.integer(
                repr(self), "total_steps", total_steps, "the updates of the run, or None"
            )
        return self.factor(step, total_steps)

    def __repr__(self) -> str:
        return self.text or repr(self.call)

    def _repr_html_(self) -> str:
        total = max(
            200, 4 * max(_ints(self.call), default=0)
        )  # so long that the lengths in updates are seen
        try:
            values = [self(i * total // 200, total) for i in range(200)]
        except Exception:  # a schedule of the user's in it, say, that can't do with this length
            return html.curve(repr(self), [], "")
        return html.curve(
            repr(self), values, f"factor over {total:,} updates, at most {max(values):.4g}"
        )

    def __hash__(self) -> int:
        return hash(self.call.factory)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuilt, (self.call, self.text))


def _rebuilt(call: Call, text: str | None) -> Schedule:
    return attrs.evolve(call(), text=text)


def _schedule(make: Callable[..., Callable[[int, int | None], float]]) -> Callable[..., Schedule]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Schedule:
        return Schedule(Call(made, args, kwargs), make(*args, **kwargs))

    made.is_schedule_factory = True  # type: ignore[attr-defined]  # so that schedule(cosine) can say what is missing
    return made


def _check_length(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = "updates (an int) or as a fraction of the run (a float)"
        raise TypeError(f"{owner} expects {name} as {wanted}; got {checks.described(value)}")
    if not value >= 0:
        raise ValueError(f"{owner} expects {name} >= 0; got {value!r}")
    if isinstance(value, float) and value > 1:
        hint = f". For updates, write an int: {round(value)}" if math.isfinite(value) else ""
        raise ValueError(
            f"{owner} expects {name} as a fraction of the run, from 0.0 to 1.0; got {value!r}{hint}"
        )


def _check_sum(owner: str, first: Length, last: Length) -> None:
    if isinstance(first, float) and isinstance(last, float) and first + last > 1:
        raise ValueError(
            f"{owner}: its first part, {first}, and its last, {last}, make more than the whole run"
        )


def _lengths(owner: str, name: str, values: Any) -> list[Length]:
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"{owner} expects {name} as a list of lengths; got {checks.described(values)}"
        )
    for value in values:
        _check_length(owner, name, value)
    return list(values)


def _check_ratio(owner: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{owner} expects {name} from 0 to 1, a factor on the initial value; got {checks.described(value)}"
        )


def _updates(length: Length, total: int | None) -> int:
    return length if isinstance(length, int) else round(length * _known(total))


def _known(total: int | None) -> int:
    if total is None:
        raise ValueError(
            "this schedule needs the length of the run: call it through fit(step, state, loaders, steps=...)"
        )
    return total


def _phases(
    owner: str, decay: Callable[[float], float], warmup: Length, cooldown: Length, min_ratio: float
) -> Callable[[int, int | None], float]:
    """Warm up, decay from 1 to ``min_ratio`` as ``decay(t)`` does from 1 to 0, stay there to cool down."""
    _check_length(owner, "warmup", warmup)
    _check_length(owner, "cooldown", cooldown)
    _check_sum(owner, warmup, cooldown)
    _check_ratio(owner, "min_ratio", min_ratio)

    def factor(step: int, total: int | None) -> float:
        total = _known(total)
        up, down = _updates(warmup, total), _updates(cooldown, total)
        if step < up:
            return (step + 1) / up
        length = max(
            total - up - down, 0 if up else 1
        )  # however long the cooldown, the first update isn't at the minimum
        if step >= up + length:
            return min_ratio
        return min_ratio + (1 - min_ratio) * decay((step - up) / length)

    return factor


@_schedule
def constant() -> Any:
    """Return the schedule that is always 1.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Example:
        >>> constant()(7, 10)
        1.0
    """
    return lambda step, total: 1.0


@_schedule
def linear(warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0) -> Any:
    """Return a linear decay from 1 to ``min_ratio`` over the run.

    Args:
        warmup: length of a linear warmup before it.
        cooldown: length of a stay at ``min_ratio`` behind it.
        min_ratio: the minimum, as a factor on the initial value.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, they make more than the run, or min_ratio isn't from 0 to 1.
        TypeError: a length is no number.

    Example:
        >>> [linear()(i, 4) for i in range(4)]
        [1.0, 0.75, 0.5, 0.25]
    """
    return _phases("linear", lambda t: 1 - t, warmup, cooldown, min_ratio)


@_schedule
def cosine(warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0, k: float = 1.0) -> Any:
    """Return a cosine decay from 1 to ``min_ratio`` over the run: ``(1 + cos(π tᵏ)) / 2``.

    Args:
        warmup: length of a linear warmup before it.
        cooldown: length of a stay at ``min_ratio`` behind it.
        min_ratio: the minimum, as a factor on the initial value.
        k: the exponent of k-decay, above 0; larger keeps the factor high for longer.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, they make more than the run, min_ratio isn't from 0 to 1, or k isn't above 0.
        TypeError: a length is no number.

    Example:
        >>> [round(cosine()(i, 4), 3) for i in range(4)]
        [1.0, 0.854, 0.5, 0.146]

    Source: Loshchilov and Hutter, 2017, https://arxiv.org/abs/1608.03983; k-decay: https://arxiv.org/abs/2004.05909
    """
    checks.number("cosine", "k", k, "the exponent of k-decay", above=0)
    return _phases(
        "cosine", lambda t: (1 + math.cos(math.pi * t**k)) / 2, warmup, cooldown, min_ratio
    )


@_schedule
def polynomial(
    power: float = 2.0, warmup: Length = 0, cooldown: Length = 0, min_ratio: float = 0.0
) -> Any:
    """Return a decay ``(1 - t)ᵖ`` from 1 to ``min_ratio`` over the run.

    Args:
        power: p, above 0; 1 is linear.
        warmup: length of a linear warmup before it.
        cooldown: length of a stay at ``min_ratio`` behind it.
        min_ratio: the minimum, as a factor on the initial value.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, they make more than the run, min_ratio isn't from 0 to 1, or power isn't above 0.
        TypeError: a length is no number.

    Example:
        >>> [polynomial(2.0)(i, 4) for i in range(4)]
        [1.0, 0.5625, 0.25, 0.0625]
    """
    checks.number("polynomial", "power", power, "1 is linear", above=0)
    return _phases("polynomial", lambda t: (1 - t) ** power, warmup, cooldown, min_ratio)


@_schedule
def one_cycle(peak: Length = 0.3, start_ratio: float = 0.04, min_ratio: float = 4e-6) -> Any:
    """Return one cycle: up from ``start_ratio`` to 1 along a cosine, then down to ``min_ratio``.

    Args:
        peak: length of the way up.
        start_ratio: the first factor, above 0.
        min_ratio: what the way down ends near.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: peak is below 0, or a ratio isn't from 0 to 1; start_ratio is 0.
        TypeError: peak is no number.

    Example:
        >>> [round(one_cycle(peak=0.5, start_ratio=0.5, min_ratio=0.0)(i, 4), 3) for i in range(4)]
        [0.5, 0.75, 1.0, 0.5]

    Source: Smith and Topin, 2018, https://arxiv.org/abs/1708.07120
    """
    _check_length("one_cycle", "peak", peak)
    _check_ratio("one_cycle", "start_ratio", start_ratio)
    _check_ratio("one_cycle", "min_ratio", min_ratio)
    if start_ratio == 0:
        raise ValueError("one_cycle expects start_ratio > 0: the first update would change nothing")

    def between(a: float, b: float, t: float) -> float:
        return b + (a - b) * (1 + math.cos(math.pi * t)) / 2

    def factor(step: int, total: int | None) -> float:
        total, up = _known(total), _updates(peak, total)
        if step < up:
            return between(start_ratio, 1.0, step / up)
        return between(1.0, min_ratio, (step - up) / (total - up)) if step < total else min_ratio

    return factor


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
}


@_schedule
def wsd(warmup: Length = 0, decay: Length = 0.1, min_ratio: float = 0.0, kind: str = "sqrt") -> Any:
    """Return warmup, stable, decay: up to 1, stay there, and come down in the last part of the run.

    Args:
        warmup: length of the linear warmup.
        decay: length of the decay.
        min_ratio: what the decay ends near.
        kind: "sqrt", "linear" or "cosine".

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a length is below 0, they make more than the run, min_ratio isn't from 0 to 1, or there is no such kind.
        TypeError: a length is no number.

    Example:
        >>> [wsd(decay=2, kind="linear")(i, 4) for i in range(4)]
        [1.0, 1.0, 1.0, 0.5]

    Source: Hägele et al., 2024, https://arxiv.org/abs/2405.18392
    """
    _check_length("wsd", "warmup", warmup)
    _check_length("wsd", "decay", decay)
    _check_sum("wsd", warmup, decay)
    _check_ratio("wsd", "min_ratio", min_ratio)
    checks.choice("wsd", "kind", kind, _DECAYS)

    def factor(step: int, total: int | None) -> float:
        up, total = _updates(warmup, total), _known(total)
        down = _updates(decay, total)
        if step < up:
            return (step + 1) / up
        if step < total - down:
            return 1.0
        return (
            min_ratio + (1 - min_ratio) * _DECAYS[kind]((step - total + down) / down)
            if step < total
            else min_ratio
        )

    return factor


@_schedule
def exponential(gamma: float) -> Any:
    """Return ``gamma ** step``.

    Args:
        gamma: the factor per update, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: gamma isn't above 0.

    Example:
        >>> exponential(0.5)(3, None)
        0.125
    """
    _check_gamma("exponential", gamma)
    return lambda step, total: gamma**step


@_schedule
def step_decay(every: Length, gamma: float = 0.1) -> Any:
    """Return a factor that is multiplied by ``gamma`` every so often.

    Args:
        every: length of a stair.
        gamma: the factor per stair, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: every or gamma isn't above 0.
        TypeError: every is no number.

    Example:
        >>> [step_decay(2, gamma=0.5)(i, None) for i in range(5)]
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    _check_length("step_decay", "every", every)
    _check_gamma("step_decay", gamma)
    if every == 0:
        raise ValueError("step_decay expects every > 0, got 0")
    return lambda step, total: float(gamma ** (step // max(_updates(every, total), 1)))


@_schedule
def multistep(milestones: Sequence[Length], gamma: float = 0.1) -> Any:
    """Return a factor that is multiplied by ``gamma`` at each milestone.

    Args:
        milestones: when, as updates or fractions of the run.
        gamma: the factor at each, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: a milestone is below 0, or gamma isn't above 0.
        TypeError: the milestones are no list of numbers.

    Example:
        >>> [multistep([1, 3], gamma=0.5)(i, None) for i in range(4)]
        [1.0, 0.5, 0.5, 0.25]
    """
    found = _lengths("multistep", "milestones", milestones)
    _check_gamma("multistep", gamma)
    return lambda step, total: float(gamma ** sum(step >= _updates(m, total) for m in found))


@_schedule
def inverse_sqrt(warmup: Length) -> Any:
    """Return a linear warmup, then ``sqrt(warmup / (step + 1))``.

    Args:
        warmup: length of the warmup, above 0.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        ValueError: warmup isn't above 0.
        TypeError: warmup is no number.

    Example:
        >>> [inverse_sqrt(4)(i, None) for i in (0, 3, 15)]
        [0.25, 1.0, 0.5]

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762
    """
    _check_length("inverse_sqrt", "warmup", warmup)
    if warmup == 0:
        raise ValueError("inverse_sqrt expects warmup > 0, got 0")

    def factor(step: int, total: int | None) -> float:
        up = max(_updates(warmup, total), 1)
        return min((step + 1) / up, math.sqrt(up / (step + 1)))

    return factor


def warmup(n: Length) -> Callable[[Callable[[int, int | None], float]], Schedule]:
    """Put a linear warmup before any schedule, which then has the rest of the run.

    Args:
        n: length of the warmup.

    Returns:
        A function from a schedule to a schedule.

    Raises:
        ValueError: n is below 0.
        TypeError: n is no number; or, when called, what it is called with is no schedule.

    Example:
        >>> f = warmup(2)(linear())
        >>> f, [f(i, 6) for i in range(6)]
        (warmup(2)(linear()), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    """
    _check_length("warmup", "n", n)
    return lambda schedule: attrs.evolve(
        _warmed(n, schedule), text=f"warmup({n})({name_of(schedule)})"
    )


@_schedule
def _warmed(n: Length, schedule: Callable[[int, int | None], float]) -> Any:
    check_schedule("warmup", schedule)

    def factor(step: int, total: int | None) -> float:
        __tracebackhide__ = True
        up = _updates(n, total)
        rest = None if total is None else max(total - up, 1)
        return schedule(0, rest) * (step + 1) / up if step < up else schedule(step - up, rest)

    return factor


@_schedule
def join(*schedules: Callable[[int, int | None], float], at: Sequence[Length]) -> Any:
    """Run schedules one after the other; each counts its own steps and knows its own length.

    Args:
        *schedules: two or more.
        at: where each but the first begins, as updates or fractions of the run, rising.

    Returns:
        A schedule: a function ``(step, total_steps) -> factor``.

    Raises:
        TypeError: something is no schedule, or at is no list of lengths.
        ValueError: there are too few, or too few boundaries. When it runs: they don't rise.

    Example:
        >>> [join(constant(), linear(), at=[2])(i, 6) for i in range(6)]
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    for schedule in schedules:
        check_schedule("join", schedule)
    boundaries = _lengths("join", "at", at)
    if len(boundaries) != len(schedules) - 1 or not boundaries:
        raise ValueError(
            "join expects two schedules or more, and in at= where each but the first begins; got "
            f"{len(schedules)} and {len(boundaries)}"
        )

    def factor(step: int, total: int | None) -> float:
        __tracebackhide__ = True
        starts = [0, *(_updates(boundary, total) for boundary in boundaries)]
        if starts != sorted(starts):
            raise ValueError(
                f"join expects rising boundaries; at={boundaries} begins at updates {starts[1:]}"
            )
        if total is None:
            schedules[-1](
                0, None
            )  # the one that may need it says so at once, not when its turn has come
        i = max(n for n, start in enumerate(starts) if step >= start)
        end = starts[i + 1] if i + 1 < len(starts) else total
        return schedules[i](step - starts[i], None if end is None else end - starts[i])

    return factor


def plot(schedules: Any, total_steps: int) -> Any:
    """Draw schedules: the factor of each update of a run.

    Args:
        schedules: a schedule, several in a list or a tuple, or a mapping from labels to schedules. Any function
            ``(step, total_steps) -> factor`` will do.
        total_steps: how many updates the run has, at least 1.

    Returns:
        A matplotlib Figure; ``figure.savefig("schedule.png")`` writes it.

    Raises:
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        TypeError: something is no schedule.
        ValueError: there is none, or total_steps is below 1.

    Example:
        >>> figure = plot({"short": cosine(warmup=10), "long": cosine(warmup=0.5)}, total_steps=100)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['short', 'long']
    """
    checks.integer("plot", "total_steps", total_steps, "the updates of a run")
    if not isinstance(schedules, Mapping):
        several = schedules if isinstance(schedules, list | tuple) else [schedules]
        schedules = {name_of(schedule): schedule for schedule in several}
    if not schedules:
        raise ValueError("plot expects at least one schedule, such as cosine(); got none")
    for schedule in schedules.values():
        check_schedule("plot", schedule)
    figure, (axis,) = _plot.grid("schedules.plot", 1)
    curves = {
        name: [(i, schedule(i, total_steps)) for i in range(total_steps)]
        for name, schedule in schedules.items()
    }
    _plot.draw(axis, "factor on the initial value", "update", curves)
    axis.get_legend().remove()  # there is no room in the axis: a schedule goes from corner to corner
    figure.set_figheight(3.0 + 0.22 * len(curves))
    figure.legend(loc="outside lower center", frameon=False)
    return figure


def _ints(call: Call) -> Iterator[int]:
    """Yield the whole numbers in a call, and in the schedules within it."""
    waiting: list[Any] = [*call.args, *call.kwargs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Schedule):
            yield from _ints(value.call)
        elif isinstance(value, list | tuple):
            waiting.extend(value)
        elif isinstance(value, int):
            yield value


def _check_gamma(owner: str, gamma: Any) -> None:
    checks.number(owner, "gamma", gamma, above=0)


def check_schedule(owner: str, schedule: Any) -> None:
    """Raise TypeError unless something can be called as ``schedule(step, total_steps)``."""
    wanted = "a function (step, total_steps) -> factor, such as cosine()"
    if hasattr(schedule, "is_schedule_factory"):
        raise TypeError(
            f"{owner} expects {wanted}; got {name_of(schedule)}. Call it: {name_of(schedule)}()"
        )
    checks.function(owner, "a schedule", schedule, wanted, 2)
