"""Independent copies of a state, and the module inside one."""

from __future__ import annotations

import copy

import attrs
from torch import nn

from fnloop._backend import torch_compat
from fnloop._backend.fsdp import is_sharded
from fnloop._core.ownership import Ownership, ParameterCache
from fnloop._core.state import TrainState, check_not_stale, detached_from_run
from fnloop._display.checks import describe

__all__ = ["snapshot", "unwrap"]


def snapshot(state: TrainState) -> TrainState:
    """Copy a state: model, optimizer, slots and metrics together.

    The copy shares nothing that is updated in place.

    Args:
        state: the newest state of a run.

    Returns:
        An independent state, equal in everything but the hooks of its optimizer. Keep it to go
        back, to fork a run, or to compare.

    Raises:
        StaleStateError: the state has been advanced, so its model already holds newer weights.
        NotImplementedError: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, state = fl.pipeline()(toy_loss), toy()
        >>> before = snapshot(state)
        >>> state = fl.fit(step, state, [torch.tensor([1.0])], hooks=())
        >>> state.model.w.item(), before.model.w.item()
        (-1.0, 0.0)
    """
    check_not_stale(state, "snapshot")
    if is_sharded(state.model):
        raise NotImplementedError(
            "a model that is sharded over processes cannot be copied: keep a checkpoint instead, "
            "save(state, path)"
        )
    state = detached_from_run(state)
    handles = (state.model, state.optimizer, state.slots, state.metrics)
    memo: dict[int, object] = {}
    # One call: two copies would lose which tensors are shared.
    model, optimizer, slots, metrics = copy.deepcopy(handles, memo)
    for name, value in vars(state.optimizer).items():
        if name not in vars(optimizer) and name != "step":  # torch omits LBFGS's list of parameters
            setattr(optimizer, name, copy.deepcopy(value, memo))
    return attrs.evolve(
        state, model=model, optimizer=optimizer, slots=slots, metrics=metrics,
        ownership=Ownership(), generation=0, parameters=ParameterCache(),
    )  # fmt: skip


def unwrap(state: TrainState) -> nn.Module:
    """Return the user's own module, without wrappers of distributed training or compilation.

    Args:
        state: a state.

    Returns:
        The module that was given to :meth:`TrainState.create`.

    Raises:
        TypeError: it is not a state.

    Example:
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> unwrap(state) is state.model            # nothing is wrapped around it here
        True
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"unwrap expects state as a TrainState; got {describe(state)}")
    model = state.model
    while True:
        if (inner := torch_compat.uncompiled(model)) is not None:
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model
