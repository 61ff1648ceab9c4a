"""DataLoaders that take samples by index, read by their parts."""

from __future__ import annotations

import itertools
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from toolz import partition, partition_all
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fnloop._extensions.loaders.bucketed import Bucketed
from fnloop._extensions.loaders.rows import fetch_batch, kind_of
from fnloop._extensions.loaders.sampled import Index, Sampled
from fnloop.extend import (
    Batch,
    Pass,
    Reader,
    checks,
    containers,
    fold_in,
    isolated,
    rng,
    torch_compat,
)

# The sampler says which samples. Each batch of indices travels to the worker (or to this process)
# with the seed that its randomness starts from. So shuffling and random augmentation are a function
# of (seed, epoch, position), whatever the number of workers. What was consumed already is skipped
# by its index, not by loading it.

# They draw from their own generator only.
_TORCH_SAMPLERS = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    Bucketed,
)


Look = Callable[[object], object]


def reader_of_map_style(plain: Reader) -> MapStyle | None:
    """Return how a DataLoader is read that takes samples by index; None of any other loader.

    Raises:
        ValueError: it makes batches of batches.
    """
    if isinstance(plain.loader, DataLoader):
        _check_not_nested(plain.loader)
    return MapStyle(plain.loader) if plain.takes_indices else None


def _check_not_nested(loader: DataLoader[object]) -> None:
    """Raise if a DataLoader makes batches of batches."""
    batches = loader.batch_sampler
    inside = (loader.sampler, getattr(batches, "sampler", None))
    if batches is not None and any(isinstance(each, Bucketed) for each in inside):
        raise ValueError(
            "bucketed makes batches, and this DataLoader would make batches of them: write "
            "DataLoader(dataset, batch_sampler=bucketed(...))"
        )


