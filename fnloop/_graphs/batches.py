"""Batches as inputs of a graph: which graph is theirs, and the tensors that it reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.containers import IN_BATCHES, map_leaves, parts_of
from fnloop._core.types import Batch
from fnloop._graphs.guards import CaptureError

__all__ = ["copy_all", "rebuild", "signature", "static_inputs"]


def signature(batch: Batch, tensors: list[Tensor]) -> Hashable:
    """Return the key of a batch's graph: its structure, shapes and dtypes.

    Args:
        batch: a batch.
        tensors: the tensors of the batch are appended to it.

    Raises:
        CaptureError: the batch contains something that is neither a tensor nor plain data.
    """
    if isinstance(batch, Tensor):
        tensors.append(batch)
        return batch.shape, batch.dtype
    parts = parts_of(batch, IN_BATCHES)
    if parts is not None:
        return type(batch), *[(key, signature(part, tensors)) for key, part in parts]
    if batch is None or isinstance(batch, bool | int | float | str):
        return type(batch), batch
    raise CaptureError(
        "a batch to capture consists of tensors in tuples, lists and dicts; this one contains a "
        f"{type(batch).__name__}, which cannot be copied into a graph. Let the loader's collate_fn "
        "return a dict of tensors"
    )


def rebuild(batch: Batch, tensors: Iterator[Tensor]) -> Batch:
    """Return a copy of a batch with these tensors in place of its own."""
    return map_leaves(batch, lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf)


def static_inputs(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a graph reads in place of these."""
    for t in tensors:
        if t.layout is not torch.strided:
            raise CaptureError(
                "a batch to capture consists of dense tensors; one of this batch has layout "
                f"{t.layout}"
            )
    inputs = [torch.empty_like(t) for t in tensors]
    copy_all(inputs, tensors)
    return inputs


def copy_all(to: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors into others, all at once."""
    if tensors:
        torch_compat.foreach_copy_(to, tensors, non_blocking=True)
