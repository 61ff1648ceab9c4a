"""Where a state lives: its device and its process. The only module that knows accelerate.

Accelerate finds out how this process was launched (``torchrun``, ``accelerate launch``, a
notebook's launcher) and what ``accelerate config`` says, and moves nested batches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fnloop._backend.rendezvous import choose_interface, join_settings

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Backend", "accelerator", "backend_of", "fully_sharded", "launched", "trackers"]

_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}


@attrs.frozen
class Backend:
    """Where a state lives: ``state.backend``.

    Args:
        device: the device to which batches are moved.
        rank: the rank of this process, from 0.
        world_size: the number of processes that train together.
        precision: "bf16" or "fp16" if ``accelerate config`` asks for mixed precision, else None.
        settings: arguments for torch's DistributedDataParallel, such as ``bucket_cap_mb``.
        prepare: called with each new DistributedDataParallel module, to register a communication
            hook.
        data_rank: which share of the data this process has, from 0. It is the rank, but with tensor
            parallelism several processes have the same share.
        data_size: the number of shares.
        exact: whether a run has the same bits on any number of processes; see
            ``TrainState.create``.

    Example:
        >>> from fnloop.testing import toy
        >>> backend = toy().backend
        >>> backend.device, backend.rank, backend.world_size, backend.main
        (device(type='cpu'), 0, 1, True)
    """

    device: torch.device = attrs.field(converter=torch.device)
    rank: int = 0
    world_size: int = 1
    precision: str | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    prepare: Callable[[DistributedDataParallel], object] | None = attrs.field(
        default=None, repr=False
    )
    data_rank: int = attrs.field(
        default=attrs.Factory(lambda self: self.rank, takes_self=True), repr=False
    )
    data_size: int = attrs.field(
        default=attrs.Factory(lambda self: self.world_size, takes_self=True), repr=False
    )
    exact: bool = attrs.field(default=False, repr=False)

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # it is immutable


# --- how this process was launched


def launched() -> bool:
    """Return whether this process is one of several, or was launched as such."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (
        dist.is_available() and dist.is_initialized()
    )


@functools.cache
def accelerator() -> Accelerator:
    """Return accelerate's object for this process, which has joined the others."""
    from accelerate import Accelerator
    from accelerate.state import PartialState

    made = bool(PartialState._shared_state)  # by the user, whose settings are kept
    cpu = not (made or torch.accelerator.is_available())
    choose_interface()
    engine = _is_set("ACCELERATE_USE_DEEPSPEED")  # joins the processes itself; refused later
    if not (made or engine) and (settings := join_settings()):
        # The state is shared: Accelerator uses it.
        PartialState(cpu or _is_set("ACCELERATE_USE_CPU"), **settings)
    found = Accelerator(cpu=cpu)
    if found.num_processes == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']}, but this script has "
            "set up accelerate for a single process. Write Accelerator(cpu=True) where there is no "
            "GPU, or leave it to TrainState.create"
        )
    return found


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes", "y", "on", "t")


def backend_of(accelerator: Accelerator) -> Backend:
    """Return the backend that an accelerator describes.

    Raises:
        NotImplementedError: it is configured for something that fnloop does not support.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    fsdp1 = kind == "FSDP" and not accelerator.is_fsdp2
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or fsdp1:
        raise NotImplementedError(
            f"accelerate is configured for {'FSDP 1' if fsdp1 else kind}, which runs backward "
            "and the update itself, so that middleware cannot see gradients. For models that do "
            "not fit on one device, use FSDP 2 (accelerate config, fsdp_version: 2), or torch's "
            "fully_shard"
        )
    if kind == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise NotImplementedError(
            "accelerate is configured for FSDP, which it ignores where there is no GPU: call "
            "torch's fully_shard(model), which works there too, before you create the optimizer"
        )
    precision = _PRECISIONS.get(accelerator.mixed_precision)
    if precision is None and accelerator.mixed_precision != "no":
        raise NotImplementedError(
            f"accelerate is configured for mixed_precision={accelerator.mixed_precision!r}; fnloop "
            "supports bf16 and fp16"
        )
    # Tensors on the CPU have a device without an index.
    device = accelerator.device if accelerator.device.type != "cpu" else "cpu"
    settings, prepare, handler = {}, None, accelerator.ddp_handler
    if handler is not None:
        settings, prepare = handler.to_kwargs(), handler.register_comm_hook
    return Backend(
        device,
        accelerator.process_index,
        accelerator.num_processes,
        precision,
        settings=settings,
        prepare=prepare,
    )


def fully_sharded(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Shard a model over the processes as accelerate is configured to."""
    model, *wrapped = accelerator.prepare(model, *optimizers)
    accelerator._models.remove(model)  # it would keep both alive
    for one in wrapped:
        accelerator._optimizers.remove(one)
    return model, [one.optimizer for one in wrapped]


# --- trackers


@contextlib.contextmanager
def trackers() -> Iterator[ModuleType]:
    """Provide accelerate's trackers without its process-wide state, which their logger requires."""
    with warnings.catch_warnings():
        # Of tqdm in a notebook, though no bar was requested.
        warnings.filterwarnings("ignore", "IProgress not found")
        from accelerate import PartialState, tracking
        from accelerate.logging import MultiProcessAdapter

    class Plain(MultiProcessAdapter):
        def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
            del kwargs  # accelerate's options of where to log
            self.logger.log(level, msg, *args)

    usual = tracking.logger
    if not PartialState._shared_state:
        tracking.logger = Plain(logging.getLogger("accelerate.tracking"), {})
    try:
        yield tracking
    finally:
        tracking.logger = usual
