"""Loaders made of loaders, for the laws that hold for all of them."""

import functools
import random

import numbered
import torch
from torch.utils.data import DataLoader, IterableDataset

from fnloop._extensions.engines.shares import Padding
from fnloop.data import (
    bucketed,
    even,
    fixed,
    fraction,
    interleave,
    leave_out,
    take,
    zip_cycle,
    zip_longest,
    zip_shortest,
)
from fnloop.extend import Source

LENGTHS = [7, 1, 4, 4, 9, 2, 4, 30, 4, 1, 3, 8, 4]


Numbers = functools.partial(numbered.Numbers, noisy=True)


class Stream(IterableDataset):
    def __init__(self, n, first=0):
        self.numbers = Numbers(n, first)

    def __iter__(self):
        return (self.numbers[i] for i in range(self.numbers.n))


class WithoutLength(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(torch.randperm(11).tolist())


def shuffled(n=13, first=0, workers=0, size=2, **settings):
    settings = {"shuffle": True, **settings}
    return DataLoader(Numbers(n, first), size, num_workers=workers, **settings)


def rows(n, first=0):
    """Return a loader that reads a batch at once, without a seed of its own."""
    numbers = torch.arange(first, first + n, dtype=torch.float64).view(-1, 1)
    return DataLoader(numbers, 2, shuffle=True)


def stream(n=9, first=0, size=2):
    return DataLoader(Stream(n, first), size)


def plain(n, first=100):
    """Return a function that begins at a position."""

    def batches(epoch, batch):
        for i in range(batch, n):
            yield torch.tensor([first + epoch + i + random.random() / 4], dtype=torch.float64)

    return batches


def listed(n, first=200):
    return [torch.full((2, 1), float(first + i), dtype=torch.float64) for i in range(n)]


def by_position(epoch, batch):
    return batch % 3 == 1 or (epoch, batch) == (1, 0)


def in_buckets(workers):
    sampler = bucketed(LENGTHS, max_items=12)
    return DataLoader(Numbers(len(LENGTHS)), batch_sampler=sampler, num_workers=workers)


CASES = {  # workers -> a loader
    "take": lambda w: take(shuffled(workers=w), 4),
    "take of all": lambda w: take(shuffled(workers=w), 100),
    "take without a length": lambda w: take(shuffled(sampler=WithoutLength(), shuffle=None), 3),
    "take of a stream": lambda w: take(stream(), 3),
    "fraction": lambda w: fraction(shuffled(workers=w), 0.6),
    "fixed": lambda w: fixed(shuffled(workers=w), 3),
    "fixed of samples": lambda w: fixed(shuffled(workers=w, size=None), 4),
    "fixed of buckets": lambda w: fixed(in_buckets(w), 3),
    "fixed of a stream": lambda w: fixed(stream(), 3),
    "fixed of others": lambda w: fixed(interleave({"a": shuffled(workers=w), "b": listed(2)}), 5),
    "interleave": lambda w: interleave(
        {"a": shuffled(workers=w), "b": shuffled(5, 50, w), "c": listed(3)}
    ),
    "interleave by ratios": lambda w: interleave(
        {"a": shuffled(13, 0, w), "b": shuffled(40, 50)}, ratios={"a": 3, "b": 2}
    ),
    "interleave of streams": lambda w: interleave(
        {"a": stream(), "b": shuffled(40, 50, w), "c": plain(20)}, {"a": 2, "b": 3, "c": 1}
    ),
    "interleave of tensors": lambda w: interleave(  # "b" begins in the middle of an epoch
        {"a": rows(40), "b": rows(9, 50)}, ratios={"a": 9, "b": 2}
    ),
    "zip_cycle": lambda w: zip_cycle(a=shuffled(workers=w), b=shuffled(5, 50, w), c=listed(2)),
    "zip_cycle of streams": lambda w: zip_cycle(a=stream(3), b=stream(9, 50), c=shuffled(5)),
    "zip_longest": lambda w: zip_longest(a=shuffled(workers=w), b=shuffled(5, 50, w), c=listed(2)),
    "zip_longest of streams": lambda w: zip_longest(a=stream(3), b=stream(9, 50), c=shuffled(5)),
    "zip_shortest": lambda w: zip_shortest(a=shuffled(workers=w), b=shuffled(9, 50)),
    "zip_shortest of streams": lambda w: zip_shortest(a=shuffled(workers=w), b=stream(7)),
    "leave_out": lambda w: leave_out(shuffled(workers=w), by_position),
    "leave_out of a stream": lambda w: leave_out(stream(), by_position),
    "even": lambda w: even(shuffled(12, workers=w)),
    "even of a stream": lambda w: even(stream(12)),
    "even of a list": lambda w: even(listed(6)),
    "even of a function": lambda w: even(plain(6)),
    "even of interleaved": lambda w: even(
        interleave({"a": shuffled(workers=w), "b": listed(3), "c": even(shuffled(4, 50, w))})
    ),
    "take of an even one": lambda w: take(even(shuffled(workers=w)), 6),
    "even of buckets": lambda w: even(take(in_buckets(w), 4)),
    "bucketed": in_buckets,
    "function": lambda w: plain(5),
    "take of interleaved": lambda w: take(
        interleave({"a": shuffled(workers=w), "b": leave_out(shuffled(9, 50), by_position)}), 6
    ),
    "interleaved zip": lambda w: interleave(
        {
            "a": zip_cycle(x=fixed(shuffled(workers=w), 2), y=take(plain(9), 4)),
            "b": zip_shortest(x=fraction(shuffled(20, 50), 0.5), y=listed(4)),
        }
    ),
    "twice the same": lambda w: (lambda one: zip_cycle(a=one, b=one))(shuffled(workers=w)),
}
_SAME = "fixed of a stream", "fixed of others", "even of a list"
ALWAYS_THE_SAME = [make for name, make in CASES.items() if name in _SAME]


def contents(batch):
    """Return the numbers of a batch as lists; those of padding in brackets."""
    if isinstance(batch, Padding):
        return [contents(batch.batch)]
    if isinstance(batch, dict):
        return {name: contents(part) for name, part in batch.items()}
    return batch.flatten().tolist()


def read(loader, epoch=0, start=0, rank=0, processes=1, seed=0):
    source = Source.open(loader, seed, rank, processes)
    return [contents(batch) for batch in source.batches(epoch, start, 0)]


def samples(found):
    """Return the numbers of a batch, or of a list of them, without what was drawn."""
    if isinstance(found, dict):
        return [n for part in found.values() for n in samples(part)]
    if isinstance(found, list):
        return [n for part in found for n in samples(part)]
    return [int(found)]
