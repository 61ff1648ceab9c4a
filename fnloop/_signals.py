"""What reaches a run from outside: signals, the clock; and how several processes agree on it.

In one process a signal is heard at the next boundary. Several have to stop behind the same update, though a signal may reach
any of them, at any moment. So every so often each tells the others what it has heard, and looks at the answer the next time:
nobody waits.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import attrs

from fnloop._processes import agreeing, together
from fnloop._state import TrainState

__all__ = ["INTERRUPTED", "TERMINATED", "Council", "Signals", "listening"]

INTERRUPTED, TERMINATED = "interrupted", "SIGTERM"
PERIOD = 0.1  # seconds that lie between two exchanges, at least, in the long run
LIMIT = timedelta(minutes=5)  # that a process which stops waits for the others
APART = "the processes have come apart"
ADVICE = (
    "What a middleware or a hook decides must be the same everywhere: decide by the history, by counters, or by "
    "fnloop.reduce(...)"
)


class Signals:
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

    def heard(self, state: TrainState) -> TrainState:
        """Return the state with the reason to stop, if a signal gave one."""
        if self.stop is None or state.stop is not None:
            return state
        self.done = True
        return attrs.evolve(state, stop=self.stop)

    def __call__(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.stop == INTERRUPTED:
            raise KeyboardInterrupt  # the second one doesn't wait
        if number == signal.SIGINT:
            self.stop = INTERRUPTED
        elif not self.alone:
            self.asked[number != signal.SIGTERM] = True
        elif number == signal.SIGTERM:
            self.stop = TERMINATED
        else:
            self.save = True


@contextlib.contextmanager
def listening(alone: bool = True) -> Iterator[Signals]:
    """Note signals instead of dying of them, where nobody else has taken care of them.

    Ctrl-C goes to all processes and their launcher at once, which ends them: only a process that is alone takes its time.
    """
    signals = Signals(alone)
    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    if alone:
        usual[signal.SIGINT] = signal.default_int_handler
    if hasattr(signal, "SIGUSR1"):
        usual[signal.SIGUSR1] = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    taken = {number: handler for number, handler in usual.items() if signal.getsignal(number) == handler}
    for number in taken:
        signal.signal(number, signals)
    try:
        yield signals
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        unheard = signals.stop == TERMINATED or signals.asked[0]
        if unheard and not signals.done and signal.SIGTERM in taken:
            signal.raise_signal(signal.SIGTERM)  # it came too late for the run


class Council:
    """The processes of a run, between updates: what any has heard, all obey behind the same update; and they share a clock.

    An exchange is begun at one boundary and read at a later one, so it is there by then. How many boundaries lie between
    follows from the time that they took, which is exchanged too: the same everywhere.
    """

    def __init__(self, state: TrainState) -> None:
        self._began = time.monotonic()
        self._time = 0.0  # what all agree on, in seconds
        self._until, self._gap = 0, 1  # boundaries to the next exchange, and between two
        self._answer: Callable[[timedelta | None], list[float]] | None = None
        state._lease.clock = self.clock

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._time

    def meet(self, state: TrainState, signals: Signals) -> None:
        """Hear the last answer and ask again, if it is time to."""
        self._until -= 1
        if self._until > 0:
            return
        self._hear(signals)
        counters = (state.step, state.skipped, state.epoch)
        facts = [*signals.asked, time.monotonic() - self._began, *counters, *(-c for c in counters)]
        self._answer, self._until = agreeing(facts), self._gap
        state._lease.clock = self.clock  # which may be another's, if a hook went back to a snapshot

    def close(self, state: TrainState, signals: Signals) -> None:
        """Hear the last answer, and meet once more, at the end of an epoch: here everybody waits for all.

        Raises:
            RuntimeError: this process has stopped, and the others don't come.
        """
        self._hear(signals)
        self._until = 0
        try:
            with together("the end of an epoch"):
                self.meet(state, signals)
                self._hear(signals, None if state.stop is None else LIMIT)
        except RuntimeError as error:
            if state.stop is None or "imed out" not in str(error):
                raise
            raise RuntimeError(
                f"{APART}: this one has stopped ({state.stop}) at step {state.step}, others go on. {ADVICE}"
            ) from error

    def _hear(self, signals: Signals, limit: timedelta | None = None) -> None:
        if self._answer is None:
            return
        (stop, save, now, *counters), self._answer = self._answer(limit), None
        most, least = counters[:3], [-c for c in counters[3:]]
        if most != least:
            raise RuntimeError(
                f"{APART}: (step, skipped, epoch) is {[*map(int, least)]} in one and {[*map(int, most)]} in another. {ADVICE}"
            )
        took, self._time = now - self._time, now
        self._gap = min(self._gap * 2, 4096) if took < PERIOD else max(self._gap // 2, 1) if took > 4 * PERIOD else self._gap
        signals.asked = [False, False] if stop or save else signals.asked
        signals.stop = TERMINATED if stop else signals.stop
        signals.save = signals.save or bool(save)
