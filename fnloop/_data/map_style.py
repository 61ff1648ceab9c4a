"""Map-style loaders, read by their parts: whole batches at once, and samples by length."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import weakref
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from toolz import partition, partition_all
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
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
    new_seed,
    seed_all,
    seed_host,
    seeded_generator,
)
from fnloop._core.types import Batch
from fnloop._data.loaders import (
    NONE_LEFT,
    Glimpse,
    Index,
    Padding,
    RoundRobin,
    SingleProcess,
    alike,
    glimpse,
    sampling_first,
)
from fnloop._data.position import Positions
from fnloop._display import checks

# --------------------------------------------------------------------------------------------------
# Batches of samples of similar length.

_MIXED = 10  # batches of similar length whose samples are mixed


def bucketed(
    lengths: Sequence[float],
    *,
    batch_size: int | None = None,
    max_items: float | None = None,
    shuffle: bool = True,
) -> Sampler[list[int]]:
    """Return a batch sampler that puts samples of similar length together, to pad less.

    The samples are sorted by length, and cut into batches from the longest on. To shuffle, samples
    are mixed with those of the neighbouring batches, as far as the limits allow, and the batches
    are shuffled. Under fnloop the order is a function of (seed, epoch). Elsewhere torch's generator
    decides it.

    Args:
        lengths: the length of each sample of the dataset, in its order.
        batch_size: the most samples in a batch.
        max_items: the most items in a batch, padding included: samples times the longest of them. A
            sample that is longer is a batch of its own.
        shuffle: whether the order is drawn. If not, the longest samples come first.

    Returns:
        A batch sampler with a length, for ``DataLoader(dataset, batch_sampler=...)``.

    Raises:
        TypeError: an argument has another type.
        ValueError: there is no limit, a limit is too small, or the lengths are not a sequence of
            numbers that are at least 0.

    Example:
        >>> list(bucketed([1, 9, 2, 8, 1], max_items=16, shuffle=False))
        [[1], [3, 2], [0, 4]]

    Replaces: fastnlp.BucketedBatchSampler, transformers.group_by_length
    """
    return Bucketed(lengths, batch_size, max_items, shuffle)


class Bucketed(Sampler[list[int]]):
    """What :func:`bucketed` returns. It draws from its own ``generator`` only, as torch's do."""

    def __init__(
        self,
        lengths: Sequence[float],
        batch_size: int | None,
        max_items: float | None,
        shuffle: bool,
    ) -> None:
        self.lengths = _check_lengths(lengths)
        if batch_size is None and max_items is None:
            raise ValueError(
                "bucketed expects a limit: batch_size=32, the samples in a batch, or "
                "max_items=4096, its items with padding"
            )
        if batch_size is not None:
            batch_size = checks.integer(
                "bucketed", "batch_size", batch_size, "the most samples in a batch"
            )
        if max_items is not None:
            meaning = "the most items in a batch, with padding"
            max_items = checks.number("bucketed", "max_items", max_items, meaning, above=0)
        self.batch_size, self.max_items = batch_size, max_items
        self.shuffle = checks.flag("bucketed", "shuffle", shuffle, "whether the order is drawn")
        self.generator: torch.Generator | None = None
        longest_first = np.sort(self.lengths)[::-1]
        self._ends = _cut(longest_first, batch_size, max_items)
        self._groups = _group(longest_first, self._ends, max_items)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        starts = [0, *self._ends[:-1]]
        if not self.shuffle:
            order = np.argsort(-self.lengths, kind="stable").tolist()
            yield from (order[a:b] for a, b in zip(starts, self._ends, strict=True))
            return
        generator = self.generator or torch.Generator().manual_seed(new_seed())
        draws = torch.rand(2, len(self.lengths), dtype=torch.float64, generator=generator).numpy()
        sorted_ = np.lexsort((draws[0], -self.lengths))
        order = sorted_[np.lexsort((draws[1], self._groups))].tolist()
        for i in torch.randperm(len(self._ends), generator=generator).tolist():
            yield order[starts[i] : self._ends[i]]

    def __repr__(self) -> str:
        limits = {"batch_size": self.batch_size, "max_items": self.max_items}
        given = [f"{name}={limit}" for name, limit in limits.items() if limit is not None]
        given += [] if self.shuffle else ["shuffle=False"]
        return f"bucketed(<{len(self.lengths)} lengths>, {', '.join(given)})"


