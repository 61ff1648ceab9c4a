"""Which process works on which batch: batches are distributed round-robin."""

from __future__ import annotations

import contextlib
import itertools
import logging
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from fnloop._data.loaders import (
    NONE_LEFT,
    First,
    Glimpse,
    Padding,
    Place,
    SingleProcess,
    alike,
    glimpse,
)
from fnloop._extensions.engines.exchanges import DIVERGED
from fnloop.extend import Batch, collectives

log = logging.getLogger("fnloop")

Item = TypeVar("Item")

# In an incomplete round, processes without a batch get the first one as padding. That is the last
# round of an epoch. Where an update takes a number of batches of all processes together, it is the
# last round of each update: then the updates are the same on any number of processes. With `even`,
# an incomplete round is left out, and ends the epoch.
#
# Every process has to know the same batches at the same positions. So the order of indices is
# compared, where batches are taken by index, and a glimpse of the first batch of a pass.

ORDER_MISMATCH = (
    "each has the data in another order. If a sampler draws from a generator of its own, seed it "
    "with the same number in every process; or leave the order to fnloop: DataLoader(dataset, "
    "batch_size, shuffle=True)"
)
_OTHER_DATA = (
    "each has the data in another order, or other data: process 0 and process {} have read "
    "different batches at the same position. Every process takes its turn of the same batches. So "
    "sort the names of files, and seed what shuffles, splits or generates data with the same "
    "number in every process; or mark a loader that gives each process its own share, "
    "sharded(loader)"
)
_OTHER_STREAM = (
    "processes {} and {} have the same share of the data, and have read different batches from "
    "sharded(loader). Choose the share by state.backend.data_rank, here {}, and "
    "state.backend.data_size, and seed what shuffles it with the same number in both"
)
_RANDOM_DATA = (
    "process 0 and process %d have read different batches at the same position, and different ones "
    "when they read them again: the loader draws from generators that fnloop does not seed. Every "
    "process takes its turn, so that samples may be repeated and others left out. Draw from the "
    "generators of torch, NumPy or Python, which are seeded for each batch; or mark a loader that "
    "gives each process its own share, sharded(loader) (logged once)"
)


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

    reads_ahead = True

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
        self.head: Any = None  # the first item of the pass, if all processes read it
        self.samples = True  # whether to read a sample to compare; once is enough
        self._compares = True
        self.complete = processes if window is None else 1
        self._sizes: deque[int] = deque()  # of rounds ahead: their batch size, or 0 if it differs

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], counts: bool = False
    ) -> Iterator[Item | Padding]:
        rounds = self._rounds(items, size_of)
        return self.held.counted(rounds) if counts else rounds

    def _rounds(
        self, items: Iterable[Item], size_of: Callable[[Item], int]
    ) -> Iterator[Item | Padding]:
        __tracebackhide__ = True
        self._sizes.clear()
        self.order, self.head, self.first = 0, None, None
        items, sizes = iter(items), itertools.cycle(self._round_sizes())
        while batches := [*itertools.islice(items, next(sizes))]:
            if self.even and len(batches) < self.processes:
                return
            if self.head is None:
                self.head = batches[0]
            self._sizes.append(_common([*map(size_of, batches)], self.processes))
            yield batches[self.rank] if self.rank < len(batches) else Padding(batches[0])

    def again(self) -> SingleProcess:
        return type(self)(self.rank, self.processes, self.window, self.even)

    def noting_first(self, batches: Iterator[Batch], at: Place) -> Iterator[Batch]:
        __tracebackhide__ = True
        for batch in batches:
            self.first = First(glimpse(batch if self.head is None else self.head), at)
            yield batch
            break
        yield from batches

    def sampling_first(
        self,
        items: Iterator[Item],
        at: Place,
        see: Callable[[Item], Item],
        make: Callable[[Iterator[Item]], Iterator[Batch]],
    ) -> Iterator[Batch]:
        __tracebackhide__ = True
        if not self.samples:
            yield from make(items)
            return
        batches = make(self._after_first(items, see))
        if (found := next(batches, NONE_LEFT)) is not NONE_LEFT:
            self.first = First(_joined(found), at)
        yield from batches

    def _after_first(self, items: Iterator[Item], see: Callable[[Item], Item]) -> Iterator[Item]:
        __tracebackhide__ = True
        for item in items:
            yield see(self.head)
            yield item
            break
        yield from items

    def kept(self, batches: int) -> int:
        return batches // self.processes * self.processes if self.even else batches

    def _round_sizes(self) -> list[int]:
        """Return how many batches each round of an update has."""
        whole, rest = divmod(self.window or self.processes, self.processes)
        return [self.processes] * whole + [rest] * (rest > 0)

    def note_order(self, indices: Iterator[Any], batched: bool) -> Iterator[Any]:
        return map(self._note, map(list, indices) if batched else indices)

    def _note(self, index: Any) -> Any:
        with contextlib.suppress(TypeError, OverflowError):  # the indices are not numbers
            numbers = array("q", index if isinstance(index, list) else [index])
            self.order = zlib.crc32(numbers, self.order)
        return index

    def uniform_batch_size(self, rounds: int) -> int:
        return _common([self._sizes.popleft() if self._sizes else 0 for _ in range(rounds)], rounds)

    def check_order(
        self, read_again: Callable[[First], Glimpse | None], indices: bool, what: str
    ) -> None:
        __tracebackhide__ = True
        first = self.first if self._compares else None
        self.first, self.samples = None, self.samples and first is None
        order = self.order if indices else 0
        mark = -1 if first is None or first.glimpse is None else _checksum(first.glimpse)
        order_max, order_min, mark_max, mark_min = collectives.all_reduce_max(
            [order, -order, mark, -mark], what
        )
        if order_max != -order_min:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        if mark_max != -mark_min:
            self._compare(first, read_again, what)

    def _compare(
        self, first: First | None, read_again: Callable[[First], Glimpse | None], what: str
    ) -> None:
        """Raise if the first batches differ, and each process reads its own one again."""
        __tracebackhide__ = True
        seen = again = None
        if first is not None:
            seen = first.glimpse
            with contextlib.suppress(Exception):  # no other process may wait for this one
                again = read_again(first)
        everywhere = collectives.gather_from_all((seen, again), what)
        if any(glimpse is None for glimpse, _ in everywhere):
            return
        own = everywhere[0][0]
        other = next((r for r, (found, _) in enumerate(everywhere) if not alike(own, found)), None)
        if other is None:
            return
        if all(alike(glimpse, once_more) for glimpse, once_more in everywhere):
            raise RuntimeError(f"{DIVERGED}: {_OTHER_DATA.format(other)}")
        self._compares = self.samples = False
        if collectives.rank_and_size()[0] == 0:
            log.warning(_RANDOM_DATA, other)


