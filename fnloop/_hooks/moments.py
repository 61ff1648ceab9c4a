"""Moments, which say when something is due, and how they compose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn, Protocol, Self

import attrs

from fnloop._core.call import name_of
from fnloop._core.events import END, RECORD, START
from fnloop._core.monitor import check_monitored
from fnloop._core.run_info import RunInfo
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.wrapper import Hook, HookFn, Wrapper, as_hook, place_of

__all__ = [
    "ConditionalHook",
    "Moment",
    "Trigger",
    "as_moment",
    "at_end",
    "at_start",
    "check_hook",
    "show_call",
]


class Trigger(Protocol):
    """Decides at which boundaries something is due.

    A trigger may also have a method ``check(run: RunInfo)``, which is called when a run begins.
    """

    def due(self, state: TrainState, /) -> bool:
        """Return whether something is due at this boundary."""
        ...


class Moment(ABC):
    """A trigger that can be called with a hook, and combined with others: ``|``, ``&``, ``~``."""

    def __new__(cls, *given: object, **settings: object) -> Self:
        """Return a moment. Raise for ``every(2)`` and ``at_end(hook)``."""
        fields = vars(cls).get("__attrs_attrs__")  # None: a subclass, which may take others
        if given and fields is not None:
            names = [field.name for field in fields if field.init]
            if all(field.kw_only for field in fields if field.init):
                _refuse_positional(cls.__name__, given[0], names)
        return super().__new__(cls)

    @property
    def outside(self) -> frozenset[str]:
        """The events at which this may be due besides those of an update: "start", "end"."""
        return frozenset()

    @property
    def excludes_end(self) -> bool:
        """Whether it is not due where it otherwise would be, because the run ends there."""
        return False

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that this depends on."""
        return ()

    @abstractmethod
    def due(self, state: TrainState) -> bool:
        """Return whether something is due at this boundary."""

    def quiet_until(self, state: TrainState) -> float:
        """Return ``state.step`` before which it need not be asked, unless the epoch ends."""
        return 0

    def check(self, run: RunInfo) -> None:  # noqa: B027
        """Begin a run."""

    def renew(self) -> Moment:
        """Return a moment with a clock of its own, if it has one."""
        return self

    @property
    def has_clock(self) -> bool:
        """Whether this counts the time since it was last due."""
        return False

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine moments by |, & and ~, not by or, and "
            "and not"
        )

    def __call__(self, hook: HookFn) -> ConditionalHook:
        return ConditionalHook(as_moment(self.renew()), check_hook(hook, repr(self)))

    def __or__(self, other: Trigger) -> Moment:
        return _Any((self, _check_trigger(other, "|")))

    def __ror__(self, other: Trigger) -> Moment:
        return _Any((_check_trigger(other, "|"), self))

    def __and__(self, other: Trigger) -> Moment:
        return _All((self, _check_trigger(other, "&")))

    def __rand__(self, other: Trigger) -> Moment:
        return _All((_check_trigger(other, "&"), self))

    def __invert__(self) -> Moment:
        return _Not(self)


