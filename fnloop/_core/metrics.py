"""Metrics: made for a batch, combined over batches, windows and processes, computed once."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from fnloop._backend.containers import to_device
from fnloop._backend.torch_compat import base_of
from fnloop._core.saved import Pending, kind_name, materialize
from fnloop._core.types import Aux, Batch, Metric, Output, collection_key, name_of, values_of
from fnloop._display.checks import describe, fields_of, function, metric_name, scalar

if TYPE_CHECKING:
    from torchmetrics import Metric as ForeignMetric
    from torchmetrics import MetricCollection

    Torchmetric = ForeignMetric | MetricCollection

# Values stay on the device until a report is read: `read` fetches all of them in one transfer.
# `combine` is pure. What adds to running metrics in place is in `running`.

Number = Any  # a float, or a scalar tensor


def to_accumulator_dtype(value: Number) -> Number:
    """Return a copy to sum in, without a graph: float64 on devices that have it."""
    if not isinstance(value, Tensor):
        return value
    dtype = torch.float32 if value.device.type == "mps" else torch.float64
    return (value.detach() if value.requires_grad else value).to(dtype, copy=True)


_MINUS_ZERO = torch.tensor(-0.0, dtype=torch.float64, device="cpu")  # x + -0.0 is x, for every x


def weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    """Return a mean × the number of its items, without a graph, in a dtype to sum in."""
    if value.is_cpu and value.dtype is torch.float32 and type(weight) is int:
        value = value.detach() if value.requires_grad else value
        return torch.add(_MINUS_ZERO, value, alpha=weight)  # the same in one call in place of two
    return to_accumulator_dtype(value) * weight


KINDS: dict[str, type[Reduced]] = {}  # by the names that checkpoints have for them


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


_REDUCE: dict[str, Callable[[Number, Number], Number]] = {
    "sum": operator.add,
    "min": functools.partial(_choose, min, torch.minimum),
    "max": functools.partial(_choose, max, torch.maximum),
    "last": lambda a, b: b,
}


class Reduced:
    """The base of the metrics whose fields are numbers, each reduced in one way.

    All that is done with a metric follows from ``reductions``: how parts are combined, summed in
    place, read in one transfer, exchanged as numbers and restored. A subclass with a ``compute`` of
    its own may hold tensors of any shape, such as a confusion matrix in a ``Sum``.

    Attributes:
        reductions: name of a field to how it is reduced: "sum", "min", "max" or "last".
        constants: names of other fields, which all parts have in common.
    """

    __slots__ = ()
    reductions: ClassVar[Mapping[str, str]] = {}
    constants: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        KINDS[kind_name(cls)] = cls

    def compute(self) -> Any:
        """Return the value: a number, or a mapping from names to numbers."""
        raise NotImplementedError

    def combine(self, other: Self) -> Self:
        """Return the metric of both parts. Neither is changed.

        Raises:
            TypeError: the other is of another kind.
        """
        if isinstance(other, NoLoss):
            return other.combine(self)
        if not isinstance(other, type(self)):
            name = type(self).__name__
            raise TypeError(f"{name}.combine expects other as a {name}; got {describe(other)}")
        return self._reduced(other, False)

    def update_(self, other: Self) -> Self:
        """Combine in place, into the tensors of this one, which must not be shared."""
        return self.combine(other) if isinstance(other, NoLoss) else self._reduced(other, True)

    def _reduced(self, other: Self, in_place: bool) -> Self:
        values = []
        for name, how in self.reductions.items():
            mine, its = getattr(self, name), getattr(other, name)
            if in_place and how == "sum" and isinstance(mine, Tensor):
                values.append(mine.add_(its))
            else:
                values.append(_REDUCE[how](mine, its))
        return type(self)(*values)

    def to_accumulator(self) -> Self:
        """Return a metric whose sums share no tensor, in a dtype wide enough to sum in."""
        values = fields_of(self, self.reductions).values()
        pairs = zip(values, self.reductions.values(), strict=True)
        return type(self)(*[to_accumulator_dtype(v) if how == "sum" else v for v, how in pairs])


@attrs.frozen(eq=False)
class Mean(Reduced):
    """A weighted mean: ``total / weight``, exact over batches of any size.

    As every metric, it is made for a batch, combined over batches and processes, and computed once.

    Args:
        total: the sum of value × weight, a float or a scalar tensor.
        weight: the sum of weights, a number or a scalar tensor.

    Raises:
        TypeError: one of them is not a scalar, but a vector, for example.

    Example:
        >>> Mean(6.0, 2).combine(Mean(2.0, 2)).compute()
        2.0
    """

    total: Number
    weight: Number

    reductions = {"total": "sum", "weight": "sum"}  # noqa: RUF012

    def __attrs_post_init__(self) -> None:
        # A mean is made in every update: first what costs next to nothing.
        if self.weight.__class__ is not int:
            scalar("Mean", "weight", self.weight)
        if not isinstance(self.total, Tensor) or self.total.ndim:
            _check_value(self, "total", Mean)

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

    def update_(self, other: Self) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Combine in place, into the tensor of this one, which must not be shared."""
        if type(self) is not Mean or not isinstance(self.total, Tensor) or type(other) is NoLoss:
            return super().update_(other)
        # As the base does it, in half the time: it is in every update.
        return cast(Self, mean_of(self.total.add_(other.total), self.weight + other.weight))


_set_total, _set_weight = Mean.total.__set__, Mean.weight.__set__  # type: ignore[attr-defined]


