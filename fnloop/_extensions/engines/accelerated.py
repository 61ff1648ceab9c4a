"""What fnloop takes of accelerate: its object for this process.

What accelerate knows of the process is shared by all of its objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator


def is_set_up() -> bool:
    """Return whether accelerate knows of this process already."""
    from accelerate.state import PartialState

    return bool(PartialState._shared_state)


def set_up(cpu: bool, **settings: Any) -> None:
    """Let accelerate join this process to the others.

    Args:
        cpu: whether to leave a GPU alone.
        settings: as ``init_process_group`` takes them.
    """
    from accelerate.state import PartialState

    PartialState(cpu, **settings)


def new_accelerator(cpu: bool) -> Accelerator:
    """Return a new ``Accelerator``."""
    from accelerate import Accelerator

    return Accelerator(cpu=cpu)


def fully_sharded(
    accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Optimizer]
) -> tuple[nn.Module, list[Optimizer]]:
    """Shard a model over the processes as accelerate is configured to."""
    model, *wrapped = accelerator.prepare(model, *optimizers)
    accelerator._models.remove(model)  # it would keep both alive
    for one in wrapped:
        accelerator._optimizers.remove(one)
    return model, [one.optimizer for one in wrapped]
