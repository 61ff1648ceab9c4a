"""Metrics: made for a batch, combined over batches, windows and processes, computed once.

Values stay on the device until a report is read: :func:`read` fetches all of them in one transfer.
``combine`` is pure. What adds to running metrics in place is in :mod:`fnloop._core.running`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._core.serialize import Pending
from fnloop._core.torchmetrics import COLLECTION_HINT
from fnloop._core.types import Metric, values_of
from fnloop._display.checks import describe, scalar

__all__ = [
    "BUILTIN_METRICS",
    "FIELDS",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Number",
    "Sum",
    "combine",
    "mean_of",
    "read",
    "to_accumulator_dtype",
    "to_host",
    "weighted",
]

Number = Any  # a float, or a scalar tensor


def to_accumulator_dtype(value: Number) -> Number:
    """Return a copy to sum in, without a graph: float64 on devices that have it."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return (value.detach() if value.requires_grad else value).to(dtype, copy=True)


_MINUS_ZERO = torch.tensor(-0.0, dtype=torch.float64, device="cpu")  # x + -0.0 is x, for every x


def weighted(value: Tensor, weight: int | Tensor) -> Tensor:
    """Return a mean × the number of its items, without a graph, in a dtype to sum in."""
    if value.is_cpu and value.dtype is torch.float32 and type(weight) is int:
        value = value.detach() if value.requires_grad else value
        return torch.add(_MINUS_ZERO, value, alpha=weight)  # the same in one call in place of two
    return to_accumulator_dtype(value) * weight


@attrs.frozen(eq=False)
class Mean:
    """A weighted mean: ``total / weight``, exact over batches of any size.

    Args:
        total: the sum of value × weight, a float or a scalar tensor.
        weight: the sum of weights, a number or a scalar tensor.

    Raises:
        TypeError: one of them is something else, such as a vector.

    Example:
        >>> Mean(6.0, 2).combine(Mean(2.0, 2)).compute()
        2.0
    """

    total: Number
    weight: Number

    def __attrs_post_init__(self) -> None:
        # A mean is made in every update: first what costs next to nothing.
        if self.weight.__class__ is not int:
            scalar("Mean", "weight", self.weight)
        if not isinstance(self.total, Tensor) or self.total.ndim:
            scalar("Mean", "total", self.total)

    def combine(self, other: Mean) -> Mean:
        """Return the mean over the items of both.

        Raises:
            TypeError: the other is not a Mean.
        """
        _check_kind(self, other)
        return Mean(self.total + other.total, self.weight + other.weight)

    def compute(self) -> float:
        """Return the mean; NaN if the weights sum to 0.

        Raises:
            ValueError: a weight was NaN, infinite or negative.
        """
        total, weight = float(self.total), float(self.weight)
        if not 0 <= weight < math.inf:
            raise ValueError(
                "the weights of a mean are numbers of items, finite and at least 0; their sum is "
                f'{weight:g}. A loss function gives them in aux["weight"]: one of them was NaN, '
                "infinite or negative, and counted as 0 in the gradients"
            )
        return total / weight if weight else math.nan

    def update_(self, other: Mean) -> Mean:
        """Combine in place, into the tensor of this one, which must not be shared."""
        if isinstance(self.total, Tensor):
            return mean_of(self.total.add_(other.total), self.weight + other.weight)
        return self.combine(other)

    def to_accumulator(self) -> Mean:
        """Return a copy whose tensors are not shared, in a dtype wide enough to sum in."""
        return Mean(to_accumulator_dtype(self.total), to_accumulator_dtype(self.weight))


_set_total, _set_weight = Mean.total.__set__, Mean.weight.__set__  # type: ignore[attr-defined]


def mean_of(total: Number, weight: Number) -> Mean:
    """Return a mean of numbers that were checked already: that takes half the time."""
    made = object.__new__(Mean)
    _set_total(made, total)
    _set_weight(made, weight)
    return made


def _check_kind(mine: object, other: object) -> None:
    if not isinstance(other, type(mine)):
        name = type(mine).__name__
        raise TypeError(f"{name}.combine expects other as a {name}; got {describe(other)}")


