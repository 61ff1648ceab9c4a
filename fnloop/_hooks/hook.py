"""What a hook is, when it is called, and hooks that wrap others."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, Protocol, Self

import attrs

from fnloop._backend.collectives import collective_count
from fnloop._core.code import code_of
from fnloop._core.history import (
    Fold,
    History,
    Monitored,
    check_monitored,
    keys_of,
)
from fnloop._core.parts import Part
from fnloop._core.records import Record
from fnloop._core.runs import RAN, RunInfo, pending
from fnloop._core.state import (
    Ownership,
    TrainState,
    changed,
    items_of_call,
    updates_of_call,
    watch_of,
    with_note,
    with_slot,
)
from fnloop._core.types import (
    END,
    EPOCH,
    RECORD,
    START,
    UPDATE,
    Call,
    Output,
    name_of,
)
from fnloop._display import checks
from fnloop._display.screen import warn_once

# --------------------------------------------------------------------------------------------------
# What a hook is, and the base class of hooks that wrap another hook.


def _is_elsewhere(definition: object) -> bool:
    """Return whether a class or a function is not one of the library."""
    return not checks.module_of(definition).startswith("fnloop.")


def _adopt(lifted: object, given: object, names: Iterable[str]) -> None:
    """Take over those members of what was given that it has."""
    for name in names:
        with contextlib.suppress(AttributeError):
            object.__setattr__(lifted, name, getattr(given, name))


class Hook:
    """A callback: a function ``state -> state`` that a run calls after every update.

    A plain function is a hook too, and so is any object that can be called and has some of these
    methods. Subclass this for a hook with more than one of them: each does nothing by default.

    Hooks are called in training mode, with gradients. There a call of the model uses dropout, and
    changes the statistics of BatchNorm, which a warning names. Call the model in ``with
    fl.evaluating(state) as model:``. To go back, return a snapshot of this run, or what
    ``restore(path, state)`` returns for one of its checkpoints. A state of another run is an error.

    Attributes:
        monitors: the name of the metric that it watches, such as "valid/loss", a tuple of several,
            or None. A name that the run cannot make is refused before the first update.
        reports: the names of the metrics that the hook itself adds to records.
        makes_records: when to make a record for its ``numbers``, by what their names begin with:
            ``{"bleu": every(epochs=1)}``. Such names are known before the first update.
        moments: the moments that it uses itself, ``moment.due(state)``. The run keeps their clocks.
            For ``at_start()`` and ``at_end()``, the run calls the hook without an update too.
        slot: the name of the slot with what it keeps in the state, or None.
        untried: the reason why ``dry_run`` must not call it, such as "it would send records"; or
            None.
        brings: the parts of checkpoints that are its own: how its slot is saved, if not as plain
            data, attrs records and objects with a ``state_dict`` are.

    Raises:
        TypeError: when it is given to ``fit``, or to another hook: it does not define ``__call__``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Count(Hook):
        ...     def begin(self, state):
        ...         self.updates = 0
        ...         return state
        ...     def __call__(self, state):
        ...         self.updates += 1
        ...         return state
        >>> count = Count()
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(count,))
        >>> count.updates
        3

    Replaces: lightning.Callback, keras.Callback, transformers.TrainerCallback
    """

    monitors: str | tuple[str, ...] | None = None
    reports: tuple[str, ...] = ()
    makes_records: Mapping[str, Moment] = MappingProxyType({})
    moments: tuple[Moment, ...] = ()
    brings: tuple[Part, ...] = ()
    slot: str | None = None
    untried: str | None = None
    _seen: History = History()
    _of_user: bool = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls._of_user = _is_elsewhere(cls)

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        checks.hide_fields(cls)

    def begin(self, state: TrainState) -> TrainState:
        """Return the state to train with, before the first update of every run.

        Also of a resumed run. ``state.run`` is known. The state may have other slots or frozen
        parameters, but not another position. It may raise.
        """
        return state

    def __call__(self, state: TrainState, /) -> TrainState:
        """Return the state to continue with: the same, or one with changes, such as ``stop``.

        A snapshot of this run, or what is restored of it, is one to go back to.
        """
        raise NotImplementedError  # as_hook refuses a class that does not define it

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation: before its first batch, with ``done=0``, and after each batch.

        Args:
            state: the state that is evaluated.
            loader: the name of the loader.
            done: the batches that this process has evaluated.
            total: the batches of this process; None if it is unknown.
        """

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether it wants the outputs of the evaluation that begins: by default, of each.

        It is asked if the hook defines ``receive``. Every process has to answer alike.
        """
        return True

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the ``Output`` of each batch of an evaluation, before its record is made.

        They are those of all processes, in order, copied to the host. A run that is cut before it
        has called the hook evaluates the loader once more, with the same outputs.
        """

    def numbers(self, state: TrainState) -> Mapping[str, float]:
        """Return the numbers that it adds to a record, by their names in it: "valid/ap".

        It is called for each record. With ``makes_records``, it is called only where that is due;
        with ``receive``, only where it has received outputs. ``state.history[-1]`` is the record as
        it is so far. It may return none. Every process has to return the same. A hook within
        another one adds none.
        """
        return {}

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work: after the last boundary of a run, and on SIGUSR1."""
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Handle the exception that ends a run in one process.

        ``state`` is the last consistent state. The error already has its note, and is raised
        afterwards in any case.
        """

    def close(self) -> None:
        """Release what it holds when a run ends, also after an exception."""

    def new_records(self, state: TrainState) -> tuple[Record, ...]:
        """Return the records since this was last called, at first since the run began.

        After another hook has gone back to a snapshot, they are those that follow it.

        Example:
            >>> import fnloop as fl, torch
            >>> from fnloop.testing import toy, toy_loss
            >>> class Show(fl.Hook):
            ...     def __call__(self, state):
            ...         for record in self.new_records(state):
            ...             print(record.epoch, record.metrics["train/loss"])
            ...         return state
            >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)]
            >>> state = fl.fit(step, toy(), batches, epochs=2, hooks=(Show(),))
            1 0.0
            2 -1.0
        """
        found = state.history.since(self._seen)
        object.__setattr__(self, "_seen", state.history)  # a hook may be a frozen record
        return tuple(found)


