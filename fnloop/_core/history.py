"""The history of a run: its records and phases, as a table and as curves."""

from __future__ import annotations

import bisect
import difflib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, overload

import attrs
from toolz import groupby

from fnloop._core.types import RECORD
from fnloop._display import checks, figures, tables
from fnloop._display.checks import describe
from fnloop._display.tables import Cell, Column, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

# --------------------------------------------------------------------------------------------------
# The history of a run: one record per report, appended and never changed.
#
# A report is made at every evaluation, at every end of an epoch, and at the end of a run. Histories
# are values: appending to one returns another, and two continuations of one are independent.
# Several histories share one growing log, and each knows how many of its records are its own, so
# that appending costs the same after ten records and after a million.

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
                records = tables.format_count(self._length, "record")
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


def new_records(history: History, seen: History) -> list[Record]:
    """Return the records of a history that follow those it has in common with another one.

    Example:
        >>> a = History([Record(1, 10, {}), Record(2, 20, {})])
        >>> b = a.append(Record(3, 30, {}))
        >>> [record.step for record in new_records(b, a)], new_records(a, b)
        ([30], [])
    """
    start = min(len(history), len(seen))
    # Not by ==: after a rollback, an update that is made again may make an equal record.
    while start and history[start - 1] is not seen[start - 1]:
        start -= 1
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


# --------------------------------------------------------------------------------------------------
# Records: what was known at one report of a run.

_FLOAT = {float}


class _FrozenDict(dict[str, float]):
    """A dict that cannot be changed."""

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("a record's metrics cannot be changed: append another record")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[_FrozenDict], tuple[dict[str, float]]]:
        return _FrozenDict, (dict(self),)


def _floats(metrics: Mapping[str, object]) -> Mapping[str, float]:
    if metrics.__class__ is not dict:
        checks.mapping("Record", "metrics", metrics, 'such as {"valid/loss": 0.5}')
    if {*map(type, metrics.values())} <= _FLOAT:
        return _FrozenDict(metrics)  # type: ignore[arg-type]
    return _FrozenDict({name: _float(name, value) for name, value in metrics.items()})


def _float(name: str, value: object) -> float:
    return float(checks.scalar("Record", f"metrics[{name!r}]", value))


def _count(name: str) -> Callable[[object], int]:
    def count(value: object) -> int:
        if type(value) is int and value >= 0:
            return value
        return checks.integer("Record", name, value, least=0)

    return count


def _seconds(value: object) -> float:
    if type(value) is float and 0 <= value < math.inf:
        return value
    return checks.number("Record", "seconds", value, least=0)


