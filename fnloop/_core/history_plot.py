"""The curves of a history as a figure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from toolz import groupby

from fnloop._core.monitor import better, mode_by_name
from fnloop._core.record import Record, best_record, metric_names
from fnloop._display import checks, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_plot", "plot_records"]

Mode = Mapping[str, str] | str | None


def check_plot(mode: Mode, x: str) -> None:
    """Raise ValueError unless these are arguments of ``History.plot``."""
    if not isinstance(x, str) or x not in ("step", "epoch"):
        raise ValueError(f'x expects "step" or "epoch"; got {checks.describe(x)}')
    modes = mode.values() if isinstance(mode, Mapping) else () if mode is None else (mode,)
    for given in modes:
        better(0.0, 0.0, given)  # raises if it is not a mode


def plot_records(records: Sequence[Record], mode: Mode, x: str) -> Figure:
    """Draw every metric; the arguments are those of ``History.plot``."""
    check_plot(mode, x)
    plot.require_matplotlib("History.plot")
    names = metric_names(records)
    if not names:
        empty = "has no metric" if records else "is empty"
        raise ValueError(f"there is nothing to plot: the history {empty}")
    groups: dict[str, list[str]] = groupby(_metric_of, names)
    labels = list(dict.fromkeys(map(_loader_of, names)))
    figure, axes = plot.grid("History.plot", len(groups))
    places = _epochs(records) if x == "epoch" else {record.step: record.step for record in records}
    for axis, (metric, keys) in zip(axes, groups.items(), strict=True):
        wanted = _mode_of(metric, keys, mode)
        curves, marked = {}, {}
        for key in keys:
            loader, having = _loader_of(key), [r for r in records if key in r.metrics]
            curves[loader] = [(places[r.step], r.metrics[key]) for r in having]
            if wanted is not None and loader not in ("train", "recent"):
                best = best_record(having, key, wanted)
                marked[loader] = (places[best.step], best.metrics[key])
        plot.draw(axis, metric, x, curves, marked, labels)
    return figure


def _loader_of(key: str) -> str:
    return key.split("/", 1)[0]


def _metric_of(key: str) -> str:
    return key.split("/", 1)[-1]


def _epochs(records: Sequence[Record]) -> dict[int, float]:
    """Return how many epochs had passed at each step of a record, interpolated within an epoch.

    The first record that counts an epoch was made at its end. Before there is one, the length of an
    epoch is unknown.
    """
    ends = [(0, 0)]  # (step, epoch)
    for r in records:
        if r.epoch > ends[-1][1] and r.step > ends[-1][0]:
            ends.append((r.step, r.epoch))
    if len(ends) == 1:
        return {r.step: float(r.epoch) for r in records}

    def interpolate(step: int) -> float:
        i = min(max(bisect.bisect_left(ends, (step, 0)), 1), len(ends) - 1)
        (start, epoch), (end, next_epoch) = ends[i - 1], ends[i]
        return epoch + (step - start) * (next_epoch - epoch) / (end - start)

    return {r.step: interpolate(r.step) for r in records}


def _mode_of(metric: str, keys: Iterable[str], mode: Mode) -> str | None:
    """Return the given mode of a metric, or the one that its name suggests, or None."""
    if isinstance(mode, Mapping):
        mode = next((mode[name] for name in (*keys, metric) if name in mode), None)
    return mode_by_name(f"/{metric}") if mode is None else mode
