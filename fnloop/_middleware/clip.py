"""Gradient clipping, by norm and by value, once per update (or per micro-batch, if listed before ``accumulate``)."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import full, local_part
from fnloop._core.metrics import Mean
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.update import report

__all__ = ["clip", "clip_value"]


@middleware("gradient")
def clip(max_norm: float, norm_type: float = 2.0) -> Any:
    """Scale the gradient so that its norm, over all parameters together, is at most ``max_norm``.

    The norm before clipping becomes the metric "grad_norm" (``history["train/grad_norm"]``).

    Args:
        max_norm: the largest norm, above 0; ``inf`` only measures, and always the gradient of the whole update.
        norm_type: which norm; ``inf`` for the largest element.

    Returns:
        A middleware of the gradient ring.

    Raises:
        ValueError: the norm isn't above 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> out.metrics["grad_norm"].compute(), round(state.model.w.item(), 4)
        (4.0, -1.0)

    Source: Pascanu, Mikolov and Bengio, 2013, https://arxiv.org/abs/1211.5063
    """
    _check_limit("clip", max_norm, "max_norm")
    _check_limit("clip", norm_type, "norm_type")

    def gradient(step: Step) -> Step:
        def clipped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None:
                return state, out
            params = [p for p in parameters(state) if p.grad is not None]
            norm = _norm([p.grad for p in params], norm_type)
            if not math.isinf(max_norm):
                utils.clip_grads_with_norm_(params, max_norm, norm)
            return state, report(out, {"grad_norm": Mean(norm, 1)}, "clip")

        return clipped

    return commutes_with_scaling(gradient) if math.isinf(max_norm) else gradient


def _norm(grads: list[Any], norm_type: float) -> Tensor:
    """Return the norm of all gradients together; of those that are sharded, over all processes."""
    sharded = [grad for grad in grads if local_part(grad) is not grad]
    if not sharded:
        return utils.get_total_norm(grads, norm_type)
    norms = [full(utils.get_total_norm(sharded, norm_type))]
    if len(sharded) < len(grads):
        norms.append(
            utils.get_total_norm([grad for grad in grads if local_part(grad) is grad], norm_type)
        )
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


@middleware("gradient")
def clip_value(limit: float) -> Any:
    """Clamp every element of the gradient to [-limit, limit].

    Args:
        limit: the largest magnitude, above 0; ``inf`` changes nothing.

    Returns:
        A middleware of the gradient ring.

    Raises:
        ValueError: the limit isn't above 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip_value(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -1.0
    """
    _check_limit("clip_value", limit, "limit")
    if math.isinf(limit):
        return Middleware("clip_value")

    def gradient(step: Step) -> Step:
        def clamped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            grads = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
            if out.skip is None and grads:
                torch_compat.foreach_clamp_min_(grads, -limit)
                torch_compat.foreach_clamp_max_(grads, limit)
            return state, out

        return clamped

    return gradient


def _check_limit(name: str, value: Any, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} expects {what} as a number > 0; got {checks.described(value)}")
    if not float(value) > 0:
        raise ValueError(
            f"{name} expects {what} > 0; got {value}. To switch it off, leave it out, or write {name}(float('inf'))"
        )
