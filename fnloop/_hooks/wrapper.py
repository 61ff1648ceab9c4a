"""What a hook is, and the base class of hooks that wrap another hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from fnloop._core.call import name_of
from fnloop._core.state import TrainState
from fnloop._core.types import Output

__all__ = ["Hook", "Wrapper", "as_hook", "layers", "slots_of", "unwrap_hook"]


class Hook:
    """A function ``state -> state`` that a run calls after every update, and what else it may do.

    A hook overrides what it needs. :func:`as_hook` makes one of any function or object.
    """

    monitors: str | tuple[str, ...] | None = None  # the metrics that it watches: "valid/loss"
    reports: tuple[str, ...] = ()  # the metrics that it adds to records
    slot: str | None = None  # what it keeps in the state
    outside: frozenset[str] = frozenset()  # "start", "end": where else than after an update it runs
    wants_outputs = False  # whether ``collects`` is asked
    begins_everywhere = False  # whether ``begin`` is a collective, within ``on_main`` too
    ends_run_on_usr1 = False

    def __call__(self, state: TrainState) -> TrainState:
        """Return the state to continue with: the same, or one with changes, such as ``stop``."""
        raise NotImplementedError

    def take_back(self, state: TrainState) -> TrainState:
        """Take back a stop that does not hold any more, before anything else."""
        return state

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run, also a resumed one. The position must stay."""
        return state

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation: before its first batch, and after each."""

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether it wants the outputs of an evaluation. Every process answers alike."""
        return False

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation, of all processes, before its record is made."""

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary at which a wrapper does not call it."""
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work: after the last boundary of a run, and on SIGUSR1."""
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Handle the failure of a run, with the last consistent state."""

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up, in place of all others, if the run has already reached its end."""
        return state

    def close(self) -> None:
        """Release what it holds, also after an exception."""


@attrs.frozen(repr=False, slots=False)
class _Lifted(Hook):
    """A function or an object as a hook. It has the methods and attributes of :class:`Hook`."""

    call: object

    def __attrs_post_init__(self) -> None:
        for name in vars(Hook).keys() - vars(object).keys() - {"__call__", "__module__"}:
            if hasattr(self.call, name) and not name.startswith("__"):
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


def as_hook(given: object) -> Hook:
    """Return a hook: a function, or an object that defines some of what :class:`Hook` does."""
    return given if isinstance(given, Hook) else _Lifted(given)


class Wrapper(Hook):
    """A hook around another one, ``hook``. It passes on everything but the call itself."""

    hook: Hook

    @property
    def wants_outputs(self) -> bool:
        return self.hook.wants_outputs

    @property
    def begins_everywhere(self) -> bool:
        return self.hook.begins_everywhere

    @property
    def ends_run_on_usr1(self) -> bool:
        return self.hook.ends_run_on_usr1

    def take_back(self, state: TrainState) -> TrainState:
        return self.hook.take_back(state)

    def begin(self, state: TrainState) -> TrainState:
        return self.hook.begin(state)

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        self.hook.evaluating(state, loader, done, total)

    def collects(self, state: TrainState, loader: str) -> bool:
        return self.hook.collects(state, loader)

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        self.hook.receive(state, outputs)

    def poll(self, state: TrainState) -> TrainState:
        return self.hook.poll(state)

    def flush(self, state: TrainState) -> TrainState:
        return self.hook.flush(state)

    def failed(self, state: TrainState, error: BaseException) -> None:
        self.hook.failed(state, error)

    def settle(self, state: TrainState) -> TrainState:
        return self.hook.settle(state)

    def close(self) -> None:
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
