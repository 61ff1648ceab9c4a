"""The updates that a run was planned to make and does not, because hooks ended epochs early.

They count in its length, as skipped ones do: so a run that is resumed has the same one.
"""

from __future__ import annotations

import attrs

from fnloop._core.copies import with_slot
from fnloop._core.state import TrainState

__all__ = ["begin_count", "count_left_out", "left_out"]

SLOT = "ends"  # the slot with their number


def left_out(state: TrainState) -> int:
    """Return how many updates were left out since the run began, or its newest phase."""
    return state.slots.get(SLOT, 0)


def count_left_out(state: TrainState, updates: int) -> TrainState:
    """Return the state with this number of further updates left out."""
    return with_slot(state, SLOT, left_out(state) + updates) if updates else state


def begin_count(state: TrainState) -> TrainState:
    """Return the state with no update left out, as at the beginning of a phase."""
    if SLOT not in state.slots:
        return state
    slots = {name: slot for name, slot in state.slots.items() if name != SLOT}
    return attrs.evolve(state, slots=slots)
