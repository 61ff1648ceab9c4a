"""Loaders made of loaders: their parts, the samples of a batch, the size of an update."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fnloop._core.rng import isolated, new_seed
from fnloop._core.types import Batch
from fnloop._data import map_style
from fnloop._data.held import Held
from fnloop._data.iterable import as_torch_reads_it, is_keeper, iterate, keeper_of, owners_of
from fnloop._data.loaders import (
    NONE_LEFT,
    Loader,
    Padding,
    SingleProcess,
    batch_size_of,
    check_loader,
    even,
    glimpse,
    in_whole_rounds,
    is_iterable,
    read_loaders,
    sharded,
    sharing_among,
)
from fnloop._data.map_style import index_in, makes_new, only_seen, requests
from fnloop._data.position import Positions, kept_generators

# --------------------------------------------------------------------------------------------------
# Loaders made of loaders: the base of what `fnloop.data` returns, and how they are read.
#
# A composed loader says in which order the items of its parts follow each other, as a function of
# (seed, epoch), see `parts`. It is a part itself, so it can be composed again. The items are
# distributed to the processes once, at the outermost loader.


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
    def items(self, at: Pass) -> Iterator[PartItem]:
        """Yield the items of an epoch from a position on, see `Part`."""

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
        sharing = SingleProcess()
        sharing.held.begin_pass(active=True)
        found = self.items(Pass(seed, epoch, 0, sharing))
        items = sharing.split(found, size_of, counts=True)
        batches = sharing.held.taken(fetch(items, sharing.held), grouped=False)
        while True:
            with isolated(torch.device("cpu")):
                batch = next(batches, NONE_LEFT)
            if batch is NONE_LEFT:
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


def leaves_of(loader: Loader) -> Iterator[Loader]:
    """Yield the loaders that a loader is made of in the end; itself, if it is not composed."""
    loader, _ = unmarked(loader)
    loader = loader.loader if isinstance(loader, sharded) else loader
    yield from loader.leaves() if isinstance(loader, Composed) else (loader,)


@contextlib.contextmanager
def unmoved(loaders: object) -> Iterator[None]:
    """Put back what decides which batches loaders give next: positions, generators of their own.

    Args:
        loaders: what ``fit`` takes.
    """
    train, evaluated = read_loaders(loaders)
    every = itertools.chain.from_iterable(map(leaves_of, (train, *evaluated.values())))
    leaves = [*filter(is_iterable, every)]
    keepers = [keeper for keeper in map(keeper_of, leaves) if keeper is not None]
    positions = [copy.deepcopy(keeper.state_dict()) for keeper in keepers]
    with kept_generators([owner for leaf in leaves for owner in owners_of(leaf)]):
        try:
            yield
        finally:
            for keeper, position in zip(keepers, positions, strict=True):
                keeper.load_state_dict(position)


def fetch(items: Iterator[PartItem | Padding], held: Held) -> Iterator[Batch]:
    """Yield the batches of items.

    Loaders with workers are asked for several batches at once, each for its own.

    Args:
        items: this process's items.
        held: notes the batches that are made.
    """
    return _Fetching(items, held).batches()


def seen(item: PartItem | Padding) -> PartItem:
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
        items, held: the arguments of :func:`fetch`.
    """

    def __init__(self, items: Iterator[PartItem | Padding], held: Held) -> None:
        self._items, self._held = items, held
        self._made = 0  # rounds
        self._ahead: deque[PartItem | Padding] = deque()
        self._requests: defaultdict[MapStyle, deque[object]] = defaultdict(deque)
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

    def _note(self, item: PartItem | Padding) -> None:
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

    def _make(self, item: PartItem | Padding) -> Batch:
        __tracebackhide__ = True
        if type(item) is Request:
            if item.part not in self._fetched:
                fetched = item.part.fetch(self._asked_of(item.part))
                self._fetched[item.part] = self._pools.enter_context(contextlib.closing(fetched))
            batch = next(self._fetched[item.part])
            if not item.part.makes_new:
                self._held.note(batch, self._made)
            return batch
        if isinstance(item, Padding):
            return Padding(self._make(item.batch))
        if isinstance(item, Together):
            batches: dict[str, Batch] = {}
            for name, one in item.items.items():  # a comprehension is a frame in the traceback
                batches[name] = self._make(one)
            return batches
        assert isinstance(item, Given)
        return item.batch


# --------------------------------------------------------------------------------------------------
# Loaders as parts of other loaders: each is asked for the batches that follow a position.
#
# What a part gives are not batches but *items*: what is known of a batch before it is fetched.
# Every process goes through the items of all, and fetches its own. So an item that is left out, or
# that another process has, costs no reading where the samples are known by their index.


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
    """A batch that is there already."""

    batch: Batch


class Together(NamedTuple):
    """Items that make one batch, by name."""

    items: Mapping[str, PartItem]


PartItem = Request | Given | Together


def size_of(item: PartItem) -> int:
    """Return how many samples an item has, or 0 if that is not known."""
    if isinstance(item, Request):
        return item.size
    if isinstance(item, Together):
        sizes = {size_of(one) for one in item.items.values()}
        return sizes.pop() if len(sizes) == 1 else 0
    return batch_size_of(item.batch)


class Pass(NamedTuple):
    """From where on a loader is read.

    Args:
        seed: the run's, or one that was derived from it.
        epoch: the epoch, or None for an evaluation.
        start: how many items to pass over.
        sharing: what notes the order of the samples.
    """

    seed: int
    epoch: int | None
    start: int
    sharing: SingleProcess


