"""The curves of a history, or of several, as a figure."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from toolz import groupby

from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._extensions.histories import figures
from fnloop._extensions.histories.table import (
    is_evaluated,
    metric_names,
    records_of_model,
    split_name,
    stacked_in,
    without_intervals,
)
from fnloop.extend import Monitored, checks, reprs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --------------------------------------------------------------------------------------------------
# The curves of a history as a figure.

MOST_LABELS = 8  # of a legend within the first axis; a longer one is below the figure
MOST_NAMED, MOST_SHOWN = 2, 4  # best points of another axis: with their names, or just the values
HUGE = 1e100  # matplotlib fails on an axis of some more
DECADES = 1000.0  # from the lowest to the highest value of a logarithmic axis, at least

Mode = Mapping[str, str] | str | None


def check_plot(mode: Mode, x: str) -> None:
    """Raise ValueError unless these are arguments of ``History.plot``."""
    if not isinstance(x, str) or x not in ("step", "epoch", "items"):
        raise ValueError(f'x expects "step", "epoch" or "items"; got {checks.describe(x)}')
    modes = mode.values() if isinstance(mode, Mapping) else () if mode is None else (mode,)
    for given in modes:
        checks.choice("plot", "mode", given, Monitored.MODES)


def plot_records(records: Sequence[Record], mode: Mode, x: str) -> Figure:
    """Draw every metric; the arguments are those of ``History.plot``."""
    check_plot(mode, x)
    figures.require_matplotlib("History.plot")
    if x == "items" and not (records := [each for each in records if each.items is not None]):
        raise ValueError('plot(x="items"): no record says how many items there were before it')
    if not any(record.metrics for record in records):
        empty = "has no metric" if records else "is empty"
        raise ValueError(f"there is nothing to plot: the history {empty}")
    if not any(record.epoch for record in records):
        x = "step"  # no epoch has ended, and its length is unknown
    if models := stacked_in(metric_names(records)):
        return plot_runs({m: records_of_model(records, m, models) for m in models}, None, x)
    return _draw("History.plot", _panels_of(records, mode, x), x)


@attrs.frozen
class _Panel:
    """One axis of a figure.

    Args:
        title: its title.
        size: its size.
        curves: what is drawn in it.
        known: the labels that the legends of other axes explain. None: the legend of this one, the
            first, is below the figure.
        is_logarithmic: whether its scale is.
    """

    title: str
    size: str
    curves: Sequence[figures.Curve]
    known: Collection[str] | None = ()
    is_logarithmic: bool = False


def _draw(owner: str, panels: Sequence[_Panel], x: str) -> Figure:
    """Draw axes into a figure, in their order."""
    figure, axes = figures.panels(owner, [panel.size for panel in panels])
    for axis, panel in zip(axes, panels, strict=True):
        figures.draw(axis, panel.title, x, panel.curves, panel.known)
        if panel.is_logarithmic:
            axis.set_yscale("log")
    if panels[0].known is None:
        figures.add_legend_below(figure, axes[0])
    return figure


def _panels_of(records: Sequence[Record], mode: Mode, x: str) -> list[_Panel]:
    """Return what ``History.plot`` shows of records, in the order of its axes."""
    series = curves_of(records)
    of = {key: _split(key, series) for key in series}
    groups: dict[str, list[str]] = groupby(lambda key: _panel_of(of[key][1]), series)
    colors = _colors(owner for owner, _ in of.values())
    place = _place_on(x, records)

    panels: list[_Panel] = []
    known: set[str] = set()  # labels in a legend
    for title in sorted(groups, key=lambda title: panel_rank(title, groups[title])):
        keys = sorted(groups[title], key=lambda key: _order(of[key][0]))
        evaluated = [key for key in keys if of[key][0] not in Record.TRAINED]
        curves = []
        for key in keys:
            (owner, metric), best = of[key], None
            wanted = _mode_of(metric, groups[title], mode)
            if key in evaluated and (record := _best_finite(series[key], key, wanted)):
                value = record.metrics[key]
                label = f"{_label(owner, metric)} {best_label(record, key, records)}"
                if panels and len(evaluated) > MOST_NAMED:  # told by its colour
                    label = f"{value:.4g}" if len(evaluated) <= MOST_SHOWN else ""
                best = place(record), value, label
            thin, points = owner == "recent", _points(series, key, place)
            curves.append(figures.Curve(points, _label(owner, metric), colors[owner], thin, best))
        falls = _mode_of(title, groups[title], mode) == "min"
        below = not panels and len(keys) + len(evaluated) > MOST_LABELS
        size = panel_size(title, len(panels))
        legend = None if below else known.copy()
        panels.append(_Panel(title, size, curves, legend, falls and _spans_decades(curves)))
        known |= {curve.label for curve in curves}
    return panels


def _best_finite(records: Iterable[Record], key: str, mode: str | None) -> Record | None:
    """Return the record with the best finite value; None if there is none, or no mode."""
    finite = [record for record in records if math.isfinite(record.metrics[key])]
    return History(finite).best_record(key, mode) if finite and mode else None


def _spans_decades(curves: Iterable[figures.Curve]) -> bool:
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
    small = panel_size(title, 1) == figures.SMALL
    kind = 0 if title == "loss" else 2 if small else 1
    return kind, 0 if any(map(is_evaluated, keys)) else 1


def panel_size(title: str, place: int) -> str:
    """Return the size of the axis of a metric: the first one is large."""
    if place == 0:
        return figures.LARGE
    name = title.rsplit("/", 1)[-1]
    first = title.split("/", 1)[0]
    small = name in ("lr", "grad_norm") or first in ("lr", "grad_norm", "time", "memory", "watch")
    return figures.SMALL if small or first == "throughput" else figures.MEDIUM


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
    if beside and averaged and loader not in Record.TRAINED:
        return f"{loader} {name}", beside
    return loader, metric


def _colors(owners: Iterable[str]) -> dict[str, str]:
    """Return the colour of each loader and of each average, the same in all axes."""
    others = [owner for owner in dict.fromkeys(owners) if owner not in Record.TRAINED]
    others.sort(key=lambda owner: " " in owner)  # an average changes no colour of a loader
    trained, *colors = figures.palette("History.plot", 1 + len(others))
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
    return reprs.mode_by_name(f"/{metric}") if mode is None else mode


# --------------------------------------------------------------------------------------------------
# Several histories in one figure.

MOST_INSIDE = 6  # runs in the legend of the first axis; of more, it stands below the figure
LONGEST_INSIDE = 24  # characters of a name there
LONGEST_BESIDE = 12  # of one next to a title
LONGEST_NAME = 48  # of a longer one, the middle is left out
MOST_VALUES = 4  # best values next to the title of another axis; of more, only the best one
Series = Mapping[str, list[Record]]  # the records that have a metric


def compare(histories: Mapping[str, History], keys: Iterable[str] | None = None) -> Figure:
    """Draw several runs in one figure: an axis for each metric, and a colour for each run.

    The legend has the names of the runs. Where a metric is evaluated, and its name says whether
    lower or higher values are better, the best value of each run is marked and shown.

    Args:
        histories: names of runs to their histories.
        keys: the metrics to draw, such as ``["valid/loss"]``; a run that lacks one is not in its
            axis. By default those that all histories have, with ``recent/...`` as thin lines in
            the axes of ``train/...``.

    Returns:
        A matplotlib Figure; ``figure.savefig("runs.png")`` writes it. A notebook shows it once.

    Raises:
        TypeError: histories is not a mapping from names to histories, or keys are not names.
        KeyError: no history has a metric of that name; the message lists the known ones.
        ValueError: a history is empty, or there is no metric that all have.
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).

    Example:
        >>> from fnloop import History, Record
        >>> first = History([Record(1, 10, {"valid/loss": 2.0})])
        >>> second = History([Record(1, 10, {"valid/loss": 1.5})])
        >>> figure = compare({"lr 0.1": first, "lr 0.01": second})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['lr 0.1: best 2 (epoch 1)', 'lr 0.01: best 1.5 (epoch 1)']
    """
    _check(histories)
    return plot_runs(histories, keys)


def _check(histories: Mapping[str, History]) -> None:
    checks.mapping("compare", "histories", histories, 'such as {"a": history_a, "b": history_b}')
    if not histories:
        raise ValueError("compare expects at least one history; got none")
    for name, history in histories.items():
        checks.text("compare", "histories", name, "names of runs")
        if not isinstance(history, History):
            raise TypeError(
                f"compare expects a History for {name!r}, such as state.history; "
                f"got {checks.describe(history)}"
            )
        if not history.keys():
            empty = "has no metric" if len(history) else "is empty"
            raise ValueError(f"compare has nothing to draw for {name!r}: its history {empty}")


def plot_runs(
    histories: Mapping[str, Iterable[Record]], keys: Iterable[str] | None, x: str = "step"
) -> Figure:
    """Draw several runs; the arguments are those of ``compare`` and of ``History.plot``."""
    figures.require_matplotlib("compare")
    histories = dict(zip(_short_names([*histories]), histories.values(), strict=True))
    series = {name: curves_of(history) for name, history in histories.items()}
    keys = _shared_keys(series) if keys is None else _given_keys(series, keys)
    colors = figures.palette("compare", len(series))
    crowded = len(series) > MOST_INSIDE or max(map(len, series)) > LONGEST_INSIDE
    explained: set[str] = set()  # the names of the runs in the legend of the first axis
    panels: list[_Panel] = []
    for key in keys:
        best = _best_records(series, key)
        named, short = best, bool(panels)
        if panels and len(best) > MOST_VALUES:
            named, short = _best_of_all(best, key), False
        curves = []
        for color, (name, history) in zip(colors, histories.items(), strict=True):
            new, label = name not in explained, name
            if name in named:
                label = _run_label(name, best[name], key, history, short and not new, not new)
            of_run = best.get(name), _place_on(x, history)
            curves += _curves(series[name], key, keys, label, color, *of_run)
        known = explained if panels else None if crowded else ()
        explained = explained or {name for name, found in series.items() if key in found}
        size = panel_size(split_name(key)[1], len(panels))
        panels.append(_Panel(key, size, curves, known))
    return _draw("compare", panels, x)


def _place_on(x: str, records: Iterable[Record]) -> Callable[[Record], float]:
    """Return a function that gives where a record is on the x axis."""
    return epochs_of(records) if x == "epoch" else operator.attrgetter(x)


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return names of runs that fit a legend, unless some would be the same."""
    short = [reprs.shorten(name, LONGEST_NAME) for name in names]
    return short if len({*short}) == len(names) else names


