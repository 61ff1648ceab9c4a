"""Where a state lives: its device, and its process among those that train together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.optim import Optimizer

from fnloop._extensions import extensions

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel


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
            parallelism, or ``TrainState.create(..., data=)``, several processes have the same.
        data_size: the number of shares.
        parts: how many processes compute parts of the same batches; see ``TrainState.create``.
        exact: whether a run has the same bits on any number of processes; see
            ``TrainState.create``.
        engine: ``state -> engine``, which makes the gradients (``fnloop._step.engine.Engine``);
            None: the one for the number of processes.

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
    parts: int = attrs.field(default=1, repr=False)
    exact: bool = attrs.field(default=False, repr=False)
    engine: Callable[..., object] | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> Backend:
        """Return the backend of a single process: on the device of a model's first tensor."""
        first = next(iter((*model.parameters(), *model.buffers())), torch.empty(0))
        return cls(first.device)

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    @property
    def contributors(self) -> int:
        """How many processes count in sums: not those that only repeat what another computes."""
        return self.data_size * self.parts

    def position_of(self, n: int) -> int:
        """Return the position, among the batches of all shares, of this process's n-th one."""
        return n * self.data_size + self.data_rank

    def own_part(self, samples: int) -> float:
        """Return for how many of the samples of a batch this process counts, if it has a part."""
        return samples if self.parts == 1 else samples / self.parts

    def autocast(self) -> torch.autocast:
        """Return the autocast of the mixed precision that the run is configured for.

        Raises:
            ValueError: that is fp16, for which a middleware has to scale the loss.
        """
        if self.precision == "fp16":
            raise ValueError(
                "accelerate is configured for fp16, which needs a loss scale: list it, "
                'pipeline(amp("fp16"), ...)'
            )
        return torch.autocast(self.device.type, torch.bfloat16)

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # it is immutable


def join(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    given: Backend | Accelerator | None = None,
    data: DeviceMesh | None = None,
    exact: bool = False,
) -> tuple[nn.Module, Sequence[Optimizer], Backend]:
    """Put a model and its optimizers on their device, with the same weights in every process.

    Args:
        model: the user's module; one that is already sharded (``fully_shard``) is not changed.
        optimizers: its optimizers.
        given: a Backend, which is used as it is; an ``accelerate.Accelerator`` with the user's
            settings; or None.
        data: the dimension of a mesh that the data are dealt along; None deals them to all.
        exact: whether a run has the same bits on any number of processes.

    Returns:
        The module and the optimizers without wrappers, and the backend.

    Raises:
        RuntimeError: there are several processes, but they could not be joined, or they have
            different models.
        NotImplementedError: accelerate is configured for an engine that runs the training step; or
            the model is in a wrapper that does, or has settings that would not be kept; or
            ``exact``, and the model is sharded, or ``data`` is given.
        ValueError: the model has lazy parameters, and there are several processes; ``data`` is
            of another mesh, or has several dimensions; or ``exact``, and there are settings of
            DistributedDataParallel, which such a run does not use.
        TypeError: ``data`` is not a mesh.
    """
    for join_all in extensions("several processes are joined"):
        return join_all(model, optimizers, given, data, exact)
    return model, optimizers, given if isinstance(given, Backend) else Backend.of(model)


# --------------------------------------------------------------------------------------------------
# Ctrl-C where something is put back: half of it would be lost.


@contextlib.contextmanager
def delaying_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a block that takes no time to speak of."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for given in came[:1]:
            handler(*given)
