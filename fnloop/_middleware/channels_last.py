"""Train in ``torch.channels_last``: the memory of images and convolutions ordered by pixel."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fnloop._backend.containers import map_leaves
from fnloop._backend.fsdp import is_sharded
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.optimizers import optimizers_in
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step

__all__ = ["channels_last"]


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

    Convolutions may round in another way, so a run is equal to one without it up to rounding. The
    outputs of convolutions are in this format too: use ``reshape`` or ``flatten`` there, not
    ``view``. On a CPU with bf16 it makes an update of the CNN in ``examples/mnist.py`` twice as
    fast as float32 in the usual format: ``pipeline(amp("bf16"), channels_last())``.

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

    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    return Middleware("channels_last", forward=_convert_batch, init=_convert_state, per_phase=True)


def _convert_batch(step: Step) -> Step:
    def with_images_converted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return step(state, map_leaves(batch, _converted_image))

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
    if is_sharded(state.model):
        raise NotImplementedError(
            "channels_last() cannot convert a model that is sharded over processes: leave it out, "
            "and write model.to(memory_format=torch.channels_last) before fully_shard(model)"
        )
    for tensor in (*state.model.parameters(), *state.model.buffers()):
        tensor.data = _converted(tensor.data)
        if tensor.grad is not None:
            tensor.grad.data = _converted(tensor.grad.data)
    # A fused optimizer reads parameters and what it keeps of them as they are in memory: both need
    # one format.
    for optimizer in optimizers_in(state.optimizer).values():
        for parameter, kept in optimizer.state.items():
            for name, value in kept.items() if isinstance(parameter, Tensor) else ():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[name] = _converted(value)
    return Converted()
