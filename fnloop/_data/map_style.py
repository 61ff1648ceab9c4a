"""Map-style loaders, read by their parts.

The sampler says which samples. Each batch of indices travels to the worker (or to this process)
with the seed that its randomness starts from. So shuffling and random augmentation are a function
of (seed, epoch, position), whatever the number of workers. What was consumed already is skipped
by its index, not by loading it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from typing import Any, NamedTuple, cast

import torch
from toolz import partition, partition_all
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fnloop._backend import torch_compat
from fnloop._core.rng import (
    FETCH,
    ORDER,
    fold_in,
    isolated,
    mix,
    seed_all,
    seed_host,
    seeded_generator,
)
from fnloop._core.types import Batch
from fnloop._data.bucketed import Bucketed
from fnloop._data.fetch import fetch_batch
from fnloop._data.round_robin import (
    Glimpse,
    Index,
    RoundRobin,
    SingleProcess,
    alike,
    glimpse,
    sampling_first,
)
from fnloop._data.window import END, Padding

__all__ = [
    "batch_indices",
    "fetched",
    "index_in",
    "is_sized",
    "length_of",
    "map_style",
    "only_seen",
    "requests",
    "set_epoch",
    "sigterm_resistant_workers",
]

# They draw from their own generator only.
_TORCH_SAMPLERS = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    Bucketed,
)


def length_of(loader: object) -> int | None:
    """Return the number of batches, or None if it is not known before the end."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_sized(loader: DataLoader[object]) -> bool:
    """Return whether all batches of a map-style loader but the last have one known size."""
    return type(loader.batch_sampler) is BatchSampler and length_of(loader.sampler) is not None


def set_epoch(epoch: int | None, *owners: object) -> None:
    """Call ``set_epoch`` of a loader, its dataset and its samplers, where there is one."""
    if epoch is None:
        return
    for owner in {id(owner): owner for owner in owners}.values():
        method = getattr(owner, "set_epoch", None)
        if method is not None:
            method(epoch)


class _BatchRequest(NamedTuple):
    """What a worker needs to make a batch that depends on nothing else.

    Args:
        seeds: what the seeds of an epoch are mixed from.
        position: that of the batch in the epoch.
        index: that of one sample, or a list of them.
        size: how many samples it has, or 0 if that is not known.
        is_padding: whether it is another process's batch.
        only_seen: whether only a glimpse of its first sample is wanted.
    """

    seeds: int
    position: int
    index: Index
    size: int
    is_padding: bool = False
    only_seen: bool = False


def only_seen(request: object) -> object:
    """Return a request for a glimpse of the first sample that a request asks for."""
    return cast(_BatchRequest, request)._replace(only_seen=True)


def index_in(request: object) -> Index:
    """Return which samples a request asks for: their indices, or the index of one."""
    return cast(_BatchRequest, request).index


class _BatchDataset(Dataset[Batch]):
    """A dataset of batches: its items are made from requests."""

    def __init__(self, dataset: Any, collate: Callable[..., Batch], batched: bool) -> None:
        self.dataset, self.collate, self.batched = dataset, collate, batched
        self.fetches_batches = batched and getattr(dataset, "__getitems__", None) is not None
        self.collates_by_default = batched and collate is default_collate

    def __getitem__(self, request: _BatchRequest) -> Batch:
        __tracebackhide__ = True
        batch = None
        if request.only_seen:
            return self._see(request)
        if self.collates_by_default:
            batch = fetch_batch(self.dataset, request.index)
        if batch is None:
            seed_all(mix(request.seeds, request.position))
            batch = self._make(request.index)
        return Padding(batch) if request.is_padding else batch

    def _see(self, request: _BatchRequest) -> Glimpse | None:
        """Return a glimpse of a batch's first sample; None if it is not the same when read twice.

        Nothing else notices: neither the generators nor what is made of the other requests.
        """
        index, found = request.index, []
        try:
            for _ in range(2):
                with isolated(torch.device("cpu")):
                    torch.default_generator.manual_seed(mix(request.seeds, request.position))
                    seed_host(mix(request.seeds, request.position))
                    if self.fetches_batches:
                        found.append(glimpse(self.dataset.__getitems__(index[:1])))
                    else:
                        found.append(glimpse(self.dataset[index[0] if self.batched else index]))
        except Exception:  # the process that reads the batch raises it
            return None
        return found[0] if alike(*found) else None

    def _make(self, index: Index) -> Batch:
        __tracebackhide__ = True
        raising, at = type(self.dataset).__name__, index
        try:
            if self.fetches_batches:
                samples = self.dataset.__getitems__(index)
            elif self.batched:
                samples = []
                # Not a comprehension, which is a frame in the traceback; not map, which ends at a
                # StopIteration.
                for at in index:
                    samples.append(self.dataset[at])
            else:
                samples = self.dataset[index]
            raising, at = f"the collate_fn of {raising}", index
            return self.collate(samples)
        except StopIteration as error:  # in a worker torch would take it for the end of the data
            which = f"samples {at}" if isinstance(at, list) else f"sample {at}"
            raise RuntimeError(
                f"{raising} raised StopIteration for {which}: an iterator that it reads is at its "
                "end"
            ) from error


