"""Merge the metrics of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fnloop._backend.collectives import gather_objects
from fnloop._core.metrics import to_host
from fnloop._core.serialize import Pending
from fnloop._core.torchmetrics import TorchMetric
from fnloop._core.types import Metric

__all__ = ["merge_metrics", "moved"]


def merge_metrics(
    metrics: Mapping[str, Metric], own: Iterable[str] | None = None
) -> dict[str, Metric]:
    """Combine metrics over all processes, in the order of their ranks, with one exchange.

    Args:
        metrics: name to metric, as this process has seen them.
        own: the names of those that are of this process's share of the data; by default all. The
            others are the same in every process already.

    Returns:
        Name to metric, on the host; the same in every process.
    """
    mine = to_host({k: m for k, m in metrics.items() if not isinstance(m, Pending)})
    sent = {k: m.to_cpu() if hasattr(m, "to_cpu") else m for k, m in mine.items()}
    parts = gather_objects((set(mine if own is None else own), sent))
    shared = set().union(*(names for names, _ in parts))  # some may have had no batch
    merged = dict(parts[0][1])
    for _, part in parts[1:]:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif name in shared:
                merged[name] = merged[name].combine(metric)
    return merged


def moved(metrics: Mapping[str, Metric], device: torch.device) -> dict[str, Metric]:
    """Return metrics, those of torchmetrics with their inputs on a device."""
    return {
        name: metric.moved(device) if isinstance(metric, TorchMetric) else metric
        for name, metric in metrics.items()
    }
