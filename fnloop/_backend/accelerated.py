"""What fnloop takes of accelerate: its object for this process, and its trackers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

# --------------------------------------------------------------------------------------------------
# The object of a process. What accelerate knows of the process is shared by all of its objects.


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


# --------------------------------------------------------------------------------------------------
# Its trackers.


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