class BuiltIn(Hook):
    """A hook with what those of the library have besides: it saves, stops, or knows the others.

    Its arguments are checked. Each method does nothing by default. What it notes, by :meth:`note`,
    a run that is cut at this boundary has again, where the hook would decide again.

    Attributes:
        saves: the parts of a state that it saves, which are tried beforehand.
        ends_run_on_usr1: whether SIGUSR1 stops the run, and does not only save it.
        ranks: the metric whose best it keeps; None: it keeps no best.
        is_of_one_run: whether it writes what belongs to one run, at a place that others cannot use.

    Raises:
        TypeError: it is given an argument that it does not take.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Counts(BuiltIn):
        ...     calls = others = 0
        ...     def __call__(self, state):
        ...         self.calls += 1
        ...         return state
        ...     def poll(self, state):
        ...         self.others += 1
        ...         return state
        >>> counts = Counts()
        >>> hooks, batches = (fl.every(steps=3)(counts),), [torch.ones(1)] * 7
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), batches, hooks=hooks)
        >>> counts.calls, counts.others
        (2, 5)
    """

    saves: tuple[str, ...] = ()
    is_of_one_run: bool = False
    ends_run_on_usr1: bool = False
    ranks: Monitored | None = None
    _number: int | None = None  # among the hooks of its run, and those inside them

    def __new__(cls, *given: object, **settings: object) -> Self:
        """Return a hook. Raise for arguments that it does not take."""
        checks.arguments(cls.__name__, cls.__init__, given, settings)
        return super().__new__(cls)

    @classmethod
    def among(cls, hooks: Iterable[Hook]) -> list[Self]:
        """Return those of this class among hooks and the hooks inside them."""
        return [layer for layer in every_layer(hooks) if isinstance(layer, cls)]

    @staticmethod
    def parts_saved(hooks: Iterable[Hook]) -> frozenset[str]:
        """Return the parts of a state that hooks save."""
        return frozenset(part for layer in BuiltIn.among(hooks) for part in layer.saves)

    def place_in(self, hooks: Sequence[Hook]) -> int:
        """Return the number of the hook of a run that is this one, or has it inside."""
        return next(n for n, each in enumerate(hooks) if any(la is self for la in layers(each)))

    def note(self, state: TrainState, mark: str, value: float | None = 1.0) -> TrainState:
        """Return the state with a note of this hook; with None, without it.

        In a run only. One whose mark begins with "ran" is taken back after the boundary.
        """
        known = self._number is not None
        return with_note(state, f"{mark} {self._number}", value) if known else state

    @staticmethod
    def is_amid(state: TrainState) -> bool:
        """Return whether a boundary is not over: records are to be made, or hooks to be called."""
        return bool(pending(state.todo))

    def has_noted(self, state: TrainState, mark: str) -> bool:
        """Return whether the state has a note of this hook."""
        return f"{mark} {self._number}" in state.noted

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if it cannot work beside the hooks of a run, of which it is one, in their order."""

    def tried(self, place: Path) -> tuple[Hook, str]:
        """Return the hook as ``dry_run`` calls it, and whether it has a "file" or a "folder" then.

        Args:
            place: the path of a file or a folder that may be written instead of its own.
        """
        return self, ""

    def check_metrics(self, state: TrainState) -> None:
        """Raise KeyError if the newest record lacks what it watches, or a hook inside it does."""
        for layer in layers(self):
            for key in () if is_of_user(layer) else keys_of(layer):
                check_monitored(checks.known_as(layer), key, state)

    def take_back(self, state: TrainState) -> TrainState:
        """Return the state without a stop of this hook that does not hold any more.

        It is called first of all, for example with a time limit that was raised.
        """
        return state

    def poll(self, state: TrainState) -> TrainState:
        """Return the state to continue with, where ``every`` or ``when`` skips the hook."""
        return state

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up instead of all others, where a run has already reached its end.

        A process that was killed may have left something unfinished.
        """
        return state


