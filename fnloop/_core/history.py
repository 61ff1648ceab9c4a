"""The history of a run: its records and phases, and the metrics that hooks monitor."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, overload

import attrs

from fnloop._core.parts import State
from fnloop._core.records import (
    MODES,
    Record,
    best_record,
    better,
)
from fnloop._core.types import RECORD
from fnloop._display import checks, reprs
from fnloop._display.checks import describe, join_names, suggestion
from fnloop._display.reprs import mode_by_name
from fnloop._display.screen import warn_once
from fnloop._extensions import extensions

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
        self.epochs.append(record.number_of_epoch(*self.end))
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
            1    10 │ 0.5000* │ 0.0s
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

    def since(self, start: int | History = 0, closing: bool = True) -> list[Record]:
        """Return the records from an index on, or those that follow another history.

        The cost does not depend on how many come before them.

        Args:
            start: the index of the first; or a history, after what it has in common with this one.
            closing: whether to return closing records too, which a run makes only where it ends.

        Example:
            >>> a = History([Record(1, 10, {}), Record(2, 20, {})])
            >>> b = a.append(Record(2, 25, {}, closing=True))
            >>> [[record.step for record in b.since(*given)] for given in ((1,), (1, False), (a,))]
            [[20, 25], [20], [25]]
        """
        if isinstance(start, History):
            seen, start = start, min(self._length, len(start))
            # Not by ==: after a rollback, an update that is made again may make an equal record.
            while start and self[start - 1] is not seen[start - 1]:
                start -= 1
        found = self._log.records[start : self._length]
        return found if closing else [record for record in found if not record.closing]

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
        key = checks.plain(key)
        if isinstance(key, int):
            if not -self._length <= key < self._length:
                records = reprs.format_count(self._length, "record")
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
            raise KeyError(
                f"no metric {key!r} in this history; there are: {known}"
                f"{_suggest_loader(key, self.keys())}"
            )
        return found

    def latest(self, key: str) -> float:
        """Return the newest value of a metric.

        Raises:
            KeyError: no record has it; the message lists the known metrics.
        """
        checks.metric_name("History", "key", key)
        found = next((record for record in reversed(self) if key in record.metrics), None)
        return (found or self.having(key)[-1]).metrics[key]

    def best(self, key: str, mode: str | None = None) -> float:
        """Return the best value of a metric; NaN only if it is always NaN.

        Args:
            key: the metric.
            mode: "min" if lower is better, "max" if higher; None: by the name, as in
                ``early_stop``. A name with "loss" or "error" falls, and one with "acc", "f1",
                "auc", "precision" or "recall" rises; of any other, lower is better.

        Raises:
            KeyError: no record has the metric.
            ValueError: mode is something else.
        """
        return self.best_record(key, mode).metrics[key]

    def best_record(self, key: str, mode: str | None = None) -> Record:
        """Return the record with the best value of a metric; of equal values, the oldest.

        ``mode`` is that of :meth:`best`.
        """
        found = self.having(key)
        if mode is None:
            mode = mode_by_name(key) or "min"
        return best_record(found, key, mode_of("History.best", key, mode))

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
        """Return a flat dict per record: epoch (epochs completed), step, metrics, seconds, items.

        Only a closing record also has ``"closing": True``. Where the items are unknown, there is no
        ``"items"``.
        """
        rows = []
        for record in self:
            row: dict[str, float] = {"epoch": record.epoch, "step": record.step, **record.metrics}
            row["seconds"] = record.seconds
            if record.items is not None:
                row["items"] = record.items
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
        width = reprs.terminal_width()
        for table in extensions("table of a history") if len(self) else ():
            return table(self._rows(), width).text(width)
        return f"History({reprs.format_count(len(self), 'record') if len(self) else ''})"

    def _repr_html_(self) -> str:
        for table in extensions("table of a history") if len(self) else ():
            return table(self._rows(), reprs.HTML_WIDTH).html()
        return f"<code>{self!r}</code>"

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
            x: the x axis, "step", "epoch" or "items"; an evaluation in the middle of epoch 4 is at
                3.5, and that at its end at 4. Where no epoch has ended, it is "step". Records
                whose items are unknown are left out for "items".

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
        (plot_records,) = extensions("figure of a history")
        return plot_records(self.records, mode, x)


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
        for record in history.since(length):
            value = self.step(value, record)
        self._cache = history._log, first, len(history), value
        return value

    def __reduce__(self) -> tuple[type[Fold[T]], tuple[Callable[[T, Record], T], T]]:
        return Fold, (self.step, self.initial)


# --------------------------------------------------------------------------------------------------
# The phases of a run: stretches with a name, which share one history.


@attrs.frozen
class Phase:
    """A named part of a run, begun by ``fit(..., phase=name)``.

    Args:
        name: its name.
        step: ``state.step`` when it began.
        epoch: ``state.epoch`` when it began.
        records: how many records the history had then.
        stop: why it ended before its target, as a hook said; or None.
        done: whether it has ended, at its target or by a hook.
        skipped: ``state.skipped`` when it began.
        updates: ``state.updates`` when it began.
        items: ``state.items`` when it began; None if that is unknown. It does not matter to ``==``.
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
    items: float | None = attrs.field(default=None, repr=False, eq=False)
    named: bool = attrs.field(default=False, repr=False, eq=False)

    @staticmethod
    def running(phases: Sequence[Phase]) -> Phase:
        """Return the phase that has begun and not ended; the whole run, without a name, if none."""
        return phases[-1] if phases and not phases[-1].done else WHOLE_RUN


