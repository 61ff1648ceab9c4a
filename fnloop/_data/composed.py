"""Loaders made of loaders: the base of what ``fnloop.data`` returns, and how they are read.

A composed loader says in which order the items of its parts follow each other, as a function of
(seed, epoch), see :mod:`fnloop._data.parts`. It is a part itself, so it can be composed again. The
items are distributed to the processes once, at the outermost loader.
"""

from __future__ import annotations

import abc
import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

import torch

from fnloop._core.rng import isolated, new_seed
from fnloop._core.types import Batch
from fnloop._data.loaders import Loader, check_loader, even, in_whole_rounds, sharded
from fnloop._data.map_style import only_seen
from fnloop._data.parts import Given, Item, MapStyle, Part, Request, Together, part_of
from fnloop._data.round_robin import SingleProcess, glimpse, version
from fnloop._data.window import END, Padding

__all__ = ["Composed", "fetch", "seen", "unmarked"]


class Composed(abc.ABC):
    """A loader made of loaders: one for ``fit``, ``evaluate`` and ``predict``, and an iterable.

    Args:
        call: the name of the function that makes it.
        loaders: its parts, by the names that messages use.

    Attributes:
        even: whether a part is marked as even: then the whole is.

    Raises:
        TypeError: a part is not a loader.
        ValueError: a part is marked as one process's own share.
    """

    def __init__(self, call: str, loaders: Mapping[str, Loader]) -> None:
        self.call = call
        self.loaders = dict(loaders)
        self.parts: dict[str, Part] = {}
        self.even = False
        for name, given in self.loaders.items():
            check_loader(given, name, alone=True)
            loader, is_even = unmarked(given)
            self.even |= is_even
            if isinstance(loader, sharded):
                raise ValueError(
                    f"{call} distributes the batches of its loaders to the processes, and "
                    f"{loader!r} gives this process its own already: mark the whole, "
                    f"sharded({call}(...))"
                )
            self.parts[name] = loader if isinstance(loader, Composed) else part_of(loader)

    @abc.abstractmethod
    def length_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch, or None if it is not known before its end."""

    @abc.abstractmethod
    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        """Yield the items of an epoch from a position on, see :class:`fnloop._data.parts.Part`."""

    def lengths_in(self, epoch: int) -> dict[str, int | None]:
        """Return the lengths of the parts, by name."""
        return {name: part.length_in(epoch) for name, part in self.parts.items()}

    def leaves(self) -> Iterator[Loader]:
        """Yield the loaders that it is made of in the end."""
        for given in self.loaders.values():
            loader, _ = unmarked(given)
            if isinstance(loader, Composed):
                yield from loader.leaves()
            else:
                yield loader

    def __len__(self) -> int:
        length = self.length_in(0)
        if length is None:
            raise TypeError(f"{self.call}(...) has no length: that of its loaders is not known")
        return in_whole_rounds(length) if self.even else length

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of a pass of its own, whose order torch's generator decides."""
        return self._one_pass(new_seed(), None)

    def _one_pass(self, seed: int, epoch: int | None) -> Iterator[Batch]:
        batches = fetch(self.items(seed, epoch, 0, SingleProcess()))
        while True:
            with isolated(torch.device("cpu")):
                batch = next(batches, END)
            if batch is END:
                return
            yield batch


def unmarked(loader: Loader) -> tuple[Loader, bool]:
    """Return a loader without the mark of ``even``, and whether it had one, or a part of it."""
    if isinstance(loader, even):
        return unmarked(loader.loader)[0], True
    if isinstance(loader, sharded):
        inner, is_even = unmarked(loader.loader)
        return (sharded(inner), True) if is_even else (loader, False)
    return loader, isinstance(loader, Composed) and loader.even


def fetch(items: Iterator[Item | Padding]) -> Iterator[Batch]:
    """Yield the batches of items.

    Loaders with workers are asked for several batches at once, each for its own.
    """
    return _Fetching(items).batches()


def seen(item: Item | Padding) -> Item:
    """Return the item that is a glimpse of the batch of another item."""
    if isinstance(item, Request):
        return item._replace(request=only_seen(item.request))
    if isinstance(item, Together):
        return Together({name: seen(one) for name, one in item.items.items()})
    assert isinstance(item, Given)
    return Given(glimpse(item.batch))


class _Fetching:
    """Items that are being fetched.

    Args:
        items: this process's items.
    """

    def __init__(self, items: Iterator[Item | Padding]) -> None:
        self._items = items
        self._ahead: deque[Item | Padding] = deque()
        self._requests: defaultdict[MapStyle, deque[object]] = defaultdict(deque)
        self._fetched: dict[MapStyle, Iterator[Batch]] = {}

    def batches(self) -> Iterator[Batch]:
        __tracebackhide__ = True
        with contextlib.ExitStack() as self._pools:  # the workers end, or are kept for later
            while self._ahead or self._advance():
                yield self._make(self._ahead.popleft())

    def _advance(self) -> bool:
        """Take an item, and pass on what it asks for. Return whether there was one."""
        __tracebackhide__ = True
        item = next(self._items, None)
        if item is None:
            return False
        self._ahead.append(item)
        self._note(item)
        return True

    def _note(self, item: Item | Padding) -> None:
        if type(item) is Request:
            self._requests[item.part].append(item.request)
        elif isinstance(item, Padding):
            self._note(item.batch)
        elif isinstance(item, Together):
            for one in item.items.values():
                self._note(one)

    def _asked_of(self, part: MapStyle) -> Iterator[object]:
        """Yield what a loader is asked for. A loader with workers takes it in advance."""
        __tracebackhide__ = True
        waiting = self._requests[part]
        while waiting or self._advance():
            if waiting:
                yield waiting.popleft()

    def _make(self, item: Item | Padding) -> Batch:
        __tracebackhide__ = True
        if type(item) is Request:
            if item.part not in self._fetched:
                fetched = item.part.fetch(self._asked_of(item.part))
                self._fetched[item.part] = self._pools.enter_context(contextlib.closing(fetched))
            return next(self._fetched[item.part])
        if isinstance(item, Padding):
            return Padding(self._make(item.batch))
        if isinstance(item, Together):
            batches: dict[str, Batch] = {}
            for name, one in item.items.items():  # a comprehension is a frame in the traceback
                batches[name] = self._make(one)
            return batches
        assert isinstance(item, Given)
        if item.version is not None and version(item.batch) != item.version:
            raise ValueError(
                "the loader reuses a tensor for its next batch, but several batches are needed at "
                "once: let it make a new one for each (yield x.clone())"
            )
        return item.batch
