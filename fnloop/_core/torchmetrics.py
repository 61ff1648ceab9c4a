"""Metrics of torchmetrics as metrics of fnloop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor

from fnloop._core.call import name_of
from fnloop._core.types import Batch
from fnloop._display.checks import described, function

__all__ = ["from_torchmetrics"]


@attrs.frozen(eq=False)
class TorchMetric:
    """A torchmetrics metric as a monoid: what was seen is either inputs that wait, or a metric object of its own."""

    template: Any  # a torchmetrics.Metric, never updated
    inputs: tuple[tuple[Any, ...], ...] = ()  # arguments of the updates still to be made
    seen: Any = None  # a torchmetrics.Metric that has been updated with what came before, owned by this record

    def combine(self, other: TorchMetric) -> TorchMetric:
        __tracebackhide__ = True
        if self.seen is None and other.seen is None:
            return attrs.evolve(self, inputs=self.inputs + other.inputs)
        return TorchMetric(self.template, seen=copy.deepcopy(self.own().seen)).absorb(other)

    def own(self) -> TorchMetric:
        """Return one whose inputs have all gone into an object of its own."""
        __tracebackhide__ = True
        if self.seen is not None and not self.inputs:
            return self
        seen = copy.deepcopy(self.seen) if self.seen is not None else _fresh_copy(self.template)
        return TorchMetric(self.template, seen=_update(seen, self.inputs))

    def absorb(self, other: TorchMetric) -> TorchMetric:
        """Combine into the object of this one, in place."""
        __tracebackhide__ = True
        mine = self.own()
        if other.seen is not None:
            _merge(mine.seen, other.seen)
        _update(mine.seen, other.inputs)
        return mine

    def compute(self) -> float:
        __tracebackhide__ = True
        value = self.own().seen.compute()
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"a metric of a run is one number, but {self.template!r} computes {shape}. Choose a reduction in it, "
                f'such as average="macro", or give one metric per number.'
            )
        return float(value)

    def on_host(self) -> TorchMetric:
        """Return one like this that can be sent to another process."""
        return TorchMetric(self.template, seen=copy.deepcopy(self.own().seen).to("cpu"))

    def to_parts(self) -> dict[str, Any]:
        """Return what has been seen, as plain data and tensors."""
        seen = self.own().seen
        return {
            "updates": seen._update_count,
            "states": {name: getattr(seen, name) for name in seen._defaults},
        }

    def from_parts(self, parts: Mapping[str, Any]) -> TorchMetric:
        """Return one like this that has seen what :meth:`to_parts` returned."""
        seen = _fresh_copy(self.template)
        for name, value in parts["states"].items():
            setattr(seen, name, value)
        seen._update_count = parts["updates"]
        return TorchMetric(self.template, seen=seen)


def _fresh_copy(template: Any) -> Any:
    """Return a metric like the template that has seen nothing, and leaves it to us to combine what processes have seen."""
    seen = copy.deepcopy(template)
    seen.reset()
    seen.sync_on_compute = seen._to_sync = False
    return seen


def _update(metric: Any, inputs: tuple[tuple[Any, ...], ...]) -> Any:
    __tracebackhide__ = True
    for arguments in inputs:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != metric.device:
                metric.to(argument.device)
        metric.update(*arguments)
    return metric


def _merge(metric: Any, other: Any) -> None:
    try:
        metric.merge_state(other)
        metric._computed = None  # torchmetrics keeps a value that was computed before
    except RuntimeError as error:
        error.add_note(
            f"{metric!r} can't be merged from parts; give fnloop one that can, or evaluate it in one process"
        )
        raise


@attrs.frozen(repr=False)
class from_torchmetrics:
    """A metric function from a torchmetrics metric, for ``metric(name=...)``.

    Right for metrics that are no mean over batches (F1, AUROC, ...): the metric sees every batch and is computed once.
    The object that is given is a template: it is copied, never updated. Its argument checks read from the device;
    ``validate_args=False`` keeps a step free of host reads.

    Args:
        metric: a ``torchmetrics.Metric`` that computes one number.
        inputs: ``(aux, batch) -> arguments of metric.update``, a tuple.

    Returns:
        A function ``(aux, batch) -> Metric``.

    Raises:
        ImportError: torchmetrics is not installed (the extra ``fnloop[torchmetrics]``).
        TypeError: ``metric`` is not a torchmetrics metric, or ``inputs`` is not a function (aux, batch).

    Example:
        >>> import torch
        >>> from torchmetrics.classification import MulticlassF1Score
        >>> f1 = from_torchmetrics(MulticlassF1Score(3), lambda aux, batch: (aux["output"], batch[1]))
        >>> f1({"output": torch.eye(3)}, (None, torch.arange(3))).compute()
        1.0
    """

    metric: Any = attrs.field(
        eq=id
    )  # a torchmetrics metric compares to something that isn't a bool
    inputs: Callable[[Mapping[str, Any], Batch], tuple[Any, ...]]

    def __attrs_post_init__(self) -> None:
        try:
            from torchmetrics import Metric as Torchmetric
        except ImportError as error:
            raise ImportError(
                "from_torchmetrics needs torchmetrics: pip install 'fnloop[torchmetrics]'"
            ) from error
        if not isinstance(self.metric, Torchmetric):
            raise TypeError(
                f"from_torchmetrics expects a torchmetrics.Metric such as MulticlassF1Score(10); got {described(self.metric)}"
            )
        wanted = "a function (aux, batch) -> a tuple of the arguments of metric.update"
        function("from_torchmetrics", "inputs", self.inputs, wanted, 2)

    def __repr__(self) -> str:
        return f"from_torchmetrics({self.metric!r}, {name_of(self.inputs)})"

    def __call__(self, aux: Mapping[str, Any], batch: Batch) -> TorchMetric:
        __tracebackhide__ = True
        arguments = self.inputs(aux, batch)
        if not isinstance(arguments, tuple):
            raise TypeError(
                f"inputs of {self!r} must return a tuple of arguments for update; got {type(arguments).__name__}"
            )
        return TorchMetric(
            self.metric, (tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments),)
        )
