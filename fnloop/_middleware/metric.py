"""Add metrics to the loss, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import BUILTIN_METRICS, Mean, to_accumulator_dtype
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._display import checks
from fnloop._step.update import report

__all__ = ["metric"]


@middleware("forward")
def metric(**functions: Callable[[Mapping[str, Any], Batch], Tensor | Metric]) -> Middleware:
    """Add metrics, in training and in evaluation; batches of different sizes are averaged exactly.

    Args:
        **functions: name to ``(aux, batch) -> metric``, where aux is what the loss function
            returned. A scalar tensor is a mean over the batch, and is averaged with the batch's
            weight. A metric (``Sum``, ``Max``, one made by ``from_torchmetrics``, ...) is combined
            by its own rule.

    Returns:
        A middleware of the forward ring.

    Raises:
        TypeError: a metric is not a function (aux, batch). At the first batch: its value is neither
            a scalar tensor nor a metric.
        ValueError: there is no metric, or one is named "loss" or has an empty name.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(metric(output=lambda aux, batch: aux["output"].mean()))(toy_loss)
        >>> batches = [torch.tensor([1.0, 1.0]), torch.tensor([4.0])]
        >>> fl.evaluate(step, toy(w=2.0), batches)      # (2 + 2 + 8) / 3
        {'loss': 4.0, 'output': 4.0}
    """
    if not functions:
        raise ValueError(
            "metric expects at least one name and function: metric(accuracy=lambda aux, batch: ...)"
        )
    for name, function in functions.items():
        checks.metric_name("metric", "a name", name)
        if name == "loss":
            raise ValueError(
                'metric(loss=...) would replace the loss, which is always reported as "loss": '
                "choose another name"
            )
        checks.function("metric", name, function, "a function (aux, batch) -> scalar or Metric", 2)

    def forward(step: Step) -> Step:
        def measured(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            with torch.no_grad():
                found: dict[str, Metric] = {}
                name = ""
                try:  # a comprehension would add a frame to the traceback
                    for name, compute in functions.items():
                        found[name] = _to_metric(name, compute(out.aux, batch), out.weight)
                except Exception as error:
                    error.add_note(f"while in the metric {name!r}")
                    raise
            return state, report(out, found, "metric")

        return measured

    return Middleware(f"metric({', '.join(functions)})", forward=forward)


def _detach(metric: Any) -> Metric:
    """Return a built-in metric that owns its tensors, without a graph, in an accumulator dtype."""
    if type(metric) not in BUILTIN_METRICS.values():
        return metric
    parts = {
        k: v.detach().clone()
        for k, v in attrs.asdict(metric, recurse=False).items()
        if isinstance(v, Tensor)
    }
    metric = attrs.evolve(metric, **parts) if parts else metric
    return metric.to_accumulator() if hasattr(metric, "to_accumulator") else metric


def _to_metric(name: str, value: object, weight: int | Tensor) -> Metric:
    if isinstance(value, Tensor):
        if value.ndim:
            raise TypeError(
                f"metric {name!r} must be a scalar, the mean over the batch; got shape "
                f"{tuple(value.shape)}: add .mean()"
            )
        return Mean(to_accumulator_dtype(value) * weight, to_accumulator_dtype(weight))
    if hasattr(value, "combine") and hasattr(value, "compute"):
        return _detach(value)
    if isinstance(value, int | float):
        return Mean(value * weight, weight)
    raise TypeError(
        f"metric {name!r} must return a scalar tensor or a Metric such as Sum(value); got "
        f"{value!r:.60} ({type(value).__name__})"
    )