WHOLE_RUN = Phase("", 0, 0, 0)


# --------------------------------------------------------------------------------------------------
# Metrics that hooks monitor: whether they exist, and whether lower or higher values are better.


def mode_of(owner: str, key: str, mode: str | None) -> str:
    """Return the given mode, or the one that the name of the metric suggests.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        mode: "min", "max", or None.

    Returns:
        "min" or "max".

    Raises:
        ValueError: it is something else; or it is None and the name suggests no mode.

    Example:
        >>> mode_of("early_stop", "valid/loss", None), mode_of("early_stop", "valid/bleu", "max")
        ('min', 'max')
    """
    if mode is not None:
        checks.choice(owner, "mode", mode, MODES)
        if mode_by_name(key) not in (None, mode) and owner != "History.best":
            counted, said = ("lowest", "higher") if mode == "min" else ("highest", "lower")
            warn_once(
                f'{owner}("{key}", mode="{mode}"): the {counted} value counts as the best, and the '
                f"name says that {said} is better. If it is, leave mode= out"
            )
        return mode
    if (found := mode_by_name(key)) is None:
        raise ValueError(
            f'{owner}("{key}"): the name does not say whether lower or higher values are better: '
            'write mode="min" or mode="max"'
        )
    return found


class Watcher(Protocol):
    """What watches metrics: a hook."""

    monitors: str | tuple[str, ...] | None


def check_names(
    watched: Iterable[tuple[str, str]], known: Sequence[str], given: Collection[str] = ()
) -> None:
    """Raise if a metric is watched of a loader that is never read.

    Args:
        watched: who watches which metric, without those that a hook reports.
        known: what names of metrics may begin with: "train", the loaders that are evaluated, and
            "recent" in a run with ``record_every``.
        given: the loaders that the run was given, evaluated or not.

    Raises:
        KeyError: there is no such loader; the message lists the known ones and suggests the nearest
            name.
    """
    for owner, key in watched:
        loader, _, metric = key.partition("/")
        if metric and loader in known:
            continue
        if metric and loader == "recent":
            raise KeyError(
                f"{owner}: this run does not make metrics such as {key!r}: pass "
                "record_every=every(steps=...) to fit"
            )
        if metric and loader in given:
            raise KeyError(
                f"{owner}: this run never makes {key!r}, because evaluate_every says "
                f"None for the loader {loader!r}: give it a moment, such as every(epochs=1)"
            )
        candidates = [f"{name}/{rest}" for name in known for rest in (metric or key, "loss")]
        raise KeyError(
            f"{owner}: there is no metric {key!r}: its first part is not the name of "
            f"a loader that this run trains on or evaluates; those are: {', '.join(known)}"
            f"{suggestion(key, candidates, 0.5)}"
        )


