"""The history of a run: one record per report, appended and never changed.

A report is made at every evaluation, at every end of an epoch, and at the end of a run. Histories
are values: appending to one returns another, and two continuations of one are independent. Several
histories share one growing log, and each knows how many of its records are its own, so that
appending costs the same after ten records and after a million.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar, overload

import attrs

from fnloop._core.history_plot import plot_records
from fnloop._core.history_table import table
from fnloop._core.monitor import mode_of
from fnloop._core.record import Record, best_record, number_of_epoch
from fnloop._display import checks, html, tables
from fnloop._display.checks import describe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = ["Fold", "History", "records_since"]

T = TypeVar("T")


class _Log:
    """An append-only list of records, and where each metric first appeared, in that order.

    ``epochs`` are the numbers of the epochs that the records are of.
    """

    __slots__ = ("end", "epochs", "lock", "names", "records")

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self.epochs: list[int] = []
        self.end = (0, 0)  # epochs and updates at the newest end of an epoch
        self.names: dict[str, int] = {}
        self.lock = threading.Lock()
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if not isinstance(record, Record):
            raise TypeError(
                "a history is made of records, Record(epoch, step, metrics); "
                f"got {describe(record)}"
            )
        for name in record.metrics:
            self.names.setdefault(name, len(self.records))
        self.epochs.append(number_of_epoch(record, *self.end))
        if record.epoch > self.end[0]:
            self.end = record.epoch, record.step
        self.records.append(record)


@attrs.frozen(repr=False, eq=False, init=False)
class History:
    """Records in the order in which they were made.

    Args:
        records: the records so far.

    Raises:
        TypeError: something else is among them.

    Example:
        >>> history = History([Record(1, 10, {"valid/loss": 0.5})])
        >>> history = history.append(Record(2, 20, {"valid/loss": 0.25}))
        >>> history["valid/loss"], history.latest("valid/loss"), history.best("valid/loss")
        ((0.5, 0.25), 0.25, 0.25)
        >>> history[-1].step
        20
        >>> history
                    │ valid
        epoch  step │   loss  │ time
            1    10 │ 0.5000  │ 0.0s
            2    20 │ 0.2500* │ 0.0s
    """

    _log: _Log
    _length: int  # how many records of the log belong to this history

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, records: Iterable[Record] = ()) -> None:
        if isinstance(records, History):
            log, length = records._log, records._length
        elif isinstance(records, Iterable) and not isinstance(records, str | Mapping):
            log = _Log(records)
            length = len(log.records)
        else:
            raise TypeError(
                f"History expects records, Record(epoch, step, metrics); got {describe(records)}"
            )
        self.__attrs_init__(log, length)  # type: ignore[attr-defined]

    @classmethod
    def _of(cls, log: _Log, length: int) -> History:
        """Return the history of the first records of a log."""
        made = cls.__new__(cls)
        made.__attrs_init__(log, length)  # type: ignore[attr-defined]
        return made

    @property
    def records(self) -> tuple[Record, ...]:
        """The records so far."""
        return tuple(self)

    def append(self, record: Record) -> History:
        """Return a history with one more record. This one does not change."""
        log, length = self._log, self._length
        with log.lock:
            if len(log.records) == length:  # otherwise another history has extended the log
                log.add(record)
                return History._of(log, length + 1)
        log = _Log(self)
        log.add(record)
        return History._of(log, length + 1)

    def keys(self) -> tuple[str, ...]:
        """Return the names of all metrics, in the order of their first appearance."""
        names = self._log.names.copy()  # atomic: a history in another thread may add to them
        return tuple(itertools.takewhile(lambda name: names[name] < self._length, names))

    def _since(self, start: int) -> list[Record]:
        return self._log.records[start : self._length]

    @overload
    def __getitem__(self, key: str) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, key: int) -> Record: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    def __getitem__(self, key: str | int | slice) -> tuple[float, ...] | Record | History:
        """Return the values of a metric, from the records that have it; or a record; or a part.

        Raises:
            KeyError: no record has a metric of that name; the message lists the known ones.
        """
        if isinstance(key, slice):
            chosen = range(*key.indices(self._length))
            part = History(self._log.records[i] for i in chosen)
            part._log.epochs[:] = (self._log.epochs[i] for i in chosen)  # as in the whole
            return part
        if isinstance(key, int):
            if not -self._length <= key < self._length:
                records = html.format_count(self._length, "record")
                raise IndexError(f"there is no record {key} in a history of {records}")
            return self._log.records[key % self._length]
        return tuple(record.metrics[key] for record in self.having(key))

    def having(self, key: str) -> tuple[Record, ...]:
        """Return the records that have a metric.

        Raises:
            KeyError: no record has it; the message lists the known metrics.
            TypeError: it is not a name.
        """
        checks.metric_name("History", "key", key)
        found = tuple(record for record in self if key in record.metrics)
        if not found:
            known = ", ".join(self.keys()) or "none: the history is empty"
            raise KeyError(f"no metric {key!r} in this history; there are: {known}")
        return found

    def latest(self, key: str) -> float:
        """Return the newest value of a metric.

        Raises:
            KeyError: no record has it; the message lists the known metrics.
        """
        checks.metric_name("History", "key", key)
        found = next((record for record in reversed(self) if key in record.metrics), None)
        return (found or self.having(key)[-1]).metrics[key]

    def best(self, key: str, mode: str | None = "min") -> float:
        """Return the best value of a metric; NaN only if it is always NaN.

        With ``mode=None`` the name of the metric decides whether lower or higher is better.
        """
        return self.best_record(key, mode).metrics[key]

    def best_record(self, key: str, mode: str | None = "min") -> Record:
        """Return the record with the best value of a metric; of equal values, the oldest."""
        return best_record(self.having(key), key, mode_of("History.best", key, mode))

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: object) -> bool:
        """Return whether a record has a metric of that name."""
        if isinstance(key, str):
            return self._log.names.get(key, self._length) < self._length
        return any(record is key or record == key for record in self)

    def __iter__(self) -> Iterator[Record]:
        return itertools.islice(self._log.records, self._length)

    def __reversed__(self) -> Iterator[Record]:
        return (self._log.records[i] for i in range(self._length - 1, -1, -1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        if self._length != other._length:
            return False
        return self._log is other._log or all(a == b for a, b in zip(self, other, strict=True))

    def __reduce__(self) -> tuple[type[History], tuple[tuple[Record, ...]]]:
        return History, (self.records,)

    def to_dicts(self) -> list[dict[str, float]]:
        """Return a flat dict per record: epoch (epochs completed), step, the metrics and seconds.

        Only a closing record also has ``"closing": True``.
        """
        rows = []
        for record in self:
            row: dict[str, float] = {"epoch": record.epoch, "step": record.step, **record.metrics}
            row["seconds"] = record.seconds
            if record.closing:
                row["closing"] = True
            rows.append(row)
        return rows

    def to_pandas(self) -> DataFrame:
        """Return a pandas DataFrame, one row per record.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("History.to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.to_dicts())

    def _rows(self) -> list[Record]:
        """Return the records, each with the number of its epoch, as ``progress`` shows them."""
        return [
            record if record.epoch == number else attrs.evolve(record, epoch=number)
            for record, number in zip(self, self._log.epochs, strict=False)
        ]

    def __repr__(self) -> str:
        if not len(self):
            return "History()"
        width = tables.terminal_width()
        return table(self._rows(), self.keys(), width=width).text(width)

    def _repr_html_(self) -> str:
        if not len(self):
            return "<code>History()</code>"
        return table(self._rows(), self.keys(), width=tables.HTML_WIDTH).html()

    def plot(self, *, mode: Mapping[str, str] | str | None = None, x: str = "step") -> Figure:
        """Draw every metric: one axis per metric, one line per loader, the best evaluation marked.

        An average of the weights (``ema``) is another line: "valid/ema/loss" is in the axis of
        "valid/loss", as "valid ema". The axis of a loss or an error is logarithmic if its
        highest value is a thousand times its lowest.

        Args:
            mode: "min" or "max", or a mapping from metrics ("accuracy") to one of them. By default
                a metric whose name contains "loss" or "error" is better when lower, and one with
                "acc", "f1", "auc", "precision" or "recall" when higher. For other names no best
                point is marked.
            x: the x axis, "step" or "epoch"; an evaluation in the middle of epoch 4 is at 3.5, and
                that at its end at 4. Where no epoch has ended, it is "step".

        Returns:
            A matplotlib Figure; ``figure.savefig("history.png")`` writes it. A notebook shows it
            once.

        Raises:
            ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
            ValueError: there is nothing to draw, or an argument is not one of its choices.

        Example:
            >>> first = Record(1, 10, {"train/loss": 3.0, "valid/loss": 2.0})
            >>> history = History([first, Record(2, 20, {"valid/loss": 1.0})])
            >>> figure = history.plot(x="epoch")
            >>> [line.get_label() for line in figure.axes[0].lines]
            ['train', 'valid', 'valid best 1 (epoch 2)']
        """
        return plot_records(self.records, mode, x)


def records_since(history: History, start: int) -> list[Record]:
    """Return the records from an index on. The cost does not depend on how many come before it.

    Example:
        >>> history = History([Record(1, 10, {}), Record(2, 20, {})])
        >>> [record.step for record in records_since(history, 1)]
        [20]
    """
    return history._since(start)


class Fold(Generic[T]):
    """A function of a history that folds over its records, and later only over the new ones.

    It caches its last value. A history with another log, such as a fork or one that was restored,
    is folded from its start.

    Args:
        step: ``(value, record) -> value``; it must not change the value in place.
        initial: the value of an empty history.

    Example:
        >>> steps = Fold(lambda total, record: total + record.step, 0)
        >>> steps(History([Record(1, 10, {}), Record(2, 20, {})]))
        30
    """

    def __init__(self, step: Callable[[T, Record], T], initial: T) -> None:
        self.step, self.initial = step, initial
        # The log that was folded, from which record, up to which, and their value. One tuple,
        # because an assignment to it is atomic.
        self._cache: tuple[_Log | None, int, int, T] = (None, 0, 0, initial)

    def __call__(self, history: History, first: int = 0) -> T:
        """Return the value of a history from a record on; 0 is the first record."""
        log, begun, length, value = self._cache
        if log is not history._log or begun != first or length > len(history):
            length, value = first, self.initial
        for record in history._since(length):
            value = self.step(value, record)
        self._cache = history._log, first, len(history), value
        return value

    def __reduce__(self) -> tuple[type[Fold[T]], tuple[Callable[[T, Record], T], T]]:
        return Fold, (self.step, self.initial)
