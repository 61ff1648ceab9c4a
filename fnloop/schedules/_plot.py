"""Schedules as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fnloop._core.call import name_of
from fnloop._display import checks
from fnloop._display import plot as figures
from fnloop.schedules._schedule import Factor, check_schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

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
    checks.integer("plot", "total_steps", total_steps, "the updates of a run")
    named = _with_labels(schedules)
    if not named:
        raise ValueError("plot expects at least one schedule, such as cosine(); got none")
    for schedule in named.values():
        check_schedule("plot", schedule)
    figure, (axis,) = figures.panels("schedules.plot", [figures.LARGE])
    colors = figures.palette("schedules.plot", len(named))
    curves = [
        figures.Curve([(i, schedule(i, total_steps)) for i in range(total_steps)], name, color)
        for color, (name, schedule) in zip(colors, named.items(), strict=True)
    ]
    figures.draw(axis, "factor on the initial value", "update", curves, known=None)
    figure.set_figheight(3.0 + 0.22 * len(curves))
    # A schedule crosses the whole axis, so the legend goes below it.
    figure.legend(loc="outside lower center", frameon=False, labelcolor=figures.GREY)
    return figure


def _with_labels(
    schedules: Schedules,
) -> Mapping[str, Factor]:
    if isinstance(schedules, Mapping):
        return schedules
    several = schedules if isinstance(schedules, list | tuple) else [schedules]
    return {name_of(schedule): schedule for schedule in several}
