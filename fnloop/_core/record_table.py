"""Records as a table: which columns it has, in which order and format, and what is marked.

Whatever shows records in columns asks here, so that a terminal, a log and a notebook agree.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence

import attrs

from fnloop._core.history import (
    COSTS,
    Record,
    is_evaluated,
    is_row,
    metric_names,
    mode_by_name,
    split_name,
    update_best,
)
from fnloop._display import tables
from fnloop._display.tables import Column, Table

LONG = 100.0  # seconds, from which on a column has times such as 1:40


@attrs.frozen
class Row:
    """A row of a table of records.

    Args:
        record: the record.
        seconds: the time that passed since the one above it; None if that is unknown.
        best: the names of the metrics to be marked.
        epoch: the number of its epoch, from 1; 0 for what the record says.
    """

    record: Record
    seconds: float | None = None
    best: Collection[str] = frozenset()
    epoch: int = 0

    @property
    def number(self) -> int:
        """The number of its epoch, which is shown."""
        return self.epoch or self.record.epoch


def lay_out(
    rows: Sequence[Row],
    names: Iterable[str] | None = None,
    width: float = math.inf,
    last_step: int = 0,
) -> Table[Row]:
    """Choose the columns for some rows, and their formats. Return a table without rows.

    The evaluated loaders come first, then ``train``, and ``recent`` last. If they do not fit, the
    least important go: losses stay longest, and ``watch``, ``recent``, gradient norms and learning
    rates go first. A later row may be shown with the same columns, if it has no other metrics.

    Args:
        rows: the rows so far.
        names: the metrics to show; by default those of the rows.
        width: how many characters a line may have.
        last_step: the greatest step that is expected, if others follow; then there is more room.

    Example:
        >>> row = Row(Record(1, 10, {"train/loss": 2.0, "valid/loss": 3.0}), 12.5, {"valid/loss"})
        >>> made = lay_out([row], width=80)
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
    return Table([*_counters(rows, last_step), *metrics, _time(rows)]).fit(width)


def table(records: Sequence[Record], width: float = math.inf, most: int = 40) -> Table[Row]:
    """Return a table of records, with the best of them marked.

    Records with nothing but ``recent/...`` are left out, unless all others are closing records.

    Args:
        records: the records.
        width: how many characters a line may have.
        most: how many rows to show; if there are more, the middle is cut, but for the best rows.

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
    best: dict[str, Record] = functools.reduce(update_best, shown, {})
    rows = [
        Row(record, _passed(record, above), {name for name in best if best[name] is record})
        for above, record in zip([None, *shown], shown, strict=False)
    ]
    count = tables.format_count(hidden, "record")
    remark = f"not shown: {count} with recent/... only" if hidden else ""
    return attrs.evolve(table_of(rows, names, width, most), remark=remark)


def table_of(
    rows: Sequence[Row], names: Sequence[str], width: float = math.inf, most: int = 40
) -> Table[Row]:
    """Return a table of rows; the arguments are those of :func:`table`."""
    made = lay_out(rows, names, width)
    shown = {column.name for column in made.columns}
    first, last = most // 2, len(rows) - (most - most // 2)  # what is between may be cut
    kept: list[Row | None] = []
    stay = [not first <= i < last or not shown.isdisjoint(r.best) for i, r in enumerate(rows)]
    for stays, pairs in itertools.groupby(zip(stay, rows, strict=True), lambda pair: pair[0]):
        stretch = [row for _, row in pairs]
        kept += stretch if stays or len(stretch) == 1 else [None]  # the sign takes a line too
    return attrs.evolve(made, rows=kept)


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
    ]


def _time(rows: Sequence[Row]) -> Column[Row]:
    tenths = max((row.seconds or 0.0 for row in rows), default=0.0) < LONG

    def text(row: Row) -> str:
        return "" if row.seconds is None else tables.format_clock(row.seconds, tenths)

    width = max([4, *(len(text(row)) for row in rows)])
    return Column("time", text, width=width, rank=(5, 0))


def _metric(records: Sequence[Record], name: str, least: int, place: int) -> Column[Row]:
    values = [record.metrics[name] for record in records if name in record.metrics]
    mode, (group, title) = mode_by_name(name), split_name(name)
    form = tables.column_form(name, values, mode)
    width = max([least, *(len(format(value, form)) for value in values)])
    room = max(width, len(title))

    def text(row: Row) -> str:
        value = row.record.metrics.get(name)
        return "" if value is None else tables.fit_number(value, form, room)

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
