"""The curves of a history as a figure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from toolz import groupby

from fnloop._core.history_table import is_evaluated
from fnloop._core.monitor import better, mode_by_name
from fnloop._core.record import Record, best_record
from fnloop._display import checks, plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "best_label",
    "check_plot",
    "curves_of",
    "epochs_of",
    "panel_rank",
    "panel_size",
    "plot_records",
]

Mode = Mapping[str, str] | str | None
MOST_LABELS = 8  # of a legend within the first axis; a longer one is below the figure
MOST_NAMED, MOST_SHOWN = 2, 4  # best points of another axis: with their names, or just the values
HUGE = 1e100  # matplotlib fails on an axis of some more
DECADES = 1000.0  # from the lowest to the highest value of a logarithmic axis, at least
TRAINED = ("train", "recent")  # names that are not those of evaluated loaders


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
    series = curves_of(records)
    if not series:
        empty = "has no metric" if records else "is empty"
        raise ValueError(f"there is nothing to plot: the history {empty}")
    of = {key: _split(key, series) for key in series}
    groups: dict[str, list[str]] = groupby(lambda key: _panel_of(of[key][1]), series)
    titles = sorted(groups, key=lambda title: panel_rank(title, groups[title]))
    colors = _colors(owner for owner, _ in of.values())
    if not any(record.epoch for record in records):
        x = "step"  # no epoch has ended, and its length is unknown
    place = epochs_of(records) if x == "epoch" else lambda record: record.step
    sizes = [panel_size(title, i) for i, title in enumerate(titles)]
    figure, axes = plot.panels("History.plot", sizes)
    known: set[str] = set()  # labels in a legend
    crowded = False  # whether the legend of the first axis is below the figure
    for axis, title in zip(axes, titles, strict=True):
        curves, keys = [], sorted(groups[title], key=lambda key: _order(of[key][0]))
        evaluated = [key for key in keys if of[key][0] not in TRAINED]
        crowded |= axis is axes[0] and len(keys) + len(evaluated) > MOST_LABELS
        for key in keys:
            (owner, metric), having, best = of[key], series[key], None
            wanted = _mode_of(metric, groups[title], mode)
            if wanted is not None and key in evaluated:
                finite = [record for record in having if math.isfinite(record.metrics[key])]
                if finite:
                    record = best_record(finite, key, wanted)
                    value = record.metrics[key]
                    label = f"{_label(owner, metric)} {best_label(record, key, records)}"
                    if axis is not axes[0] and len(evaluated) > MOST_NAMED:  # told by its colour
                        label = f"{value:.4g}" if len(evaluated) <= MOST_SHOWN else ""
                    best = place(record), value, label
            points = [(place(record), record.metrics[key]) for record in having]
            thin = owner == "recent"
            curves.append(plot.Curve(points, _label(owner, metric), colors[owner], thin, best))
        plot.draw(axis, title, x, curves, None if crowded and axis is axes[0] else known)
        if _mode_of(title, groups[title], mode) == "min" and _spans_decades(curves):
            axis.set_yscale("log")
        known |= {curve.label for curve in curves}
    if crowded:
        plot.add_legend_below(figure, axes[0])
    return figure


def _spans_decades(curves: Iterable[plot.Curve]) -> bool:
    """Return whether curves span decades, so that a linear axis would show a flat line."""
    values = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    if not values or min(values) <= 0:
        return False
    return DECADES <= max(values) / min(values) < HUGE


def curves_of(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return, for each metric, the records that have it."""
    found: dict[str, list[Record]] = {}
    for record in records:
        for name in record.metrics:
            found.setdefault(name, []).append(record)
    return found


def panel_rank(title: str, keys: Sequence[str]) -> tuple[int, int]:
    """Return where the axis of a metric stands: the loss first, and what is small last."""
    small = panel_size(title, 1) == plot.SMALL
    kind = 0 if title == "loss" else 2 if small else 1
    return kind, 0 if any(map(is_evaluated, keys)) else 1


