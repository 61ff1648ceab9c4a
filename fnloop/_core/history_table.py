"""Records as a table: which columns it has, in which order and format, and what is marked.

Whatever shows records in columns asks here, so that a terminal, a log and a notebook agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from fnloop._core.history_numbers import fit_number, format_time, number_form
from fnloop._core.monitor import better, mode_by_name
from fnloop._core.record import Record, metric_names
from fnloop._display import checks, tables
from fnloop._display.tables import Cell, Column

__all__ = [
    "Layout",
    "Table",
    "is_evaluated",
    "is_row",
    "lay_out",
    "table",
    "update_best",
]

# The first parts of names that are not those of evaluated loaders.
_COSTS = ("time", "throughput", "memory")
_OTHER_GROUPS = ("train", "recent", *_COSTS)
NAMED = 8  # columns that are left out, in the note below a table; of more, their number is given


@attrs.frozen
class Field:
    """A column, and how its cells are made of records.

    Args:
        name: the metric; "" for a column that is not one.
        form: a format such as ".4f"; or "epoch", "step" or "time" for what it shows.
        column: the column.
        importance: the column with the greatest number is left out first.
    """

    name: str
    form: str
    column: Column
    importance: tuple[int, int]


@attrs.frozen
class Layout:
    """The columns of a table of records, in the order in which they stand. See :func:`lay_out`.

    Args:
        fields: the columns.
        names: the metrics that were considered. A record with another one needs a new layout.
        left_out: those that have no column, because the line would be too long.
    """

    fields: tuple[Field, ...]
    names: frozenset[str]
    left_out: tuple[str, ...] = ()

    @property
    def columns(self) -> list[Column]:
        """The columns, to be drawn by ``fnloop._display.tables``."""
        return [field.column for field in self.fields]

    def head(self) -> list[str]:
        """Return the lines of the head: the loaders, if there are any, and the metrics."""
        return tables.head_lines(self.columns)

    def cells(
        self, record: Record, seconds: float | None, best: Collection[str] = ()
    ) -> list[Cell]:
        """Return the cells of a record.

        Args:
            record: the record.
            seconds: the time that passed since the one above it; None if that is unknown.
            best: the names of the metrics to be marked.
        """
        return [
            Cell(_text(field, record, seconds), field.name in best and field.column.marks)
            for field in self.fields
        ]

    def line(self, record: Record, seconds: float | None, best: Collection[str] = ()) -> str:
        """Return a record as a line of text; the arguments are those of ``cells``."""
        return tables.row_line(self.columns, self.cells(record, seconds, best))


@attrs.frozen
class Table:
    """A layout, and the rows of some records. ``note`` says what is left out, or is empty."""

    layout: Layout
    rows: Sequence[Sequence[Cell]]
    note: str = ""

    def text(self, width: int) -> str:
        """Return the table for a terminal."""
        return "\n".join(tables.table_lines(self.layout.columns, self.rows, self.note, width))

    def html(self) -> str:
        """Return the table for a notebook."""
        return tables.table_html(self.layout.columns, self.rows, self.note)


def is_row(record: Record) -> bool:
    """Return whether a record is a row of a table: not if it has nothing but ``recent/...``.

    Example:
        >>> is_row(Record(0, 5, {"recent/loss": 0.5})), is_row(Record(1, 10, {"train/loss": 0.5}))
        (False, True)
    """
    metrics = record.metrics
    return not metrics or any(not name.startswith("recent/") for name in metrics)


def is_evaluated(name: str) -> bool:
    """Return whether the name of a metric is that of a loader that is evaluated."""
    group, _, title = name.partition("/")
    return bool(title) and group not in _OTHER_GROUPS


def update_best(best: Mapping[str, Record], record: Record) -> dict[str, Record]:
    """Return the best record of each evaluated metric, given the best so far and one more record.

    Only metrics whose names say whether lower or higher is better are included. Of equal values,
    the oldest is the best.

    Example:
        >>> best = update_best({}, Record(1, 10, {"valid/loss": 2.0, "train/loss": 1.0}))
        >>> {name: record.step for name, record in best.items()}
        {'valid/loss': 10}
    """
    updated = dict(best)
    for name, value in record.metrics.items():
        mode = mode_by_name(name) if is_evaluated(name) else None
        if mode is None or not math.isfinite(value):
            continue
        if name not in best or better(value, best[name].metrics[name], mode):
            updated[name] = record
    return updated


def lay_out(
    records: Sequence[Record],
    names: Iterable[str] | None = None,
    width: int | None = None,
    last_step: int = 0,
    passed: Sequence[float | None] | None = None,
) -> Layout:
    """Choose the columns for some records, and their formats.

    The evaluated loaders come first, then ``train``, and ``recent`` last. If they do not fit, the
    least important go: losses stay longest, and ``watch``, ``recent``, gradient norms and learning
    rates go first. A later record may be shown with the same layout, if its names are in
    ``layout.names``.

    Args:
        records: the rows so far.
        names: the metrics to show; by default those of the records.
        width: how many characters a line may have; None for any number.
        last_step: the greatest step that is expected, if others follow; then there is more room.
        passed: the seconds between each record and the one before it; by default as they say.

    Example:
        >>> records = [Record(1, 10, {"train/loss": 2.0, "valid/loss": 3.0}, 12.5)]
        >>> layout = lay_out(records, width=80)
        >>> print(*layout.head(), layout.line(records[0], 12.5, {"valid/loss"}), sep="\\n")
                    │ valid   │ train
        epoch  step │   loss  │   loss │  time
            1    10 │ 3.0000* │ 2.0000 │ 12.5s
    """
    names = [*(metric_names(records) if names is None else names)]
    least = 7 if last_step else 1  # characters: 2.0e-05
    if passed is None:
        passed = [_passed(r, records[i - 1] if i else None) for i, r in enumerate(records)]
    fields = [*_counters(records, last_step), *_metrics(records, names, least), _times(passed)]
    left_out: list[str] = []
    while width is not None and tables.width_of([f.column for f in fields]) > width:
        worst = max(fields, key=lambda field: field.importance)
        if worst.importance[0] == 0 or len(fields) <= 2:
            break
        fields.remove(worst)
        left_out.append(worst.name or worst.column.title)
    kept = {field.name for field in fields}
    ordered = [name for name in left_out if name not in names]
    ordered += [name for name in names if name not in kept]
    return Layout(tuple(fields), frozenset(names), tuple(ordered))


def table(
    records: Iterable[Record],
    names: Iterable[str] | None = None,
    *,
    width: int | None = None,
    most: int = 40,
    before: Record | None = None,
    best: Mapping[str, Record] | None = None,
) -> Table:
    """Return a table of records.

    Records with nothing but ``recent/...`` are left out, unless all others are closing records.

    Args:
        records: the records.
        names: the metrics to show; by default all of them.
        width: how many characters a line may have; None for any number.
        most: how many rows to show; if there are more, the middle is cut, but for the best rows.
        before: the record before the first one, for the time that passed between them.
        best: the record to mark for each metric; by default the best of these records.

    Example:
        >>> print(table([Record(1, 10, {"loss": 0.5}, 2.0)]).text(80))
        epoch  step    loss  time
            1    10  0.5000  2.0s
    """
    records = [*records]
    rows = [record for record in records if is_row(record)]
    rows = records if all(record.closing for record in rows) else rows
    hidden = len(records) - len(rows)
    names = [*(metric_names(records) if names is None else names)]
    if hidden:  # the few values of ``recent`` in the other rows would tell nothing
        names = [name for name in names if not name.startswith("recent/")]
    layout = lay_out(rows, names, width)
    if best is None:
        best = {}
        for record in rows:
            best = update_best(best, record)
    marked = [{name for name, other in best.items() if other is record} for record in rows]
    shown_names = {field.name for field in layout.fields}
    first, last = most // 2, len(rows) - (most - most // 2)  # what is between may be cut
    shown = [i for i in range(len(rows)) if i < first or i >= last or marked[i] & shown_names]
    lines, above = [], -1
    for i in shown:
        cut = i - above - 1
        if cut > 1:  # a single row takes no more space than the sign
            lines.append([Cell("…")] * len(layout.fields))
        for j in range(i - (cut == 1), i + 1):
            passed = _passed(rows[j], rows[j - 1] if j else before)
            lines.append(layout.cells(rows[j], passed, marked[j]))
        above = i
    return Table(layout, lines, _note(layout, hidden))


def _passed(record: Record, before: Record | None) -> float | None:
    """Return the seconds between two records; None if that is unknown."""
    if before is not None:
        return max(record.seconds - before.seconds, 0.0)
    return record.seconds if record.epoch <= 1 else None  # the first of a part of a history


def _note(layout: Layout, hidden: int) -> str:
    parts = []
    if layout.left_out:
        parts.append(f"left out: {checks.join_names(layout.left_out, NAMED)}")
    if hidden:
        records = f"{hidden:,} record{'s' * (hidden != 1)}"
        parts.append(f"not shown: {records} with recent/... only")
    return "; ".join(parts)


# --- columns


def _counters(records: Sequence[Record], last_step: int) -> list[Field]:
    epoch = max((record.epoch for record in records), default=0)
    step = max((last_step, *(record.step for record in records)))
    # Within an epoch, only the step tells one record from the next.
    within = any(a.epoch == b.epoch for a, b in itertools.pairwise(records))
    within |= any(record.epoch == 0 < record.step for record in records)
    return [
        Field("", "epoch", Column("epoch", width=len(str(epoch))), (0, 0)),
        Field("", "step", Column("step", width=len(f"{step}")), (2 if within else 8, 0)),
    ]


def _times(passed: Sequence[float | None]) -> Field:
    most = max((seconds for seconds in passed if seconds is not None), default=0.0)
    form = "time" if most < 100 else "clock"
    widths = [len(format_time(seconds, form)) for seconds in (*passed, 0.0)]
    return Field("", form, Column("time", width=max(widths)), (5, 0))


def _metrics(records: Sequence[Record], names: Sequence[str], least: int) -> list[Field]:
    """Return the columns of metrics, group by group."""
    groups = list(dict.fromkeys(map(_group_of, names)))
    ordered = sorted(names, key=lambda name: (_rank(name), groups.index(_group_of(name))))
    return [_metric(records, name, least, names.index(name)) for name in ordered]


def _metric(records: Sequence[Record], name: str, least: int, place: int) -> Field:
    values = [record.metrics[name] for record in records if name in record.metrics]
    form = number_form(name, values)
    group = _group_of(name)
    title = name[len(group) + 1 :] if group else name
    width = max([least, *(len(format(value, form)) for value in values)])
    marks = is_evaluated(name) and mode_by_name(name) is not None
    return Field(name, form, Column(title, group, width, marks), (_importance(name), place))


def _group_of(name: str) -> str:
    group, _, title = name.partition("/")
    return group if title else ""


def _rank(name: str) -> int:
    """Return where the group of a metric stands: evaluated loaders, train, others, recent."""
    if is_evaluated(name):
        return 1
    group = _group_of(name)
    return {"": 0, "train": 2, "recent": 4}.get(group, 3)


def _importance(name: str) -> int:
    """Return the importance of a metric: 1 is the greatest."""
    title = name.split("/", 1)[-1]
    if title.startswith("watch/"):
        return 13
    if name.startswith("recent/"):
        return 12
    if title == "lr" or title.startswith("lr/"):
        return 9 if title == "lr" else 11
    if "grad_norm" in title:
        return 10
    if title.partition("/")[0] in _COSTS:
        return 8
    if is_evaluated(name):
        return 1 if title == "loss" else 3 if mode_by_name(name) else 4
    if name.startswith("train/"):
        nested = 4 if title.endswith("/loss") else 6 if mode_by_name(name) else 7
        return 2 if title == "loss" else nested
    return 3 if "/" not in name else 8


def _text(field: Field, record: Record, seconds: float | None) -> str:
    if field.form == "epoch":
        return str(record.epoch)
    if field.form == "step":
        return str(record.step)
    if field.form in ("time", "clock"):
        return format_time(seconds, field.form)
    if field.name not in record.metrics:
        return ""
    width = max(field.column.width, len(field.column.title))
    return fit_number(record.metrics[field.name], field.form, width)
