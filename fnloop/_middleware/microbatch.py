"""Make an update of a batch in pieces, which take less memory than all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from fnloop._backend.fsdp import is_sharded
from fnloop._core.carry import TBPTT
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Step
from fnloop._display import checks
from fnloop._step.backward import Backward, Insertable
from fnloop._step.engine import engine_of
from fnloop._step.exact import check_not_exact
from fnloop._step.pieces import InPieces
from fnloop._step.retry import Retrying
from fnloop._step.update import CREATE_GRAPH

__all__ = ["microbatch", "retry_on_oom"]


@middleware("gradient")
def microbatch(size: int) -> Middleware:
    """Run forward and backward of each batch in pieces of that many samples, for one update.

    The loss, the gradient and the length of the run are those of whole batches, up to rounding:
    each piece counts by its weight, the number of items that its loss is the mean of. Only the
    memory of ``size`` samples is needed at a time. It acts directly around backward, wherever it is
    listed: ``pipeline(clip(1.0), microbatch(8))`` clips once per update. With ``accumulate(n)``
    each batch of a window comes in pieces.

    All tensors in nested tuples, lists and mappings are cut along their first dimension, without a
    copy. So are arrays, and lists of plain values, that have one entry for each sample. Anything
    else is given to each piece whole.

    What sees more than one sample differs: BatchNorm normalizes each piece by itself, and updates
    its running statistics with each. Random draws such as those of dropout are others. The loss
    function, ``metric`` and ``Output.aux`` see a piece; metrics are combined. An evaluation needs
    less memory, because it keeps no graph: it takes whole batches.

    Args:
        size: the most samples in a piece, at least 1. On several processes, in each of them.

    Returns:
        A middleware of the gradient ring.

    Raises:
        TypeError: size is not an int.
        ValueError: size is below 1. When composing: ``tbptt`` or ``closure(create_graph=True)`` is
            listed too. At a batch: its tensors have different lengths, or it has none.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(microbatch(2))(toy_loss)
        >>> state, out = step(toy(), torch.tensor([1.0, 2.0, 6.0]))     # in pieces of 2 and 1
        >>> state.model.w.item(), state.step        # the gradient is the mean, 3
        (-3.0, 1)

    Source: the device_train_microbatch_size of Composer,
    https://docs.mosaicml.com/projects/composer
    """
    checks.integer("microbatch", "size", size, "the most samples in a piece", wrong_type=TypeError)

    def gradient(step: Step) -> Step:
        return _instead_of(step, lambda backward: InPieces(backward.loss, size))

    return Middleware("microbatch", gradient=gradient, check=_check)


@middleware("gradient")
def retry_on_oom() -> Middleware:
    """Repeat forward and backward in pieces half as large when there is no memory left.

    Pieces are those of ``microbatch``, and so is what differs. The update begins again, with the
    same random draws and buffers, in all processes at once. The size that fits is kept in
    ``state.slots["retry_on_oom"]`` (0: whole batches) and saved: later updates, and a resumed run,
    begin with it. From there on, the run equals one with ``microbatch(size)``. With
    ``microbatch(size)`` listed too, the first attempt is in those pieces.

    Whatever else forward and backward have changed, such as a list in a closure, is not undone. The
    optimizer's step and evaluations are not repeated. On several processes, gradients are averaged
    after backward instead of during it, because a process that runs out of memory half-way must not
    leave the others waiting. Buffers are copied before each update.

    Returns:
        A middleware of the gradient ring.

    Raises:
        ValueError: when composing: ``cuda_graph``, ``tbptt`` or ``closure(create_graph=True)`` is
            listed too.
        NotImplementedError: when a run starts on several processes: the model is sharded or has a
            SyncBatchNorm, whose forward cannot be repeated in one process alone.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def greedy(model, batch):
        ...     if len(batch) > 2:
        ...         raise torch.OutOfMemoryError("out of memory")
        ...     return toy_loss(model, batch)
        >>> step = fl.pipeline(retry_on_oom())(greedy)
        >>> state, out = step(toy(), torch.tensor([1.0, 2.0, 6.0]))
        >>> state.model.w.item(), state.slots["retry_on_oom"]
        (-3.0, 2)

    Source: the device_train_microbatch_size="auto" of Composer,
    https://docs.mosaicml.com/projects/composer
    """

    def gradient(step: Step) -> Step:
        return _instead_of(step, Retrying)

    return Middleware("retry_on_oom", gradient=gradient, init=_whole_batches, check=_check)


def _instead_of(step: Step, replace: Callable[[Backward], Backward]) -> Step:
    # Both are first in the gradient ring: see composition.in_order.
    assert isinstance(step, Insertable)
    return step.insert_inside(replace)


def _whole_batches(state: TrainState) -> int:
    name, why = (
        "retry_on_oom",
        "the size of pieces changes the last bits, and it follows the memory",
    )
    check_not_exact(state, name, f"{why}. List microbatch(size) instead")
    exchanging = is_sharded(state.model) or any(
        isinstance(module, nn.SyncBatchNorm) for module in state.model.modules()
    )
    if exchanging and not engine_of(state).calls_every_batch:
        raise NotImplementedError(
            "retry_on_oom cannot repeat a forward in which the processes exchange something, as "
            "that of a sharded model or of SyncBatchNorm: the others would wait for the one that "
            "has run out of memory. List microbatch(size) with a size that fits instead"
        )
    return 0


def _check(listed: Sequence[Middleware]) -> None:
    by = next(m for m in listed if m.name in ("microbatch", "retry_on_oom"))
    for member in listed:
        if member.name == TBPTT:
            raise ValueError(
                f"{by!r} cuts a batch into pieces of its samples, and what {member!r} carries on "
                "belongs to all of them. Leave one out; to save memory, use smaller batches"
            )
        if member.name == CREATE_GRAPH:
            raise ValueError(
                f"{by!r} changes gradients in place, which closure(create_graph=True) "
                "differentiates: leave one out"
            )
        if member.name == "cuda_graph" and any(m.name == "retry_on_oom" for m in listed):
            raise ValueError(
                f"{member!r} cannot capture retry_on_oom, which may repeat an update. Find the "
                "size without cuda_graph, in state.slots['retry_on_oom'], then list "
                "microbatch(size)"
            )
