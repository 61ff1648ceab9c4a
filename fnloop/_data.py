"""Data: order as a function of (seed, epoch), position, windows, placement.

A map-style ``DataLoader`` is read by its parts: its sampler says which samples, and each batch of indices travels to
the worker (or to this process) together with the seed that its randomness starts from. So shuffling and random
augmentation are a function of (seed, epoch, position), whatever the number of workers, and what was consumed already
is skipped by its index, not by loading it. Any other iterable is iterated; to go on in the middle of it, it is
consumed up to there.

With several processes, the batches of the loader are dealt to them in turn, like cards: in each round one to every process. In
the last round a process that gets none borrows the first one's, in case that all have to take part in exchanges; it counts for
nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import attrs
import torch
from toolz import partition, partition_all
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fnloop._backend import beside, needs_placing, place
from fnloop._joint import Borrowed
from fnloop._processes import agreed, any_process
from fnloop._rng import FETCH, ORDER, fold_in, own_generator, position_all

__all__ = [
    "Loaders",
    "Source",
    "leading",
    "length_of",
    "open_source",
    "read_loaders",
    "sharded",
    "tensors_in",
    "updates_in",
    "windows",
]

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_END = object()


class Loaders(NamedTuple):
    """The loaders of a run, told apart."""

    train: Any
    evaluated: dict[str, Any]


def read_loaders(loaders: Any) -> Loaders:
    """Tell the training loader from those that are evaluated.

    Args:
        loaders: a mapping with "train" and any others, a pair ``(train, valid)``, or one iterable of batches.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no "train", or a name has a slash.
    """
    if isinstance(loaders, Mapping):
        if "train" not in loaders:
            raise ValueError(f'the loaders need one named "train" to train on; got {list(loaders)}')
        evaluated = {name: loader for name, loader in loaders.items() if name != "train"}
        for name in evaluated:
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"a loader's name is the prefix of its metrics: a str without a slash; got {name!r}")
    elif isinstance(loaders, tuple) and len(loaders) == 2:
        train, valid = loaders
        if isinstance(train, Tensor) or isinstance(valid, Tensor):
            raise TypeError(
                "a pair of loaders is (train, valid), each an iterable of batches; got a pair of tensors, which "
                "looks like one "
                "batch. To train on this batch alone, write fit(step, state, [batch])."
            )
        loaders, evaluated = {"train": train}, {} if valid is None else {"valid": valid}
    else:
        loaders, evaluated = {"train": loaders}, {}
    for name, loader in {"train": loaders["train"], **evaluated}.items():
        check_loader(loader, name)
    return Loaders(loaders["train"], evaluated)


def check_loader(loader: Any, name: str, alone: bool = False) -> None:
    """Raise TypeError unless batches can be had from a loader."""
    if alone and isinstance(loader, Mapping):
        raise TypeError(
            f"the {name} loader must be one iterable of batches; got a mapping with {list(loader)}: take one of them"
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(f"the {name} loader is a {type(loader).__name__}, a dataset of samples: wrap it in a DataLoader")
    if isinstance(loader, list) and loader and isinstance(loader[0], DataLoader):
        raise TypeError(f"the {name} loader is a list of DataLoaders: write a pair (train, valid), or a mapping with names")
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if isinstance(loader, str | bytes) or not (iterable or callable(loader)):
        raise TypeError(
            f"the {name} loader must be an iterable of batches (a DataLoader, a list, ...) or a function that "
            "returns one; "
            f"got {loader!r:.80} ({type(loader).__name__})"
        )


def length_of(loader: Any) -> int | None:
    """Return the number of batches, or None if it isn't known before the end."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


