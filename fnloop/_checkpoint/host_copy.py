"""Copy tensors to host memory without holding up the work of other threads on the device."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

__all__ = ["HostCopier"]

SMALL = 4 << 20  # bytes
STAGED = 16 << 20  # bytes that are copied from a device at once


class HostCopier:
    """Copies tensors to host memory.

    The driver of a GPU lets no other thread launch anything while it copies to memory that is not
    pinned. So a large tensor goes through a small pinned buffer, piece by piece.
    """

    def __call__(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Return a copy of a tensor in host memory.

        Args:
            tensor: a tensor on any device.
            buffer: an earlier copy, which is overwritten if it fits.
        """
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            if tensor.nbytes < SMALL:
                return tensor.to("cpu", copy=True)
            # NumPy requests large pages and torch does not, which halves the time of a first copy.
            memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
            buffer = memory.view(tensor.dtype).view(tensor.shape)
        is_plain = buffer.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if tensor.is_cuda and tensor.nbytes >= SMALL and is_plain:
            return self._copy_by_pieces(tensor, buffer)
        return buffer.copy_(tensor)

    def _copy_by_pieces(self, tensor: Tensor, buffer: Tensor) -> Tensor:
        to, event = buffer.view(-1).view(torch.uint8), torch.cuda.Event(blocking=True)
        for piece, target in zip(
            tensor.contiguous().view(-1).view(torch.uint8).split(STAGED),
            to.split(STAGED),
            strict=True,
        ):
            staged = self._pinned[: piece.numel()]
            staged.copy_(piece, non_blocking=True)
            event.record(torch.cuda.current_stream(tensor.device))
            event.synchronize()
            target.copy_(staged)
        return buffer

    @functools.cached_property
    def _pinned(self) -> Tensor:
        return torch.empty(STAGED, dtype=torch.uint8, pin_memory=True)
