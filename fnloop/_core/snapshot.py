"""Independent copies of a state, and the module inside one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import nn

from fnloop._backend import torch_compat
from fnloop._backend.containers import map_leaves
from fnloop._backend.fsdp import is_sharded
from fnloop._core.optimizers import optimizers_in
from fnloop._core.ownership import Ownership, ParameterCache
from fnloop._core.rng import HostGenerators
from fnloop._core.serialize import copy_flattened
from fnloop._core.state import TrainState, check_not_stale, generation_of, ownership_of
from fnloop._display.checks import describe

__all__ = ["copy_handles", "detached_from_run", "snapshot", "tracing_copy", "unwrap"]


def snapshot(state: TrainState) -> TrainState:
    """Copy a state: model, optimizers, slots and metrics together.

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
    return copy_handles(detached_from_run(state), {})


def copy_handles(state: TrainState, memo: dict[int, object]) -> TrainState:
    """Return a state with copies of all that is updated in place.

    Args:
        state: the state.
        memo: id to copy, of what is to be replaced by something else.
    """
    for one in optimizers_in(state.optimizer).values():
        map_leaves([*one.state.values()], lambda leaf: _note_copy(leaf, memo))
    handles = (state.model, state.optimizer, state.slots, state.metrics)
    # One call: two copies would lose which tensors are shared.
    model, optimizer, slots, metrics = copy.deepcopy(handles, memo)
    for one, copied in zip(
        optimizers_in(state.optimizer).values(), optimizers_in(optimizer).values(), strict=True
    ):
        for name, value in vars(one).items():
            if name not in vars(copied) and name != "step":  # torch omits LBFGS's parameters
                setattr(copied, name, copy.deepcopy(value, memo))
    return attrs.evolve(
        state, model=model, optimizer=optimizer, slots=slots, metrics=metrics,
        ownership=ownership_of(state).for_copy(generation_of(state)), generation=0,
        parameters=ParameterCache(),
    )  # fmt: skip


def _note_copy(leaf: object, memo: dict[int, object]) -> None:
    """Put a copy of a tensor of a subclass into the memo: deepcopy needs its ``clone``."""
    if (copied := copy_flattened(leaf)) is not None:
        memo[id(leaf)] = copied


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


def tracing_copy(
    state: TrainState, slots: Mapping[str, Any], stand_in: Callable[[str], Any]
) -> TrainState:
    """Return a state of the same handles with an ownership of its own, to record an update with.

    Args:
        state: the state.
        slots: its slots.
        stand_in: makes the placeholder of each field that changes from update to update.
    """
    names = (
        *("step", "epoch", "batch", "samples", "skipped", "metrics", "history", "run", "stop"),
        *("events", "left", "generators", "extra"),
    )
    changing = {name: stand_in(name) for name in names}
    changing["updates"] = {name: stand_in(f"updates[{name!r}]") for name in state.updates}
    return attrs.evolve(state, slots=slots, ownership=Ownership(), generation=0, **changing)


def detached_from_run(state: TrainState) -> TrainState:
    """Return the state as it is outside of its run, with the generators that the run would use."""
    if state.run is None:
        return state
    ownership_of(state).seconds = state.run.stopwatch.spent()
    generators = position = None
    if state.batch:
        # Those of the state are not installed yet, if the first fetch of a run has failed.
        generators = state.generators or HostGenerators.capture()
        # A state that a hook went back to has its own.
        position = state.position or state.run.position_at(state.epoch, state.batch)
    return attrs.evolve(state, run=None, generators=generators, position=position)
