"""The history of a run: one record per report, appended and never changed.

A report is made at every evaluation, at every end of an epoch, and at the end of a run. A history that is kept never changes,
and two continuations of one are independent: several histories share one growing log, and each knows how much of it is its
own. So a record costs the same after ten and after a million.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import attrs

from fnloop._core.monitor import better, mode_by_name, mode_of
from fnloop._display import checks, html, plot
from fnloop._display.checks import described

__all__ = ["Fold", "History", "Record", "check_plot", "table"]


class _Frozen(dict):
    """A dict that stays as it is made."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a record's metrics can't be changed: append another record")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Frozen, (dict(self),)


def _floats(metrics: Mapping[str, float]) -> Mapping[str, float]:
    checks.mapping("Record", "metrics", metrics, 'such as {"valid/loss": 0.5}')
    return _Frozen({name: _float(name, value) for name, value in metrics.items()})


def _float(name: str, value: Any) -> float:
    if type(value) is not float:
        checks.scalar("Record", f"metrics[{name!r}]", value)
    return float(value)


def _count(name: str) -> Callable[[Any], int]:
    return lambda value: (
        value
        if type(value) is int and value >= 0
        else checks.integer("Record", name, value, least=0)
    )


def _seconds(value: Any) -> float:
    return checks.number("Record", "seconds", value, least=0)


def _to_the_bit(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: value.hex() for name, value in metrics.items()}  # NaN equals NaN, 0.0 is not -0.0


@attrs.frozen
class Record:
    """What was known at one report.

    Args:
        epoch: epochs completed.
        step: updates applied.
        metrics: name to value: "train/loss", "train/grad_norm", "valid/loss", ...
        seconds: time spent in runs up to here; not compared.
        closing: whether it was made only because the run ended here, between two reports. A run that continues makes its
            reports as if this one had not been made, and what folds over the history leaves it out.

    Example:
        >>> Record(1, 10, {"train/loss": 0.5}).metrics["train/loss"]
        0.5
    """

    epoch: int = attrs.field(converter=_count("epoch"))
    step: int = attrs.field(converter=_count("step"))
    metrics: Mapping[str, float] = attrs.field(eq=_to_the_bit, converter=_floats)
    seconds: float = attrs.field(default=0.0, eq=False, converter=_seconds)
    closing: bool = False

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        counters = {"epoch": self.epoch, "step": self.step}
        metrics = {name: html.number(value) for name, value in self.metrics.items()}
        closing = {"closing": True} if self.closing else {}
        return html.facts(
            "Record", {**counters, **metrics, "seconds": f"{self.seconds:.1f}", **closing}
        )


class _Log:
    """Records that only ever become more, and where each metric appeared first, in that order."""

    __slots__ = ("lock", "names", "records")

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: list[Record] = []
        self.names: dict[str, int] = {}
        self.lock = threading.Lock()
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        if not isinstance(record, Record):
            raise TypeError(
                f"a history is made of records, Record(epoch, step, metrics); got {described(record)}"
            )
        for name in record.metrics:
            self.names.setdefault(name, len(self.records))
        self.records.append(record)


