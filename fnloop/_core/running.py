"""The running metrics of an epoch, and of the interval since the last record.

They are added to in place, because only the newest state owns their tensors. From the second update
of an interval on, a mean of the epoch and that of the interval have one tensor of two elements,
their totals: one kernel adds to both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fnloop._backend.torch_compat import base_of
from fnloop._core.metrics import Mean, Number, mean_of, to_accumulator_dtype, weighted
from fnloop._core.serialize import Pending, materialize
from fnloop._core.torchmetrics import TorchMetric
from fnloop._core.types import Metric, Output

__all__ = [
    "RECENT",
    "add_output_",
    "update_",
    "update_both_",
    "update_loss_",
    "update_losses_",
    "without_recent",
]

RECENT = "recent/"  # begins the names of the metrics of the interval
_RECENT_LOSS = RECENT + "loss"


def add_output_(running: Any, out: Output, recent: bool) -> dict[str, Metric]:
    """Combine the loss and the metrics of an update into ``running``.

    Args:
        running: the running metrics, which must not be used afterwards.
        out: the output of a step that was not skipped.
        recent: whether to combine them into those of the interval too.
    """
    __tracebackhide__ = True
    loss, update = running.get("loss"), update_both_ if recent else update_
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
        elif isinstance(metric, Mean) and recent is not None:
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
        return metric.to_accumulator() if hasattr(metric, "to_accumulator") else metric
    return so_far.update_(metric) if hasattr(so_far, "update_") else so_far.combine(metric)


# --- the loss


def update_loss_(running: Mean | None, loss: Tensor, weight: int | Tensor) -> Mean:
    """Add a batch's mean loss to a running mean, with one kernel if the weight is a number."""
    if isinstance(weight, Tensor):
        weight = _valid_or_nan(weight)
    if running is None:
        return Mean(weighted(loss, weight), weight)
    if isinstance(weight, Tensor):
        total = running.total.add_(weighted(loss, weight))
    else:
        total = running.total.add_(loss, alpha=weight)
    return mean_of(total, running.weight + weight)


def update_losses_(
    epoch: Mean | None, recent: Mean | None, loss: Tensor, weight: int | Tensor
) -> tuple[Metric, Metric]:
    """Add a batch's mean loss to the mean of the epoch and to that of the interval."""
    if recent is None:  # the interval begins
        return update_loss_(epoch, loss, weight), update_loss_(None, loss, weight)
    if isinstance(weight, Tensor):
        items = _valid_or_nan(weight)
        value, factor = weighted(loss, items), 1
    else:
        items, value, factor = weight, loss, weight
    pair = _add_(epoch, recent, value, factor, items)
    if pair is None:
        return _join(update_loss_(epoch, loss, weight), update_loss_(recent, loss, weight))
    return pair


def _valid_or_nan(weight: Tensor) -> Tensor:
    """Return a weight to sum: NaN in place of a negative one, which a sum would hide."""
    given = to_accumulator_dtype(weight)
    return torch.where(given >= 0, given, math.nan)


# --- two totals in one tensor


def _add_(
    epoch: Metric | None, recent: Metric, value: Number, factor: int, weight: int | Tensor
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
    if not (isinstance(epoch, Mean) and isinstance(recent, Mean)):
        return epoch, recent
    if not (isinstance(epoch.total, Tensor) and isinstance(recent.total, Tensor)):
        return epoch, recent
    totals = torch.stack([epoch.total, recent.total])
    return Mean(totals[0], epoch.weight), Mean(totals[1], recent.weight)
