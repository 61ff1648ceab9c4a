"""Which state owns a model and an optimizer, which every step updates in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

import torch
from torch import nn

from fnloop._core.optimizers import Group

__all__ = ["Ownership", "ParameterCache", "StaleStateError"]

State = TypeVar("State")


class StaleStateError(RuntimeError):
    """A state was used after it had been advanced: a newer state owns its model and optimizer."""


class Ownership(Generic[State]):
    """Tracks which state owns the model and the optimizer: the state whose generation this is.

    All states that a run makes of one model share it.

    Args:
        own_metrics: the names of the running metrics that are of each process's share of the data,
            as far as they are known. They are known before a run has shown them if the state is a
            copy, or from a checkpoint.
        seconds: the seconds that runs of this state have taken, until it last left one.
        copies: checksums of what was restored of the state of optimizers, where another process may
            be the one that continues it: the module ``optimizers`` of checkpoints uses them.
    """

    __slots__ = (
        "__weakref__",
        "compared",
        "copies",
        "equal_at",
        "generation",
        "newest",
        "own_metrics",
        "seconds",
    )

    def __init__(
        self,
        own_metrics: Iterable[str] = (),
        seconds: float = 0.0,
        copies: Mapping[tuple[str, ...], str] = MappingProxyType({}),
    ) -> None:
        self.own_metrics, self.seconds = set(own_metrics), seconds
        self.copies = dict(copies)
        self.generation: int | None = 0  # None while an optimizer changes the parameters
        self.newest: State | None = None  # what the last update made, until it is counted
        # Where the weights of all processes were last compared, and how far norms were apart.
        self.compared: tuple[int, float] = (0, 0.0)
        self.equal_at: int | None = None  # the last step at which they were not

    def for_copy(self, generation: int) -> Ownership[State]:
        """Return the ownership of a copy of the state of a generation, whose own begins at 0."""
        made: Ownership[State] = Ownership(self.own_metrics, self.seconds, self.copies)
        made.compared = self.compared[0] - generation, self.compared[1]
        made.equal_at = self.equal_at
        return made


class ParameterCache:
    """The parameters of a model and its optimizers, looked up once.

    Attributes:
        found: every parameter that backward may leave a gradient in, each once.
        trained: those of them that an optimizer updates, in the order of the model.
        groups: how many parameter groups there were; -1 before the first look.
    """

    __slots__ = ("found", "groups", "trained")

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []
        self.groups = -1

    def clear(self) -> None:
        """Look again at the next use: the model or a group may have changed."""
        self.groups = -1

    def look_up(self, model: nn.Module, groups: Sequence[Group]) -> None:
        """Look the parameters up."""
        trained = [p for group in groups for p in group["params"]]
        ids = {id(p) for p in trained}
        self.found = list({id(p): p for p in (*model.parameters(), *trained)}.values())
        self.trained, self.groups = [p for p in self.found if id(p) in ids], len(groups)
