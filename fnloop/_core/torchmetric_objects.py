"""Objects of torchmetrics: copies, updates, and merges of metrics and collections.

What has no public name in torchmetrics 1.4 to 1.9 is used here only: ``_to_sync``,
``_update_count``, ``_defaults`` and ``_reductions``.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torchmetrics import Metric as ForeignMetric
    from torchmetrics import MetricCollection

    Torchmetric = ForeignMetric | MetricCollection

__all__ = [
    "Arguments",
    "Parts",
    "absorb_",
    "fresh_copy",
    "key_of",
    "load_states",
    "merge_",
    "merged",
    "merges_exactly",
    "states_of",
    "update_",
]

Arguments = tuple[object, ...]  # of one call of Metric.update
Parts = dict[str, Any]


def key_of(template: Torchmetric) -> str | None:
    """Return the names of the metrics of a collection as one, or None for a single metric."""
    return ", ".join(map(str, template.keys())) if isinstance(template, nn.ModuleDict) else None


def _members(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return a metric, or those of a collection by name, without a copy of what a group shares."""
    if isinstance(metric, nn.ModuleDict):
        return cast("dict[str, ForeignMetric]", dict(metric.named_children()))
    return {"": metric}


def _metrics_in(metric: Torchmetric) -> Iterator[tuple[str, ForeignMetric, str | None]]:
    """Yield a metric, or those of a collection or a wrapper.

    Each comes with its path, and with the path of an earlier one whose states it shares, if there
    is one: they are of one compute group.
    """
    from torchmetrics import Metric as ForeignMetric

    if isinstance(metric, nn.ModuleDict):
        metric.items(copy_state=False)  # restores what a compute group shares
    earlier: dict[tuple[int, ...], str] = {}
    for path, module in metric.named_modules():
        if isinstance(module, ForeignMetric):
            states = tuple(map(id, module.metric_state.values()))
            yield path, module, earlier.get(states)
            if states:
                earlier.setdefault(states, path)


def fresh_copy(template: Torchmetric) -> Torchmetric:
    """Return a metric like the template that has seen nothing and does not synchronize.

    It computes its value whenever asked, without what torchmetrics does around ``compute`` to
    synchronize and to keep the value: that takes half as long as the computing.
    """
    seen = copy.deepcopy(template)
    seen.reset()
    for _, metric, _ in _metrics_in(seen):
        metric.sync_on_compute = False
        metric.compute_with_cache = False  # merge_state keeps a value that was computed before
        metric._to_sync = False
    for member in _members(seen).values():
        member.compute = getattr(member.compute, "__wrapped__", member.compute)
    return seen


def update_(metric: Torchmetric, inputs: tuple[Arguments, ...]) -> Torchmetric:
    """Update a metric with inputs, on their device."""
    __tracebackhide__ = True
    for arguments in inputs:
        device = next(iter(_members(metric).values())).device
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != device:
                device = argument.device
                metric.to(device)
        metric.update(*arguments)
    return metric


# --- states as plain data


def states_of(metric: Torchmetric) -> Parts:
    """Return what a metric has seen, as plain data and tensors."""
    parts: Parts = {}
    for path, member, twin in _metrics_in(metric):
        parts[path] = (
            {"updates": member.update_count, "states": dict(member.metric_state)}
            if twin is None
            else {"like": twin}
        )
    own = parts.pop("", {})
    return own | ({"members": parts} if parts else {})


def load_states(metric: Torchmetric, parts: Parts) -> None:
    """Set what a metric has seen to what :func:`states_of` returned."""
    saved = {"": parts, **parts.get("members", {})}
    for path, member, _ in _metrics_in(metric):
        found = saved.get(path, {})
        found = saved[found["like"]] if "like" in found else found
        for name, value in copy.deepcopy(found.get("states", {})).items():
            setattr(member, name, value)
        member._update_count = found.get("updates", 0)


# --- merging


def merge_(metric: Any, other: Any) -> None:
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


# --- merging with the bits of a metric that has seen everything


@functools.cache
def _exact_merges() -> dict[object, Callable[..., object]]:
    """Return how a state is merged with that of a later metric, by its reduction."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    return {
        dim_zero_sum: torch.add,
        dim_zero_max: torch.maximum,
        dim_zero_min: torch.minimum,
        dim_zero_cat: operator.iadd,
    }


def merges_exactly(template: Torchmetric) -> bool:
    """Return whether a metric that has seen all inputs and one merged from parts are the same bits.

    They are if the metric says that an update depends on its inputs alone, and its states are
    counts, extremes, or lists. A sum of floating numbers depends on the order of the additions.
    """
    from torchmetrics import Metric as ForeignMetric

    members = _members(template).values()
    if sum(isinstance(module, ForeignMetric) for module in template.modules()) > len(members):
        return False  # a metric in a metric, which a reset may leave as it is
    return all(
        member.full_state_update is False
        and all(_is_exact(start, member._reductions[k]) for k, start in member._defaults.items())
        for member in members
    )


def _is_exact(start: object, reduction: object) -> bool:
    """Return whether a state that starts with a value merges exactly."""
    merge = _exact_merges().get(reduction)
    if not isinstance(start, Tensor):
        return merge is operator.iadd
    if merge is torch.add:
        return not (start.is_floating_point() or start.is_complex() or start.any())
    return merge in (torch.maximum, torch.minimum)


def merged(metric: Torchmetric, later: Torchmetric) -> Torchmetric:
    """Return a metric that has seen what two have, which merge exactly. Neither is changed."""
    kept: dict[int, object] = {}  # tensors are not copied: merging changes none
    for owner in _owners(metric).values():
        for state in owner.metric_state.values():
            kept |= {id(part): part for part in (state if isinstance(state, list) else [state])}
    found = copy.deepcopy(metric, kept)
    _add_states_(found, later)
    return found


def absorb_(metric: Torchmetric, later: Torchmetric) -> None:
    """Move to a metric what another has seen after it, which merge exactly."""
    _add_states_(metric, later)
    for owner in _owners(later).values():
        owner.reset()


def _add_states_(metric: Torchmetric, later: Torchmetric) -> None:
    """Add to the states of a metric those of a later one. No tensor is changed."""
    merges = _exact_merges()
    others = _members(later)
    for name, mine in _owners(metric).items():
        its = others[name]
        if mine.device != its.device:
            metric.to(its.device)
        for state, reduction in mine._reductions.items():
            setattr(mine, state, merges[reduction](getattr(mine, state), getattr(its, state)))
        mine._update_count += its.update_count


def _owners(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return the members whose states the others of their compute group share."""
    members = _members(metric)
    groups = metric.compute_groups if isinstance(metric, nn.ModuleDict) else {}
    return {group[0]: members[group[0]] for group in groups.values()} or members
