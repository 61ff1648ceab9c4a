"""What happens before the first update of a run: hooks, the modes of modules, and slots."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fnloop._core.call import name_of
from fnloop._core.frozen import keep_statistics
from fnloop._core.running import without_recent
from fnloop._core.state import TrainState
from fnloop._hooks.wrapper import Hook
from fnloop._loop.errors import check_returned, explain, warn_on_main
from fnloop._loop.hints import suggest
from fnloop._loop.plan import Plan

__all__ = ["first_state"]


def first_state(plan: Plan, state: TrainState) -> TrainState:
    """Return the state with which a run begins, given one that knows the facts about the run."""
    __tracebackhide__ = True
    state = _begin_hooks(plan.hooks, state)
    _to_training_mode(state)
    if plan.record_every is None:
        state = attrs.evolve(state, metrics=without_recent(state.metrics))
    plan.step.begin_run(state)
    suggest(plan.step.pipeline.middleware, plan.loaders, state)
    try:
        return plan.step.init_slots(state)
    except Exception as error:
        explain(error, state, plan.step, "the making of slots", state.batch)
        raise


def _begin_hooks(hooks: Iterable[Hook], state: TrainState) -> TrainState:
    """Call the method ``begin`` of the hooks that have one. Return the state to start with.

    Raises:
        TypeError: a hook returned something other than a state.
        ValueError: a hook returned a state at another position.
        StaleStateError: a hook returned a state that has been advanced.
    """
    __tracebackhide__ = True
    run = state.run
    for hook in hooks:
        if (begin := getattr(hook, "begin", None)) is None:
            continue
        try:
            new = check_returned(hook, begin(state), "begin")
            _check_position(hook, state, new)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}, before the first update")
            raise
        state = new if new.run is not None else attrs.evolve(new, run=run)
    return state


def _check_position(hook: Hook, before: TrainState, new: TrainState) -> None:
    for name in ("step", "epoch", "batch"):
        if (found := getattr(new, name)) != (known := getattr(before, name)):
            raise ValueError(
                f"the method begin of {name_of(hook)} changed state.{name} from {known} to "
                f"{found}, but the run is planned already: restore before fit"
            )


def _to_training_mode(state: TrainState) -> None:
    """Put a model that is in evaluation mode as a whole into training mode.

    Modules that are in evaluation mode by themselves stay so, and norm layers that are frozen are
    in it whatever the script did.
    """
    if not state.model.training:
        warn_on_main(
            state,
            "fit: the model was in evaluation mode as a whole; it is trained in training mode "
            "(model.train())",
        )
        state.model.train()
    keep_statistics(state)
