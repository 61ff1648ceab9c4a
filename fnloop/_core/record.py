"""Records: what was known at one report of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

import attrs

from fnloop._core.monitor import better
from fnloop._display import checks, html

__all__ = ["Record", "best_record", "metric_names", "number_of_epoch"]


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
        shown |= {name: html.format_number(value) for name, value in self.metrics.items()}
        shown["seconds"] = f"{self.seconds:.1f}"
        if self.closing:
            shown["closing"] = True
        return html.facts("Record", shown)


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
