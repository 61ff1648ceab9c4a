"""DistributedDataParallel as the distributed engine uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fnloop._backend.collectives import any_rank
from fnloop._backend.torch_compat import CHECKED, reduce_in_backward
from fnloop._core.state import TrainState

__all__ = ["FixedBucketDDP", "TouchParameters", "graph_nodes", "make_ddp"]


class TouchParameters(torch.autograd.Function):
    """Pass a loss on, and let backward come by every parameter: DDP waits for all, and not each loss uses all of them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *trainable: Tensor) -> Tensor:
        ctx.count = len(trainable)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return (grad, *(None,) * ctx.count)


class FixedBucketDDP(DistributedDataParallel):
    """DDP that doesn't sort its buckets anew when it has seen in which order gradients come.

    A sum over three processes or more depends, in its last bit, on where in a bucket a gradient is: sorted anew behind the
    first update, a run that goes on from a checkpoint would not be the one that never stopped.
    """

    def forward(self, loss: Tensor) -> Any:
        return reduce_in_backward(self, loss)


class _Trainable(nn.Module):
    """What DDP is to look after: the model, and what the optimizer trains beside it."""

    def __init__(self, model: nn.Module, beside: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.beside = beside

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        # Not registered: a leaf of an optimizer need not be an nn.Parameter.
        yield from ((f"other{i}", p) for i, p in enumerate(self.beside))
        yield from super().named_parameters(*args, **kwargs)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@functools.cache
def check_ddp(device: torch.device) -> None:
    """Raise unless DDP averages gradients as it is called here, which is not how torch documents it.

    Every process must call it. It runs once, before the first update.
    """
    probe = torch.zeros(1, device=device, requires_grad=True)
    ddp = FixedBucketDDP(_Trainable(nn.Module(), [probe]), init_sync=False)
    ddp.forward((probe * dist.get_rank()).sum()).backward()
    mean = (dist.get_world_size() - 1) / 2
    if probe.grad is None or probe.grad.item() != mean:
        raise RuntimeError(
            f"DistributedDataParallel of torch {torch.__version__} does not average gradients in the "
            f"way that fnloop calls it. Install torch {CHECKED}, on which it was checked, or a newer "
            f"fnloop"
        )


def make_ddp(state: TrainState, trainable: list[Tensor], unused: bool) -> FixedBucketDDP:
    check_ddp(state.backend.device)
    own = {id(p) for p in state.model.parameters()}
    settings = dict(state.backend.settings)
    settings.pop(
        "broadcast_buffers", None
    )  # done before forward, and once per update: see Joint.open
    settings.setdefault("find_unused_parameters", any_rank(unused))
    ddp = FixedBucketDDP(
        _Trainable(state.model, [p for p in trainable if id(p) not in own]),
        init_sync=False,  # the graph is there already: nothing in it may change
        **{**_no_buffers(), **settings},
    )
    if state.backend.prepare is not None:
        state.backend.prepare(ddp)
    return ddp


@functools.cache
def _no_buffers() -> dict[str, bool]:
    known = inspect.signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False
    }


def graph_nodes(loss: Tensor) -> Iterator[Any]:
    """Yield what a loss was computed by."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(n for n, _ in node.next_functions)
