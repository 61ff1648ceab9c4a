"""What a run that ends within a boundary leaves to the run that continues it."""

from __future__ import annotations

import attrs

from fnloop._core.events import END, PENDING, STOP, UPDATE
from fnloop._core.state import TrainState
from fnloop._core.stops import is_interruption

__all__ = ["events_to_keep", "forget_interruption", "mark_stop", "owes_end"]


def mark_stop(state: TrainState) -> TrainState:
    """Return the state whose events say if a hook has stopped the run and its end is to come."""
    events = frozenset(event for event in state.events if not event.startswith(STOP))
    if state.stop is not None and not is_interruption(state.stop) and END not in events:
        events |= {STOP + state.stop}
    return state if events == state.events else attrs.evolve(state, events=events)


def owes_end(state: TrainState) -> bool:
    """Return whether a hook has stopped the run, and what is due at its end is still to come."""
    return _reason(state) is not None


def forget_interruption(state: TrainState) -> TrainState:
    """Return the state without what has only ended the run for now."""
    return attrs.evolve(state, stop=_reason(state)) if is_interruption(state.stop) else state


def events_to_keep(state: TrainState) -> frozenset[str]:
    """Return the events of a boundary that the next run has to complete; usually none."""
    if owes_end(state):
        return state.events
    return state.events & {UPDATE, PENDING} if PENDING in state.events else frozenset()


def _reason(state: TrainState) -> str | None:
    """Return why a hook has stopped the run, if what is due at its end is still to come."""
    if state.stop is None:
        return None
    marks = (event for event in state.events if event.startswith(STOP))
    return next((mark.removeprefix(STOP) for mark in marks), None)
