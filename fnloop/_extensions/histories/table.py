"""A history as a table of its records: columns, their order and formats, and what is marked."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from fnloop._core.records import Record
from fnloop.extend import better, reprs, tables

# --------------------------------------------------------------------------------------------------
# Records as rows: which are shown, what is marked in them, and whose they are.


def metric_names(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the names of all metrics, in the order of their first appearance."""
    return tuple(dict.fromkeys(name for record in records for name in record.metrics))


def is_evaluated(name: str) -> bool:
    """Return whether the name of a metric is that of a loader that is evaluated."""
    group, _ = split_name(name)
    return group not in ("", *Record.TRAINED, *Record.COSTS)


def split_name(name: str) -> tuple[str, str]:
    """Return the first part of the name of a metric, such as its loader, and the rest.

    Example:
        >>> split_name("valid/ema/loss"), split_name("loss")
        (('valid', 'ema/loss'), ('', 'loss'))
    """
    group, _, title = name.partition("/")
    return (group, title) if title else ("", name)


def is_row(record: Record) -> bool:
    """Return whether a record is a row of a table: not if it has nothing but ``recent/...``.

    Example:
        >>> is_row(Record(0, 5, {"recent/loss": 0.5})), is_row(Record(1, 10, {"train/loss": 0.5}))
        (False, True)
    """
    return not record.metrics or bool(without_intervals(record.metrics))


def without_intervals(names: Iterable[str]) -> list[str]:
    """Return the names of metrics without those of the intervals of ``record_every``.

    Example:
        >>> without_intervals(["train/loss", "recent/loss"])
        ['train/loss']
    """
    return [name for name in names if not name.startswith("recent/")]


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
        mode = reprs.mode_by_name(name) if is_evaluated(name) else None
        if mode is None or not math.isfinite(value):
            continue
        if name not in best or better(value, best[name].metrics[name], mode):
            updated[name] = record
    return updated


def starred(best: Mapping[str, Record], record: Record, turns: Collection[str]) -> set[str]:
    """Return the metrics that have a star in a record, given the best that contain it.

    A star says that a value is better than all above it, wherever records are shown. The mean of
    the losses of turns has none: they may oppose each other.

    Args:
        best: the best record of each metric, after ``update_best`` with this record.
        record: the record.
        turns: the names of the turns of ``alternate``.

    Example:
        >>> record = Record(1, 10, {"valid/loss": 2.0, "valid/d/loss": 1.0, "train/loss": 1.0})
        >>> starred(update_best({}, record), record, ("d", "g"))
        {'valid/d/loss'}
    """
    found = {name for name in best if best[name] is record}
    if turns:
        losses = (name for name in found if name.endswith("/loss"))
        found -= {name for name in losses if not {*name.split("/")} & {*turns}}
    return found


def turns_in(names: Collection[str]) -> set[str]:
    """Return the turns of ``alternate`` that made some metrics: each has a loss and a rate.

    Example:
        >>> turns_in(["train/loss", "train/d/loss", "train/lr/d", "train/ema/loss"])
        {'d'}
    """
    rates = {name.split("/")[2] for name in names if name.startswith("train/lr/")}
    return {rate for rate in rates if f"train/{rate}/loss" in names}


def stacked_in(names: Collection[str]) -> list[str]:
    """Return the models of a stack whose metrics these are: a stack has no loss of its own.

    Example:
        >>> stacked_in(["train/a/loss", "train/lr/a", "train/b/loss", "train/lr/b"])
        ['a', 'b']
        >>> stacked_in(["train/loss", "train/d/loss", "train/lr/d"])      # turns of alternate
        []
    """
    if any(split_name(name)[1] == "loss" for name in names):
        return []
    rates = [name.split("/")[2] for name in names if name.startswith("train/lr/")]
    return [name for name in dict.fromkeys(rates) if f"train/{name}/loss" in names]


