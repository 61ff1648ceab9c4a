"""Hooks that only one of several processes runs."""

from __future__ import annotations

from typing import Any

import attrs

from fnloop._core.call import name_of
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.triggers import Hook
from fnloop._hooks.wrapper import Wrapper, unwrap_hook

__all__ = ["on_main"]


@attrs.frozen(repr=False)
class on_main(Wrapper):
    """Run a hook on the main process only: one that prints, writes a file or talks to a server.

    It looks on: what it would change, the other processes would not know of. In one process it is the hook itself.

    Args:
        hook: ``state -> state``, which returns the state that it is given.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is not a function, or is ``checkpoint``, which every process has to take part in.
        ValueError: when it runs: it returned another state.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(fl.every(epochs=1)(on_main(show)),))
        3
    """

    hook: Hook

    def __attrs_post_init__(self) -> None:
        checks.function("on_main", "hook", self.hook, "a hook, a function state -> state", 1)
        if isinstance(unwrap_hook(self.hook), checkpoint):
            raise TypeError(
                f"{self.hook!r} needs all processes, and writes on the main one by itself: list it as it is"
            )

    def __repr__(self) -> str:
        return f"on_main({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        return self._looked_on(self.hook, state)

    def flush(self, state: TrainState) -> TrainState:
        """Let the hook finish, at the end of a run."""
        return self._looked_on(self.hook.flush, state) if hasattr(self.hook, "flush") else state  # type: ignore[attr-defined]

    def _looked_on(self, hook: Any, state: TrainState) -> TrainState:
        if state.backend.main and (new := hook(state)) is not state:
            raise ValueError(
                f"{self!r} must return the state that it is given, since the other processes wouldn't know of a change; it "
                f"returned {f'one that stops: {new.stop}' if isinstance(new, TrainState) and new.stop else repr(new)}"
            )
        return state
