"""Copy nested batches between the host and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnloop._backend.containers import IN_BATCHES, parts_of

__all__ = [
    "copy_on_side_stream",
    "copy_to_cpu",
    "device_in",
    "may_need_transfer",
    "tensors_in",
    "to_cpu",
    "to_device",
]

Tree = TypeVar("Tree")


def may_need_transfer(device: torch.device) -> bool:
    """Return whether a batch may be on another device than this one."""
    return device.type != "cpu" or torch.accelerator.is_available()


def copy_on_side_stream(device: torch.device) -> Callable[[Tree], Tree]:
    """Return a function that copies batches to a CUDA device on a separate stream.

    The copy overlaps with kernels of the previous step. Kernels that are launched after it wait for
    it.
    """
    stream = torch.cuda.Stream(device)

    def copy(batch: Tree) -> Tree:
        if _is_there(batch, stream.device):
            return batch
        if _is_opaque(batch):
            return to_device(batch, device)  # its memory cannot be tracked
        with torch.cuda.stream(stream):
            there = to_device(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for t in tensors_in(there):
            t.record_stream(current)  # so that its memory is not reused before they are done
        return there

    return copy


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch: of mappings, lists and tuples of any class."""
    if isinstance(batch, Tensor):
        yield batch
        return
    for _, part in parts_of(batch, IN_BATCHES) or ():
        if isinstance(part, Tensor):  # called for every batch: a generator per tensor takes longer
            yield part
        else:
            yield from tensors_in(part)


def _is_there(batch: object, device: torch.device) -> bool:
    """Return whether all tensors of a batch are on a device already, and nothing hides others."""
    if isinstance(batch, Tensor):
        return batch.device == device
    inside = parts_of(batch, IN_BATCHES) or ()
    return not hasattr(batch, "to") and all(_is_there(part, device) for _, part in inside)


def _is_opaque(batch: object) -> bool:
    """Return whether a batch contains an object that moves its tensors itself."""
    if isinstance(batch, Tensor):
        return False
    inside = parts_of(batch, IN_BATCHES) or ()
    return hasattr(batch, "to") or any(_is_opaque(part) for _, part in inside)


def to_device(batch: object, device: torch.device) -> Any:
    """Move the tensors of a nested batch to a device; to CUDA from pinned memory, without blocking.

    Args:
        batch: tensors in any nesting of tuples, named tuples, lists and mappings, or an object with
            ``.to``.
        device: the target.

    Returns:
        The batch there. Values that are not tensors, and tensors that are there already, are kept.
    """
    if not may_need_transfer(device):
        return batch
    from accelerate.utils import recursively_apply, send_to_device

    if device.type == "cuda":
        batch = recursively_apply(
            lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), batch
        )
    return send_to_device(batch, device, non_blocking=device.type == "cuda")


def device_in(tree: object) -> torch.device | None:
    """Return the device of the first tensor in a nested value."""
    from accelerate.utils import find_device

    return find_device(tree)


def copy_to_cpu(tree: object) -> Any:
    """Copy the tensors of a nested value to the host: nothing that changes them later is seen."""
    from accelerate.utils import recursively_apply

    return recursively_apply(lambda t: t.detach().to("cpu", copy=True), tree)


def to_cpu(tree: object) -> Any:
    """Move the tensors of a nested value to the host."""
    if not may_need_transfer(torch.device("cpu")):
        return tree
    from accelerate.utils import send_to_device

    return send_to_device(tree, torch.device("cpu"))
