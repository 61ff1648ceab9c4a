"""What an exception says about the run that it ended: where it happened, and the state reached."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fnloop._core.call import name_of
from fnloop._core.state import (
    EPOCH,
    TrainState,
    detached_from_run,
    is_half_updated,
    owns_handles,
)
from fnloop._hooks.wrapper import Hook
from fnloop._step.layers import STEP
from fnloop._step.pipeline import PipelineStep

__all__ = ["explain", "tell_hooks"]


def explain(
    error: BaseException, state: TrainState, step: PipelineStep, phase: object, batch: int
) -> TrainState | None:
    """Note in an exception where in the run it happened, and attach the last consistent state.

    Args:
        error: the exception.
        state: the last consistent state.
        step: the step of the run.
        phase: what the run was doing: a loader, a hook, a description; None for the step, whose
            layers name themselves.
        batch: the batches consumed in the epoch.

    Returns:
        The state that was attached; None if no state owns the model.
    """
    layer = step.layer_of(error)
    if phase is None:
        step.explain(error)
        where = f"{layer}, train"
    elif state.run is not None and phase in state.run.evaluated:
        where = f"{layer}, {phase}" if layer != STEP else f"the {phase} loader"
    else:
        where = f"{name_of(phase) if callable(phase) else phase}, train"
    epoch = state.epoch + (EPOCH not in state.events)  # the running one, or the one just completed
    error.add_note(f"while in {where}, epoch {epoch}, batch {batch}, step {state.step}")
    if is_half_updated(state):
        error.add_note(
            "the optimizer was changing the weights: they are between two updates, so this "
            "exception has no attribute state. Go back to a checkpoint or to a snapshot"
        )
    if not owns_handles(state):
        return None
    state = detached_from_run(state)
    with contextlib.suppress(AttributeError):
        error.state = state  # type: ignore[attr-defined]
    return state


def tell_hooks(hooks: Sequence[Hook], state: TrainState, error: Exception) -> None:
    """Tell the hooks with a method ``failed`` that the run has failed."""
    for hook in hooks:
        try:
            if (failed := getattr(hook, "failed", None)) is not None:
                failed(state, error)
        except Exception as another:
            kind = type(another).__name__
            error.add_note(f"then {name_of(hook)} failed too: {kind}: {another}")
