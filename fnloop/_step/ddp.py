"""The average of gradients over processes, by torch's DistributedDataParallel."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from fnloop._backend.collectives import any_rank, sync_buffers
from fnloop._backend.torch_compat import CHECKED, leaf_of, reduce_in_backward
from fnloop._core.metrics import to_accumulator_dtype
from fnloop._core.state import TrainState, all_parameters
from fnloop._display.log import log
from fnloop._step.weighted_sum import Weight

__all__ = ["BucketReducer"]


class BucketReducer:
    """Averages gradients in DDP's buckets, while backward computes the next ones.

    Args:
        model: the model that is trained.
        processes: the number of processes.
    """

    def __init__(self, model: nn.Module, processes: int) -> None:
        self._model, self._processes = model, processes
        # Its gradient is the mean, over the processes, of how many of their batches count. DDP
        # averages it with those of the parameters.
        self._count: Tensor | None = None
        self._has_buffers = any(True for _ in model.buffers())
        self._ddp: _FixedBucketDDP | None = None
        self._params: list[Tensor] = []
        self._flags: list[bool] = []
        self._trainable: list[Tensor] = []
        self._used: list[Tensor] = []  # the parameters that the loss used when DDP was made
        self._hides_parameters = False  # whether the graph of the loss has graphs inside its nodes
        self._waits_for_all = False  # whether DDP waits for every parameter, used or not
        self._warned = False

    def close(self) -> None:
        """Release the process group, at the end of the script."""
        self._ddp = None

    def start_window(self) -> None:
        """Start a window: every process gets the main one's buffers."""
        if self._has_buffers:
            sync_buffers(self._model)

    def start_microbatch(self, last: bool) -> None:
        """Only the last micro-batch goes through DDP, so there is nothing to switch."""

    def zero_loss(self, state: TrainState, loss: Tensor) -> Tensor:
        """Return a root for backward that adds zero to every gradient."""
        params = all_parameters(state)
        known = self._used and [p.requires_grad for p in params] == self._flags
        # If not: some may have been frozen since, or the window so far tells which are used.
        used = self._used if known else [p for p in params if p.grad is not None] or params
        return torch.stack([p.flatten()[:1].sum() * 0 for p in used if p.requires_grad]).sum()

    def attach(self, state: TrainState, root: Tensor, kept: int, touch: bool) -> Tensor:
        """Return the root for the last backward of a window, which averages the gradients.

        Args:
            state: the state.
            root: what backward would start from without DDP.
            kept: how many of this process's batches count.
            touch: whether to make every parameter reachable from it. Otherwise
                :meth:`finish_window` gives DDP the gradients that it still expects.
        """
        if self._count is None:
            self._count = torch.zeros((), device=root.device, requires_grad=True)
        self._count.grad = None
        root = torch.add(root, self._count.to(root.dtype), alpha=kept)  # adds 0
        params = all_parameters(state)
        flags = [p.requires_grad for p in params]
        if params is not self._params or flags != self._flags:
            trainable = [p for p in params if p.requires_grad]
            if [*map(id, trainable)] != [*map(id, self._trainable)]:
                self._make_ddp(state, root, trainable)
            self._params, self._flags, self._trainable = params, flags, trainable
        assert self._ddp is not None
        self._waits_for_all = not self._ddp.find_unused_parameters
        if touch and self._waits_for_all and not self._hides_parameters:
            root = _TouchParameters.apply(root, *self._trainable)
        return self._ddp.forward(root)

    def counted(self) -> Weight:
        """Return how many batches of the window count, in all processes: on a GPU, as a tensor."""
        assert self._count is not None and self._count.grad is not None
        mean = self._count.grad
        if mean.device.type == "cpu":  # reading it waits for nothing
            return round(mean.item() * self._processes)
        return (to_accumulator_dtype(mean) * self._processes).round()

    def _make_ddp(self, state: TrainState, root: Tensor, trainable: list[Tensor]) -> None:
        nodes = list(_graph_nodes(root))
        reached = {id(leaf_of(node)) for node in nodes}
        self._hides_parameters = any(CheckpointFunction.__name__ in node.name() for node in nodes)
        self._used = [p for p in trainable if self._hides_parameters or id(p) in reached]
        assert self._count is not None
        unused = len(self._used) < len(trainable)
        self._ddp = _make_ddp(state, [*trainable, self._count], unused)

    def finish_window(self, state: TrainState, touched: bool) -> None:
        """Give DDP the gradients that it still expects after the last backward of a window."""
        if not self._waits_for_all or touched:
            return
        unused = [p for p in self._trainable if p.grad is None]
        if unused:
            self._warn_of(unused)
            torch.stack([p.flatten()[:1].sum() * 0 for p in unused]).sum().backward()

    def _warn_of(self, unused: list[Tensor]) -> None:
        if self._warned:
            return
        self._warned = True
        is_unused = {id(p) for p in unused}
        names = [name for name, p in self._model.named_parameters() if id(p) in is_unused]
        log.warning(
            "the loss uses some parameters in some updates but not in others (%s). With several "
            "processes they get a zero gradient when unused, so weight decay and momentum still "
            "apply; a single process would leave them untouched. For that, pass "
            "backend=Accelerator(kwargs_handlers="
            "[DistributedDataParallelKwargs(find_unused_parameters=True)])",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )


