"""Metrics of torchmetrics as metrics of fnloop.

Two attributes have no public setter in torchmetrics 1.4 to 1.9, and are set here only: ``_to_sync``
and ``_update_count``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.call import name_of
from fnloop._core.types import Aux, Batch
from fnloop._display.checks import describe, function, metric_name

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

    Torchmetric = Metric | MetricCollection

__all__ = ["COLLECTION_HINT", "from_torchmetrics", "names_in"]

COLLECTION_HINT = ', or give the collection a prefix: MetricCollection(..., prefix="my_")'

Arguments = tuple[object, ...]  # of one call of Metric.update


@attrs.frozen(eq=False)
class TorchMetric:
    """A torchmetrics metric that fnloop can combine.

    Args:
        template: the metric that the user gave; never updated.
        inputs: the arguments of the updates still to be made, as long as ``seen`` is None.
        seen: a metric that has been updated with all inputs, owned by this record; or None.
        names: the names of the elements, if a metric computes a vector.
    """

    template: Torchmetric
    inputs: tuple[Arguments, ...] = ()
    seen: Torchmetric | None = None
    names: tuple[str, ...] | None = None

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
            _merge(seen, other.seen)
        _update(seen, other.inputs)
        return self._having(seen)

    def compute(self) -> Any:  # a float, or floats by name
        __tracebackhide__ = True
        value = self._updated().compute()
        if not isinstance(value, Mapping):
            (numbers,) = _to_numbers([self._vector(value, repr(self.template), self.names)])
            return numbers[0] if self.names is None else _named(self.names, numbers)
        vectors = [
            self._vector(part, repr(name), None if _is_number(part) else self.names)
            for name, part in value.items()
        ]
        found: dict[str, float] = {}
        for name, numbers in zip(value, _to_numbers(vectors), strict=True):
            if _is_number(value[name]) or self.names is None:
                found[name] = numbers[0]
            else:
                found |= _named([f"{name}/{element}" for element in self.names], numbers)
        return found

    def _vector(self, value: object, of: str, names: tuple[str, ...] | None) -> Tensor:
        """Return a value that a metric has computed as a vector: of one number, or of the named.

        Raises:
            ValueError: it has another number of elements.
        """
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if names is None and not _is_number(value):
            raise ValueError(
                f"a metric of a run is one number, but {of} computes {shape}. Choose a reduction "
                'in it, such as average="macro", or give one metric per number; the elements of a '
                'vector can have names: from_torchmetrics(..., names=("cat", "dog"))'
            )
        vector = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        vector = vector.reshape(1) if _is_number(value) else vector
        if names is not None and vector.shape != (len(names),):
            count: object = vector.numel()
            hint = f"Write {count} names in metric(...=from_torchmetrics(..., names=(...)))"
            if _is_number(value):
                hint = "It is one number: leave out names"
            elif vector.ndim != 1:
                count = f"an array of shape {shape}"
                hint = "Choose a reduction in it, or look at it in the hook inspect"
            raise ValueError(
                f"from_torchmetrics expects names, one for each element of what {of} computes: "
                f"that is {count}; got {len(names)}: {', '.join(names)}. {hint}"
            )
        return vector

    def to_cpu(self) -> TorchMetric:
        """Return a copy that can be sent to another process."""
        return self._having(copy.deepcopy(self._updated()).to("cpu"))

    def to_parts(self) -> dict[str, Any]:
        """Return what has been seen, as plain data and tensors."""
        parts: dict[str, Any] = {}
        for path, metric, twin in _metrics_in(self._updated()):
            parts[path] = (
                {"updates": metric.update_count, "states": dict(metric.metric_state)}
                if twin is None
                else {"like": twin}
            )
        own = parts.pop("", {})
        return own | ({"members": parts} if parts else {})

    def from_parts(self, parts: Mapping[str, Any]) -> TorchMetric:
        """Return a metric of the same template that has seen what :meth:`to_parts` returned."""
        seen = _fresh_copy(self.template)
        saved = {"": parts, **parts.get("members", {})}
        for path, metric, _ in _metrics_in(seen):
            found = saved.get(path, {})
            found = saved[found["like"]] if "like" in found else found
            for name, value in copy.deepcopy(found.get("states", {})).items():
                setattr(metric, name, value)
            metric._update_count = found.get("updates", 0)
        return self._having(seen)

    def _having(self, seen: Torchmetric) -> TorchMetric:
        """Return a metric like this one that has seen what another object has."""
        return TorchMetric(self.template, seen=seen, names=self.names)

    def _updated(self) -> Torchmetric:
        """Return an object that has seen all inputs: the one held, or a new one."""
        __tracebackhide__ = True
        if self.seen is not None:
            return self.seen
        return _update(_fresh_copy(self.template), self.inputs)


# --- numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _named(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(names, numbers, strict=True))


def _to_numbers(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return the elements of vectors, with one read from the device."""
    device = vectors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = torch.cat([vector.detach().to(device, dtype) for vector in vectors]).tolist()
    ends = itertools.accumulate(len(vector) for vector in vectors)
    return [numbers[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)]


