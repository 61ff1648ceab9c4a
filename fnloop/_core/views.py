"""A history as people see it: a table of its records, and its curves."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
from toolz import groupby

from fnloop._core.records import (
    COSTS,
    MODES,
    TRAINED,
    Record,
    best_record,
    is_evaluated,
    is_row,
    metric_names,
    number_of_epoch,
    records_of_model,
    split_name,
    stacked_in,
    starred,
    turns_in,
    update_best,
)
from fnloop._display import checks, figures, tables
from fnloop._display.tables import Column, Table, format_metric, mode_by_name, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# --------------------------------------------------------------------------------------------------
# Records as a table: which columns it has, in which order and format, and what is marked.
#
# Whatever shows records in columns asks here, so that a terminal, a log and a notebook agree.

LONG = 100.0  # seconds, from which on a column has times such as 1:40
LONGEST_MODEL = 32  # characters of the name of a model


@attrs.frozen
class Row:
    """A row of a table of records.

    Args:
        record: the record.
        seconds: the time that passed since the one above it; None if that is unknown.
        best: the names of the metrics to be marked: each is better than in all rows above.
        epoch: the number of its epoch, from 1; 0 for what the record says.
        model: the model of a stack whose metrics these are; or "".
    """

    record: Record
    seconds: float | None = None
    best: Collection[str] = frozenset()
    epoch: int = 0
    model: str = ""

    @property
    def number(self) -> int:
        """The number of its epoch, which is shown."""
        return self.epoch or self.record.epoch

    @classmethod
    def of(cls, record: Record, seconds: float, ended: int, at: int) -> Row:
        """Return the row of a record, with the number of its epoch: see ``number_of_epoch``."""
        return cls(record, seconds, epoch=number_of_epoch(record, ended, at))

    @property
    def is_whole(self) -> bool:
        """Whether it has more than ``recent/...``, so that a table of a history shows it."""
        return is_row(self.record)

    @property
    def evaluated(self) -> list[str]:
        """The names of the loaders that were evaluated for it."""
        found = (name for name in self.record.metrics if is_evaluated(name))
        return [*dict.fromkeys(name.partition("/")[0] for name in found)]

    @staticmethod
    def names(rows: Iterable[Row]) -> tuple[str, ...]:
        """Return the names of all metrics of rows, in the order of their first appearance."""
        return metric_names(row.record for row in rows)

    def by_model(self, models: Sequence[str]) -> list[Row]:
        """Return a row for each model of a stack, or this one if there are no models.

        Example:
            >>> record = Record(1, 10, {"valid/a/loss": 2.0, "valid/b/loss": 3.0})
            >>> row = Row(record, 1.0, {"valid/a/loss"})
            >>> [(one.model, one.record.metrics, one.best) for one in row.by_model(("a", "b"))]
            [('a', {'valid/loss': 2.0}, {'valid/loss'}), ('b', {'valid/loss': 3.0}, set())]
        """
        if not models:
            return [self]
        found: list[Row] = []
        marks = Record(0, 0, dict.fromkeys(self.best, 1.0))
        for model in models:
            (record,) = records_of_model([self.record], model, models)
            (best,) = records_of_model([marks], model, models)
            found.append(attrs.evolve(self, record=record, best={*best.metrics}, model=model))
        return found

    @staticmethod
    def lay_out(
        rows: Sequence[Row],
        names: Iterable[str] | None = None,
        width: float = math.inf,
        last_step: int = 0,
        items: bool = False,
    ) -> Table[Row]:
        """Choose the columns for some rows, and their formats. Return a table without rows.

        The evaluated loaders come first, then ``train``, and ``recent`` last. If they do not fit,
        the least important go: losses stay longest, and ``watch``, ``recent``, gradient norms and
        learning rates go first. A later row may be shown with the same columns, if it has no other
        metrics.

        Args:
            rows: the rows so far.
            names: the metrics to show; by default those of the rows.
            width: how many characters a line may have.
            last_step: the greatest step that is expected, if others follow; then there is more
                room.
            items: whether to show the items, if they are known.

        Example:
            >>> record = Record(1, 10, {"train/loss": 2.0, "valid/loss": 3.0})
            >>> row = Row(record, 12.5, {"valid/loss"})
            >>> made = Row.lay_out([row], width=80)
            >>> print(*made.head(), made.line(row), sep="\\n")
                        │ valid   │ train
            epoch  step │   loss  │   loss │  time
                1    10 │ 3.0000* │ 2.0000 │ 12.5s
        """
        records = [row.record for row in rows]
        names = [*(metric_names(records) if names is None else names)]
        groups = list(dict.fromkeys(split_name(name)[0] for name in names))
        ordered = sorted(names, key=lambda name: (_place(name), groups.index(split_name(name)[0])))
        least = 7 if last_step else 1  # characters: 2.0e-05
        metrics = [_metric(records, name, least, names.index(name)) for name in ordered]
        counters = _counters(rows, last_step) + (_items(rows) if items else [])
        return Table([*counters, *metrics, _time(rows)]).fit(width)

    @staticmethod
    def table(
        rows: Sequence[Row],
        names: Sequence[str],
        width: float = math.inf,
        most: int = 40,
        items: bool = False,
    ) -> Table[Row]:
        """Return a table of rows: the arguments are those of :meth:`lay_out`, and ``most`` rows."""
        made = Row.lay_out(rows, names, width, items=items)
        shown = {column.name for column in made.columns}
        first, last = most // 2, len(rows) - (most - most // 2)  # what is between may be cut
        best = {name: i for i, row in enumerate(rows) for name in row.best if name in shown}
        kept: list[Row | None] = []
        stay = [not first <= i < last or i in best.values() for i in range(len(rows))]
        for stays, pairs in itertools.groupby(zip(stay, rows, strict=True), lambda pair: pair[0]):
            stretch = [row for _, row in pairs]
            kept += stretch if stays or len(stretch) == 1 else [None]  # the sign takes a line too
        return attrs.evolve(made, rows=kept)


def table(records: Sequence[Record], width: float = math.inf, most: int = 40) -> Table[Row]:
    """Return a table of records. A value that is better than all above it is marked.

    Records with nothing but ``recent/...`` are left out, unless all others are closing records.

    Args:
        records: the records.
        width: how many characters a line may have.
        most: how many rows to show; if there are more, the middle is cut, but for the best rows:
            those with the last mark of a column.

    Example:
        >>> print(table([Record(1, 10, {"loss": 0.5}, 2.0)]).text(80))
        epoch  step    loss  time
            1    10  0.5000  2.0s
    """
    shown = [record for record in records if is_row(record)]
    shown = records if all(record.closing for record in shown) else shown
    hidden = len(records) - len(shown)
    names = [*metric_names(records)]
    if hidden:  # the few values of ``recent`` in the other rows would tell nothing
        names = [name for name in names if not name.startswith("recent/")]
    turns, models = turns_in(names), stacked_in(names)
    best: dict[str, Record] = {}
    rows: list[Row] = []
    for above, record in zip([None, *shown], shown, strict=False):
        best = update_best(best, record)
        row = Row(record, _passed(record, above), starred(best, record, turns))
        rows += row.by_model(models)
    if models:
        names = [*metric_names(row.record for row in rows)]
        names = [n for n in names if not (hidden and n.startswith("recent/"))]
    count = tables.format_count(hidden, "record")
    remark = f"not shown: {count} with recent/... only" if hidden else ""
    return attrs.evolve(Row.table(rows, names, width, most, items=True), remark=remark)


def _passed(record: Record, before: Record | None) -> float | None:
    """Return the seconds between two records; None if that is unknown."""
    if before is not None:
        return max(record.seconds - before.seconds, 0.0)
    return record.seconds if record.epoch <= 1 else None  # the first of a part of a history


# --- columns


def _counters(rows: Sequence[Row], last_step: int) -> list[Column[Row]]:
    epoch = max((row.number for row in rows), default=0)
    step = max((last_step, *(row.record.step for row in rows)))
    # Within an epoch, only the step tells one record from the next.
    within = any(a.number == b.number for a, b in itertools.pairwise(rows))
    within |= any(row.number != row.record.epoch for row in rows)
    rank = (2 if within else 8, 0)
    return [
        Column("epoch", lambda row: str(row.number), width=len(str(epoch))),
        Column("step", lambda row: str(row.record.step), width=len(str(step)), rank=rank),
        *_models(rows),
    ]


def _models(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the column of the models, if the rows are those of a stack."""
    width = max((len(shorten(row.model, LONGEST_MODEL)) for row in rows), default=0)
    text = lambda row: shorten(row.model, LONGEST_MODEL)
    return [Column("model", text, left=True, width=width, rank=(1, 0))] if width else []


