"""Map-style loaders, read by their parts.

The sampler says which samples, and each batch of indices travels to the worker (or to this process) together with the seed that
its randomness starts from. So shuffling and random augmentation are a function of (seed, epoch, position), whatever the number
of workers, and what was consumed already is skipped by its index, not by loading it.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from toolz import partition, partition_all
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fnloop._backend import torch_compat
from fnloop._core.rng import FETCH, ORDER, fold_in, seed_all, seeded_generator
from fnloop._data.round_robin import SingleProcess
from fnloop._data.window import END, Padding

__all__ = [
    "is_sized",
    "length_of",
    "map_style",
    "set_epoch",
    "sigterm_resistant_workers",
]

_TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def length_of(loader: Any) -> int | None:
    """Return the number of batches, or None if it isn't known before the end."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def is_sized(loader: DataLoader) -> bool:
    """Say whether all batches of a map-style loader but the last have one known size."""
    return type(loader.batch_sampler) is BatchSampler and length_of(loader.sampler) is not None


def set_epoch(epoch: int | None, *owners: Any) -> None:
    if epoch is None:
        return
    for owner in {id(owner): owner for owner in owners}.values():
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


class _BatchRequest(NamedTuple):
    """What a worker needs to make a batch that depends on nothing else."""

    seed: int
    index: Any  # of one sample, or a list of them
    borrowed: bool = False


class _BatchDataset(torch.utils.data.Dataset):
    """A dataset of batches: item ``ticket`` is the batch of those samples, drawn with that seed."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], batched: bool) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self.together = batched and getattr(dataset, "__getitems__", None) is not None

    def __getitem__(self, ticket: _BatchRequest) -> Any:
        __tracebackhide__ = True
        seed_all(ticket.seed)
        batch = self._batch(ticket.index)
        return Padding(batch) if ticket.borrowed else batch

    def _batch(self, index: Any) -> Any:
        __tracebackhide__ = True
        what, of = type(self.dataset).__name__, index
        try:
            if self.together:
                samples = self.dataset.__getitems__(index)
            elif self.batched:
                samples = []
                for of in index:  # a comprehension would be a frame in the traceback, and map ends at a StopIteration
                    samples.append(self.dataset[of])
            else:
                samples = self.dataset[index]
            what, of = f"the collate_fn of {what}", index
            return self.collate(samples)
        except (
            StopIteration
        ) as error:  # which, in a worker, torch would take for the end of the data
            which = f"samples {of}" if isinstance(of, list) else f"sample {of}"
            raise RuntimeError(
                f"{what} raised StopIteration for {which}: an iterator that it reads is at its end"
            ) from error


def map_style(
    loader: DataLoader,
    seed: int,
    epoch: int | None,
    batch: int,
    samples: int,
    sharing: SingleProcess,
) -> Iterator[Any]:
    """Yield this process's batches."""
    __tracebackhide__ = True
    tickets = _requests(loader, seed, epoch, batch, samples, sharing)
    if loader.num_workers:
        yield from _with_workers(loader, tickets)
    else:
        fetch = _BatchDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        for ticket in tickets:
            yield fetch[ticket]


def _requests(
    loader: DataLoader,
    seed: int,
    epoch: int | None,
    batch: int,
    samples: int,
    sharing: SingleProcess,
) -> Iterator[_BatchRequest]:
    """Yield what this process's batches are made of. Each has a seed of its position, whatever process makes it."""
    __tracebackhide__ = True
    seeds = fold_in(seed, FETCH, epoch or 0)
    stride = loader.batch_sampler.batch_size if is_sized(loader) else 1  # type: ignore[union-attr]
    start = (samples or batch * stride) if is_sized(loader) else batch
    order = _batch_indices(
        loader, fold_in(seed, ORDER, epoch or 0), epoch, start, sharing.processes
    )
    order = sharing.note_order(order, batched=loader.batch_sampler is not None)
    sized = loader.batch_sampler is not None and _keeps_all(loader)
    for numbered in sharing.split(
        enumerate(order), lambda numbered: len(numbered[1]) if sized else 0
    ):
        borrowed = type(numbered) is Padding
        n, index = numbered.batch if borrowed else numbered
        yield _BatchRequest(fold_in(seeds, start + n * stride), index, borrowed)


