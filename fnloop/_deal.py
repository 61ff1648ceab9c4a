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

from fnloop._joint import Borrowed

__all__ = ["Deal", "Dealt"]


@attrs.define
class Dealt:
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
            self.order = zlib.crc32(array("q", index if isinstance(index, list) else [index]), self.order)
        return index


class Deal(NamedTuple):
    """Deals to each process in turn.

    Args:
        rank: the number of this process.
        processes: how many there are.
        dealt: what has been dealt.
    """

    rank: int
    processes: int
    dealt: Dealt

    def __call__(self, things: Any, size_of: Callable[[Any], int]) -> Iterator[Any]:
        things = iter(things)
        return things if self.processes == 1 else self._dealt(things, size_of)

    def _dealt(self, things: Iterator[Any], size_of: Callable[[Any], int]) -> Iterator[Any]:
        __tracebackhide__ = True
        self.dealt.begin()
        for first in things:
            rest = tuple(itertools.islice(things, self.processes - 1))
            full = len(rest) == self.processes - 1
            sizes = {size_of(thing) for thing in (first, *rest)} if full else {0}
            self.dealt.sizes.append(sizes.pop() if len(sizes) == 1 else 0)
            if self.rank <= len(rest):
                yield rest[self.rank - 1] if self.rank else first
            else:
                yield Borrowed(first)
