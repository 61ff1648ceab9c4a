"""Optimizers with modes, such as schedule-free ones: other weights in evaluation than in training.

Their method ``eval`` replaces the weights by averages, and ``train`` goes back, but only up to
rounding. So an evaluation keeps the weights of training, and restores them exactly.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Set
from typing import Protocol

import torch
from torch import Tensor

from fnloop._core.optimizers import Group, optimizers_in
from fnloop._core.state import TrainState, parameters

__all__ = ["evaluation_weights", "to_training"]


class _Modal(Protocol):
    """An optimizer with modes."""

    param_groups: list[Group]
    state: Mapping[Tensor, dict[str, object]]

    def train(self) -> object: ...

    def eval(self) -> object: ...


def to_training(state: TrainState) -> None:
    """Switch the optimizers that have modes to that of training."""
    for optimizer in _with_modes(state):
        optimizer.train()


@contextlib.contextmanager
def evaluation_weights(state: TrainState) -> Iterator[Set[int]]:
    """Evaluate with the weights that the optimizers have for it, within a ``with`` block.

    Afterwards the weights and the modes of the optimizers are those from before. It gives the
    identities of the parameters whose weights may be others than in training.
    """
    optimizers = _with_modes(state)
    if not optimizers:
        yield frozenset()
        return
    params = parameters(state)
    kept = [p.detach().clone() for p in params]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = [(own, {*own}) for one in optimizers for own in one.state.values()]
    settings = [dict(group) for group in groups]
    flags = [
        {name: value for name, value in vars(optimizer).items() if isinstance(value, bool)}
        for optimizer in optimizers
    ]
    try:
        for optimizer in optimizers:
            optimizer.eval()
        yield {*map(id, params)}
    finally:
        with torch.no_grad():
            for p, value in zip(params, kept, strict=True):
                p.copy_(value)
        for own, names in held:  # eval may keep the weights to train with there
            for name in own.keys() - names:
                del own[name]
        for group, before in zip(groups, settings, strict=True):
            group.update(before)
        for optimizer, before in zip(optimizers, flags, strict=True):
            vars(optimizer).update(before)


def _with_modes(state: TrainState) -> list[_Modal]:
    found = optimizers_in(state.optimizer).values()
    return [one for one in found if _has_modes(type(one))]  # type: ignore[misc]


@functools.cache
def _has_modes(optimizer: type) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