def mean_of(total: Number, weight: Number) -> Mean:
    """Return a mean of numbers that were checked already: that takes half the time."""
    made = object.__new__(Mean)
    _set_total(made, total)
    _set_weight(made, weight)
    return made


def _check_value(metric: Reduced, name: str, base: type[Reduced]) -> None:
    """Raise TypeError unless a value is a scalar, or a class computes something else of it."""
    if type(metric).compute is base.compute:
        scalar(type(metric).__name__, name, getattr(metric, name))


_NUMBERS = (int, float)


@attrs.frozen(eq=False)
class _Value(Reduced):
    value: Number

    def __attrs_post_init__(self) -> None:
        value = self.value
        if value.__class__ in _NUMBERS or (isinstance(value, Tensor) and not value.ndim):
            return
        _check_value(self, "value", _Value)

    def compute(self) -> float:
        """Return the value."""
        return float(self.value)


@attrs.frozen(eq=False)
class Sum(_Value):
    """A sum.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is not a scalar, but a vector, for example.

    Example:
        >>> Sum(3).combine(Sum(4)).compute()
        7.0

        Your own metric is a subclass. With a ``compute`` of its own, it may hold a tensor of
        any shape:

        >>> class Recall(Sum):  # of [hits, positives] by class, shape (classes, 2)
        ...     def compute(self):
        ...         return {str(i): (a / b).item() for i, (a, b) in enumerate(self.value)}
        >>> parts = Recall(torch.tensor([[1, 2], [3, 3]])), Recall(torch.tensor([[0, 2], [1, 1]]))
        >>> parts[0].combine(parts[1]).compute()
        {'0': 0.25, '1': 1.0}
    """

    reductions = {"value": "sum"}  # noqa: RUF012


@attrs.frozen(eq=False)
class Min(_Value):
    """The smallest value; NaN if one of them is NaN.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is not a scalar, but a vector, for example.

    Example:
        >>> Min(3).combine(Min(4)).compute()
        3.0
    """

    reductions = {"value": "min"}  # noqa: RUF012


@attrs.frozen(eq=False)
class Max(_Value):
    """The largest value; NaN if one of them is NaN.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is not a scalar, but a vector, for example.

    Example:
        >>> Max(3).combine(Max(4)).compute()
        4.0
    """

    reductions = {"value": "max"}  # noqa: RUF012


@attrs.frozen(eq=False)
class Last(_Value):
    """The newest value.

    Args:
        value: a number or a scalar tensor.

    Raises:
        TypeError: it is not a scalar, but a vector, for example.

    Example:
        >>> Last(3).combine(Last(4)).compute()
        4.0
    """

    reductions = {"value": "last"}  # noqa: RUF012


@attrs.frozen(eq=False)
class NoLoss(Reduced):
    """What stands for the loss of an evaluation that has none. It is in no report."""

    def compute(self) -> float:
        """Return no number: of several values, which a mapping holds, there are none."""
        return cast(float, {})

    def combine(self, other: Reduced) -> Self:
        """Return this, if the other part has no loss either, or no item.

        Raises:
            ValueError: the other part has a loss.
        """
        if isinstance(other, NoLoss) or (isinstance(other, Mean) and _is_zero(other.weight)):
            return self
        raise ValueError(
            "the loss function returned a loss for some batches of an evaluation and None for "
            "others, which have no common mean: return a loss for every batch, or (None, aux) for "
            "every batch"
        )

    def update_(self, other: Reduced) -> Self:
        """As ``combine``."""
        return self.combine(other)


def _is_zero(weight: Number) -> bool:
    return weight.__class__ is int and not weight


# --- what a metric of the user's may lack, which is not one of these


def accumulator_of(metric: Any) -> Metric:
    """Return what further parts are combined into, in place where the metric can."""
    __tracebackhide__ = True
    return metric.to_accumulator() if isinstance(metric, Reduced | TorchMetric) else metric


