"""Optimizers on the CPU, in fewer calls of torch where that is faster and has the same bits.

An optimizer whose ``foreach`` is None leaves it to torch how its parameters are updated. On the CPU
torch makes a dozen calls for each. ``foreach=True`` makes the same calculations with one call for
all parameters. Parameters of a few thousand elements take less time so; larger ones take more,
because they leave the cache between two calls.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

__all__ = ["in_few_calls"]

Group = dict[str, object]

_SAME_BITS = (SGD, Adam, AdamW)
_DTYPES = (torch.float32, torch.float64)  # in narrower ones foreach rounds a number first
_FEWEST = 8  # parameters
_MOST_EACH = 1 << 14  # elements of a parameter, on average
_MOST = 1 << 20  # elements of a group, for which memory is taken


@contextlib.contextmanager
def in_few_calls(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer update its small groups with one call for all, within a ``with`` block."""
    chosen = []
    if type(optimizer) in _SAME_BITS:
        chosen = [group for group in optimizer.param_groups if _is_open(group)]
        chosen = [group for group in chosen if _is_faster(group["params"], optimizer.state)]
    try:
        for group in chosen:
            group["foreach"] = True
        yield
    finally:
        for group in chosen:
            group["foreach"] = None


def _is_open(group: Group) -> bool:
    """Return whether the user has left ``foreach`` to torch, and torch takes it here."""
    if group.get("foreach", 0) is not None or group.get("fused") is not None:
        return False
    unlike = "capturable", "differentiable", "nesterov"  # which changes the gradients
    numbers = *group.values(), *cast(tuple[object, ...], group.get("betas", ()))
    return not (any(map(group.get, unlike)) or any(isinstance(n, Tensor) for n in numbers))


def _is_faster(params: Sequence[Tensor], state: Mapping[Tensor, Mapping[str, object]]) -> bool:
    """Return whether parameters are many and small, and ``foreach`` has the bits of a plain step.

    It is asked before each update, because anything may have changed.
    """
    if len(params) < _FEWEST or not all(map(_is_plain, params)):
        return False
    if not all(_is_like(p, own) for p in params for own in (p.grad, *state.get(p, {}).values())):
        return False
    places = sorted((p.data_ptr(), p.numel() * p.element_size()) for p in params)
    if any(start + size > after for (start, size), (after, _) in itertools.pairwise(places)):
        return False  # one memory is updated twice
    return sum(p.numel() for p in params) <= min(_MOST_EACH * len(params), _MOST)


def _is_plain(parameter: Tensor) -> bool:
    return type(parameter) is nn.Parameter and parameter.is_cpu and parameter.dtype in _DTYPES


def _is_like(parameter: Tensor, own: object) -> bool:
    """Return whether foreach takes a gradient, or what an optimizer keeps, with a parameter."""
    if not isinstance(own, Tensor) or own.dtype is parameter.dtype:
        return True
    return own.ndim == 0 and own.dtype in _DTYPES  # the number of its updates