@attrs.frozen(repr=False, slots=False)
class _Lifted(Moment):
    """A trigger that is not a moment: an object with a method ``due``."""

    trigger: Trigger

    def __attrs_post_init__(self) -> None:
        for name in ("quiet_until", "check"):
            if hasattr(self.trigger, name):
                object.__setattr__(self, name, getattr(self.trigger, name))

    @property
    def outside(self) -> frozenset[str]:
        """The events at which this may be due besides those of an update."""
        return frozenset(getattr(self.trigger, "outside", ()))

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that this depends on."""
        return getattr(self.trigger, "monitors", ())

    def __repr__(self) -> str:
        return repr(self.trigger)

    def due(self, state: TrainState) -> bool:
        __tracebackhide__ = True
        return self.trigger.due(state)


def as_moment(trigger: Trigger) -> Moment:
    """Return a trigger as a moment."""
    return trigger if isinstance(trigger, Moment) else _Lifted(trigger)


@attrs.frozen(repr=False)
class ConditionalHook(Wrapper):
    """A hook that runs only at the boundaries of a trigger."""

    trigger: Moment
    hook: Hook
    _ran: list[object] = attrs.field(factory=list, init=False, eq=False)  # where it ran last

    @property
    def __name__(self) -> str:  # in messages about its metrics
        return repr(self.trigger)

    @property
    def monitors(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metrics that the trigger depends on."""
        return self.trigger.monitors

    @property
    def outside(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where else than after an update it runs."""
        return self.trigger.outside

    def __repr__(self) -> str:
        return show_call(self.trigger, name_of(self.hook))

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if not self.trigger.due(state):
            return self.poll(state)
        here = place_of(state)
        if END in state.events and self._ran == [here]:
            return state  # it ran at this boundary already, before a hook stopped the run
        self._ran[:] = [here]
        return self.hook(state)

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary, after a check of the metrics that the trigger depends on."""
        if RECORD in state.events:
            for key in self.monitors:
                check_monitored(self.__name__, key, state)
        return super().poll(state)

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: for the trigger too."""
        self._ran.clear()
        if state.run is not None:
            self.trigger.check(state.run)
        return super().begin(state)


@attrs.frozen(repr=False)
class at_start(Moment):
    """The moment before the first update of a state at step 0: ``at_start()(hook)``.

    With ``evaluate_every=at_start() | every(epochs=1)`` the untrained model is evaluated too, in a
    record at step 0. It is never due when a run is resumed.

    Returns:
        A moment: a function from a hook to a hook, which composes with ``|``, ``&`` and ``~``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> loaders = {"train": [torch.ones(1)] * 2, "valid": [torch.ones(1)]}
        >>> moment = at_start() | fl.every(epochs=1)
        >>> step = fl.pipeline()(toy_loss)
        >>> state = fl.fit(step, toy(), loaders, hooks=(), evaluate_every=moment)
        >>> state.history["valid/loss"]
        (0.0, -2.0)
    """

    def __repr__(self) -> str:
        return "at_start()"

    @property
    def outside(self) -> frozenset[str]:
        """The events at which this may be due besides those of an update."""
        return frozenset({START})

    def due(self, state: TrainState) -> bool:
        """Return whether no update was applied yet."""
        return START in state.events


@attrs.frozen(repr=False)
class at_end(Moment):
    """The moment at which a run ends: ``at_end()(hook)``.

    That is at its target, or after a hook has stopped it. An interruption, a signal or an exception
    is not the end, because the run will continue.

    Returns:
        A moment: a function from a hook to a hook, which composes with ``|``, ``&`` and ``~``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hooks = ((fl.every(steps=2) | at_end())(show),)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=hooks)
        2
        3
    """

    def __repr__(self) -> str:
        return "at_end()"

    @property
    def outside(self) -> frozenset[str]:
        """The events at which this may be due besides those of an update."""
        return frozenset({END})

    def due(self, state: TrainState) -> bool:
        """Return whether the run ends at this boundary."""
        return END in state.events


@attrs.frozen(repr=False)
class _Compound(Moment):
    parts: tuple[Moment, ...]

    def __repr__(self) -> str:
        parts = (f"({part!r})" if _is_compound(part) else repr(part) for part in self.parts)
        return f" {self._symbol} ".join(parts)

    _symbol = ""

    @property
    def outside(self) -> frozenset[str]:
        """The events at which a part may be due besides those of an update."""
        return frozenset().union(*(part.outside for part in self.parts))

    @property
    def excludes_end(self) -> bool:
        """Whether a part is not due where the run ends."""
        return any(part.excludes_end for part in self.parts)

    @property
    def has_clock(self) -> bool:
        """Whether a part counts time."""
        return any(part.has_clock for part in self.parts)

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that a part depends on."""
        return sum((part.monitors for part in self.parts), ())

    def check(self, run: RunInfo) -> None:
        """Begin a run: for every part."""
        for part in self.parts:
            part.check(run)

    def renew(self) -> Moment:
        """Return a moment whose parts have clocks of their own."""
        return type(self)(tuple(part.renew() for part in self.parts))


