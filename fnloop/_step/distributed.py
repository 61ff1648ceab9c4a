"""What makes the gradients of several processes one.

Each process runs the loss function on its share of a window, on the plain module. Only the last backward of a window is joined:
its loss goes through torch's DistributedDataParallel, which averages all gradients while backward goes on; a module under
``fully_shard`` does so by itself. What DDP gives is the mean over processes; that of the items is it times
``processes × reference / items``, where the sum of the items is exchanged only if it can't be known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from fnloop._backend.collectives import (
    all_reduce_max_tensor,
    any_rank,
    collective_count,
    shutdown_callbacks,
    start_all_reduce_sum,
    sync_buffers,
)
from fnloop._backend.fsdp import is_sharded, roots
from fnloop._backend.join import parameters_beside
from fnloop._backend.torch_compat import leaf_of
from fnloop._core.merge import merge_metrics
from fnloop._core.metrics import Last
from fnloop._core.rng import COMPUTE, fold_in, positioner
from fnloop._core.state import TrainState, all_parameters
from fnloop._core.types import Output
from fnloop._display.log import log
from fnloop._step.ddp import FixedBucketDDP, TouchParameters, graph_nodes, make_ddp

__all__ = [
    "CollectiveProbe",
    "DistributedEngine",
    "Weight",
    "drop_last_metrics",
    "engine_of",
    "reduce_report",
]

Weight = int | float | Tensor


def engine_of(state: TrainState) -> DistributedEngine | None:
    """Return what joins the processes that train a state; None if there is one."""
    if state.backend.world_size == 1:
        return None
    lease = state._lease
    if lease.joint is None or lease.joint.model is not state.model:
        lease.joint = DistributedEngine(state)
    return lease.joint


class CollectiveProbe:
    """Whether a function exchanges something with other processes: found out when it is called first.

    A module under ``fully_shard`` does, ``SyncBatchNorm`` in training, a contrastive loss that gathers.

    Args:
        model: the model that it is called with.
    """

    def __init__(self, model: nn.Module) -> None:
        self.needed: bool | None = True if is_sharded(model) else None

    def hear(self, fn: Callable[..., Any], *arguments: Any) -> Any:
        """Call it."""
        __tracebackhide__ = True
        if self.needed is not None:
            return fn(*arguments)
        before = collective_count()
        reply = fn(*arguments)
        self.needed = collective_count() != before
        return reply

    def leaves_out(self, borrowed: bool) -> bool:
        """Say whether nobody needs a batch."""
        return borrowed and self.needed is False


def reduce_report(state: TrainState, report: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Combine the metrics of a report over all processes.

    Args:
        state: the state.
        report: name to metric.
        prefix: what the names of training metrics begin with. Those that are neither the loss nor of the forward ring were made
            when gradients had been joined: they are the same everywhere, and count once.
    """
    joint = engine_of(state)
    if joint is None:
        return dict(report)

    own = {
        name
        for name in report
        if not name.startswith(prefix) or name.removeprefix(prefix) in joint.partial
    }
    if joint.borrows:
        report = drop_last_metrics(report, lambda name: name.startswith(prefix) and name in own)
    return merge_metrics(report, own)


def drop_last_metrics(
    metrics: Mapping[str, Any], which: Callable[[str], bool] = lambda name: True
) -> dict[str, Any]:
    """Return the metrics of a process that had no batch in the last round: what it saw last, others saw later."""
    return {
        name: metric
        for name, metric in metrics.items()
        if not (isinstance(metric, Last) and which(name))
    }