def records_of_model(
    records: Iterable[Record], model: str, models: Collection[str]
) -> list[Record]:
    """Return the records of one model of a stack, with the names that its metrics have alone.

    What belongs to no model, such as times, stays.

    Example:
        >>> both = Record(1, 10, {"train/a/loss": 0.5, "train/lr/a": 0.1, "train/b/loss": 2.0})
        >>> records_of_model([both], "a", ("a", "b"))[0].metrics
        {'train/loss': 0.5, 'train/lr': 0.1}
    """
    found: list[Record] = []
    for record in records:
        metrics: dict[str, float] = {}
        for name, value in record.metrics.items():
            parts = name.split("/")
            place = next((i for i, part in enumerate(parts) if i and part in models), None)
            if place is None or parts[place] == model:
                own = (part for i, part in enumerate(parts) if i != place)
                metrics["/".join(own)] = value
        found.append(attrs.evolve(record, metrics=metrics))
    return found


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
        """Return the row of a record: see :meth:`Record.number_of_epoch`."""
        return cls(record, seconds, epoch=record.number_of_epoch(ended, at))

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
    ) -> tables.Table[Row]:
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
        names = [*(Row.names(rows) if names is None else names)]
        groups = list(dict.fromkeys(split_name(name)[0] for name in names))
        ordered = sorted(names, key=lambda name: (_place(name), groups.index(split_name(name)[0])))
        least = 7 if last_step else 1  # characters: 2.0e-05
        metrics = [_metric(name, least, names.index(name)) for name in ordered]
        counters = _counters(rows, last_step) + (_items(rows) if items else [])
        table = tables.Table([*counters, *metrics, _time(rows)], rows)
        return attrs.evolve(table.fit(width), rows=())

    @staticmethod
    def table(
        rows: Sequence[Row],
        names: Sequence[str],
        width: float = math.inf,
        most: int = 40,
        items: bool = False,
    ) -> tables.Table[Row]:
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


def table(records: Sequence[Record], width: float = math.inf, most: int = 40) -> tables.Table[Row]:
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

    # If some are hidden, the few values of ``recent`` in the other rows would tell nothing.
    chosen = without_intervals if hidden else list
    names = chosen(metric_names(records))
    turns, models = turns_in(names), stacked_in(names)
    best: dict[str, Record] = {}
    rows: list[Row] = []
    for above, record in zip([None, *shown], shown, strict=False):
        best = update_best(best, record)
        row = Row(record, _passed(record, above), starred(best, record, turns))
        rows += row.by_model(models)
    if models:
        names = chosen(metric_names(row.record for row in rows))
    count = reprs.format_count(hidden, "record")
    remark = f"not shown: {count} with recent/... only" if hidden else ""
    return attrs.evolve(Row.table(rows, names, width, most, items=True), remark=remark)


def _passed(record: Record, before: Record | None) -> float | None:
    """Return the seconds between two records; None if that is unknown."""
    if before is not None:
        return max(record.seconds - before.seconds, 0.0)
    return record.seconds if record.epoch <= 1 else None  # the first of a part of a history


# --- columns


def _counters(rows: Sequence[Row], last_step: int) -> list[tables.Column[Row]]:
    # Within an epoch, only the step tells one record from the next.
    within = any(a.number == b.number for a, b in itertools.pairwise(rows))
    within |= any(row.number != row.record.epoch for row in rows)
    step, rank = len(str(last_step)), (2 if within else 8, 0)
    columns = [
        tables.Column[Row]("epoch", lambda row: str(row.number)),
        tables.Column[Row]("step", lambda row: str(row.record.step), width=step, rank=rank),
    ]
    if any(row.model for row in rows):  # of a stack
        model = lambda row: reprs.shorten(row.model, LONGEST_MODEL)
        columns.append(tables.Column("model", model, left=True, rank=(1, 0)))
    return columns


def _items(rows: Sequence[Row]) -> list[tables.Column[Row]]:
    """Return the column of items, the first to go, if any are known."""

    def text(row: Row) -> str:
        return "" if row.record.items is None else f"{row.record.items:,}"

    return [tables.Column("items", text, rank=(14, 0))] if any(map(text, rows)) else []


def _time(rows: Sequence[Row]) -> tables.Column[Row]:
    tenths = max((row.seconds or 0.0 for row in rows), default=0.0) < LONG

    def text(row: Row) -> str:
        return "" if row.seconds is None else tables.format_clock(row.seconds, tenths)

    return tables.Column("time", text, rank=(5, 0))


def _metric(name: str, least: int, place: int) -> tables.Column[Row]:
    group, title = split_name(name)

    def text(row: Row) -> str:
        value = row.record.metrics.get(name)
        return "" if value is None else reprs.format_metric(name, value)

    marked = is_evaluated(name) and reprs.mode_by_name(name) is not None
    best = (lambda row: name in row.best) if marked else None
    rank = (_importance(name), place)
    return tables.Column(title, text, group, best=best, width=least, rank=rank, name=name)


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
    if reprs.is_learning_rate(name):
        return 9 if title == "lr" else 11
    if "grad_norm" in title:
        return 10
    if title.partition("/")[0] in Record.COSTS:
        return 8
    if is_evaluated(name):
        return 1 if title == "loss" else 3 if reprs.mode_by_name(name) else 4
    if group == "train":
        nested = 4 if title.endswith("/loss") else 6 if reprs.mode_by_name(name) else 7
        return 2 if title == "loss" else nested
    return 8 if group else 3
