"""Hints: what would be faster, said once. The settings are the user's."""

from __future__ import annotations

import functools

import torch
from torch.optim import Optimizer

from fnloop._display.log import log

__all__ = ["fused_hint", "suggest_fused"]


def suggest_fused(optimizer: Optimizer, device: torch.device) -> None:
    """Log, once, how the optimizer would be faster on this device, if it would."""
    if device.type == "cuda" and (hint := fused_hint(optimizer)):
        _once(hint)


@functools.cache
def _once(hint: str) -> None:
    log.warning(hint)


def fused_hint(optimizer: Optimizer) -> str | None:
    """Say how an optimizer on CUDA would be faster: fused, else for all parameters at once. None if it is, or can't be.

    Args:
        optimizer: any. What it was told explicitly to do (``fused=False``, ``foreach=True``) it is left to.
    """
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        dense = all(p.is_floating_point() and p.layout is torch.strided for p in group["params"])
        if not dense or group.get("fused") or group.get("differentiable"):
            continue
        if "fused" in group and group["fused"] is None and not group.get("foreach"):
            return f"fit: {name} makes several passes over the parameters; {name}(..., fused=True) makes one, to the same result"
        if group.get("foreach") is False:
            return f"fit: {name} updates one parameter after the other; leave out foreach=False, and it takes all at once"
    return None
