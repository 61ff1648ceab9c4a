"""The protocol of hooks, and the base class of hooks that wrap another hook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from fnloop._core.state import TrainState

__all__ = ["Hook", "Wrapper", "layers", "unwrap_hook"]


class Hook(Protocol):
    """A function ``state -> state`` that a run calls after every update.

    An object that can be called this way may also have any of these methods and attributes.
    :class:`Wrapper` has the defaults, and passes each call on to the wrapped hook.

    * ``begin(state) -> state`` is called before the first update of a run; ``state.run`` is known.
      It may raise.
    * ``poll(state) -> state`` is called at a boundary where ``every`` or ``when`` skips the hook.
    * ``flush(state) -> state`` is called after the last boundary of a run, and on SIGUSR1.
    * ``failed(state, error)`` is called when an Exception ends a run in one process, with the last
      consistent state, if there is one. The error already has its note, and is raised afterwards
      in any case.
    * ``settle(state)`` is called instead of all others if a run has already reached its end: a
      process that was killed may have left something unfinished.
    * ``close()`` is called when a run ends, also after an exception.
    * ``monitors`` is the name of the metric that the hook watches, such as "valid/loss", or None.
    * ``reports`` are the names of the metrics that the hook itself adds to records.
    """

    def __call__(self, state: TrainState, /) -> TrainState:
        """Return the state to continue with: the same, or one with changes, such as ``stop``."""
        ...


class Wrapper:
    """A hook around another one, ``hook``. It passes on everything but the call itself."""

    hook: Any  # a Hook, with or without the optional methods

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run."""
        return self.hook.begin(state) if hasattr(self.hook, "begin") else state

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary at which the hook itself is not called."""
        return self.hook.poll(state) if hasattr(self.hook, "poll") else state

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work."""
        return self.hook.flush(state) if hasattr(self.hook, "flush") else state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Handle the failure of a run."""
        if hasattr(self.hook, "failed"):
            self.hook.failed(state, error)

    def settle(self, state: TrainState) -> None:
        """Tidy up after a run that has already reached its end."""
        if hasattr(self.hook, "settle"):
            self.hook.settle(state)

    def close(self) -> None:
        """Release what the hook holds."""
        if hasattr(self.hook, "close"):
            self.hook.close()


def layers(hook: Hook) -> Iterator[Hook]:
    """Yield a hook and the hooks inside it, the outermost first."""
    yield hook
    while isinstance(hook, Wrapper):
        hook = hook.hook
        yield hook


def unwrap_hook(hook: Hook) -> Hook:
    """Return the hook inside all wrappers."""
    *_, inner = layers(hook)
    return inner
