"""Copy nested batches between the host and a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "copy_on_side_stream",
    "device_in",
    "may_need_transfer",
    "tensors_in",
    "to_cpu",
    "to_device",
]


# --- batches


def may_need_transfer(device: torch.device) -> bool:
    """Say whether a batch can be anywhere but on this device."""
    return device.type != "cpu" or torch.accelerator.is_available()


def copy_on_side_stream(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that copies batches to a CUDA device on a stream of its own.

    So it happens while kernels of the step before still run; what is asked of the device from then on waits for it.
    """
    stream = torch.cuda.Stream(device)

    def copied(batch: Any) -> Any:
        if _is_opaque(batch):
            return to_device(batch, device)  # its memory can't be followed
        with torch.cuda.stream(stream):
            there = to_device(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for t in tensors_in(there):
            t.record_stream(current)  # its memory isn't to be used again before they are done
        return there

    return copied


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def _is_opaque(batch: Any) -> bool:
    """Say whether there is something in a batch that moves its tensors itself."""
    if isinstance(batch, Tensor) or not hasattr(batch, "to"):
        parts = (
            batch.values()
            if isinstance(batch, Mapping)
            else batch
            if isinstance(batch, list | tuple)
            else ()
        )
        return any(map(_is_opaque, parts))
    return True


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a nested batch to a device: from pinned memory and without blocking on CUDA.

    Args:
        batch: tensors in any nesting of tuples, named tuples, lists and mappings, or an object with ``.to``.
        device: where to.

    Returns:
        The batch there. What is no tensor, and what is there already, stays as it is.
    """
    if not may_need_transfer(device):
        return batch
    from accelerate.utils import recursively_apply, send_to_device

    if device.type == "cuda":
        batch = recursively_apply(
            lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), batch
        )
    return send_to_device(batch, device, non_blocking=device.type == "cuda")


def device_in(tree: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested value."""
    from accelerate.utils import find_device

    return find_device(tree)


def to_cpu(tree: Any) -> Any:
    """Move the tensors of a nested value to the host."""
    if not may_need_transfer(torch.device("cpu")):
        return tree
    from accelerate.utils import send_to_device

    return send_to_device(tree, torch.device("cpu"))
