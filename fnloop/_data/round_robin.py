"""Which process works on which batch: batches are distributed round-robin.

In an incomplete round, processes without a batch get the first one as padding. That is the last
round of an epoch. Where an update takes a number of batches of all processes together, it is the
last round of each update: then the updates are the same on any number of processes. With ``even``,
an incomplete round is left out, and ends the epoch.

Every process has to know the same batches at the same positions. So the order of indices is
compared, where batches are taken by index, and a glimpse of the first batch of a pass.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.collectives import (
    ORDER_MISMATCH,
    all_reduce_max,
    gather_from_all,
    rank_and_size,
)
from fnloop._backend.containers import parts_of
from fnloop._backend.transfer import tensors_in
from fnloop._backend.watchdog import DIVERGED
from fnloop._core.types import Batch
from fnloop._data.window import END, Padding
from fnloop._display.log import log

__all__ = [
    "First",
    "Glimpse",
    "Index",
    "RoundRobin",
    "SingleProcess",
    "alike",
    "batch_size_of",
    "glimpse",
    "noting_first",
    "sampling_first",
    "sharing_among",
    "version",
]

_OTHER_DATA = (
    "each has the data in another order, or other data: process 0 and process {} have read "
    "different batches at the same position. Every process takes its turn of the same batches. So "
    "sort the names of files, and seed what shuffles, splits or generates data with the same "
    "number in every process; or mark a loader that gives each process its own share, "
    "sharded(loader)"
)
_RANDOM_DATA = (
    "process 0 and process %d have read different batches at the same position, and different ones "
    "when they read them again: the loader draws from generators that fnloop does not seed. Every "
    "process takes its turn, so that samples may be repeated and others left out. Draw from the "
    "generators of torch, NumPy or Python, which are seeded for each batch; or mark a loader that "
    "gives each process its own share, sharded(loader) (logged once)"
)
_TOLERANCE = 1e-3  # by which numbers may differ that different kinds of processors have computed
_LEAVES, _NUMBERS = 16, 1024  # of a batch that are compared, and of each of its leaves

# The shape of each leaf that has numbers, and some of them.
Glimpse = list[tuple[tuple[int, ...], Tensor]]
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
        first: what was seen of the first batch of a pass, when there are several processes.
    """

    processes = complete = 1
    order = 0
    first: First | None = None

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

    def check_order(self, read_again: Callable[[First], Glimpse | None], indices: bool) -> None:
        """Raise if the processes have read different data, or in different orders. A collective.

        Args:
            read_again: returns a glimpse of the first batch of a pass that is read once more.
            indices: whether a whole pass was read, so that the order of all indices is known.
        """


class First(NamedTuple):
    """What was seen of the first batch of a pass.

    Args:
        glimpse: some of its numbers, or None if they are not the same whenever it is read.
        at: the epoch, the batch and the samples where the pass began.
    """

    glimpse: Glimpse | None
    at: tuple[int | None, int, int]


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
        self.head: Any = None  # the first item of the pass
        self.samples = True  # whether to read a sample to compare; once is enough
        self._compares = True
        self.complete = processes if window is None else 1
        self._sizes: deque[int] = deque()  # of rounds ahead: their batch size, or 0 if it differs

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], reused: bool = False
    ) -> Iterator[Item | Padding]:
        __tracebackhide__ = True
        self._sizes.clear()
        self.order, self.head, self.first = 0, None, None
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
            if self.head is None:
                self.head = batches[0]
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

    def check_order(self, read_again: Callable[[First], Glimpse | None], indices: bool) -> None:
        __tracebackhide__ = True
        first = self.first if self._compares else None
        self.first, self.samples = None, self.samples and first is None
        order = self.order if indices else 0
        mark = -1 if first is None or first.glimpse is None else _checksum(first.glimpse)
        order_max, order_min, mark_max, mark_min = all_reduce_max(
            [order, -order, mark, -mark], "a comparison of the data"
        )
        if order_max != -order_min:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        if mark_max != -mark_min:
            self._compare(first, read_again)

    def _compare(self, first: First | None, read_again: Callable[[First], Glimpse | None]) -> None:
        """Raise if the first batches differ, and each process reads its own one again."""
        __tracebackhide__ = True
        seen = again = None
        if first is not None:
            seen = first.glimpse
            with contextlib.suppress(Exception):  # no other process may wait for this one
                again = read_again(first)
        everywhere = gather_from_all((seen, again), "a comparison of the data")
        if any(glimpse is None for glimpse, _ in everywhere):
            return
        own = everywhere[0][0]
        other = next((r for r, (found, _) in enumerate(everywhere) if not alike(own, found)), None)
        if other is None:
            return
        if all(alike(glimpse, once_more) for glimpse, once_more in everywhere):
            raise RuntimeError(f"{DIVERGED}: {_OTHER_DATA.format(other)}")
        self._compares = self.samples = False
        if rank_and_size()[0] == 0:
            log.warning(_RANDOM_DATA, other)


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


