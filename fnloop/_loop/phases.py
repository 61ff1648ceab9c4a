"""Phases: a run made of stretches, each with targets of its own, that can be started again."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from fnloop._core.left_out import begin_count
from fnloop._core.phase import Phase, unfinished
from fnloop._core.state import TrainState
from fnloop._core.stops import ends_phase, is_interruption
from fnloop._display import checks

__all__ = [
    "absolute_targets",
    "begin_phase",
    "check_phase",
    "end_phase",
    "has_left",
    "is_newest",
    "name_phase",
    "phase_of",
    "skipped_phase",
]  # fmt: skip


def check_phase(name: str | None, state: TrainState) -> None:
    """Raise if a run of this phase cannot begin, or continue, with a state.

    Args:
        name: the name of the phase, or None.
        state: the state.

    Raises:
        TypeError: the name is not a str.
        ValueError: it is empty; another phase has not ended, and no hook has stopped it; or this
            program has named a later phase before this one.
    """
    if name is not None:
        checks.text("fit", "phase", name, "the name of a phase, or None")
        _check_order(state.phases, name)
    running, ended = unfinished(state.phases), state.stop is not None and ends_phase(state.stop)
    if running is None or phase_of(state, name) is not None or (ended and name is not None):
        return
    why, advice = "" if state.stop is None else f" ({state.stop})", "To continue it, call"
    if is_interruption(state.stop):
        why = f": it was interrupted at step {state.step} ({state.stop})"
        advice = "Start the script again to continue it, or, with this state, call"
    wanted = "fit was called without a phase" if name is None else f"{name!r} cannot begin"
    raise ValueError(
        f"the phase {running.name!r}, begun at step {running.step}, has not ended{why}, so "
        f"{wanted}. {advice} fit(..., phase={running.name!r}). To end it here, pass "
        'attrs.evolve(state, stop="enough") to the fit of the next phase'
    )


def _check_order(phases: Sequence[Phase], name: str) -> None:
    """Raise if a program names a phase after one that began later in the run.

    A script names its phases in order, and passes over those that have ended. So the order in which
    it names phases for the first time is that in which they began, unless one was put before
    another that had ended already. A script may begin with any of them.
    """
    names = [phase.name for phase in phases]
    after = names.index(name) + 1 if name in names else len(names)
    later = next((phase for phase in phases[after:] if phase.named), None)
    if later is None or phases[after - 1].named:
        return
    raise ValueError(
        f"the phases are out of order: this program names {later.name!r} before {name!r}, but in "
        f"this run {name!r} had ended when {later.name!r} began, at step {later.step}. To keep the "
        f"run, write fit(..., phase={name!r}) before fit(..., phase={later.name!r}). To train "
        f"{later.name!r} before {name!r}, begin with a checkpoint from before {name!r}, and save "
        "to another folder"
    )


def skipped_phase(phases: Sequence[Phase], name: str) -> Phase | None:
    """Return the newest phase if a new one follows it in the run, and an earlier one in a program.

    Then the program does not have the newest phase any more, or names it later, out of order.
    """
    new = all(phase.name != name for phase in phases)
    follows_another = bool(phases) and any(phase.named for phase in phases)
    return phases[-1] if new and follows_another and not phases[-1].named else None


def name_phase(state: TrainState, name: str) -> TrainState:
    """Return the state in which a phase has been named by this program."""
    phases = (
        attrs.evolve(phase, named=True) if phase.name == name else phase for phase in state.phases
    )
    return attrs.evolve(state, phases=tuple(phases))


def phase_of(state: TrainState, name: str | None) -> Phase | None:
    """Return the phase of a state with a name; None if it has not begun."""
    return next((phase for phase in state.phases if phase.name == name), None)


def absolute_targets(
    state: TrainState, name: str, epochs: int | None, steps: int | None
) -> tuple[int | None, int | None]:
    """Return the targets of a phase, counted from where it began, as targets for the state.

    With neither, it is one epoch.
    """
    begun = phase_of(state, name)
    epoch = state.epoch + (state.batch > 0) if begun is None else begun.epoch
    step = state.step if begun is None else begun.step
    if epochs is None and steps is None:
        epochs = 1
    return None if epochs is None else epoch + epochs, None if steps is None else step + steps


def begin_phase(state: TrainState, name: str) -> TrainState:
    """Return the state at the beginning of a phase: that of a new epoch.

    A phase that was stopped is over, and so is an epoch that was left in the middle: it counts.
    """
    if (running := unfinished(state.phases)) is not None:
        state = end_phase(state, running.name)
    left = state.batch > 0
    epoch = state.epoch + left
    counts = {"skipped": state.skipped, "updates": dict(state.updates)}
    phase = Phase(name, state.step, epoch, len(state.history), **counts, named=True)
    phases = (*state.phases, phase)
    state = attrs.evolve(
        begin_count(state), phases=phases, stop=None, ends=None, events=frozenset(), left=()
    )
    if not left:
        return state
    return attrs.evolve(
        state, epoch=epoch, batch=0, samples=0, metrics={}, generators=None, saved_on=None
    )


def is_newest(state: TrainState, name: str | None) -> bool:
    """Return whether no other phase has begun since this one, or since the run of no phase."""
    begun = phase_of(state, name)
    return begun is None or begun is state.phases[-1]


def has_left(state: TrainState, name: str | None) -> bool:
    """Return whether a run that ended within a boundary has left some of it to this phase."""
    return bool(state.left) and is_newest(state, name)


def end_phase(state: TrainState, name: str | None) -> TrainState:
    """Return the state with a phase ended, unless the run was only interrupted."""
    running = unfinished(state.phases)
    if running is None or running.name != name or not ends_phase(state.stop):
        return state
    ended = attrs.evolve(running, done=True, stop=state.stop)
    return attrs.evolve(state, phases=(*state.phases[:-1], ended))
