"""What a step takes, call by call: windows of batches, fetched and moved ahead of it."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fnloop._backend.containers import copy_on_side_stream, to_device
from fnloop._core.rng import Generators, saved_before_seeding, seed_all_count
from fnloop._core.types import Batch
from fnloop._data.loaders import NONE_LEFT
from fnloop._data.sharing import Sharing


def grouped(batches: Iterator[Batch], sizes: Iterator[int]) -> Iterator[Batch]:
    """Return an iterator of tuples of batches, at most of these sizes.

    Not toolz.partition_all, which requests the next window before it yields one. A loader that
    draws would notice.
    """
    rest = itertools.repeat(batches)
    return itertools.takewhile(len, map(tuple, map(itertools.islice, rest, sizes)))


class LateWindow(Sequence[Batch]):
    """The batches of a window, each fetched when it is asked for; the first one is there already.

    Its length is the number of batches that were fetched, and iterating gives these. A slice has
    fewer where the epoch ends. The generators stay as they were if a fetch positions them.

    Args:
        first: the first batch.
        rest: gives the others, and those of later windows.
        size: how many batches the window has at most.
        sharing: how batches are distributed to processes.

    Attributes:
        padding: for each batch, whether it is padding.
    """

    def __init__(self, first: Batch, rest: Iterator[Batch], size: int, sharing: Sharing) -> None:
        self._batches: list[Batch] = []
        self._rest, self._size, self._sharing = rest, size, sharing
        self.padding: list[bool] = []
        self._add(first)

    def _add(self, batch: Batch) -> None:
        own, is_padding = self._sharing.unpadded(batch)
        self.padding.append(is_padding)
        self._batches.append(own)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __getitem__(self, index: int | slice) -> Batch:
        __tracebackhide__ = True
        wanted = index.stop if isinstance(index, slice) else index + 1
        while len(self) < min(wanted or 0, self._size):
            with saved_before_seeding() as found:
                try:
                    batch = next(self._rest, NONE_LEFT)
                finally:
                    if found:
                        found[0].install()
            if batch is NONE_LEFT:
                self._size = len(self)
            else:
                self._add(batch)
        return self._batches[index]


def grouped_late(
    batches: Iterator[Batch], sizes: Iterator[int], sharing: Sharing
) -> Iterator[LateWindow]:
    """Return an iterator of windows of batches, of which the first one alone is fetched."""
    __tracebackhide__ = True
    for size in sizes:
        if (first := next(batches, NONE_LEFT)) is NONE_LEFT:
            return
        yield LateWindow(first, batches, size, sharing)


class _Fetched(NamedTuple):
    """The result of one fetch.

    Args:
        window: a window, or ``END``.
        generators: as the fetch left them, if it positioned them.
        error: the exception that it raised, or None.
    """

    window: Batch
    generators: Generators | None
    error: Exception | None = None


def _fetch(windows: Iterator[Batch]) -> _Fetched:
    __tracebackhide__ = True
    before, window, error = seed_all_count(), NONE_LEFT, None
    try:
        window = next(windows, NONE_LEFT)
    except Exception as raised:
        error = raised
    return _Fetched(window, Generators.capture() if seed_all_count() != before else None, error)


def prefetched(windows: Iterator[Batch], n: int) -> Iterator[Batch]:
    """Yield windows with n of them fetched ahead.

    An error is raised after the windows fetched before it. The generators are with each window as
    if it had been fetched just now: as its own fetch left them, or as the caller left them if a
    fetch does not set them (in workers, from a list).
    """
    __tracebackhide__ = True
    queue: deque[_Fetched] = deque()
    while True:
        with saved_before_seeding() as found:
            try:
                while len(queue) < n and not (queue and queue[-1].window is NONE_LEFT):
                    queue.append(_fetch(windows))
            finally:  # after an interruption too, because the run continues from here
                own = queue[0].generators if queue else None
                if own or found:
                    (own or found[0]).install()
        if queue[0].error is not None:
            raise queue[0].error
        if queue[0].window is NONE_LEFT:
            return
        yield queue.popleft().window


def transfer_to(device: torch.device) -> Callable[[Batch], Batch]:
    """Return the function that moves a batch to a device.

    On CUDA it copies on a stream of its own, while the device computes.
    """
    if device.type == "cuda":
        return copy_on_side_stream(device)
    return functools.partial(to_device, device=device)