def _keeps_all(loader: DataLoader) -> bool:
    """Say whether a batch surely has as many samples as its sampler gave indices."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return loader.collate_fn is default_collate and not hasattr(dataset, "__getitems__")


def _batch_indices(
    loader: DataLoader, seed: int, epoch: int | None, start: int, processes: int
) -> Iterator[Any]:
    """Return the indices of each batch that is left of an epoch, from a sample on; from a batch, if their size isn't known."""
    batched: Any = loader.batch_sampler
    set_epoch(epoch, loader.dataset, batched, getattr(batched, "sampler", None), loader.sampler)
    if type(batched) is not BatchSampler:
        return itertools.islice(
            _sampled(loader.sampler if batched is None else batched, seed), start, None
        )
    if not is_sized(loader):
        return itertools.islice(
            _batched(_sampled(batched.sampler, seed), batched, processes), start, None
        )
    return _batched(
        itertools.islice(_sampled(batched.sampler, seed), start, None), batched, processes
    )


def _batched(indices: Iterator[Any], batched: BatchSampler, processes: int) -> Iterator[list[Any]]:
    """Cut indices into batches."""
    if batched.drop_last:  # a round in which not every process gets a whole batch
        rounds = partition(batched.batch_size * processes, indices)
        indices = itertools.chain.from_iterable(rounds)
    return map(list, partition_all(batched.batch_size, indices))


def _sampled(sampler: Any, seed: int) -> Iterator[Any]:
    """Yield what a sampler yields, drawn from generators that are a function of the seed."""
    inner = getattr(sampler, "sampler", sampler)
    with seeded_generator(inner, seed), seeded_generator(sampler, seed):
        seed_all(seed)
        indices = iter(sampler)
        index = next(
            indices, END
        )  # torch's samplers take their generator when the first index is asked for
    draws_globally = type(sampler) not in _TORCH_SAMPLERS
    for n in itertools.count():
        if index is END:
            return
        yield index
        if draws_globally:
            seed_all(fold_in(seed, n))
        index = next(indices, END)


class _Requests:
    """The sampler of a loader with workers: whatever the epoch is to yield."""

    def __init__(self) -> None:
        self.next: Iterator[_BatchRequest] = iter(())

    def __iter__(self) -> Iterator[_BatchRequest]:
        return self.next

    def __len__(self) -> int:
        raise TypeError("the number of tickets isn't known")


_worker_loaders: weakref.WeakKeyDictionary[DataLoader, tuple[DataLoader, _Requests]] = (
    weakref.WeakKeyDictionary()
)


def _with_workers(loader: DataLoader, tickets: Iterator[_BatchRequest]) -> Iterator[Any]:
    """Let the loader's workers make the batches of the tickets. Persistent workers live as long as the loader."""
    __tracebackhide__ = True
    pool, sampler = _worker_loaders.pop(loader, None) or _worker_loader(
        loader
    )  # taken out: who reads the loader meanwhile gets another
    try:
        sampler.next = tickets
        yield from torch_compat.make_killable(iter(pool))
    finally:
        if loader.persistent_workers:
            _worker_loaders[loader] = pool, sampler


def _worker_loader(loader: DataLoader) -> tuple[DataLoader, _Requests]:
    sampler = _Requests()
    pool = DataLoader(
        _BatchDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None),
        batch_size=None,
        sampler=sampler,  # type: ignore[arg-type]
        collate_fn=_identity,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator().manual_seed(
            0
        ),  # the workers' first seed; each ticket brings its own
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        in_order=loader.in_order,
    )
    return pool, sampler


class _WorkerInit(NamedTuple):
    """The user's worker_init_fn, with the user's dataset in ``get_worker_info()``."""

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        torch_compat.set_worker_dataset(info, info.dataset.dataset)
        _IgnoreFirstSigterm(self.init)(worker)


class _IgnoreFirstSigterm(NamedTuple):
    """The user's worker_init_fn, in a worker that outlives its first SIGTERM.

    Who ends a job often signals all of its processes, and a run that stops behind the update it is at still needs its workers.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        if self.init is not None:
            self.init(worker)


@contextlib.contextmanager
def sigterm_resistant_workers(loader: DataLoader) -> Iterator[None]:
    """Let the workers that a loader starts meanwhile outlive their first SIGTERM."""
    init = loader.worker_init_fn
    loader.worker_init_fn = _IgnoreFirstSigterm(init)
    try:
        yield
    finally:
        loader.worker_init_fn = init


def _identity(batch: Any) -> Any:
    return batch
