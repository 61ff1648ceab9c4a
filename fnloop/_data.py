"""Loaders: told apart, opened so that what they yield is a function of (seed, epoch, position), and cut into windows.

A map-style ``DataLoader`` is read by its parts (``_map_style``). Any other iterable is iterated; to go on in the middle of it,
it is consumed up to there. With several processes, the batches are dealt to them in turn (``_deal``).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

from fnloop._backend import beside, needs_placing, place, tensors_in
from fnloop._checks import described, function
from fnloop._deal import Deal, Dealt
from fnloop._joint import Borrowed
from fnloop._map_style import hardy_workers, is_sized, killable, length_of, map_style, tell_epoch
from fnloop._processes import agreed, any_process
from fnloop._rng import FETCH, ORDER, Generators, fold_in, keeping, own_generator, position_all, times_positioned
from fnloop._types import name_of

__all__ = [
    "Loaders", "Source",
    "check_loader", "leading", "open_source", "read_loaders", "sharded", "updates_in", "windows",
]  # fmt: skip

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
            raise ValueError(f'fit expects loaders with one named "train" to train on; got {described(list(loaders))}')
        evaluated = {name: loader for name, loader in loaders.items() if name != "train"}
        for name in evaluated:
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"a loader's name is the prefix of its metrics: a str without a slash; got {name!r}")
    elif isinstance(loaders, tuple) and len(loaders) > 2 and not isinstance(loaders[0], Tensor):
        raise TypeError(
            f"fit expects loaders as a pair (train, valid), or as a mapping with names; got a tuple of {len(loaders)}. "
            'Write {"train": train, "valid": valid, "test": test}'
        )
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
    if isinstance(loader, Mapping):
        hint = "take one of them" if alone else f'name each: {{"train": ..., "{name if name != "train" else "other"}": ...}}'
        raise TypeError(
            f"the {name} loader must be one iterable of batches; got a mapping with {described(list(loader))}: {hint}"
        )
    if isinstance(loader, tuple) and any(map(_loads, loader)):
        hint = "take one of them" if alone else "write a mapping with names"
        raise TypeError(f"the {name} loader must be one iterable of batches; got a tuple of {len(loader)} loaders: {hint}")
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TypeError(f"the {name} loader is a {type(loader).__name__}, a dataset of samples: wrap it in a DataLoader")
    if isinstance(loader, list) and loader and isinstance(loader[0], DataLoader):
        raise TypeError(f"the {name} loader is a list of DataLoaders: write a pair (train, valid), or a mapping with names")
    wanted = "an iterable of batches (a DataLoader, a list, ...) or a function that returns one"
    if isinstance(loader, str | bytes | type | nn.Module) or not (_iterates(loader) or callable(loader)):
        hint = f". Call it: {loader.__name__}(...)" if isinstance(loader, type) else ""
        raise TypeError(f"the {name} loader must be {wanted}; got {described(loader)}{hint}")
    if not _iterates(loader):
        function(f"the {name} loader", "itself", loader, wanted, 0)


def _iterates(loader: Any) -> bool:
    return hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")


def _loads(value: Any) -> bool:
    """Return whether something in a tuple is a loader, and not a part of a batch."""
    batches = isinstance(value, list) and bool(value) and isinstance(value[0], list | tuple | Mapping)
    return isinstance(value, DataLoader | IterableDataset | sharded) or batches


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
    deal = Deal(rank, processes, Dealt())
    if type(loader) in (list, tuple):  # nothing to position: no code runs

        def listed(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return deal(itertools.islice(loader, batch, None), leading)

        return Source(listed, len(loader), processes, dealt=deal.dealt)
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if plain and not isinstance(loader.dataset, IterableDataset):

        def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
            return map_style(loader, seed, epoch, batch, samples, deal)

        if is_sized(loader):
            batched: Any = loader.batch_sampler
            size, total = batched.batch_size, len(batched.sampler)
            source = Source(batches, None, processes, size, total, batched.drop_last, deal.dealt)
            return attrs.evolve(source, length=source.batches_of(total))
        return Source(batches, length_of(loader), processes, dealt=deal.dealt)

    def iterated(epoch: int | None, batch: int, samples: int) -> Iterator[Any]:
        return deal(_iterated(loader, seed, epoch, batch), leading, made=True)

    return Source(iterated, length_of(loader), processes, dealt=deal.dealt)


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


class sharded:
    """Mark a loader that yields this process's own share, and not all of the data.

    Any other loader is read by every process, and its batches are dealt to them in turn; for a map-style DataLoader only
    their indices are. Mark a stream that each process reads a part of. Shares may be of different length.
    In the middle of an epoch a run goes on on as many processes only: others would have other shares.

    Args:
        loader: an iterable of batches, or a function that returns one.

    Returns:
        A loader for ``fit``, ``evaluate`` and ``predict``.

    Raises:
        TypeError: it is not a loader.

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
    the one before is still worked on has it fetched and copied meanwhile; with prefetch n > 1, n - 1 more are, and
    nothing else is different.
    """
    batches = source.batches(epoch, batch, samples)
    if needs_placing(device):
        batches = map(_placer(device), batches)
    batches = iter(batches)
    # Not partition_all, which asks for the next window before it yields one: a loader that draws would see it.
    fed = batches if window == 1 else iter(lambda: tuple(itertools.islice(batches, window)), ())
    return fed if prefetch == 1 else _ahead(fed, prefetch)


class _Fetched(NamedTuple):
    """What one fetch has given.

    Args:
        thing: a window, or ``_END``.
        generators: as the fetch has left them, if it has positioned them.
        error: what went wrong, or None.
    """

    thing: Any
    generators: Generators | None
    error: Exception | None = None


def _fetched(things: Iterator[Any]) -> _Fetched:
    __tracebackhide__ = True
    before, thing, error = times_positioned(), _END, None
    try:
        thing = next(things, _END)
    except Exception as raised:
        error = raised
    return _Fetched(thing, Generators.capture() if times_positioned() != before else None, error)


def _ahead(things: Iterator[Any], n: int) -> Iterator[Any]:
    """Yield each thing when n of them are there; what goes wrong comes after those that were there before.

    The generators are with each as they would be if it had been fetched just now: as its own fetch has left them, or, where a
    fetch does not set them (in workers, of a list), as the caller has left them.
    """
    __tracebackhide__ = True
    queue: deque[_Fetched] = deque()
    while True:
        with keeping() as found:
            try:
                while len(queue) < n and not (queue and queue[-1].thing is _END):
                    queue.append(_fetched(things))
            finally:  # after an interruption too: a run continues from here
                own = queue[0].generators if queue else None
                if own or found:
                    (own or found[0]).install()
        if queue[0].error is not None:
            raise queue[0].error
        if queue[0].thing is _END:
            return
        yield queue.popleft().thing


def _placer(device: torch.device) -> Callable[[Any], Any]:
    """Return the function that puts a batch on a device: on CUDA by a stream of its own, beside what the device is doing."""
    move: Callable[[Any], Any] = beside(device) if device.type == "cuda" else lambda batch: place(batch, device)
    return lambda batch: Borrowed(move(batch.batch)) if type(batch) is Borrowed else move(batch)


# --- iterables


def _iterated(loader: Any, seed: int, epoch: int | None, start: int) -> Iterator[Any]:
    __tracebackhide__ = True
    tell_epoch(epoch, loader, getattr(loader, "dataset", None))
    order, fetch = fold_in(seed, ORDER, epoch or 0), fold_in(seed, FETCH, epoch or 0)
    if isinstance(loader, DataLoader):
        loader._iterator = None  # persistent workers would go on with the generators of the epoch before
    with contextlib.ExitStack() as stack:  # until the first batch is there: only then has everybody taken its generator
        samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
        for owner in {id(owner): owner for owner in (loader, *samplers) if owner is not None}.values():
            stack.enter_context(own_generator(owner, order))
        if isinstance(loader, DataLoader):
            stack.enter_context(hardy_workers(loader))
        iterable: Any = loader
        position_all(order)
        if not _iterates(loader):
            iterable = iterable()
            if not _iterates(iterable):
                raise TypeError(
                    f"the loader {name_of(loader)} must return an iterable of batches; it returned {described(iterable)}. "
                    "Did you forget to return or yield?"
                )
        batches = killable(iter(iterable))
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


def leading(batch: Any) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


def updates_in(batches: int | None, window: int) -> int | None:
    """Return how many windows a number of batches makes."""
    return None if batches is None else math.ceil(batches / window)
