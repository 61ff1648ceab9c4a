"""Metrics of torchmetrics as metrics of fnloop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.transfer import to_device
from fnloop._core.call import name_of
from fnloop._core.torchmetric_objects import (
    Arguments,
    Parts,
    absorb_,
    fresh_copy,
    key_of,
    load_states,
    merge_,
    merged,
    merges_exactly,
    states_of,
    update_,
)
from fnloop._core.types import Aux, Batch
from fnloop._display.checks import describe, function, metric_name

if TYPE_CHECKING:
    from torchmetrics import Metric as ForeignMetric
    from torchmetrics import MetricCollection

    Torchmetric = ForeignMetric | MetricCollection

__all__ = ["COLLECTION_HINT", "TorchMetric", "from_torchmetrics", "names_in"]

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
        update_(seen, other.inputs)
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
        update_(epoch.later, self.inputs)
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
            update_(later, self.inputs)
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
        return update_(fresh_copy(self.template), self.inputs)


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
    """A metric function from a metric or a MetricCollection of torchmetrics, for ``metric``.

    Right for metrics that are not a mean over batches (F1, AUROC, ...): the metric sees every batch
    and is computed once. The given object is a template: it is copied, never updated. Its argument
    checks read from the device; ``validate_args=False`` keeps a step free of host reads.

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
        ValueError: there are no names, or two are equal. At a report: the metric computes another
            number of elements.

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
