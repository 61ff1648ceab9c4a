"""Sharpness-aware minimization: the gradient of the worst weights nearby."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fnloop._core.middleware import Middleware, middleware
from fnloop._core.rng import isolated
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.engine import engine_of
from fnloop._step.gradients import restore_gradients, stash_gradients, total_norm
from fnloop._step.update import skip_together

__all__ = ["sam"]

SMALLEST = 1e-12  # is added to the norm of the gradient


@middleware("gradient")
def sam(rho: float = 0.05) -> Middleware:
    """Update with the gradient at ``w + rho × g / |g|``, where g is the gradient at the weights w.

    Forward and backward run twice, on the same batch and with the same random draws. The loss and
    the metrics are those of the first pass. Buffers, such as running statistics, are those that the
    first pass leaves. The weights are restored exactly before the optimizer's step.

    Order: ``pipeline(accumulate(4), sam())`` takes the gradient of the whole window at both places.
    ``pipeline(sam(), accumulate(4))`` does so for each micro-batch, then averages. List
    ``amp("fp16")`` before it, and ``clip`` after it.

    Args:
        rho: the distance to the place where the gradient is taken, above 0.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: rho is not a number.
        ValueError: rho is not above 0. When composing: ``cuda_graph`` is listed too.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def square(model, batch):                  # the gradient is w
        ...     return (model.w * batch).square().mean() / 2
        >>> step = fl.pipeline(sam(0.5))(square)
        >>> state, out = step(toy(w=2.0, lr=0.1), torch.ones(1))
        >>> round(state.model.w.item(), 4), out.loss.item()     # 2 - 0.1 * (2 + 0.5)
        (1.75, 2.0)

    Source: Foret et al., 2021, https://arxiv.org/abs/2010.01412
    """
    meaning = "the distance to where the gradient is taken"
    checks.number("sam", "rho", rho, meaning, above=0, wrong_type=TypeError)

    def gradient(step: Step) -> Step:
        def sharpened(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            stashed, repeat = stash_gradients(state), engine_of(state).mark_draws()
            with isolated(state.backend.device):
                new, out = step(state, batch)
            out = skip_together(new, out)
            if out.skip is None:
                repeat()
                again = _pass_nearby(step, state, batch, rho)
                out = out if again.skip is None else attrs.evolve(out, skip=again.skip)
            restore_gradients(state, stashed)
            return new, out

        return sharpened

    return Middleware("sam", gradient=gradient, check=_check)


def _check(listed: Sequence[Middleware]) -> None:
    for member in listed:
        if member.name == "cuda_graph":
            raise ValueError(
                f"{member!r} cannot capture sam, which repeats the random draws of a pass: leave "
                "one out"
            )


def _pass_nearby(step: Step, state: TrainState, batch: Batch, rho: float) -> Output:
    """Leave the gradient at the worst weights within rho, and the weights as they were."""
    __tracebackhide__ = True
    moved = [p for p in parameters(state) if p.grad is not None]
    buffers = [*state.model.buffers()]
    with torch.no_grad():
        kept: list[Tensor] = [t.detach().clone() for t in (*moved, *buffers)]
        norm = total_norm([p.grad for p in moved], 2.0)
        for p in moved:
            p.add_(p.grad * (rho / (norm + SMALLEST)).to(p))
            p.grad = None
    try:
        return skip_together(state, step(state, batch)[1])
    finally:
        with torch.no_grad():
            for tensor, value in zip((*moved, *buffers), kept, strict=True):
                tensor.copy_(value)
