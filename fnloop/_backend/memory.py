"""Memory: the errors of allocators, the room on a device, and pages that the CPU reuses."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator

import torch

__all__ = ["has_room", "is_out_of_memory", "reusing_pages"]

SPARE = 0.1  # of the memory of a device, to leave free

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of settings of mallopt
_LARGEST = 32 << 20  # bytes: glibc takes no higher threshold, nor does it choose one by itself
_KEPT = 1 << 30  # bytes, while a run lasts; otherwise twice the largest, as glibc chooses
_users = 0  # of a setting of the whole process

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


@contextlib.contextmanager
def reusing_pages(device: torch.device) -> Iterator[None]:
    """Let the CPU's allocator keep up to 1 GiB of freed memory, within a ``with`` block.

    By default glibc gives most of what an update frees back to the system. The next update gets it
    as new pages. Each is a page fault, and is filled with zeros: a fifth to a third of the time,
    with activations of 200 to 500 MB. Tensors above 32 MiB are given back as before. So is all that
    other C libraries free, and glibc if the environment sets one of its thresholds.

    A setting is one of the whole process, and cannot be read. After the block it is the highest
    that glibc chooses by itself. The caller has reserved the generators, so that no other thread is
    here.
    """
    global _users
    set_threshold = _mallopt() if device.type == "cpu" and not _is_set_by_user() else None
    # The first setting that is given ends the choice by glibc, so both are.
    if set_threshold is None or not set_threshold(_MMAP_THRESHOLD, _LARGEST):
        yield
        return
    _users += 1
    try:
        set_threshold(_TRIM_THRESHOLD, _KEPT)
        yield
    finally:
        _users = max(_users - 1, 0)  # a process may have been forked within the block
        if not _users:
            set_threshold(_TRIM_THRESHOLD, 2 * _LARGEST)


def _forget_users() -> None:
    """Let a process that was forked within a block, such as a worker, give its memory back."""
    global _users
    set_threshold = _mallopt() if _users else None
    _users = 0
    if set_threshold is not None:
        set_threshold(_TRIM_THRESHOLD, 2 * _LARGEST)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_users)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc that sets how it allocates. Fallback: none."""
    return getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None


def _is_set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in tunables
        for name in ("trim_threshold", "mmap_threshold")
    )
