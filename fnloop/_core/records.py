"""Records: the metrics at one point of a run, and which of their values are better."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NoReturn

import attrs

from fnloop._display import checks, reprs
from fnloop._display.reprs import format_metric

_FLOAT = {float}
MODES = ("min", "max")  # lower is better, or higher
# What a record has besides metrics, under the same names in files, tables and checkpoints.
_OWN = {"epoch", "step", "seconds", "closing", "items"}


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
    for name in metrics:
        if type(name) is not str or not name:
            checks.text("Record", "metrics", name, "names of metrics")
        if name in _OWN:
            raise ValueError(
                f"a record has {name!r} besides its metrics: choose another name for the metric, "
                f'such as "valid/{name}"'
            )
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


def _items(value: object) -> float | None:
    if value is None or (type(value) is int and value >= 0):
        return value
    if not (isinstance(value, float) and 0 <= value < math.inf):
        value = checks.number("Record", "items", value, least=0)
    return int(value) if value.is_integer() else float(value)


def _bits(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the metrics as they are compared: NaN equals NaN, and 0.0 differs from -0.0."""
    return {name: value.hex() for name, value in metrics.items()}


@attrs.frozen
class Record:
    """The metrics at one point of a run.

    Args:
        epoch: epochs completed. Tables, logs, bars and the labels of figures show the number of the
            epoch that it is of, from 1: the same at the end of an epoch, one more within one.
        step: updates applied.
        metrics: name to value: "train/loss", "train/grad_norm", "valid/loss", ...
        seconds: time spent in runs so far; not compared.
        closing: whether it was made only because the run ended here: between two records, or after
            that of an epoch, for an evaluation by ``at_end()``. A run that continues makes its
            records as if this one did not exist, and functions of the history ignore it.
        items: the items of all updates that were applied so far, in all processes: samples, or what
            the loss function counts in ``aux["weight"]``, such as tokens. Each turn of
            ``alternate`` counts. None: unknown, as in a history that an older version began.

    Attributes:
        TRAINED, COSTS: what the names of metrics begin with that are not of an evaluated loader:
            those of training, and times and the like.

    Example:
        >>> Record(1, 10, {"train/loss": 0.5}).metrics["train/loss"]
        0.5
    """

    TRAINED: ClassVar[tuple[str, ...]] = ("train", "recent")
    COSTS: ClassVar[tuple[str, ...]] = ("time", "throughput", "memory")

    epoch: int = attrs.field(converter=_count("epoch"))
    step: int = attrs.field(converter=_count("step"))
    metrics: Mapping[str, float] = attrs.field(eq=_bits, converter=_floats)
    seconds: float = attrs.field(default=0.0, eq=False, converter=_seconds)
    closing: bool = False
    items: float | None = attrs.field(default=None, converter=_items)

    __hash__ = None  # type: ignore[assignment]

    def number_of_epoch(self, ended: int, at: int) -> int:
        """Return the number, from 1, of the epoch that it is of; 0 before the first update.

        Args:
            ended: the epochs completed at the newest record before it that was made at an epoch's
                end.
            at: the updates applied there. Each end of an epoch has one record, the first that
                counts it.

        Example:
            >>> Record(3, 30, {}).number_of_epoch(2, 20), Record(3, 35, {}).number_of_epoch(3, 30)
            (3, 4)
        """
        return self.epoch + (self.epoch <= ended and self.step > at)

    def _repr_html_(self) -> str:
        shown: dict[str, object] = {"epoch": self.epoch, "step": self.step}
        shown |= {name: format_metric(name, value) for name, value in self.metrics.items()}
        shown["seconds"] = f"{self.seconds:.1f}"
        if self.closing:
            shown["closing"] = True
        if self.items is not None:
            shown["items"] = f"{self.items:,}"
        return reprs.facts("Record", shown)


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


def loaders_in(names: Iterable[str]) -> set[str]:
    """Return the first parts of the names of metrics, such as their loaders.

    Example:
        >>> sorted(loaders_in(["valid/ema/loss", "train/loss", "loss"]))
        ['train', 'valid']
    """
    return {name.partition("/")[0] for name in names if "/" in name}


def better(value: float, than: float, mode: str) -> bool:
    """Return whether a value is strictly better than another. NaN is worse than anything.

    Args:
        value, than: the two.
        mode: "min" or "max".

    Returns:
        Whether the first is better. Equal values are not.

    Raises:
        ValueError: the mode is something else.

    Example:
        >>> better(1.0, 2.0, "min"), better(math.nan, math.inf, "min")
        (True, False)
    """
    if mode not in MODES:  # this is called for each record
        checks.choice("better", "mode", mode, MODES)
    if math.isnan(value):
        return False
    return math.isnan(than) or (value < than if mode == "min" else value > than)
