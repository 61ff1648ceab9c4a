"""Make optimizers capturable: they keep their learning rates and their counts on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend import torch_compat
from fnloop._core.optimizers import SCHEDULED, Group
from fnloop._core.serialize import as_number
from fnloop._graphs.guards import CaptureError

__all__ = ["OriginalSettings", "make_capturable", "read_from_tensors", "undo_capturable"]


class OriginalSettings(NamedTuple):
    """Settings of a parameter group as the user gave them."""

    optimizer: Optimizer
    group: Group
    settings: Group


def make_capturable(
    optimizers: Collection[Optimizer], device: torch.device
) -> list[OriginalSettings]:
    """Move what optimizers can keep on the device there: the learning rate, and counts.

    SGD and Adagrad have no setting ``capturable``. They read a learning rate on the device only in
    their fused form.

    Returns:
        What :func:`undo_capturable` needs.

    Raises:
        CaptureError: one was told not to be fused, or cannot be captured at all. Then nothing has
            been changed.
    """
    for optimizer in optimizers:
        _check_fused(optimizer)
    every = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    original = []
    for optimizer, group in every:
        kept = {k: group[k] for k in ("lr", "capturable", "fused") if k in group}
        original.append(OriginalSettings(optimizer, group, kept))
        _move_rate(group, [other for _, other in every if other is not group], device)
        if "capturable" in group:
            group["capturable"] = True
        elif "fused" in group:
            group["fused"] = True
    for optimizer in optimizers:
        _move_counts(optimizer, optimizer.state, device)
        torch_compat.silence_capturable_warning(optimizer)  # it runs eagerly during the warm-up
    return original


def read_from_tensors(optimizer: Optimizer) -> None:
    """Let an optimizer read its learning rates from tensors, so that compiled code fits all values.

    On a GPU it is also made capturable if it can be: compiled code then has its counts there.
    """
    groups = optimizer.param_groups
    for group in groups:
        if type(group.get("lr")) not in (int, float) or not group["params"]:
            continue  # nearly always: it was moved in an earlier update
        device = group["params"][0].device
        _move_rate(group, (), device)
        if device.type != "cpu":
            if "capturable" in group:
                group["capturable"] = True
            _move_counts(optimizer, group["params"], device)
            torch_compat.silence_capturable_warning(optimizer)  # it also runs eagerly


def _move_rate(group: Group, others: Collection[Group], device: torch.device) -> None:
    """Move the learning rate of a group into a tensor of its own, since each is filled alone.

    A GPU reads it in single precision.
    """
    if "lr" not in group:
        return
    given = group["lr"]
    single = torch.float64 if device.type == "cpu" else torch.float32
    dtype = None if isinstance(given, Tensor) else single
    rate = torch.as_tensor(given, dtype=dtype, device=device)
    shared = any(rate is other.get("lr") for other in others)
    mark = group.get(f"{SCHEDULED}lr")
    group["lr"] = rate.clone() if shared else rate
    if mark is given or mark == given:  # else the user has changed it, as the schedule will say
        _keep_scheduled(group)


def _move_counts(optimizer: Optimizer, keys: Iterable[Tensor], device: torch.device) -> None:
    """Move the scalars in the state that an optimizer keeps for these parameters."""
    for values in [optimizer.state[key] for key in keys if key in optimizer.state]:
        if isinstance(values, dict):
            counts = {k: v for k, v in values.items() if isinstance(v, Tensor) and not v.ndim}
            values.update({k: v.to(device) for k, v in counts.items()})


def _check_fused(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        of_torch = getattr(torch.optim, name, None) is type(optimizer)
        if of_torch and "capturable" not in group and "fused" not in group:
            raise CaptureError(f"{name} reads numbers to the host in every update")
        fused = group.get("fused", True)
        if fused is None:
            fused = not group.get("foreach")
        if "capturable" not in group and fused is not True:
            raise CaptureError(
                f"{name} reads its learning rate to the host: write {name}(..., fused=True)"
            )


def undo_capturable(original: list[OriginalSettings]) -> None:
    """Restore the settings of optimizers, except that they keep the value of a learning rate."""
    for optimizer, group, settings in original:
        rate = group.get("lr")
        group.update(settings)
        if isinstance(rate, Tensor):
            group["lr"] = rate if isinstance(settings["lr"], Tensor) else as_number(rate)
            _keep_scheduled(group)
        if not (settings.get("capturable", True) or settings.get("fused")):
            for p in group["params"]:
                values = optimizer.state.get(p, {})
                values.update({k: v.cpu() for k, v in values.items() if k == "step"})


def _keep_scheduled(group: Group) -> None:
    """Let a schedule recognize a learning rate as its own after a change of type."""
    if f"{SCHEDULED}lr" in group:
        group[f"{SCHEDULED}lr"] = group["lr"]