def map_style(
    loader: DataLoader[object],
    seed: int,
    epoch: int | None,
    batch: int,
    samples: int,
    sharing: SingleProcess,
) -> Iterator[Batch]:
    """Yield this process's batches.

    Args:
        loader: the loader.
        seed: the run's.
        epoch: the epoch, or None for an evaluation.
        batch: the batches of the epoch that were consumed already, by all processes.
        samples: their samples, if the loader's batches have one known size; else 0.
        sharing: how batches are distributed to the processes.
    """
    made = requests(loader, seed, epoch, batch, samples, sharing, sharing.complete)
    if not isinstance(sharing, RoundRobin):
        return fetched(loader, made)
    shared, make = _shared(made, sharing), functools.partial(fetched, loader)
    if not loader.in_order:  # the first result may be of another request
        return make(shared)
    return sampling_first(shared, sharing, (epoch, batch, samples), only_seen, make)


def _shared(requests: Iterator[_BatchRequest], sharing: RoundRobin) -> Iterator[_BatchRequest]:
    __tracebackhide__ = True
    for given in sharing.split(requests, lambda request: request.size):
        yield given.batch._replace(is_padding=True) if isinstance(given, Padding) else given


def fetched(loader: DataLoader[object], requests: Iterator[object]) -> Generator[Batch, None, None]:
    """Yield the batches that :func:`requests` asks for."""
    __tracebackhide__ = True
    if loader.num_workers:
        yield from _with_workers(loader, requests)
    else:
        made = _BatchDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        for request in cast("Iterator[_BatchRequest]", requests):
            yield made[request]


def requests(
    loader: DataLoader[object],
    seed: int,
    epoch: int | None,
    batch: int,
    samples: int,
    sharing: SingleProcess,
    complete: int = 1,
    indices: Iterable[Index] | None = None,
) -> Iterator[_BatchRequest]:
    """Yield a request for each batch that is left of an epoch, whichever process fetches it.

    The seed of each is a function of its position.

    Args:
        loader: the loader.
        seed, epoch, batch, samples: as in :func:`map_style`.
        sharing: what is to note the order of the samples.
        complete: the batches of a complete round, if the loader drops an incomplete one.
        indices: those of all batches of the epoch; None takes them from the loader's sampler.
    """
    __tracebackhide__ = True
    seeds = fold_in(seed, FETCH, epoch or 0)
    stride = loader.batch_sampler.batch_size if is_sized(loader) else 1  # type: ignore[union-attr]
    start = (samples or batch * stride) if is_sized(loader) else batch
    if indices is None:
        order_seed = fold_in(seed, ORDER, epoch or 0)
        left = batch_indices(loader, order_seed, epoch, start, complete)
    else:
        left = itertools.islice(indices, batch, None)
    left = sharing.note_order(left, batched=loader.batch_sampler is not None)
    is_known = loader.batch_sampler is not None and _keeps_all(loader)
    for n, index in enumerate(left):
        size = len(index) if is_known else 0
        yield _BatchRequest(seeds, start + n * stride, index, size)


