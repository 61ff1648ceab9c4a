"""A state whose model holds the averaged weights."""

from __future__ import annotations

from collections import defaultdict

import attrs

from fnloop._backend.fsdp import is_sharded
from fnloop._core.average import AVERAGED, Average, check_not_averaged, load_average
from fnloop._core.optimizers import optimizers_in
from fnloop._core.snapshot import copy_handles, detached_from_run, unwrap
from fnloop._core.state import TrainState, check_not_stale
from fnloop._display import checks

__all__ = ["averaged"]


def averaged(state: TrainState, name: str = "ema") -> TrainState:
    """Copy a state, with the averaged weights in its model.

    The copy is there to evaluate, predict, save and export; ``fit`` refuses it. Its optimizer has
    no state, and it has no slots but a mark. Buffers that are not averaged are those of the model.
    The given state is not changed.

    Args:
        state: the newest state of a run with ``ema`` or ``swa``.
        name: the name of the average.

    Returns:
        A state with a model of its own.

    Raises:
        StaleStateError: the state has been advanced.
        KeyError: the state has no such average; the message lists those that it has.
        ValueError: the model of the state is an average already.
        NotImplementedError: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(fl.ema(0.5))(toy_loss)
        >>> state = fl.fit(step, toy(w=0.0, lr=1.0), [torch.tensor([4.0])], hooks=())
        >>> state.model.w.item(), averaged(state).model.w.item()
        (-4.0, -2.0)
        >>> fl.evaluate(step, averaged(state), [torch.tensor([1.0])])
        {'loss': -2.0}
    """
    check_not_stale(state, "averaged")
    checks.text("averaged", "name", name, "the name of an average")
    check_not_averaged("averaged", state)
    average = state.slots.get(name)
    if not isinstance(average, Average):
        found = [slot for slot, value in state.slots.items() if isinstance(value, Average)]
        there = f"those are: {', '.join(found)}" if found else "it has none: list ema() or swa()"
        raise KeyError(f"averaged: this state has no average {name!r}; {there}")
    if is_sharded(state.model):
        raise NotImplementedError(
            "averaged: a model that is sharded over processes cannot be copied: write "
            "save(state, path), and restore that into a model that is not sharded: "
            f'averaged(restore(path, state), "{name}")'
        )
    state = attrs.evolve(detached_from_run(state), slots={AVERAGED: name}, metrics={})
    # The copies of all optimizers begin without state.
    memo: dict[int, object] = {
        id(optimizer.state): defaultdict(dict)
        for optimizer in optimizers_in(state.optimizer).values()
    }
    made = copy_handles(state, memo)
    load_average(unwrap(made), average)
    return made