def _items(rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the column of items, the first to go, if any are known."""

    def text(row: Row) -> str:
        return "" if row.record.items is None else f"{row.record.items:,}"

    width = max((len(text(row)) for row in rows), default=0)
    return [Column("items", text, width=max(5, width), rank=(14, 0))] if width else []


def _time(rows: Sequence[Row]) -> Column[Row]:
    tenths = max((row.seconds or 0.0 for row in rows), default=0.0) < LONG

    def text(row: Row) -> str:
        return "" if row.seconds is None else tables.format_clock(row.seconds, tenths)

    width = max([4, *(len(text(row)) for row in rows)])
    return Column("time", text, width=width, rank=(5, 0))


def _metric(records: Sequence[Record], name: str, least: int, place: int) -> Column[Row]:
    mode, (group, title) = mode_by_name(name), split_name(name)

    def text(row: Row) -> str:
        value = row.record.metrics.get(name)
        return "" if value is None else format_metric(name, value)

    width = max([least, *(len(text(Row(record))) for record in records)])
    best = (lambda row: name in row.best) if is_evaluated(name) and mode is not None else None
    rank = (_importance(name), place)
    return Column(title, text, group, best=best, width=width, rank=rank, name=name)


def _place(name: str) -> int:
    """Return where the group of a metric stands: evaluated loaders, train, others, recent."""
    if is_evaluated(name):
        return 1
    return {"": 0, "train": 2, "recent": 4}.get(split_name(name)[0], 3)


def _importance(name: str) -> int:
    """Return the importance of a metric: 1 is the greatest."""
    group, title = split_name(name)
    if title.startswith("watch/"):
        return 13
    if group == "recent":
        return 12
    if tables.is_learning_rate(name):
        return 9 if title == "lr" else 11
    if "grad_norm" in title:
        return 10
    if title.partition("/")[0] in COSTS:
        return 8
    if is_evaluated(name):
        return 1 if title == "loss" else 3 if mode_by_name(name) else 4
    if group == "train":
        nested = 4 if title.endswith("/loss") else 6 if mode_by_name(name) else 7
        return 2 if title == "loss" else nested
    return 8 if group else 3


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
        checks.choice("plot", "mode", given, MODES)


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
    panels = _panels_of(records, mode, x)
    sizes = [panel_size(panel.title, i) for i, panel in enumerate(panels)]
    figure, axes = figures.panels("History.plot", sizes)
    below = panels[0].entries > MOST_LABELS
    known: set[str] = set()  # labels in a legend
    for axis, panel in zip(axes, panels, strict=True):
        own_legend = not (below and axis is axes[0])
        figures.draw(axis, panel.title, x, panel.curves, known if own_legend else None)
        if panel.is_logarithmic:
            axis.set_yscale("log")
        known |= {curve.label for curve in panel.curves}
    if below:
        figures.add_legend_below(figure, axes[0])
    return figure


@attrs.frozen
class _Panel:
    """One axis of a figure.

    Args:
        title: its title.
        curves: what is drawn in it.
        entries: the lines that its legend may have.
        is_logarithmic: whether its scale is.
    """

    title: str
    curves: Sequence[figures.Curve]
    entries: int
    is_logarithmic: bool


def _panels_of(records: Sequence[Record], mode: Mode, x: str) -> list[_Panel]:
    """Return what ``History.plot`` shows of records, in the order of its axes."""
    series = curves_of(records)
    of = {key: _split(key, series) for key in series}
    groups: dict[str, list[str]] = groupby(lambda key: _panel_of(of[key][1]), series)
    colors = _colors(owner for owner, _ in of.values())
    place = _place_on(x, records)

    panels: list[_Panel] = []
    for title in sorted(groups, key=lambda title: panel_rank(title, groups[title])):
        keys = sorted(groups[title], key=lambda key: _order(of[key][0]))
        evaluated = [key for key in keys if of[key][0] not in TRAINED]
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
            points = [(place(record), record.metrics[key]) for record in series[key]]
            thin = owner == "recent"
            curves.append(figures.Curve(points, _label(owner, metric), colors[owner], thin, best))
        falls = _mode_of(title, groups[title], mode) == "min"
        entries = len(keys) + len(evaluated)
        panels.append(_Panel(title, curves, entries, falls and _spans_decades(curves)))
    return panels


def _best_finite(records: Iterable[Record], key: str, mode: str | None) -> Record | None:
    """Return the record with the best finite value; None if there is none, or no mode."""
    finite = [record for record in records if math.isfinite(record.metrics[key])]
    return best_record(finite, key, mode) if finite and mode else None


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
    if beside and averaged and loader not in TRAINED:
        return f"{loader} {name}", beside
    return loader, metric


def _colors(owners: Iterable[str]) -> dict[str, str]:
    """Return the colour of each loader and of each average, the same in all axes."""
    others = [owner for owner in dict.fromkeys(owners) if owner not in TRAINED]
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
    return mode_by_name(f"/{metric}") if mode is None else mode


# --------------------------------------------------------------------------------------------------
# Several histories in one figure.

MOST_INSIDE = 6  # runs in the legend of the first axis; of more, it stands below the figure
LONGEST_INSIDE = 24  # characters of a name there
LONGEST_BESIDE = 12  # of one next to a title
LONGEST_NAME = 48  # of a longer one, the middle is left out
MOST_VALUES = 4  # best values next to the title of another axis; of more, only the best one
Series = Mapping[str, list[Record]]  # the records that have a metric


def plot_runs(
    histories: Mapping[str, Iterable[Record]], keys: Iterable[str] | None, x: str = "step"
) -> Figure:
    """Draw several runs; the arguments are those of ``compare`` and of ``History.plot``."""
    figures.require_matplotlib("compare")
    histories = dict(zip(_short_names([*histories]), histories.values(), strict=True))
    series = {name: curves_of(history) for name, history in histories.items()}
    keys = _shared_keys(series) if keys is None else _given_keys(series, keys)
    sizes = [panel_size(split_name(key)[1], i) for i, key in enumerate(keys)]
    figure, axes = figures.panels("compare", sizes)
    colors = figures.palette("compare", len(series))
    crowded = len(series) > MOST_INSIDE or max(map(len, series)) > LONGEST_INSIDE
    explained: set[str] = set()  # the names of the runs in the legend of the first axis
    for place, (axis, key) in enumerate(zip(axes, keys, strict=True)):
        best = _best_records(series, key)
        named, short = best, place > 0
        if place > 0 and len(best) > MOST_VALUES:
            named, short = _best_of_all(best, key), False
        curves = []
        for color, (name, history) in zip(colors, histories.items(), strict=True):
            new, label = name not in explained, name
            if name in named:
                label = _run_label(name, best[name], key, history, short and not new, not new)
            of_run = best.get(name), _place_on(x, history)
            curves += _curves(series[name], key, keys, label, color, *of_run)
        known = explained if place else None if crowded else ()
        explained = explained or {name for name, found in series.items() if key in found}
        figures.draw(axis, key, x, curves, known)
    if crowded:
        figures.add_legend_below(figure, axes[0])
    return figure


def _place_on(x: str, records: Iterable[Record]) -> Callable[[Record], float]:
    """Return a function that gives where a record is on the x axis."""
    return epochs_of(records) if x == "epoch" else operator.attrgetter(x)


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return names of runs that fit a legend, unless some would be the same."""
    short = [shorten(name, LONGEST_NAME) for name in names]
    return short if len({*short}) == len(names) else names


def _best_records(series: Mapping[str, Series], key: str) -> dict[str, Record]:
    """Return the best record of each run that has an evaluated metric, unless none is finite."""
    mode = mode_by_name(key) if is_evaluated(key) else None
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
    winner = best_record(best.values(), key, mode_by_name(key) or "min")
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
    keys = [key for key in shared if not key.startswith("recent/")] or shared
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
