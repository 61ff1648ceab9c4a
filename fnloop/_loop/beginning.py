"""What happens before the first update of a run: hooks, and the modes of modules."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fnloop._core.call import name_of
from fnloop._core.frozen import keep_statistics
from fnloop._core.state import TrainState
from fnloop._hooks.wrapper import Hook
from fnloop._loop.errors import check_returned, warn_on_main

__all__ = ["begin_hooks", "to_training_mode"]


def begin_hooks(hooks: Iterable[Hook], state: TrainState) -> TrainState:
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


def to_training_mode(state: TrainState) -> None:
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