def _bits(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics as they are compared: NaN equals NaN, and 0.0 differs from -0.0."""
    return {name: value.hex() for name, value in metrics.items()}


@attrs.frozen
class Record:
    """What was known at one report.

    Args:
        epoch: epochs completed. Tables, logs, bars and the labels of figures show the number of the
            epoch that it is of, from 1: the same at the end of an epoch, one more within one.
        step: updates applied.
        metrics: name to value: "train/loss", "train/grad_norm", "valid/loss", ...
        seconds: time spent in runs so far; not compared.
        closing: whether it was made only because the run ended here: between two reports, or after
            the one of an epoch, for what is evaluated ``at_end()``. A run that continues makes its
            reports as if this record did not exist, and folds over the history skip it.

    Example:
        >>> Record(1, 10, {"train/loss": 0.5}).metrics["train/loss"]
        0.5
    """

    epoch: int = attrs.field(converter=_count("epoch"))
    step: int = attrs.field(converter=_count("step"))
    metrics: Mapping[str, float] = attrs.field(eq=_bits, converter=_floats)
    seconds: float = attrs.field(default=0.0, eq=False, converter=_seconds)
    closing: bool = False

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        shown: dict[str, object] = {"epoch": self.epoch, "step": self.step}
        shown |= {name: tables.format_number(value) for name, value in self.metrics.items()}
        shown["seconds"] = f"{self.seconds:.1f}"
        if self.closing:
            shown["closing"] = True
        return tables.facts("Record", shown)


def number_of_epoch(record: Record, ended: int, at: int) -> int:
    """Return the number, from 1, of the epoch that a record is of; 0 before the first update.

    Args:
        record: the record.
        ended: the epochs completed at the newest record before it that was made at an epoch's end.
        at: the updates applied there. Each end of an epoch has one record, the first that counts
            it.

    Example:
        >>> number_of_epoch(Record(3, 30, {}), 2, 20), number_of_epoch(Record(3, 35, {}), 3, 30)
        (3, 4)
    """
    return record.epoch + (record.epoch <= ended and record.step > at)


def metric_names(records: Iterable[Record]) -> tuple[str, ...]:
    """Return the names of all metrics, in the order of their first appearance."""
    return tuple(dict.fromkeys(name for record in records for name in record.metrics))


def best_record(records: Iterable[Record], key: str, mode: str) -> Record:
    """Return the record with the best value of a metric, which all have; of equals, the oldest.

    Example:
        >>> best_record([Record(1, 10, {"a": 2.0}), Record(2, 20, {"a": 1.0})], "a", "min").step
        20
    """
    winner, *rest = records
    for record in rest:
        if better(record.metrics[key], winner.metrics[key], mode):
            winner = record
    return winner


# --------------------------------------------------------------------------------------------------
# The phases of a run: stretches with a name, which share one history.


@attrs.frozen
class Phase:
    """A stretch of a run, begun by ``fit(..., phase=name)``.

    Args:
        name: its name.
        step: ``state.step`` when it began.
        epoch: ``state.epoch`` when it began.
        records: how many records the history had then.
        stop: why it ended before its target, as a hook said; or None.
        done: whether it has ended, at its target or by a hook.
        skipped: ``state.skipped`` when it began.
        updates: ``state.updates`` when it began.
        named: whether a ``fit`` of this program has named it, since the state was restored. It is
            not saved, and does not matter to ``==``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
        >>> state = fl.fit(step, toy(), batches, epochs=2, hooks=(), phase="head")
        >>> state = fl.fit(step, state, batches, epochs=1, hooks=(), phase="all")
        >>> state.step, state.phases[1]
        (15, Phase(name='all', step=10, epoch=2, records=2, stop=None, done=True))
    """

    name: str
    step: int
    epoch: int
    records: int
    stop: str | None = None
    done: bool = False
    skipped: int = attrs.field(default=0, repr=False)
    updates: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    named: bool = attrs.field(default=False, repr=False, eq=False)


def unfinished(phases: Sequence[Phase]) -> Phase | None:
    """Return the phase that has begun and has not ended; None if there is none."""
    return phases[-1] if phases and not phases[-1].done else None


SINCE = ("phase", "run")


def first_record(phases: Sequence[Phase], since: str) -> int:
    """Return the index of the first record of the newest phase, or of the run."""
    return phases[-1].records if phases and since == "phase" else 0


def encode_phases(phases: Sequence[Phase]) -> list[dict[str, object]]:
    """Return phases as JSON."""
    fields = attrs.filters.exclude(attrs.fields(Phase).named)
    return [attrs.asdict(phase, filter=fields) for phase in phases]


def decode_phases(saved: object) -> tuple[Phase, ...]:
    """Return phases from JSON.

    Raises:
        TypeError, ValueError: they were not written by :func:`encode_phases`.
    """
    if not isinstance(saved, list):
        raise TypeError(f"phases is {saved!r:.60}")
    return tuple(map(_decode, saved))


def _decode(saved: object) -> Phase:
    if not isinstance(saved, Mapping):
        raise TypeError(f"a phase is {saved!r:.60}")
    phase = Phase(**{**saved, "named": False})
    checks.text("Phase", "name", phase.name, "its name")
    counts = {name: getattr(phase, name) for name in ("step", "epoch", "records", "skipped")}
    for name, count in (*counts.items(), *phase.updates.items()):
        checks.integer("Phase", name, count, "a number", least=0)
    if type(phase.done) is not bool or not isinstance(phase.stop, str | None):
        raise TypeError(f"a phase is {saved!r:.60}")
    return phase


# --------------------------------------------------------------------------------------------------
# Metrics that hooks monitor: whether they exist, and whether lower or higher values are better.

FALLING, RISING = ("loss", "error"), ("acc", "f1", "auc", "auroc", "precision", "recall")


def better(value: float, than: float, mode: str) -> bool:
    """Return whether a value is strictly better than another. NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Raises:
        ValueError: the mode is something else.

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min")
        (True, False)
    """
    if not isinstance(mode, str) or mode not in ("min", "max"):
        raise ValueError(
            'mode expects "min" (lower is better) or "max" (higher is better); '
            f"got {describe(mode)}"
        )
    if math.isnan(value):
        return False
    return math.isnan(than) or (value < than if mode == "min" else value > than)


@functools.cache
def mode_by_name(key: str) -> str | None:
    """Return the mode that the name of a metric suggests, "min" or "max"; None if neither or both.

    Example:
        >>> mode_by_name("valid/loss"), mode_by_name("loss/Accuracy"), mode_by_name("valid/bleu")
        ('min', 'max', None)
    """
    name = key.split("/", 1)[-1].lower()
    falls, rises = (any(word in name for word in words) for words in (FALLING, RISING))
    return None if falls == rises else "min" if falls else "max"


def mode_of(owner: str, key: str, mode: str | None) -> str:
    """Return the given mode, or the one that the name of the metric suggests.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        mode: "min", "max", or None.

    Raises:
        ValueError: it is something else; or it is None and the name suggests no mode.

    Example:
        >>> mode_of("early_stop", "valid/loss", None), mode_of("early_stop", "valid/bleu", "max")
        ('min', 'max')
    """
    if mode is not None:
        better(0.0, 0.0, mode)  # raises if it is not a mode
        return mode
    if (found := mode_by_name(key)) is None:
        raise ValueError(
            f'{owner}("{key}"): the name does not say whether lower or higher values are better: '
            'write mode="min" or mode="max"'
        )
    return found


class Watcher(Protocol):
    """What watches metrics, and reports some: a hook."""

    monitors: str | tuple[str, ...] | None
    reports: tuple[str, ...]


def check_names(
    hooks: Iterable[Watcher], known: Sequence[str], given: Collection[str] = ()
) -> None:
    """Raise if a hook monitors a metric of a loader that is never read.

    Args:
        hooks: all hooks of a run, including those in wrappers.
        known: what names of metrics may begin with: "train", the loaders that are evaluated, and
            "recent" in a run with ``record_every``.
        given: the loaders that the run was given, evaluated or not.

    Raises:
        KeyError: there is no such loader; the message lists the known ones and suggests the nearest
            name.
    """
    hooks = [*hooks]
    reported = {name for hook in hooks for name in hook.reports}
    watched = [(hook, key) for hook in hooks for key in keys_of(hook) if key not in reported]
    for hook, key in watched:
        loader, _, metric = key.partition("/")
        if metric and loader in known:
            continue
        if metric and loader == "recent":
            raise KeyError(
                f"{watcher_name(hook)}: this run does not make metrics such as {key!r}: pass "
                "record_every=every(steps=...) to fit"
            )
        if metric and loader in given:
            raise KeyError(
                f"{watcher_name(hook)}: this run never makes {key!r}, because evaluate_every says "
                f"None for the loader {loader!r}: give it a moment, such as every(epochs=1)"
            )
        candidates = [f"{name}/{rest}" for name in known for rest in (metric or key, "loss")]
        raise KeyError(
            f"{watcher_name(hook)}: there is no metric {key!r}: its first part is not the name of "
            f"a loader that this run trains on or evaluates; those are: {', '.join(known)}"
            f"{suggestion(key, candidates, 0.5)}"
        )


def keys_of(hook: Watcher) -> tuple[str, ...]:
    """Return the metrics that a hook watches."""
    found = hook.monitors
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def watcher_name(hook: object) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def check_evaluated(owner: str, key: str, names: Collection[str]) -> None:
    """Raise unless an evaluation makes a metric, before there is any.

    Args:
        owner: what watches the metric, for messages.
        key: the metric, "valid/accuracy".
        names: the names of all metrics of its loader, or what they begin with: a metric of several
            values has their names after its own.

    Raises:
        KeyError: it does not; the message says what does.
    """
    loader, _, metric = key.partition("/")
    if metric in names or any(metric.startswith(f"{name}/") for name in names):
        return
    made = [f"{loader}/{name}" for name in names]
    advice = ""
    if metric.isidentifier():
        advice = f". To add it, list metric({metric}=fn) in the pipeline, fn(aux, batch) -> scalar"
    raise KeyError(
        f"{owner}: there is no metric {key!r}: this pipeline evaluates {', '.join(made)}{advice}"
        f"{_suggestion(key, made)}"
    )


def check_loaders(owner: str, wanted: Iterable[str], loaders: Sequence[str]) -> None:
    """Raise if something is for a loader that a run does not have.

    Args:
        owner: what is for these loaders, for messages.
        wanted: the names of the loaders.
        loaders: the names of those that the run has.

    Raises:
        KeyError: one of them is missing; the message lists those that there are.
    """
    for name in wanted:
        if name not in loaders:
            raise KeyError(
                f"{owner}: this run has no loader {name!r}; those are: {', '.join(loaders)}"
                f"{suggestion(name, loaders)}"
            )


def metrics_here(state: Any) -> Mapping[str, float]:
    """Return the metrics that were recorded at the newest boundary of a state; none, if none was.

    There are two records if the boundary had one, and the run ended there and evaluated the rest.
    """
    if RECORD not in state.events:
        return {}
    newest = state.history[-1]
    before = state.history[-2] if newest.closing and len(state.history) > 1 else newest
    if before.step != newest.step or before.closing:
        return newest.metrics
    return {**before.metrics, **newest.metrics}


def check_monitored(owner: str, key: str, state: Any) -> bool:
    """Return whether the newest record has a metric.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        state: a state whose newest boundary added a record.

    Raises:
        KeyError: the record has other metrics of the same loader, and no record has this one. The
            message lists those of the newest record.
    """
    metrics: Mapping[str, float] = state.history[-1].metrics
    if key in metrics:
        return True
    loader = key.partition("/")[0]
    if any(name.startswith(f"{loader}/") for name in metrics) and key not in state.history:
        raise KeyError(
            f"{owner}: there is no metric {key!r}; there are: {', '.join(metrics)}"
            f"{_suggestion(key, metrics)}"
        )
    return False


def _suggestion(key: str, metrics: Collection[str]) -> str:
    """Return the question for the nearest metric, or how to get this one if it is of an average."""
    near = suggestion(key, metrics)
    loader, name, rest = (*key.split("/", 2), "", "")[:3]
    beside = f"{loader}/{rest}"
    if beside not in metrics or near not in ("", suggestion(key, [beside], 0)):
        return near  # there is an average, and its name is misspelled
    return (
        f'. An average reports it beside "{beside}" if the pipeline has ema(name="{name}"), '
        "evaluated beside the model"
    )


def suggestion(key: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question for the nearest name, or an empty str if none is near."""
    near = difflib.get_close_matches(key, [*names], 1, cutoff)
    return f". Did you mean {near[0]!r}?" if near else ""


# --------------------------------------------------------------------------------------------------
# Records as a table: which columns it has, in which order and format, and what is marked.
#
# Whatever shows records in columns asks here, so that a terminal, a log and a notebook agree.

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


# --------------------------------------------------------------------------------------------------
# Numbers in a table of records: one format for a column, and another for what does not suit it.

DIGITS = 3  # significant ones that every value has, if there is room
MOST_DECIMALS, LONGEST = 6, 10  # of a value that is not written as 2.00e-05; its characters


def number_form(name: str, values: Sequence[float]) -> str:
    """Return the format of a column: the same number of decimals for all its values."""
    title = name.split("/", 1)[-1]
    if title == "lr" or title.startswith("lr/"):
        return ".1e"
    sizes = [abs(value) for value in values if math.isfinite(value)]
    largest, smallest = max(sizes, default=0.0), min((s for s in sizes if s), default=1.0)
    mode = mode_by_name(name)
    if largest >= 1e9 or (largest and largest < 1e-3):
        return ".2e"
    if mode is None and sizes and all(size.is_integer() for size in sizes) and largest >= 1:
        return ",.0f"
    decimals = 4 if largest < 100 else 2 if largest < 10_000 else 0
    if mode == "max":
        return f",.{decimals}f"
    wanted = max(decimals, DIGITS - 1 - math.floor(math.log10(smallest)))
    if wanted <= MOST_DECIMALS and len(f"{largest:,.{wanted}f}") <= LONGEST:
        return f",.{wanted}f"
    return ".2e" if mode == "min" else f",.{decimals}f"  # others may come near to 0 by chance


def fit_number(value: float, form: str, width: int) -> str:
    """Format a value; if the format does not suit it, in another one that fits the width."""
    value += 0.0  # -0.0 is 0.0
    decimals = (4, *range(5, MOST_DECIMALS + 1), *range(3, -1, -1)) if form.endswith("f") else ()
    forms = [form, *(f",.{n}f" for n in decimals), ".2e", ".1e", ".0e"]
    fitting = [text for text in (format(value, each) for each in forms) if len(text) <= width]
    exact = (text for text in fitting if _error(value, text) <= 0.501 * 10 ** (1 - DIGITS))
    nearest = min(fitting, key=lambda text: _error(value, text), default=format(value, form))
    return next(exact, nearest)


def _error(value: float, text: str) -> float:
    """Return how far a text is from a value, in units of the value's first digit."""
    if abs(value) < 1e-300 or not math.isfinite(value):
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return abs(float(text.replace(",", "")) - value) / unit


def format_time(seconds: float | None, form: str) -> str:
    """Format a duration: ``12.5s``, or ``1:02`` and ``1:02:03``, by the longest of its column."""
    if seconds is None:
        return ""
    if form == "time" and seconds < 1000:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# --------------------------------------------------------------------------------------------------
# The curves of a history as a figure.

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
    figures.require_matplotlib("History.plot")
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
    figure, axes = figures.panels("History.plot", sizes)
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
            curves.append(figures.Curve(points, _label(owner, metric), colors[owner], thin, best))
        figures.draw(axis, title, x, curves, None if crowded and axis is axes[0] else known)
        if _mode_of(title, groups[title], mode) == "min" and _spans_decades(curves):
            axis.set_yscale("log")
        known |= {curve.label for curve in curves}
    if crowded:
        figures.add_legend_below(figure, axes[0])
    return figure


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
    figures.require_matplotlib("compare")
    _check(histories)
    histories = dict(zip(_short_names([*histories]), histories.values(), strict=True))
    series = {name: curves_of(history) for name, history in histories.items()}
    keys = _shared_keys(series) if keys is None else _given_keys(series, keys)
    sizes = [panel_size(_metric_of(key), i) for i, key in enumerate(keys)]
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
            curves += _curves(series[name], key, keys, label, color, best.get(name))
        known = explained if place else None if crowded else ()
        explained = explained or {name for name, found in series.items() if key in found}
        figures.draw(axis, key, "step", curves, known)
    if crowded:
        figures.add_legend_below(figure, axes[0])
    return figure


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


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Return names of runs that fit a legend, unless some would be the same."""
    short = [shorten(name, LONGEST_NAME) for name in names]
    return short if len({*short}) == len(names) else names


def _best_records(series: Mapping[str, Series], key: str) -> dict[str, Record]:
    """Return the best record of each run that has an evaluated metric, unless none is finite."""
    mode = mode_by_name(key) if is_evaluated(key) else None
    if mode is None:
        return {}
    finite = {
        name: [record for record in found.get(key, ()) if math.isfinite(record.metrics[key])]
        for name, found in series.items()
    }
    return {name: best_record(having, key, mode) for name, having in finite.items() if having}


def _run_label(
    name: str, best: Record, key: str, history: History, short: bool, known: bool
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
    series: Series, key: str, keys: list[str], label: str, color: str, best: Record | None
) -> list[figures.Curve]:
    """Return the curves of a run in the axis of a metric."""
    if key not in series:
        return []
    mark = None if best is None else (best.step, best.metrics[key], "")
    curves = [figures.Curve(_points(series, key), label, color, key.startswith("recent/"), mark)]
    recent = f"recent/{_metric_of(key)}"
    if key.startswith("train/") and recent in series and recent not in keys:
        curves.append(figures.Curve(_points(series, recent), "", color, thin=True))
    return curves


def _points(series: Series, key: str) -> figures.Points:
    return [(record.step, record.metrics[key]) for record in series[key]]


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
        small, trained = panel_rank(_metric_of(key), [key])
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


def _metric_of(key: str) -> str:
    return key.split("/", 1)[-1]
