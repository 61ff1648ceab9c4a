"""Metrics as monoids: made for a batch, combined over batches, windows and processes, computed once.

Values stay on the device until somebody reads a report: :func:`read` fetches all of them in one transfer.
``combine`` is pure. The running reduction of an epoch, which only the newest state owns, uses :func:`absorb`, which
adds into the tensors it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._core.serialize import Pending, materialize
from fnloop._core.types import Metric
from fnloop._display.checks import described, scalar

__all__ = [
    "BUILTIN_METRICS",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Sum",
    "combine",
    "read",
    "to_accumulator_dtype",
    "to_host",
    "update_",
    "update_loss_",
]

Number = Any  # a float or a scalar tensor


def to_accumulator_dtype(value: Number) -> Number:
    """Return a copy to sum in, without a graph: float64 where the device has it."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(
        torch.float32 if value.device.type == "mps" else torch.float64, copy=True
    )


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
        if self.total.__class__ is not Tensor or self.total.ndim:
            scalar("Mean", "total", self.total)
        if self.weight.__class__ is not int:
            scalar("Mean", "weight", self.weight)

    def combine(self, other: Mean) -> Mean:
        """Return the mean of both, each with its weight.

        Raises:
            TypeError: the other is of another kind.
        """
        _check_kind(self, other)
        return Mean(self.total + other.total, self.weight + other.weight)

    def compute(self) -> float:
        """Return the mean; NaN if nothing was weighed.

        Raises:
            ValueError: a weight was NaN, infinite or negative.
        """
        total, weight = float(self.total), float(self.weight)
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"the weights of a mean are numbers of items, finite and at least 0; their sum is {weight:g}. A loss function "
                'gives them in aux["weight"]: one of them was NaN, infinite or negative, and counted as 0 in the gradients'
            )
        return total / weight if weight else math.nan

    def absorb(self, other: Mean) -> Mean:
        """Combine into the tensor of this one, which must be this one's own."""
        if isinstance(self.total, Tensor):
            return Mean(self.total.add_(other.total), self.weight + other.weight)
        return self.combine(other)

    def own(self) -> Mean:
        """Return one whose total is its own and wide enough to sum in."""
        return Mean(to_accumulator_dtype(self.total), to_accumulator_dtype(self.weight))


def _check_kind(mine: Any, other: Any) -> None:
    if not isinstance(other, type(mine)):
        name = type(mine).__name__
        raise TypeError(f"{name}.combine expects other as a {name}; got {described(other)}")


def _of_numbers(choose: Callable, choose_tensors: Callable, a: Number, b: Number) -> Number:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        like = a if isinstance(a, Tensor) else b
        return choose_tensors(
            torch.as_tensor(a, device=like.device), torch.as_tensor(b, device=like.device)
        )
    return math.nan if math.isnan(a) or math.isnan(b) else choose(a, b)


@attrs.frozen(eq=False)
class _Value:
    value: Number

    def __attrs_post_init__(self) -> None:
        if self.value.__class__ is not Tensor or self.value.ndim:
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
            TypeError: the other is of another kind.
        """
        _check_kind(self, other)
        return Sum(self.value + other.value)

    def absorb(self, other: Sum) -> Sum:
        """Combine into the tensor of this one, which must be this one's own."""
        return (
            Sum(self.value.add_(other.value))
            if isinstance(self.value, Tensor)
            else self.combine(other)
        )

    def own(self) -> Sum:
        """Return one whose value is its own and wide enough to sum in."""
        return Sum(to_accumulator_dtype(self.value))


@attrs.frozen(eq=False)
class Min(_Value):
    """The smallest; NaN if there is one.

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
            TypeError: the other is of another kind.
        """
        _check_kind(self, other)
        return Min(_of_numbers(min, torch.minimum, self.value, other.value))


@attrs.frozen(eq=False)
class Max(_Value):
    """The largest; NaN if there is one.

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
            TypeError: the other is of another kind.
        """
        _check_kind(self, other)
        return Max(_of_numbers(max, torch.maximum, self.value, other.value))


