"""What reaches a run from outside: signals, the clock; and how several processes agree on it.

In one process a signal is heard at the next boundary. Several have to stop behind the same update, though a signal may reach
any of them, at any moment. So every so often each tells the others what it has heard, and looks at the answer the next time:
nobody waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import attrs

from fnloop._core.state import TrainState

__all__ = ["INTERRUPTED", "TERMINATED", "Interrupts", "handling"]

INTERRUPTED, TERMINATED = "interrupted", "SIGTERM"
_CHILD = getattr(signal, "SIGCHLD", None)  # which a process gets when one that it started has ended


class Interrupts:
    """What was asked for by signals: Ctrl-C and SIGTERM to stop, SIGUSR1 to save.

    Args:
        alone: whether this is the only process; else what it hears waits until all agree.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self.stop: str | None = None
        self.save = False
        self.asked = [False, False]  # to stop, to save: what all have to agree on first
        self.done = False  # whether a run has ended because of it
        self._on_child: Any = (
            None  # the usual handler of SIGCHLD, if ``_spare`` has taken its place
        )

    def heard(self, state: TrainState) -> TrainState:
        """Return the state with the reason to stop, if a signal gave one."""
        if self.stop is None or state.stop is not None:
            return state
        self.done = True
        return attrs.evolve(state, stop=self.stop)

    def __call__(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.stop == INTERRUPTED:
            raise KeyboardInterrupt  # the second one doesn't wait
        if number in (signal.SIGINT, signal.SIGTERM):
            self._ignore_dead_workers()
        if number == signal.SIGINT:
            self.stop = INTERRUPTED
        elif not self.alone:
            self.asked[number != signal.SIGTERM] = True
        elif number == signal.SIGTERM:
            self.stop = TERMINATED
        else:
            self.save = True

    def _ignore_dead_workers(self) -> None:
        """Keep torch from raising, wherever the run is, when a worker dies: the signal may have been sent to workers too.

        A loader whose workers are dead says so itself when it is asked for a batch.
        """
        if self._on_child is None and callable(
            usual := signal.getsignal(_CHILD) if _CHILD else None
        ):
            self._on_child = usual
            signal.signal(_CHILD, self._spare)  # type: ignore[arg-type]

    def _spare(self, number: int, frame: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._on_child(number, frame)

    def restore(self) -> None:
        """Let dead workers raise again."""
        if self._on_child is not None and signal.getsignal(_CHILD) == self._spare:  # type: ignore[arg-type]
            signal.signal(_CHILD, self._on_child)  # type: ignore[arg-type]


@contextlib.contextmanager
def handling(alone: bool = True) -> Iterator[Interrupts]:
    """Note signals instead of dying of them, where nobody else has taken care of them.

    Ctrl-C goes to all processes and their launcher at once, which ends them: only a process that is alone takes its time.
    """
    signals = Interrupts(alone)
    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    if alone:
        usual[signal.SIGINT] = signal.default_int_handler
    if hasattr(signal, "SIGUSR1"):
        usual[signal.SIGUSR1] = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    taken = {
        number: handler for number, handler in usual.items() if signal.getsignal(number) == handler
    }
    for number in taken:
        signal.signal(number, signals)
    try:
        yield signals
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        signals.restore()
        unheard = signals.stop == TERMINATED or signals.asked[0]
        if unheard and not signals.done and signal.SIGTERM in taken:
            signal.raise_signal(signal.SIGTERM)  # it came too late for the run
