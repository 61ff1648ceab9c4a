"""Windows of batches, fetched and copied to the device ahead of the step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from fnloop._backend.transfer import copy_on_side_stream, may_need_transfer, to_device
from fnloop._core.rng import Generators, saved_before_seeding, seed_all_count
from fnloop._data.source import Source
from fnloop._data.window import END, Padding

__all__ = ["windows"]


def windows(
    source: Source,
    window: int,
    device: torch.device,
    epoch: int | None = 0,
    batch: int = 0,
    samples: int = 0,
    prefetch: int = 1,
) -> Iterator[Any]:
    """Return what a step takes, call by call: a batch, or a tuple of up to ``window`` batches, on the device.

    Without an epoch, for evaluation, the order is always the same, and nobody is told of an epoch. Who asks for a window while
    the one before is still worked on has it fetched and copied meanwhile; with prefetch n > 1, n - 1 more are, and
    nothing else is different.
    """
    batches = source.batches(epoch, batch, samples)
    if may_need_transfer(device):
        batches = map(_transfer(device), batches)
    batches = iter(batches)
    # Not partition_all, which asks for the next window before it yields one: a loader that draws would see it.
    fed = batches if window == 1 else iter(lambda: tuple(itertools.islice(batches, window)), ())
    return fed if prefetch == 1 else _prefetched(fed, prefetch)


class _Fetched(NamedTuple):
    """What one fetch has given.

    Args:
        thing: a window, or ``END``.
        generators: as the fetch has left them, if it has positioned them.
        error: what went wrong, or None.
    """

    thing: Any
    generators: Generators | None
    error: Exception | None = None


def _fetched(things: Iterator[Any]) -> _Fetched:
    __tracebackhide__ = True
    before, thing, error = seed_all_count(), END, None
    try:
        thing = next(things, END)
    except Exception as raised:
        error = raised
    return _Fetched(thing, Generators.capture() if seed_all_count() != before else None, error)


def _prefetched(things: Iterator[Any], n: int) -> Iterator[Any]:
    """Yield each thing when n of them are there; what goes wrong comes after those that were there before.

    The generators are with each as they would be if it had been fetched just now: as its own fetch has left them, or, where a
    fetch does not set them (in workers, of a list), as the caller has left them.
    """
    __tracebackhide__ = True
    queue: deque[_Fetched] = deque()
    while True:
        with saved_before_seeding() as found:
            try:
                while len(queue) < n and not (queue and queue[-1].thing is END):
                    queue.append(_fetched(things))
            finally:  # after an interruption too: a run continues from here
                own = queue[0].generators if queue else None
                if own or found:
                    (own or found[0]).install()
        if queue[0].error is not None:
            raise queue[0].error
        if queue[0].thing is END:
            return
        yield queue.popleft().thing


def _transfer(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that puts a batch on a device: on CUDA by a stream of its own, beside what the device is doing."""
    move: Callable[[Any], Any] = (
        copy_on_side_stream(device)
        if device.type == "cuda"
        else lambda batch: to_device(batch, device)
    )
    return lambda batch: Padding(move(batch.batch)) if type(batch) is Padding else move(batch)
