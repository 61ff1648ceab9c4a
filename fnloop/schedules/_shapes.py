"""The shapes of schedules: constant, decays from 1 to a minimum, cycles and stairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fnloop._display import checks
from fnloop.schedules._schedule import (
    Factor,
    Length,
    check_length,
    check_lengths,
    known_total,
    schedule_factory,
    updates_in,
)

__all__ = [
    "constant",
    "cosine",
    "exponential",
    "inverse_sqrt",
    "linear",
    "multistep",
    "one_cycle",
    "polynomial",
    "step_decay",
    "wsd",
]


def _check_sum(owner: str, first: Length, last: Length) -> None:
    if isinstance(first, float) and isinstance(last, float) and first + last > 1:
        raise ValueError(
            f"{owner}: its first part, {first}, and its last, {last}, make more than the whole run"
        )


def _check_ratio(owner: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(
            f"{owner} expects {name} from 0 to 1, a factor on the initial value; "
            f"got {checks.describe(value)}"
        )


def _phases(
    owner: str, decay: Callable[[float], float], warmup: Length, cooldown: Length, min_ratio: float
) -> Factor:
    """Warm up, decay from 1 to ``min_ratio`` along ``decay``, and stay there for the cooldown."""
    check_length(owner, "warmup", warmup)
    check_length(owner, "cooldown", cooldown)
    _check_sum(owner, warmup, cooldown)
    _check_ratio(owner, "min_ratio", min_ratio)

    def factor(step: int, total: int | None) -> float:
        total = known_total(total)
        up, down = updates_in(warmup, total), updates_in(cooldown, total)
        if step < up:
            return (step + 1) / up
        # Without a warmup the first update is not at the minimum, however long the cooldown.
        length = max(total - up - down, 0 if up else 1)
        if step >= up + length:
            return min_ratio
        return min_ratio + (1 - min_ratio) * decay((step - up) / length)

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
    return _phases(
        "cosine", lambda t: (1 + math.cos(math.pi * t**k)) / 2, warmup, cooldown, min_ratio
    )


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

    def between(a: float, b: float, t: float) -> float:
        return b + (a - b) * (1 + math.cos(math.pi * t)) / 2

    def factor(step: int, total: int | None) -> float:
        total, up = known_total(total), updates_in(peak, total)
        if step < up:
            return between(start_ratio, 1.0, step / up)
        if step >= total:
            return min_ratio
        return between(1.0, min_ratio, (step - up) / (total - up))

    return factor


_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: 1 - math.sqrt(t),
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
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
    check_length("wsd", "warmup", warmup)
    check_length("wsd", "decay", decay)
    _check_sum("wsd", warmup, decay)
    _check_ratio("wsd", "min_ratio", min_ratio)
    checks.choice("wsd", "kind", kind, _DECAYS)

    def factor(step: int, total: int | None) -> float:
        up, total = updates_in(warmup, total), known_total(total)
        down = updates_in(decay, total)
        if step < up:
            return (step + 1) / up
        if step < total - down:
            return 1.0
        if step >= total:
            return min_ratio
        return min_ratio + (1 - min_ratio) * _DECAYS[kind]((step - total + down) / down)

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
