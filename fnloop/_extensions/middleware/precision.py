"""Mixed precision, and the order of images in memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Searching, Step, middleware
from fnloop.extend import (
    Batch,
    Wrap,
    checks,
    containers,
    host,
    local_part,
    optimizers,
    parameters,
    refuse,
    then,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Mixed precision: autocast, and for fp16 a loss scale.
#
# The scale multiplies the loss before backward, never the reported loss. Gradients are unscaled
# once per window, before any other gradient middleware sees them, whether `amp` is listed before or
# after `accumulate`. An update whose gradients overflowed is skipped entirely: parameters, step,
# schedules and averages stay as they are.

SMALLEST = 2.0**-24  # the smallest number of fp16: a loss that overflows at this scale always does
LARGEST = 2.0**127
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@attrs.define
class LossScale(Searching):
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
    """Train in mixed precision: run the loss function under autocast.

    List it first. With "fp16" the loss is scaled by a number that halves when a gradient
    overflows (that update is skipped) and doubles after ``growth_interval`` updates without an
    overflow. This needs one device-to-host read per update, because the step counter and the
    schedules depend on it. "bf16" needs none of it. A CPU without instructions for them emulates
    both; float32 is several times faster there.

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

    Replaces: by_hand.GradScaler, accelerate.autocast
    """
    if precision is not None and (not isinstance(precision, str) or precision not in _DTYPES):
        raise ValueError(f'amp expects "bf16", "fp16" or None; got {checks.describe(precision)}')
    checks.number(
        "amp", "init_scale", init_scale, "the first loss scale", least=SMALLEST, most=LARGEST
    )
    meaning = "the updates without overflow after which the scale doubles"
    checks.integer("amp", "growth_interval", growth_interval, meaning)
    if precision is None:
        return Middleware("amp", precision="")
    forward = _autocast(_DTYPES[precision])
    if precision == "bf16":
        return Middleware("amp", forward=forward, adds=(), precision=precision)

    def init(state: TrainState) -> LossScale:
        return LossScale(torch.tensor(float(init_scale), device=state.backend.device))

    return Middleware(
        "amp",
        forward=forward,
        loss=_scale,
        gradient=_unscale_after,
        step=_grow_after(growth_interval),
        init=init,
        check=_check_order,
        adds=(),
        # The whole loss is scaled, whatever others add to it, and unscaled before it is seen.
        order={"loss": sys.maxsize, "gradient": -1},
        precision=precision,
        traits=("commutes", "skips"),
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


def _check_order(listed: Sequence[Middleware]) -> None:
    """Raise ValueError if a middleware before it would see each gradient of a window, scaled."""
    for member in listed:
        if member.name == "amp":
            return
        if member.gradient is not None and not {"commutes", "sums"} & {*member.traits}:
            raise ValueError(
                'amp("fp16") is listed after a middleware that would see scaled gradients. List it '
                'first: pipeline(amp("fp16"), ...)'
            )


def _scale(step: Step) -> Step:
    """Scale the gradient of the loss where backward starts. The loss stays as it is."""

    def scaled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, batch)
        if not out.loss.requires_grad:  # it is left out, or backward says what is wrong
            return state, out
        scale, loss = _scale_of(state), out.loss.view_as(out.loss)
        loss.register_hook(lambda grad: (grad * scale).to(grad.dtype))
        return state, attrs.evolve(out, loss=loss)

    return scaled


@then
def _unscale_after(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
    __tracebackhide__ = True
    gradients = [p.grad for p in parameters(state) if p.grad is not None]
    return host().decide(state, out, _unscale(gradients, _scale_of(state)), _judge)


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
    def grow(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        now: LossScale = state.slots["amp"]
        now.streak = (now.streak + 1) % growth_interval
        if now.streak == 0:
            now.scale.mul_(2).clamp_(max=LARGEST)
        return state, out

    return then(grow)  # after the update has been applied, not before


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


# --------------------------------------------------------------------------------------------------
# Train in `torch.channels_last`: the memory of images and convolutions ordered by pixel.


@attrs.frozen
class Converted:
    """The slot: a mark that the model has been converted.

    A checkpoint with it is restored into a model that may not be, so the mark is made again then.
    """


@middleware("forward")
def channels_last() -> Middleware:
    """Keep images and convolutions in ``torch.channels_last``, which is often faster.

    The four-dimensional tensors of a batch, (N, C, H, W), are converted before the loss function
    sees them, in training and in evaluation. The four-dimensional parameters and buffers of the
    model, and what the optimizers keep of them, are converted in place when the step first meets
    the state, and again at the beginning of a phase. Only the order in memory changes: shapes and
    values stay, parameters remain the same objects, and ties between them hold. Checkpoints can be
    read with and without it.

    Returns:
        A middleware of the forward ring, with a slot.

    Raises:
        NotImplementedError: when the step first meets the state: the model is sharded over
            processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(2, 1, 3), nn.Flatten())
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> step = fl.pipeline(channels_last())(lambda model, x: model(x).square().mean())
        >>> state, out = step(state, torch.ones(1, 2, 8, 8))
        >>> state.model[0].weight.shape, state.model[0].weight.stride()
        (torch.Size([1, 2, 3, 3]), (18, 1, 6, 2))

    Notes:
        Convolutions may round in another way, so a run is equal to one without it up to rounding.
        The outputs of convolutions are in this format too: use ``reshape`` or ``flatten`` there,
        not ``view``. On a CPU with bf16 it makes an update of the CNN in ``examples/mnist.py``
        twice as fast as float32 in the usual format: ``pipeline(amp("bf16"), channels_last())``.

    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    return Middleware(
        "channels_last",
        forward=_convert_batch,
        init=_convert_state,
        adds=(),
        traits=("per_phase",),
    )


def _convert_batch(step: Step) -> Step:
    def with_images_converted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return step(state, containers.map_leaves(batch, _converted_image))

    return with_images_converted


def _converted_image(value: object) -> object:
    """Return a part of a batch, images in channels_last. Those of one channel need no copy."""
    if isinstance(value, Tensor) and value.ndim == 4 and value.layout is torch.strided:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _converted(tensor: Tensor) -> Tensor:
    """Return a tensor, in channels_last if it has four dimensions: with its strides too.

    Torch takes them as a hint where both formats are the same in memory.
    """
    is_image = tensor.ndim == 4 and tensor.layout is torch.strided
    return tensor.to(memory_format=torch.channels_last) if is_image else tensor


def _convert_state(state: TrainState) -> Converted:
    """Convert the model and what the optimizers keep of its parameters, in place."""
    why = "cannot convert a model that is sharded over processes: leave it out, and write "
    instead = "model.to(memory_format=torch.channels_last) before fully_shard(model)"
    refuse(state, "channels_last()", sharded=why + instead)
    for tensor in (*state.model.parameters(), *state.model.buffers()):
        tensor.data = _converted(tensor.data)
        if tensor.grad is not None:
            tensor.grad.data = _converted(tensor.grad.data)
    # A fused optimizer reads parameters and what it keeps of them as they are in memory: both need
    # one format.
    for optimizer in optimizers(state).values():
        for parameter, kept in optimizer.state.items():
            for name, value in kept.items() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = _converted(value)
    return Converted()