def keys_of(hook: Watcher) -> tuple[str, ...]:
    """Return the metrics that a hook watches."""
    found = hook.monitors
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


def check_made(
    owner: str,
    key: str,
    names: Collection[str],
    of_models: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise unless training, or an evaluation, makes a metric, before there is any.

    Args:
        owner: what watches the metric, for messages.
        key: the metric, "valid/accuracy".
        names: the names of all metrics of training, or of its loader, or what they begin with: a
            metric of several values has their names after its own.
        of_models: of those that each model of a stack has, what they are called there.

    Raises:
        KeyError: it does not; the message says what does.
    """
    loader, _, metric = key.partition("/")
    named = [name for each in dict.fromkeys(names) for name in of_models.get(each, (each,))]
    if any(metric == name or metric.startswith(f"{name}/") for name in named):
        return
    if own := of_models.get(metric):
        raise KeyError(
            f"{owner}: there is no metric {key!r}, because this state is a stack, in which each "
            f"model has its own: {join_names([f'{loader}/{name}' for name in own])}"
        )
    made = [f"{loader}/{name}" for name in named]
    makes = "reports" if loader in Record.TRAINED else "evaluates"
    alone = metric.partition("/")[2] if of_models else metric
    advice = ""
    if alone.isidentifier() and alone not in names:
        advice = f". To add it, list metric({alone}=fn) in the pipeline, fn(aux, batch) -> scalar"
    raise KeyError(
        f"{owner}: there is no metric {key!r}: this pipeline {makes} "
        f"{join_names(made, 6 if of_models else len(made))}{advice}"
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


class Monitored:
    """A metric that a hook or a middleware watches, and which of its values are better.

    Args:
        owner: what watches it, for messages.
        key: the metric, such as "valid/loss".
        mode: "min" if lower is better, "max" if higher; None: as the name of the metric says.
        since: which values count: those of the "phase", if there is one, or of the whole "run".

    Attributes:
        owner, key, mode, since: as above, with the mode that the name says.
        MODES, SINCE: the values that ``mode`` and ``since`` can have.

    Raises:
        TypeError: the key is not a str.
        ValueError: there is no such mode or ``since``, or the name implies no mode.

    Example:
        >>> watched = Monitored("mine", "valid/loss")
        >>> watched.mode, watched.better(1.0, 2.0)
        ('min', True)
    """

    MODES, SINCE = MODES, ("phase", "run")

    def __init__(self, owner: str, key: str, mode: str | None = None, since: str = "phase") -> None:
        self.owner, self.key = owner, checks.metric_name(owner, "key", key)
        self.mode = mode_of(owner, key, mode)
        self.since = checks.choice(owner, "since", since, self.SINCE)

    def first(self, state: State) -> int:
        """Return the index of the first record whose value counts.

        Args:
            state: the state, with its history.

        Returns:
            The index: 0, or how many records there were when the phase began.

        Example:
            >>> from fnloop.testing import toy
            >>> Monitored("mine", "valid/loss").first(toy())
            0
        """
        return state.phases[-1].records if state.phases and self.since == "phase" else 0

    def counts(self, record: Record) -> bool:
        """Return whether a record has a value that counts where one folds over the values.

        That of a closing record does not, because the run that continues makes its reports as if
        it did not exist. Only records of epochs and of evaluations have ``train/...``: those that
        ``measure`` or ``record_every`` add do not.

        Args:
            record: the record.

        Returns:
            Whether it does.

        Example:
            >>> watched, metrics = Monitored("mine", "valid/loss"), {"valid/loss": 2.0}
            >>> watched.counts(Record(1, 10, metrics))
            True
            >>> watched.counts(Record(1, 15, metrics, closing=True))
            False
        """
        return not record.closing and self.key in record.metrics

    def better(self, value: float, than: float) -> bool:
        """Return whether a value is strictly better than another. NaN is worse than anything.

        Args:
            value, than: the two.

        Returns:
            Whether the first is better.

        Example:
            >>> Monitored("mine", "valid/accuracy").better(1.0, 2.0)
            False
        """
        return better(value, than, self.mode)

    def measured(self, state: State) -> float | None:
        """Return the value that was recorded at the newest boundary; None if none was.

        Args:
            state: the state that a hook is given.

        Returns:
            The value, or None.

        Raises:
            KeyError: the record has other metrics of the same loader, and no record has this one.

        Example:
            >>> from fnloop.testing import toy
            >>> Monitored("mine", "valid/loss").measured(toy()) is None
            True
        """
        if RECORD not in state.events:
            return None
        self.check(state)
        return state.history[-1].metrics.get(self.key)

    def check(self, state: State) -> None:
        """Raise unless the newest record has it, or one that has may come.

        Args:
            state: a state with at least one record.

        Raises:
            KeyError: the record has other metrics of the same loader, and no record has this one.

        Example:
            >>> import fnloop as fl, torch
            >>> from fnloop.testing import toy, toy_loss
            >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=())
            >>> Monitored("mine", "train/loss").check(state)
        """
        check_monitored(self.owner, self.key, state)


def check_monitored(owner: str, key: str, state: State) -> bool:
    """Return whether the newest record has a metric.

    Args:
        owner: the name of the hook, for messages.
        key: the metric.
        state: a state whose newest boundary added a record.

    Raises:
        KeyError: the record has other metrics of the same loader, and no record has this one, nor
            does a hook say that it adds it. The message lists those of the newest record.
    """
    metrics: Mapping[str, float] = state.history[-1].metrics
    if key in metrics:
        return True
    if state.run is not None and key in state.run.reported:
        return False
    loader = key.partition("/")[0]
    if any(name.startswith(f"{loader}/") for name in metrics) and key not in state.history:
        hint = _suggestion(key, metrics)
        if (
            loader not in Record.TRAINED
            and f"{loader}/loss" not in metrics
            and key.endswith("/loss")
        ):
            hint = (
                ". The loss function returned (None, aux) in this evaluation: watch another "
                "metric, or return a loss"
            )
        raise KeyError(
            f"{owner}: there is no metric {key!r}; there are: {', '.join(metrics)}{hint}"
        )
    return False


def _suggestion(key: str, metrics: Collection[str]) -> str:
    """Return the question for the nearest metric, or how to get this one if it is of an average."""
    loader, name, rest = (*key.split("/", 2), "", "")[:3]
    own = f"{loader}/"
    alike = [each.removeprefix(own) for each in metrics if each.startswith(own)]
    near = suggestion(key.removeprefix(own), alike, of=own)
    beside = f"{loader}/{rest}"
    if beside not in metrics or near not in ("", suggestion(key, [beside], 0)):
        return near  # there is an average, and its name is misspelled
    return (
        f'. An average reports it beside "{beside}" if the pipeline has ema(name="{name}"), '
        "evaluated beside the model"
    )


def _suggest_loader(key: str, names: Iterable[str]) -> str:
    """Return the question for the names of loaders that a metric has, or for the nearest name."""
    whole = [name for name in names if name.partition("/")[2] == key]
    evaluated = [name for name in whole if not name.startswith(("train/", "recent/"))]
    near = (evaluated or whole)[:1]
    return f". Did you mean {near[0]!r}?" if near else suggestion(key, names)