class OwnStreams(RoundRobin):
    """Each share of the data is a stream of its own; processes that have one share read it alike.

    The arguments are those of :class:`RoundRobin`.
    """

    def check_order(
        self, read_again: Callable[[First], Glimpse | None], indices: bool, what: str
    ) -> None:
        __tracebackhide__ = True
        first, self.first = self.first, None
        seen = None if first is None else first.glimpse
        everywhere = collectives.gather_from_all((self.rank, seen), what)
        heads: dict[int, tuple[int, Glimpse]] = {}  # by share, of the first process that has it
        for process, (share, found) in enumerate(everywhere):
            if found is None:
                continue
            before, head = heads.setdefault(share, (process, found))
            if not alike(head, found):
                raise RuntimeError(f"{DIVERGED}: {_OTHER_STREAM.format(before, process, share)}")


def share(
    processes: int, rank: int, window: int | None, even: bool, streams: bool
) -> SingleProcess:
    """Return how one of several processes gets its share, as ``sharing_among`` asks for it."""
    if streams:
        return OwnStreams(rank, processes, window, even)
    return RoundRobin(rank, processes, window, even)


def _common(sizes: list[int], expected: int) -> int:
    """Return the size that all have, or 0 if they differ or are fewer than expected."""
    return sizes[0] if len(sizes) == expected and len({*sizes}) == 1 else 0


def _joined(found: Any) -> Glimpse | None:
    """Return one glimpse, given one or a mapping of several."""
    if not isinstance(found, Mapping):
        return found
    parts = [_joined(part) for part in found.values()]
    known = [part for part in parts if part is not None]
    return [*itertools.chain.from_iterable(known)] if len(known) == len(parts) else None


def _checksum(seen: Glimpse) -> int:
    crc = 0
    for shape, numbers in seen:
        crc = zlib.crc32(repr(shape).encode(), crc)
        crc = zlib.crc32(numbers.view(torch.uint8).numpy().data, crc)
    return crc
