"""Which process works on which batch: batches are distributed round-robin."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch.utils.data import DistributedSampler

from fnloop._extensions.engines.exchanges import DIVERGED
from fnloop._extensions.engines.glimpses import Glimpse, alike, checksum, glimpse, joined
from fnloop.extend import Batch, Reader, Source, collectives, isolated

log = logging.getLogger("fnloop")

Item = TypeVar("Item")
Index = Batch  # what a sampler yields: the index of a sample, or a list of them
Place = tuple[int | None, int, int]  # the epoch, and the batches and samples of it before a place

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


class Padding(NamedTuple):
    """A padding batch for a process whose data ran out.

    It contributes nothing to gradients or metrics. It is only run if the forward pass performs
    collectives, in which the other processes would otherwise wait: see
    :class:`fnloop._extensions.engines.distributed.CollectiveProbe`.

    Args:
        batch: a batch of another process.
    """

    batch: Batch


class Window(NamedTuple):
    """What is known of a window.

    Args:
        batch_size: samples in each of its batches, in every process; 0 if that may differ.
        padding: for each of its batches, whether it is padding; empty if none is.
    """

    batch_size: int = 0
    padding: Sequence[bool] = ()


class First(NamedTuple):
    """What was seen of the first batch of a pass.

    Args:
        glimpse: some of its numbers, or None if they are not the same whenever it is read.
        at: where the pass began.
    """

    glimpse: Glimpse | None
    at: Place


# --------------------------------------------------------------------------------------------------
# A loader that every process reads, or of which each fetches the batches that are its own.


class RoundRobin(Source):
    """Gives each process one item in turn.

    Args:
        reader, seed, total, what: as for :class:`fnloop.extend.Source`.
        rank: the number of this process.
        processes: how many there are.

    Raises:
        ValueError: an incomplete round is left out, and each update would have one.
    """

    def __init__(
        self, reader: Reader, seed: int, total: int | None, what: str, rank: int, processes: int
    ) -> None:
        __tracebackhide__ = True
        self.rank, self.processes, self.even = rank, processes, reader.even
        self.complete = processes if total is None else 1
        super().__init__(reader, seed, total, what)
        if self.even and self.window is not None and self.window % processes:
            raise ValueError(
                f"even(loader) leaves out rounds in which a process has no batch, and an update of "
                f"{self.window} batches in all has such a round on {processes} processes: write "
                "accumulate(n), n batches on each process, or make batches of another size"
            )
        self.reads_ahead = True
        self.head: Batch = None  # the first item of the pass, if all processes read it
        self.first: First | None = None
        self.samples = True  # whether to read a sample to compare; once is enough
        self._compares = True
        # Of rounds ahead: their batch size, or 0 if it differs, and whether this one has padding.
        self.sizes: deque[int] = deque()
        self._padded: deque[bool] = deque()

    def again(self) -> RoundRobin:
        given = self.reader, self.seed, self.total, self.what
        return RoundRobin(*given, self.rank, self.processes)

    # --- what it has

    def kept(self, batches: int) -> int:
        return batches // self.processes * self.processes if self.even else batches

    def padded(self, batches: int) -> int:
        window = self.batches_in_update(1)
        whole, rest = divmod(batches, window)
        return whole * window + min(self.rounds_of(rest) * self.processes, window)

    def why_empty(self) -> str:
        if self.kept(1) == 0:
            return (
                " With even(loader), an epoch has no batch unless each of "
                f"{self.processes} processes has one: make batches smaller."
            )
        return super().why_empty()

    # --- each in turn

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], counts: bool = False
    ) -> Iterator[Item]:
        rounds = self._rounds(items, size_of)
        return self.held.counted(rounds) if counts else rounds

    def _rounds(self, items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[Item]:
        __tracebackhide__ = True
        self.sizes.clear()
        self._padded.clear()
        self.order, self.head, self.first = 0, None, None
        items, sizes = iter(items), itertools.cycle(self._round_sizes())
        while batches := [*itertools.islice(items, next(sizes))]:
            if self.even and len(batches) < self.processes:
                return
            if self.head is None:
                self.head = batches[0]
            self.sizes.append(_common([*map(size_of, batches)], self.processes))
            self._padded.append(self.rank >= len(batches))
            yield batches[0 if self._padded[-1] else self.rank]

    def _round_sizes(self) -> list[int]:
        """Return how many batches each round of an update has."""
        whole, rest = divmod(self.window or self.processes, self.processes)
        return [self.processes] * whole + [rest] * (rest > 0)

    def marked(self, batches: Iterator[Item]) -> Iterator[Batch]:
        return map(self._mark, batches)

    def _mark(self, batch: Batch) -> Batch:
        return Padding(batch) if self._padded.popleft() else batch

    def unpadded(self, batch: Batch) -> tuple[Batch, bool]:
        return (batch.batch, True) if type(batch) is Padding else (batch, False)

    # --- whether all processes read the same

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
        see: Callable[[Item, Callable[[object], object]], Item],
        make: Callable[[Iterator[Item]], Iterator[Batch]],
    ) -> Iterator[Batch]:
        __tracebackhide__ = True
        if not self.samples:
            yield from make(items)
            return
        batches = make(self._after_first(items, see))
        for found in batches:
            self.first = First(joined(found), at)
            break
        yield from batches

    def _after_first(
        self, items: Iterator[Item], see: Callable[[Item, Callable[[object], object]], Item]
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        for item in items:
            yield see(self.head, glimpse)
            yield item
            break
        yield from items

    def note_order(self, indices: Iterator[Index], batched: bool) -> Iterator[Index]:
        return map(self._note, map(list, indices) if batched else indices)

    def _note(self, index: Index) -> Index:
        with contextlib.suppress(TypeError, OverflowError):  # the indices are not numbers
            numbers = array("q", index if isinstance(index, list) else [index])
            self.order = zlib.crc32(numbers, self.order)
        return index

    def check_order(self, whole: bool = True) -> None:
        __tracebackhide__ = True
        first = self.first if self._compares else None
        self.first, self.samples = None, self.samples and first is None
        order, what = self.order if whole else 0, self._comparison
        mark = checksum(None if first is None else first.glimpse)
        order_max, order_min, mark_max, mark_min = collectives.all_reduce_max(
            [order, -order, mark, -mark], what
        )
        if order_max != -order_min:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        if mark_max != -mark_min:
            self._compare(first, what)

    @property
    def _comparison(self) -> str:
        return f"a comparison of {self.what}"

    def _compare(self, first: First | None, what: str) -> None:
        """Raise if the first batches differ, and each process reads its own one again."""
        __tracebackhide__ = True
        seen = again = None
        if first is not None:
            seen = first.glimpse
            with contextlib.suppress(Exception):  # no other process may wait for this one
                again = self._read_again(first)
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
            logging.getLogger("fnloop").warning(_RANDOM_DATA, other)

    def _read_again(self, first: First) -> Glimpse | None:
        """Return a glimpse of the first batch of a pass that is read once more."""
        again = self.again()
        with isolated(torch.device("cpu")):
            if first.at[0] is None and self.positions.draws:
                # An evaluation has put the generators back, and would draw the same once more.
                next(self.again().batches(*first.at), None)
            next(again.batches(*first.at), None)
        return None if again.first is None else again.first.glimpse


def take(source: Source, batch: Batch, window: int) -> tuple[Batch, Window]:
    """Return what a step takes, without the marks of padding, and what is known of it.

    Args:
        source: where it comes from.
        batch: a batch, or several. Call this once for each that the source gave.
        window: the window of the step.
    """
    sizes = source.sizes if isinstance(source, RoundRobin) else deque[int]()
    if window > 1 and not isinstance(batch, tuple):  # it is fetched batch by batch
        sizes.clear()
        return batch, Window(0, batch.padding)
    own = [*map(source.unpadded, (batch,) if window == 1 else batch)]
    size = _common([sizes.popleft() if sizes else 0 for _ in own], len(own))
    padding = tuple(is_padding for _, is_padding in own)
    if not any(padding):
        return batch, Window(size)
    batches = tuple(batch for batch, _ in own)
    return (batches[0] if window == 1 else batches), Window(size, padding)


def _common(sizes: list[int], expected: int) -> int:
    """Return the size that all have, or 0 if they differ or are fewer than expected."""
    return sizes[0] if len(sizes) == expected and len({*sizes}) == 1 else 0


# --------------------------------------------------------------------------------------------------
# A loader that gives each process its own share.


class OwnShare(RoundRobin):
    """Gives each process its own share of the data.

    Args:
        own: this process's share.
        rank, processes: as for :class:`RoundRobin`.
        alike: whether other processes have the same share.
    """

    def __init__(self, own: Source, rank: int, processes: int, alike: bool) -> None:
        __tracebackhide__ = True
        self.own, self._alike = own, alike
        reader = copy.copy(own.reader)
        reader.batch_size, reader.varies = None, False  # shares differ
        super().__init__(reader, own.seed, None, own.what, rank, processes)
        self.held, self.reads_ahead, self.positions = own.held, own.reads_ahead, own.positions
        self.positions.shards = processes
        length = own.length or 0
        longest, minus_shortest, some_unknown = collectives.all_reduce_max(
            [length, -length, own.length is None], "the length of a sharded loader"
        )
        kept = int(-minus_shortest if self.even else longest) * processes
        self.length = None if some_unknown else kept

    def read(self, epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        own = self.own.read(epoch, batch // self.processes, 0)
        if self._alike:
            own = self.noting_first(own, (epoch, batch, samples))
        return self._until_shortest(own) if self.even else self._pad_to_longest(own, epoch)

    def indices(self, epoch: int, batch: int, samples: int) -> Iterator[object]:
        return self.own.indices(epoch, batch // self.processes, 0)

    def _until_shortest(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield until the shortest share ends."""
        __tracebackhide__ = True
        while not collectives.any_rank((batch := next(batches, self)) is self):
            yield batch

    def _pad_to_longest(self, batches: Iterator[Batch], epoch: int | None) -> Iterator[Batch]:
        """Yield until the longest share ends; shorter shares are padded with their last batch.

        A run may continue where a share has ended already. Then all of it is read once more.
        """
        __tracebackhide__ = True
        last: Batch = self
        while collectives.any_rank(
            (batch := next(batches, self)) is not self, "the next batch of a sharded loader"
        ):
            if batch is self and last is self:
                for last in self.own.again().read(epoch, 0, 0):  # noqa: B007
                    pass
            if batch is self and last is self:
                raise ValueError(
                    "this process's share of the data has no batch, and those of other processes "
                    "have: give each process at least one"
                )
            yield Padding(last) if batch is self else batch
            last = last if batch is self else batch

    def check_order(self, whole: bool = True) -> None:
        __tracebackhide__ = True
        if not self._alike:
            return super().check_order(whole)
        first, self.first = self.first, None
        seen = None if first is None else first.glimpse
        everywhere = collectives.gather_from_all((self.rank, seen), self._comparison)
        heads: dict[int, tuple[int, Glimpse]] = {}  # by share, of the first process that has it
        for process, (share, found) in enumerate(everywhere):
            if found is None:
                continue
            before, head = heads.setdefault(share, (process, found))
            if not alike(head, found):
                raise RuntimeError(f"{DIVERGED}: {_OTHER_STREAM.format(before, process, share)}")
        return None


