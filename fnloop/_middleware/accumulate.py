"""Gradient accumulation: n batches of b make the same update as one batch of n·b.

Each micro-batch counts by its weight, the number of items that its loss is the mean of, so the gradient is that of the
mean over all items of the window: over a ragged last window and over unequal token counts too. Two paths:

* Where nothing but linear steps stands between it and backward, gradients add up in ``.grad`` as autograd does.
* Where another gradient middleware is inside (``pipeline(clip(1.0), accumulate(4))``), each micro-batch's gradient is
  taken out behind it, and the weighted mean is put back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from fnloop._backend.collectives import any_rank
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Output, Step
from fnloop._display import checks
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.distributed import engine_of
from fnloop._step.weighted_sum import WeightedSum, divide

__all__ = ["accumulate"]


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
        TypeError: n is not an int.
        ValueError: n is below 1.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(accumulate(2))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([1.0]), torch.tensor([2.0])])
        >>> state.model.w.item(), state.step        # the gradient is the mean, 1.5
        (-1.5, 1)
    """
    checks.integer(
        "accumulate", "n", n, "the batches per update (1 changes nothing)", wrong_type=TypeError
    )
    if n == 1:
        return Middleware("accumulate")

    def in_place(backward: Any) -> Step:
        def accumulated(state: TrainState, window: Sequence[Any]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n)
            return backward.over(state, window)

        return accumulated

    def averaged(step: Step) -> Step:
        def averaged(state: TrainState, window: Sequence[Any]) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            _check_window(window, n)
            joint, params, total = engine_of(state), parameters(state), WeightedSum()
            counted = (
                total if joint is None else WeightedSum()
            )  # what gradients weigh: the items of all processes
            sums: list[Tensor | None] = [None] * len(params)
            for batch in window:
                state, out = step(state, batch)
                if joint is not None and any_rank(out.skip is not None):
                    out = attrs.evolve(out, skip=out.skip or "left out by another process")
                whole = out if joint is None else attrs.evolve(out, weight=joint.items)
                if out.skip is None:
                    share = counted.share(whole)
                    grads = [
                        p.grad if joint is None or p.grad is None else p.grad.clone()
                        for p in params
                    ]  # not DDP's buckets
                    sums = [_plus(s, grad, share) for s, grad in zip(sums, grads, strict=True)]
                for p in params:
                    p.grad = None
                total.add(out)
                if counted is not total:
                    counted.add(whole)
            if counted.weight is None:
                return state, out
            for p, grad in zip(params, sums, strict=True):
                p.grad = grad
            divide(sums, counted.weight, counted.reference)
            return state, total.output()

        return averaged

    def gradient(step: Any) -> Step:
        return (
            step.within(commutes_with_scaling(in_place))
            if hasattr(step, "within")
            else averaged(step)
        )

    return Middleware("accumulate", gradient=gradient, window=n)


def _plus(so_far: Tensor | None, grad: Tensor | None, share: Any) -> Tensor | None:
    if grad is None:
        return so_far
    part = grad if share is None else grad * share
    return part if so_far is None else so_far + part


def _check_window(window: Any, n: int) -> None:
    if isinstance(window, Tensor | Mapping | str | bytes) or not isinstance(window, Sequence):
        raise TypeError(
            f"with accumulate({n}) a step takes a sequence of up to {n} batches; got one {type(window).__name__}. "
            f"Write step(state, [batch])"
        )
    if not 0 < len(window) <= n:
        raise ValueError(
            f"with accumulate({n}) a step takes 1 to {n} batches at once; got {len(window)}"
        )
