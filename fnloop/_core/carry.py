"""What a step carries from one window of a sequence to the next, and the updates of one call.

Most steps make one update in a call. One with ``tbptt`` makes one for each window of a batch.
"""

from __future__ import annotations

import attrs

from fnloop._core.copies import with_slot
from fnloop._core.events import UPDATE
from fnloop._core.ownership import Ownership
from fnloop._core.state import TrainState, ownership_of, owns_handles

__all__ = ["TBPTT", "carry_of", "mark_half_done", "note_call", "updates_of_call", "with_carry"]

TBPTT = "tbptt"  # the name of the middleware, and of the slot that holds the carry
_CALL = "tbptt/call"  # the slot of state.step after the newest call, and the updates that it made


def carry_of(state: TrainState) -> object:
    """Return what the newest window has left for the next one; None where a pass begins."""
    return state.slots.get(TBPTT)


def with_carry(state: TrainState, carry: object) -> TrainState:
    """Return the state with another carry."""
    return with_slot(state, TBPTT, carry)


def note_call(state: TrainState, before: int) -> TrainState:
    """Return the state after a call of the step that may have made several updates.

    Args:
        state: the state after the last of them.
        before: ``state.step`` before the first.
    """
    made = state.step - before
    events = state.events | {UPDATE} if made else state.events
    return attrs.evolve(with_slot(state, _CALL, (state.step, made)), events=events)


def updates_of_call(state: TrainState) -> int:
    """Return how many updates the newest call of the step has applied, if it applied any."""
    step, made = state.slots.get(_CALL, (None, 1))
    return made if step == state.step else 1  # else another step was called since


def mark_half_done(given: TrainState) -> None:
    """Leave the model without an owner if a call has failed after the first of its updates.

    Args:
        given: the state that the call was given.
    """
    if owns_handles(given):
        return
    ownership: Ownership[TrainState] = ownership_of(given)
    ownership.generation = ownership.newest = None
