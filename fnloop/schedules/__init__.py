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

from fnloop.schedules._combine import join, warmup
from fnloop.schedules._plot import plot
from fnloop.schedules._shapes import (
    constant,
    cosine,
    exponential,
    inverse_sqrt,
    linear,
    multistep,
    one_cycle,
    polynomial,
    step_decay,
    wsd,
)

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
