"""What a hook may have besides its call, and the base of hooks around another hook, which pass all of it on.

A hook is a function ``state -> state``. An object that is one may also have:

    begin(state) -> state   called before the first update of a run; ``state.run`` is known. It may raise.
    poll(state) -> state    called at a boundary where ``every`` or ``when`` does not call the hook
    flush(state) -> state   called after the last boundary of a run, and on SIGUSR1
    failed(state, error)    called when a run in one process fails by an Exception, with the last consistent state, if there is
                            one. The exception has its note already, and is raised afterwards in any case.
    settle(state)           called instead of all others where a run is at its end already: a kill may have left something
    close()                 called when the run is left, by an exception too
    monitors                the name of the metric that it watches, such as "valid/loss", or None
    reports                 names of metrics that it adds to records itself
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fnloop._core.state import TrainState

__all__ = ["Wrapper", "layers", "unwrap_hook"]


class Wrapper:
    """A hook around another one. It passes everything on but the call."""

    hook: Any

    def begin(self, state: TrainState) -> TrainState:
        """Pass the beginning of a run on."""
        return self.hook.begin(state) if hasattr(self.hook, "begin") else state

    def poll(self, state: TrainState) -> TrainState:
        """Pass a boundary on at which the hook is not called."""
        return self.hook.poll(state) if hasattr(self.hook, "poll") else state

    def flush(self, state: TrainState) -> TrainState:
        """Let the hook finish what it keeps."""
        return self.hook.flush(state) if hasattr(self.hook, "flush") else state

    def failed(self, state: TrainState, error: BaseException) -> None:
        """Pass the failure of a run on."""
        if hasattr(self.hook, "failed"):
            self.hook.failed(state, error)

    def settle(self, state: TrainState) -> None:
        """Pass on that the run is at its end already."""
        if hasattr(self.hook, "settle"):
            self.hook.settle(state)

    def close(self) -> None:
        """Close the hook."""
        if hasattr(self.hook, "close"):
            self.hook.close()


def layers(hook: Any) -> Iterator[Any]:
    """Yield a hook and the hooks inside it, the outermost first."""
    yield hook
    while isinstance(hook, Wrapper):
        hook = hook.hook
        yield hook


def unwrap_hook(hook: Any) -> Any:
    """Return the hook inside all wrappers."""
    *_, inner = layers(hook)
    return inner