@attrs.define
class Dealt:
    """What has been dealt of an epoch to all processes.

    Args:
        sizes: of each round that was not worked on yet, the size of its batches if all have one, else 0.
        order: a checksum of the indices of its samples, where they are known.
    """

    sizes: deque[int] = attrs.field(factory=deque)
    order: int = 0

    def begin(self) -> None:
        """Begin an epoch."""
        self.sizes.clear()
        self.order = 0

    def noted(self, index: Any) -> Any:
        """Note the indices of a batch, and return them."""
        with contextlib.suppress(TypeError, OverflowError):  # not numbers
            self.order = zlib.crc32(array("q", index if isinstance(index, list) else [index]), self.order)
        return index


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
    dealt: Dealt = attrs.field(factory=Dealt)

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
    deal = _Deal(rank, processes, Dealt())
    if type(loader) in (list, tuple):  # nothing to position: no code runs

        def listed(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return deal(itertools.islice(loader, batch, None), leading)

        return Source(listed, len(loader), processes, dealt=deal.dealt)
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and not isinstance(loader.dataset, IterableDataset):

        def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return _map_style(loader, seed, epoch, batch, samples, deal)

        if _is_sized(loader):
            batched: Any = loader.batch_sampler
            size, total = batched.batch_size, len(batched.sampler)
            source = Source(batches, None, processes, size, total, batched.drop_last, deal.dealt)
            return attrs.evolve(source, length=source.batches_of(total))
        return Source(batches, length_of(loader), processes, dealt=deal.dealt)

    def iterated(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
        return deal(_iterated(loader, seed, epoch, batch), leading)

    return Source(iterated, length_of(loader), processes, dealt=deal.dealt)


def _is_sized(loader: DataLoader) -> bool:
    """Say whether all batches of a map-style loader but the last have one known size."""
    return type(loader.batch_sampler) is BatchSampler and length_of(loader.sampler) is not None


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


class _Deal(NamedTuple):
    """Deals to each process in turn; in the last round who gets nothing borrows the first one's."""

    rank: int
    processes: int
    dealt: Dealt

    def __call__(self, things: Any, size_of: Callable[[Any], int]) -> Iterator[Any]:
        things = iter(things)
        return things if self.processes == 1 else self._dealt(things, size_of)

    def _dealt(self, things: Iterator[Any], size_of: Callable[[Any], int]) -> Iterator[Any]:
        __tracebackhide__ = True
        self.dealt.begin()
        for first in things:
            rest = tuple(itertools.islice(things, self.processes - 1))
            full = len(rest) == self.processes - 1
            sizes = {size_of(thing) for thing in (first, *rest)} if full else {0}
            self.dealt.sizes.append(sizes.pop() if len(sizes) == 1 else 0)
            if self.rank <= len(rest):
                yield rest[self.rank - 1] if self.rank else first
            else:
                yield Borrowed(first)


class sharded:
    """Mark a loader that yields this process's own share, and not all of the data.

    Any other loader is read by every process, and its batches are dealt to them in turn; for a map-style DataLoader only
    their indices are. Mark a stream that each process reads a part of. Shares may be of different length.

    Args:
        loader: an iterable of batches, or a function that returns one.

    Returns:
        A loader for ``fit``, ``evaluate`` and ``predict``.

    Raises:
        TypeError: it is no loader.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> from torch.utils.data import IterableDataset
        >>> class Shards(IterableDataset):
        ...     def __iter__(self):                     # files rank, rank + world_size, ...
        ...         return (torch.ones(2) for file in range(state.backend.rank, 6, state.backend.world_size))
        >>> state = toy()
        >>> state = fl.fit(fl.pipeline()(toy_loss), state, sharded(Shards()), hooks=())
        >>> state.model.w.item()
        -6.0
    """

    def __init__(self, loader: Any) -> None:
        check_loader(loader, "sharded", alone=True)
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __repr__(self) -> str:
        return f"sharded({self.loader!r})"


def _open_sharded(loader: Any, seed: int, rank: int, processes: int) -> Source:
    if processes == 1:
        return open_source(loader, seed)
    source = open_source(loader, fold_in(seed, rank))

    def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
        return _until_all_end(source.batches(epoch, batch // processes, 0))

    shares = agreed([-1.0 if source.length is None else source.length, source.length is None])
    return Source(batches, None if shares[1] else int(shares[0]) * processes, processes)


def _until_all_end(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield until the longest share is at its end; whose own has ended before borrows from it."""
    __tracebackhide__ = True
    last = _END
    while any_process((batch := next(batches, _END)) is not _END):
        if batch is _END and last is _END:
            raise ValueError("this process's share of the data has no batch, and those of others have: give each at least one")
        yield Borrowed(last) if batch is _END else batch
        last = last if batch is _END else batch


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
    the one before is still worked on has it fetched and copied meanwhile; with prefetch n > 1, n - 1 more are.
    """
    batches = source.batches(epoch, batch, samples)
    if needs_placing(device):
        batches = map(_placer(device), batches)
    batches = iter(batches)
    # Not partition_all, which asks for the next window before it yields one: a loader that draws would see it.
    fed = batches if window == 1 else iter(lambda: tuple(itertools.islice(batches, window)), ())
    return fed if prefetch == 1 else _ahead(fed, prefetch)


def _ahead(things: Iterator[Any], n: int) -> Iterator[Any]:
    """Yield each thing when n of them are there; what goes wrong comes behind those that were there before."""
    __tracebackhide__ = True
    queue: deque[Any] = deque()
    try:
        for thing in things:
            queue.append(thing)
            if len(queue) == n:
                yield queue.popleft()
    except Exception:
        yield from queue
        raise
    yield from queue


def _placer(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that puts a batch on a device: on CUDA by a stream of its own, beside what the device is doing."""
    move: Callable[[Any], Any] = beside(device) if device.type == "cuda" else lambda batch: place(batch, device)
    return lambda batch: Borrowed(move(batch.batch)) if type(batch) is Borrowed else move(batch)


# --- iterables


def _iterated(loader: Any, seed: int, epoch: int | None, start: int) -> Iterator[Any]:
    __tracebackhide__ = True
    _tell_epoch(epoch, loader, getattr(loader, "dataset", None))
    order, fetch = fold_in(seed, ORDER, epoch or 0), fold_in(seed, FETCH, epoch or 0)
    if isinstance(loader, DataLoader):
        loader._iterator = None  # persistent workers would go on with the generators of the epoch before
    with contextlib.ExitStack() as stack:  # until the first batch is there: only then has everybody taken its generator
        samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
        for owner in {id(owner): owner for owner in (loader, *samplers) if owner is not None}.values():
            stack.enter_context(own_generator(owner, order))
        iterable: Any = loader
        position_all(order)
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            iterable = iterable()
        batches = iter(iterable)
        if start and batches is loader:
            raise ValueError(
                f"epoch {epoch} is to go on at batch {start}, but the loader is an iterator, which can't start again: pass a "
                f"function that makes it (fit(step, state, lambda: batches(...)))"
            )
        position_all(fold_in(fetch, 0))
        batch = next(batches, _END)
    for n in itertools.count(1):
        if batch is _END:
            return
        if n > start:
            yield batch
        position_all(fold_in(fetch, n))
        batch = next(batches, _END)


def _tell_epoch(epoch: int | None, *owners: Any) -> None:
    if epoch is None:
        return
    for owner in {id(owner): owner for owner in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


# --- map-style loaders


class _Ticket(NamedTuple):
    """What a worker needs to make a batch that depends on nothing else."""

    seed: int
    index: Any  # of one sample, or a list of them
    borrowed: bool = False


class _Fetch(torch.utils.data.Dataset):
    """A dataset of batches: item ``ticket`` is the batch of those samples, drawn with that seed."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self.together = batched and getattr(dataset, "__getitems__", None) is not None

    def __getitem__(self, ticket: _Ticket) -> Any:
        __tracebackhide__ = True
        position_all(ticket.seed)
        batch = self._batch(ticket.index)
        return Borrowed(batch) if ticket.borrowed else batch

    def _batch(self, index: Any) -> Any:
        __tracebackhide__ = True
        if self.together:
            return self.collate(self.dataset.__getitems__(index))
        if self.batched:
            samples = []
            for i in index:  # a comprehension would be a frame in the traceback, and map ends at a StopIteration
                samples.append(self.dataset[i])
            return self.collate(samples)
        return self.collate(self.dataset[index])


def _map_style(loader: DataLoader, seed: int, epoch: int | None, batch: int, samples: int, deal: _Deal) -> Iterator[Any]:
    """Yield this process's batches."""
    __tracebackhide__ = True
    tickets = _tickets(loader, seed, epoch, batch, samples, deal)
    if loader.num_workers:
        yield from _with_workers(loader, tickets)
    else:
        fetch = _Fetch(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        for ticket in tickets:
            yield fetch[ticket]


def _tickets(loader: DataLoader, seed: int, epoch: int | None, batch: int, samples: int, deal: _Deal) -> Iterator[_Ticket]:
    """Yield what this process's batches are made of. Each has a seed of its position, whatever process makes it."""
    __tracebackhide__ = True
    seeds = fold_in(seed, FETCH, epoch or 0)
    stride = loader.batch_sampler.batch_size if _is_sized(loader) else 1  # type: ignore[union-attr]
    start = (samples or batch * stride) if _is_sized(loader) else batch
    order = _order(loader, fold_in(seed, ORDER, epoch or 0), epoch, start, deal.processes)
    order = order if deal.processes == 1 else map(deal.dealt.noted, order)
    sized = loader.batch_sampler is not None and loader.collate_fn is default_collate  # another may leave samples out
    for numbered in deal(enumerate(order), lambda numbered: len(numbered[1]) if sized else 0):
        borrowed = type(numbered) is Borrowed
        n, index = numbered.batch if borrowed else numbered
        yield _Ticket(fold_in(seeds, start + n * stride), index, borrowed)


def _order(loader: DataLoader, seed: int, epoch: int | None, start: int, processes: int) -> Iterator[Any]:
    """Return the indices of each batch that is left of an epoch, from a sample on; from a batch, if their size isn't known."""
    batched: Any = loader.batch_sampler
    _tell_epoch(epoch, loader.dataset, batched, getattr(batched, "sampler", None), loader.sampler)
    if type(batched) is not BatchSampler:
        return itertools.islice(_drawn(loader.sampler if batched is None else batched, seed), start, None)
    if not _is_sized(loader):
        return itertools.islice(_batched(_drawn(batched.sampler, seed), batched, processes), start, None)
    return _batched(itertools.islice(_drawn(batched.sampler, seed), start, None), batched, processes)


def _batched(indices: Iterator[Any], batched: BatchSampler, processes: int) -> Iterator[list[Any]]:
    """Cut indices into batches."""
    if batched.drop_last:  # a round in which not every process gets a whole batch
        rounds = partition(batched.batch_size * processes, indices)
        indices = itertools.chain.from_iterable(rounds)
    return map(list, partition_all(batched.batch_size, indices))


def _drawn(sampler: Any, seed: int) -> Iterator[Any]:
    """Yield what a sampler yields, drawn from generators that are a function of the seed."""
    inner = getattr(sampler, "sampler", sampler)
    with own_generator(inner, seed), own_generator(sampler, seed):
        position_all(seed)
        indices = iter(sampler)
        index = next(indices, _END)  # torch's samplers take their generator when the first index is asked for
    draws_globally = type(sampler) not in _TORCH_SAMPLERS
    for n in itertools.count():
        if index is _END:
            return
        yield index
        if draws_globally:
            position_all(fold_in(seed, n))
        index = next(indices, _END)


class _Tickets:
    """The sampler of a loader with workers: whatever the epoch is to yield."""

    def __init__(self) -> None:
        self.next: Iterator[_Ticket] = iter(())

    def __iter__(self) -> Iterator[_Ticket]:
        return self.next

    def __len__(self) -> int:
        raise TypeError("the number of tickets isn't known")


_pools: weakref.WeakKeyDictionary[DataLoader, tuple[DataLoader, _Tickets]] = weakref.WeakKeyDictionary()


def _with_workers(loader: DataLoader, tickets: Iterator[_Ticket]) -> Iterator[Any]:
    """Let the loader's workers make the batches of the tickets. Persistent workers live as long as the loader."""
    __tracebackhide__ = True
    pool, sampler = _pools.pop(loader, None) or _pool(loader)  # taken out: who reads the loader meanwhile gets another
    try:
        sampler.next = tickets
        yield from pool
    finally:
        if loader.persistent_workers:
            _pools[loader] = pool, sampler


def _pool(loader: DataLoader) -> tuple[DataLoader, _Tickets]:
    sampler = _Tickets()
    pool = DataLoader(
        _Fetch(loader.dataset, loader.collate_fn, loader.batch_sampler is not None),
        batch_size=None,
        sampler=sampler,  # type: ignore[arg-type]
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_Init(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(0),  # the workers' first seed; each ticket brings its own
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )
    return pool, sampler


class _Init(NamedTuple):
    """The user's worker_init_fn, with the user's dataset in ``get_worker_info()``.

    A worker outlives its first SIGTERM: who ends a job often signals all of its processes, and a run that stops behind the
    update it is at still needs its workers.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        if self.init is not None:
            self.init(worker)


def _as_it_is(batch: Any) -> Any:
    return batch


def leading(batch: Any) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def updates_in(batches: int | None, window: int) -> int | None:
    """Return how many windows a number of batches makes."""
    return None if batches is None else math.ceil(batches / window)