@attrs.frozen(repr=False, eq=False, init=False)
class History:
    """Records in the order in which they were made.

    Args:
        records: the records so far.

    Raises:
        TypeError: something else is among them.

    Example:
        >>> history = History().append(Record(1, 10, {"valid/loss": 0.5})).append(Record(2, 20, {"valid/loss": 0.25}))
        >>> history["valid/loss"], history.latest("valid/loss"), history.best("valid/loss"), history[-1].step
        ((0.5, 0.25), 0.25, 0.25, 20)
        >>> history
        epoch  step  valid/loss  seconds
            1    10         0.5      0.0
            2    20        0.25      0.0
    """

    _log: _Log
    _length: int  # how many records of the log are its own

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, records: Iterable[Record] = ()) -> None:
        if isinstance(records, History):
            log, length = records._log, records._length
        elif isinstance(records, Iterable) and not isinstance(records, str | Mapping):
            log = _Log(records)
            length = len(log.records)
        else:
            raise TypeError(
                f"History expects records, Record(epoch, step, metrics); got {described(records)}"
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
        """Return a history with one more record; this one stays as it is."""
        log, length = self._log, self._length
        with log.lock:
            if len(log.records) == length:  # else the log continues another way
                log.add(record)
                return History._of(log, length + 1)
        log = _Log(self)
        log.add(record)
        return History._of(log, length + 1)

    def keys(self) -> tuple[str, ...]:
        """Return the names of all metrics, in the order of their first appearance."""
        names = self._log.names.copy()  # at once: another history may add to them
        return tuple(itertools.takewhile(lambda name: names[name] < self._length, names))

    def _since(self, n: int) -> list[Record]:
        """Return the records from the n-th on, without a look at those before."""
        return self._log.records[n : self._length]

    @overload
    def __getitem__(self, key: str) -> tuple[float, ...]: ...
    @overload
    def __getitem__(self, key: int) -> Record: ...
    @overload
    def __getitem__(self, key: slice) -> History: ...
    def __getitem__(self, key: str | int | slice) -> tuple[float, ...] | Record | History:
        """Return the values of a metric, in the records that have it; or a record by its index.

        Raises:
            KeyError: no record has a metric of that name; the message lists those that there are.
        """
        if isinstance(key, slice):
            return History(self._log.records[i] for i in range(*key.indices(self._length)))
        if isinstance(key, int):
            if not -self._length <= key < self._length:
                raise IndexError(
                    f"there is no record {key} in a history of {html.counted(self._length, 'record')}"
                )
            return self._log.records[key % self._length]
        return tuple(record.metrics[key] for record in self.having(key))

    def having(self, key: str) -> tuple[Record, ...]:
        """Return the records that have a metric.

        Raises:
            KeyError: there is none; the message lists the metrics that there are.
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
            KeyError: there is no such metric; the message lists those that there are.
        """
        checks.metric_name("History", "key", key)
        found = next((record for record in reversed(self) if key in record.metrics), None)
        return (found or self.having(key)[-1]).metrics[key]

    def best(self, key: str, mode: str | None = "min") -> float:
        """Return the best value of a metric; NaN only if there is nothing else. With mode=None its name says what is better."""
        return self.best_record(key, mode).metrics[key]

    def best_record(self, key: str, mode: str | None = "min") -> Record:
        """Return the record with the best value of a metric; of equals, the oldest."""
        winner, *rest = self.having(key)
        wanted = mode_of("History.best", key, mode)
        for record in rest:
            if better(record.metrics[key], winner.metrics[key], wanted):
                winner = record
        return winner

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
        same = self._length == other._length
        return same and (
            self._log is other._log or all(a == b for a, b in zip(self, other, strict=True))
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return History, (self.records,)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a list of flat dicts: epoch, step, the metrics and seconds; of a closing record, also ``"closing": True``."""
        return [
            {
                "epoch": r.epoch,
                "step": r.step,
                **r.metrics,
                "seconds": r.seconds,
                **({"closing": True} if r.closing else {}),
            }
            for r in self
        ]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, one row per record.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("History.to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self.to_dicts())

    def __repr__(self) -> str:
        return html.table_text(table(self), fixed=2) if len(self) else "History()"

    def _repr_html_(self) -> str:
        return html.table(table(self)) if len(self) else "<code>History()</code>"

    def plot(self, *, mode: Mapping[str, str] | str | None = None, x: str = "step") -> Any:
        """Draw every metric, one axis per metric, one line per loader, the best point of what was evaluated marked.

        Args:
            mode: "min" or "max", or a mapping from metrics ("accuracy") to one of them. By default a metric whose name
                contains "loss" or "error" is better when lower, and one with "acc", "f1", "auc", "precision" or "recall" when
                higher. Of any other no best point is marked.
            x: what is on the x axis, "step" or "epoch"; evaluations within an epoch are at fractions of it.

        Returns:
            A matplotlib Figure; ``figure.savefig("history.png")`` writes it. A notebook shows it once.

        Raises:
            ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
            ValueError: there is nothing to draw, or an argument is none of its choices.

        Example:
            >>> history = History([Record(1, 10, {"train/loss": 3.0, "valid/loss": 2.0}), Record(2, 20, {"valid/loss": 1.0})])
            >>> figure = history.plot(x="epoch")
            >>> [line.get_label() for line in figure.axes[0].lines]
            ['train', 'valid', 'best 1']
        """
        check_plot(mode, x)
        plot.require_matplotlib("History.plot")
        groups: dict[str, list[str]] = {}
        for key in self.keys():
            groups.setdefault(key.split("/", 1)[-1], []).append(key)
        if not groups:
            raise ValueError(
                f"there is nothing to plot: the history {'has no metric' if len(self) else 'is empty'}"
            )
        labels = list(dict.fromkeys(key.split("/", 1)[0] for key in self.keys()))
        figure, axes = plot.grid("History.plot", len(groups))
        records = self.records
        places = {
            record.step: epoch for record, epoch in zip(records, _epochs(records), strict=True)
        }
        for axis, (metric, keys) in zip(axes, groups.items(), strict=True):
            wanted = _mode_of(metric, keys, mode)
            curves, marked = {}, {}
            for key in keys:
                label = key.split("/", 1)[0]
                at = lambda r, key=key: (places[r.step] if x == "epoch" else r.step, r.metrics[key])
                curves[label] = [at(record) for record in self.having(key)]
                if label not in ("train", "recent") and wanted is not None:
                    marked[label] = at(self.best_record(key, wanted))
            plot.draw(axis, metric, x, curves, marked, labels)
        return figure


class Fold:
    """A value that follows from the records of a history, brought up to date by the new ones alone.

    It keeps the last value as a cache: another history, such as one that is restored or a fork, is folded from its start.

    Args:
        step: ``(value, record) -> value``, which changes nothing.
        initial: the value of an empty history.

    Example:
        >>> steps = Fold(lambda total, record: total + record.step, 0)
        >>> steps(History([Record(1, 10, {}), Record(2, 20, {})]))
        30
    """

    def __init__(self, step: Callable[[Any, Record], Any], initial: Any = None) -> None:
        self.step, self.initial = step, initial
        self._known: tuple[_Log | None, int, Any] = (
            None,
            0,
            initial,
        )  # of which log, of how many records, the value

    def __call__(self, history: History) -> Any:
        """Return the value of a history."""
        log, length, value = self._known
        if log is not history._log or length > len(history):
            length, value = 0, self.initial
        for record in history._since(length):
            value = self.step(value, record)
        self._known = history._log, len(history), value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return Fold, (self.step, self.initial)


def table(
    history: History, most: int = 40, first: int = 0, names: Sequence[str] | None = None
) -> list[Sequence[str]]:
    """Return the cells of a table, its head first.

    Args:
        history: the records.
        most: how many of them to show; of more, the middle is left out.
        first: the record to begin with.
        names: the metrics to show; all by default.
    """
    names = history.keys() if names is None else names
    shown: Iterable[int] = range(first, len(history))
    if len(shown) > most:
        shown = [*shown[: most // 2], -1, *shown[-(most - most // 2) :]]
    head = ["epoch", "step", *names, "seconds"]
    return [head, *(["…"] * len(head) if i < 0 else _row(history[i], names) for i in shown)]


def _row(r: Record, names: Sequence[str]) -> list[str]:
    values = (html.number(r.metrics[name]) if name in r.metrics else "" for name in names)
    return [str(r.epoch), str(r.step), *values, f"{r.seconds:.1f}"]


def check_plot(mode: Any, x: Any) -> None:
    """Raise ValueError unless these are arguments of :meth:`History.plot`."""
    if not isinstance(x, str) or x not in ("step", "epoch"):
        raise ValueError(f'x expects "step" or "epoch"; got {checks.described(x)}')
    for wanted in mode.values() if isinstance(mode, Mapping) else () if mode is None else (mode,):
        better(0.0, 0.0, wanted)  # checks it


def _epochs(records: Sequence[Record]) -> list[float]:
    """Return how many epochs had passed at each record: between the ends of two, by their steps.

    The first record that counts an epoch was made at its end.
    """
    ends = [(0, 0)]  # (step, epoch)
    for r in records:
        if r.epoch > ends[-1][1] and r.step > ends[-1][0]:
            ends.append((r.step, r.epoch))
    if len(ends) == 1:
        return [float(r.epoch) for r in records]  # how long an epoch is isn't known yet

    def passed(r: Record) -> float:
        i = min(max(bisect.bisect_left(ends, (r.step, 0)), 1), len(ends) - 1)
        (before, epoch), (behind, next_epoch) = ends[i - 1], ends[i]
        return epoch + (r.step - before) * (next_epoch - epoch) / (behind - before)

    return [passed(r) for r in records]


def _mode_of(metric: str, keys: Iterable[str], mode: Mapping[str, str] | str | None) -> str | None:
    """Return whether lower or higher values of a metric are better: as it is told, or by its name; None if neither says."""
    if isinstance(mode, Mapping):
        mode = next((mode[name] for name in (*keys, metric) if name in mode), None)
    return mode_by_name(f"/{metric}") if mode is None else mode
