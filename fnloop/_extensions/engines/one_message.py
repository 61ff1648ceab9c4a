"""The average of small gradients over processes, in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnloop.extend import torch_compat

# DDP's first bucket is as large. What fits into it is sent after backward there too.
LARGEST = 1 << 20  # bytes
_SPARSE = (nn.Embedding, nn.EmbeddingBag)


def fits(model: nn.Module, params: Sequence[Tensor]) -> bool:
    """Return whether the gradients of all parameters can be sent as one tensor from the host.

    Args:
        model: the model.
        params: those that are trained, of the model and beside it.
    """
    size = sum(p.numel() * p.element_size() for p in params)
    kinds = {(p.device.type, p.dtype, p.layout) for p in params}
    dense = kinds <= {("cpu", torch.float32, torch.strided)}
    dense = dense or kinds == {("cpu", torch.float64, torch.strided)}
    sparse = any(isinstance(each, _SPARSE) and each.sparse for each in model.modules())
    return size <= LARGEST and dense and not sparse


class OneMessage:
    """Averages the gradients of a few small parameters, when backward is done.

    DDP would send them in one bucket, at the same moment. Its hooks and its forward cost more than
    the copies here. The arithmetic is the same: each is divided by the number of processes, and
    then they are summed. A parameter that no process has used is left without a gradient, as in a
    single process.

    Args:
        params: the parameters, the same in every process.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params, self._part = params, 1 / dist.get_world_size()
        sizes = [1, len(params), *(p.numel() for p in params)]
        self._flat = torch.empty(sum(sizes), dtype=params[0].dtype)
        self._count, self._used, *parts = self._flat.split(sizes)
        self._views = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]

    def average_(self, count: int) -> float:
        """Replace the gradients by their means, in place. Return the mean of the counts.

        Args:
            count: a number of this process.
        """
        with torch.no_grad():
            self._used.fill_(1)
            unused = [(p, i) for i, p in enumerate(self.params) if p.grad is None]
            for p, i in unused:
                p.grad, self._used[i] = torch.zeros_like(p), 0
            gradients = [p.grad for p in self.params if p.grad is not None]  # all have one
            torch_compat.foreach_copy_(self._views, gradients)
            self._count.fill_(count)
            dist.all_reduce(self._flat.mul_(self._part))
            torch_compat.foreach_copy_(gradients, self._views)
            for p, i in unused:
                if not self._used[i]:
                    p.grad = None
        return self._count.item()
