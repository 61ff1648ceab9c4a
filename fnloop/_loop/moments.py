"""The arguments of ``fit`` that say when something is due, and what is due at a boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from fnloop._core.events import END
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.moments import Trigger, as_moment

__all__ = [
    "Moments",
    "check_moment",
    "loaders_due",
    "own_clock",
    "read_moments",
    "without_end",
]

# When to evaluate: all loaders together, or each by its name; None is never.
Moments = Trigger | Mapping[str, Trigger | None] | None


def read_moments(
    given: Moments, loaders: tuple[str, ...]
) -> tuple[tuple[Trigger, tuple[str, ...]], ...]:
    """Return the moments of ``evaluate_every``, each with the loaders to evaluate then.

    Raises:
        TypeError: it is something else.
        ValueError: it is a mapping, and a loader is missing or unknown.
    """
    if not isinstance(given, Mapping):
        check_moment("evaluate_every", given)
        return () if given is None else ((own_clock(given), loaders),)
    for name, moment in given.items():
        check_moment(f"evaluate_every[{name!r}]", moment)
    if unknown := [repr(name) for name in given if name not in loaders]:
        raise ValueError(
            f"fit got evaluate_every with {', '.join(unknown)}, which is not a loader to evaluate; "
            f"those are: {', '.join(loaders) or 'none'}"
        )
    if missing := [name for name in loaders if name not in given]:
        raise ValueError(
            f"fit got evaluate_every without the loader {missing[0]!r}: add its moment, or None "
            f"for never: {{..., {missing[0]!r}: None}}"
        )
    return tuple((own_clock(each), (name,)) for name, each in given.items() if each is not None)


def own_clock(moment: Trigger) -> Trigger:
    """Return a moment that may be used elsewhere too: with a clock of its own, if it has one."""
    return as_moment(moment).renew()


def check_moment(argument: str, given: object) -> None:
    """Raise TypeError unless this is a trigger, or None."""
    if given is not None and (isinstance(given, type) or not hasattr(given, "due")):
        raise TypeError(
            f"fit expects {argument} as every(epochs=1), every(steps=100), when(predicate) or "
            "None, or as at_start(), at_end() or a combination by |, & and ~; got "
            f"{checks.describe(given)}"
        )
    if getattr(given, "monitors", ()):
        raise TypeError(
            f"fit expects {argument} as a moment that does not depend on records, because it makes "
            f"them; got {given!r}"
        )


def without_end(state: TrainState) -> TrainState:
    """Return a state as if its run continued."""
    return attrs.evolve(state, events=state.events - {END}) if END in state.events else state


def loaders_due(
    evaluations: Sequence[tuple[Trigger, tuple[str, ...]]],
    state: TrainState,
    within: bool,
    note: Callable[[Trigger], object],
) -> tuple[str, ...] | None:
    """Return the names of the loaders to evaluate; None if no evaluation is due.

    Where a run ends within an epoch, what is due for that reason alone is left to the closing
    record, which evaluates every loader; unless there is another evaluation.

    Args:
        evaluations: when to evaluate, and which loaders.
        state: the state at a boundary.
        within: whether it is not the end of an epoch.
        note: called with each trigger before it is asked.
    """
    __tracebackhide__ = True
    ends = within and END in state.events
    continued = without_end(state) if ends else state
    due, late = [], []
    for trigger, names in evaluations:
        note(trigger)
        for_end = ends and END in trigger.outside
        if trigger.due(continued if for_end else state):
            due.append(names)
        elif for_end:
            late.append((trigger, names))
    for trigger, names in late if due else ():
        note(trigger)
        due += [names] if trigger.due(state) else []
    return sum(due, ()) if due else None
