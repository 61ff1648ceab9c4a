"""Recognise the errors of an allocator that has no memory left."""

from __future__ import annotations

import torch

__all__ = ["is_out_of_memory"]

# What torch says in a RuntimeError: the allocators of CUDA, ROCm and MPS, that of XPU, libraries
# whose workspace does not fit, and the allocator of the CPU.
_WORDINGS = (
    "out of memory",
    *("OUT_OF_DEVICE_MEMORY", "OUT_OF_HOST_MEMORY", "ERROR_OUT_OF_RESOURCES"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED"),
    "DefaultCPUAllocator",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that there is no memory left, on any device.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _WORDINGS)
