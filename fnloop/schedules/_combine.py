"""Schedules made of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from fnloop._core.call import name_of
from fnloop.schedules._schedule import (
    Factor,
    Length,
    Schedule,
    check_length,
    check_lengths,
    check_schedule,
    schedule_factory,
    updates_in,
)

__all__ = ["join", "warmup"]


def warmup(n: Length) -> Callable[[Factor], Schedule]:
    """Put a linear warmup before any schedule, which then covers the rest of the run.

    Args:
        n: length of the warmup.

    Returns:
        A function from a schedule to a schedule.

    Raises:
        ValueError: n is below 0.
        TypeError: n is not a number; or, when called, the argument is not a schedule.

    Example:
        >>> from fnloop.schedules import linear
        >>> f = warmup(2)(linear())
        >>> f, [f(i, 6) for i in range(6)]
        (warmup(2)(linear()), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    """
    check_length("warmup", "n", n)
    return lambda schedule: attrs.evolve(
        _warmed(n, schedule), text=f"warmup({n})({name_of(schedule)})"
    )


@schedule_factory
def _warmed(n: Length, schedule: Factor) -> Factor:
    check_schedule("warmup", schedule)

    def factor(step: int, total: int | None) -> float:
        __tracebackhide__ = True
        up = updates_in(n, total)
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