class _Any(_Compound):
    _symbol = "|"

    def due(self, state: TrainState) -> bool:
        """Return whether a part is due. All are asked, because each may have a clock."""
        __tracebackhide__ = True
        due = [part.due(state) for part in self.parts]
        return any(due)


class _All(_Compound):
    _symbol = "&"

    def due(self, state: TrainState) -> bool:
        """Return whether every part is due. A clock is asked last: it runs until then."""
        __tracebackhide__ = True
        parts = sorted(self.parts, key=lambda part: part.has_clock)
        return all(part.due(state) for part in parts)


@attrs.frozen(repr=False)
class _Not(Moment):
    part: Moment

    def __invert__(self) -> Moment:
        return self.part

    def __repr__(self) -> str:
        return f"~({self.part!r})" if _is_compound(self.part) else f"~{self.part!r}"

    @property
    def excludes_end(self) -> bool:
        """Whether it is not due where the run ends, because the part is."""
        return END in self.part.outside or self.part.excludes_end

    @property
    def monitors(self) -> tuple[str, ...]:
        """The metrics that the part depends on."""
        return self.part.monitors

    def check(self, run: RunInfo) -> None:
        """Begin a run."""
        self.part.check(run)

    @property
    def has_clock(self) -> bool:
        """Whether the part counts time."""
        return self.part.has_clock

    def renew(self) -> Moment:
        """Return a moment with a clock of its own, if the part has one."""
        return _Not(self.part.renew())

    def due(self, state: TrainState) -> bool:
        """Return whether the part is not due at this update; False at the start."""
        __tracebackhide__ = True
        due = self.part.due(state)
        return not due and START not in state.events


def _is_compound(trigger: object) -> bool:
    return isinstance(trigger, _Compound)


def show_call(trigger: object, hook: str) -> str:
    """Return what to type to call a hook at the boundaries of a trigger."""
    alone = not isinstance(trigger, _Compound | _Not)  # a call binds tighter than ~
    return f"{trigger!r}({hook})" if alone else f"({trigger!r})({hook})"


def _refuse_positional(owner: str, given: object, names: Sequence[str]) -> NoReturn:
    """Raise for a moment that was given something without a name, maybe the hook."""
    is_hook = callable(given)
    setting = f"{names[0]}={1 if is_hook else given}" if names else ""
    call = f"{owner}({setting})"
    expected = f"one of {'=, '.join(names)}=" if names else "no argument"
    raise TypeError(
        f"{owner} expects {expected}; got {name_of(given) if is_hook else checks.describe(given)}: "
        f"write {f'{call}({name_of(given)})' if is_hook else call}"
    )


def _check_trigger(other: Trigger, symbol: str) -> Moment:
    if isinstance(other, type) or not hasattr(other, "due"):
        hint = ""
        if isinstance(other, ConditionalHook):
            hint = f". Give the hook to all of them: (... {symbol} ...)({name_of(other.hook)})"
        elif callable(other) and not isinstance(other, type):
            hint = ". For a function of the state write when(function)"
        raise TypeError(
            f"{symbol} combines moments such as every(epochs=1), when(predicate), at_start() and "
            f"at_end(); got {checks.describe(other)}{hint}"
        )
    return as_moment(other)


def check_hook(hook: HookFn, owner: str) -> Hook:
    """Return a hook, or raise TypeError if it is not one."""
    if hasattr(hook, "due") and not isinstance(hook, type):
        raise TypeError(
            f"{owner} expects hook as a function state -> state, but {hook!r} says only when: "
            f"write {show_call(hook, 'hook')} in its place, or combine moments by |, & and ~"
        )
    return as_hook(checks.function(owner, "hook", hook, "a function state -> state", 1))
