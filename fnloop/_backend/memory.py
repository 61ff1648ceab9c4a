"""Whether memory is left: the errors of allocators, and the room on a device."""

from __future__ import annotations

import torch

__all__ = ["has_room", "is_out_of_memory"]

SPARE = 0.1  # of the memory of a device, to leave free

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


def has_room(device: torch.device, size: int) -> bool:
    """Return whether a GPU has memory for a copy of ``size`` bytes, and some to spare.

    Memory that the allocator of this process holds does not count, because an update needs it.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free - size > SPARE * total