@attrs.frozen(eq=False)
class Last(_Value):
    """The newest.

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
            TypeError: the other is of another kind.
        """
        _check_kind(self, other)
        return other


BUILTIN_METRICS = {f"fnloop.{monoid.__name__}": monoid for monoid in (Mean, Sum, Min, Max, Last)}


def update_(running: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Combine ``new`` into ``running``, in place where a metric can; ``running`` must not be used afterwards."""
    __tracebackhide__ = True
    merged = dict(running)
    for name, metric in new.items():
        so_far = merged.get(name)
        if isinstance(
            so_far, Pending
        ):  # of a checkpoint: now there is one of its kind to read it into
            so_far = materialize(metric, so_far)
        if so_far is None:
            merged[name] = metric.own() if hasattr(metric, "own") else metric
        else:
            merged[name] = (
                so_far.absorb(metric) if hasattr(so_far, "absorb") else so_far.combine(metric)
            )
    return merged


def combine(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Combine metrics of two parts, by name; neither is changed."""
    __tracebackhide__ = True
    merged = dict(a)
    for name, metric in b.items():
        merged[name] = a[name].combine(metric) if name in a else metric
    return merged


def update_loss_(running: Mean | None, loss: Tensor, weight: int | Tensor) -> Mean:
    """Add a batch's mean loss to a running mean, with one kernel where the weight is a number."""
    if isinstance(weight, Tensor):
        given: Any = to_accumulator_dtype(weight)
        weight = torch.where(
            given >= 0, given, math.nan
        )  # a negative one could not be seen in the sum
    if running is None:
        return Mean(to_accumulator_dtype(loss).mul_(weight), weight)
    if isinstance(weight, Tensor):
        return Mean(
            running.total.add_(to_accumulator_dtype(loss).mul_(weight)), running.weight + weight
        )
    return Mean(running.total.add_(loss, alpha=weight), running.weight + weight)


def read(metrics: Mapping[str, Metric], vectors: bool = False) -> dict[str, float]:
    """Compute every metric, fetching from the device once.

    Args:
        metrics: name to metric.
        vectors: whether a metric may compute something else than a number, which a history could not hold.

    Returns:
        Name to float.

    Raises:
        TypeError: a metric is not a number.

    Example:
        >>> read({"loss": Mean(torch.tensor(6.0), 2), "n": Sum(torch.tensor(2))})
        {'loss': 3.0, 'n': 2.0}
    """
    __tracebackhide__ = True
    values: dict[str, float] = {}
    for name, metric in to_host(metrics).items():
        if not isinstance(
            metric, Pending
        ):  # which was never met again in its epoch: what it was made from isn't known
            values[name] = value = metric.compute()
            if not (
                vectors
                or isinstance(value, int | float)
                or (isinstance(value, Tensor) and value.numel() == 1)
            ):
                try:
                    float(value)  # a number of numpy's, say
                except (TypeError, ValueError, RuntimeError) as error:
                    found = (
                        f"shape {tuple(value.shape)}"
                        if hasattr(value, "shape")
                        else described(value)
                    )
                    raise TypeError(
                        f"a metric of a run such as {name!r} is one number, but it computes {found}"
                    ) from error
    return values


def to_host(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with the numbers of ours on the host, fetched in one transfer."""
    found = dict(metrics)
    plain = {
        k: attrs.asdict(m, recurse=False) for k, m in found.items() if isinstance(m, Mean | _Value)
    }
    cells = [
        (k, field, v)
        for k, parts in plain.items()
        for field, v in parts.items()
        if isinstance(v, Tensor)
    ]
    if cells:
        home = cells[0][2].device
        dtype = torch.float32 if home.type == "mps" else torch.float64
        numbers = torch.stack(
            [v.detach().to(home, dtype) for _, _, v in cells]
        ).tolist()  # the one host read of a report
        for (name, field, _), number in zip(cells, numbers, strict=True):
            found[name] = attrs.evolve(found[name], **{field: number})
    return found