def panel_size(title: str, place: int) -> str:
    """Return the size of the axis of a metric: the first one is large."""
    if place == 0:
        return plot.LARGE
    name = title.rsplit("/", 1)[-1]
    first = title.split("/", 1)[0]
    small = name in ("lr", "grad_norm") or first in ("lr", "grad_norm", "time", "memory", "watch")
    return plot.SMALL if small or first == "throughput" else plot.MEDIUM


def best_label(record: Record, key: str, records: Iterable[Record]) -> str:
    """Return the label of the best point of some records: ``best 0.6056 (epoch 7)``."""
    ended = record.epoch and epochs_of(records)(record) == record.epoch
    where = f"epoch {record.epoch}" if ended else f"step {record.step}"
    return f"best {record.metrics[key]:.4g} ({where})"


def _split(key: str, keys: Container[str]) -> tuple[str, str]:
    """Return whose curve a metric is, a loader's or that of an average, and what it shows.

    An average of the weights is evaluated beside the model, and never in training.

    Example:
        >>> keys = ("train/loss", "valid/loss", "valid/ema/loss")
        >>> _split("valid/loss", keys), _split("valid/ema/loss", keys)
        (('valid', 'loss'), ('valid ema', 'loss'))
    """
    loader, metric = key.split("/", 1)[0], key.split("/", 1)[-1]
    name, _, beside = metric.partition("/")
    averaged = f"{loader}/{beside}" in keys and f"train/{metric}" not in keys
    if beside and averaged and loader not in TRAINED:
        return f"{loader} {name}", beside
    return loader, metric


def _colors(owners: Iterable[str]) -> dict[str, str]:
    """Return the colour of each loader and of each average, the same in all axes."""
    others = [owner for owner in dict.fromkeys(owners) if owner not in TRAINED]
    others.sort(key=lambda owner: " " in owner)  # an average changes no colour of a loader
    trained, *colors = plot.palette("History.plot", 1 + len(others))
    return {"train": trained, "recent": trained, **dict(zip(others, colors, strict=True))}


def _order(owner: str) -> int:
    """Return where a curve stands in the legend."""
    return {"train": 0, "recent": 1}.get(owner, 2)


def _panel_of(metric: str) -> str:
    """Return the title of the axis of a metric. Those of parameter groups are in one axis.

    So are those of all modules that ``watch`` reports.
    """
    first = metric.split("/", 1)[0]
    if first == "watch":
        return f"{first}/{metric.rpartition('/')[2]}"
    return first if first in ("lr", "grad_norm") else metric


def _label(owner: str, metric: str) -> str:
    """Return the name of a curve in a legend: its owner, and its group if it has one."""
    return " ".join((owner, *metric.split("/")[1:])) if _panel_of(metric) != metric else owner


def epochs_of(records: Iterable[Record]) -> Callable[[Record], float]:
    """Return a function that gives how many epochs had passed at a record, also within an epoch.

    The first record that counts an epoch was made at its end. Before there is one, the length of an
    epoch is unknown.
    """
    ends = [(0, 0)]  # (step, epoch)
    for r in records:
        if r.epoch > ends[-1][1] and r.step > ends[-1][0]:
            ends.append((r.step, r.epoch))

    def interpolate(record: Record) -> float:
        if len(ends) == 1:
            return float(record.epoch)
        i = min(max(bisect.bisect_left(ends, (record.step, 0)), 1), len(ends) - 1)
        (start, epoch), (end, next_epoch) = ends[i - 1], ends[i]
        return epoch + (record.step - start) * (next_epoch - epoch) / (end - start)

    return interpolate


def _mode_of(metric: str, keys: Iterable[str], mode: Mode) -> str | None:
    """Return the given mode of a metric, or the one that its name suggests, or None."""
    if isinstance(mode, Mapping):
        mode = next((mode[name] for name in (*keys, metric) if name in mode), None)
    return mode_by_name(f"/{metric}") if mode is None else mode
