"""A sum whose bits do not depend on which process has which part of it.

The batches of an update have positions, 0 to n - 1. Their gradients are combined in a binary tree
over the positions: the root is made of the even and of the odd ones, each of them again of every
second one of its own, and so on. So the tree follows from n alone. Batches are distributed
round-robin. With 1, 2, 4, 8, ... processes, those of a process are a whole subtree: it exchanges
one sum. With another number it exchanges each of its batches by itself.

A class of the tree is a ``range`` of positions, and ``members[::2]`` and ``members[1::2]`` are the
two that it is made of. Positions after the last batch change nothing, as their part is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

__all__ = ["TreeSum", "classes_of", "depth_first", "join"]

Part = TypeVar("Part")
Combine = Callable[[Part | None, Part | None], Part | None]


class TreeSum(Generic[Part]):
    """The part of a sum in a tree that one process can make alone.

    Parts are combined as soon as both halves of a class are there. If they come in the order of
    :func:`depth_first`, and the number of processes is a power of two, no more are held than the
    tree is deep, and one.

    Args:
        combine: combines the parts of two classes, the even half first. It may change both.
        leaves: how many positions there are. Process r has those where position % processes is r.
        processes: how many there are.
    """

    def __init__(self, combine: Combine[Part], leaves: int, processes: int = 1) -> None:
        self._combine, self.leaves, self._processes = combine, leaves, processes
        self.parts: dict[range, Part | None] = {}

    def add(self, position: int, part: Part | None) -> None:
        """Add the part of a position of this process; None if it adds nothing."""
        leaf, *above = reversed([*_path(range(self.leaves), position)])
        self.parts[leaf] = part
        for members in above:
            even, odd = members[::2], members[1::2]
            both = even in self.parts and odd in self.parts
            if not (both and _has_one_owner(members, self._processes)):
                return
            self.parts[members] = self._combine(self.parts.pop(even), self.parts.pop(odd))


def _has_one_owner(members: range, processes: int) -> bool:
    return len(members) == 1 or not members.step % processes


def _path(members: range, position: int) -> Iterator[range]:
    """Yield the classes that a position is in, from the root to the leaf."""
    yield members
    while len(members) > 1:
        even, odd = members[::2], members[1::2]
        members = even if position in even else odd
        yield members


@functools.lru_cache(maxsize=64)
def classes_of(rank: int, leaves: int, processes: int) -> tuple[range, ...]:
    """Return the classes of which a process has all positions, the largest ones.

    Every process has as many, if all have as many positions.

    Example:
        >>> [[*members] for members in classes_of(0, 8, 2)]
        [[0, 2, 4, 6]]
        >>> [[*members] for members in classes_of(0, 6, 3)]
        [[0], [3]]
    """
    found = _classes(range(leaves), processes)
    return tuple(members for members in found if rank == members[0] % processes)


def _classes(members: range, processes: int) -> Iterator[range]:
    if _has_one_owner(members, processes):
        yield members
        return
    yield from _classes(members[::2], processes)
    yield from _classes(members[1::2], processes)


def join(members: range, parts: Mapping[range, Part | None], combine: Combine[Part]) -> Part | None:
    """Return the part of a class, given those of all processes."""
    if members in parts:
        return parts[members]
    even, odd = members[::2], members[1::2]
    return combine(join(even, parts, combine), join(odd, parts, combine))


@functools.lru_cache(maxsize=64)
def depth_first(own: int, rank: int = 0, processes: int = 1) -> tuple[int, ...]:
    """Return the order in which a process computes its batches so that it holds the fewest parts.

    Example:
        >>> depth_first(8)
        (0, 4, 2, 6, 1, 5, 3, 7)
    """
    leaves = _classes(range(own * processes), own * processes)
    return tuple(p // processes for (p,) in leaves if rank == p % processes)
