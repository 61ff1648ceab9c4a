"""Windows of batches, fetched and copied to the device ahead of the step."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fnloop._backend.transfer import copy_on_side_stream, may_need_transfer, to_device
from fnloop._core.rng import Generators, saved_before_seeding, seed_all_count
from fnloop._core.types import Batch
from fnloop._data.source import Source
from fnloop._data.window import END, Padding

__all__ = ["windows"]


def windows(
    source: Source,
    window: int | None,
    device: torch.device,
    epoch: int | None = 0,
    batch: int = 0,
    samples: int = 0,
    prefetch: int = 1,
) -> Iterator[Batch]:
    """Return what a step takes, call by call: a batch, or a tuple of up to ``window`` batches.

    They are on the device. Requesting one while the previous one is still computing overlaps
    loading and copying with it.

    Args:
        source: where the batches come from.
        window: the most batches per call of the step; None if it takes one batch, not a tuple.
        device: where they are moved to.
        epoch: the epoch. Without one, for evaluation, the order is always the same and
            ``set_epoch`` is not called.
        batch: the batches of the epoch that were consumed already.
        samples: their samples, if known.
        prefetch: how many windows are fetched ahead. It changes no number.
    """
    batches = source.batches(epoch, batch, samples)
    if may_need_transfer(device):
        batches = map(_transfer_to(device), batches)
    fed = iter(batches) if window is None else _grouped(iter(batches), window)
    return fed if prefetch == 1 else _prefetched(fed, prefetch)


def _grouped(batches: Iterator[Batch], window: int) -> Iterator[Batch]:
    """Return an iterator of tuples of up to ``window`` batches.

    Not toolz.partition_all, which requests the next window before it yields one. A loader that
    draws would notice.
    """
    return iter(lambda: tuple(itertools.islice(batches, window)), ())


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
    before, window, error = seed_all_count(), END, None
    try:
        window = next(windows, END)
    except Exception as raised:
        error = raised
    return _Fetched(window, Generators.capture() if seed_all_count() != before else None, error)


def _prefetched(windows: Iterator[Batch], n: int) -> Iterator[Batch]:
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
                while len(queue) < n and not (queue and queue[-1].window is END):
                    queue.append(_fetch(windows))
            finally:  # after an interruption too, because the run continues from here
                own = queue[0].generators if queue else None
                if own or found:
                    (own or found[0]).install()
        if queue[0].error is not None:
            raise queue[0].error
        if queue[0].window is END:
            return
        yield queue.popleft().window


def _transfer_to(device: torch.device) -> Callable[[Batch], Batch]:
    """Return the function that moves a batch to a device.

    On CUDA it copies on a stream of its own, while the device computes.
    """
    move: Callable[[Batch], Batch] = functools.partial(to_device, device=device)
    if device.type == "cuda":
        move = copy_on_side_stream(device)

    def transfer(batch: Batch) -> Batch:
        return Padding(move(batch.batch)) if type(batch) is Padding else move(batch)

    return transfer