def _check_lengths(lengths: Sequence[float]) -> np.ndarray:
    expected = "bucketed expects lengths as a sequence of numbers >= 0, one for each sample"
    if not isinstance(lengths, Sequence | np.ndarray | torch.Tensor) or isinstance(
        lengths, str | bytes
    ):
        raise TypeError(f"{expected}; got {checks.describe(lengths)}")
    try:
        found = np.asarray(lengths)
    except ValueError:  # of different depths
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind not in "iuf" or not found.size:
        raise ValueError(f"{expected}; got {checks.describe(lengths)}")
    found = found.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise ValueError(f"{expected}; got {found[wrong[0]]:g} for sample {wrong[0]}")
    return found


def _cut(longest_first: np.ndarray, batch_size: int | None, max_items: float | None) -> list[int]:
    """Return where each batch ends."""
    ends, end = [], 0
    while end < len(longest_first):
        size = batch_size or len(longest_first)
        if max_items is not None and longest_first[end] * size > max_items:
            size = max(int(max_items // longest_first[end]), 1)
        end = min(end + size, len(longest_first))
        ends.append(end)
    return ends


def _group(longest_first: np.ndarray, ends: list[int], max_items: float | None) -> np.ndarray:
    """Return a number for each position: samples may be exchanged where it is the same."""
    groups = np.empty(len(longest_first), dtype=np.int64)
    first = batches = start = 0  # where the group begins, its batches, and where the batch begins
    for end in ends:
        fits = max_items is None or (end - start) * longest_first[first] <= max_items
        if batches == _MIXED or not fits:
            first, batches = start, 0
        groups[start:end] = first
        start, batches = end, batches + 1
    return groups


# --------------------------------------------------------------------------------------------------
# Map-style loaders, read by their parts.
#
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


def length_of(loader: object) -> int | None:
    """Return the number of batches, or None if it is not known before the end."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_sized(loader: DataLoader[object]) -> bool:
    """Return whether all batches of a map-style loader but the last have one known size."""
    return type(loader.batch_sampler) is BatchSampler and length_of(loader.sampler) is not None


def dataset_of(loader: object) -> object:
    """Return the dataset of a loader; None if it has none."""
    return getattr(loader, "dataset", None)


def sampler_in(owner: object) -> object:
    """Return the sampler of a loader, or the one inside another sampler; None if it has none."""
    return getattr(owner, "sampler", None)


def batch_sampler_of(loader: object) -> object:
    """Return what samples the batches of a loader; None if it has none."""
    return getattr(loader, "batch_sampler", None)


def samplers_of(loader: object) -> list[object]:
    """Return the samplers of a loader: its own, that of batches, and the one inside that."""
    batched = batch_sampler_of(loader)
    found = (sampler_in(loader), batched, sampler_in(batched))
    return [sampler for sampler in found if sampler is not None]


def samplers_of_user(loader: object) -> list[object]:
    """Return the samplers of a loader whose order may be another one when it is read again."""
    known = (*_TORCH_SAMPLERS, BatchSampler)
    return [sampler for sampler in samplers_of(loader) if type(sampler) not in known]


def set_epoch(epoch: int | None, *owners: object) -> None:
    """Call ``set_epoch`` of a loader, its dataset and its samplers, where there is one."""
    if epoch is None:
        return
    for owner in {id(owner): owner for owner in owners}.values():
        if checks.has_methods(owner, "set_epoch"):
            owner.set_epoch(epoch)


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
        self.fetches_batches = batched and gives_batches(dataset)
        collates_by_default = batched and collate is default_collate
        self.is_read_at_once = collates_by_default and kind_of(dataset) is not None

    def __getitem__(self, request: _BatchRequest) -> Batch:
        __tracebackhide__ = True
        batch = None
        if request.only_seen:
            return self._see(request)
        if self.is_read_at_once:
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
    positions: Positions,
) -> Iterator[Batch]:
    """Yield this process's batches.

    Args:
        loader: the loader.
        seed: the run's.
        epoch: the epoch, or None for an evaluation.
        batch: the batches of the epoch that were consumed already, by all processes.
        samples: their samples, if the loader's batches have one known size; else 0.
        sharing: how batches are distributed to the processes.
        positions: are told which samples are read.
    """
    batches: Iterator[Batch]
    given = (loader, seed, epoch, batch, samples, sharing, sharing.complete)
    made = requests(*given, positions=positions)
    if isinstance(sharing, RoundRobin):
        shared, make = _shared(made, sharing), functools.partial(fetched, loader)
        batches = sampling_first(shared, sharing, (epoch, batch, samples), only_seen, make)
    else:
        batches = fetched(loader, made)
    if makes_new(loader):
        return batches
    return sharing.held.counted(sharing.held.watched(batches))


def _shared(requests: Iterator[_BatchRequest], sharing: RoundRobin) -> Iterator[_BatchRequest]:
    __tracebackhide__ = True
    for given in sharing.split(requests, lambda request: request.size):
        yield given.batch._replace(is_padding=True) if isinstance(given, Padding) else given


def makes_new(loader: object) -> bool:
    """Return whether a loader surely gives new memory with each batch.

    Workers send it, and ``default_collate`` stacks samples. Any other loader may fill a buffer.
    """
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and bool(
            loader.num_workers
            or (loader.batch_sampler is not None and loader.collate_fn is default_collate)
        )
    )


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
    positions: Positions | None = None,
) -> Iterator[_BatchRequest]:
    """Yield a request for each batch that is left of an epoch, whichever process fetches it.

    The seed of each is a function of its position.

    Args:
        loader: the loader.
        seed, epoch, batch, samples: as in :func:`map_style`.
        sharing: what is to note the order of the samples.
        complete: the batches of a complete round, if the loader drops an incomplete one.
        indices: those of all batches of the epoch; None takes them from the loader's sampler.
        positions: are told which samples are read, if they are wanted.
    """
    __tracebackhide__ = True
    seeds = fold_in(seed, FETCH, epoch or 0)
    stride = loader.batch_sampler.batch_size if is_sized(loader) else 1  # type: ignore[union-attr]
    start = (samples or batch * stride) if is_sized(loader) else batch
    if indices is None:
        set_epoch(epoch, loader.dataset, *samplers_of(loader))
    owns = positions is None or not positions.wanted or not samplers_of_user(loader)
    if positions is not None:
        positions.open(epoch, batch)
    if indices is None:
        order_seed = fold_in(seed, ORDER, epoch or 0)
        skipped = None if owns else positions.skipped  # type: ignore[union-attr]
        left = batch_indices(loader, order_seed, start, complete, skipped)
    else:
        left = itertools.islice(indices, batch, None)
    if not owns:
        left = positions.noted_indices(left)  # type: ignore[union-attr]
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
    return loader.collate_fn is default_collate and not gives_batches(dataset)


def gives_batches(dataset: object) -> bool:
    """Return whether a dataset gives the samples of a batch at once, as torch asks for them."""
    return checks.has_methods(dataset, "__getitems__")


def batch_indices(
    loader: DataLoader[object],
    seed: int,
    start: int,
    complete: int,
    skipped: Callable[[list[Index]], object] | None = None,
) -> Iterator[Index]:
    """Return the indices of each batch that is left of an epoch.

    Args:
        loader: the loader.
        seed: what the order is a function of.
        start: the samples to skip; the batches, if their size is not known.
        complete: the batches of a complete round, if the loader drops an incomplete one.
        skipped: is told the indices before that.
    """
    batched = cast(BatchSampler, loader.batch_sampler)
    if type(batched) is not BatchSampler:
        indices = _sampled(loader.sampler if batched is None else batched, seed)
        return _after(indices, start, skipped)
    indices = _sampled(batched.sampler, seed)
    if is_sized(loader):
        return _batched(_after(indices, start, skipped), batched, complete)
    return _after(_batched(indices, batched, complete), start, skipped)


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
    with seeded_generator(inner, seed), seeded_generator(sampler, seed):
        # Others see that they were set: a part of a loader may be opened in mid-epoch.
        if not draws_alone:
            seed_all(seed)
        indices = iter(sampler)
        # Within the block: torch's samplers take their generator when the first index is requested.
        index = next(indices, NONE_LEFT)
    if draws_alone:
        yield () if index is NONE_LEFT else (index,)
        yield indices
        return
    for n in itertools.count():
        if index is NONE_LEFT:
            return
        yield (index,)
        seed_all(fold_in(seed, n))
        index = next(indices, NONE_LEFT)


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
        in_order=True,  # as in `steady_workers`
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
def steady_workers(loader: DataLoader[object]) -> Iterator[None]:
    """Let the workers that a loader starts in this block ignore their first SIGTERM.

    Their batches come in order, as a position is a number of batches.
    """
    init, in_order = loader.worker_init_fn, loader.in_order
    loader.worker_init_fn, loader.in_order = _IgnoreFirstSigterm(init), True
    try:
        yield
    finally:
        loader.worker_init_fn, loader.in_order = init, in_order


def _identity(batch: Batch) -> Batch:
    return batch


# --------------------------------------------------------------------------------------------------
# Whole batches of datasets whose samples are rows: one `index_select` per tensor.
#
# The plain way indexes each sample and stacks them. Here the same tensors come in one call: the
# same bits, dtypes and strides. This holds for the classes below only, exactly, because a subclass
# may make its samples in another way; and only with torch's `default_collate`. Whatever is not
# surely the same (a negative index, a quantized tensor) is left to the plain way, which also raises
# its own errors.

_INDICES = {int, np.int64}
# Of arrays: default_collate keeps these as they are.
_DTYPES = frozenset(map(np.dtype, "?bBhHiIlqefdFD"))
# Of a `datasets.Dataset`: in any other, a transform of the user's makes the samples.
_FORMATS = ("torch", "numpy", None)


class _ArrowDataset(Protocol):
    """A ``datasets.Dataset`` of Hugging Face."""

    format: Mapping[str, object]

    def __getitem__(self, index: list[int]) -> dict[str, Sequence[object]]: ...


class _ArrowColumn(Protocol):
    """One of its columns, ``dataset["x"]``."""

    source: _ArrowDataset

    def __getitem__(self, index: list[int]) -> object: ...


def kind_of(dataset: object, by_sample: bool = False) -> object:
    """Return what the samples of a dataset are made of; None if they are not read at once.

    Samples of equal kinds are collated alike.

    Args:
        dataset: any. A TensorDataset, a tensor, a NumPy array or memmap is read at once, and so is
            a ``datasets.Dataset`` that no transform makes, a column of one in torch format, and a
            Subset, StackDataset or ConcatDataset of these.
        by_sample: whether torch reads it sample by sample. A ``datasets.Dataset`` may give other
            types then.
    """
    kind = type(dataset)
    if kind is Subset:
        return kind_of(cast("Subset[object]", dataset).dataset, by_sample)
    if kind is ConcatDataset:
        parts = cast("ConcatDataset[object]", dataset).datasets
        kinds = {kind_of(part, by_sample=True) for part in parts}
        return kinds.pop() if len(kinds) == 1 else None
    if kind is StackDataset:
        named = cast("StackDataset[tuple[object, ...]]", dataset).datasets
        of = named.items() if isinstance(named, dict) else enumerate(named)
        kinds_of = tuple((name, kind_of(part, by_sample)) for name, part in of)
        return None if any(each is None for _, each in kinds_of) else (type(named), kinds_of)
    if kind in _ROWS:
        return np.ndarray if kind is np.memmap else kind
    if by_sample or kind.__module__ != "datasets.arrow_dataset":
        return None
    return kind if kind.__qualname__ in _ARROW else None


def how_read(loader: DataLoader[object]) -> tuple[str, bool] | None:
    """Return the class of a loader's data, and whether a batch is read at once.

    The class says of what a subset is one, and with what datasets in a row begin. The first sample
    tells whether it is read at once. With workers, which read beside the step, return None.
    """
    if loader.num_workers:
        return None
    dataset, names = loader.dataset, [type(loader.dataset).__name__]
    while type(dataset) in (Subset, ConcatDataset):
        if isinstance(dataset, ConcatDataset):
            dataset = dataset.datasets[0]
        else:
            dataset = cast("Subset[object]", dataset).dataset
        names.append(type(dataset).__name__)
    made = _BatchDataset(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
    at_once = made.is_read_at_once and fetch_batch(loader.dataset, [0]) is not None
    return " of ".join(names), at_once


def fetch_batch(dataset: object, index: object) -> Batch | None:
    """Return what ``default_collate`` makes of these samples, read at once; None if it may not.

    Nothing is drawn from any generator, and no memory is shared with the dataset.

    Args:
        dataset: any; only what has a :func:`kind_of` its own is read.
        index: which samples; anything but a list of ints is left to the plain way.
    """
    __tracebackhide__ = True
    if type(index) is not list or not index or not {*map(type, index)} <= _INDICES:
        return None
    kind = type(dataset)
    read = _ROWS.get(kind) or _COMPOSED.get(kind)
    if read is None and kind.__module__ == "datasets.arrow_dataset":
        read = _ARROW.get(kind.__qualname__)
    return None if read is None else read(dataset, index)


# --- rows of tensors


def _tensors(dataset: TensorDataset, index: list[int]) -> list[Tensor] | None:
    return _select(dataset.tensors, index)


def _tensor(dataset: Tensor, index: list[int]) -> Tensor | None:
    found = _select((dataset,), index)
    return None if found is None else found[0]


def _array(dataset: np.ndarray, index: list[int]) -> Tensor | None:
    # from_numpy takes no negative strides, and rows without a dimension are Python's business.
    if dataset.dtype not in _DTYPES or min(dataset.strides, default=-1) < 0:
        return None
    if dataset.flags.writeable:
        return _tensor(torch.from_numpy(dataset), index)
    if min(index) < 0 or max(index) >= len(dataset):
        return None
    return torch.from_numpy(dataset.take(index, axis=0))  # of the array itself, torch would warn


_ROWS: dict[type, Callable[..., Batch | None]] = {
    TensorDataset: _tensors,
    Tensor: _tensor,
    np.ndarray: _array,
    np.memmap: _array,
}


def _select(tensors: Sequence[Tensor], index: list[int]) -> list[Tensor] | None:
    """Return these rows of each tensor, or None if stacking them might give something else."""
    if not all(map(_is_plain, tensors)):
        return None
    try:
        rows = torch.frombuffer(array("q", index), dtype=torch.int64)
        return [t.index_select(0, _rows_for(t, rows, index)) for t in tensors]
    except (IndexError, OverflowError, RuntimeError):  # an index is negative or too large
        return None


def _rows_for(tensor: Tensor, rows: Tensor, index: list[int]) -> Tensor:
    """Return the rows where a tensor is. Elsewhere than on the CPU, no error would be raised."""
    if tensor.is_cpu:
        return rows
    if min(index) < 0 or max(index) >= tensor.shape[0]:
        raise IndexError
    if tensor.is_cuda:  # a copy from pageable memory would wait for the update before it
        return rows.pin_memory().to(tensor.device, non_blocking=True)
    return rows.to(tensor.device)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether stacked rows of a tensor are contiguous, and values without a history."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.ndim > 0
        # Samples of four dimensions in torch.channels_last keep their strides when stacked.
        and (tensor.ndim < 5 or tensor.is_contiguous())
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested)
    )


# --- datasets of datasets


def _subset(dataset: Subset[object], index: list[int]) -> Batch | None:
    __tracebackhide__ = True
    indices = dataset.indices
    try:
        if type(indices) is Tensor:
            chosen = indices[torch.tensor(index)].tolist()
        else:
            chosen = [indices[i] for i in index]
    except IndexError:
        return None
    return fetch_batch(dataset.dataset, chosen)


def _stack(dataset: StackDataset[tuple[object, ...]], index: list[int]) -> Batch | None:
    __tracebackhide__ = True
    if kind_of(dataset) is None:
        return None
    named = dataset.datasets
    found = []
    for part in named.values() if isinstance(named, dict) else named:
        found.append(fetch_batch(part, index))
        if found[-1] is None:
            return None
    return dict(zip(named, found, strict=True)) if isinstance(named, dict) else found


def _concat(dataset: ConcatDataset[object], index: list[int]) -> Batch | None:
    __tracebackhide__ = True
    ends, rows = dataset.cumulative_sizes, np.array(index)
    if kind_of(dataset) is None or rows.dtype != np.int64 or rows.min() < 0:
        return None
    if rows.max() >= ends[-1]:
        return None
    which = np.searchsorted(ends, rows, side="right")
    found: list[Batch] = []
    for n in np.flatnonzero(np.bincount(which)):
        own = rows[which == n] - (ends[n - 1] if n else 0)
        found.append(fetch_batch(dataset.datasets[n], own.tolist()))
        if found[-1] is None:
            return None
    if len(found) == 1:
        return found[0]
    return _mixed(found, torch.from_numpy(which.argsort(kind="stable").argsort()))


def _mixed(batches: list[Batch], rows: Tensor) -> Batch | None:
    """Return these rows of batches in a row; None if stacking samples might give something else."""
    first = batches[0]
    if isinstance(first, Tensor):
        alike = {(b.dtype, b.device, b.shape[1:]) for b in batches}
        if len(alike) > 1:
            return None
        return torch.cat(batches).index_select(0, rows.to(first.device))
    names = list(first) if isinstance(first, dict) else range(len(first))
    if any(len(batch) != len(first) for batch in batches):
        return None
    parts = [_mixed([batch[name] for batch in batches], rows) for name in names]
    if any(part is None for part in parts):
        return None
    return dict(zip(names, parts, strict=True)) if isinstance(first, dict) else parts


_COMPOSED: dict[type, Callable[..., Batch | None]] = {
    Subset: _subset,
    StackDataset: _stack,
    ConcatDataset: _concat,
}

# --- Hugging Face


def _arrow_rows(dataset: _ArrowDataset, index: list[int]) -> Batch | None:
    """Return rows of a ``datasets.Dataset``, of which torch makes samples, to stack them again."""
    __tracebackhide__ = True
    if dataset.format["type"] not in _FORMATS:
        return None
    columns = dataset[index]
    if not columns or any(
        type(rows) not in (Tensor, np.ndarray, list) for rows in columns.values()
    ):
        return None
    return {name: _stacked(rows) for name, rows in columns.items()}


def _stacked(rows: Sequence[object]) -> Batch:
    __tracebackhide__ = True
    if type(rows) is Tensor and rows.is_contiguous() and not rows.requires_grad:
        return rows
    # A copy: its memory may be that of a file.
    found = _array(rows, [*range(len(rows))]) if type(rows) is np.ndarray else None
    return default_collate(list(rows)) if found is None else found


def _arrow_column(column: _ArrowColumn, index: list[int]) -> Tensor | None:
    """Return rows of a column, which torch would read sample by sample."""
    __tracebackhide__ = True
    source = column.source
    if type(source).__qualname__ != "Dataset" or source.format["type"] != "torch":
        return None
    rows = column[index]
    if type(rows) is not Tensor or not rows.is_contiguous() or rows.requires_grad:
        return None
    # A sample that is missing is NaN among others, and has another type by itself.
    return None if rows.is_floating_point() and bool(rows.isnan().any()) else rows


_ARROW: dict[str, Callable[..., Batch | None]] = {"Dataset": _arrow_rows, "Column": _arrow_column}
