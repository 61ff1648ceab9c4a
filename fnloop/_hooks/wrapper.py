"""The protocol of hooks, and the base class of hooks that wrap another hook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from fnloop._core.state import TrainState
from fnloop._core.types import Output

__all__ = ["Hook", "Wrapper", "layers", "slots_of", "unwrap_hook"]


class Hook(Protocol):
    """A function ``state -> state`` that a run calls after every update.

    An object that can be called this way may also have any of these methods and attributes.
    :class:`Wrapper` has the defaults, and passes each call on to the wrapped hook.

    * ``begin(state) -> state`` is called before the first update of every run, also of a resumed
      one. ``state.run`` is known. Training starts with the state that it returns, which may have
      other slots or frozen parameters, but not another position. It may raise.
    * ``evaluating(state, loader, done, total)`` is called before the first batch of an evaluation,
      with ``done=0``, and after each of its batches. ``loader`` is the name, and ``total`` the
      number of batches of this process, or None if it is unknown.
    * ``poll(state) -> state`` is called at a boundary where ``every`` or ``when`` skips the hook.
    * ``flush(state) -> state`` is called after the last boundary of a run, and on SIGUSR1.
    * ``failed(state, error)`` is called when an Exception ends a run in one process, with the last
      consistent state, if there is one. The error already has its note, and is raised afterwards
      in any case.
    * ``settle(state) -> state`` is called instead of all others if a run has already reached its
      end: a process that was killed may have left something unfinished.
    * ``collects(state, loader) -> bool`` is called before a loader is evaluated: whether the hook
      is to be given the outputs. Every process has to answer alike.
    * ``receive(state, outputs)`` is called after that evaluation, before its record is made, with
      a list of the ``Output`` of each batch: of all processes, in order, copied to the host.
    * ``close()`` is called when a run ends, also after an exception.
    * ``monitors`` is the name of the metric that the hook watches, such as "valid/loss", a tuple of
      several, or None.
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

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation."""
        if hasattr(self.hook, "evaluating"):
            self.hook.evaluating(state, loader, done, total)

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

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up after a run that has already reached its end."""
        return self.hook.settle(state) if hasattr(self.hook, "settle") else state

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the hook is to be given the outputs of an evaluation."""
        return hasattr(self.hook, "collects") and self.hook.collects(state, loader)

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation."""
        self.hook.receive(state, outputs)

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


def slots_of(hooks: Iterable[Hook]) -> frozenset[str]:
    """Return the names of the slots that hooks keep."""
    slots = (getattr(layer, "slot", None) for hook in hooks for layer in layers(hook))
    return frozenset(slot for slot in slots if slot is not None)


def unwrap_hook(hook: Hook) -> Hook:
    """Return the hook inside all wrappers."""
    *_, inner = layers(hook)
    return inner
