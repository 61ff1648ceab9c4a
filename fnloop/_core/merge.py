"""Metrics of several processes, combined into those of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fnloop._backend.collectives import gather_objects, rank_and_size
from fnloop._core.metrics import to_host
from fnloop._core.serialize import Pending

__all__ = ["merge_metrics"]


def merge_metrics(
    metrics: Mapping[str, Any], partial: Iterable[str] | None = None
) -> dict[str, Any]:
    """Combine metrics over all processes, in the order of their ranks, with one exchange.

    Args:
        metrics: name to metric, what this process has seen.
        partial: the names of those that are of this process's share of the data, all by default; the others are the same
            everywhere already.

    Returns:
        Name to metric, on the host where there are several processes; the same in each.
    """
    if rank_and_size()[1] == 1:
        return dict(metrics)
    mine = to_host({k: m for k, m in metrics.items() if not isinstance(m, Pending)})
    sent = {k: m.to_cpu() if hasattr(m, "to_cpu") else m for k, m in mine.items()}
    parts = gather_objects((set(mine if partial is None else partial), sent))
    shared = set().union(
        *(names for names, _ in parts)
    )  # who has had no batch of its own doesn't know
    whole = dict(parts[0][1])
    for _, part in parts[1:]:
        for name, metric in part.items():
            if name not in whole:
                whole[name] = metric
            elif name in shared:
                whole[name] = whole[name].combine(metric)
    return whole
