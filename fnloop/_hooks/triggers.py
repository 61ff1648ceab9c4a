"""When a hook runs or an evaluation is due: ``every``, ``when`` and ``once``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction

import attrs

from fnloop._core.call import name_of
from fnloop._core.carry import updates_of_call
from fnloop._core.copies import with_slot
from fnloop._core.events import EPOCH, START, UPDATE
from fnloop._core.run_info import RunInfo, now
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.moments import ConditionalHook, Moment, check_hook, show_call
from fnloop._hooks.wrapper import Hook, Wrapper

__all__ = ["every", "once", "when"]

SMALLEST_FRACTION = 1e-6  # of an epoch


@attrs.frozen(repr=False)
class every(Moment):
    """Run a hook periodically: ``every(epochs=1)(hook)``.

    It also says when to evaluate: ``evaluate_every=every(steps=100)``.

    Args:
        epochs: a number of epochs; or, below 1, a fraction: 0.25 is due after ceil(k · n · 0.25) of
            n updates, and always at the end of the epoch. In a phase, too, it is the epochs of the
            whole run that are counted.
        steps: a number of applied updates, counted over all epochs and phases.
        seconds: seconds of wall time, counted from the first boundary.

    Returns:
        A moment: a function from a hook to a hook, which composes with ``|``, ``&`` and ``~``.

    Raises:
        TypeError: not exactly one of the three is given.
        ValueError: the number is not above 0, or ``epochs`` is neither a whole number nor a
            fraction of at least 1e-6. When a run starts: ``epochs`` is a fraction, and the training
            loader has no length.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hook = every(steps=2)(show)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(hook,))
        2
        4
    """

    epochs: float | None = attrs.field(default=None, kw_only=True)
    steps: int | None = attrs.field(default=None, kw_only=True)
    seconds: float | None = attrs.field(default=None, kw_only=True)
    _clock: list[float] = attrs.field(factory=list, init=False, eq=False)  # when it was last due

    def __attrs_post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            raise TypeError(
                "every expects one of epochs=, steps= or seconds=; got "
                f"{', '.join(given) or 'none'}"
            )
        ((name, value),) = given.items()
        checks.number("every", name, value, above=0)
        if name == "steps" and not isinstance(value, int):
            raise ValueError(
                f"every expects steps as an int; got {value!r}. For a part of an epoch, write "
                "every(epochs=0.25)"
            )
        if name == "epochs" and value > 1 and value != int(value):
            raise ValueError(
                f"every expects epochs as a whole number, or as a fraction below 1; got {value!r}"
            )
        if name == "epochs" and value < SMALLEST_FRACTION:
            raise ValueError(
                f"every expects epochs >= {SMALLEST_FRACTION:g}; got {value!r}. "
                "For every update, write every(steps=1)"
            )

    def _given(self) -> dict[str, float]:
        settings = {"epochs": self.epochs, "steps": self.steps, "seconds": self.seconds}
        return {name: value for name, value in settings.items() if value is not None}

    def __repr__(self) -> str:
        ((name, value),) = self._given().items()
        return f"every({name}={value})"

    @property
    def has_clock(self) -> bool:
        """Whether it counts seconds."""
        return self.seconds is not None

    def renew(self) -> every:
        """Return a copy with a clock of its own."""
        return attrs.evolve(self)

    def check(self, run: RunInfo) -> None:
        """Begin a run: restart the clock.

        Raises:
            ValueError: this is a fraction of an epoch, and the training loader has no length.
        """
        self._clock.clear()
        if self.epochs is not None and self.epochs < 1 and run.steps_per_epoch is None:
            varies = run.batches_per_epoch is not None
            why = "tbptt varies it" if varies else "the training loader has no length"
            raise ValueError(
                f"{self!r} needs to know how long an epoch is, but {why}: write every(steps=...)"
            )

    def due(self, state: TrainState) -> bool:
        """Return whether the hook is due at this boundary."""
        if self.steps is not None:
            # Whether the updates of the last call have reached or passed a multiple.
            return UPDATE in state.events and state.step % self.steps < updates_of_call(state)
        if self.seconds is not None:
            time = now(state.run)
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
        return _completes_part(_read_fraction(self.epochs), done, updates)  # type: ignore[arg-type]

    def quiet_until(self, state: TrainState) -> float:
        """Return ``state.step`` before which it need not be asked, unless the epoch ends."""
        if type(self) is not every:  # a subclass may be due at other moments
            return 0
        if self.steps is not None:
            return (state.step // self.steps + 1) * self.steps
        return math.inf if self.epochs is not None and self.epochs >= 1 else 0


@functools.lru_cache
def _read_fraction(epochs: float) -> tuple[int, int]:
    """Return a fraction as it was typed, not as its binary float: numerator and denominator."""
    return Fraction(str(epochs)).as_integer_ratio()


def _completes_part(part: tuple[int, int], done: int, updates: int) -> bool:
    """Return whether update ``done`` of an epoch completes a part of it.

    That is, whether ``done`` is ceil(k · updates · part) for a whole k.
    """
    a, b = part
    k = done * b // (updates * a)  # the largest with k · updates · part <= done
    return 1 <= k <= b // a and k * updates * a > (done - 1) * b


@attrs.frozen(repr=False)
class when(Moment):
    """Run a hook where a predicate holds: ``when(lambda state: state.step == 100)(hook)``.

    Args:
        predicate: ``state -> bool``, called after every update.

    Returns:
        A moment: a function from a hook to a hook, which composes with ``|``, ``&`` and ``~``.

    Raises:
        TypeError: the predicate is not a function.

    Example:
        >>> import attrs, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def stop(state):
        ...     return attrs.evolve(state, stop="enough")
        >>> hook = when(lambda state: state.step == 3)(stop)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(hook,))
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

    def due(self, state: TrainState) -> bool:
        """Return whether the predicate holds, after an update."""
        __tracebackhide__ = True
        return START not in state.events and bool(self.predicate(state))


