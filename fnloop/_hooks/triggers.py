"""When a hook runs: predicates over the counters, which keep nothing to be saved."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Protocol

import attrs

from fnloop._core.call import name_of
from fnloop._core.run_info import RunInfo
from fnloop._core.state import EPOCH, UPDATE, TrainState, now, with_slot
from fnloop._display import checks
from fnloop._hooks.wrapper import Wrapper

__all__ = ["ConditionalHook", "Hook", "Trigger", "check_hook", "every", "once", "when"]

Hook = Callable[[TrainState], TrainState]


class Trigger(Protocol):
    """Says at which boundaries something is due."""

    def due(self, state: TrainState) -> bool: ...


@attrs.frozen(repr=False)
class ConditionalHook(Wrapper):
    """A hook that runs at some boundaries only."""

    moment: Any  # a Moment
    hook: Hook

    def __repr__(self) -> str:
        return f"{self.moment!r}({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        return self.hook(state) if self.moment.due(state) else self.poll(state)

    def begin(self, state: TrainState) -> TrainState:
        """Pass the beginning of a run on, to the moment too."""
        if hasattr(self.moment, "check"):
            self.moment.check(state.run)
        return super().begin(state)


@attrs.frozen(repr=False)
class every:
    """Run a hook periodically: ``every(epochs=1)(hook)``. Also says when to evaluate:
    ``evaluate_every=every(steps=100)``.

    Args:
        epochs: a number of epochs; or, below 1, a fraction: 0.25 is due after ceil(k · n · 0.25) of n updates, and
            always at the end of the epoch.
        steps: a number of applied updates, counted over epochs.
        seconds: of wall time, counted from the first boundary.

    Returns:
        A function from a hook to a hook.

    Raises:
        TypeError: not exactly one of the three is given.
        ValueError: it isn't above 0, or epochs is neither whole nor a fraction from 1e-6. When a run starts: a fraction of an
            epoch is asked for, and the training loader has no length.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(every(steps=2)(show),))
        2
        4
    """

    epochs: float | None = attrs.field(default=None, kw_only=True)
    steps: int | None = attrs.field(default=None, kw_only=True)
    seconds: float | None = attrs.field(default=None, kw_only=True)
    _clock: list[float] = attrs.field(factory=list, init=False, eq=False)  # when it was last due

    def __attrs_post_init__(self) -> None:
        given = {
            k: v
            for k, v in (("epochs", self.epochs), ("steps", self.steps), ("seconds", self.seconds))
            if v is not None
        }
        if len(given) != 1:
            raise TypeError(
                f"every expects one of epochs=, steps= or seconds=; got {', '.join(given) or 'none'}"
            )
        ((name, value),) = given.items()
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"every expects {name} as a number above 0; got {value!r}")
        if name == "steps" and not isinstance(value, int):
            raise ValueError(
                f"every expects steps as an int; got {value!r}. For a part of an epoch, write every(epochs=0.25)"
            )
        if name == "epochs" and value > 1 and value != int(value):
            raise ValueError(
                f"every expects epochs as a whole number, or as a fraction below 1; got {value!r}"
            )
        if name == "epochs" and value < _LEAST:
            raise ValueError(
                f"every expects epochs >= {_LEAST:g}; got {value!r}. For every update, write every(steps=1)"
            )

    def __repr__(self) -> str:
        name, value = next(
            (k, v) for k in ("epochs", "steps", "seconds") if (v := getattr(self, k)) is not None
        )
        return f"every({name}={value})"

    def __call__(self, hook: Hook) -> ConditionalHook:
        return ConditionalHook(
            attrs.evolve(self), check_hook(hook, repr(self))
        )  # a copy: each hook has a clock of its own

    def check(self, run: RunInfo) -> None:
        """Begin a run: start the clock anew.

        Raises:
            ValueError: it can't be told when this is due: a fraction of an epoch, and the training loader has no length.
        """
        self._clock.clear()
        if self.epochs is not None and self.epochs < 1 and run.steps_per_epoch is None:
            raise ValueError(
                f"{self!r} needs to know how long an epoch is, but the training loader has no length: write every(steps=...)"
            )

    def due(self, state: TrainState) -> bool:
        """Say whether this boundary is one of those."""
        if self.steps is not None:
            return UPDATE in state.events and state.step % self.steps == 0
        if self.seconds is not None:
            time = now(state)
            if not self._clock:
                self._clock.append(time)
            if time - self._clock[0] < self.seconds:
                return False
            self._clock[0] = time
            return True
        if EPOCH in state.events:
            return self.epochs < 1 or state.epoch % int(self.epochs) == 0  # type: ignore[operator]
        if self.epochs >= 1 or state.run is None:  # type: ignore[operator]
            return False
        done, updates = math.ceil(state.batch / state.run.window), state.run.steps_per_epoch
        return _is_due(_as_typed(self.epochs), done, updates)  # type: ignore[arg-type]


_LEAST = 1e-6  # of an epoch


@functools.lru_cache
def _as_typed(epochs: float) -> tuple[int, int]:
    """Return a fraction as it was typed, not as its binary float: numerator and denominator."""
    return Fraction(str(epochs)).as_integer_ratio()


def _is_due(part: tuple[int, int], done: int, updates: int) -> bool:
    """Return whether a part of an epoch is over after so many of its updates: whether ``done`` is ceil(k · updates · part)
    for a whole k."""
    a, b = part
    k = done * b // (updates * a)  # the largest with k · updates · part <= done
    return 1 <= k <= b // a and k * updates * a > (done - 1) * b


@attrs.frozen(repr=False)
class when:
    """Run a hook at the boundaries where a predicate holds: ``when(lambda state: state.step == 100)(hook)``.

    Args:
        predicate: ``state -> bool``, asked after every update.

    Returns:
        A function from a hook to a hook.

    Raises:
        TypeError: the predicate is no function.

    Example:
        >>> import attrs, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> enough = when(lambda state: state.step == 3)(lambda state: attrs.evolve(state, stop="enough"))
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(enough,))
        >>> state.step, state.stop
        (3, 'enough')
    """

    predicate: Callable[[TrainState], bool]

    def __attrs_post_init__(self) -> None:
        checks.function(
            "when", "predicate", self.predicate, "a function state -> bool", 1, also=type
        )

    def __repr__(self) -> str:
        return f"when({name_of(self.predicate)})"

    def __call__(self, hook: Hook) -> ConditionalHook:
        return ConditionalHook(self, check_hook(hook, repr(self)))

    def due(self, state: TrainState) -> bool:
        """Say whether the predicate holds."""
        __tracebackhide__ = True
        return bool(self.predicate(state))


@attrs.frozen(repr=False)
class once(Wrapper):
    """Run a hook the first time that it is called, and never again: ``when(...)(once(hook))``.

    That it has run is kept in the state, so it holds after a resume too.

    Args:
        hook: ``state -> state``.
        name: what it is remembered by; where it was written, by default.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is no function.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def hello(state):
        ...     print("hello")
        ...     return state
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(once(hello),))
        hello
    """

    hook: Hook
    name: str | None = None

    def __attrs_post_init__(self) -> None:
        check_hook(self.hook, "once")
        if self.name is not None:
            checks.text("once", "name", self.name, "what the hook is remembered by")
        if isinstance(self.hook, ConditionalHook):
            raise TypeError(
                f"once counts each call, due or not: write {self.hook.moment!r}(once({name_of(self.hook.hook)}))"
            )
        if self.name is None and _where(self.hook) is None:
            raise TypeError(
                f"{self!r} can't be told from others in another process: once(hook, name=...)"
            )

    def __repr__(self) -> str:
        return f"once({name_of(self.hook)})"

    @property
    def slot(self) -> str:
        """Where it is kept that the hook has run."""
        return f"once:{self.name or _where(self.hook)}"

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if self.slot in state.slots:
            return state
        new = self.hook(state)
        return with_slot(new, self.slot, True) if isinstance(new, TrainState) else new

    def flush(self, state: TrainState) -> TrainState:
        """Leave the hook alone: it has had its one call."""
        return state


def _where(hook: Any) -> str | None:
    """Say where a hook was written, the same in every process that runs the same script; or None."""
    code = getattr(hook, "__code__", None)
    if code:
        return f"{hook.__module__}.{hook.__qualname__}:{code.co_firstlineno}"
    return None if " at 0x" in repr(hook) or isinstance(hook, functools.partial) else repr(hook)


def check_hook(hook: Any, owner: str) -> Any:
    """Return a hook, having checked that it is one."""
    return checks.function(owner, "hook", hook, "a function state -> state", 1)
