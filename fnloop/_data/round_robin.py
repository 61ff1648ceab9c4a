"""Which process works on what: batches are dealt in turn, like cards, in each round one to every process.

In the last round a process that gets none borrows the first one's, in case that all have to take part in exchanges; it counts
for nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs

from fnloop._backend import torch_compat
from fnloop._backend.collectives import ORDER_MISMATCH, all_reduce_max
from fnloop._backend.transfer import tensors_in
from fnloop._backend.watchdog import DIVERGED
from fnloop._data.window import Padding

__all__ = ["RoundRobin", "ShardState"]


@attrs.define
class ShardState:
    """What has been dealt of an epoch to all processes.

    Args:
        sizes: of each round that was not worked on yet, the size of its batches if all have one, else 0.
        order: a checksum of the indices of its samples, where they are known.
    """

    sizes: deque[int] = attrs.field(factory=deque)
    order: int = 0

    def begin(self) -> None:
        """Begin an epoch."""
        self.sizes.clear()
        self.order = 0

    def noted(self, index: Any) -> Any:
        """Note the indices of a batch, and return them."""
        with contextlib.suppress(TypeError, OverflowError):  # not numbers
            self.order = zlib.crc32(
                array("q", index if isinstance(index, list) else [index]), self.order
            )
        return index

    def check(self) -> None:
        """Raise if others have dealt in another order. Every process has to call it."""
        most, least = all_reduce_max([self.order, -self.order])
        if most != -least:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")


class RoundRobin(NamedTuple):
    """Deals to each process in turn.

    Args:
        rank: the number of this process.
        processes: how many there are.
        dealt: what has been dealt.
    """

    rank: int
    processes: int
    dealt: ShardState

    def __call__(
        self, things: Any, size_of: Callable[[Any], int], made: bool = False
    ) -> Iterator[Any]:
        """Deal things, of a size each; ``made`` when they are asked for, so that one may be in the memory of another."""
        things = iter(things)
        return (
            things
            if self.processes == 1
            else self._dealt(things, size_of, _version if made else lambda thing: None)
        )

    def _dealt(
        self,
        things: Iterator[Any],
        size_of: Callable[[Any], int],
        version: Callable[[Any], int | None],
    ) -> Iterator[Any]:
        __tracebackhide__ = True
        self.dealt.begin()
        while stamped := [
            (thing, version(thing)) for thing in itertools.islice(things, self.processes)
        ]:
            hand = [thing for thing, _ in stamped]
            if any(version(thing) != then for thing, then in stamped):
                raise ValueError(_REFILLED.format(self.processes))
            sizes = {size_of(thing) for thing in hand} if len(hand) == self.processes else {0}
            self.dealt.sizes.append(sizes.pop() if len(sizes) == 1 else 0)
            yield hand[self.rank] if self.rank < len(hand) else Padding(hand[0])


_REFILLED = (
    "the loader fills one tensor again for its next batch, and {} processes share out as many batches at once: let it make a "
    "new one for each (yield x.clone())"
)


def _version(thing: Any) -> int | None:
    """Return how often the first tensor of a batch has been changed in place."""
    first = next(tensors_in(thing), None)
    return None if first is None or first.is_inference() else torch_compat.version_of(first)
