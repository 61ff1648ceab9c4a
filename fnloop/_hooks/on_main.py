"""Run a hook on the main process only."""

from __future__ import annotations

import attrs

from fnloop._core.call import name_of
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.wrapper import Hook, Wrapper, unwrap_hook

__all__ = ["on_main"]


@attrs.frozen(repr=False)
class on_main(Wrapper):
    """Run a hook on the main process only: one that prints, writes a file or talks to a server.

    The hook may only observe; the other processes would not see its changes. In one process it runs
    as without ``on_main``.

    Args:
        hook: ``state -> state``, which returns the state that it is given.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is not a function, or is ``checkpoint``, which every process has to take
            part in.
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
        checks.function("on_main", "hook", self.hook, "a hook, a function state -> state", 1)
        if isinstance(unwrap_hook(self.hook), checkpoint):
            raise TypeError(
                f"{self.hook!r} needs all processes, and writes only on the main one: list it "
                "without on_main"
            )

    def __repr__(self) -> str:
        return f"on_main({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        return self._observe(self.hook, state)

    def flush(self, state: TrainState) -> TrainState:
        """Finish pending work, on the main process."""
        return self._observe(super().flush, state)

    def _observe(self, call: Hook, state: TrainState) -> TrainState:
        """Call a hook or its method on the main process, and raise if it returns another state."""
        if state.backend.main and (new := call(state)) is not state:
            stops = isinstance(new, TrainState) and new.stop
            found = f"one that stops: {new.stop}" if stops else repr(new)
            raise ValueError(
                f"{self!r} must return the state that it is given, because the other processes "
                f"would not see the change; it returned {found}"
            )
        return state