def _best_records(series: Mapping[str, Series], key: str) -> dict[str, Record]:
    """Return the best record of each run that has an evaluated metric, unless none is finite."""
    mode = reprs.mode_by_name(key) if is_evaluated(key) else None
    best = {name: _best_finite(found.get(key, ()), key, mode) for name, found in series.items()}
    return {name: record for name, record in best.items() if record}


def _run_label(
    name: str, best: Record, key: str, history: Iterable[Record], short: bool, known: bool
) -> str:
    """Return the label of a run; a short one where its colour says which run it is.

    ``known`` is whether the first axis explains the colour.
    """
    if short:
        return f"{best.metrics[key]:.4g}"
    value = best_label(best, key, history)
    return value if known and len(name) > LONGEST_BESIDE else f"{name}: {value}"


def _best_of_all(best: Mapping[str, Record], key: str) -> dict[str, Record]:
    """Return the best of the best records of some runs."""
    winner = History(best.values()).best_record(key, reprs.mode_by_name(key) or "min")
    name = next(name for name, record in best.items() if record is winner)
    return {name: winner}


def _curves(
    series: Series,
    key: str,
    keys: list[str],
    label: str,
    color: str,
    best: Record | None,
    place: Callable[[Record], float],
) -> list[figures.Curve]:
    """Return the curves of a run in the axis of a metric."""
    if key not in series:
        return []
    mark = None if best is None else (place(best), best.metrics[key], "")
    curves = [
        figures.Curve(_points(series, key, place), label, color, key.startswith("recent/"), mark)
    ]
    recent = f"recent/{split_name(key)[1]}"
    if key.startswith("train/") and recent in series and recent not in keys:
        curves.append(figures.Curve(_points(series, recent, place), "", color, thin=True))
    return curves


