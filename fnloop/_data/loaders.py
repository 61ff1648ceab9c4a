"""The loaders argument: read and checked, and the marks of a loader."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fnloop._backend.collectives import data_shares
from fnloop._core.types import Batch
from fnloop._display.checks import describe, function, has_methods
from fnloop._display.screen import warn_once

Loader = Any  # an iterable of batches, or a function that returns one
NONE_LEFT = object()  # in the place of a batch where there is no more
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
        is_iterable(loader) or callable(loader) or _is_loader(loader)
    ):
        hint = f". Call it: {loader.__name__}(...)" if isinstance(loader, type) else ""
        raise TypeError(f"the {name} loader must be {wanted}; got {describe(loader)}{hint}")
    if not is_iterable(loader) and not _is_loader(loader):
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
    return isinstance(value, DataLoader | Dataset | Mark) or has_methods(value, "length_in")


def _is_of_samples(loader: object) -> bool:
    """Return whether this is a dataset of Hugging Face that was not batched: its rows have scalars.

    No row is read: that might draw from the generators.
    """
    if type(loader).__module__ not in ("datasets.arrow_dataset", "datasets.iterable_dataset"):
        return False
    features = getattr(loader, "features", None) or {}
    return any(type(feature).__name__ in _OF_A_SAMPLE for feature in features.values())


class Mark:
    """The base of marks of a loader, which is read as it is without."""

    def __init__(self, loader: Loader) -> None:
        check_loader(loader, type(self).__name__, alone=True)
        self.loader = loader

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r})"


class sharded(Mark):
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


class even(Mark):
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

    def __len__(self) -> int:
        """Return the number of batches, in all processes together."""
        return len(self.loader) // data_shares() * data_shares()
