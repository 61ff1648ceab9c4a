"""Which process works on which batch: batches are distributed round-robin.

In an incomplete round, processes without a batch get the first one as padding. That is the last
round of an epoch. Where an update takes a number of batches of all processes together, it is the
last round of each update: then the updates are the same on any number of processes. With ``even``,
an incomplete round is left out, and ends the epoch.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.collectives import ORDER_MISMATCH, all_reduce_max
from fnloop._backend.transfer import tensors_in
from fnloop._backend.watchdog import DIVERGED
from fnloop._core.types import Batch
from fnloop._data.window import Padding

__all__ = ["Index", "RoundRobin", "SingleProcess", "batch_size_of", "sharing_among", "version"]

Index = Any  # what a sampler yields: the index of a sample, or a list of them
Item = TypeVar("Item")


class SingleProcess:
    """Gives everything to the only process.

    Args:
        window: the batches of an update, of all processes together; None if each process takes a
            number of its own.

    Attributes:
        processes: the number of processes.
        complete: the batches of a complete round; a loader that drops incomplete batches drops an
            incomplete round with them.
        order: a checksum of the indices of an epoch's samples, where they are known.
    """

    processes = complete = 1
    order = 0

    def __init__(self, window: int | None = None) -> None:
        self.window = window

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], reused: bool = False
    ) -> Iterator[Item | Padding]:
        """Return this process's items.

        Args:
            items: what is distributed.
            size_of: how many samples an item has, or 0 if that is not known.
            reused: whether items are made on demand, and may reuse the memory of the last one.
        """
        return iter(items)

    def kept(self, batches: int) -> int:
        """Return how many of the batches that follow are distributed; others are left out."""
        return batches

    def note_order(self, indices: Iterator[Index], batched: bool) -> Iterator[Index]:
        """Return the indices of samples, noting their order as they pass.

        Args:
            indices: what a sampler yields.
            batched: whether that is the indices of a batch each time.
        """
        return indices

    def uniform_batch_size(self, rounds: int) -> int:
        """Return the size of every batch in the next rounds if all are equal, else 0.

        Call it once for each round.
        """
        return 0

    def check_order(self) -> None:
        """Raise if the processes have read the data in different orders. A collective."""


class RoundRobin(SingleProcess):
    """Gives each process one item in turn.

    Args:
        rank: the number of this process.
        processes: how many there are.
        window: as for a single process.
        even: whether an incomplete round is left out.

    Raises:
        ValueError: an incomplete round is left out, and each update would have one.
    """

    def __init__(
        self, rank: int, processes: int, window: int | None = None, even: bool = False
    ) -> None:
        if even and window is not None and window % processes:
            raise ValueError(
                f"even(loader) leaves out rounds in which a process has no batch, and an update of "
                f"{window} batches in all has such a round on {processes} processes: write "
                "accumulate(n), n batches on each process, or make batches of another size"
            )
        super().__init__(window)
        self.rank, self.processes, self.even = rank, processes, even
        self.complete = processes if window is None else 1
        self._sizes: deque[int] = deque()  # of rounds ahead: their batch size, or 0 if it differs

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], reused: bool = False
    ) -> Iterator[Item | Padding]:
        __tracebackhide__ = True
        self._sizes.clear()
        self.order = 0
        items, sizes = iter(items), itertools.cycle(self._round_sizes())
        while round_ := [
            (item, version(item) if reused else None)
            for item in itertools.islice(items, next(sizes))
        ]:
            if self.even and len(round_) < self.processes:
                return
            if reused and any(version(item) != before for item, before in round_):
                raise ValueError(
                    f"the loader reuses a tensor for its next batch, but {self.processes} "
                    "processes need that many batches at once: let it make a new one for each "
                    "(yield x.clone())"
                )
            batches = [item for item, _ in round_]
            self._sizes.append(_common([*map(size_of, batches)], self.processes))
            yield batches[self.rank] if self.rank < len(batches) else Padding(batches[0])

    def kept(self, batches: int) -> int:
        return batches // self.processes * self.processes if self.even else batches

    def _round_sizes(self) -> list[int]:
        """Return how many batches each round of an update has."""
        whole, rest = divmod(self.window or self.processes, self.processes)
        return [self.processes] * whole + [rest] * (rest > 0)

    def note_order(self, indices: Iterator[Index], batched: bool) -> Iterator[Index]:
        return map(self._note, map(list, indices) if batched else indices)

    def _note(self, index: Index) -> Index:
        with contextlib.suppress(TypeError, OverflowError):  # the indices are not numbers
            numbers = array("q", index if isinstance(index, list) else [index])
            self.order = zlib.crc32(numbers, self.order)
        return index

    def uniform_batch_size(self, rounds: int) -> int:
        return _common([self._sizes.popleft() if self._sizes else 0 for _ in range(rounds)], rounds)

    def check_order(self) -> None:
        largest, negative_smallest = all_reduce_max([self.order, -self.order])
        if largest != -negative_smallest:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")


def sharing_among(
    processes: int, rank: int, window: int | None = None, even: bool = False
) -> SingleProcess:
    """Return how a process gets its share of the batches."""
    return SingleProcess(window) if processes == 1 else RoundRobin(rank, processes, window, even)


def batch_size_of(batch: Batch) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


def _common(sizes: list[int], expected: int) -> int:
    """Return the size that all have, or 0 if they differ or are fewer than expected."""
    return sizes[0] if len(sizes) == expected and len({*sizes}) == 1 else 0


def version(item: object) -> int | None:
    """Return how often the first tensor of a batch has been changed in place."""
    first = next(tensors_in(item), None)
    return None if first is None or first.is_inference() else torch_compat.version_of(first)