def _points(series: Series, key: str, place: Callable[[Record], float]) -> figures.Points:
    return [(place(record), record.metrics[key]) for record in series[key]]


def _shared_keys(series: Mapping[str, Series]) -> list[str]:
    """Return the metrics that all histories have, in the order of their axes."""
    first, *others = series.values()
    shared = [key for key in first if all(key in other for other in others)]
    # The intervals of ``recent`` are drawn in the axes of ``train``.
    keys = without_intervals(shared) or shared
    if not keys:
        known = "; ".join(f"{name}: {', '.join(found)}" for name, found in series.items())
        raise ValueError(f"compare found no metric that all histories have; there are: {known}")

    def rank(key: str) -> tuple[object, ...]:
        small, trained = panel_rank(split_name(key)[1], [key])
        return small == 2, trained, small

    return sorted(keys, key=rank)


def _given_keys(series: Mapping[str, Series], keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise TypeError(
            'compare expects keys as a list of metrics, such as ["valid/loss"]; '
            f"got {checks.describe(keys)}"
        )
    keys = list(dict.fromkeys(checks.metric_name("compare", "keys", key) for key in keys))
    known = list(dict.fromkeys(key for found in series.values() for key in found))
    if not keys:
        raise ValueError("compare expects at least one key; got none")
    for key in keys:
        if key not in known:
            raise KeyError(f"no metric {key!r} in these histories; there are: {', '.join(known)}")
    return keys


# --------------------------------------------------------------------------------------------------
# Schedules in one figure.


def plot_factors(schedules: Mapping[str, Callable[[int, int], float]], total_steps: int) -> Figure:
    """Draw schedules; the arguments are those of ``schedules.plot``, which are right."""
    figure, (axis,) = figures.panels("schedules.plot", [figures.LARGE])
    colors = figures.palette("schedules.plot", len(schedules))
    curves = [
        figures.Curve([(i, schedule(i, total_steps)) for i in range(total_steps)], name, color)
        for color, (name, schedule) in zip(colors, schedules.items(), strict=True)
    ]
    figures.draw(axis, "factor on the initial value", "update", curves, known=None)
    figure.set_figheight(3.0 + 0.22 * len(curves))
    # A schedule crosses the whole axis, so the legend goes below it.
    figure.legend(loc="outside lower center", frameon=False, labelcolor=figures.GREY)
    return figure
