"""The other processes of a run, or their absence. Chosen once, when the run begins.

What several processes agree on, such as to stop, is in :mod:`fnloop._loop.consensus`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fnloop._core.state import TrainState
from fnloop._loop.consensus import Consensus
from fnloop._loop.interrupts import Interrupts

__all__ = ["Alone", "Peers", "is_alone", "peers_of"]


class Peers(Protocol):
    """What a run does together with its other processes."""

    @property
    def clock(self) -> Callable[[], float] | None:
        """Seconds since the run began, the same in every process; None in a single process."""
        ...

    def poll(self, state: TrainState, interrupts: Interrupts) -> None:
        """Exchange requests to stop or to save, if it is time to."""
        ...

    def hurry(self) -> None:
        """Exchange requests soon: what follows may take longer than what came before."""
        ...

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> None:
        """Wait for all processes at the end of an epoch, and check that they have not diverged."""
        ...

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        ...


class Alone:
    """A single process: there is nothing to exchange."""

    clock = None

    def poll(self, state: TrainState, interrupts: Interrupts) -> None: ...

    def hurry(self) -> None: ...

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> None: ...

    def explain(self, error: BaseException) -> None: ...


def is_alone(state: TrainState) -> bool:
    """Return whether a single process trains this state."""
    return state.backend.world_size == 1


def peers_of(state: TrainState) -> Peers:
    """Return the other processes of a run that begins with this state."""
    return Alone() if is_alone(state) else Consensus(state)
