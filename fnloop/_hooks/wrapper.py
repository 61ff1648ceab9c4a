"""What a hook is, and the base class of hooks that wrap another hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import attrs

from fnloop._core.call import name_of
from fnloop._core.state import TrainState
from fnloop._core.types import Output


class Hook:
    """What a run calls after every update, ``state -> state``, and what else it may do.

    A plain function is a hook too, and so is any object that can be called and has some of these
    methods. Subclass this for a hook with more than one of them: each does nothing by default.

    Attributes:
        monitors: the name of the metric that it watches, such as "valid/loss", a tuple of several,
            or None. A name that the run cannot make is refused before the first update.
        reports: the names of the metrics that the hook itself adds to records.
        slot: the name of the slot with what it keeps in the state, or None.
        outside: at which boundaries without an update it is called too: "start", "end".
        wants_outputs: whether it may ask for the outputs of an evaluation, by ``collects``.
        begins_everywhere: whether ``begin`` needs all processes, within ``on_main`` too.
        ends_run_on_usr1: whether SIGUSR1 stops the run, and does not only save it.

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
    """

    monitors: str | tuple[str, ...] | None = None
    reports: tuple[str, ...] = ()
    slot: str | None = None
    outside: frozenset[str] = frozenset()
    wants_outputs: bool = False
    begins_everywhere: bool = False
    ends_run_on_usr1: bool = False

    def __call__(self, state: TrainState, /) -> TrainState:
        """Return the state to continue with: the same, or one with changes, such as ``stop``."""
        raise NotImplementedError(f"{name_of(type(self))} has no method __call__(state) -> state")

    def take_back(self, state: TrainState) -> TrainState:
        """Return the state without a stop of this hook that does not hold any more.

        It is called first of all, for example with a time limit that was raised.
        """
        return state

    def begin(self, state: TrainState) -> TrainState:
        """Return the state to train with, before the first update of every run.

        Also of a resumed run. ``state.run`` is known. The state may have other slots or frozen
        parameters, but not another position. It may raise.
        """
        return state

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation: before its first batch, with ``done=0``, and after each batch.

        Args:
            state: the state that is evaluated.
            loader: the name of the loader.
            done: the batches that this process has evaluated.
            total: the batches of this process; None if it is unknown.
        """

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether it wants the outputs of the evaluation that begins.

        It is asked if ``wants_outputs``. Every process has to answer alike.
        """
        return False

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the ``Output`` of each batch of an evaluation, before its record is made.

        They are those of all processes, in order, copied to the host.
        """

    def poll(self, state: TrainState) -> TrainState:
        """Return the state to continue with, where ``every`` or ``when`` skips the hook."""
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work: after the last boundary of a run, and on SIGUSR1."""
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Handle the exception that ends a run in one process.

        ``state`` is the last consistent state. The error already has its note, and is raised
        afterwards in any case.
        """

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up instead of all others, where a run has already reached its end.

        A process that was killed may have left something unfinished.
        """
        return state

    def close(self) -> None:
        """Release what it holds when a run ends, also after an exception."""


HookFn = Hook | Callable[[TrainState], TrainState]  # what a user may give
_MEMBERS = [name for name in vars(Hook) if not name.startswith("__")]


@attrs.frozen(repr=False, slots=False)
class _Lifted(Hook):
    """A function or an object as a hook. It has those members of :class:`Hook` that it defines."""

    call: Callable[[TrainState], TrainState]

    def __attrs_post_init__(self) -> None:
        for name in _MEMBERS:
            if hasattr(self.call, name):
                object.__setattr__(self, name, getattr(self.call, name))
        if hasattr(self.call, "collects"):
            object.__setattr__(self, "wants_outputs", True)

    def __repr__(self) -> str:
        return name_of(self.call)

    @property
    def __name__(self) -> str:
        return name_of(self.call)

    def __call__(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        return self.call(state)


def as_hook(given: HookFn) -> Hook:
    """Return a hook: a function, or an object that defines some of what :class:`Hook` does."""
    return given if isinstance(given, Hook) else _Lifted(given)


class Wrapper(Hook):
    """A hook around another one, ``hook``. It passes on everything but the call itself."""

    hook: Hook

    @property
    def wants_outputs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the hook itself."""
        return self.hook.wants_outputs

    @property
    def begins_everywhere(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the hook itself."""
        return self.hook.begins_everywhere

    @property
    def ends_run_on_usr1(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As the hook itself."""
        return self.hook.ends_run_on_usr1

    def take_back(self, state: TrainState) -> TrainState:
        """Take back a stop."""
        return self.hook.take_back(state)

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run."""
        return self.hook.begin(state)

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
        return self.hook.poll(state)

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work."""
        return self.hook.flush(state)

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Handle the failure of a run."""
        self.hook.failed(state, error)

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up after a run that has already reached its end."""
        return self.hook.settle(state)

    def close(self) -> None:
        """Release what the hook holds."""
        self.hook.close()


def place_of(state: TrainState) -> tuple[int, int, int, int]:
    """Return what tells a boundary of a run from any other."""
    return state.step, state.skipped, state.epoch, state.batch


def layers(hook: Hook) -> Iterator[Hook]:
    """Yield a hook and the hooks inside it, the outermost first."""
    yield hook
    while isinstance(hook, Wrapper):
        hook = hook.hook
        yield hook


def slots_of(hooks: Iterable[Hook]) -> frozenset[str]:
    """Return the names of the slots that hooks keep."""
    return frozenset(la.slot for hook in hooks for la in layers(hook) if la.slot is not None)


def unwrap_hook(hook: Hook) -> Hook:
    """Return the hook inside all wrappers."""
    *_, inner = layers(hook)
    return inner