# --- objects of torchmetrics


def names_in(function: object) -> list[str]:
    """Return the names of a collection's metrics, from a function for ``metric``, if known."""
    if not isinstance(function, from_torchmetrics) or function.names is not None:
        return []
    return [] if function.key is None else function.key.split(", ")


def key_of(template: Torchmetric) -> str | None:
    """Return the names of the metrics of a collection as one, or None for a single metric."""
    return ", ".join(map(str, template.keys())) if isinstance(template, nn.ModuleDict) else None


def _metrics_in(metric: Torchmetric) -> Iterator[tuple[str, Metric, str | None]]:
    """Yield a metric, or those of a collection or a wrapper.

    Each comes with its path, and with the path of an earlier one whose states it shares, if there
    is one: they are of one compute group.
    """
    from torchmetrics import Metric

    if isinstance(metric, nn.ModuleDict):
        metric.items(copy_state=False)  # restores what a compute group shares
    earlier: dict[tuple[int, ...], str] = {}
    for path, module in metric.named_modules():
        if isinstance(module, Metric):
            states = tuple(map(id, module.metric_state.values()))
            yield path, module, earlier.get(states)
            if states:
                earlier.setdefault(states, path)


def _fresh_copy(template: Torchmetric) -> Torchmetric:
    """Return a metric like the template that has seen nothing and does not synchronize."""
    seen = copy.deepcopy(template)
    seen.reset()
    for _, metric, _ in _metrics_in(seen):
        metric.sync_on_compute = False
        metric.compute_with_cache = False  # merge_state keeps a value that was computed before
        metric._to_sync = False
    return seen


def _update(metric: Torchmetric, inputs: tuple[Arguments, ...]) -> Torchmetric:
    __tracebackhide__ = True
    for arguments in inputs:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != _device_of(metric):
                metric.to(argument.device)
        metric.update(*arguments)
    return metric


def _device_of(metric: Torchmetric) -> torch.device:
    if isinstance(metric, nn.ModuleDict):
        metric = next(iter(metric.values(copy_state=False)))
    return metric.device


def _merge(metric: Any, other: Any) -> None:
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

    def __attrs_post_init__(self) -> None:
        try:
            from torchmetrics import Metric, MetricCollection
        except ImportError as error:
            raise ImportError(
                "from_torchmetrics needs torchmetrics: pip install 'fnloop[torchmetrics]'"
            ) from error
        if not isinstance(self.metric, Metric | MetricCollection):
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

    @property
    def key(self) -> str | None:
        """The names of the metrics of a collection, as one; None for a single metric."""
        return key_of(self.metric)

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
        names: Any = self.names
        return TorchMetric(self.metric, (detached,), names=names)


def _check_element_names(names: Sequence[str]) -> tuple[str, ...]:
    expected = 'from_torchmetrics expects names as a tuple of names, such as ("cat", "dog")'
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{expected}; got {describe(names)}")
    for name in names:
        metric_name("from_torchmetrics", "a name", name)
    if not names or len({*names}) < len(names):
        raise ValueError(f"{expected}, at least one and each once; got {describe(names)}")
    return tuple(names)