# What hooks of users could define, and what to write instead.
_GONE = {
    "wants_outputs": "leave it out, because a hook that defines receive is asked by collects",
    "adds_numbers": "return {} from numbers(state) where there are none",
    "outside": "name the moments: moments = (fl.at_start(), fl.at_end())",
    "poll": "list the hook without every(...) or when(...), and ask a moment in it, "
    "moment.due(state), with moments = (moment,)",
    "settle": "call it with the state that fit returns",
    "take_back": "give fit the state without its stop: attrs.evolve(state, stop=None)",
    "check_beside": "compare the hooks where you list them",
    "begins_everywhere": "list the hook without on_main, and look at state.backend.main in it",
    "ends_run_on_usr1": "list requeue(), which ends a SLURM job",
}


HookFn = Hook | Callable[[TrainState], TrainState]  # what a user may give
_MEMBERS = [name for name in vars(Hook) if not name.startswith("_")]


@attrs.frozen(repr=False, slots=False)
class LiftedHook(Hook):
    """A function or an object as a hook. It has those members of :class:`Hook` that it defines."""

    call: Callable[[TrainState], TrainState]

    def __attrs_post_init__(self) -> None:
        _adopt(self, self.call, _MEMBERS)
        object.__setattr__(self, "_of_user", _is_elsewhere(self.call))

    def __repr__(self) -> str:
        return name_of(self.call)

    @property
    def __name__(self) -> str:
        return name_of(self.call)

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        return self.call(state)


def as_hook(given: HookFn) -> Hook:
    """Return a hook: a function, or an object that defines some of what :class:`Hook` does.

    Raises:
        TypeError: a subclass of Hook does not define ``__call__``, or a hook defines what there is
            no more.
    """
    hook = given if isinstance(given, Hook) else LiftedHook(given)
    if type(hook).__call__ is Hook.__call__:
        name = type(hook).__name__
        raise TypeError(f"{name} is a Hook without a method __call__: define it, (state) -> state")
    for name in () if isinstance(hook, BuiltIn) else _GONE:
        if hasattr(given, name):
            raise TypeError(
                f"{name_of(given)} defines {name}, which is not a member of a hook any more: "
                f"{_GONE[name]}"
            )
    return hook