def share(
    reader: Reader,
    seed: int,
    total: int | None,
    what: str,
    rank: int,
    processes: int,
    alike: bool,
) -> Source:
    """Return a loader as one of several processes reads it, as :meth:`Source.open` does."""
    __tracebackhide__ = True
    if reader.shared:
        own = Source.open(reader, seed, what=what)
        return OwnShare(own, rank, processes, alike)
    for leaf in reader.leaves():
        _check_not_split(leaf)
    return RoundRobin(reader, seed, total, what, rank, processes)


def _check_not_split(loader: object) -> None:
    """Raise if a loader gives each process a share already, in a way of its own."""
    samplers = Reader(loader).samplers
    samplers = [*samplers, *(getattr(sampler, "sampler", None) for sampler in samplers)]
    if any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers):
        raise ValueError(
            "the loader has a DistributedSampler, which repeats samples so that every process gets "
            "the same number. fnloop distributes the order itself, each sample once: leave the "
            "sampler out, DataLoader(dataset, batch_size, shuffle=True); or keep it and mark the "
            "loader, sharded(loader)"
        )
    if type(loader).__module__.startswith("accelerate."):
        raise ValueError(
            "the loader was prepared by accelerate, which distributes its batches already: pass "
            "the DataLoader as it was before"
        )
