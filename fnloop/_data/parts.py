"""Loaders as parts of other loaders: each is asked for the batches that follow a position.

What a part gives are not batches but *items*: what is known of a batch before it is fetched. Every
process goes through the items of all, and fetches its own. So an item that is left out, or that
another process has, costs no reading where the samples are known by their index.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeGuard

from torch.utils.data import DataLoader, IterableDataset

from fnloop._core.types import Batch
from fnloop._data import map_style
from fnloop._data.iterable import iterate
from fnloop._data.loaders import Loader
from fnloop._data.position import Positions, as_torch_reads_it, is_keeper
from fnloop._data.round_robin import SingleProcess, batch_size_of, version

__all__ = [
    "Given",
    "Item",
    "MapStyle",
    "Part",
    "Request",
    "Together",
    "is_map_style",
    "part_of",
    "size_of",
]


class Request(NamedTuple):
    """A batch that a map-style loader can fetch.

    Args:
        part: the loader.
        request: what it needs to fetch it.
        size: samples in the batch, or 0 if that is not known.
    """

    part: MapStyle
    request: object
    size: int


class Given(NamedTuple):
    """A batch that is there already.

    Args:
        batch: the batch.
        version: that of its first tensor when the batch was read; None if it is not checked.
    """

    batch: Batch
    version: int | None = None


class Together(NamedTuple):
    """Items that make one batch, by name."""

    items: Mapping[str, Item]


Item = Request | Given | Together


def size_of(item: Item) -> int:
    """Return how many samples an item has, or 0 if that is not known."""
    if isinstance(item, Request):
        return item.size
    if isinstance(item, Together):
        sizes = {size_of(one) for one in item.items.values()}
        return sizes.pop() if len(sizes) == 1 else 0
    return batch_size_of(item.batch)


class Part(Protocol):
    """A loader that is read by its items."""

    def length_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch, or None if it is not known before its end."""
        ...

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        """Yield the items of an epoch, of all processes, from the one numbered ``start`` on.

        Args:
            seed: the run's, or one that was derived from it.
            epoch: the epoch, or None for an evaluation.
            start: how many items to pass over.
            sharing: what notes the order of the samples.
        """
        ...


class MapStyle:
    """A DataLoader that takes samples by index."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader = loader

    def length_in(self, epoch: int) -> int | None:
        return map_style.length_of(self.loader)

    def items(
        self,
        seed: int,
        epoch: int | None,
        start: int,
        sharing: SingleProcess,
        indices: list[object] | None = None,
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        found = map_style.requests(self.loader, seed, epoch, start, 0, sharing, indices=indices)
        for request in found:
            yield Request(self, request, request.size)

    def fetch(self, requests: Iterator[object]) -> Generator[Batch, None, None]:
        """Yield the batches that were asked for."""
        return map_style.fetched(self.loader, requests)


class _Listed(NamedTuple):
    """A list of batches. No code of the user's runs: there is nothing to position."""

    batches: list[Batch]

    def length_in(self, epoch: int) -> int | None:
        return len(self.batches)

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        return map(Given, itertools.islice(self.batches, start, None))


class _Iterated(NamedTuple):
    """Any other loader: it is read to know that there is a batch."""

    loader: Loader

    def length_in(self, epoch: int) -> int | None:
        return map_style.length_of(self.loader)

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        for batch in iterate(self.loader, seed, epoch, start, Positions()):
            yield Given(batch, version(batch))


def is_map_style(loader: object) -> TypeGuard[DataLoader[object]]:
    """Return whether a loader takes samples by index, in torch's own way, or torchdata's."""
    if not as_torch_reads_it(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__iter__ is DataLoader.__iter__ or not is_keeper(loader.dataset)


def part_of(loader: Loader) -> Part:
    """Return how a loader is read that is not composed of others."""
    if is_map_style(loader):
        return MapStyle(loader)
    return _Listed(loader) if type(loader) in (list, tuple) else _Iterated(loader)