class Wrapper(BuiltIn):
    """A hook around another one, ``hook``: it decides whether, and where, that is called.

    The members of the hook inside are those of this one, if it does not define its own.

    Attributes:
        hook: the hook inside.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Twice(Wrapper):
        ...     def __init__(self, hook):
        ...         self.take(hook, "Twice")
        ...     def __call__(self, state):
        ...         return self.call(self.call(state))
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hooks = (fl.every(steps=2)(Twice(show)),)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=hooks)
        2
        2
    """

    hook: Hook

    def take(self, given: Hook | Callable[[TrainState], TrainState], owner: str) -> None:
        """Check what was given as the hook, and keep it.

        Args:
            given: the hook.
            owner: what it was given to, for messages.

        Raises:
            TypeError: it is not a hook.
        """
        object.__setattr__(self, "hook", check_hook(given, owner))

    @property
    def inside(self) -> list[Hook]:
        """The hooks inside, the outermost first."""
        return [*layers(self.hook)]

    @property
    def innermost(self) -> Hook:
        """The hook inside all wrappers."""
        return self.inside[-1]

    def call(self, state: TrainState) -> TrainState:
        """Call the hook. Warn once if it is the user's, and moves buffers that training moves."""
        __tracebackhide__ = True
        return call_hook(self.hook, state)

    def around(self, call: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
        """Call a method of the hook, from a state to a state."""
        return call(state)

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run."""
        return self.around(self.hook.begin, state)

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation."""
        self.hook.evaluating(state, loader, done, total)

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the hook wants the outputs of an evaluation."""
        return self.hook.collects(state, loader)

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation."""
        self.hook.receive(state, outputs)

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary at which the hook itself is not called."""
        return self.around(self.hook.poll, state) if isinstance(self.hook, BuiltIn) else state

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work."""
        return self.around(self.hook.flush, state)

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up after a run that has already reached its end."""
        return self.around(self.hook.settle, state) if isinstance(self.hook, BuiltIn) else state


def check_beside(hooks: Sequence[Hook]) -> None:
    """Raise if a hook of a run cannot work beside the others. Each learns its number."""
    for number, layer in enumerate(every_layer(hooks)):
        if isinstance(layer, BuiltIn):
            object.__setattr__(layer, "_number", number)
            layer.check_beside(hooks)


def defines(hook: Hook, name: str) -> bool:
    """Return whether a hook has a method of its own instead of that of :class:`Hook`."""
    own = itertools.takewhile(lambda cls: cls is not Hook, type(hook).__mro__)
    return name in vars(hook) or any(name in vars(cls) for cls in own)


def collects_outputs(hook: Hook) -> bool:
    """Return whether a hook may ask for the outputs of an evaluation."""
    return defines(unwrap_hook(hook), "receive")


def may_be_due(hook: Hook, event: str) -> bool:
    """Return whether a hook may be due at a boundary without an update: "start" or "end"."""
    return any(event in moment.outside for layer in layers(hook) for moment in layer.moments)


def is_of_user(hook: Hook) -> bool:
    """Return whether a hook is not one of the library, but the user's own, or a function."""
    return hook._of_user


def call_hook(hook: Hook, state: TrainState) -> TrainState:
    """Call a hook. Warn once if it is the user's, and moves buffers that training moves.

    One that returns what has changed the model as a whole, such as ``update_batchnorm`` or
    ``restore``, means it. What other processes send is written to buffers too, so a call with an
    exchange between them says nothing.
    """
    __tracebackhide__ = True
    if not hook._of_user or isinstance(hook, Wrapper) or not (watch := watch_of(state.model)):
        return hook(state)
    watch.begin()
    exchanges = collective_count()
    new = hook(state)
    moved = watch.end()
    if moved and collective_count() == exchanges and state.backend.main and _is_same(state, new):
        warn_once(
            f"fit: the hook {name_of(hook)} has moved the buffer {moved[0]}, as training does: "
            "hooks are called in training mode, where a call of the model moves its statistics. "
            "To look at the model, write in the hook: with fl.evaluating(state): ..."
        )
    return new


def _is_same(state: TrainState, new: object) -> bool:
    """Return whether a state has the weights of another one, and nothing else was restored."""
    if not isinstance(new, TrainState) or new.model is not state.model:
        return False
    return Ownership.generation_of(new) == Ownership.generation_of(state)


def every_layer(hooks: Iterable[Hook]) -> list[Hook]:
    """Return hooks and the hooks inside them."""
    return [layer for hook in hooks for layer in layers(hook)]


def layers(hook: Hook) -> Iterator[Hook]:
    """Yield a hook and the hooks inside it, the outermost first."""
    yield hook
    while isinstance(hook, Wrapper):
        hook = hook.hook
        yield hook


def begin_records(hook: Hook, state: TrainState) -> None:
    """Let the records of a run that begins be the new ones, of a hook and of those inside it."""
    for layer in layers(hook):
        layer.new_records(state)


def slots_of(hooks: Iterable[Hook]) -> frozenset[str]:
    """Return the names of the slots that hooks keep."""
    return frozenset(la.slot for hook in hooks for la in layers(hook) if la.slot is not None)


def unwrap_hook(hook: Hook) -> Hook:
    """Return the hook inside all wrappers."""
    *_, inner = layers(hook)
    return inner


def check_needs_no_hook(expected: str, moment: Moment) -> None:
    """Raise TypeError if a moment goes by what its hook takes."""
    if any(clock.learns for clock in moment.clocks):
        raise TypeError(
            f"{expected} a moment that needs no hook; {moment!r} goes by what its hook takes: "
            f"write {show_call(moment, 'checkpoint(...)')}"
        )


# --------------------------------------------------------------------------------------------------
# Moments, which say when something is due, and how they compose.


class Trigger(Protocol):
    """Decides at which boundaries something is due.

    A trigger may also have a method ``check(run: RunInfo)``, which is called when a run begins.
    """

    def due(self, state: TrainState, /) -> bool:
        """Return whether something is due at this boundary."""
        ...


@attrs.define(eq=False)
class Clock:
    """When a moment that counts seconds was last due. The run notes it in the state.

    Args:
        last: by the clock of the run; None before the first boundary.
        mark: the name of its note.
        zero: what the clock of the run shows at second 0 of all of the run.

    Example:
        >>> from fnloop.testing import toy
        >>> class hourly(Moment):
        ...     clocks = (Clock(),)
        ...     def due(self, state):
        ...         return self.clocks[0].has_passed(3600, state)
        >>> hourly().due(toy())
        False
    """

    last: float | None = None
    mark: str = ""
    zero: float = 0.0

    @property
    def learns(self) -> bool:
        """Whether it goes by what its hook takes, so there has to be one."""
        return False

    def took(self, state: TrainState, seconds: float) -> TrainState:
        """Learn how long the hook has taken. Return the state with what it knows."""
        return state

    def has_passed(self, seconds: float, state: TrainState) -> bool:
        """Return whether a number of seconds has passed since it was last due. If so, it is now."""
        now = RunInfo.now(state.run)
        if self.last is None:
            self.last = now
        if now - self.last < seconds:
            return False
        self.last = now
        return True

    def begin(self, state: TrainState, mark: str, zero: float) -> None:
        """Continue from the notes in a state."""
        self.mark, self.zero = mark, zero
        if mark in state.noted:
            self.last = state.noted[mark] + zero

    def notes(self) -> dict[str, float]:
        """Return what to note, by the ends of names."""
        return {} if self.last is None else {"": self.last - self.zero}

    def noted(self, state: TrainState) -> TrainState:
        """Return the state with the notes."""
        for end, value in self.notes().items() if self.mark else ():
            state = with_note(state, self.mark + end, value)
        return state


class Moment(ABC):
    """A trigger that can be called with a hook, and combined with others: ``|``, ``&``, ``~``.

    Write :meth:`due`. A moment that is not due until some update says so, by :meth:`quiet_until`:
    then a run asks it no sooner.

    Attributes:
        outside: the events at which it may be due besides those of an update: "start", "end".
        excludes_end: whether it is not due where it otherwise would be, because the run ends there.
        monitors: the metrics that it depends on.
        ranks: the metric whose best it goes by; or None.
        clocks: the clocks of what counts seconds in it.
        counts_items: whether it uses ``state.items``, which a run then reads after each update.

    Raises:
        TypeError: when called or combined: it gets something else than one hook, or than a moment.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class powers_of_two(Moment):
        ...     def due(self, state):
        ...         return state.step.bit_count() == 1
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hooks = (powers_of_two()(show),)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 5, hooks=hooks)
        1
        2
        4
    """

    outside: frozenset[str] = frozenset()
    excludes_end: bool = False
    monitors: tuple[str, ...] = ()
    ranks: Monitored | None = None
    clocks: tuple[Clock, ...] = ()
    counts_items: bool = False

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        if _is_elsewhere(cls):
            checks.hide_fields(cls)
        else:
            # jsonargparse would take apart what is a default of a function: every(epochs=1).
            del cls.__attrs_attrs__  # type: ignore[attr-defined]

    def __new__(cls, *given: object, **settings: object) -> Self:
        """Return a moment. Raise for ``every(2)`` and ``at_end(hook)``."""
        if given and "__init__" in vars(cls):  # a subclass without may take others
            taken = [*inspect.signature(cls.__init__).parameters.values()][1:]
            if all(parameter.kind is parameter.KEYWORD_ONLY for parameter in taken):
                _refuse_positional(cls.__name__, given[0], [each.name for each in taken])
        checks.arguments(cls.__name__, cls.__init__, given, settings)
        return super().__new__(cls)

    @abstractmethod
    def due(self, state: TrainState) -> bool:
        """Return whether something is due at this boundary."""

    def due_here(self, state: TrainState) -> tuple[bool, bool]:
        """Return whether it is due in any case, and whether only because the run ends here.

        Where the run ends, it is asked as if the run continued, and then whether the end makes a
        difference. So a run that continues has the same records as one that never stopped.
        """
        __tracebackhide__ = True
        continued = state
        if END in state.events and not self.excludes_end:
            continued = changed(state, events=state.events - {END})
        if self.due(continued):
            return True, False
        return False, END in state.events and END in self.outside and self.due(state)

    def quiet_until(self, state: TrainState) -> float:
        """Return ``state.step`` before which it need not be asked, unless the epoch ends."""
        return 0

    def check(self, run: RunInfo) -> None:  # noqa: B027
        """Begin a run."""

    def renew(self) -> Moment:
        """Return a moment with a clock of its own, if it has one."""
        return self

    @staticmethod
    def asked_first(owner: str, moment: Trigger, hook: str) -> Moment:
        """Return when a hook is due that is asked before a record is made, with a clock of its own.

        Args:
            owner: the class of the hook, for messages.
            moment: what was given as ``every``.
            hook: the call of the hook without it, for messages.

        Raises:
            TypeError: it is not a moment, or depends on records.
        """
        if not is_moment(moment):
            raise TypeError(
                f"{owner} expects every as every(epochs=1), every(steps=100) or when(predicate); "
                f"got {checks.describe(moment)}"
            )
        checked = as_moment(moment)
        check_needs_no_hook(f"{owner} expects every as", checked)
        if checked.monitors:
            raise TypeError(
                f"{owner} is asked before the record is made, so every cannot depend on it; got "
                f"{moment!r}. Write {show_call(moment, hook)}"
            )
        return checked.renew()

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} is neither true nor false: combine moments by |, & and ~, not by or, and "
            "and not"
        )

    def __call__(self, hook: HookFn, *others: HookFn) -> ConditionalHook:
        if others:
            calls = ", ".join(show_call(self, name_of(each)) for each in (hook, *others))
            raise TypeError(f"{self!r} takes one hook: write {calls}")
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
        if any(clock.learns for clock in self.clocks):
            raise TypeError(
                f"{_Not((self,))!r} says nothing, because it goes by what its hook takes when it "
                "is called: combine it by | and &"
            )
        return _Not((self,))


