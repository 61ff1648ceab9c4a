"""Loaders: read and checked; and how a process gets its share of the batches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fnloop._backend.collectives import data_shares
from fnloop._backend.containers import parts_of, tensors_in
from fnloop._core.types import Batch
from fnloop._data.held import Held
from fnloop._display.checks import describe, function, has_methods
from fnloop._display.screen import warn_once
from fnloop._extensions import extensions

# --------------------------------------------------------------------------------------------------
# Read and check the loaders argument.

Loader = Any  # an iterable of batches, or a function that returns one
_OF_A_SAMPLE = ("Value", "ClassLabel", "Image", "Audio", "Video")  # features of Hugging Face
_TAKEN = {  # what the names of other metrics begin with
    "recent": "the metrics since the last record",
    "time": "the times that timings() measures",
    "throughput": "what throughput() measures",
    "memory": "what device_memory() measures",
}


class Loaders(NamedTuple):
    """The loaders of a run: the one to train on, and those to evaluate, by name."""

    train: Loader
    evaluated: dict[str, Loader]


def read_loaders(loaders: object) -> Loaders:
    """Return the training loader and those that are evaluated.

    Args:
        loaders: a mapping with "train" and any others, a pair ``(train, valid)``, or one iterable
            of batches.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no "train"; or a name contains a slash, or is that of other metrics.
    """
    if isinstance(loaders, Mapping):
        if "train" not in loaders:
            raise ValueError(
                'fit expects loaders with one named "train" to train on; got '
                f"{describe(list(loaders))}{_batch_hint(loaders)}"
            )
        evaluated = {name: loader for name, loader in loaders.items() if name != "train"}
        for name in evaluated:
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(
                    "a loader's name is the prefix of its metrics: a str without a slash; got "
                    f"{name!r}"
                )
            if name in _TAKEN:
                raise ValueError(
                    f'a loader cannot be named "{name}", with which the names of {_TAKEN[name]} '
                    "begin: choose another name"
                )
    elif isinstance(loaders, tuple) and len(loaders) > 2 and not isinstance(loaders[0], Tensor):
        raise TypeError(
            "fit expects loaders as a pair (train, valid), or as a mapping with names; got a tuple "
            f'of {len(loaders)}. Write {{"train": train, "valid": valid, "test": test}}'
        )
    elif isinstance(loaders, tuple) and len(loaders) == 2:
        train, valid = loaders
        _refuse_batch("a pair of loaders", loaders)
        loaders, evaluated = {"train": train}, {} if valid is None else {"valid": valid}
    else:
        loaders, evaluated = {"train": loaders}, {}
    for name, loader in {"train": loaders["train"], **evaluated}.items():
        check_loader(loader, name)
    return Loaders(loaders["train"], evaluated)


def check_loader(loader: object, name: str, alone: bool = False) -> None:
    """Raise TypeError unless a loader yields batches, or returns what does.

    Args:
        loader: the loader.
        name: its name in messages.
        alone: whether the function takes one loader only.
    """
    if isinstance(loader, Mapping):
        if hint := _batch_hint(loader):
            given = describe(list(loader))
            raise TypeError(
                f"the {name} loader must be one iterable of batches; got a mapping with {given}"
                f"{hint}"
            )
        other = name if name != "train" else "other"
        hint = "take one of them" if alone else f'name each: {{"train": ..., "{other}": ...}}'
        raise TypeError(
            f"the {name} loader must be one iterable of batches; got a mapping with "
            f"{describe(list(loader))}: {hint}"
        )
    if isinstance(loader, tuple) and any(map(_loads, loader)):
        hint = "take one of them" if alone else "write a mapping with names"
        raise TypeError(
            f"the {name} loader must be one iterable of batches; got a tuple of {len(loader)} "
            f"loaders: {hint}"
        )
    if (isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)) or (
        _is_of_samples(loader)
    ):
        raise TypeError(
            f"the {name} loader is a {type(loader).__name__}, a dataset of samples: wrap it in a "
            "DataLoader, with batch_size=None if each of its rows is a batch"
        )
    if isinstance(loader, list) and loader and _is_loader(loader[0]):
        raise TypeError(
            f"the {name} loader is a list of loaders: write a pair (train, valid), or a "
            "mapping with names"
        )
    _refuse_batch(f"the {name} loader", loader)
    if has_methods(type(loader), "to_numpy"):
        raise TypeError(
            f"the {name} loader is a {type(loader).__name__}, whose rows are no batches: write "
            "list(torch.tensor(x.to_numpy()).split(32)) for batches of 32 rows"
        )
    if _has_rows(loader) and len(shape := tuple(loader.shape)) > 1:  # type: ignore[attr-defined]
        made = "x" if isinstance(loader, Tensor) else "torch.tensor(x)"
        warn_once(
            f"the {name} loader is a {type(loader).__name__} of shape {shape}, of which each row "
            f"is taken as a batch. If its rows are samples, write list({made}.split(32)) for "
            "batches of 32"
        )
    wanted = "an iterable of batches (a DataLoader, a list, ...) or a function that returns one"
    if isinstance(loader, str | bytes | type | nn.Module) or not (
        is_iterable(loader) or callable(loader)
    ):
        hint = f". Call it: {loader.__name__}(...)" if isinstance(loader, type) else ""
        raise TypeError(f"the {name} loader must be {wanted}; got {describe(loader)}{hint}")
    if not is_iterable(loader):
        arguments = 2 if takes_position(loader) else 0
        wanted += ", called with nothing or with (epoch, batch)"
        function("fnloop", f"the {name} loader", loader, wanted, arguments)


def _has_rows(value: object) -> bool:
    """Return whether this is a tensor, an array, or a table of numbers."""
    return isinstance(value, Tensor) or has_methods(type(value), "__array__")


def _refuse_batch(what: str, given: object) -> None:
    """Raise TypeError for a pair of tensors."""
    if isinstance(given, tuple) and len(given) == 2 and all(map(_has_rows, given)):
        raise TypeError(
            f"{what} is made of iterables of batches; got a pair of tensors, which looks like one "
            "batch: write [batch] for this batch alone, or DataLoader(TensorDataset(*batch), "
            "batch_size=32) for batches of 32 rows"
        )


def _batch_hint(given: Mapping[str, object]) -> str:
    """Return what to write for a mapping that is a batch."""
    return ". If this is one batch, write [batch]" if any(map(_has_rows, given.values())) else ""


def is_iterable(loader: object) -> bool:
    """Return whether ``iter`` takes a loader."""
    return has_methods(loader, "__iter__") or has_methods(loader, "__getitem__")


def takes_position(loader: object) -> bool:
    """Return whether a function takes ``(epoch, batch)``: where its batches are to begin.

    Its first two arguments are called that, or it cannot be called without two.
    """
    if is_iterable(loader) or not callable(loader):
        return False
    try:
        signature = inspect.signature(loader)
        signature.bind(None, None)
    except (TypeError, ValueError):  # ValueError: a builtin without a signature
        return False
    if [*signature.parameters][:2] == ["epoch", "batch"]:
        return True
    try:
        signature.bind()
    except TypeError:
        return True
    return False


def _loads(value: object) -> bool:
    """Return whether an element of a tuple is a loader, and not a part of a batch."""
    batches = (
        isinstance(value, list) and bool(value) and isinstance(value[0], list | tuple | Mapping)
    )
    return _is_loader(value) or batches


def _is_loader(value: object) -> bool:
    """Return whether this is surely a loader. Those made of others have ``length_in``."""
    kinds = DataLoader | Dataset | sharded | even
    return isinstance(value, kinds) or has_methods(value, "length_in")


def _is_of_samples(loader: object) -> bool:
    """Return whether this is a dataset of Hugging Face that was not batched: its rows have scalars.

    No row is read: that might draw from the generators.
    """
    if type(loader).__module__ not in ("datasets.arrow_dataset", "datasets.iterable_dataset"):
        return False
    features = getattr(loader, "features", None) or {}
    return any(type(feature).__name__ in _OF_A_SAMPLE for feature in features.values())


class sharded:
    """Mark a loader that yields this process's own share, and not all of the data.

    Every other loader is read by every process, and its batches are distributed round-robin; of a
    map-style DataLoader only the indices are. Mark a stream of which each process reads a part.
    Shares may differ in length. Mid-epoch, resume only on the same number of processes, because
    others would have other shares.

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
        ...     def __iter__(self):
        ...         rank, processes = state.backend.data_rank, state.backend.data_size
        ...         return (torch.ones(2) for file in range(rank, 6, processes))
        >>> state = toy()
        >>> state = fl.fit(fl.pipeline()(toy_loss), state, sharded(Shards()), hooks=())
        >>> state.model.w.item()
        -6.0
    """

    def __init__(self, loader: Loader) -> None:
        check_loader(loader, "sharded", alone=True)
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def __repr__(self) -> str:
        return f"sharded({self.loader!r})"


class even:
    """Mark a loader: only rounds in which every process has a batch are read.

    With 5 batches on 2 processes, the last round has one batch, and it is dropped. Without this,
    the process without a batch takes no part in that update. If the loss function exchanges
    something between processes (a contrastive loss that gathers, ``nn.SyncBatchNorm``), it has to
    take part. It is given a batch again, and what it exchanges counts twice.

    Args:
        loader: any loader.

    Returns:
        A loader for ``fit``, ``evaluate`` and ``predict``.

    Raises:
        TypeError: it is not a loader.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.ones(2)] * 5
        >>> fl.fit(fl.pipeline()(toy_loss), toy(), even(batches), hooks=()).step
        5

    Notes:
        On one process nothing changes. Which samples are left out depends on the number of
        processes: less than a batch for each. A loader that shuffles leaves others out in each
        epoch. An evaluation leaves them out as well. A loader that is made of an even one is even
        as a whole: ``take(even(loader), 5)`` and ``even(take(loader, 5))`` are the same. With
        ``sharded``, an epoch ends with the shortest share.
    """

    def __init__(self, loader: Loader) -> None:
        check_loader(loader, "even", alone=True)
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def __len__(self) -> int:
        """Return the number of batches, in all processes together."""
        return len(self.loader) // data_shares() * data_shares()

    def __repr__(self) -> str:
        return f"even({self.loader!r})"


def unmarked(loader: Loader) -> tuple[Loader, bool]:
    """Return a loader without the mark of ``even``, and whether it had one."""
    if isinstance(loader, even):
        return unmarked(loader.loader)[0], True
    if isinstance(loader, sharded):
        inner, is_even = unmarked(loader.loader)
        return (sharded(inner), True) if is_even else (loader, False)
    return loader, False


# --------------------------------------------------------------------------------------------------
# Which process works on which batch: here, the only one on all of them.

_TOLERANCE = 1e-3  # by which numbers may differ that different kinds of processors have computed
_LEAVES, _NUMBERS = 16, 1024  # of a batch that are compared, and of each of its leaves

# The shape of each leaf that has numbers, and some of them.
Glimpse = list[tuple[tuple[int, ...], Tensor]]
Index = Any  # what a sampler yields: the index of a sample, or a list of them
Place = tuple[int | None, int, int]  # the epoch, and the batches and samples of it before a place
Item = TypeVar("Item")


class SingleProcess:
    """Gives everything to the only process.

    Args:
        window: the batches of an update, of all processes together; None if each process takes a
            number of its own.

    Attributes:
        processes: the number of processes.
        complete: the batches of a complete round; a loader that drops incomplete batches drops an
            incomplete round with them.
        order: a checksum of the indices of an epoch's samples, where they are known.
        first: what was seen of the first batch of a pass, when there are several processes.
        reads_ahead: whether batches are read before the one that this process takes next.
        held: what was read, and is not used yet.
    """

    processes = complete = 1
    order = 0
    first: First | None = None
    reads_ahead = False

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.held = Held()

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], counts: bool = False
    ) -> Iterator[Item | Padding]:
        """Return this process's items.

        Args:
            items: what is distributed.
            size_of: how many samples an item has, or 0 if that is not known.
            counts: whether items are batches that were given; else they are still to be made.
        """
        return self.held.counted(iter(items)) if counts else iter(items)

    def again(self) -> SingleProcess:
        """Return how another pass is distributed over the same batches. It notes nothing here."""
        return SingleProcess(self.window)

    def kept(self, batches: int) -> int:
        """Return how many of the batches that follow are distributed; others are left out."""
        return batches

    def noting_first(self, batches: Iterator[Batch], at: Place) -> Iterator[Batch]:
        """Return this process's batches. Note the pass's first one, which every process has read.

        Args:
            batches: what :meth:`split` gives.
            at: where the pass begins.
        """
        return batches

    def sampling_first(
        self,
        items: Iterator[Item],
        at: Place,
        see: Callable[[Item], Item],
        make: Callable[[Iterator[Item]], Iterator[Batch]],
    ) -> Iterator[Batch]:
        """Return this process's batches. Note a sample of the pass's first one, which another has.

        Args:
            items: what :meth:`split` gives: what this process's batches are made from.
            at: where the pass begins.
            see: returns the item whose batch is a glimpse of the batch of another item.
            make: makes batches of items, in their order.
        """
        return make(items)

    def note_order(self, indices: Iterator[Index], batched: bool) -> Iterator[Index]:
        """Return the indices of samples, noting their order as they pass.

        Args:
            indices: what a sampler yields.
            batched: whether that is the indices of a batch each time.
        """
        return indices

    def uniform_batch_size(self, rounds: int) -> int:
        """Return the size of every batch in the next rounds if all are equal, else 0.

        Call it once for each round.
        """
        return 0

    def check_order(
        self, read_again: Callable[[First], Glimpse | None], indices: bool, what: str
    ) -> None:
        """Raise if the processes have read different data, or in different orders. A collective.

        Args:
            read_again: returns a glimpse of the first batch of a pass that is read once more.
            indices: whether a whole pass was read, so that the order of all indices is known.
            what: what it is for, as errors name it.
        """


class First(NamedTuple):
    """What was seen of the first batch of a pass.

    Args:
        glimpse: some of its numbers, or None if they are not the same whenever it is read.
        at: where the pass began.
    """

    glimpse: Glimpse | None
    at: Place


def sharing_among(
    processes: int,
    rank: int,
    window: int | None = None,
    even: bool = False,
    alike: bool = False,
    streams: bool = False,
) -> SingleProcess:
    """Return how a process gets its share of the batches.

    Args:
        processes: how many shares there are.
        rank: the number of the share of this process.
        window: as for a single process.
        even: whether an incomplete round is left out.
        alike: whether others have the same share, also where there is only one.
        streams: whether each share is a stream of its own.
    """
    if processes > 1 or alike:
        for shared in extensions("shares of several processes"):
            return shared(processes, rank, window, even, alike and streams)
    return SingleProcess(window)


def batch_size_of(batch: Batch) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in tensors_in(batch) if t.ndim), 1)


# --- glimpses of the first batch of a pass


def glimpse(batch: object) -> Glimpse:
    """Return some of the numbers in a batch or a sample, on the host.

    Text is left out: it may be the name of a file, which another machine has at another place.

    Example:
        >>> glimpse({"x": torch.zeros(2, 1), "name": "a.png"})
        [((2, 1), tensor([0., 0.]))]
    """
    return [*itertools.islice(_numbers_in(batch), _LEAVES)]


def _numbers_in(value: object) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value.ravel()[:: max(value.size // _NUMBERS, 1)].copy())
    if isinstance(value, Tensor):
        if type(value) is Tensor and value.layout is torch.strided and not value.is_quantized:
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
            some = flat[:: max(len(flat) // _NUMBERS, 1)].cpu()
            yield tuple(value.shape), some.clone()  # the batch may be changed in place
        return
    for _, part in parts_of(value) or ():
        yield from _numbers_in(part)


def alike(a: Glimpse | None, b: Glimpse | None) -> bool:
    """Return whether two glimpses are the same, but for how processors round."""
    if a is None or b is None or [shape for shape, _ in a] != [shape for shape, _ in b]:
        return False
    return all(_close(x, y) for (_, x), (_, y) in zip(a, b, strict=True))


def _close(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or len(x) != len(y) or not x.is_floating_point():
        return torch.equal(x, y)
    x, y = x.double(), y.double()
    scale = x.nan_to_num(0, 0, 0).abs().mean().item() if len(x) else 0.0
    return torch.allclose(x, y, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


# --------------------------------------------------------------------------------------------------
# What a process has of a window of batches, and the marks in a stream of batches.

NONE_LEFT = object()


class Padding:
    """A padding batch for a process whose data ran out.

    It contributes nothing to gradients or metrics. It is only run if the forward pass performs
    collectives, in which the other processes would otherwise wait: see
    :class:`fnloop._extensions.engines.distributed.CollectiveProbe`.

    Args:
        batch: a batch of another process.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class Window(NamedTuple):
    """What is known of a window when there are several processes.

    Args:
        batch_size: samples in each of its batches, in every process; 0 if that may differ.
        padding: for each of its batches, whether it is padding; empty if none is.
    """

    batch_size: int = 0
    padding: Sequence[bool] = ()