class _TouchParameters(torch.autograd.Function):
    """Identity on the loss that makes every parameter reachable in backward.

    DDP waits for all parameters, and not each loss uses all of them.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *trainable: Tensor) -> Tensor:
        ctx.count = len(trainable)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad, *(None,) * ctx.count)


class _FixedBucketDDP(DistributedDataParallel):
    """DDP without bucket rebuilding after the first backward.

    A sum over three processes or more depends, in its last bit, on the position of a gradient in
    its bucket. With rebuilt buckets a run resumed from a checkpoint would differ from one that
    never stopped.
    """

    def forward(self, loss: Tensor) -> Tensor:
        return reduce_in_backward(self, loss)


class _Trainable(nn.Module):
    """What DDP averages: the model's parameters, and others that the optimizer trains.

    Args:
        model: the model.
        others: the other parameters. A leaf tensor need not be an ``nn.Parameter``, which is why
            they do not pass through ``register_parameter``.
    """

    def __init__(self, model: nn.Module, others: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.others = others

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        # Not registered: a leaf of an optimizer need not be an nn.Parameter.
        yield from ((f"other{i}", p) for i, p in enumerate(self.others))
        yield from super().named_parameters(*args, **kwargs)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@functools.cache
def _check_ddp(device: torch.device) -> None:
    """Raise unless DDP averages gradients when it is called as here, which torch does not document.

    Every process must call it. It runs once, before the first update.
    """
    probe = torch.zeros(1, device=device, requires_grad=True)
    ddp = _FixedBucketDDP(_Trainable(nn.Module(), [probe]), init_sync=False)
    ddp.forward((probe * dist.get_rank()).sum()).backward()
    mean = (dist.get_world_size() - 1) / 2
    # A host read, once per process and device: before the first update.
    if probe.grad is None or probe.grad.item() != mean:
        raise RuntimeError(
            f"DistributedDataParallel of torch {torch.__version__} does not average gradients in "
            f"the way that fnloop calls it. Install torch {CHECKED}, on which it was checked, or a "
            "newer fnloop"
        )


def _make_ddp(state: TrainState, trainable: list[Tensor], unused: bool) -> _FixedBucketDDP:
    _check_ddp(state.backend.device)
    own = {id(p) for p in state.model.parameters()}
    settings = dict(state.backend.settings)
    settings.pop("broadcast_buffers", None)  # done once per window, before forward
    unused = any_rank(unused, "which parameters the loss uses")
    settings.setdefault("find_unused_parameters", unused)
    ddp = _FixedBucketDDP(
        _Trainable(state.model, [p for p in trainable if id(p) not in own]),
        init_sync=False,  # the graph exists already: the weights in it must not change
        **{**_without_buffers(), **settings},
    )
    if state.backend.prepare is not None:
        state.backend.prepare(ddp)
    return ddp


@functools.cache
def _without_buffers() -> dict[str, bool]:
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def _graph_nodes(loss: Tensor) -> Iterator[Node]:
    """Yield the nodes of the autograd graph of a loss."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(n for n, _ in node.next_functions)
