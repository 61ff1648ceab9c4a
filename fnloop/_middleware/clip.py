"""Gradient clipping, by norm and by value, and the norm alone.

It acts once per update, or once per micro-batch if it is listed before ``accumulate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import utils

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.metrics import Mean
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._display import checks
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.gradients import total_norm
from fnloop._step.update import report

__all__ = ["clip", "clip_value", "grad_norm"]


@middleware("gradient")
def clip(max_norm: float, norm_type: float = 2.0) -> Middleware:
    """Scale the gradient so that its norm, over all parameters together, is at most ``max_norm``.

    The norm before clipping becomes the metric "grad_norm" (``history["train/grad_norm"]``).

    Args:
        max_norm: the largest norm, above 0. ``inf`` does not clip: it only measures, always the
            gradient of the whole update.
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is not above 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> out.metrics["grad_norm"].compute(), round(state.model.w.item(), 4)
        (4.0, -1.0)

    Source: Pascanu, Mikolov and Bengio, 2013, https://arxiv.org/abs/1211.5063
    """
    _check_limit("clip", "max_norm", max_norm, "where inf switches clipping off")
    _check_limit("clip", "norm_type", norm_type, "the p of the norm")

    return Middleware("clip", gradient=_norm_wrap("clip", max_norm, norm_type))


@middleware("gradient")
def grad_norm(norm_type: float = 2.0) -> Middleware:
    """Report the norm of the gradient, over all parameters together, as the metric "grad_norm".

    Nothing is changed. It is the gradient of the whole update, and the mean over the updates of a
    record. ``clip`` reports the same before clipping, so list one of the two.

    Args:
        norm_type: the p of the norm, above 0; ``inf`` is the largest magnitude of an element.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the argument is not a number.
        ValueError: it is not above 0. When composing: ``clip`` is listed too.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(grad_norm())(toy_loss)(toy(), torch.tensor([-4.0]))
        >>> out.metrics["grad_norm"].compute(), state.model.w.item()
        (4.0, 4.0)
    """
    _check_limit("grad_norm", "norm_type", norm_type, "the p of the norm")

    def check(listed: Sequence[Middleware]) -> None:
        if clips := [member for member in listed if member.name == "clip"]:
            raise ValueError(
                f"{clips[0]!r} reports the metric 'grad_norm' already, the norm before clipping: "
                "leave grad_norm out"
            )

    wrap = _norm_wrap("grad_norm", math.inf, norm_type)
    return Middleware("grad_norm", gradient=wrap, check=check)


def _norm_wrap(owner: str, max_norm: float, norm_type: float) -> Wrap:
    """Return the wrap that reports the norm of the gradient, and clips it unless that is inf."""

    def gradient(step: Step) -> Step:
        def clipped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None:
                return state, out
            params = [p for p in parameters(state) if p.grad is not None]
            norm = total_norm([p.grad for p in params], norm_type)
            if not math.isinf(max_norm):
                utils.clip_grads_with_norm_(params, max_norm, norm)
            return state, report(out, {"grad_norm": Mean(norm, 1)}, owner)

        return clipped

    return commutes_with_scaling(gradient) if math.isinf(max_norm) else gradient


@middleware("gradient")
def clip_value(limit: float) -> Middleware:
    """Clamp every element of the gradient to [-limit, limit].

    Args:
        limit: the largest magnitude, above 0; ``inf`` changes nothing.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: the limit is not a number.
        ValueError: the limit is not above 0.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state, out = fl.pipeline(clip_value(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -1.0
    """
    _check_limit("clip_value", "limit", limit, "where inf switches clipping off")
    if math.isinf(limit):
        return Middleware("clip_value")

    def gradient(step: Step) -> Step:
        def clamped(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            grads = [local_part(p.grad) for p in parameters(state) if p.grad is not None]
            if out.skip is None and grads:
                with torch.no_grad():  # with create_graph the gradients have a graph
                    torch_compat.foreach_clamp_min_(grads, -limit)
                    torch_compat.foreach_clamp_max_(grads, limit)
            return state, out

        return clamped

    return Middleware("clip_value", gradient=gradient)


def _check_limit(owner: str, name: str, value: float, meaning: str) -> None:
    checks.number(owner, name, value, meaning, above=0, finite=False, wrong_type=TypeError)