def sent(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as another process, or a file, gets them: on the host."""
    kinds = Elapsed | Peak | TorchMetric
    return {name: m.to_cpu() if isinstance(m, kinds) else m for name, m in metrics.items()}


def restored(saved: object, device: torch.device) -> object:
    """Return the metric that a checkpoint holds, if its class is known by its name.

    Others stay :class:`Pending` until a batch brings one of their kind.

    Raises:
        TypeError: the checkpoint is damaged.
    """
    if not isinstance(saved, Pending):
        raise TypeError(f"a metric is {saved!r}")
    kind = KINDS.get(saved.kind)
    if kind is None:
        return saved
    parts = dict(saved.parts)
    try:
        values = [_on_device(parts.pop(k), how, device) for k, how in kind.reductions.items()]
        return kind(*values, **{name: parts[name] for name in kind.constants})
    except (KeyError, TypeError):
        raise TypeError(f"a {saved.kind} holds {describe(dict(saved.parts))}") from None


def _on_device(value: object, how: str, device: torch.device) -> object:
    """Return a field of a metric. Several processes merge it on the host; sums belong elsewhere."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError
    if isinstance(value, Tensor):
        return value.to(device)
    if how != "sum" or isinstance(value, int):
        return value
    return to_accumulator_dtype(torch.tensor(value, dtype=torch.float64, device=device))


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
                    hint = COLLECTION_HINT if any(map(collection_key, metrics.values())) else ""
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
        has_shape = isinstance(value, Tensor | np.ndarray)
        found = f"shape {tuple(value.shape)}" if has_shape else describe(value)
        raise TypeError(
            f"a metric of a run such as {name!r} is one number, but it computes {found}. For what "
            "a number cannot say, inspect(fn) gives fn the outputs of an evaluation"
        ) from error


def to_host(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return metrics with the tensors of the built-in ones as numbers, fetched in one transfer."""
    return _with_numbers(metrics, _cells_of(metrics))


Cell = tuple[str, str, Tensor]  # the name of a metric, one of its fields, and the value


def _cells_of(metrics: Mapping[str, Metric]) -> list[Cell]:
    """Return the tensors of the metrics whose fields are known."""
    cells: list[Cell] = []
    for name, metric in metrics.items():
        known = metric.reductions if isinstance(metric, Reduced | Elapsed) else ()
        values = fields_of(metric, known).items()
        cells += [(name, field, value) for field, value in values if isinstance(value, Tensor)]
    return cells


def _with_numbers(metrics: Mapping[str, Metric], cells: list[Cell]) -> dict[str, Metric]:
    """Return metrics with numbers in place of tensors, fetched in one transfer."""
    found = dict(metrics)
    if cells:
        for (name, field, _), value in zip(cells, _read([v for _, _, v in cells]), strict=True):
            found[name] = attrs.evolve(cast(Any, found[name]), **{field: value})
    return found


def _read(values: list[Tensor]) -> list[float | Tensor]:
    """Return scalars as numbers, and others on the host: the one host read of a report."""
    device = values[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    flat = torch.cat([value.reshape(-1).to(device, dtype) for value in values]).tolist()
    found: list[float | Tensor] = []
    for value in values:
        own, flat = flat[: value.numel()], flat[value.numel() :]
        found.append(torch.tensor(own, dtype=dtype).reshape(value.shape) if value.ndim else own[0])
    return found


# --------------------------------------------------------------------------------------------------
# The running metrics of an epoch, and of the interval since the last record.
#
# They are added to in place, because only the newest state owns their tensors. From the second
# update of an interval on, a mean of the epoch and that of the interval have one tensor of two
# elements, their totals: one kernel adds to both.

RECENT = "recent/"  # begins the names of the metrics of the interval
_RECENT_LOSS = RECENT + "loss"


# What makes a metric of several models of its name, their values in one vector, and the weight.
OfModels = Callable[[str, Tensor, "float | Tensor"], "Metric"]


def add_output_(
    running: Any, out: Output, recent: bool, per_model: OfModels | None = None
) -> dict[str, Metric]:
    """Combine the loss and the metrics of an update into ``running``.

    Args:
        running: the running metrics, which must not be used afterwards.
        out: the output of a step that was not skipped.
        recent: whether to combine them into those of the interval too.
        per_model: makes the metric of several models, each of which has a loss in ``out.loss``.
    """
    __tracebackhide__ = True
    loss, update = running.get("loss"), update_both_ if recent else update_
    if per_model is not None:
        losses = {"loss": per_model("loss", out.loss, out.weight)}
        return update(running, losses | {**out.metrics})
    metrics = update(running, out.metrics) if out.metrics else {**running}
    if recent:
        losses = update_losses_(loss, running.get(_RECENT_LOSS), out.loss, out.weight)
        metrics["loss"], metrics[_RECENT_LOSS] = losses
    else:
        metrics["loss"] = update_loss_(loss, out.loss, out.weight)
    return metrics


def without_recent(running: Mapping[str, Metric]) -> dict[str, Metric]:
    """Return running metrics without those of the interval."""
    return {name: metric for name, metric in running.items() if not name.startswith(RECENT)}


# --------------------------------------------------------------------------------------------------
# The items of all updates so far. They are kept among the running metrics, so that they are added
# up, saved and exchanged as those are, under a name that no metric can have.

ITEMS = "/items"  # of the epochs before the running one
# For each process: the names of the metrics of its own share of the data, and what it has of all.
Shares = Sequence[tuple[Sequence[str], Mapping[str, "Metric"]]]


def items_so_far(running: Mapping[str, Metric], in_first_epoch: bool) -> Sum:
    """Return the items of all applied updates of this process: NaN if they are unknown.

    Args:
        running: the running metrics.
        in_first_epoch: whether there was no epoch before theirs.
    """
    loss, before = running.get("loss"), running.get(ITEMS)
    here = loss.weight if isinstance(loss, Mean) else 0
    if before is None:
        return Sum(here if in_first_epoch else math.nan)
    return Sum(cast(Sum, before).value + here)


def without_seen(running: Mapping[str, object]) -> dict[str, object]:
    """Return the running metrics of a process that begins where another continues with all."""
    return {ITEMS: Sum(0)} if ITEMS in running else {}


def update_(running: Mapping[str, Metric], new: Mapping[str, Metric]) -> dict[str, Metric]:
    """Combine ``new`` into ``running``, in place where a metric can.

    ``running`` must not be used afterwards. A metric that a checkpoint holds as :class:`Pending`
    takes its class from the first new one of its name.
    """
    __tracebackhide__ = True
    merged = dict(running)
    for name, metric in new.items():
        merged[name] = _updated(merged.get(name), metric)
    return merged


def update_both_(running: Mapping[str, Metric], new: Mapping[str, Metric]) -> dict[str, Metric]:
    """Combine ``new`` into ``running`` twice: for the epoch, and for the interval."""
    __tracebackhide__ = True
    merged = dict(running)
    for name, metric in new.items():
        recent_name = RECENT + name
        epoch, recent = merged.get(name), merged.get(recent_name)
        pair = None
        if isinstance(metric, TorchMetric):
            pair = metric.add_to_both_(epoch, recent)
        elif type(metric) is Mean and recent is not None:
            pair = _add_(epoch, recent, metric.total, 1, metric.weight)
        if pair is None:
            pair = _updated(epoch, metric), _updated(recent, metric)
            pair = pair if recent is None else _join(*pair)
        merged[name], merged[recent_name] = pair
    return merged


def _updated(so_far: Any, metric: Any) -> Metric:
    """Return what a metric is after one more batch."""
    __tracebackhide__ = True
    if isinstance(so_far, Pending):
        so_far = materialize(metric, so_far)
    if so_far is None:
        return accumulator_of(metric)
    in_place = isinstance(so_far, Reduced | TorchMetric)
    return so_far.update_(metric) if in_place else so_far.combine(metric)


# --- the loss


def update_loss_(running: Mean | None, loss: Tensor, weight: float | Tensor) -> Mean:
    """Add a batch's mean loss to a running mean, with one kernel if the weight is a number."""
    if isinstance(weight, Tensor):
        weight = valid_or_nan(weight)
    if running is None:
        return Mean(weighted(loss, weight), weight)
    if isinstance(weight, Tensor):
        total = running.total.add_(weighted(loss, weight))
    else:
        total = running.total.add_(loss, alpha=weight)
    return mean_of(total, running.weight + weight)


def update_evaluated_(
    running: Mean | NoLoss | None,
    loss: Tensor | None,
    weight: float | Tensor,
    per_model: OfModels | None = None,
) -> Mean | NoLoss:
    """Add the mean loss of a batch of an evaluation, which may be None, to a running mean.

    ``per_model`` makes the metric of several models, each of which has a loss.

    Raises:
        ValueError: some batches have a loss, and others have none.
    """
    if loss is None:
        return NoLoss() if running is None else NoLoss().combine(running)
    if per_model is not None:
        of_batch = cast(Mean, per_model("loss", loss, weight))
        return of_batch.to_accumulator() if running is None else running.update_(of_batch)
    if isinstance(running, NoLoss):
        return running.combine(Mean(weighted(loss, weight), weight))
    return update_loss_(running, loss, weight)


def update_losses_(
    epoch: Mean | None, recent: Mean | None, loss: Tensor, weight: float | Tensor
) -> tuple[Metric, Metric]:
    """Add a batch's mean loss to the mean of the epoch and to that of the interval."""
    if recent is None:  # the interval begins
        return update_loss_(epoch, loss, weight), update_loss_(None, loss, weight)
    if isinstance(weight, Tensor):
        items = valid_or_nan(weight)
        value, factor = weighted(loss, items), 1
    else:
        items, value, factor = weight, loss, weight
    pair = _add_(epoch, recent, value, factor, items)
    if pair is None:
        return _join(update_loss_(epoch, loss, weight), update_loss_(recent, loss, weight))
    return pair


def valid_or_nan(weight: Tensor) -> Tensor:
    """Return a weight to sum: NaN in place of a negative one, which a sum would hide."""
    given = to_accumulator_dtype(weight)
    return torch.where(given >= 0, given, math.nan)


# --- two totals in one tensor


def _add_(
    epoch: Metric | None, recent: Metric, value: Number, factor: float, weight: float | Tensor
) -> tuple[Mean, Mean] | None:
    """Add ``value * factor`` to the totals of two means, if they are in one tensor; else None."""
    if not (isinstance(epoch, Mean) and isinstance(recent, Mean) and isinstance(value, Tensor)):
        return None
    totals = base_of(epoch.total)
    if totals is None or base_of(recent.total) is not totals:
        return None
    totals.add_(value, alpha=factor)
    return (
        mean_of(epoch.total, epoch.weight + weight),
        mean_of(recent.total, recent.weight + weight),
    )


def _join(epoch: Metric, recent: Metric) -> tuple[Metric, Metric]:
    """Return two metrics; of two means of tensors, copies whose totals are in one tensor."""
    if not (isinstance(epoch, Mean) and isinstance(recent, Mean)) or type(epoch) is not Mean:
        return epoch, recent
    if not (isinstance(epoch.total, Tensor) and isinstance(recent.total, Tensor)):
        return epoch, recent
    totals = torch.stack([epoch.total, recent.total])
    return Mean(totals[0], epoch.weight), Mean(totals[1], recent.weight)


# --------------------------------------------------------------------------------------------------
# Times as metrics: marks on a device's timeline, the seconds between them, and peaks.
#
# On a GPU a mark is a CUDA event, and the time between two of them is read when a report is made,
# or when they have passed already. Elsewhere a mark is the time of the host.

SETTLE = 64  # pairs of events to hold before looking which of them have passed


class Event(Protocol):
    """A point on the timeline of a device, as ``torch.cuda.Event``."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Self, /) -> float: ...


Mark = float | Event
Pair = tuple[Event, Event]


def mark(device: torch.device) -> Mark:
    """Return a mark of now, on the timeline of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_and_read_clock(device: torch.device) -> float:
    """Return the time of the host when a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@attrs.frozen(eq=False)
class Elapsed:
    """Seconds, by an amount: the mean seconds of one, or the amount in a second.

    Args:
        amount: a number or a scalar tensor.
        seconds: those that are known.
        pending: pairs of events whose distance is not known yet.
        is_rate: whether to compute amount / seconds; otherwise seconds / amount.
    """

    amount: float | Tensor
    seconds: float = 0.0
    pending: tuple[Pair, ...] = ()
    is_rate: bool = False

    reductions = {"amount": "sum"}  # noqa: RUF012  # what is read with the fields of others

    def combine(self, other: Elapsed) -> Elapsed:
        """Return that of both."""
        pending = self.pending + other.pending
        both = Elapsed(
            self.amount + other.amount, self.seconds + other.seconds, pending, self.is_rate
        )
        return both.settled(wait=False) if len(pending) > SETTLE else both

    def settled(self, wait: bool = True) -> Elapsed:
        """Return the same with the distances of events read: of all, or of those that passed."""
        seconds, pending = self.seconds, []
        for start, end in self.pending:
            if wait:
                end.synchronize()
            if wait or end.query():
                seconds += start.elapsed_time(end) / 1000
            else:
                pending.append((start, end))
        return attrs.evolve(self, seconds=seconds, pending=tuple(pending))

    def compute(self) -> float:
        """Return the mean or the rate; NaN if it would divide by 0."""
        amount, seconds = float(self.amount), self.settled().seconds
        above, below = (amount, seconds) if self.is_rate else (seconds, amount)
        return above / below if below else float("nan")

    def to_cpu(self) -> Elapsed:
        """Return a copy that can be sent to another process."""
        return attrs.evolve(self.settled(), amount=float(self.amount))

    def __deepcopy__(self, memo: object) -> Elapsed:
        return self.settled()  # an event cannot be copied

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"amount": self.amount, "seconds": self.settled().seconds}

    def from_parts(self, parts: Mapping[str, object]) -> Elapsed:
        """Return the metric that was saved."""
        amount = parts["amount"]
        if isinstance(amount, Tensor) and isinstance(self.amount, Tensor):
            amount = amount.to(self.amount.device)
        return attrs.evolve(self, amount=amount, seconds=parts["seconds"], pending=())


class Peak:
    """The largest value of a gauge that keeps its own peak, read when a report is made.

    Args:
        gauge: returns the peak since it was last reset, without waiting for the device.
        value: the largest that was read so far.
    """

    def __init__(self, gauge: Callable[[], float] | None, value: float = 0.0) -> None:
        self.gauge, self.value = gauge, value

    def combine(self, other: Peak) -> Peak:
        """Return the larger of both; the gauge is that of the newer."""
        return Peak(other.gauge, max(self.value, other.value))

    def compute(self) -> float:
        """Return the largest value so far. It is kept, because the gauge may be reset now."""
        if self.gauge is not None:
            self.value = max(self.value, self.gauge())
        return self.value

    def to_cpu(self) -> Peak:
        """Return a copy that can be sent to another process."""
        return Peak(None, self.compute())

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"value": self.compute()}

    def from_parts(self, parts: Mapping[str, object]) -> Peak:
        """Return the metric that was saved."""
        value = parts["value"]
        assert isinstance(value, float | int)
        return Peak(self.gauge, value)


# --------------------------------------------------------------------------------------------------
# Metrics of torchmetrics as metrics of fnloop.

COLLECTION_HINT = ', or give the collection a prefix: MetricCollection(..., prefix="my_")'


@attrs.frozen(eq=False)
class TorchMetric:
    """A torchmetrics metric that fnloop can combine.

    Args:
        template: the metric that the user gave; never updated.
        inputs: the arguments of the updates still to be made, as long as ``seen`` is None.
        seen: a metric that has been updated with all inputs, owned by this record; or None.
        names: the names of the elements, if a metric computes a vector.
        exact: whether parts merge with the bits of a whole.
        later: a metric that has seen what follows on ``seen``, and is yet to be merged into it. It
            is that of the interval since the last record.
    """

    template: Torchmetric
    inputs: tuple[Arguments, ...] = ()
    seen: Torchmetric | None = None
    names: tuple[str, ...] | None = None
    exact: bool = False
    later: Torchmetric | None = None

    @property
    def key(self) -> str | None:
        """The name that a collection is kept under, if its metrics are to have their own names."""
        return key_of(self.template)

    def combine(self, other: TorchMetric) -> TorchMetric:
        __tracebackhide__ = True
        if self.seen is None and other.seen is None:
            return attrs.evolve(self, inputs=self.inputs + other.inputs)
        return self._having(copy.deepcopy(self._updated())).update_(other)

    def to_accumulator(self) -> TorchMetric:
        """Return a metric with the same content and no inputs left to be seen."""
        __tracebackhide__ = True
        return self if self.seen is not None else self._having(self._updated())

    def update_(self, other: TorchMetric) -> TorchMetric:
        """Combine in place, into the object of this one."""
        __tracebackhide__ = True
        seen = self._updated()
        if other.seen is not None:
            merge_(seen, other.seen)
        update_object_(seen, other.inputs)
        return self._having(seen)

    def add_to_both_(self, epoch: object, recent: object) -> tuple[TorchMetric, TorchMetric] | None:
        """Combine with the metrics of an epoch and of an interval, in place, with one update.

        Only that of the interval is updated. It is merged into that of the epoch when the next
        interval begins.

        Args:
            epoch: the metric of the epoch; None if it begins.
            recent: the metric of the interval since the last record; None if it begins.

        Returns:
            Both; None if each needs an update of its own.
        """
        __tracebackhide__ = True
        if not self.exact or self.seen is not None:
            return None
        if recent is None and (epoch is None or isinstance(epoch, TorchMetric)):
            return self._begin_interval_(epoch)
        if not isinstance(epoch, TorchMetric) or not isinstance(recent, TorchMetric):
            return None
        if epoch.later is None or epoch.later is not recent.seen:
            return None
        update_object_(epoch.later, self.inputs)
        return epoch, recent

    def _begin_interval_(self, epoch: TorchMetric | None) -> tuple[TorchMetric, TorchMetric]:
        """Return the metric of an epoch, and that of an interval, which has seen this one alone."""
        __tracebackhide__ = True
        if epoch is None or epoch.seen is None or epoch.later is None:
            later = self._updated()
            whole = fresh_copy(later) if epoch is None else epoch._updated()
        else:
            whole, later = epoch.seen, epoch.later
            absorb_(whole, later)
            update_object_(later, self.inputs)
        return attrs.evolve(self._having(whole), later=later), self._having(later)

    def compute(self) -> Any:  # a float, or floats by name
        __tracebackhide__ = True
        value = self._updated().compute()
        if not isinstance(value, Mapping):
            (numbers,) = _to_numbers([self._vector(value, self.template, self.names)])
            return numbers[0] if self.names is None else _named(self.names, numbers)
        if self.names is not None and all(map(_is_number, value.values())):
            raise ValueError(
                f"from_torchmetrics expects names for the elements of vectors; {self.key} computes "
                f"one number for each metric, and got {', '.join(self.names)}: leave out names"
            )
        vectors = [
            self._vector(part, name, None if _is_number(part) else self.names)
            for name, part in value.items()
        ]
        found: dict[str, float] = {}
        for name, numbers in zip(value, _to_numbers(vectors), strict=True):
            if _is_number(value[name]) or self.names is None:
                found[name] = numbers[0]
            else:
                found |= _named([f"{name}/{element}" for element in self.names], numbers)
        return found

    def _vector(self, value: object, of: object, names: tuple[str, ...] | None) -> Tensor:
        """Return a value that a metric has computed as a vector: of one number, or of the named.

        Raises:
            ValueError: it has another number of elements.
        """
        number = _is_number(value)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if names is None and not number:
            raise ValueError(
                f"a metric of a run is one number, but {of!r} computes {shape}. Choose a reduction "
                'in it, such as average="macro", or give one metric per number; the elements of a '
                'vector can have names: from_torchmetrics(..., names=("cat", "dog"))'
            )
        vector = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        vector = vector.reshape(1) if number else vector
        if names is not None and vector.shape != (len(names),):
            count: object = vector.numel()
            hint = f"Write {count} names in metric(...=from_torchmetrics(..., names=(...)))"
            if number:
                hint = "It is one number: leave out names"
            elif vector.ndim != 1:
                count = f"an array of shape {shape}"
                hint = "Choose a reduction in it, or look at it in the hook inspect"
            raise ValueError(
                f"from_torchmetrics expects names, one for each element of what {of!r} computes: "
                f"that is {count}; got {len(names)}: {', '.join(names)}. {hint}"
            )
        return vector

    def moved(self, device: torch.device) -> TorchMetric:
        """Return a metric whose inputs are on a device."""
        return attrs.evolve(self, inputs=to_device(self.inputs, device))

    def to_cpu(self) -> TorchMetric:
        """Return a copy that can be sent to another process."""
        return self._having(copy.deepcopy(self._updated()).to("cpu"))

    def to_parts(self) -> Parts:
        """Return what has been seen, as plain data and tensors."""
        return states_of(self._updated())

    def from_parts(self, parts: Parts) -> TorchMetric:
        """Return a metric of the same template that has seen what :meth:`to_parts` returned."""
        seen = fresh_copy(self.template)
        load_states(seen, parts)
        return self._having(seen)

    def _having(self, seen: Torchmetric) -> TorchMetric:
        """Return a metric like this one that has seen what another object has."""
        return TorchMetric(self.template, seen=seen, names=self.names, exact=self.exact)

    def _updated(self) -> Torchmetric:
        """Return an object that has seen everything: the one held, or a new one."""
        __tracebackhide__ = True
        if self.seen is not None:
            return self.seen if self.later is None else merged(self.seen, self.later)
        return update_object_(fresh_copy(self.template), self.inputs)


# --- numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _named(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(names, numbers, strict=True))


def _to_numbers(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return the elements of vectors, with one read from the device."""
    if len(vectors) == 1 or all(vector.is_cpu for vector in vectors):
        return [[float(number) for number in vector.tolist()] for vector in vectors]
    device = vectors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = torch.cat([vector.detach().to(device, dtype) for vector in vectors]).tolist()
    ends = itertools.accumulate(len(vector) for vector in vectors)
    return [numbers[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)]


def names_in(function: object) -> list[str]:
    """Return the names of a collection's metrics, from a function for ``metric``, if known."""
    if not isinstance(function, from_torchmetrics) or function.names is not None:
        return []
    return [] if function.key is None else function.key.split(", ")


@attrs.frozen(repr=False)
class from_torchmetrics:
    """Make a metric function for ``metric`` from a metric or a MetricCollection of torchmetrics.

    Use it for metrics that are not a mean over batches (F1, AUROC, ...): the metric sees every
    batch and is computed once. The given object is a template: it is copied, never updated. Its
    argument checks read from the device; ``validate_args=False`` keeps a step free of host reads.

    A MetricCollection is updated once per batch, and its compute groups are kept. Without a name,
    ``metric(from_torchmetrics(collection, inputs))``, its metrics have their own names.

    Args:
        metric: a ``torchmetrics.Metric`` that computes one number, or a vector if there are names;
            or a ``torchmetrics.MetricCollection`` of such metrics.
        inputs: ``(aux, batch) -> arguments of metric.update``, a tuple.
        names: a name for each element of a vector, reported as "f1/cat"; None if there is none.

    Returns:
        A function ``(aux, batch) -> Metric``.

    Raises:
        ImportError: torchmetrics is not installed (the extra ``fnloop[torchmetrics]``).
        TypeError: ``metric`` is not a torchmetrics metric, ``inputs`` is not a function (aux,
            batch), or ``names`` are not names.
        ValueError: there are no names, or two are equal. At a report: the metric computes a
            different number of elements.

    Example:
        >>> import torch
        >>> from torchmetrics.classification import MulticlassF1Score
        >>> inputs = lambda aux, batch: (aux["output"], batch[1])
        >>> f1 = from_torchmetrics(MulticlassF1Score(3), inputs)
        >>> f1({"output": torch.eye(3)}, (None, torch.arange(3))).compute()
        1.0
    """

    metric: Torchmetric = attrs.field(eq=id)  # its own == returns another metric, not a bool
    inputs: Callable[[Aux, Batch], Arguments]
    names: Sequence[str] | None = attrs.field(default=None, kw_only=True)
    _exact: bool = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        try:
            from torchmetrics import Metric as ForeignMetric
            from torchmetrics import MetricCollection
        except ImportError as error:
            raise ImportError(
                "from_torchmetrics needs torchmetrics: pip install 'fnloop[torchmetrics]'"
            ) from error
        if not isinstance(self.metric, ForeignMetric | MetricCollection):
            raise TypeError(
                "from_torchmetrics expects a torchmetrics.Metric such as MulticlassF1Score(10), or "
                f"a MetricCollection; got {describe(self.metric)}"
            )
        if self.key == "":
            raise ValueError("from_torchmetrics expects a MetricCollection of at least one metric")
        wanted = "a function (aux, batch) -> a tuple of the arguments of metric.update"
        function("from_torchmetrics", "inputs", self.inputs, wanted, 2)
        if self.names is not None:
            object.__setattr__(self, "names", _check_element_names(self.names))
        object.__setattr__(self, "_exact", merges_exactly(self.metric))

    @property
    def key(self) -> str | None:
        """The names of the metrics of a collection, as one; None for a single metric."""
        return key_of(self.metric)

    @property
    def unseen(self) -> TorchMetric:
        """The metric, before it has seen a batch."""
        return TorchMetric(self.metric, names=self.names, exact=self._exact)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        names = "" if self.names is None else f", names={self.names!r}"
        metric = repr(self.metric) if self.key is None else f"MetricCollection({self.key})"
        return f"from_torchmetrics({metric}, {name_of(self.inputs)}{names})"

    def __call__(self, aux: Aux, batch: Batch) -> TorchMetric:
        __tracebackhide__ = True
        arguments = self.inputs(aux, batch)
        if not isinstance(arguments, tuple):
            raise TypeError(
                f"inputs of {self!r} must return a tuple of arguments for update; "
                f"got {type(arguments).__name__}"
            )
        detached = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        return attrs.evolve(self.unseen, inputs=(detached,))


def _check_element_names(names: Sequence[str]) -> tuple[str, ...]:
    expected = 'from_torchmetrics expects names as a tuple of names, such as ("cat", "dog")'
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{expected}; got {describe(names)}")
    for name in names:
        metric_name("from_torchmetrics", "a name", name)
    if not names or len({*names}) < len(names):
        raise ValueError(f"{expected}, at least one and each once; got {describe(names)}")
    return tuple(names)


# --------------------------------------------------------------------------------------------------
# Objects of torchmetrics: copies, updates, and merges of metrics and collections.
#
# What has no public name in torchmetrics 1.4 to 1.9 is used here only: `_to_sync`, `_update_count`,
# `_defaults` and `_reductions`.

Arguments = tuple[object, ...]  # of one call of Metric.update
Parts = dict[str, Any]


def key_of(template: Torchmetric) -> str | None:
    """Return the names of the metrics of a collection as one, or None for a single metric."""
    return ", ".join(map(str, template.keys())) if isinstance(template, nn.ModuleDict) else None


def _members(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return a metric, or those of a collection by name, without a copy of what a group shares."""
    if isinstance(metric, nn.ModuleDict):
        return cast("dict[str, ForeignMetric]", dict(metric.named_children()))
    return {"": metric}


def _metrics_in(metric: Torchmetric) -> Iterator[tuple[str, ForeignMetric, str | None]]:
    """Yield a metric, or those of a collection or a wrapper.

    Each comes with its path, and with the path of an earlier one whose states it shares, if there
    is one: they are of one compute group.
    """
    from torchmetrics import Metric as ForeignMetric

    if isinstance(metric, nn.ModuleDict):
        metric.items(copy_state=False)  # restores what a compute group shares
    earlier: dict[tuple[int, ...], str] = {}
    for path, module in metric.named_modules():
        if isinstance(module, ForeignMetric):
            states = tuple(map(id, module.metric_state.values()))
            yield path, module, earlier.get(states)
            if states:
                earlier.setdefault(states, path)


def fresh_copy(template: Torchmetric) -> Torchmetric:
    """Return a metric like the template that has seen nothing and does not synchronize.

    It computes its value whenever asked, without what torchmetrics does around ``compute`` to
    synchronize and to keep the value: that takes half as long as the computing.
    """
    seen = copy.deepcopy(template)
    seen.reset()
    for _, metric, _ in _metrics_in(seen):
        metric.sync_on_compute = False
        metric.compute_with_cache = False  # merge_state keeps a value that was computed before
        metric._to_sync = False
    for member in _members(seen).values():
        member.compute = getattr(member.compute, "__wrapped__", member.compute)
    return seen


def update_object_(metric: Torchmetric, inputs: tuple[Arguments, ...]) -> Torchmetric:
    """Update a metric with inputs, on their device."""
    __tracebackhide__ = True
    for arguments in inputs:
        device = next(iter(_members(metric).values())).device
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != device:
                device = argument.device
                metric.to(device)
        metric.update(*arguments)
    return metric


# --- states as plain data


def states_of(metric: Torchmetric) -> Parts:
    """Return what a metric has seen, as plain data and tensors."""
    parts: Parts = {}
    for path, member, twin in _metrics_in(metric):
        parts[path] = (
            {"updates": member.update_count, "states": dict(member.metric_state)}
            if twin is None
            else {"like": twin}
        )
    own = parts.pop("", {})
    return own | ({"members": parts} if parts else {})


def load_states(metric: Torchmetric, parts: Parts) -> None:
    """Set what a metric has seen to what :func:`states_of` returned."""
    saved = {"": parts, **parts.get("members", {})}
    for path, member, _ in _metrics_in(metric):
        found = saved.get(path, {})
        found = saved[found["like"]] if "like" in found else found
        for name, value in copy.deepcopy(found.get("states", {})).items():
            setattr(member, name, value)
        member._update_count = found.get("updates", 0)


# --- merging


def merge_(metric: Any, other: Any) -> None:
    """Merge what another metric has seen."""
    pairs = [(metric, other)]
    if key_of(metric) is not None:
        as_they_are = {"keep_base": True, "copy_state": False}
        others = dict(other.items(**as_they_are))
        pairs = [(member, others[name]) for name, member in metric.items(**as_they_are)]
    for member, its_other in pairs:
        try:
            member.merge_state(its_other)
        except RuntimeError as error:
            error.add_note(
                f"{member!r} cannot be merged from parts; give fnloop one that can, or evaluate it "
                "in one process"
            )
            raise


# --- merging with the bits of a metric that has seen everything


@functools.cache
def _exact_merges() -> dict[object, Callable[..., object]]:
    """Return how a state is merged with that of a later metric, by its reduction."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    return {
        dim_zero_sum: torch.add,
        dim_zero_max: torch.maximum,
        dim_zero_min: torch.minimum,
        dim_zero_cat: operator.iadd,
    }


def merges_exactly(template: Torchmetric) -> bool:
    """Return whether a metric that has seen all inputs and one merged from parts are the same bits.

    They are if the metric says that an update depends on its inputs alone, and its states are
    counts, extremes, or lists. A sum of floating numbers depends on the order of the additions.
    """
    from torchmetrics import Metric as ForeignMetric

    members = _members(template).values()
    if sum(isinstance(module, ForeignMetric) for module in template.modules()) > len(members):
        return False  # a metric in a metric, which a reset may leave as it is
    return all(
        member.full_state_update is False
        and all(_is_exact(start, member._reductions[k]) for k, start in member._defaults.items())
        for member in members
    )


def _is_exact(start: object, reduction: object) -> bool:
    """Return whether a state that starts with a value merges exactly."""
    merge = _exact_merges().get(reduction)
    if not isinstance(start, Tensor):
        return merge is operator.iadd
    if merge is torch.add:
        return not (start.is_floating_point() or start.is_complex() or start.any())
    return merge in (torch.maximum, torch.minimum)


def merged(metric: Torchmetric, later: Torchmetric) -> Torchmetric:
    """Return a metric that has seen what two have, which merge exactly. Neither is changed."""
    kept: dict[int, object] = {}  # tensors are not copied: merging changes none
    for owner in _owners(metric).values():
        for state in owner.metric_state.values():
            kept |= {id(part): part for part in (state if isinstance(state, list) else [state])}
    found = copy.deepcopy(metric, kept)
    _add_states_(found, later)
    return found


def absorb_(metric: Torchmetric, later: Torchmetric) -> None:
    """Move to a metric what another has seen after it, which merge exactly."""
    _add_states_(metric, later)
    for owner in _owners(later).values():
        owner.reset()


def _add_states_(metric: Torchmetric, later: Torchmetric) -> None:
    """Add to the states of a metric those of a later one. No tensor is changed."""
    merges = _exact_merges()
    others = _members(later)
    for name, mine in _owners(metric).items():
        its = others[name]
        if mine.device != its.device:
            metric.to(its.device)
        for state, reduction in mine._reductions.items():
            setattr(mine, state, merges[reduction](getattr(mine, state), getattr(its, state)))
        mine._update_count += its.update_count


def _owners(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return the members whose states the others of their compute group share."""
    members = _members(metric)
    groups = metric.compute_groups if isinstance(metric, nn.ModuleDict) else {}
    return {group[0]: members[group[0]] for group in groups.values()} or members
