"""DataLoaders that take samples by index, read by their parts."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from toolz import partition, partition_all
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from fnloop._data.iterable import (
    as_torch_reads_it,
    is_keeper,
    length_of,
    steady_workers,
)
from fnloop._data.loaders import Padding, alike, glimpse
from fnloop._data.position import Pass, Positions
from fnloop._data.reader import Iterated
from fnloop._extensions.loaders.bucketed import Bucketed
from fnloop._extensions.loaders.rows import fetch_batch, kind_of
from fnloop._extensions.loaders.sampled import Index, SampledPositions
from fnloop.extend import Batch, checks, fold_in, isolated, rng, torch_compat

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


def reader_of_map_style(loader: object) -> MapStyle | None:
    """Return how a DataLoader is read that takes samples by index; None of any other loader.

    Raises:
        ValueError: it makes batches of batches.
    """
    if isinstance(loader, DataLoader):
        _check_not_nested(loader)
    return MapStyle(loader) if is_map_style(loader) else None


def is_map_style(loader: object) -> TypeGuard[DataLoader[object]]:
    """Return whether a loader takes samples by index, in torch's own way, or torchdata's."""
    if not as_torch_reads_it(loader) or isinstance(loader.dataset, IterableDataset):
        return False
    return type(loader).__iter__ is DataLoader.__iter__ or not is_keeper(loader.dataset)


def _check_not_nested(loader: DataLoader[object]) -> None:
    """Raise if a DataLoader makes batches of batches."""
    batches = loader.batch_sampler
    inside = (loader.sampler, getattr(batches, "sampler", None))
    if batches is not None and any(isinstance(each, Bucketed) for each in inside):
        raise ValueError(
            "bucketed makes batches, and this DataLoader would make batches of them: write "
            "DataLoader(dataset, batch_sampler=bucketed(...))"
        )


class MapStyle(Iterated):
    """How a DataLoader is read that takes samples by index."""

    def __init__(self, loader: DataLoader[object]) -> None:
        super().__init__(loader)
        known = (*_TORCH_SAMPLERS, BatchSampler)
        # Their order may be another one when they are read again.
        self.samplers_of_user = [each for each in self.samplers if type(each) not in known]
        batched = cast(BatchSampler, loader.batch_sampler)
        samples = length_of(batched.sampler) if type(batched) is BatchSampler else None
        if samples is not None:
            self.batch_size, self.samples = batched.batch_size, samples
            self.drop_last = batched.drop_last

    def size(self) -> tuple[int, str] | None:
        if self.batch_size is None:
            return super().size()
        return len(self.loader.batch_sampler.sampler), "samples"

    def positions(self) -> Positions:
        known = {"measure": self.size, "contents": None, "owners": self.samplers}
        if self.samplers_of_user:
            return SampledPositions(type(self.samplers_of_user[0]).__name__, **known)
        return Positions(type(self.loader).__name__, **known)

    def read(self, at: Pass) -> Iterator[Batch]:
        share = at.sharing.split(self.items(at, at.sharing.complete), lambda item: item.size)
        batches = at.sharing.sampling_first(share, at.place, only_seen, self.make)
        held = at.sharing.held
        return held.counted(held.watched(batches)) if self.reuses else batches

    def make(self, requests: Iterator[Request | Padding]) -> Generator[Batch, None, None]:
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
        positions = at.positions
        noted = positions if isinstance(positions, SampledPositions) and positions.wanted else None
        if indices is None:
            at.set_epoch(self.loader.dataset, *self.samplers)
        positions.open(at.epoch, at.start)
        if indices is None:
            skipped = None if noted is None else noted.skipped
            left = self.indices_from(at.order, start, complete, skipped)
        else:
            left = itertools.islice(indices, at.start, None)
        if noted is not None:
            left = noted.noted_indices(left)
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

    def indices_of_all(self, at: Pass) -> Iterator[Index]:
        positions = at.positions
        if isinstance(positions, SampledPositions) and (
            (noted := positions.indices_from(at.epoch, at.start)) is not None
        ):
            return noted
        at = at._replace(positions=Positions())
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
        only_seen: whether only a glimpse of its first sample is wanted.
    """

    seeds: int
    position: int
    index: Index
    size: int
    only_seen: bool = False


def only_seen(request: Request | Padding) -> Request:
    """Return a request for a glimpse of the first sample that a request asks for."""
    assert isinstance(request, Request)
    return request._replace(only_seen=True)


class _BatchDataset(Dataset[Batch]):
    """A dataset of batches: its items are made from requests."""

    def __init__(self, loader: DataLoader[object]) -> None:
        self.dataset: Any = loader.dataset
        self.collate, self.batched = loader.collate_fn, loader.batch_sampler is not None
        self.fetches_batches = self.batched and _gives_batches(self.dataset)
        collates_by_default = self.batched and self.collate is default_collate
        self.is_read_at_once = collates_by_default and kind_of(self.dataset) is not None

    def __getitem__(self, request: Request | Padding) -> Batch:
        __tracebackhide__ = True
        batch = None
        if isinstance(request, Padding):
            return Padding(self[request.batch])
        if request.only_seen:
            return self._see(request)
        if self.is_read_at_once:
            batch = fetch_batch(self.dataset, request.index)
        if batch is None:
            rng.seed_all(fold_in(request.seeds, request.position))
            batch = self._make(request.index)
        return batch

    def _see(self, request: Request) -> object:
        """Return a glimpse of a batch's first sample; None if it is not the same when read twice.

        Nothing else notices: neither the generators nor what is made of the other requests.
        """
        index, found = request.index, []
        try:
            for _ in range(2):
                with isolated(torch.device("cpu")):
                    torch.default_generator.manual_seed(fold_in(request.seeds, request.position))
                    rng.seed_host(fold_in(request.seeds, request.position))
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
        with steady_workers(pool):
            batches = torch_compat.make_killable(iter(pool))
        yield from batches
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
    """The user's worker_init_fn, with the user's dataset in ``get_worker_info()``."""

    init: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        torch_compat.set_worker_dataset(info, info.dataset.dataset)
        if self.init is not None:
            self.init(worker)


def _identity(batch: Batch) -> Batch:
    return batch
