"""Gradient accumulation: n batches of b make the same update as one batch of n·b.

Each micro-batch counts by its weight, the number of items that its loss is the mean of, so the gradient is that of the
mean over all items of the window: over a ragged last window and over unequal token counts too. Two paths:

* Where nothing but linear steps stands between it and backward, gradients add up in ``.grad`` as autograd does.
  Backward starts from loss × weight / (weight of the first), and one division at the end makes the mean.
* Where another gradient middleware is inside (``pipeline(clip(1.0), accumulate(4))``), each micro-batch's gradient is
  taken out behind it, and the weighted mean is put back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnloop._metrics import combine
from fnloop._pipeline import at_least_float32, linear
from fnloop._state import TrainState, parameters
from fnloop._types import Metric, Middleware, Output, Step, middleware

__all__ = ["accumulate"]

Weight = int | float | Tensor


@middleware("gradient")
def accumulate(n: int) -> Any:
    """Make one update from up to n batches, weighted by their items.

    A step with it takes a sequence of up to n batches; ``fit`` groups the loader into such windows. The last window
    of an epoch may be shorter and is weighted rightly. The reported loss is the mean over the window's items,
    whatever n is.

    Order: ``pipeline(accumulate(4), clip(1.0))`` clips once per update; ``pipeline(clip(1.0), accumulate(4))`` clips
    every micro-batch, then averages. With ``clip_value(1)`` and the gradients 4 and -1, the first gives 1.0 (the
    mean, 1.5, clipped), the second 0.0 (the mean of 1 and -1).

    Args:
        n: batches per update, at least 1; 1 changes nothing.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: n is no int.
        ValueError: n is below 1.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(accumulate(2))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([1.0]), torch.tensor([2.0])])
        >>> state.model.w.item(), state.step        # the gradient is the mean, 1.5
        (-1.5, 1)
    """
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"accumulate expects the number of batches per update, an int; got {n!r} ({type(n).__name__})")
    if n < 1:
        raise ValueError(f"accumulate expects n >= 1, got {n}. To switch accumulation off, write accumulate(1) or leave it out")
    if n == 1:
        return Middleware("accumulate")

    def in_place(backward: Any) -> Step:
        def accumulated(state: TrainState, window: Sequence[Any]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n)
            total = _Total()
            for batch in window:
                state, out = backward(state, batch, total.share)
                total.add(out)
            if total.weight is None:
                return state, out
            _divide([p.grad for p in parameters(state) if p.grad is not None], total.weight, total.reference)
            return state, total.output()

        return accumulated

    def averaged(step: Step) -> Step:
        def averaged(state: TrainState, window: Sequence[Any]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n)
            total, params = _Total(), parameters(state)
            sums: list[Tensor | None] = [None] * len(params)
            for batch in window:
                state, out = step(state, batch)
                if out.skip is None:
                    share = total.share(out)
                    sums = [_plus(s, p.grad, share) for s, p in zip(sums, params, strict=True)]
                for p in params:
                    p.grad = None
                total.add(out)
            if total.weight is None:
                return state, out
            for p, grad in zip(params, sums, strict=True):
                p.grad = grad
            _divide([grad for grad in sums if grad is not None], total.weight, total.reference)
            return state, total.output()

        return averaged

    def gradient(step: Any) -> Step:
        return step.within(linear(in_place)) if hasattr(step, "within") else averaged(step)

    return Middleware("accumulate", gradient=gradient, window=n)


class _Total:
    """The running sum of a window: what its batches weigh, their losses and metrics."""

    def __init__(self) -> None:
        self.weight: Weight | None = None
        self.reference: Weight | None = None  # the first weight: shares are relative to it, to keep fp16 in its range
        self.loss: Tensor | None = None
        self.last: Output | None = None
        self.metrics: Mapping[str, Metric] = {}

    def share(self, out: Output) -> Weight | None:
        """Return weight / (weight of the first), or None where that is 1."""
        weight = out.weight
        if self.reference is None:
            self.reference = max(weight, 1) if not isinstance(weight, Tensor) else _floating(weight, out.loss).clamp(min=1)
        if not isinstance(weight, Tensor):
            return None if weight is self.reference or weight == self.reference else weight / self.reference
        return _floating(weight, out.loss) / self.reference

    def add(self, out: Output) -> None:
        """Count a micro-batch; one that is skipped is left out of the window."""
        __tracebackhide__ = True
        if out.skip is not None:
            return
        loss, weight = out.loss, out.weight
        if isinstance(weight, Tensor):
            weight = _floating(weight, loss)
        if self.loss is None or self.weight is None:
            self.loss, self.weight = at_least_float32(loss) * weight, weight
        elif isinstance(weight, Tensor):
            self.loss, self.weight = self.loss + at_least_float32(loss) * weight, self.weight + weight
        else:
            self.loss, self.weight = self.loss.add_(loss, alpha=weight), self.weight + weight
        if out.metrics:
            self.metrics = combine(self.metrics, out.metrics)
        self.last = out

    def output(self) -> Output:
        assert self.loss is not None and self.last is not None and self.weight is not None
        return Output(self.loss / self.weight, self.weight, self.last.aux, self.metrics)  # type: ignore[arg-type]


def _floating(weight: Tensor, loss: Tensor) -> Tensor:
    """Return a count in a dtype that holds it exactly beside the loss."""
    return weight.to(torch.promote_types(loss.dtype, torch.float32))


def _plus(so_far: Tensor | None, grad: Tensor | None, share: Weight | None) -> Tensor | None:
    if grad is None:
        return so_far
    part = grad if share is None else grad * share
    return part if so_far is None else so_far + part


def _divide(grads: list[Tensor], weight: Weight, reference: Weight | None) -> None:
    """Turn the sum of weight/reference × gradient into the mean, in place."""
    if not grads:
        return
    divisor: Any = weight / reference  # type: ignore[operator]
    if isinstance(divisor, Tensor):
        torch._foreach_div_(grads, torch.where(divisor == 0, 1.0, divisor))  # no item at all: the gradient is zero
    elif divisor in (0, 1):
        return
    elif math.frexp(divisor)[0] == 0.5:  # a power of two: multiplying is exact too, and faster
        torch._foreach_mul_(grads, 1 / divisor)
    else:
        torch._foreach_div_(grads, divisor)


def _check_window(window: Any, n: int) -> None:
    if isinstance(window, Tensor | Mapping | str) or not isinstance(window, Sequence):
        raise TypeError(
            f"with accumulate({n}) a step takes a sequence of up to {n} batches; got one {type(window).__name__}. "
            f"Write step(state, [batch])"
        )
    if not 0 < len(window) <= n:
        raise ValueError(f"with accumulate({n}) a step takes 1 to {n} batches at once; got {len(window)}")