class MapStyle(Reader):
    """How a DataLoader is read that takes samples by index."""

    def __init__(self, loader: DataLoader[object]) -> None:
        super().__init__(loader)
        known = (*_TORCH_SAMPLERS, BatchSampler)
        # Their order may be another one when they are read again.
        self.samplers_of_user = [each for each in self.samplers if type(each) not in known]
        batched = cast(BatchSampler, loader.batch_sampler)
        samples = containers.length_of(batched.sampler) if type(batched) is BatchSampler else None
        if samples is not None:
            self.batch_size, self.samples = batched.batch_size, samples
            self.drop_last = batched.drop_last

    def size(self) -> tuple[int, str] | None:
        if self.batch_size is None:
            return super().size()
        return len(self.loader.batch_sampler.sampler), "samples"

    def name(self) -> str:
        return type([*self.samplers_of_user, self.loader][0]).__name__

    def owners(self) -> Sequence[object]:
        return self.samplers

    def read(self, at: Pass) -> Iterator[Batch]:
        share = at.sharing.split(self.items(at, at.sharing.complete), lambda item: item.size)
        batches = at.sharing.sampling_first(share, at.place, Request.seen, self.make)
        held = at.sharing.held
        return held.counted(held.watched(batches)) if self.reuses else batches

    def make(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Yield the batches that are requested."""
        __tracebackhide__ = True
        if self.loader.num_workers:
            yield from _with_workers(self.loader, requests)
        else:
            made = _BatchDataset(self.loader)
            for request in requests:
                yield made[request]

    def items(
        self, at: Pass, complete: int = 1, indices: Iterable[Index] | None = None
    ) -> Iterator[Request]:
        """Yield a request for each batch that is left of an epoch, whichever process fetches it.

        The seed of each is a function of its position.

        Args:
            at: the position.
            complete: the batches of a complete round, if the loader drops an incomplete one.
            indices: those of all batches of the epoch; None takes them from the loader's sampler.
        """
        __tracebackhide__ = True
        seeds, stride = at.fetch, self.batch_size or 1
        start = (self.batch_size and at.samples) or at.start * stride
        if indices is None:
            at.set_epoch(self.loader.dataset, *self.samplers)
            at.positions.open(at.epoch, at.start)
            if self.samplers_of_user and at.positions.wanted:
                noted = Sampled(at)
                left = noted.noting(self.indices_from(at.order, start, complete, noted.skipped))
            else:
                left = self.indices_from(at.order, start, complete)
        else:
            left = itertools.islice(indices, at.start, None)
        batched = self.loader.batch_sampler is not None
        is_known = batched and _keeps_all(self.loader)
        for n, index in enumerate(at.sharing.note_order(left, batched)):
            yield Request(seeds, start + n * stride, index, len(index) if is_known else 0)

    def indices_from(
        self,
        seed: int,
        start: int,
        complete: int = 1,
        skipped: Callable[[list[Index]], object] | None = None,
    ) -> Iterator[Index]:
        """Return the indices of each batch that is left of an epoch.

        Args:
            seed: what the order is a function of.
            start: the samples to skip; the batches, if their size is not known.
            complete: the batches of a complete round, if the loader drops an incomplete one.
            skipped: is told the indices before that.
        """
        batched = cast(BatchSampler, self.loader.batch_sampler)
        if type(batched) is not BatchSampler:
            indices = _sampled(self.loader.sampler if batched is None else batched, seed)
            return _after(indices, start, skipped)
        indices = _sampled(batched.sampler, seed)
        if self.batch_size is not None:
            return _batched(_after(indices, start, skipped), batched, complete)
        return _after(_batched(indices, batched, complete), start, skipped)

    def indices(self, at: Pass) -> Iterator[Index]:
        noted = at.positions.noted
        if isinstance(noted, Sampled) and (known := noted.from_batch(at)) is not None:
            return known
        at = at._replace(positions=self.positions())  # the pass's own stay as they are
        return (request.index for request in self.items(at, at.sharing.complete))

    def how_read(self) -> tuple[str, bool] | None:
        """Return the class of the data, and whether a batch is read at once; None in workers.

        The class says of what a subset is one, and with what datasets in a row begin. The first
        sample tells whether it is read at once.
        """
        if self.loader.num_workers:
            return None
        dataset, names = self.loader.dataset, [type(self.loader.dataset).__name__]
        while type(dataset) in (Subset, ConcatDataset):
            if isinstance(dataset, ConcatDataset):
                dataset = dataset.datasets[0]
            else:
                dataset = cast("Subset[object]", dataset).dataset
            names.append(type(dataset).__name__)
        at_once = _BatchDataset(self.loader).is_read_at_once
        return " of ".join(names), at_once and fetch_batch(self.loader.dataset, [0]) is not None


# --- which samples


def _keeps_all(loader: DataLoader[object]) -> bool:
    """Return whether a batch surely has as many samples as its sampler gave indices."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return loader.collate_fn is default_collate and not _gives_batches(dataset)


def _gives_batches(dataset: object) -> bool:
    """Return whether a dataset gives the samples of a batch at once, as torch asks for them."""
    return checks.has_methods(dataset, "__getitems__")


def _after(
    indices: Iterator[Index], start: int, skipped: Callable[[list[Index]], object] | None
) -> Iterator[Index]:
    """Return what follows the first ones."""
    if skipped is None:
        return itertools.islice(indices, start, None)
    skipped([*itertools.islice(indices, start)])
    return indices


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
    draws_alone = type(sampler) in _TORCH_SAMPLERS  # from its own generator
    with rng.seeded_generator(inner, seed), rng.seeded_generator(sampler, seed):
        # Others see that they were set: a part of a loader may be opened in mid-epoch.
        if not draws_alone:
            rng.seed_all(seed)
        indices = iter(sampler)
        # Within the block: torch's samplers take their generator when the first index is requested.
        one = [*itertools.islice(indices, 1)]
    if draws_alone:
        yield one
        yield indices
        return
    for n in itertools.count():
        if not one:
            return
        yield one
        rng.seed_all(fold_in(seed, n))
        one = [*itertools.islice(indices, 1)]


# --- batches


class Request(NamedTuple):
    """What a worker needs to make a batch that depends on nothing else.

    Args:
        seeds: what the seeds of an epoch are mixed from.
        position: that of the batch in the epoch.
        index: that of one sample, or a list of them.
        size: how many samples it has, or 0 if that is not known.
        look: what is wanted of its first sample, in the place of the batch, if anything.
    """

    seeds: int
    position: int
    index: Index
    size: int
    look: Look | None = None

    def seen(self, look: Look) -> Request:
        """Return a request for a look at the first sample that this one asks for."""
        return self._replace(look=look)


class _BatchDataset(Dataset[Batch]):
    """A dataset of batches: its items are made from requests."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.dataset: Any = loader.dataset
        self.collate, self.batched = loader.collate_fn, loader.batch_sampler is not None
        self.fetches_batches = self.batched and _gives_batches(self.dataset)
        collates_by_default = self.batched and self.collate is default_collate
        self.is_read_at_once = collates_by_default and kind_of(self.dataset) is not None

    def __getitem__(self, request: Request) -> Batch:
        __tracebackhide__ = True
        batch = None
        if request.look is not None:
            return self._see(request, request.look)
        if self.is_read_at_once:
            batch = fetch_batch(self.dataset, request.index)
        if batch is None:
            rng.seed_all(fold_in(request.seeds, request.position))
            batch = self._make(request.index)
        return batch

    def _see(self, request: Request, look: Look) -> object:
        """Return a look at a batch's first sample, and at the same read again; None if it raises.

        Nothing else notices: neither the generators nor what is made of the other requests.
        """
        index, found = request.index, []
        try:
            for _ in range(2):
                with isolated(torch.device("cpu")):
                    torch.default_generator.manual_seed(fold_in(request.seeds, request.position))
                    rng.seed_host(fold_in(request.seeds, request.position))
                    if self.fetches_batches:
                        found.append(look(self.dataset.__getitems__(index[:1])))
                    else:
                        found.append(look(self.dataset[index[0] if self.batched else index]))
        except Exception:  # the process that reads the batch raises it
            return None
        return found

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
        _BatchDataset(loader),
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
    )
    return pool, sampler


class _WorkerInit(NamedTuple):
    """The user's worker_init_fn, with the user's dataset in ``get_worker_info()``.

    The worker ignores its first SIGTERM. Schedulers often signal every process of a job, but a run
    that stops after the current update still needs its workers.
    """

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
        torch_compat.set_worker_dataset(info, info.dataset.dataset)
        if self.init is not None:
            self.init(worker)


def _identity(batch: Batch) -> Batch:
    return batch
