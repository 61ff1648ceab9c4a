"""Where a state lives: the device, and which process of how many. The only module that knows accelerate.

accelerate finds out how this process was launched (``torchrun``, ``accelerate launch``, a notebook's launcher) and what
``accelerate config`` says, and moves nested batches.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._rendezvous import join_settings

__all__ = [
    "Backend", "accelerator", "backend_of", "beside", "device_in", "fully_sharded", "launched", "needs_placing", "on_host",
    "place", "tensors_in", "trackers",
]  # fmt: skip

_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}


@attrs.frozen
class Backend:
    """Facts about where a state lives: ``state.backend``.

    Args:
        device: the device that batches are moved to.
        rank: the number of this process, from 0.
        world_size: how many processes train together.
        precision: "bf16" or "fp16" if ``accelerate config`` asks for mixed precision, else None.
        settings: arguments for torch's DistributedDataParallel, such as ``bucket_cap_mb``.
        prepare: called with each DistributedDataParallel module that is made, to register a communication hook.

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
    prepare: Callable[[Any], Any] | None = attrs.field(default=None, repr=False)

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # facts, not handles


# --- how this process was launched


def launched() -> bool:
    """Say whether this process is one of several, or means to be."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (dist.is_available() and dist.is_initialized())


@functools.cache
def accelerator() -> Any:
    """Return what accelerate has found out about this process, having joined it to the others."""
    from accelerate import Accelerator
    from accelerate.state import PartialState

    made = bool(PartialState._shared_state)  # by the user: its settings stand
    cpu = not (made or torch.accelerator.is_available())
    engine = _is_set("ACCELERATE_USE_DEEPSPEED")  # joins the processes itself; it is refused later
    if not (made or engine) and (settings := join_settings()):
        PartialState(cpu or _is_set("ACCELERATE_USE_CPU"), **settings)  # which Accelerator uses as it is
    found = Accelerator(cpu=cpu)
    if found.num_processes == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']}, but accelerate was set up in this script before as "
            f"if it were alone. Make it Accelerator(cpu=True) where there is no GPU, or leave it to TrainState.create"
        )
    return found


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes", "y", "on", "t")


def backend_of(accelerator: Any) -> Backend:
    """Return the facts that an accelerator knows."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    fsdp1 = kind == "FSDP" and not accelerator.is_fsdp2
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or fsdp1:
        raise NotImplementedError(
            f"accelerate is configured for {'FSDP 1' if fsdp1 else kind}, which takes gradients and updates into its own "
            f"hands, so "
            f"that no middleware can see them. Use FSDP 2 (accelerate config, fsdp_version: 2), or torch's fully_shard, for "
            f"models that don't fit one device"
        )
    if kind == "MULTI_CPU" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise NotImplementedError(
            "accelerate is configured for FSDP, which it leaves out where there is no GPU: call torch's fully_shard(model) "
            "before you make the optimizer, which works there too"
        )
    precision = _PRECISIONS.get(accelerator.mixed_precision)
    if precision is None and accelerator.mixed_precision != "no":
        raise NotImplementedError(
            f"accelerate is configured for mixed_precision={accelerator.mixed_precision!r}; fnloop knows bf16 and fp16"
        )
    device = accelerator.device if accelerator.device.type != "cpu" else "cpu"  # without an index, as tensors have it
    settings, prepare, handler = {}, None, accelerator.ddp_handler
    if handler is not None:
        settings, prepare = handler.to_kwargs(), handler.register_comm_hook
    return Backend(device, accelerator.process_index, accelerator.num_processes, precision, settings=settings, prepare=prepare)


def fully_sharded(accelerator: Any, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Spread a model over the processes, as accelerate is configured to."""
    model, wrapped = accelerator.prepare(model, optimizer)
    accelerator._models.remove(model)  # it keeps what it has seen for as long as it lives
    accelerator._optimizers.remove(wrapped)
    return model, wrapped.optimizer


# --- batches


def needs_placing(device: torch.device) -> bool:
    """Say whether a batch can be anywhere but on this device."""
    return device.type != "cpu" or torch.accelerator.is_available()


def beside(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that copies batches to a CUDA device on a stream of its own.

    So it happens while kernels of the step before still run; what is asked of the device from then on waits for it.
    """
    stream = torch.cuda.Stream(device)

    def copied(batch: Any) -> Any:
        if _is_opaque(batch):
            return place(batch, device)  # its memory can't be followed
        with torch.cuda.stream(stream):
            there = place(batch, device)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        for t in tensors_in(there):
            t.record_stream(current)  # its memory isn't to be used again before they are done
        return there

    return copied


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_in(value)


def _is_opaque(batch: Any) -> bool:
    """Say whether there is something in a batch that moves its tensors itself."""
    if isinstance(batch, Tensor) or not hasattr(batch, "to"):
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
        return any(map(_is_opaque, parts))
    return True


def place(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a nested batch to a device: from pinned memory and without blocking on CUDA.

    Args:
        batch: tensors in any nesting of tuples, named tuples, lists and mappings, or an object with ``.to``.
        device: where to.

    Returns:
        The batch there. What is no tensor, and what is there already, stays as it is.
    """
    if not needs_placing(device):
        return batch
    from accelerate.utils import recursively_apply, send_to_device

    if device.type == "cuda":
        batch = recursively_apply(lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), batch)
    return send_to_device(batch, device, non_blocking=device.type == "cuda")


def device_in(tree: Any) -> torch.device | None:
    """Return the device of the first tensor in a nested value."""
    from accelerate.utils import find_device

    return find_device(tree)


def on_host(tree: Any) -> Any:
    """Move the tensors of a nested value to the host."""
    if not needs_placing(torch.device("cpu")):
        return tree
    from accelerate.utils import send_to_device

    return send_to_device(tree, torch.device("cpu"))


# --- trackers


@contextlib.contextmanager
def trackers() -> Iterator[Any]:
    """Give accelerate's trackers to use, without its process-wide state: their logger refuses to log without that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook: nobody asked for a bar
        from accelerate import PartialState, tracking
        from accelerate.logging import MultiProcessAdapter

    class Plain(MultiProcessAdapter):
        def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            del kwargs  # where to log it, in accelerate's words
            self.logger.log(level, msg, *args)

    usual = tracking.logger
    if not PartialState._shared_state:
        tracking.logger = Plain(logging.getLogger("accelerate.tracking"), {})
    try:
        yield tracking
    finally:
        tracking.logger = usual
