"""Mixed precision: autocast, and for fp16 a loss scale.

The scale multiplies what backward starts from, never the reported loss. Gradients are unscaled once per window, before
any other gradient middleware sees them, whether ``amp`` is listed before or behind ``accumulate``. An update whose
gradients overflowed is skipped everywhere: parameters, step, schedules and averages stay as they are.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.collectives import all_reduce_max_tensor
from fnloop._backend.fsdp import local_part
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step
from fnloop._display.checks import describe, integer, number
from fnloop._step.backward import commutes_with_scaling
from fnloop._step.host import host_decision

__all__ = ["amp"]

SMALLEST = 2.0**-24  # the smallest number of fp16: a loss that overflows at this scale always does
LARGEST = 2.0**127
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@attrs.define
class LossScale:
    """What ``amp("fp16")`` keeps, changed in place: the scale, on the device, and how many updates have gone well with it."""

    scale: Tensor
    streak: int = 0


@middleware("forward")
def amp(precision: str | None, *, init_scale: float = 65536.0, growth_interval: int = 2000) -> Any:
    """Run the loss function under autocast.

    List it first. With "fp16" the loss is scaled by a number that halves when a gradient overflows (that update is
    skipped) and doubles after ``growth_interval`` updates without; that costs the one host read per update of all
    middleware, as step counter and schedules depend on it. "bf16" needs none of it.

    Args:
        precision: "bf16", "fp16", or None, which changes nothing.
        init_scale: the first loss scale, for "fp16", from 2**-24 to 2**127.
        growth_interval: updates without overflow after which the scale doubles, for "fp16".

    Returns:
        A middleware of the forward ring; for "fp16" of the gradient and the step ring too.

    Raises:
        ValueError: there is no such precision, or a setting is out of its range. When composing: "fp16" is listed behind a
            middleware that would see scaled gradients.

    Example:
        >>> import fnloop as fl
        >>> fl.pipeline(amp("bf16"), fl.accumulate(4), fl.clip(1.0))
        pipeline(amp('bf16'), accumulate(4), clip(1.0))

    Source: Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740; the defaults are those of torch.amp.GradScaler.
    """
    if precision is not None and (not isinstance(precision, str) or precision not in _DTYPES):
        raise ValueError(f'amp expects "bf16", "fp16" or None; got {describe(precision)}')
    number("amp", "init_scale", init_scale, "the first loss scale", least=SMALLEST, most=LARGEST)
    integer(
        "amp",
        "growth_interval",
        growth_interval,
        "the updates without overflow after which the scale doubles",
    )
    if precision is None:
        return Middleware("amp")
    dtype = _DTYPES[precision]

    def forward(step: Step) -> Step:
        def autocast(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with torch.autocast(state.backend.device.type, dtype):
                return step(state, batch)

        return autocast

    if precision == "bf16":
        return Middleware("amp", forward=forward)

    def unscale(step: Step) -> Step:
        def unscaled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is not None:
                return state, out
            overflowed = _unscale(
                [p.grad for p in parameters(state) if p.grad is not None], _scale(state)
            )
            return host_decision(state, out, overflowed, judge)

        return unscaled

    def judge(state: TrainState, overflowed: bool) -> str | None:
        now: LossScale = state.slots["amp"]
        if not overflowed:
            return None
        reason = f"amp: a gradient overflowed at loss scale {now.scale:g}"
        if now.scale < SMALLEST:
            raise FloatingPointError(
                f"{reason}: the loss itself is not finite. Look at it with amp(None)"
            )
        now.scale.div_(2)
        now.streak = 0
        return reason

    def gradient(step: Any) -> Step:
        if not hasattr(step, "insert_inside"):
            raise ValueError(
                'amp("fp16") is listed behind a middleware that would see scaled gradients. List it first: '
                'pipeline(amp("fp16"), ...)'
            )
        return commutes_with_scaling(unscale)(
            step.insert_inside(lambda backward: backward.scaled_by(_scale))
        )

    def grow(step: Step) -> Step:
        def growing(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is None:  # not before the update has been applied
                now: LossScale = state.slots["amp"]
                now.streak = (now.streak + 1) % growth_interval
                if now.streak == 0:
                    now.scale.mul_(2).clamp_(max=LARGEST)
            return state, out

        return growing

    def init(state: TrainState) -> LossScale:
        return LossScale(torch.tensor(float(init_scale), device=state.backend.device))

    return Middleware("amp", forward=forward, gradient=gradient, step=grow, init=init)


def _scale(state: TrainState) -> Tensor:
    return state.slots["amp"].scale


def _unscale(grads: list[Any], scale: Tensor) -> Tensor:
    """Divide gradients by the scale, in place, and return whether one of them is not finite: 1 or 0, on the device."""
    if any(grad.dtype is torch.float16 for grad in grads):
        raise ValueError(
            'amp("fp16") needs parameters in float32 (their gradients in float16 can\'t be unscaled): leave out model.half()'
        )
    found = torch.zeros_like(scale)
    if not grads:
        return found
    sharded = any(local_part(grad) is not grad for grad in grads)
    grads = [
        torch_compat.sparse_values(grad) if grad.is_sparse else local_part(grad) for grad in grads
    ]
    torch_compat.unscale_(grads, found, scale.reciprocal())
    return all_reduce_max_tensor(found) if sharded else found  # each process has seen its own parts
