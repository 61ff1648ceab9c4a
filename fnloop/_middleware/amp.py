"""Mixed precision: autocast, and for fp16 a loss scale.

The scale multiplies the loss before backward, never the reported loss. Gradients are unscaled
once per window, before any other gradient middleware sees them, whether ``amp`` is listed before
or after ``accumulate``. An update whose gradients overflowed is skipped entirely: parameters,
step, schedules and averages stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import local_part
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output, Step, Wrap
from fnloop._display.checks import describe, integer, number
from fnloop._step.backward import Commuting, Insertable
from fnloop._step.host import decide_any

__all__ = ["amp"]

SMALLEST = 2.0**-24  # the smallest number of fp16: a loss that overflows at this scale always does
LARGEST = 2.0**127
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@attrs.define
class LossScale:
    """The slot of ``amp("fp16")``, changed in place.

    Args:
        scale: the loss scale, on the device.
        streak: how many updates in a row were applied with it.
        overflowed: the epoch, counted from 0, in which a gradient last overflowed; or -1.
    """

    scale: Tensor
    streak: int = 0
    overflowed: int = -1


@middleware("forward")
def amp(
    precision: str | None, *, init_scale: float = 65536.0, growth_interval: int = 2000
) -> Middleware:
    """Run the loss function under autocast.

    List it first. With "fp16" the loss is scaled by a number that halves when a gradient
    overflows (that update is skipped) and doubles after ``growth_interval`` updates without an
    overflow. This needs one device-to-host read per update, because the step counter and the
    schedules depend on it. "bf16" needs none of it. A CPU without instructions for them emulates
    both, and is several times as fast in float32.

    Args:
        precision: "bf16", "fp16", or None, which changes nothing.
        init_scale: the first loss scale, for "fp16", from 2**-24 to 2**127.
        growth_interval: updates without overflow after which the scale doubles, for "fp16".

    Returns:
        A middleware of the forward ring; for "fp16" of the gradient and the step ring too.

    Raises:
        ValueError: there is no such precision, or a setting is out of its range. When composing:
            "fp16" is listed after a middleware that would see scaled gradients.

    Example:
        >>> import fnloop as fl
        >>> fl.pipeline(amp("bf16"), fl.accumulate(4), fl.clip(1.0))
        pipeline(amp('bf16'), accumulate(4), clip(1.0))

    Source: Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740; the defaults are those of
    torch.amp.GradScaler.
    """
    if precision is not None and (not isinstance(precision, str) or precision not in _DTYPES):
        raise ValueError(f'amp expects "bf16", "fp16" or None; got {describe(precision)}')
    number("amp", "init_scale", init_scale, "the first loss scale", least=SMALLEST, most=LARGEST)
    meaning = "the updates without overflow after which the scale doubles"
    integer("amp", "growth_interval", growth_interval, meaning)
    if precision is None:
        return Middleware("amp")
    forward = _autocast(_DTYPES[precision])
    if precision == "bf16":
        return Middleware("amp", forward=forward)

    def init(state: TrainState) -> LossScale:
        return LossScale(torch.tensor(float(init_scale), device=state.backend.device))

    return Middleware(
        "amp", forward=forward, gradient=_scale_around, step=_grow_after(growth_interval), init=init
    )


def _autocast(dtype: torch.dtype) -> Wrap:
    def forward(step: Step) -> Step:
        def autocast(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with torch.autocast(state.backend.device.type, dtype):
                return step(state, batch)

        return autocast

    return forward


# --- the loss scale


def _scale_around(step: Step) -> Step:
    """Scale the loss before backward, and unscale the gradients around it."""
    if not isinstance(step, Insertable):
        raise ValueError(
            'amp("fp16") is listed after a middleware that would see scaled gradients. List it '
            'first: pipeline(amp("fp16"), ...)'
        )
    scaled = step.insert_inside(lambda backward: backward.scaled_by(_scale_of))
    return Commuting(_unscale_after)(scaled)


def _unscale_after(step: Step) -> Step:
    def unscaled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, batch)
        if out.skip is not None:
            return state, out
        gradients = [p.grad for p in parameters(state) if p.grad is not None]
        return decide_any(state, out, _unscale(gradients, _scale_of(state)), _judge)

    return unscaled


def _judge(state: TrainState, overflowed: bool) -> str | None:
    """Return why to skip an update whose gradients overflowed, and halve the scale then."""
    if not overflowed:
        return None
    now: LossScale = state.slots["amp"]
    reason = f"amp: a gradient overflowed at loss scale {now.scale:g}"
    if now.scale < SMALLEST:
        raise FloatingPointError(
            f"{reason}: the loss itself is not finite. Look at it with amp(None)"
        )
    now.scale.div_(2)
    now.streak = 0
    now.overflowed = state.epoch
    return reason


def _grow_after(growth_interval: int) -> Wrap:
    def grow(step: Step) -> Step:
        def growing(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if out.skip is None:  # after the update has been applied, not before
                now: LossScale = state.slots["amp"]
                now.streak = (now.streak + 1) % growth_interval
                if now.streak == 0:
                    now.scale.mul_(2).clamp_(max=LARGEST)
            return state, out

        return growing

    return grow


def _scale_of(state: TrainState) -> Tensor:
    return state.slots["amp"].scale


def _unscale(gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Divide gradients by the scale, in place.

    Returns:
        1 if one of those that this process has is not finite, else 0; on the device.
    """
    if any(gradient.dtype is torch.float16 for gradient in gradients):
        raise ValueError(
            'amp("fp16") needs parameters in float32 (their gradients in float16 cannot be '
            "unscaled): leave out model.half()"
        )
    found = torch.zeros_like(scale)
    if not gradients:
        return found
    local = [local_part(gradient) for gradient in gradients]
    values = [
        torch_compat.sparse_values(gradient) if gradient.is_sparse else gradient
        for gradient in local
    ]
    torch_compat.unscale_(values, found, scale.reciprocal())
    return found
