"""The history of a run: one record per report, appended and never changed.

A report is made at every evaluation and at every end of an epoch. A history that somebody keeps never changes, and two
continuations of one are independent.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import attrs

from fnloop import _checks, _plot, _show

__all__ = ["History", "Record", "better", "check_plot", "table"]


def better(value: float, than: float, mode: str) -> bool:
    """Say whether a value is strictly better; NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min"), better(math.inf, math.nan, "min")
        (True, False, True)
    """
    if not isinstance(mode, str) or mode not in ("min", "max"):
        raise ValueError(f'mode expects "min" (lower is better) or "max" (higher is better); got {_checks.described(mode)}')
    if math.isnan(value):
        return False
    return math.isnan(than) or (value < than if mode == "min" else value > than)


class _Frozen(dict):
    """A dict that stays as it is made."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a record's metrics can't be changed: append another record")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Frozen, (dict(self),)


def _floats(metrics: Mapping[str, float]) -> Mapping[str, float]:
    return _Frozen({name: float(value) for name, value in metrics.items()})


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

    Example:
        >>> Record(1, 10, {"train/loss": 0.5}).metrics["train/loss"]
        0.5
    """

    epoch: int
    step: int
    metrics: Mapping[str, float] = attrs.field(eq=_to_the_bit, converter=_floats)
    seconds: float = attrs.field(default=0.0, eq=False)

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        counters = {"epoch": self.epoch, "step": self.step}
        metrics = {name: _show.number(value) for name, value in self.metrics.items()}
        return _show.facts("Record", {**counters, **metrics, "seconds": f"{self.seconds:.1f}"})


@attrs.frozen(repr=False)
class History:
    """Records in the order in which they were made.

    Args:
        records: the records so far.

    Example:
        >>> history = History().append(Record(1, 10, {"valid/loss": 0.5})).append(Record(2, 20, {"valid/loss": 0.25}))
        >>> history["valid/loss"], history.latest("valid/loss"), history.best("valid/loss"), history[-1].step
        ((0.5, 0.25), 0.25, 0.25, 20)
        >>> history
        epoch  step  valid/loss  seconds
            1    10         0.5      0.0
            2    20        0.25      0.0
    """

    records: tuple[Record, ...] = attrs.field(default=(), converter=tuple)

    __hash__ = None  # type: ignore[assignment]

    def append(self, record: Record) -> History:
        """Return a history with one more record; this one stays as it is."""
        return History((*self.records, record))

    def keys(self) -> tuple[str, ...]:
        """Return the names of all metrics, in the order of their first appearance."""
        return tuple(dict.fromkeys(name for record in self.records for name in record.metrics))

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
            return History(self.records[key])
        if isinstance(key, int):
            return self.records[key]
        return tuple(record.metrics[key] for record in self.having(key))

    def having(self, key: str) -> tuple[Record, ...]:
        """Return the records that have a metric.

        Raises:
            KeyError: there is none; the message lists the metrics that there are.
        """
        found = tuple(record for record in self.records if key in record.metrics)
        if not found:
            known = ", ".join(self.keys()) or "none: the history is empty"
            raise KeyError(f"no metric {key!r} in this history; there are: {known}")
        return found

    def latest(self, key: str) -> float:
        """Return the newest value of a metric."""
        return self.having(key)[-1].metrics[key]

    def best(self, key: str, mode: str = "min") -> float:
        """Return the best value of a metric; NaN only if there is nothing else."""
        return self.best_record(key, mode).metrics[key]

    def best_record(self, key: str, mode: str = "min") -> Record:
        """Return the record with the best value of a metric; of equals, the oldest."""
        winner, *rest = self.having(key)
        for record in rest:
            if better(record.metrics[key], winner.metrics[key], mode):
                winner = record
        better(0.0, 0.0, mode)  # a wrong mode is an error even with one record
        return winner

    def __len__(self) -> int:
        return len(self.records)

    def __contains__(self, key: object) -> bool:
        """Say whether some record has a metric of that name."""
        return key in self.keys() if isinstance(key, str) else key in self.records

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a list of flat dicts: epoch, step, seconds and the metrics."""
        return [{"epoch": r.epoch, "step": r.step, **r.metrics, "seconds": r.seconds} for r in self.records]

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
        return _show.table_text(table(self), fixed=2) if self.records else "History()"

    def _repr_html_(self) -> str:
        return _show.table(table(self)) if self.records else "<code>History()</code>"

    def plot(self, *, mode: Mapping[str, str] | str | None = None, x: str = "step") -> Any:
        """Draw every metric, one axis per metric, one line per loader, the best point of what was evaluated marked.

        Args:
            mode: "min" or "max", or a mapping from metrics ("accuracy") to one of them. By default a metric whose name
                contains "acc", "f1", "auc", "precision" or "recall" is better when higher.
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
        _plot.need("History.plot")
        groups: dict[str, list[str]] = {}
        for key in self.keys():
            groups.setdefault(key.split("/", 1)[-1], []).append(key)
        if not groups:
            raise ValueError(f"there is nothing to plot: the history {'has no metric' if self.records else 'is empty'}")
        labels = list(dict.fromkeys(key.split("/", 1)[0] for key in self.keys()))
        figure, axes = _plot.grid("History.plot", len(groups))
        places = {record.step: epoch for record, epoch in zip(self.records, _epochs(self.records), strict=True)}
        for axis, (metric, keys) in zip(axes, groups.items(), strict=True):
            wanted = _mode_of(metric, keys, mode)
            curves, marked = {}, {}
            for key in keys:
                label = key.split("/", 1)[0]
                at = lambda r, key=key: (places[r.step] if x == "epoch" else r.step, r.metrics[key])
                curves[label] = [at(record) for record in self.having(key)]
                if label != "train":
                    marked[label] = at(self.best_record(key, wanted))
            _plot.draw(axis, metric, x, curves, marked, labels)
        return figure


def table(history: History, most: int = 40) -> list[Sequence[str]]:
    """Return the cells of a table, its head first; the middle is left out where there are more than so many records."""
    names = history.keys()
    rows = [["epoch", "step", *names, "seconds"]]
    for r in history.records:
        values = (_show.number(r.metrics[name]) if name in r.metrics else "" for name in names)
        rows.append([str(r.epoch), str(r.step), *values, f"{r.seconds:.1f}"])
    return _show.elided(rows, most)


def check_plot(mode: Any, x: Any) -> None:
    """Raise ValueError unless these are arguments of :meth:`History.plot`."""
    if not isinstance(x, str) or x not in ("step", "epoch"):
        raise ValueError(f'x expects "step" or "epoch"; got {_checks.described(x)}')
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


def _mode_of(metric: str, keys: Iterable[str], mode: Mapping[str, str] | str | None) -> str:
    """Say whether lower or higher values of a metric are better: as it is told, or by the metric's name."""
    if isinstance(mode, Mapping):
        mode = next((mode[name] for name in (*keys, metric) if name in mode), None)
    if mode is None:
        higher = any(word in metric.lower() for word in ("acc", "f1", "auc", "auroc", "precision", "recall"))
        mode = "max" if higher else "min"
    return mode
