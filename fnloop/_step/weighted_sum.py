"""The weighted mean over the batches of a window: of losses, metrics and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.metrics import combine
from fnloop._core.types import Metric, Output

__all__ = [
    "Weight",
    "WeightedSum",
    "at_least_float32",
    "divide",
    "in_wide_dtype",
    "valid_weight",
    "weight_on_device",
]

Weight = int | float | Tensor


class WeightedSum:
    """The running sum of a window: the weights of its batches, their losses and metrics.

    Attributes:
        weight: the sum of the weights of the batches that were added; None before the first.
        reference: the first weight. Batches count relative to it, which keeps fp16 in its range.
    """

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = None
        self._loss: Tensor | None = None
        self._last: Output | None = None
        self._skipped: Output | None = None
        self._metrics: Mapping[str, Metric] = {}
        # The sums of the weights on the device, as given and as counted: equal if all are valid.
        self._checked: tuple[Tensor, Tensor] | None = None
        self._latest: tuple[Output | None, Weight] = (None, 0)

    @property
    def is_empty(self) -> bool:
        """Whether no batch was added."""
        return self.weight is None

    def relative_weight(self, out: Output) -> Weight | None:
        """Return weight / reference, or None where that is 1."""
        weight = self._weight_of(out)
        if self.reference is None:
            self.reference = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        if isinstance(self.reference, Tensor) or isinstance(weight, Tensor):
            return weight / self.reference
        if weight is self.reference or weight == self.reference:
            return None
        return weight / self.reference

    def _weight_of(self, out: Output) -> Weight:
        """Return the weight of a micro-batch.

        A tensor that is NaN, infinite or negative counts as 0. That is remembered on the device.
        """
        if not isinstance(out.weight, Tensor):
            return out.weight
        if self._latest[0] is not out:
            given = in_wide_dtype(out.weight, out.loss)
            valid = valid_weight(given)
            if self._checked is None:
                self._checked = given, valid
            else:
                self._checked = self._checked[0] + given, self._checked[1] + valid
            self._latest = out, valid
        return self._latest[1]

    def add(self, out: Output) -> None:
        """Count a micro-batch, unless it is skipped."""
        __tracebackhide__ = True
        if out.skip is not None:
            self._skipped = out
            return
        loss, weight = out.loss.detach(), self._weight_of(out)
        if self._loss is None or self.weight is None:
            self._loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self._loss = self._loss + at_least_float32(loss) * weight
            self.weight = self.weight + weight
        else:
            self._loss, self.weight = self._loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self._metrics = combine(self._metrics, out.metrics)
        self._last = out

    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        """Turn the sum of relative weight × gradient into the mean, in place."""
        if self.weight is not None:
            divide(gradients, self.weight, self.reference)

    def output(self) -> Output:
        """Return the mean loss and the combined metrics, or the skip of a window without any."""
        if self._loss is None or self._last is None or self.weight is None:
            assert self._skipped is not None, "nothing was added"
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach())
        weight: int | Tensor
        if isinstance(self.weight, Tensor):
            weight, items = self.weight, torch.where(self.weight == 0, 1, self.weight)
        else:
            weight = items = int(self.weight)
            items = items or 1
        if self._checked is not None:
            given, valid = self._checked
            weight = torch.where(given == valid, weight, math.nan)
        return Output(self._loss / items, weight, self._last.aux, self._metrics)


def weight_on_device(out: Output, weight: Weight | None = None) -> Tensor:
    """Return a weight, by default that of the output, as a float64 tensor on the loss's device."""
    given = torch.as_tensor(out.weight if weight is None else weight, device=out.loss.device)
    wide = torch.float32 if given.device.type == "mps" else torch.float64
    return valid_weight(given.detach().to(wide))


def valid_weight(weight: Tensor) -> Tensor:
    """Return a weight, or 0 where it is NaN, infinite or negative."""
    return torch.nan_to_num(weight, 0.0, 0.0, 0.0).clamp_(min=0)


def in_wide_dtype(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in the loss's dtype, at least float32, which holds it exactly."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def divide(
    gradients: Iterable[Tensor | None], weight: Weight, reference: Weight | None = None
) -> None:
    """Divide gradients by weight / reference, in place."""
    divisor = weight if reference is None else weight / reference
    if not isinstance(divisor, Tensor) and divisor in (0, 1):
        return
    local = [local_part(gradient) for gradient in gradients if gradient is not None]
    if not local:
        return
    if isinstance(divisor, Tensor):
        # Without any item the gradient is zero, and stays so.
        torch_compat.foreach_div_(local, torch.where(divisor == 0, 1.0, divisor))
    elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        torch_compat.foreach_mul_(local, 1 / divisor)
    else:
        torch_compat.foreach_div_(local, divisor)


def at_least_float32(loss: Tensor) -> Tensor:
    """Return a loss in float32 if its dtype is narrower."""
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
