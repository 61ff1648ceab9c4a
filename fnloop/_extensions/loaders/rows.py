"""Whole batches of datasets whose samples are rows: one ``index_select`` for each tensor."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from fnloop.extend import Batch

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


class _Plainly(Exception):
    """Raised where the plain way might give something else."""


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


def fetch_batch(dataset: object, index: object) -> Batch | None:
    """Return what ``default_collate`` makes of these samples, read at once; None if it may not.

    Nothing is drawn from any generator, and no memory is shared with the dataset.

    Args:
        dataset: any; only what has a :func:`kind_of` its own is read.
        index: which samples; anything but a list of ints is left to the plain way.
    """
    __tracebackhide__ = True
    try:
        return _read(dataset, index)
    except _Plainly:
        return None


def _read(dataset: object, index: object) -> Batch:
    __tracebackhide__ = True
    kind = type(dataset)
    read = _ROWS.get(kind) or _COMPOSED.get(kind)
    if read is None and kind.__module__ == "datasets.arrow_dataset":
        read = _ARROW.get(kind.__qualname__)
    if type(index) is not list or not index or not {*map(type, index)} <= _INDICES or read is None:
        raise _Plainly
    return read(dataset, index)


# --- rows of tensors


def _array(dataset: np.ndarray, index: list[int]) -> Tensor:
    # from_numpy takes no negative strides, and rows without a dimension are Python's business.
    if dataset.dtype not in _DTYPES or min(dataset.strides, default=-1) < 0:
        raise _Plainly
    if dataset.flags.writeable:
        return _rows(torch.from_numpy(dataset), index)
    if min(index) < 0 or max(index) >= len(dataset):
        raise _Plainly
    return torch.from_numpy(dataset.take(index, axis=0))  # of the array itself, torch would warn


def _rows(tensor: Tensor, index: list[int]) -> Tensor:
    return _select((tensor,), index)[0]


def _select(tensors: Sequence[Tensor], index: list[int]) -> list[Tensor]:
    """Return these rows of each tensor."""
    if not all(map(_is_plain, tensors)):
        raise _Plainly
    try:
        rows = torch.frombuffer(array("q", index), dtype=torch.int64)
        return [t.index_select(0, _rows_for(t, rows, index)) for t in tensors]
    except (IndexError, OverflowError, RuntimeError):  # an index is negative or too large
        raise _Plainly from None


_ROWS: dict[type, Callable[..., Batch]] = {
    TensorDataset: lambda dataset, index: _select(dataset.tensors, index),
    Tensor: _rows,
    np.ndarray: _array,
    np.memmap: _array,
}


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


def _subset(dataset: Subset[object], index: list[int]) -> Batch:
    __tracebackhide__ = True
    indices = dataset.indices
    try:
        if type(indices) is Tensor:
            chosen = indices[torch.tensor(index)].tolist()
        else:
            chosen = [indices[i] for i in index]
    except IndexError:
        raise _Plainly from None
    return _read(dataset.dataset, chosen)


def _stack(dataset: StackDataset[tuple[object, ...]], index: list[int]) -> Batch:
    __tracebackhide__ = True
    if kind_of(dataset) is None:
        raise _Plainly
    named, found = dataset.datasets, []
    for part in named.values() if isinstance(named, dict) else named:
        found.append(_read(part, index))
    return dict(zip(named, found, strict=True)) if isinstance(named, dict) else found


def _concat(dataset: ConcatDataset[object], index: list[int]) -> Batch:
    __tracebackhide__ = True
    ends, rows = dataset.cumulative_sizes, np.array(index)
    is_known = kind_of(dataset) is not None and rows.dtype == np.int64
    if not is_known or rows.min() < 0 or rows.max() >= ends[-1]:
        raise _Plainly
    which = np.searchsorted(ends, rows, side="right")
    found: list[Batch] = []
    for n in np.flatnonzero(np.bincount(which)):
        own = rows[which == n] - (ends[n - 1] if n else 0)
        found.append(_read(dataset.datasets[n], own.tolist()))
    if len(found) == 1:
        return found[0]
    return _mixed(found, torch.from_numpy(which.argsort(kind="stable").argsort()))


def _mixed(batches: list[Batch], rows: Tensor) -> Batch:
    """Return these rows of batches in a row."""
    first = batches[0]
    if isinstance(first, Tensor):
        if len({(b.dtype, b.device, b.shape[1:]) for b in batches}) > 1:
            raise _Plainly
        return torch.cat(batches).index_select(0, rows.to(first.device))
    names = list(first) if isinstance(first, dict) else range(len(first))
    if any(len(batch) != len(first) for batch in batches):
        raise _Plainly
    parts = [_mixed([batch[name] for batch in batches], rows) for name in names]
    return dict(zip(names, parts, strict=True)) if isinstance(first, dict) else parts


_COMPOSED: dict[type, Callable[..., Batch]] = {
    Subset: _subset,
    StackDataset: _stack,
    ConcatDataset: _concat,
}

# --- Hugging Face


def _arrow_rows(dataset: Batch, index: list[int]) -> Batch:
    """Return rows of a ``datasets.Dataset``, of which torch makes samples, to stack them again."""
    __tracebackhide__ = True
    if dataset.format["type"] not in _FORMATS:
        raise _Plainly
    columns = dataset[index]
    kinds = {type(rows) for rows in columns.values()}
    if not columns or not kinds <= {Tensor, np.ndarray, list}:
        raise _Plainly
    return {name: _stacked(rows) for name, rows in columns.items()}


def _stacked(rows: Sequence[object]) -> Batch:
    __tracebackhide__ = True
    if type(rows) is Tensor and rows.is_contiguous() and not rows.requires_grad:
        return rows
    if type(rows) is np.ndarray:
        with contextlib.suppress(_Plainly):
            return _array(rows, [*range(len(rows))])  # a copy: its memory may be that of a file
    return default_collate(list(rows))


def _arrow_column(column: Batch, index: list[int]) -> Tensor:
    """Return rows of a column, which torch would read sample by sample."""
    __tracebackhide__ = True
    source = column.source
    if type(source).__qualname__ != "Dataset" or source.format["type"] != "torch":
        raise _Plainly
    rows = column[index]
    if type(rows) is not Tensor or not rows.is_contiguous() or rows.requires_grad:
        raise _Plainly
    # A sample that is missing is NaN among others, and has another type by itself.
    if rows.is_floating_point() and bool(rows.isnan().any()):
        raise _Plainly
    return rows


_ARROW: dict[str, Callable[..., Batch]] = {"Dataset": _arrow_rows, "Column": _arrow_column}
