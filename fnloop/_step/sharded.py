"""The average of gradients of a model under ``fully_shard``, which does most of it by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fnloop._backend.collectives import start_all_reduce_sum
from fnloop._backend.fsdp import roots
from fnloop._backend.join import parameters_beside
from fnloop._core.metrics import to_accumulator_dtype
from fnloop._core.optimizers import optimizers_in
from fnloop._core.state import TrainState

__all__ = ["ShardReducer"]


class ShardReducer:
    """Lets ``fully_shard`` average its gradients, and averages those of all other parameters.

    The methods are those of :class:`fnloop._step.ddp.BucketReducer`.

    Args:
        model: the model that is trained.
        processes: the number of processes.
    """

    def __init__(self, model: nn.Module, processes: int) -> None:
        self._roots, self._processes = roots(model), processes
        self._counted: Callable[[], Tensor] | None = None

    def close(self) -> None: ...

    def start_window(self) -> None: ...

    def start_microbatch(self, last: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(last)

    def zero_loss(self, state: TrainState, loss: Tensor) -> Tensor:
        return loss * 0

    def attach(self, state: TrainState, root: Tensor, kept: int, touch: bool) -> Tensor:
        self._counted = start_all_reduce_sum(
            torch.tensor(float(kept), device=root.device), "the sum of the batches of an update"
        )
        return root

    def counted(self) -> Tensor:
        assert self._counted is not None
        return to_accumulator_dtype(self._counted())

    def finish_window(self, state: TrainState, touched: bool) -> None:
        for p in parameters_beside(state.model, optimizers_in(state.optimizer).values()):
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                total = start_all_reduce_sum(p.grad, "a sum of gradients")()
                p.grad.copy_(total / self._processes)