@attrs.frozen(repr=False, slots=False)
class _LiftedMoment(Moment):
    """A trigger that is not a moment: an object with a method ``due``."""

    trigger: Trigger

    def __attrs_post_init__(self) -> None:
        _adopt(self, self.trigger, ("quiet_until", "check", "outside", "monitors"))

    def __repr__(self) -> str:
        return repr(self.trigger)

    def due(self, state: TrainState) -> bool:
        __tracebackhide__ = True
        return self.trigger.due(state)


def is_moment(given: object) -> bool:
    """Return whether this says when something is due: a moment, or an object like one."""
    return not isinstance(given, type) and checks.has_methods(given, "due")


def as_moment(trigger: Trigger) -> Moment:
    """Return a trigger as a moment."""
    return trigger if isinstance(trigger, Moment) else _LiftedMoment(trigger)


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class ConditionalHook(Wrapper):
    """A hook that runs only at the boundaries of a trigger."""

    trigger: Moment
    hook: Hook

    def __attrs_post_init__(self) -> None:
        trigger = self.trigger
        self.moments, self.monitors, self.ranks = (trigger,), trigger.monitors, trigger.ranks

    @property
    def __name__(self) -> str:  # in messages about its metrics
        return repr(self.trigger)

    def __repr__(self) -> str:
        return show_call(self.trigger, name_of(self.hook))

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        due = self.trigger.due(state)
        for clock in self.trigger.clocks:
            state = clock.noted(state)
        if not due:
            if RECORD in state.events:
                self.check_metrics(state)  # although the hook is not called
            return self.poll(state)
        if END in self.trigger.outside:
            if END in state.events and self.has_noted(state, RAN):
                return state  # it ran at this boundary already, before a hook stopped the run
            state = self.note(state, RAN)
        began = time.monotonic()
        state = self.call(state)
        for clock in self.trigger.clocks:
            state = clock.took(state, time.monotonic() - began)
        return state


