"""Whole batches of datasets whose samples are rows: one ``index_select`` per tensor.

The plain way indexes each sample and stacks them. Here the same tensors come in one call: the same
bits, dtypes and strides. This holds for the classes below only, exactly, because a subclass may
make its samples in another way; and only with torch's ``default_collate``. Whatever is not surely
the same (a negative index, a quantized tensor) is left to the plain way, which also raises its own
errors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from fnloop._core.types import Batch

__all__ = ["fetch_batch"]

_INDICES = {int, np.int64}
# Of arrays: default_collate keeps these as they are.
_DTYPES = frozenset(map(np.dtype, "?bBhHiIlqefdFD"))


class _ArrowDataset(Protocol):
    """A ``datasets.Dataset`` of Hugging Face."""

    format: Mapping[str, object]

    def __getitem__(self, index: list[int]) -> dict[str, Sequence[object]]: ...


def fetch_batch(dataset: object, index: object) -> Batch | None:
    """Return what ``default_collate`` makes of these samples, read at once; None if it may not.

    Nothing is drawn from any generator, and no memory is shared with the dataset.

    Args:
        dataset: any. A TensorDataset, a tensor, a NumPy array, a StackDataset or a Subset of these,
            or a ``datasets.Dataset`` in torch format, is read at once.
        index: which samples; anything but a list of ints is left to the plain way.
    """
    __tracebackhide__ = True
    if type(index) is not list or not index or not {*map(type, index)} <= _INDICES:
        return None
    read = _READERS.get(type(dataset))
    if read is not None:
        return read(dataset, index)
    return _arrow_rows(cast(_ArrowDataset, dataset), index) if _is_arrow(dataset) else None


def _tensors(dataset: TensorDataset, index: list[int]) -> list[Tensor] | None:
    return _select(dataset.tensors, index)


def _tensor(dataset: Tensor, index: list[int]) -> Tensor | None:
    found = _select((dataset,), index)
    return None if found is None else found[0]


def _array(dataset: np.ndarray, index: list[int]) -> Tensor | None:
    # from_numpy takes no negative strides, and rows without a dimension are Python's business.
    if dataset.dtype not in _DTYPES or min(dataset.strides, default=-1) < 0:
        return None
    return _tensor(torch.from_numpy(dataset), index)


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
    named = dataset.datasets
    parts = list(named.values() if isinstance(named, dict) else named)
    # Not whole datasets that only their class can read: they would be read twice.
    if not all(type(part) in (Tensor, np.ndarray, np.memmap) for part in parts):
        return None
    found = [fetch_batch(part, index) for part in parts]
    if any(part is None for part in found):
        return None
    return dict(zip(named, found, strict=True)) if isinstance(named, dict) else found


_READERS: dict[type, Callable[..., Batch | None]] = {
    TensorDataset: _tensors,
    Tensor: _tensor,
    np.ndarray: _array,
    np.memmap: _array,
    Subset: _subset,
    StackDataset: _stack,
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


def _is_arrow(dataset: object) -> bool:
    kind = type(dataset)
    return kind.__qualname__ == "Dataset" and kind.__module__ == "datasets.arrow_dataset"


def _arrow_rows(dataset: _ArrowDataset, index: list[int]) -> Batch | None:
    """Return rows of a ``datasets.Dataset`` as it gives them: in torch format, tensors."""
    __tracebackhide__ = True
    if dataset.format["type"] != "torch":
        return None
    return {
        name: rows if _is_stacked(rows) else default_collate(list(rows))
        for name, rows in dataset[index].items()
    }


def _is_stacked(rows: object) -> bool:
    return type(rows) is Tensor and rows.is_contiguous() and not rows.requires_grad
