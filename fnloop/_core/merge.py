"""What all processes exchange about a state: metrics are merged, and weights are compared.

All processes begin with the same weights and make the same updates, so their weights have the same
bits, or nearly so on processors of different kinds. Their norms are compared at the end of each
epoch and before each save, in one small exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from fnloop._backend import torch_compat
from fnloop._backend.collectives import all_reduce_max, gather_from_all, gather_objects
from fnloop._backend.fsdp import is_sharded
from fnloop._backend.watchdog import ADVICE, DIVERGED
from fnloop._core.metrics import to_host
from fnloop._core.optimizers import groups_in
from fnloop._core.serialize import Pending
from fnloop._core.state import TrainState, generation_of, ownership_of
from fnloop._core.torchmetrics import TorchMetric
from fnloop._core.types import Metric

__all__ = ["COUNTERS", "check_alike", "check_counters_alike", "merge_metrics", "moved"]

TOLERANCE = 1e-3  # by which norms may differ between different kinds of processors
# By which that may grow from one comparison to the next, and more in each update between them.
GROWTH, GROWTH_PER_UPDATE = 1e-5, 1e-6
COUNTERS = ("step", "skipped", "epoch")
_BY_HOOK = (
    "What a hook or a middleware does to weights must be the same everywhere: draw from torch, "
    "whose generators agree after backward, or fnloop.broadcast(...) what was drawn"
)
_BY_LOSS = (
    "It is in no optimizer, so the loss function changed it: make it a buffer "
    "(self.register_buffer), of which every process gets that of the main one"
)


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
    parts = gather_objects((set(mine if own is None else own), sent), "an exchange of metrics")
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


def check_alike(state: TrainState, what: str) -> None:
    """Raise in every process if the counters or the weights of the processes differ. A collective.

    Args:
        state: the newest state.
        what: what it is for, as errors name it.

    Raises:
        RuntimeError: they differ; the message names the weight and two processes.
    """
    norms = _norms(state)
    same = [*(getattr(state, name) for name in COUNTERS), *norms.values()]
    # The largest of -x is the smallest of x.
    found = all_reduce_max([*same, *(-value for value in same)], what)
    most, least = found[: len(same)], [-value for value in found[len(same) :]]
    n = len(COUNTERS)
    check_counters_alike(most[:n], least[:n])
    owner, now = ownership_of(state), generation_of(state)
    then, known = owner.compared
    limit = min(TOLERANCE, known + GROWTH + GROWTH_PER_UPDATE * max(now - then, 0))
    apart = [
        (high - low) / max(abs(low), abs(high), 1e-300)
        for low, high in zip(least[n:], most[n:], strict=True)
    ]
    worst = max(apart, default=0.0)
    if worst > limit:
        name = [*norms][apart.index(worst)]
        _raise_apart(state, name, norms[name], what)
    owner.compared = now, worst
    owner.equal_at = owner.equal_at if worst else state.step


def check_counters_alike(most: Sequence[float], least: Sequence[float]) -> None:
    """Raise unless the largest and the smallest of each counter agree."""
    if [*most] != [*least]:
        low, high = ([*map(int, values)] for values in (least, most))
        raise RuntimeError(
            f"{DIVERGED}: ({', '.join(COUNTERS)}) is {low} in one and {high} in another. {ADVICE}"
        )


def _raise_apart(state: TrainState, name: str, norm: float, what: str) -> NoReturn:
    every = gather_from_all(norm, what)
    low, high = min(every), max(every)
    trained = {id(p) for group in groups_in(state.optimizer) for p in group["params"]}
    is_trained = id(state.model.get_parameter(name)) in trained
    step = ownership_of(state).equal_at
    equal = "" if step is None else f"All norms were last equal at step {step}. "
    raise RuntimeError(
        f"{DIVERGED}: the norm of the weight {name} is from {low:.9g} in process "
        f"{every.index(low)} to {high:.9g} in process {every.index(high)}. {equal}"
        f"{_BY_HOOK if is_trained else _BY_LOSS}"
    )


def _norms(state: TrainState) -> dict[str, float]:
    """Return the norm of each parameter that every process has a copy of."""
    if is_sharded(state.model):
        return {}
    named = {name: p.detach() for name, p in state.model.named_parameters() if _has_norm(p)}
    if not named:
        return {}
    norms = torch.stack([norm.double() for norm in torch_compat.foreach_norm([*named.values()])])
    return dict(zip(named, norms.nan_to_num(0.0).tolist(), strict=True))


def _has_norm(p: Tensor) -> bool:
    wide = p.is_floating_point() and p.dtype.itemsize > 1
    return type(p) is nn.Parameter and wide and p.layout is torch.strided
