"""The weighted mean over the batches of a window."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.metrics import combine
from fnloop._core.types import Metric, Output
from fnloop._step.distributed import Weight

__all__ = [
    "WeightedSum",
    "at_least_float32",
    "divide",
    "in_wide_dtype",
    "valid_weight",
    "weight_on_device",
]


class WeightedSum:
    """The running sum of a window: what its batches weigh, their losses and metrics."""

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = (
            None  # the first weight: shares are relative to it, to keep fp16 in its range
        )
        self.loss: Tensor | None = None
        self.last: Output | None = None
        self.metrics: Mapping[str, Metric] = {}
        self._sums: tuple[Tensor, Tensor] | None = (
            None  # of the tensors, as given and as counted: the same if all were right
        )
        self._weighed: tuple[Output | None, Weight] = (None, 0)

    def share(self, out: Output) -> Weight | None:
        """Return weight / reference, or None where that is 1."""
        weight = self._weight(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        return (
            None
            if weight is self.reference or weight == self.reference
            else weight / self.reference
        )

    def _weight(self, out: Output) -> Weight:
        """Return what a micro-batch weighs: 0 if its tensor is NaN, infinite or negative, which is remembered on the device."""
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._weighed[0] is not out:
            given = in_wide_dtype(out.weight, out.loss)
            weight = valid_weight(given)
            self._sums = (
                (given, weight)
                if self._sums is None
                else (self._sums[0] + given, self._sums[1] + weight)
            )
            self._weighed = out, weight
        return self._weighed[1]

    def add(self, out: Output) -> None:
        """Count a micro-batch; one that is skipped is left out of the window."""
        __tracebackhide__ = True
        if out.skip is not None:
            return
        loss, weight = out.loss.detach(), self._weight(out)
        if self.loss is None or self.weight is None:
            self.loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self.loss, self.weight = (
                self.loss + at_least_float32(loss) * weight,
                self.weight + weight,
            )
        else:
            self.loss, self.weight = self.loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self.metrics = combine(self.metrics, out.metrics)
        self.last = out

    def output(self) -> Output:
        assert self.loss is not None and self.last is not None and self.weight is not None
        weight: Any = self.weight
        items = torch.where(weight == 0, 1, weight) if isinstance(weight, Tensor) else weight or 1
        reported = (
            weight
            if self._sums is None
            else torch.where(self._sums[0] == self._sums[1], weight, math.nan)
        )
        return Output(self.loss / items, reported, self.last.aux, self.metrics)


def weight_on_device(out: Output, weight: Any = None) -> Tensor:
    """Return a weight, of a batch by default, as a tensor on the device; it may be one in another process, or an int."""
    weight = torch.as_tensor(
        out.weight if weight is None else weight, device=out.loss.device
    ).detach()
    return valid_weight(weight.to(torch.float32 if weight.device.type == "mps" else torch.float64))


def valid_weight(weight: Tensor) -> Tensor:
    """Return a weight, or 0 where it is NaN, infinite or negative."""
    return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)


def in_wide_dtype(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in a dtype that holds it exactly beside the loss."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def divide(grads: Sequence[Tensor | None], weight: Weight, reference: Weight | None = None) -> None:
    """Turn the sum of weight/reference × gradient into the mean, in place."""
    local = [local_part(grad) for grad in grads if grad is not None]
    if not local:
        return
    divisor: Any = weight if reference is None else weight / reference
    if isinstance(divisor, Tensor):
        torch_compat.foreach_div_(
            local, torch.where(divisor == 0, 1.0, divisor)
        )  # no item at all: the gradient is zero
    elif divisor in (0, 1):
        return
    elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        torch_compat.foreach_mul_(local, 1 / divisor)
    else:
        torch_compat.foreach_div_(local, divisor)


def at_least_float32(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
