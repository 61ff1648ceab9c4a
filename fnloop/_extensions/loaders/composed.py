"""Loaders made of loaders: what they have in common, and how they are read."""

from __future__ import annotations

import abc
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from fnloop._extensions.loaders.map_style import Look, MapStyle, Request
from fnloop._extensions.loaders.sampled import Index
from fnloop.extend import Batch, Pass, Reader, Source, collectives, containers, isolated, rng

# --------------------------------------------------------------------------------------------------
# Loaders made of loaders: the base of what `fnloop.data` returns.
#
# A composed loader says in which order the items of its parts follow each other, as a function of
# (seed, epoch). It is read as a part of another in the same way, so it can be composed again. The
# items are distributed to the processes once, at the outermost loader.


class Composed(Reader):
    """A loader made of loaders: one for ``fit``, ``evaluate`` and ``predict``, and an iterable.

    Args:
        call: the name of the function that makes it.
        loaders: its parts, by the names that messages use.

    Raises:
        TypeError: a part is not a loader.
        ValueError: a part is marked as one process's own share.
    """

    varies = True

    def __init__(self, call: str, loaders: Mapping[str, object]) -> None:
        super().__init__()
        self.call = call
        self.loaders = dict(loaders)
        self.parts: dict[str, Reader] = {}
        for name, loader in self.loaders.items():
            self.parts[name] = part = Reader.of(loader, name)
            if part.shared:
                raise ValueError(
                    f"{call} distributes the batches of its loaders to the processes, and "
                    f"{loader!r} gives this process its own already: mark the whole, "
                    f"sharded({call}(...))"
                )
            self.even |= part.even

    @abc.abstractmethod
    def items(self, at: Pass) -> Iterator[Item]: ...

    def lengths_in(self, epoch: int) -> dict[str, int | None]:
        """Return the lengths of the parts, by name."""
        return {name: part.length_in(epoch) for name, part in self.parts.items()}

    def leaves(self) -> list[object]:
        return [leaf for part in self.parts.values() for leaf in part.leaves()]

    def batch_sizes(self) -> set[int] | None:
        found = [part.batch_sizes() for part in self.parts.values()]
        known = [sizes for sizes in found if sizes is not None]
        return set().union(*known) if len(known) == len(found) else None

    # --- how it is read

    @property
    def ahead(self) -> int:  # type: ignore[override]
        """How many batches are read ahead: one, and those that workers make."""
        asked = [part.loader for part in self._innermost() if isinstance(part, MapStyle)]
        return 1 + sum(
            (each.prefetch_factor or 0) * each.num_workers + 1 for each in asked if each.num_workers
        )

    def _innermost(self) -> Iterator[Reader]:
        """Yield the parts that are not made of others, and those of the others."""
        for part in self.parts.values():
            yield from part._innermost() if isinstance(part, Composed) else (part,)

    def name(self) -> str:
        return f"{self.call}(...)"

    def contents(self, item: Item) -> object:
        return known_of(item, lambda batch: batch)

    def read(self, at: Pass) -> Iterator[Batch]:
        items = lambda: self.items(at.apart())
        noted = at.positions.noting(items, at.epoch, at.start)
        share = at.sharing.split(noted, size_of, counts=True)
        make = lambda items: _Fetching(items, at.sharing.held.note).batches()
        return at.sharing.sampling_first(share, at.place, seen, make)

    def indices(self, at: Pass) -> Iterator[object]:
        by_index = [isinstance(part, MapStyle) for part in self._innermost()]
        others = [part for part in self._innermost() if not isinstance(part, MapStyle)]
        # To know what comes next, a stream would have to be read.
        if not any(by_index) or any(type(each.loader) not in (list, tuple) for each in others):
            return iter(())
        return (known_of(item, lambda batch: None) for item in self.items(at.apart()))

    # --- by itself

    def __len__(self) -> int:
        length = self.length_in(0)
        if length is None:
            raise TypeError(f"{self.call}(...) has no length: that of its loaders is not known")
        shares = collectives.data_shares() if self.even else 1
        return length // shares * shares

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of a pass of its own, whose order torch's generator decides."""
        return self._one_pass(rng.new_seed(), None)

    def _one_pass(self, seed: int, epoch: int | None) -> Iterator[Batch]:
        batches = Source.open(self, seed).batches(epoch, 0, 0)
        while True:
            with isolated(torch.device("cpu")):
                batch = next(batches, self)
            if batch is self:
                return
            yield batch


