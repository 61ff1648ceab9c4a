"""Run a hook on the main process only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from fnloop._backend.collectives import any_rank
from fnloop._core.call import name_of
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.moments import check_hook
from fnloop._hooks.restore_best import restore_best
from fnloop._hooks.wrapper import Hook, Wrapper, unwrap_hook

__all__ = ["on_main"]


@attrs.frozen(repr=False)
class on_main(Wrapper):
    """Run a hook on the main process only: one that prints, writes a file or talks to a server.

    The hook may only observe; the other processes would not see its changes. In one process it runs
    as without ``on_main``. Hooks of fnloop that write, such as ``track`` and ``to_csv``, do so on
    the main process by themselves.

    Args:
        hook: ``state -> state``, which returns the state that it is given.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is not a function, or is ``checkpoint`` or ``restore_best``, which every
            process has to take part in.
        ValueError: when it runs: it returned another state.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hook = fl.every(epochs=1)(on_main(show))
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(hook,))
        3
    """

    hook: Hook

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "hook", check_hook(self.hook, "on_main"))
        inner = unwrap_hook(self.hook)
        if isinstance(inner, checkpoint | restore_best):
            writes = ", and writes only on the main one" if isinstance(inner, checkpoint) else ""
            raise TypeError(f"{self.hook!r} needs all processes{writes}: list it without on_main")

    def __repr__(self) -> str:
        return f"on_main({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        return self._observe(self.hook, state)

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run, on the main process; everywhere if the hook needs all processes for it."""
        if self.begins_everywhere:
            return super().begin(state)
        return self._observe(super().begin, state)

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation, on the main process."""
        if state.backend.main:
            super().evaluating(state, loader, done, total)

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary at which the hook itself is not called, on the main process."""
        return self._observe(super().poll, state)

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work, on the main process."""
        return self._observe(super().flush, state)

    def settle(self, state: TrainState) -> TrainState:
        """Tidy up after a run that has already reached its end, on the main process."""
        return self._observe(super().settle, state)

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the hook asks for the outputs, on the main process. A collective."""
        wanted = state.backend.main and super().collects(state, loader)
        return any_rank(wanted, "what a hook collects")

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation, on the main process."""
        if state.backend.main:
            super().receive(state, outputs)

    def _observe(self, call: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
        """Call a hook or its method on the main process, and raise if it returns another state."""
        if state.backend.main and (new := call(state)) is not state:
            stops = isinstance(new, TrainState) and new.stop
            found = f"one that stops: {new.stop}" if stops else repr(new)
            raise ValueError(
                f"{self!r} must return the state that it is given, because the other processes "
                f"would not see the change; it returned {found}"
            )
        return state
