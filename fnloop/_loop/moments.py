"""The arguments of ``fit`` that say when something is due."""

from __future__ import annotations

from collections.abc import Mapping

from fnloop._display import checks
from fnloop._hooks.moments import Moment, Trigger

__all__ = ["Moments", "check_moment", "own_clock", "read_moments"]

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
    return moment.renew() if isinstance(moment, Moment) else moment


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