class DistributedEngine:
    """The exchange of gradients and weights between processes, for one model.

    Args:
        state: the state that is trained.
    """

    def __init__(self, state: TrainState) -> None:
        self.model, self.size = state.model, state.backend.world_size
        self.sharded = roots(state.model) if is_sharded(state.model) else None
        self.partial: set[str] = {"loss"}  # the metrics that are of a process's own share
        self.borrows = False  # whether this process had no batch of its own in the last round
        self.items: Weight = 0  # of the last window, over all processes
        self.training, self.evaluation = CollectiveProbe(state.model), CollectiveProbe(state.model)
        self.blank: Output | None = None  # what is found out about no batch
        self._ddp: FixedBucketDDP | None = None
        self._params: list[Tensor] = []
        self._flags: list[bool] = []
        self._trainable: list[Tensor] = []
        self._used: list[Tensor] = []  # those that the loss depended on when DDP was made
        self._warned = False
        self._calls, self._turn = 0, -1  # of backward in one update
        self._position = positioner(state.backend.device)
        self._hides = False  # whether the loss's graph hides parameters
        self._waits = False  # whether DDP waits for every parameter, used or not
        self._known: bool | None = (
            None  # whether weights are the sizes of the batches, in every process
        )
        self._reference: Tensor | None = None
        self._counts: bool | None = (
            None  # whether weights are numbers on the host, in every process
        )
        shutdown_callbacks.add(self)
        self._has_buffers = any(True for _ in state.model.buffers())

    def close(self) -> None:
        """Let go of the group of processes, at the end of the script."""
        self._ddp = None

    def renew(self) -> None:
        """Begin a run: its data may be others."""
        self._known = self._reference = self._counts = None

    def draw(self, state: TrainState, together: bool) -> None:
        """Position torch's generators: in forward and backward each process has its own, behind them all draw the same."""
        if state.run is None:
            return  # a bare step draws from where they are
        if not together:
            self._calls = (
                self._calls + 1 if self._turn == state._turn else 0
            )  # a step inside may be called more than once
            self._turn = state._turn
        seed = fold_in(state.seed, COMPUTE, state.epoch, state.batch, self._calls)
        self._position(fold_in(seed, 0 if together else 1 + state.backend.rank))

    def open(self, state: TrainState) -> None:
        """Begin a window."""
        self.draw(state, together=False)
        if self._has_buffers and self.sharded is None:
            sync_buffers(self.model)

    # --- gradients

    def begin(self, last: bool) -> None:
        """Begin a micro-batch; only the last one's gradients are averaged."""
        for root in self.sharded or ():
            root.set_requires_gradient_sync(last)

    def join(self, state: TrainState, start: Tensor, touch: bool) -> Tensor:
        """Return the number to start the last backward of a window from.

        Args:
            state: the state.
            start: the loss.
            touch: whether to make sure at once that backward comes by every parameter; else :meth:`finish` does.
        """
        if self.sharded is not None:
            return start
        params = all_parameters(state)
        flags = [p.requires_grad for p in params]
        if params is not self._params or flags != self._flags:
            trainable = [p for p in params if p.requires_grad]
            if [*map(id, trainable)] != [
                *map(id, self._trainable)
            ]:  # somebody has added, frozen or unfrozen something
                nodes = list(graph_nodes(start))
                reached = {id(leaf_of(node)) for node in nodes}
                self._hides = any(
                    CheckpointFunction.__name__ in node.name() for node in nodes
                )  # a graph within backward
                self._used = [p for p in trainable if self._hides or id(p) in reached]
                self._ddp = make_ddp(state, trainable, len(self._used) < len(trainable))
            self._params, self._flags, self._trainable = params, flags, trainable
        ddp: Any = self._ddp
        self._waits = not ddp.find_unused_parameters
        return ddp.forward(
            TouchParameters.apply(start, *self._trainable)
            if touch and self._waits and not self._hides
            else start
        )

    def finish(self, state: TrainState, touched: bool) -> None:
        """End a window: let DDP have what it still waits for, and average what ``fully_shard`` doesn't look after."""
        if self.sharded is None:
            if (
                self._waits
                and not touched
                and (unused := [p for p in self._trainable if p.grad is None])
            ):
                self._warn_of(unused)
                torch.stack([p.flatten()[:1].sum() * 0 for p in unused]).sum().backward()
        else:
            for p in parameters_beside(state.model, state.optimizer):
                if p.requires_grad:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    p.grad.copy_(start_all_reduce_sum(p.grad)() / self.size)

    def _warn_of(self, unused: list[Tensor]) -> None:
        if self._warned:
            return
        self._warned = True
        names = [name for name, p in self.model.named_parameters() if any(p is q for q in unused)]
        log.warning(
            "the loss leaves out parameters in some updates that it uses in others (%s). With several processes they have a "
            "zero gradient then, which weight decay and momentum go by, where one process leaves them alone. For that, pass "
            "backend=Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )  # fmt: skip

    def nothing(self, state: TrainState, loss: Tensor) -> Tensor:
        """Return a number to start from that adds nothing to any gradient."""
        if self.sharded is not None:
            return loss * 0
        used = self._used or all_parameters(state)
        return torch.stack([p.flatten()[:1].sum() * 0 for p in used if p.requires_grad]).sum()

    def borrowed(self, flags: tuple[bool, ...], n: int, rounds: int) -> bool:
        """Say whether the n-th batch that backward is given is another process's."""
        if not flags:
            return False
        return (
            flags[n] if len(flags) == rounds else flags[min(self._calls, len(flags) - 1)]
        )  # of a window, one by one

    # --- weights

    def known(self, out: Output, size: int) -> bool:
        """Say whether all batches of a window weigh the same, in every process, without asking.

        Args:
            out: the output of its first batch.
            size: the number of samples in every batch of it, or 0 if it may differ.
        """
        if size and self._known is None:
            self._known = not any_rank("weight" in out.aux or bool(out.weight != size))
        return bool(size and self._known)

    def check(self, out: Output, size: int) -> None:
        """Raise if a batch doesn't weigh what all have agreed upon."""
        if "weight" in out.aux or out.weight != size:
            raise ValueError(
                f"so far each batch of {size} samples weighed {size}, and now one weighs "
                f"{'what aux says' if 'weight' in out.aux else out.weight}: return aux['weight'], the number of items, for "
                f"every batch"
            )

    def counts_on_host(self, out: Output) -> bool:
        """Return whether weights are ints in every process, so that a window without an item can be told from others."""
        if self._counts is None:
            self._counts = not any_rank(isinstance(out.weight, Tensor))
        return self._counts

    def reference(self, weight: Tensor) -> Tensor:
        """Return what shares are relative to, the same everywhere: a power of two, so that it changes no bit of the mean."""
        if self._reference is None:
            self._reference = torch.exp2(
                torch.floor(torch.log2(all_reduce_max_tensor(weight).clamp(min=1)))
            )
        return self._reference
