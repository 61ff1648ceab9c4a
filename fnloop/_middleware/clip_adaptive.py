"""Adaptive gradient clipping: by the norm of the weights, unit by unit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fnloop._backend.fsdp import combined, local_part
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.selectors import Selectors, check_selectors
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.chosen import Chosen
from fnloop._step.gradients import nan_unless_finite

__all__ = ["clip_adaptive"]

SMALLEST_WEIGHT = 1e-3  # a norm of weights counts as at least this, so that zeros can grow
SMALLEST_GRADIENT = 1e-6  # a norm of gradients is divided by as at least this


@middleware("gradient")
def clip_adaptive(ratio: float = 0.01, only: Selectors | None = None) -> Middleware:
    """Scale each unit's gradient so that its norm is at most ``ratio`` × the norm of its weights.

    A unit is a row of a matrix, an output channel of a convolution, or a whole vector such as a
    bias. The norm of its weights counts as at least 0.001. As in ``clip``, a unit whose gradient
    has an infinite or NaN norm becomes NaN.

    The authors leave out the last linear layer: ``only=lambda name, p: not
    name.startswith("head.")``.

    Args:
        ratio: the largest norm of a gradient, as a part of the norm of the weights; above 0.
            ``inf`` changes nothing.
        only: what it is for, as in ``clip``. None: all that is updated.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the ratio is not a number, or ``only`` is not a selector.
        ValueError: the ratio is not above 0. When a run starts: ``only`` is for nothing in the
            model.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(clip_adaptive(0.5))(toy_loss)
        >>> state, out = step(toy(w=2.0), torch.tensor([4.0]))      # 4 is clipped to 0.5 * 2
        >>> state.model.w.item()
        1.0

    Source: Brock et al., 2021, https://arxiv.org/abs/2102.06171
    """
    meaning = "a part of the norm of the weights, where inf switches clipping off"
    checks.number(
        "clip_adaptive", "ratio", ratio, meaning, above=0, finite=False, wrong_type=TypeError
    )
    selectors = None if only is None else check_selectors("clip_adaptive", only)
    if math.isinf(ratio):
        return Middleware("clip_adaptive")

    def gradient(step: Step) -> Step:
        chosen = Chosen("clip_adaptive", selectors)

        def clipped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is None:
                with torch.no_grad():  # with create_graph the gradients have a graph
                    for p in chosen.of(state):
                        if p.grad is not None:
                            _clip_(p.grad, p, ratio)
            return state, out

        return clipped

    def check(state: TrainState, listed: object) -> None:
        Chosen("clip_adaptive", selectors).check(state)

    return Middleware(
        "clip_adaptive", gradient=gradient, check_state=None if selectors is None else check
    )


def _clip_(gradient: Tensor, weights: Tensor, ratio: float) -> None:
    most = _norms(weights).clamp(min=SMALLEST_WEIGHT).mul_(ratio)
    norms, mine = nan_unless_finite(_norms(gradient)), local_part(gradient)
    scaled = mine * (most / norms.clamp(min=SMALLEST_GRADIENT))
    mine.copy_(torch.where(norms < most, mine, scaled))


def _norms(values: Tensor) -> Tensor:
    """Return the norm of each unit that this process has; of a vector, one norm of all."""
    if values.ndim <= 1:
        return combined(torch.linalg.vector_norm(values))
    dims = tuple(range(1, values.ndim))
    return combined(torch.linalg.vector_norm(values, dim=dims, keepdim=True))