class Part(Protocol):
    """A loader that is read by its items."""

    def length_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch, or None if it is not known before its end."""
        ...

    def items(self, at: Pass) -> Iterator[PartItem]:
        """Yield the items of an epoch, of all processes, from a position on."""
        ...


class MapStyle:
    """A DataLoader that takes samples by index."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.loader = loader
        self.makes_new = map_style.makes_new(loader)

    def length_in(self, epoch: int) -> int | None:
        return map_style.length_of(self.loader)

    def items(self, at: Pass, indices: list[object] | None = None) -> Iterator[PartItem]:
        __tracebackhide__ = True
        place = at.seed, at.epoch, at.start, 0
        found = map_style.requests(self.loader, *place, at.sharing, indices=indices)
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

    def items(self, at: Pass) -> Iterator[PartItem]:
        return map(Given, itertools.islice(self.batches, at.start, None))


class _Iterated(NamedTuple):
    """Any other loader: it is read to know that there is a batch."""

    loader: Loader

    def length_in(self, epoch: int) -> int | None:
        return map_style.length_of(self.loader)

    def items(self, at: Pass) -> Iterator[PartItem]:
        __tracebackhide__ = True
        batches = iterate(self.loader, at.seed, at.epoch, at.start, Positions())
        for batch in batches if makes_new(self.loader) else at.sharing.held.watched(batches):
            yield Given(batch)


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


# --------------------------------------------------------------------------------------------------
# Which samples of its dataset a batch has, where the batches are taken by index.

# (epoch, batch, samples) -> the indices of each batch of this process, from that position on.
Indices = Callable[[int, int, int], Iterator[object]]


def no_indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
    """Return the indices of a loader whose samples have none."""
    return iter(())


def contents_of(item: PartItem) -> object:
    """Return what tells an item from another: a batch, or the indices that one is made from."""
    if isinstance(item, Request):
        return index_in(item.request)
    if isinstance(item, Together):
        return {name: contents_of(one) for name, one in item.items.items()}
    return item.batch


def indices_of(
    loader: Loader,
    seed: int,
    sharings: tuple[int, int, int | None, bool],
    positions: Positions,
) -> Indices:
    """Return what says which samples the batches of a loader have.

    The function gives a list of indices for each batch; a mapping by name, if a batch is made of
    several; None for a batch that is not taken by index; and nothing if no batch is. It fetches no
    sample, but it seeds the global generators, as a sampler may draw from them.

    Args:
        loader: the loader.
        seed: the run's.
        sharings: the arguments of :func:`sharing_among`.
        positions: know what a sampler of the user's has given, which may not give it again.
    """
    leaves = [*loader.leaves()] if isinstance(loader, Composed) else [loader]
    if not any(map(is_map_style, leaves)):
        return no_indices
    if any(not is_map_style(leaf) and type(leaf) not in (list, tuple) for leaf in leaves):
        return no_indices  # to know what comes next, a stream would have to be read

    def indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
        sharing = sharing_among(*sharings)  # the run's own notes what it reads
        found = positions.indices_from(epoch, batch)
        if isinstance(loader, Composed):
            items = loader.items(Pass(seed, epoch, batch, sharing))
            found = map(_index_of, items)
        elif found is None:
            asked = requests(loader, seed, epoch, batch, samples, sharing, sharing.complete)
            found = map(index_in, asked)
        for index in sharing.split(found, lambda index: 0):
            yield [] if isinstance(index, Padding) else index

    return indices


def _index_of(item: PartItem) -> object:
    if isinstance(item, Request):
        return index_in(item.request)
    if isinstance(item, Together):
        return {name: _index_of(one) for name, one in item.items.items()}
    return None


# --------------------------------------------------------------------------------------------------
# How many batches make an update of a number of samples, in all processes together.


def window_of(loader: object, total: int) -> int:
    """Return how many batches of a loader have ``total`` samples.

    An incomplete batch, such as the last one of an epoch, counts as a complete one.

    Raises:
        ValueError: that is not known, or not a whole number.
    """
    typed = f"accumulate(total={total})"
    if isinstance(loader, sharded):
        raise ValueError(
            f"{typed} distributes the batches of each update to as many processes as there are, "
            "but sharded(...) gives each process its own: pass the loader without sharded, or "
            "write accumulate(n)"
        )
    sizes = _batch_sizes(loader)
    if sizes is None or len(sizes) != 1:
        known = "does not say" if sizes is None else f"says differently, {sorted(sizes)}"
        raise ValueError(
            f"{typed} needs to know how many samples a batch has, which this training loader "
            f"{known}: pass DataLoader(dataset, batch_size), or write accumulate(n), n batches on "
            "each process"
        )
    (size,) = sizes
    if total % size:
        near = max(total // size, 1) * size
        raise ValueError(
            f"{typed} takes whole batches, and those of the training loader have {size} samples: "
            f"write accumulate(total={near}), or make batches of a size that divides {total}"
        )
    return total // size


def _batch_sizes(loader: object) -> set[int] | None:
    """Return the sizes of complete batches of the loaders inside; None if they are not known."""
    if isinstance(loader, Composed):
        found = [_batch_sizes(leaf) for leaf in loader.leaves()]
        known = [sizes for sizes in found if sizes is not None]
        return set().union(*known) if len(known) == len(found) else None
    if type(loader) in (list, tuple):
        return {max(map(batch_size_of, loader), default=1)}  # type: ignore[call-overload]
    if as_torch_reads_it(loader) and type(loader.batch_sampler) is BatchSampler:
        return {loader.batch_sampler.batch_size}
    return None
