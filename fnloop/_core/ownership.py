"""Which state owns a model and an optimizer, which every step updates in place."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Ownership", "ParameterCache", "StaleStateError"]

State = TypeVar("State")


class StaleStateError(RuntimeError):
    """A state was used after it had been advanced: a newer state owns its model and optimizer."""


class Ownership(Generic[State]):
    """Tracks which state owns the model and the optimizer: the state whose generation this is.

    All states that a run makes of one model share it.
    """

    __slots__ = ("__weakref__", "generation", "newest")

    def __init__(self) -> None:
        self.generation: int | None = 0  # None while an optimizer changes the parameters
        self.newest: State | None = None  # what the last update made, until it is counted


class ParameterCache:
    """The parameters of a model and its optimizer, looked up once.

    A change in the number of parameter groups is noticed; for any other, call :meth:`clear`.
    """

    __slots__ = ("_found", "_groups")

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []
        self._groups = -1

    def clear(self) -> None:
        """Look again at the next call: the model or a group may have changed."""
        self._groups = -1

    def all_of(self, model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return every parameter that backward may leave a gradient in, each once."""
        groups = optimizer.param_groups
        if self._groups != len(groups):
            every = [*model.parameters(), *(p for group in groups for p in group["params"])]
            self._found, self._groups = list({id(p): p for p in every}.values()), len(groups)
        return self._found
