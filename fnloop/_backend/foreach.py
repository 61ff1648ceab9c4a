"""Optimizers on the CPU, in fewer calls of torch where that is faster and has the same bits.

An optimizer whose ``foreach`` is None leaves it to torch how its parameters are updated. On the CPU
torch makes a dozen calls for each. ``foreach=True`` makes the same calculations with one call for
all parameters. Parameters of a few thousand elements take less time so; larger ones take more,
because they leave the cache between two calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

__all__ = ["in_few_calls"]

Group = dict[str, object]

_SAME_BITS = (SGD, Adam, AdamW)
_DTYPES = (torch.float32, torch.float64)  # in narrower ones foreach rounds a number first
# Settings that must be open, or off: torch refuses some of them, and with nesterov foreach changes
# the gradients.
_OPEN = ("foreach", "fused", "capturable", "differentiable", "nesterov")
_FEWEST = 8  # parameters
_MOST_EACH = 1 << 14  # elements of a parameter, on average
_MOST = 1 << 20  # elements of a group, for which memory is taken


@contextlib.contextmanager
def in_few_calls(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer update its small groups with one call for all, within a ``with`` block."""
    small = _small_groups(optimizer) if type(optimizer) in _SAME_BITS else []
    for group in small:
        group["foreach"] = True
    try:
        yield
    finally:
        for group in small:
            group["foreach"] = None


# By optimizer: its state, the dtypes of its parameters and the settings of its groups when they
# were looked at, and those groups that were small.
_known: WeakKeyDictionary[Optimizer, tuple[object, object, list[Group]]] = WeakKeyDictionary()


def _small_groups(optimizer: Optimizer) -> list[Group]:
    groups = optimizer.param_groups
    found = [
        (type(group["lr"]), *map(group.get, _OPEN), *[p.dtype for p in group["params"]])
        for group in groups
    ]
    state, before, small = _known.get(optimizer, (None, None, []))
    if state is not optimizer.state or before != found:
        small = [group for group in groups if _is_small(group, optimizer.state)]
        _known[optimizer] = optimizer.state, found, small
    return small


def _is_small(group: Group, state: Mapping[Tensor, Mapping[str, object]]) -> bool:
    """Return whether ``foreach`` is left open for a group, is faster, and has the same bits."""
    if any(map(group.get, _OPEN)) or any(group.get(name, 0) is not None for name in _OPEN[:2]):
        return False
    betas = cast(tuple[object, ...], group.get("betas", ()))
    if any(isinstance(number, Tensor) for number in (*group.values(), *betas)):
        return False
    params = cast(list[nn.Parameter], group["params"])
    for p in params:
        if type(p) is not nn.Parameter or not p.is_cpu or p.dtype not in _DTYPES:
            return False
        for own in (p.grad, *state.get(p, {}).values()):
            if isinstance(own, Tensor) and own.ndim and own.dtype is not p.dtype:
                return False
    if len({p.data_ptr() for p in params}) < len(params):  # one memory would be updated twice
        return False
    elements = sum(p.numel() for p in params)
    return len(params) >= _FEWEST and elements <= min(_MOST_EACH * len(params), _MOST)
