"""The history of a run: one record per report, appended and never changed.

A report is made at every evaluation and at every end of an epoch. A history that somebody keeps never changes, and two
continuations of one are independent.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, overload

import attrs

__all__ = ["History", "Record", "better"]


def better(value: float, than: float, mode: str) -> bool:
    """Say whether a value is strictly better; NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min"), better(math.inf, math.nan, "min")
        (True, False, True)
    """
    if mode not in ("min", "max"):
        raise ValueError(f'mode expects "min" (lower is better) or "max" (higher is better); got {mode!r}')
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

    def _table(self) -> list[list[str]]:
        names = self.keys()
        rows = [["epoch", "step", *names, "seconds"]]
        for r in self.records:
            values = (f"{r.metrics[name]:.5g}" if name in r.metrics else "" for name in names)
            rows.append([str(r.epoch), str(r.step), *values, f"{r.seconds:.1f}"])
        if len(rows) > 41:
            rows[21:-20] = [["…"] * len(rows[0])]
        return rows

    def __repr__(self) -> str:
        if not self.records:
            return "History()"
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)

    def _repr_html_(self) -> str:
        if not self.records:
            return "<code>History()</code>"
        head, *body = ([html.escape(cell) for cell in row] for row in self._table())
        cells = ["<tr>" + "".join(f"<th>{c}</th>" for c in head) + "</tr>"]
        cells += ["<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in body]
        return f"<table>{''.join(cells)}</table>"

    def plot(self, *, mode: Mapping[str, str] | str | None = None) -> Any:
        """Draw every metric over steps, one axis per metric, one line per loader, the best point marked.

        Args:
            mode: "min" or "max", or a mapping from metrics ("accuracy") to one of them. By default a metric whose name
                contains "acc", "f1", "auc", "precision" or "recall" is better when higher.

        Returns:
            A matplotlib Figure; ``figure.savefig("history.png")`` writes it.

        Raises:
            ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
            ValueError: there is nothing to draw.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("History.plot needs matplotlib: pip install 'fnloop[plot]'") from error
        if not self.records:
            raise ValueError("there is nothing to plot: the history is empty")
        groups: dict[str, list[str]] = {}
        for key in self.keys():
            groups.setdefault(key.split("/", 1)[-1], []).append(key)
        columns = min(math.ceil(math.sqrt(len(groups))), 3)
        rows = -(-len(groups) // columns)
        figure = Figure(figsize=(4.2 * columns, 3.0 * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (metric, keys) in zip(axes, groups.items(), strict=False):
            _draw(axis, metric, {key: self.having(key) for key in keys}, _mode_of(metric, keys, mode))
        for axis in axes[len(groups) :]:
            axis.set_visible(False)
        return figure


def _mode_of(metric: str, keys: Iterable[str], mode: Mapping[str, str] | str | None) -> str:
    """Say whether lower or higher values of a metric are better: as it is told, or by the metric's name."""
    if isinstance(mode, Mapping):
        mode = next((mode[name] for name in (*keys, metric) if name in mode), None)
    if mode is None:
        higher = any(word in metric.lower() for word in ("acc", "f1", "auc", "auroc", "precision", "recall"))
        mode = "max" if higher else "min"
    better(0.0, 0.0, mode)  # checks it
    return mode


def _draw(axis: Any, metric: str, curves: Mapping[str, tuple[Record, ...]], mode: str) -> None:
    for key, records in curves.items():
        steps, values = [r.step for r in records], [r.metrics[key] for r in records]
        (line,) = axis.plot(steps, values, marker=".", markersize=5, linewidth=1.5, label=key.rsplit("/", 1)[0])
        if not key.startswith("train/"):
            best = History(records).best_record(key, mode)
            label = f"best {best.metrics[key]:.4g}"
            axis.plot(
                best.step,
                best.metrics[key],
                "o",
                markersize=9,
                fillstyle="none",
                color=line.get_color(),
                label=label,
            )
    axis.set_title(metric)
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