# --- glimpses of the first batch of a pass


def noting_first(
    batches: Iterator[Batch], sharing: SingleProcess, at: tuple[int | None, int, int]
) -> Iterator[Batch]:
    """Yield this process's batches. Note the first batch of the pass, which every process has read.

    Args:
        batches: what ``sharing.split`` gives.
        sharing: how the batches are distributed.
        at: where the pass begins.
    """
    __tracebackhide__ = True
    if isinstance(sharing, RoundRobin):
        for batch in batches:
            sharing.first = First(glimpse(sharing.head), at)
            yield batch
            break
    yield from batches


def sampling_first(
    items: Iterator[Item],
    sharing: RoundRobin,
    at: tuple[int | None, int, int],
    see: Callable[[Item], Item],
    make: Callable[[Iterator[Item]], Iterator[Batch]],
) -> Iterator[Batch]:
    """Yield this process's batches. Note a sample of the pass's first batch, which another has.

    Args:
        items: what ``sharing.split`` gives: what this process's batches are made from.
        sharing: how they are distributed.
        at: where the pass begins.
        see: returns the item whose batch is a glimpse of the batch of another item.
        make: makes batches of items, in their order.
    """
    __tracebackhide__ = True
    if not sharing.samples:
        yield from make(items)
        return
    batches = make(_after_first(items, sharing, see))
    if (found := next(batches, END)) is not END:
        sharing.first = First(_joined(found), at)
    yield from batches


def _after_first(
    items: Iterator[Item], sharing: RoundRobin, see: Callable[[Item], Item]
) -> Iterator[Item]:
    __tracebackhide__ = True
    for item in items:
        yield see(sharing.head)
        yield item
        break
    yield from items


def _joined(found: Any) -> Glimpse | None:
    """Return one glimpse, given one or a mapping of several."""
    if not isinstance(found, Mapping):
        return found
    parts = [_joined(part) for part in found.values()]
    known = [part for part in parts if part is not None]
    return [*itertools.chain.from_iterable(known)] if len(known) == len(parts) else None


def glimpse(batch: object) -> Glimpse:
    """Return some of the numbers in a batch or a sample, on the host.

    Text is left out: it may be the name of a file, which another machine has at another place.

    Example:
        >>> glimpse({"x": torch.zeros(2, 1), "name": "a.png"})
        [((2, 1), tensor([0., 0.]))]
    """
    return [*itertools.islice(_numbers_in(batch), _LEAVES)]


def _numbers_in(value: object) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value.ravel()[:: max(value.size // _NUMBERS, 1)].copy())
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
            some = flat[:: max(len(flat) // _NUMBERS, 1)].cpu()
            yield tuple(value.shape), some.clone()  # the batch may be changed in place
        return
    for _, part in parts_of(value) or ():
        yield from _numbers_in(part)


def _checksum(seen: Glimpse) -> int:
    crc = 0
    for shape, numbers in seen:
        crc = zlib.crc32(repr(shape).encode(), crc)
        crc = zlib.crc32(numbers.view(torch.uint8).numpy().data, crc)
    return crc


def alike(a: Glimpse | None, b: Glimpse | None) -> bool:
    """Return whether two glimpses are the same, but for how processors round."""
    if a is None or b is None or [shape for shape, _ in a] != [shape for shape, _ in b]:
        return False
    return all(_close(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


def _close(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or len(x) != len(y) or not x.is_floating_point():
        return torch.equal(x, y)
    x, y = x.double(), y.double()
    scale = x.nan_to_num(0, 0, 0).abs().mean().item() if len(x) else 0.0
    return torch.allclose(x, y, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


def version(item: object) -> int | None:
    """Return how often the first tensor of a batch has been changed in place."""
    first = next(tensors_in(item), None)
    return None if first is None or first.is_inference() else torch_compat.version_of(first)
