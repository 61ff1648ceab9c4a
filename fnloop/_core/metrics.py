"""Metrics: made for a batch, combined over batches, windows and processes, computed once."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, Self, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from fnloop._backend.torch_compat import base_of
from fnloop._core.saved import Pending, kind_name
from fnloop._core.types import Metric, Output, values_of
from fnloop._display.checks import describe, fields_of, scalar

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


def _weighted(value: Tensor, weight: float | Tensor) -> Tensor:
    """Return a mean × the number of its items, without a graph, in a dtype to sum in."""
    if value.is_cpu and value.dtype is torch.float32 and type(weight) is int:
        value = value.detach() if value.requires_grad else value
        return torch.add(_MINUS_ZERO, value, alpha=weight)  # the same in one call in place of two
    return to_accumulator_dtype(value) * weight


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


class Running:
    """The base of the metrics of fnloop: what a run asks of them, and not of those of users.

    A metric of which ``combine`` is the whole rule leaves the rest as it is here.

    Attributes:
        reductions: the fields that may be tensors, which are read in one transfer, and how each is
            reduced: "sum", "min", "max" or "last".
        is_reduced: whether ``reductions`` is the whole rule: what it computes follows from these
            fields, each of which is combined by itself.
        per_process: whether it is of each process, and not of its share of the data.
        if_twice: what an error adds where another metric reports the same name.

    Example:
        >>> import fnloop as fl
        >>> class Longest(Running):
        ...     def __init__(self, word):
        ...         self.word = word
        ...     def combine(self, other):
        ...         return max(self, other, key=Longest.compute)
        ...     def compute(self):
        ...         return float(len(self.word))
        ...     def to_cpu(self):
        ...         return self  # it has no tensor
        >>> fl.extend.Metrics(a=Longest("an")).update_({"a": Longest("ant")}).read()
        {'a': 3.0}
    """

    __slots__ = ()
    reductions: ClassVar[Mapping[str, str]] = {}
    is_reduced: ClassVar[bool] = False
    per_process: ClassVar[bool] = False
    if_twice: ClassVar[str] = ""

    def compute(self) -> Any:
        """Return the value: a number, or a mapping from names to numbers.

        Raises:
            NotImplementedError: the class has none.
        """
        raise NotImplementedError

    def combine(self, other: Any) -> Self:
        """Return the metric of both parts. Neither is changed.

        Raises:
            NotImplementedError: the class has none.
        """
        raise NotImplementedError

    def update_(self, other: Any) -> Self:
        """Combine, into the tensors of this one where it can."""
        __tracebackhide__ = True
        return self.combine(other)

    def add_to_both_(self, epoch: object, recent: object) -> tuple[Self, Self] | None:
        """Combine in place with the metrics of an epoch and of an interval, or return None."""
        return None

    def owned(self) -> Self:
        """Return it without a tensor or a graph of the function that has made it."""
        return self

    def to_accumulator(self) -> Self:
        """Return what further parts are combined into."""
        return self

    def to_cpu(self) -> Self:
        """Return a copy that can be sent to another process, or written to a file."""
        return self

    def moved(self, device: torch.device) -> Self:
        """Return it with what it has not computed with yet on a device."""
        return self

    @classmethod
    def of_fields(cls, values: Iterable[object], **constants: object) -> Self:
        """Return a metric of these fields, in the order of ``reductions``, and its other ones."""
        return cast(Any, cls)(*values, **constants)

    @staticmethod
    def restored(saved: object, device: torch.device) -> object:
        """Return the metric that a checkpoint has, if its class is known by its name.

        Others stay as they are in the checkpoint until a batch brings one of their kind.

        Raises:
            TypeError: the checkpoint is damaged.
        """
        if not isinstance(saved, Pending):
            raise TypeError(f"a metric is {saved!r}")
        kind = Reduced.kinds.get(saved.kind)
        if kind is None:
            return saved
        parts = dict(saved.parts)
        try:
            values = [_on_device(parts.pop(k), how, device) for k, how in kind.reductions.items()]
            return kind.of_fields(values, **{name: parts[name] for name in kind.constants})
        except (KeyError, TypeError):
            raise TypeError(f"a {saved.kind} holds {describe(dict(saved.parts))}") from None


class Reduced(Running):
    """The base of the metrics whose fields are numbers, each reduced in one way.

    All that is done with a metric follows from ``reductions``: how parts are combined, summed in
    place, read in one transfer, exchanged as numbers and restored. A subclass with a ``compute`` of
    its own may hold tensors of any shape, such as a confusion matrix in a ``Sum``.

    Attributes:
        constants: names of other fields, which all parts have in common.
        kinds: all of them, by the names that checkpoints have for them.
    """

    __slots__ = ()
    constants: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, type[Reduced]]] = {}
    is_reduced = True

    def __init_subclass__(cls) -> None:
        Reduced.kinds[kind_name(cls)] = cls

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

    def owned(self) -> Self:
        """Return a metric that shares no tensor, with sums in a dtype wide enough to sum in."""
        values: list[object] = []
        for name, how in self.reductions.items():
            value = getattr(self, name)
            if how == "sum":
                value = to_accumulator_dtype(value)
            elif isinstance(value, Tensor):
                value = value.detach().clone()
            values.append(value)
        return self.of_fields(values, **fields_of(self, self.constants))

    def to_accumulator(self) -> Self:
        """Return what further parts are combined into: a metric that shares no tensor."""
        return self.owned()


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

    @classmethod
    def of_batch(cls, value: Tensor, weight: float | Tensor, **constants: object) -> Self:
        """Return the mean of a batch, without a graph, in a dtype wide enough to sum in.

        Args:
            value: the mean over the batch.
            weight: the number of its items.
            constants: the other fields of a subclass.

        Returns:
            The metric, which shares no tensor with what it is made of.

        Example:
            >>> Mean.of_batch(torch.tensor(1.5), 4).total
            tensor(6., dtype=torch.float64)
        """
        return cls.of_fields((_weighted(value, weight), to_accumulator_dtype(weight)), **constants)

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


def _on_device(value: object, how: str, device: torch.device) -> object:
    """Return a field of a metric. Several processes merge it on the host; sums belong elsewhere."""
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError
    if isinstance(value, Tensor):
        return value.to(device)
    if how != "sum" or isinstance(value, int):
        return value
    return to_accumulator_dtype(torch.tensor(value, dtype=torch.float64, device=device))


# --------------------------------------------------------------------------------------------------
# Metrics by name: those of a batch, of an evaluation, and the running ones of an epoch.
#
# Running metrics are added to in place, because only the newest state owns their tensors. From the
# second update of an interval on, a mean of the epoch and that of the interval have one tensor of
# two elements, their totals: one kernel adds to both.
#
# The items of all updates so far are kept among the running metrics, so that they are added up,
# saved and exchanged as those are, under a name that no metric can have.

# What makes a metric of several models of its name, their values in one vector, and the weight.
OfModels = Callable[[str, Tensor, "float | Tensor"], Metric]
Cell = tuple[str, str, Tensor]  # the name of a metric, one of its fields, and the value


class Metrics(dict[str, Metric]):
    """Metrics by name, and what is done with all of them at once.

    What ends in "_" changes them in place: the dict, and the tensors of sums, which nothing else
    may use then.

    Args:
        metrics: what a dict can be made of: another mapping, or pairs of a name and a metric.

    Attributes:
        RECENT: what the names of the metrics since the last record begin with, "recent/".
        ITEMS: the name of the items of the epochs before the running one.

    Example:
        >>> parts = Metrics(loss=Mean(6.0, 2)), {"loss": Mean(2.0, 2), "n": Sum(2)}
        >>> parts[0].combined(parts[1]).read()
        {'loss': 2.0, 'n': 2.0}
    """

    RECENT: ClassVar[str] = "recent/"
    ITEMS: ClassVar[str] = "/items"
    # A constructor of its own would be called in every update. That of dict has no signature.
    __signature__: ClassVar[Signature] = Signature(
        [Parameter("metrics", Parameter.POSITIONAL_ONLY)]
    )

    @classmethod
    def of(cls, out: Output) -> Self:
        """Return the loss and the metrics of an output.

        Args:
            out: the output of a batch, in an evaluation maybe without a loss.

        Returns:
            The metrics, those of the output as they are.

        Example:
            >>> Metrics.of(Output(torch.tensor(1.5), weight=2)).read()
            {'loss': 1.5}
        """
        return cls({"loss": update_loss_(None, out.loss, out.weight), **out.metrics})

    def combined(self, other: Mapping[str, Metric]) -> Self:
        """Return the metrics of two parts. Neither is changed.

        Args:
            other: those of the other part.

        Returns:
            The metrics of both, by name.

        Example:
            >>> Metrics(n=Sum(2)).combined({"n": Sum(3)})["n"].compute()
            5.0
        """
        __tracebackhide__ = True
        merged = type(self)(self)
        for name, metric in other.items():
            merged[name] = merged[name].combine(metric) if name in merged else metric
        return merged

    # --- in place

    def update_(self, new: Mapping[str, Metric], recent: bool = False) -> Self:
        """Combine new metrics into these.

        A metric that a checkpoint has, and whose class is not known, takes it from the first new
        one of its name.

        Args:
            new: the metrics of a batch or a window.
            recent: whether to combine them into those since the last record too.

        Returns:
            These.

        Example:
            >>> running = Metrics()
            >>> for value in (torch.tensor(1.0), torch.tensor(2.0)):
            ...     running = running.update_({"n": Sum(value)})
            >>> running["n"].compute()
            3.0
        """
        __tracebackhide__ = True
        for name, metric in new.items():
            if not recent:
                self[name] = _updated(self.get(name), metric)
                continue
            recent_name = RECENT + name
            epoch, interval = self.get(name), self.get(recent_name)
            pair = None
            if type(metric) is Mean and interval is not None:
                pair = _add_(epoch, interval, metric.total, 1, metric.weight)
            elif isinstance(metric, Running):
                pair = metric.add_to_both_(epoch, interval)
            if pair is None:
                pair = _updated(epoch, metric), _updated(interval, metric)
                pair = pair if interval is None else _join(*pair)
            self[name], self[recent_name] = pair
        return self

    def add_(self, out: Output, recent: bool = False, per_model: OfModels | None = None) -> Self:
        """Combine the loss and the metrics of an output into these.

        Args:
            out: the output of a batch or a window that was not skipped.
            recent: whether to combine them into those since the last record too.
            per_model: makes the metric of several models, each of which has a loss in ``out.loss``.

        Returns:
            These.

        Raises:
            ValueError: some outputs have a loss, and others have none.

        Example:
            >>> running = Metrics().add_(Output(torch.tensor(1.0), weight=1))
            >>> running.add_(Output(torch.tensor(4.0), weight=2)).read()
            {'loss': 3.0}
        """
        __tracebackhide__ = True
        loss, weight, running = out.loss, out.weight, self.get("loss")
        if per_model is not None:
            losses = {"loss": per_model("loss", loss, _valid_or_nan(weight))}
            return self.update_(losses | {**out.metrics}, recent)
        if out.metrics:
            self.update_(out.metrics, recent)
        if recent:
            pair = update_losses_(running, self.get(_RECENT_LOSS), loss, weight)
            self["loss"], self[_RECENT_LOSS] = pair
        else:
            self["loss"] = update_loss_(running, loss, weight)
        return self

    def without_recent(self) -> Self:
        """Return them without those since the last record."""
        return type(self)({k: metric for k, metric in self.items() if not k.startswith(RECENT)})

    # --- elsewhere

    def on_host(self) -> Self:
        """Return them with the tensors of built-in ones as numbers, fetched in one transfer.

        Returns:
            The metrics; those of other kinds as they are.

        Example:
            >>> Metrics(n=Sum(torch.tensor(2))).on_host()
            {'n': Sum(value=2.0)}
        """
        return self._with_numbers(self._cells())

    def sent(self) -> dict[str, Metric]:
        """Return them as another process, or a file, gets them: copies on the host.

        Returns:
            The metrics; those that are not a :class:`Running` as they are.

        Example:
            >>> Metrics(n=Sum(2)).sent()
            {'n': Sum(value=2)}
        """
        return {name: m.to_cpu() if isinstance(m, Running) else m for name, m in self.items()}

    def moved(self, device: torch.device) -> Self:
        """Return them with what they have not computed with yet on a device.

        Args:
            device: the device.

        Returns:
            The metrics; those that are not a :class:`Running` as they are.

        Example:
            >>> Metrics(n=Sum(2)).moved(torch.device("cpu"))
            {'n': Sum(value=2)}
        """
        moved = {k: m.moved(device) if isinstance(m, Running) else m for k, m in self.items()}
        return type(self)(moved)

    def read(self, vectors: bool = False) -> dict[str, float]:
        """Compute every metric, with one transfer from the device.

        One that a checkpoint has is left out until a batch of this run has shown its class.

        Args:
            vectors: whether a metric may compute something else than a number, which a history
                could not hold.

        Returns:
            Name to float.

        Raises:
            TypeError: a metric does not compute a number.
            ValueError: two metrics report the same name.

        Example:
            >>> Metrics(loss=Mean(torch.tensor(6.0), 2), n=Sum(torch.tensor(2))).read()
            {'loss': 3.0, 'n': 2.0}
        """
        __tracebackhide__ = True
        values: dict[str, float] = {}
        cells = self._cells()
        # One alone is read by its metric.
        for name, metric in (self if len(cells) < 2 else self._with_numbers(cells)).items():
            try:
                found = {} if isinstance(metric, Pending) else values_of(name, metric)
                for part, value in found.items():
                    if part in values:
                        hints = [m.if_twice for m in self.values() if isinstance(m, Running)]
                        raise ValueError(f"two metrics report {part!r}: rename one{max(hints)}")
                    if not vectors and value.__class__ is not float:
                        _check_number(part, value)
                    values[part] = value
            except Exception as error:
                error.add_note(f"while in the metric {name!r}")
                raise
        return values

    def _cells(self) -> list[Cell]:
        """Return the tensors of the metrics whose fields are known."""
        cells: list[Cell] = []
        for name, metric in self.items():
            known = metric.reductions if isinstance(metric, Running) else ()
            values = fields_of(metric, known).items()
            cells += [(name, field, value) for field, value in values if isinstance(value, Tensor)]
        return cells

    def _with_numbers(self, cells: list[Cell]) -> Self:
        """Return metrics with numbers in place of tensors, fetched in one transfer."""
        found = type(self)(self)
        if cells:
            for (name, field, _), value in zip(cells, _read([v for *_, v in cells]), strict=True):
                found[name] = attrs.evolve(cast(Any, found[name]), **{field: value})
        return found


RECENT, ITEMS = Metrics.RECENT, Metrics.ITEMS
_RECENT_LOSS = RECENT + "loss"


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


def _updated(so_far: Metric | None, metric: Metric) -> Metric:
    """Return what a metric is after one more batch."""
    __tracebackhide__ = True
    if isinstance(so_far, Pending):
        so_far = Pending.fill(metric, so_far)
    if so_far is None:
        return metric.to_accumulator() if isinstance(metric, Running) else metric
    if isinstance(so_far, Running):
        return so_far.update_(metric)
    return so_far.combine(metric)


# --- numbers from the device


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


# --- the loss


def update_loss_(running: Metric | None, loss: Tensor | None, weight: float | Tensor) -> Metric:
    """Add a batch's mean loss to a running mean, with one kernel if the weight is a number.

    In an evaluation the loss may be None.

    Raises:
        ValueError: some batches have a loss, and others have none.
    """
    if loss is None:
        return NoLoss() if running is None else NoLoss().combine(cast(Mean, running))
    if isinstance(weight, Tensor):
        weight = _valid_or_nan(weight)
    if running is None:
        return Mean(_weighted(loss, weight), weight)
    if not isinstance(running, Mean):
        return running.combine(Mean(loss, weight))
    if isinstance(weight, Tensor):
        total = running.total.add_(_weighted(loss, weight))
    else:
        total = running.total.add_(loss, alpha=weight)
    return mean_of(total, running.weight + weight)


def update_losses_(
    epoch: Metric | None, recent: Metric | None, loss: Tensor, weight: float | Tensor
) -> tuple[Metric, Metric]:
    """Add a batch's mean loss to the mean of the epoch and to that of the interval."""
    if recent is None:  # the interval begins
        return update_loss_(epoch, loss, weight), update_loss_(None, loss, weight)
    if isinstance(weight, Tensor):
        items = _valid_or_nan(weight)
        value, factor = _weighted(loss, items), 1
    else:
        items, value, factor = weight, loss, weight
    pair = _add_(epoch, recent, value, factor, items)
    if pair is None:
        return _join(update_loss_(epoch, loss, weight), update_loss_(recent, loss, weight))
    return pair


def _valid_or_nan(weight: Number) -> Number:
    """Return a weight to sum: NaN in place of a negative one, which a sum would hide."""
    if not isinstance(weight, Tensor):
        return weight
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
