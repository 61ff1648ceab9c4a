"""Metrics of torchmetrics as metrics of fnloop.

Two attributes have no public setter in torchmetrics 1.4 to 1.9, and are set here only: ``_to_sync``
and ``_update_count``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from fnloop._core.call import name_of
from fnloop._core.types import Aux, Batch
from fnloop._display.checks import describe, function

if TYPE_CHECKING:
    from torchmetrics import Metric as Torchmetric

__all__ = ["from_torchmetrics"]

Arguments = tuple[object, ...]  # of one call of Metric.update


@attrs.frozen(eq=False)
class TorchMetric:
    """A torchmetrics metric that fnloop can combine.

    Args:
        template: the metric that the user gave; never updated.
        inputs: the arguments of the updates still to be made.
        seen: a metric that has been updated with all earlier inputs, owned by this record; or None.
    """

    template: Torchmetric
    inputs: tuple[Arguments, ...] = ()
    seen: Torchmetric | None = None

    def combine(self, other: TorchMetric) -> TorchMetric:
        __tracebackhide__ = True
        if self.seen is None and other.seen is None:
            return attrs.evolve(self, inputs=self.inputs + other.inputs)
        return TorchMetric(self.template, seen=copy.deepcopy(self._updated())).update_(other)

    def to_accumulator(self) -> TorchMetric:
        """Return a metric with the same content and no inputs left to be seen."""
        __tracebackhide__ = True
        if self.seen is not None and not self.inputs:
            return self
        return TorchMetric(self.template, seen=self._updated())

    def update_(self, other: TorchMetric) -> TorchMetric:
        """Combine in place, into the object of this one."""
        __tracebackhide__ = True
        seen = self._updated()
        if other.seen is not None:
            _merge(seen, other.seen)
        _update(seen, other.inputs)
        return TorchMetric(self.template, seen=seen)

    def compute(self) -> float:
        __tracebackhide__ = True
        value = self._updated().compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"a metric of a run is one number, but {self.template!r} computes {shape}. Choose "
                f'a reduction in it, such as average="macro", or give one metric per number.'
            )
        return float(value)

    def to_cpu(self) -> TorchMetric:
        """Return a copy that can be sent to another process."""
        return TorchMetric(self.template, seen=copy.deepcopy(self._updated()).to("cpu"))

    def to_parts(self) -> dict[str, Any]:
        """Return what has been seen, as plain data and tensors."""
        seen = self._updated()
        return {"updates": seen.update_count, "states": dict(seen.metric_state)}

    def from_parts(self, parts: Mapping[str, Any]) -> TorchMetric:
        """Return a metric of the same template that has seen what :meth:`to_parts` returned."""
        seen = _fresh_copy(self.template)
        for name, value in parts["states"].items():
            setattr(seen, name, value)
        seen._update_count = parts["updates"]
        return TorchMetric(self.template, seen=seen)

    def _updated(self) -> Torchmetric:
        """Return an object that has seen all inputs: the one held, or a copy if inputs are left."""
        __tracebackhide__ = True
        if self.seen is None:
            return _update(_fresh_copy(self.template), self.inputs)
        return _update(copy.deepcopy(self.seen), self.inputs) if self.inputs else self.seen


def _fresh_copy(template: Torchmetric) -> Torchmetric:
    """Return a metric like the template that has seen nothing and does not synchronize."""
    seen = copy.deepcopy(template)
    seen.reset()
    seen.sync_on_compute = False
    seen.compute_with_cache = False  # merge_state keeps a value that was computed before
    seen._to_sync = False
    return seen


def _update(metric: Torchmetric, inputs: tuple[Arguments, ...]) -> Torchmetric:
    __tracebackhide__ = True
    for arguments in inputs:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != metric.device:
                metric.to(argument.device)
        metric.update(*arguments)
    return metric


def _merge(metric: Torchmetric, other: Torchmetric) -> None:
    try:
        metric.merge_state(other)
    except RuntimeError as error:
        error.add_note(
            f"{metric!r} cannot be merged from parts; give fnloop one that can, or evaluate it in "
            "one process"
        )
        raise


@attrs.frozen(repr=False)
class from_torchmetrics:
    """A metric function from a torchmetrics metric, for ``metric(name=...)``.

    Right for metrics that are not a mean over batches (F1, AUROC, ...): the metric sees every batch
    and is computed once. The given object is a template: it is copied, never updated. Its argument
    checks read from the device; ``validate_args=False`` keeps a step free of host reads.

    Args:
        metric: a ``torchmetrics.Metric`` that computes one number.
        inputs: ``(aux, batch) -> arguments of metric.update``, a tuple.

    Returns:
        A function ``(aux, batch) -> Metric``.

    Raises:
        ImportError: torchmetrics is not installed (the extra ``fnloop[torchmetrics]``).
        TypeError: ``metric`` is not a torchmetrics metric, or ``inputs`` is not a function (aux,
            batch).

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

    def __attrs_post_init__(self) -> None:
        try:
            from torchmetrics import Metric as Torchmetric
        except ImportError as error:
            raise ImportError(
                "from_torchmetrics needs torchmetrics: pip install 'fnloop[torchmetrics]'"
            ) from error
        if not isinstance(self.metric, Torchmetric):
            raise TypeError(
                "from_torchmetrics expects a torchmetrics.Metric such as MulticlassF1Score(10); "
                f"got {describe(self.metric)}"
            )
        wanted = "a function (aux, batch) -> a tuple of the arguments of metric.update"
        function("from_torchmetrics", "inputs", self.inputs, wanted, 2)

    def __repr__(self) -> str:
        return f"from_torchmetrics({self.metric!r}, {name_of(self.inputs)})"

    def __call__(self, aux: Aux, batch: Batch) -> TorchMetric:
        __tracebackhide__ = True
        arguments = self.inputs(aux, batch)
        if not isinstance(arguments, tuple):
            raise TypeError(
                f"inputs of {self!r} must return a tuple of arguments for update; "
                f"got {type(arguments).__name__}"
            )
        detached = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        return TorchMetric(self.metric, (detached,))