class _Outside(Moment):
    """The moment of an event at which there is no update."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def due(self, state: TrainState) -> bool:
        """Return whether this boundary is one of the event."""
        return not self.outside.isdisjoint(state.events)


@attrs.frozen(repr=False, slots=False)
class at_start(_Outside):
    """The moment before the first update of a state at step 0: ``at_start()(hook)``.

    With ``evaluate_every=at_start() | every(epochs=1)`` the untrained model is evaluated too, in a
    record at step 0. It is never due when a run is resumed.

    Returns:
        A moment: call it with a hook; combine moments with ``|``, ``&`` and ``~``.

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

    outside = frozenset({START})


@attrs.frozen(repr=False, slots=False)
class at_end(_Outside):
    """The moment at which a run ends: ``at_end()(hook)``.

    That is at its target, or after a hook has stopped it. An interruption, a signal or an exception
    is not the end, because the run will continue.

    Returns:
        A moment: call it with a hook; combine moments with ``|``, ``&`` and ``~``.

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

    outside = frozenset({END})


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class _Compound(Moment):
    parts: tuple[Moment, ...]

    def __attrs_post_init__(self) -> None:
        self.outside = frozenset().union(*(part.outside for part in self.parts))
        self.excludes_end = any(part.excludes_end for part in self.parts)
        self.monitors = sum((part.monitors for part in self.parts), ())
        self.clocks = sum((part.clocks for part in self.parts), ())
        self.counts_items = any(part.counts_items for part in self.parts)

    def __repr__(self) -> str:
        parts = (f"({part!r})" if _is_compound(part) else repr(part) for part in self.parts)
        return f" {self._symbol} ".join(parts)

    _symbol = ""

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
        parts = sorted(self.parts, key=lambda part: bool(part.clocks))
        return all(part.due(state) for part in parts)


class _Not(_Compound):
    _symbol = "~"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        # It is due at updates only, and not where the run ends if its part is due there.
        self.excludes_end |= END in self.outside
        self.outside = frozenset()

    def __invert__(self) -> Moment:
        return self.parts[0]

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if _is_compound(part) else f"~{part!r}"

    def due(self, state: TrainState) -> bool:
        """Return whether the part is not due at this update; False at the start."""
        __tracebackhide__ = True
        due = self.parts[0].due(state)
        return not due and START not in state.events


def _is_compound(trigger: object) -> bool:
    return isinstance(trigger, _Any | _All)


def show_call(trigger: object, hook: str) -> str:
    """Return what to type to call a hook at the boundaries of a trigger."""
    alone = not isinstance(trigger, _Compound)  # a call binds tighter than ~
    return f"{trigger!r}({hook})" if alone else f"({trigger!r})({hook})"


def _refuse_positional(owner: str, given: object, names: Sequence[str]) -> NoReturn:
    """Raise for a moment that was given something without a name, maybe the hook."""
    is_hook = callable(given)
    setting = f"{names[0]}={1 if is_hook else given}" if names else ""
    call = f"{owner}({setting})"
    expected = f"{'=, '.join(names)}=" if names else "no argument"
    expected = f"one of {expected}" if len(names) > 1 else expected
    raise TypeError(
        f"{owner} expects {expected}; got {name_of(given) if is_hook else checks.describe(given)}: "
        f"write {f'{call}({name_of(given)})' if is_hook else call}"
    )


def _check_trigger(other: Trigger, symbol: str) -> Moment:
    if not is_moment(other):
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
    if is_moment(hook):
        raise TypeError(
            f"{owner} expects hook as a function state -> state, but {hook!r} says only when: "
            f"write {show_call(hook, 'hook')} in its place, or combine moments by |, & and ~"
        )
    return as_hook(checks.function(owner, "hook", hook, "a function state -> state", 1))


# --------------------------------------------------------------------------------------------------
# When a hook runs or an evaluation is due: `every`, `when` and `once`.

SMALLEST_FRACTION = 1e-6  # of an epoch


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class every(Moment):
    """Run a hook periodically: ``every(epochs=1)(hook)``.

    Use it for evaluations too: ``evaluate_every=every(steps=100)``.

    Args:
        epochs: a number of epochs; or, below 1, a fraction: 0.25 is due after ceil(k · n · 0.25) of
            n updates, and always at the end of the epoch. Epochs are counted over the whole run,
            also inside a phase.
        steps: a number of applied updates, counted over all epochs and phases.
        items: a number of items, such as samples or tokens, over all processes: due after each
            update with which ``state.items`` reaches a multiple, or several.
        seconds: seconds of wall time, counted from the first boundary. A resumed run continues the
            count; the time in between does not count.

    Returns:
        A moment: call it with a hook; combine moments with ``|``, ``&`` and ``~``.

    Raises:
        TypeError: not exactly one of the four is given.
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
    items: int | None = attrs.field(default=None, kw_only=True)
    seconds: float | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            hint = ""
            if given:
                calls = " | ".join(f"every({name}={value!r})" for name, value in given.items())
                hint = f". To be due at each of them, write {calls}"
            raise TypeError(
                "every expects one of epochs=, steps=, items= or seconds=; got "
                f"{', '.join(given) or 'none'}{hint}"
            )
        ((name, value),) = given.items()
        value = checks.number("every", name, value, above=0)
        setattr(self, name, value)
        self.clocks, self.counts_items = (Clock(),) * (name == "seconds"), name == "items"
        if name in ("steps", "items") and not isinstance(value, int):
            part = ". For a part of an epoch, write every(epochs=0.25)" if name == "steps" else ""
            raise ValueError(f"every expects {name} as an int; got {value!r}{part}")
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
        names = ("epochs", "steps", "items", "seconds")
        settings = checks.fields_of(self, names).items()
        return {name: value for name, value in settings if value is not None}

    def __repr__(self) -> str:
        ((name, value),) = self._given().items()
        return f"every({name}={value})"

    def renew(self) -> every:
        """Return a copy with a clock of its own, if it has one."""
        if not self.clocks:
            return self
        copied = copy.copy(self)
        copied.clocks = (Clock(),)
        return copied

    def check(self, run: RunInfo) -> None:
        """Begin a run.

        Raises:
            ValueError: this is a fraction of an epoch, and the training loader has no length.
        """
        for clock in self.clocks:
            clock.last = None  # unless the state knows better
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
        if self.items is not None:
            if UPDATE not in state.events:
                return False
            before, items = items_of_call(state)
            return items // self.items > before // self.items
        if self.seconds is not None:
            return self.clocks[0].has_passed(self.seconds, state)
        if EPOCH in state.events:
            return self.epochs < 1 or state.epoch % int(self.epochs) == 0  # type: ignore[operator]
        if self.epochs >= 1 or state.run is None:  # type: ignore[operator]
            return False
        done, updates = state.run.windows.updates(state.batch), state.run.steps_per_epoch
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
    from fractions import Fraction

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
    """Run a hook when a predicate is true: ``when(lambda state: state.step == 100)(hook)``.

    Args:
        predicate: ``state -> bool``, called after every update.

    Returns:
        A moment: call it with a hook; combine moments with ``|``, ``&`` and ``~``.

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


@attrs.define(repr=False, slots=False, unsafe_hash=True)
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
        self.take(self.hook, "once")
        if self.name is not None:
            checks.text("once", "name", self.name, "the name that the hook is remembered by")
        if isinstance(self.hook, ConditionalHook):
            raise TypeError(
                "once counts each call, due or not: "
                f"write {show_call(self.hook.trigger, f'once({name_of(self.hook.hook)})')}"
            )
        name = self.name or _definition_of(self.hook)
        if name is None:
            raise TypeError(
                f"{self!r} cannot be identified in another process: give it a name, once(hook, "
                "name=...)"
            )
        self.slot: str = f"once:{name}"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __repr__(self) -> str:
        return f"once({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if self.slot in state.slots:
            return state
        new = self.call(state)
        return with_slot(new, self.slot, True) if isinstance(new, TrainState) else new

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run, if the hook has not had its one call."""
        return state if self.slot in state.slots else super().begin(state)

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise for two of one name, and for one that is called before anything is evaluated.

        Raises:
            ValueError: there is such a hook.
        """
        if [layer.slot for layer in every_layer(hooks)].count(self.slot) > 1:
            raise ValueError(
                f"two hooks would be remembered as {self.slot!r}, and one of them would never run: "
                "once(hook, name=...)"
            )
        around = [type(layer) for layer in layers(hooks[self.place_in(hooks)])]
        if collects_outputs(self) and ConditionalHook not in around[: around.index(once)]:
            raise ValueError(
                f"{self!r} would have its one call at the first update, where nothing is "
                f"evaluated: write every(epochs=1)({self!r})"
            )

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
    code = code_of(hook)
    if code:
        return f"{hook.__module__}.{hook.__qualname__}:{code.co_firstlineno}"
    return None if " at 0x" in repr(hook) or isinstance(hook, functools.partial) else repr(hook)


# --------------------------------------------------------------------------------------------------
# Run a hook whenever a metric is better than ever before.


@attrs.define(repr=False, slots=False, unsafe_hash=True)
class when_improved(Moment):
    """Run a hook when a metric is better than ever before: ``when_improved("valid/loss")(hook)``.

    The first value counts as an improvement, an equal one does not, and NaN never does. The
    decision is a function of the history, so a resumed run decides as an uninterrupted one. Closing
    records, which a run appends if it ends between two evaluations, do not count.

    Args:
        key: the metric, such as "valid/loss".
        mode: "min" if lower is better, "max" if higher; by default as the name of the metric says.
        since: which values count: those of the "phase", if there is one, or of the whole "run".

    Returns:
        A moment: call it with a hook; combine moments with ``|``, ``&`` and ``~``.

    Raises:
        TypeError: key is not a str.
        ValueError: there is no such mode, or it is None and the name of the metric does not imply
            one.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At its first evaluation: your own middleware or hook, which might add it, has not
            added it. The message lists the metrics that exist.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.epoch, state.history.latest("valid/loss"))
        ...     return state
        >>> hook = when_improved("valid/loss")(show)
        >>> rates = fl.schedule(lambda i, total: (1, -1, 3)[i])         # w is -1, 0, -3
        >>> loaders = [torch.ones(1)], [torch.ones(1)]
        >>> state = fl.fit(fl.pipeline(rates)(toy_loss), toy(), loaders, epochs=3, hooks=(hook,))
        1 -1.0
        3 -3.0
    """

    key: str
    mode: str | None = None
    since: str = attrs.field(default="phase", kw_only=True)

    def __attrs_post_init__(self) -> None:
        self.ranks: Monitored = Monitored("when_improved", self.key, self.mode, self.since)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.monitors, self._best = (self.key,), Fold(self._better_of, None)

    def __repr__(self) -> str:
        return repr(Call.of(when_improved, self))

    def due(self, state: TrainState) -> bool:
        """Return whether this boundary added a record with a new best value."""
        if RECORD not in state.events or not check_monitored(repr(self), self.key, state):
            return False
        return self._best(state.history, self.ranks.first(state)) is state.history[-1]

    def _better_of(self, best: Record | None, record: Record) -> Record | None:
        """Return the record with the better value; None if neither has one."""
        if not self.ranks.counts(record):
            return best
        before = float("nan") if best is None else best.metrics[self.key]
        return record if self.ranks.better(record.metrics[self.key], before) else best
