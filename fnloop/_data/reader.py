"""Readers: how a loader of one kind is read from a position. Extensions bring more kinds."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterator

from torch.utils.data import BatchSampler

from fnloop._core.types import Batch, name_of
from fnloop._data.iterable import (
    as_torch_reads_it,
    iterate,
    length_of,
    makes_new,
    owners_of,
    samplers_of,
)
from fnloop._data.loaders import NONE_LEFT, Loader, Padding, batch_size_of, is_iterable
from fnloop._data.position import Pass, Positions
from fnloop._extensions import extensions


class Reader(abc.ABC):
    """How a loader is read.

    Attributes:
        even: whether a loader inside it is marked as even: then the whole is.
        varies: whether its epochs may have different lengths.
        batch_size: samples in a batch, if all batches but the last have one known size. Then a
            position may be given in samples.
        samples: samples in an epoch, if ``batch_size`` is known.
        drop_last: whether an incomplete last round is left out.
        reuses: whether the memory of a batch that it has given may become that of another.
        ahead: how many batches of each process it reads before they are taken.
    """

    even = varies = drop_last = False
    reuses = True
    batch_size: int | None = None
    samples = ahead = 0

    @abc.abstractmethod
    def length_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch, or None if it is not known before its end."""

    @abc.abstractmethod
    def items(self, at: Pass) -> Iterator[object]:
        """Yield what the batches of all processes are made of, from a position on."""

    def read(self, at: Pass) -> Iterator[Batch]:
        """Return this process's batches from a position on. Here, items are batches."""
        share = at.sharing.split(self.items(at), batch_size_of, counts=self.reuses)
        return at.sharing.noting_first(share, at.place)

    @abc.abstractmethod
    def positions(self) -> Positions:
        """Return what is to know where the loader is."""

    def leaves(self) -> list[Loader]:
        """Return the loaders that it reads."""
        return []

    def batch_sizes(self) -> set[int] | None:
        """Return how many samples complete batches have; None if that is not known."""
        return None

    def indices(self, at: Pass) -> Iterator[object]:
        """Yield which samples this process's batches have, see :meth:`Source.indices`."""
        for index in at.sharing.split(self.indices_of_all(at), lambda index: 0):
            yield [] if isinstance(index, Padding) else index

    def indices_of_all(self, at: Pass) -> Iterator[object]:
        """Return which samples the batches of all processes have; nothing if that is not known."""
        return iter(())

    def how_read(self) -> tuple[str, bool] | None:
        """Return the class of the data, and whether a batch of them is read at once.

        None where a loader makes its batches itself, or in workers.
        """
        return None


class Iterated(Reader):
    """How any iterable is read, and a function that returns one."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.samplers = loader, samplers_of(loader)
        self.reuses = not makes_new(loader)

    def leaves(self) -> list[Loader]:
        return [self.loader]

    def length_in(self, epoch: int) -> int | None:
        return length_of(self.loader)

    def size(self) -> tuple[int, str] | None:
        """Return how many samples or batches it has, and of which of the two, if it is known."""
        length = length_of(self.loader)
        return None if length is None else (length, "batches")

    def batch_sizes(self) -> set[int] | None:
        if as_torch_reads_it(self.loader) and type(self.loader.batch_sampler) is BatchSampler:
            return {self.loader.batch_sampler.batch_size}
        return None

    def items(self, at: Pass) -> Iterator[Batch]:
        batches = iterate(self.loader, at)
        return at.sharing.held.watched(batches) if self.reuses else batches

    def positions(self) -> Positions:
        read = self.loader.dataset if as_torch_reads_it(self.loader) else self.loader
        name = type(read).__name__ if is_iterable(read) else name_of(read)
        owners = owners_of(self.loader) if is_iterable(self.loader) else ()
        return Positions(name, self.size, owners=owners)


class Listed(Iterated):
    """How a list of batches is read. No code of the user's runs: there is nothing to position."""

    def batch_sizes(self) -> set[int]:
        return {max(map(batch_size_of, self.loader), default=1)}

    def items(self, at: Pass) -> Iterator[Batch]:
        at.positions.open(at.epoch, at.start)
        if at.start:
            following = self.loader[at.start] if at.start < len(self.loader) else NONE_LEFT
            at.positions.compare(at.epoch, at.start, following)
        return itertools.islice(self.loader, at.start, None)

    def positions(self) -> Positions:
        return Positions("a list", self.size, listed=self.loader)


def reader_of(loader: Loader) -> Reader:
    """Return how a loader is read. The first extension that knows its kind says so."""
    __tracebackhide__ = True
    for reader in extensions("readers of loaders"):
        if (found := reader(loader)) is not None:
            return found
    return Listed(loader) if type(loader) in (list, tuple) else Iterated(loader)