# --------------------------------------------------------------------------------------------------
# Loaders as parts of other loaders: each is asked for the batches that follow a position.
#
# What a part gives are not batches but *items*: what is known of a batch before it is fetched.
# Every process goes through the items of all, and fetches its own. So an item that is left out, or
# that another process has, costs no reading where the samples are known by their index.


class Requested(NamedTuple):
    """A batch that a map-style loader can make.

    Args:
        part: how the loader is read.
        request: what it needs to make the batch.
    """

    part: MapStyle
    request: Request


class Given(NamedTuple):
    """A batch that is there already. A loader that takes no indices is read to know of one."""

    batch: Batch


class Together(NamedTuple):
    """Items that make one batch, by name."""

    items: Mapping[str, Item]


Item = Requested | Given | Together


def items_of(part: Reader, at: Pass, indices: list[Index] | None = None) -> Iterator[Item]:
    """Return the items of a part, from a position on.

    Args:
        part: how it is read.
        at: the position.
        indices: those of each batch of the epoch, if a map-style loader does not decide them.
    """
    if isinstance(part, Composed):
        return part.items(at)
    if isinstance(part, MapStyle):
        return (Requested(part, request) for request in part.items(at, indices=indices))
    return map(Given, part.items(at))


def size_of(item: Item) -> int:
    """Return how many samples an item has, or 0 if that is not known."""
    if isinstance(item, Requested):
        return item.request.size
    if isinstance(item, Together):
        sizes = {size_of(one) for one in item.items.values()}
        return sizes.pop() if len(sizes) == 1 else 0
    return containers.batch_size_of(item.batch)


def seen(item: Item, look: Look) -> Item:
    """Return the item in the place of whose batch comes a look at that of another item."""
    if isinstance(item, Requested):
        return item._replace(request=item.request.seen(look))
    if isinstance(item, Together):
        return Together({name: seen(one, look) for name, one in item.items.items()})
    return Given([look(item.batch)] * 2)


def known_of(item: Item, of_given: Callable[[Batch], object]) -> object:
    """Return which samples an item has, and what ``of_given`` returns of a batch that is there."""
    if isinstance(item, Requested):
        return item.request.index
    if isinstance(item, Together):
        return {name: known_of(one, of_given) for name, one in item.items.items()}
    return of_given(item.batch)


class _Fetching:
    """Items whose batches are being made.

    Loaders with workers are asked for several batches at once, each for its own.

    Args:
        items: this process's items.
        note: is told of each batch whose memory may be that of another, with its round.
    """

    def __init__(self, items: Iterator[Item], note: Callable[[Batch, int], object]) -> None:
        self._items, self._note_batch = items, note
        self._made = 0  # rounds
        self._ahead: deque[Item] = deque()
        self._requests: defaultdict[MapStyle, deque[Request]] = defaultdict(deque)
        self._fetched: dict[MapStyle, Iterator[Batch]] = {}

    def batches(self) -> Iterator[Batch]:
        __tracebackhide__ = True
        with contextlib.ExitStack() as self._pools:  # the workers end, or are kept for later
            while self._ahead or self._advance():
                batch = self._make(self._ahead.popleft())
                self._made += 1
                yield batch

    def _advance(self) -> bool:
        """Take an item, and pass on what it asks for. Return whether there was one."""
        __tracebackhide__ = True
        item = next(self._items, None)
        if item is None:
            return False
        self._ahead.append(item)
        self._note(item)
        return True

    def _note(self, item: Item) -> None:
        if isinstance(item, Requested):
            self._requests[item.part].append(item.request)
        elif isinstance(item, Together):
            for one in item.items.values():
                self._note(one)

    def _asked_of(self, part: MapStyle) -> Iterator[Request]:
        """Yield what a loader is asked for. A loader with workers takes it in advance."""
        __tracebackhide__ = True
        waiting = self._requests[part]
        while waiting or self._advance():
            if waiting:
                yield waiting.popleft()

    def _make(self, item: Item) -> Batch:
        __tracebackhide__ = True
        if isinstance(item, Requested):
            if item.part not in self._fetched:
                fetched = item.part.make(self._asked_of(item.part))
                self._fetched[item.part] = self._pools.enter_context(contextlib.closing(fetched))
            batch = next(self._fetched[item.part])
            if item.part.reuses:
                self._note_batch(batch, self._made)
            return batch
        if isinstance(item, Together):
            batches: dict[str, Batch] = {}
            for name, one in item.items.items():  # a comprehension is a frame in the traceback
                batches[name] = self._make(one)
            return batches
        return item.batch
