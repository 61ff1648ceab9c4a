"""Where a state lives: the device, and which process of how many. The only module that knows accelerate."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import nn

__all__ = ["Backend", "local", "needs_placing", "place", "trackers"]


@attrs.frozen
class Backend:
    """Facts about where a state lives.

    Args:
        device: the device that batches are moved to.
        rank: the number of this process, from 0.
        world_size: how many processes there are.
    """

    device: torch.device = attrs.field(converter=torch.device)
    rank: int = 0
    world_size: int = 1

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # a fact, not a handle


def local(model: nn.Module) -> Backend:
    """Return the backend of a model in one process: batches go where its parameters are.

    Raises:
        RuntimeError: this is one of several processes, which would each train a model of their own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']}, and this version of fnloop trains "
            "in one: each "
            f"would train a model of its own. Start the script with python, not with torchrun or accelerate launch."
        )
    home = next(iter(model.parameters()), None)
    if home is None:
        home = next(iter(model.buffers()), torch.empty(0))
    return Backend(home.device)


def needs_placing(device: torch.device) -> bool:
    """Say whether a batch can be anywhere but on this device."""
    return device.type != "cpu" or torch.accelerator.is_available()


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
