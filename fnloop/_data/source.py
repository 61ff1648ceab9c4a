"""Loaders: told apart, opened so that what they yield is a function of (seed, epoch, position), and cut into windows.

A map-style ``DataLoader`` is read by its parts (``_map_style``). Any other iterable is iterated; to go on in the middle of it,
it is consumed up to there. With several processes, the batches are dealt to them in turn (``_deal``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from fnloop._backend.collectives import all_reduce_max, any_rank
from fnloop._backend.transfer import tensors_in
from fnloop._core.rng import fold_in
from fnloop._data.iterable import iterate
from fnloop._data.loaders import sharded
from fnloop._data.map_style import is_sized, length_of, map_style
from fnloop._data.round_robin import RoundRobin, ShardState
from fnloop._data.window import END, Padding

__all__ = ["Source", "batch_size_of", "num_updates", "open_source"]


@attrs.frozen
class Source:
    """A loader opened for a run.

    Args:
        batches: ``(epoch, batch, samples) -> this process's batches of that epoch from that position``.
        length: batches in an epoch, for all processes together; None if that isn't known before its end.
        processes: how many processes the batches are dealt to.
        batch_size: samples in a batch, where that is the same for all but the last, and a position can be in samples.
        samples: samples in an epoch, where batch_size is known.
        drop_last: whether a smaller last round is left out.
        dealt: what has been dealt.
    """

    batches: Callable[[int | None, int, int], Iterator[Any]]
    length: int | None
    processes: int = 1
    batch_size: int | None = None
    samples: int = 0
    drop_last: bool = False
    dealt: ShardState = attrs.field(factory=ShardState)

    def left(self, batch: int, samples: int) -> int | None:
        """Return how many batches of an epoch are left at a position."""
        if self.batch_size and samples:
            return self.batches_of(max(self.samples - samples, 0))
        return None if self.length is None else max(self.length - batch, 0)

    def batches_of(self, samples: int) -> int:
        """Return how many batches so many samples make."""
        assert self.batch_size is not None
        if self.drop_last:
            return samples // (self.batch_size * self.processes) * self.processes
        return math.ceil(samples / self.batch_size)

    def why_empty(self) -> str:
        """Return why an epoch of a loader that drops its last batch has none."""
        together = f"{self.batch_size * self.processes}"  # type: ignore[operator]
        if self.processes > 1:
            together = f"{self.batch_size} × {self.processes} processes"
        return (
            f"It has {self.samples} samples, and with drop_last an update takes {together}: make "
            "batches smaller."
        )

    def even(self, rounds: int) -> int:
        """Return the size of every batch in the next rounds, if it is the same in every process; else 0. Ask once for each."""
        sizes = self.dealt.sizes
        found = {sizes.popleft() if sizes else 0 for _ in range(rounds)}
        return found.pop() if len(found) == 1 else 0


def open_source(loader: Any, seed: int, rank: int = 0, processes: int = 1) -> Source:
    """Open a loader, so that what it yields is a function of the seed, the epoch and the position.

    Args:
        loader: any iterable of batches, or a function that returns one.
        seed: the run's.
        rank: the number of this process.
        processes: how many share the batches.

    Raises:
        ValueError: it shares its data out by itself.
    """
    if isinstance(loader, sharded):
        return _open_sharded(loader.loader, seed, rank, processes)
    if processes > 1:
        _check_whole(loader)
    deal = RoundRobin(rank, processes, ShardState())
    if type(loader) in (list, tuple):  # nothing to position: no code runs

        def listed(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return deal(itertools.islice(loader, batch, None), batch_size_of)

        return Source(listed, len(loader), processes, dealt=deal.dealt)
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and not isinstance(loader.dataset, IterableDataset):

        def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return map_style(loader, seed, epoch, batch, samples, deal)

        if is_sized(loader):
            batched: Any = loader.batch_sampler
            size, total = batched.batch_size, len(batched.sampler)
            source = Source(batches, None, processes, size, total, batched.drop_last, deal.dealt)
            return attrs.evolve(source, length=source.batches_of(total))
        return Source(batches, length_of(loader), processes, dealt=deal.dealt)

    def iterated(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
        return deal(iterate(loader, seed, epoch, batch), batch_size_of, made=True)

    return Source(iterated, length_of(loader), processes, dealt=deal.dealt)


def _check_whole(loader: Any) -> None:
    """Raise if a loader gives each process its share already, in a way of its own."""
    samplers = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers += [getattr(sampler, "sampler", None) for sampler in samplers]
    if any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers):
        raise ValueError(
            "the loader has a DistributedSampler, which repeats samples so that all processes get as many. fnloop shares out "
            "the order itself, each sample once: leave the sampler out, DataLoader(dataset, batch_size, shuffle=True); or keep "
            "it, and say so: sharded(loader)"
        )
    if type(loader).__module__.startswith("accelerate."):
        raise ValueError(
            "the loader was prepared by accelerate, which shares it out already: pass the DataLoader as it was before"
        )


def _open_sharded(loader: Any, seed: int, rank: int, processes: int) -> Source:
    if processes == 1:
        return open_source(loader, seed)
    source = open_source(loader, fold_in(seed, rank))

    def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
        return _pad_to_longest(source.batches(epoch, batch // processes, 0))

    shares = all_reduce_max(
        [-1.0 if source.length is None else source.length, source.length is None]
    )
    return Source(batches, None if shares[1] else int(shares[0]) * processes, processes)


def _pad_to_longest(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield until the longest share is at its end; whose own has ended before borrows from it."""
    __tracebackhide__ = True
    last = END
    while any_rank((batch := next(batches, END)) is not END):
        if batch is END and last is END:
            raise ValueError(
                "this process's share of the data has no batch, and those of others have: give each at least one"
            )
        yield Padding(last) if batch is END else batch
        last = last if batch is END else batch


def batch_size_of(batch: Any) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


def num_updates(batches: int | None, window: int) -> int | None:
    """Return how many windows a number of batches makes."""
    return None if batches is None else math.ceil(batches / window)