def _keeps_all(loader: DataLoader[object]) -> bool:
    """Return whether a batch surely has as many samples as its sampler gave indices."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return loader.collate_fn is default_collate and not hasattr(dataset, "__getitems__")


def batch_indices(
    loader: DataLoader[object], seed: int, epoch: int | None, start: int, complete: int
) -> Iterator[Index]:
    """Return the indices of each batch that is left of an epoch.

    Args:
        loader: the loader.
        seed: what the order is a function of.
        epoch: the epoch, or None for an evaluation.
        start: the samples to skip; the batches, if their size is not known.
        complete: the batches of a complete round, if the loader drops an incomplete one.
    """
    batched: Any = loader.batch_sampler
    set_epoch(epoch, loader.dataset, batched, getattr(batched, "sampler", None), loader.sampler)
    if type(batched) is not BatchSampler:
        indices = _sampled(loader.sampler if batched is None else batched, seed)
        return itertools.islice(indices, start, None)
    indices = _sampled(batched.sampler, seed)
    if is_sized(loader):
        return _batched(itertools.islice(indices, start, None), batched, complete)
    return itertools.islice(_batched(indices, batched, complete), start, None)


def _batched(
    indices: Iterator[Index], batched: BatchSampler, complete: int
) -> Iterator[list[Index]]:
    """Cut indices into batches. With ``drop_last``, leave out an incomplete last round."""
    size = batched.batch_size
    if batched.drop_last:
        indices = itertools.chain.from_iterable(partition(size * complete, indices))
    return map(list, partition_all(size, indices))


def _sampled(sampler: Iterable[Index], seed: int) -> Iterator[Index]:
    """Yield what a sampler yields, drawn from generators that are a function of the seed."""
    return itertools.chain.from_iterable(_parts_of(sampler, seed))


def _parts_of(sampler: Iterable[Index], seed: int) -> Iterator[Iterable[Index]]:
    """Yield what a sampler yields in parts, so that no Python runs for each sample."""
    inner = getattr(sampler, "sampler", sampler)
    with seeded_generator(inner, seed), seeded_generator(sampler, seed):
        seed_all(seed)
        indices = iter(sampler)
        # Within the block: torch's samplers take their generator when the first index is requested.
        index = next(indices, END)
    if type(sampler) in _TORCH_SAMPLERS:  # they draw from their own generator only
        yield () if index is END else (index,)
        yield indices
        return
    for n in itertools.count():
        if index is END:
            return
        yield (index,)
        seed_all(fold_in(seed, n))
        index = next(indices, END)


# --- workers


class _Requests:
    """The sampler of a loader with workers: the requests of the running epoch."""

    def __init__(self) -> None:
        self.next: Iterator[object] = iter(())

    def __iter__(self) -> Iterator[object]:
        return self.next

    def __len__(self) -> int:
        raise TypeError("the number of requests is not known")


_worker_loaders: weakref.WeakKeyDictionary[
    DataLoader[object], tuple[DataLoader[object], _Requests]
] = weakref.WeakKeyDictionary()


def _with_workers(loader: DataLoader[object], requests: Iterator[object]) -> Iterator[Batch]:
    """Let the loader's workers make the batches. Persistent workers live as long as the loader."""
    __tracebackhide__ = True
    # Removed while in use, so that a concurrent reader gets its own workers.
    pool, sampler = _worker_loaders.pop(loader, None) or _worker_loader(loader)
    try:
        sampler.next = requests
        yield from torch_compat.make_killable(iter(pool))
    finally:
        if loader.persistent_workers:
            _worker_loaders[loader] = pool, sampler


def _worker_loader(loader: DataLoader[object]) -> tuple[DataLoader[object], _Requests]:
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
        # The workers' first seed. Each request brings its own.
        generator=torch.Generator().manual_seed(0),
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
    """The user's worker_init_fn, in a worker that ignores its first SIGTERM.

    Schedulers often signal every process of a job, but a run that stops after the current update
    still needs its workers.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        if self.init is not None:
            self.init(worker)


@contextlib.contextmanager
def sigterm_resistant_workers(loader: DataLoader[object]) -> Iterator[None]:
    """Let the workers that a loader starts in this block ignore their first SIGTERM."""
    init = loader.worker_init_fn
    loader.worker_init_fn = _IgnoreFirstSigterm(init)
    try:
        yield
    finally:
        loader.worker_init_fn = init


def _identity(batch: Batch) -> Batch:
    return batch