@attrs.frozen(repr=False)
class once(Wrapper):
    """Run a hook the first time that it is called, and never again: ``when(...)(once(hook))``.

    The state remembers that the hook has run, so a resumed run does not run it again.

    Args:
        hook: ``state -> state``.
        name: the name under which the state remembers it; by default, where the hook was defined.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is not a function, is the result of ``every(...)`` or ``when(...)``, or
            needs a name.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def hello(state):
        ...     print("hello")
        ...     return state
        >>> hook = once(hello)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=(hook,))
        hello
    """

    hook: Hook
    name: str | None = None

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "hook", check_hook(self.hook, "once"))
        if self.name is not None:
            checks.text("once", "name", self.name, "the name that the hook is remembered by")
        if isinstance(self.hook, ConditionalHook):
            raise TypeError(
                "once counts each call, due or not: "
                f"write {show_call(self.hook.trigger, f'once({name_of(self.hook.hook)})')}"
            )
        if self.name is None and _definition_of(self.hook) is None:
            raise TypeError(
                f"{self!r} cannot be identified in another process: give it a name, once(hook, "
                "name=...)"
            )

    def __repr__(self) -> str:
        return f"once({name_of(self.hook)})"

    @property
    def slot(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the slot that says that the hook has run."""
        return f"once:{self.name or _definition_of(self.hook)}"

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if self.slot in state.slots:
            return state
        new = self.hook(state)
        return with_slot(new, self.slot, True) if isinstance(new, TrainState) else new

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run, if the hook has not had its one call."""
        return state if self.slot in state.slots else super().begin(state)

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the hook, if it has not run yet, is to be given outputs."""
        return self.slot not in state.slots and super().collects(state, loader)

    def flush(self, state: TrainState) -> TrainState:
        """Do nothing: the hook has had its one call."""
        return state


def _definition_of(hook: Callable[[TrainState], TrainState]) -> str | None:
    """Return where a hook is defined, or None if that is unknown.

    It is the same in every process that runs the same script.
    """
    hook = getattr(hook, "call", hook)
    code = getattr(hook, "__code__", None)
    if code:
        return f"{hook.__module__}.{hook.__qualname__}:{code.co_firstlineno}"
    return None if " at 0x" in repr(hook) or isinstance(hook, functools.partial) else repr(hook)