def _choose(
    choose: Callable[[float, float], float],
    choose_tensors: Callable[[Tensor, Tensor], Tensor],
    a: Number,
    b: Number,
) -> Number:
    """Return one of two numbers; NaN if one of them is."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        device = (a if isinstance(a, Tensor) else b).device
        return choose_tensors(torch.as_tensor(a, device=device), torch.as_tensor(b, device=device))
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


@attrs.frozen(eq=False)
class _Value:
    value: Number

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.value, Tensor) or self.value.ndim:
            scalar(type(self).__name__, "value", self.value)

    def compute(self) -> float:
        """Return the value."""
        return float(self.value)


@attrs.frozen(eq=False)
class Sum(_Value):
    """A sum.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is something else, such as a vector.

    Example:
        >>> Sum(3).combine(Sum(4)).compute()
        7.0
    """

    def combine(self, other: Sum) -> Sum:
        """Return the sum of both.

        Raises:
            TypeError: the other is not a Sum.
        """
        _check_kind(self, other)
        return Sum(self.value + other.value)

    def update_(self, other: Sum) -> Sum:
        """Combine in place, into the tensor of this one, which must not be shared."""
        if isinstance(self.value, Tensor):
            return Sum(self.value.add_(other.value))
        return self.combine(other)

    def to_accumulator(self) -> Sum:
        """Return a copy whose tensor is not shared, in a dtype wide enough to sum in."""
        return Sum(to_accumulator_dtype(self.value))


@attrs.frozen(eq=False)
class Min(_Value):
    """The smallest value; NaN if one of them is NaN.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is something else, such as a vector.

    Example:
        >>> Min(3).combine(Min(4)).compute()
        3.0
    """

    def combine(self, other: Min) -> Min:
        """Return the smaller of both.

        Raises:
            TypeError: the other is not a Min.
        """
        _check_kind(self, other)
        return Min(_choose(min, torch.minimum, self.value, other.value))


@attrs.frozen(eq=False)
class Max(_Value):
    """The largest value; NaN if one of them is NaN.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is something else, such as a vector.

    Example:
        >>> Max(3).combine(Max(4)).compute()
        4.0
    """

    def combine(self, other: Max) -> Max:
        """Return the larger of both.

        Raises:
            TypeError: the other is not a Max.
        """
        _check_kind(self, other)
        return Max(_choose(max, torch.maximum, self.value, other.value))


@attrs.frozen(eq=False)
class Last(_Value):
    """The newest value.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is something else, such as a vector.

    Example:
        >>> Last(3).combine(Last(4)).compute()
        4.0
    """

    def combine(self, other: Last) -> Last:
        """Return the other.

        Raises:
            TypeError: the other is not a Last.
        """
        _check_kind(self, other)
        return other


FIELDS = {Mean: ("total", "weight"), **dict.fromkeys((Sum, Min, Max, Last), ("value",))}
BUILTIN_METRICS = {f"fnloop.{metric.__name__}": metric for metric in (Mean, Sum, Min, Max, Last)}


def combine(a: Mapping[str, Metric], b: Mapping[str, Metric]) -> dict[str, Metric]:
    """Combine the metrics of two parts, by name. Neither is changed."""
    __tracebackhide__ = True
    merged = dict(a)
    for name, metric in b.items():
        merged[name] = a[name].combine(metric) if name in a else metric
    return merged


def read(metrics: Mapping[str, Metric], vectors: bool = False) -> dict[str, float]:
    """Compute every metric, with one transfer from the device.

    A metric that is still :class:`Pending` is skipped: no batch of this run has shown its class.

    Args:
        metrics: name to metric.
        vectors: whether a metric may compute something else than a number, which a history could
            not hold.

    Returns:
        Name to float.

    Raises:
        TypeError: a metric does not compute a number.
        ValueError: two metrics report the same name.

    Example:
        >>> read({"loss": Mean(torch.tensor(6.0), 2), "n": Sum(torch.tensor(2))})
        {'loss': 3.0, 'n': 2.0}
    """
    __tracebackhide__ = True
    values: dict[str, float] = {}
    cells = _cells_of(metrics)
    if len(cells) > 1:  # otherwise its metric reads it
        metrics = _with_numbers(metrics, cells)
    for name, metric in metrics.items():
        try:
            found = {} if isinstance(metric, Pending) else values_of(name, metric)
            for part, value in found.items():
                if part in values:
                    collected = any(getattr(m, "key", None) for m in metrics.values())
                    hint = COLLECTION_HINT if collected else ""
                    raise ValueError(f"two metrics report {part!r}: rename one{hint}")
                if not vectors and value.__class__ is not float:
                    _check_number(part, value)
                values[part] = value
        except Exception as error:
            error.add_note(f"while in the metric {name!r}")
            raise
    return values


def _check_number(name: str, value: object) -> None:
    """Raise TypeError unless a metric has computed one number, without a read from the device."""
    __tracebackhide__ = True
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
        return
    try:
        float(value)  # type: ignore[arg-type]  # such as a number of numpy's
    except (TypeError, ValueError, RuntimeError) as error:
        shape = getattr(value, "shape", None)
        found = describe(value) if shape is None else f"shape {tuple(shape)}"
        raise TypeError(
            f"a metric of a run such as {name!r} is one number, but it computes {found}. For what "
            "a number cannot say, inspect(fn) gives fn the outputs of an evaluation"
        ) from error


def to_host(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return metrics with the tensors of the built-in ones as numbers, fetched in one transfer."""
    return _with_numbers(metrics, _cells_of(metrics))


Cell = tuple[str, str, Tensor]  # the name of a metric, one of its fields, and the value


def _cells_of(metrics: Mapping[str, Metric]) -> list[Cell]:
    """Return the tensors of the built-in metrics."""
    cells: list[Cell] = []
    for name, metric in metrics.items():
        for field in FIELDS.get(metric.__class__, ()):
            if isinstance(value := getattr(metric, field), Tensor):
                cells.append((name, field, value))
    return cells


def _with_numbers(metrics: Mapping[str, Metric], cells: list[Cell]) -> dict[str, Metric]:
    """Return metrics with numbers in place of tensors, fetched in one transfer."""
    found = dict(metrics)
    if cells:
        for (name, field, _), number in zip(cells, _read([v for _, _, v in cells]), strict=True):
            kind = type(metric := found[name])
            values = [number if part == field else getattr(metric, part) for part in FIELDS[kind]]
            found[name] = kind(*values)
    return found


def _read(values: list[Tensor]) -> list[float]:
    """Return scalars as numbers: the one host read of a report."""
    if len(values) == 1:
        return [float(values[0])]
    device = values[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([value.to(device, dtype) for value in values]).tolist()
