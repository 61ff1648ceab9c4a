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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fnloop._processes import ORDER, agreeing
from fnloop._sharded import is_sharded
from fnloop._state import TrainState
from fnloop._watch import ADVICE, APART, here, together

__all__ = ["INTERRUPTED", "TERMINATED", "Council", "Signals", "listening"]

INTERRUPTED, TERMINATED = "interrupted", "SIGTERM"
_CHILD = getattr(signal, "SIGCHLD", None)  # which a process gets when one that it started has ended
PERIOD = 0.1  # seconds between two exchanges, in the long run
ROUNDING = 1e-3  # by what norms may differ between processors of different kinds
_DRIFT = (
    "the norm of the weight {} is from {:g} to {:g}. What a hook or a middleware does to weights must be the same everywhere: "
    "draw from torch, which draws the same everywhere behind backward, or fnloop.broadcast(...) what was drawn"
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
        self._on_child: Any = None  # the usual handler of SIGCHLD, if ``_spare`` has taken its place

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
        if self._on_child is None and callable(usual := signal.getsignal(_CHILD) if _CHILD else None):
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
        signals.restore()
        unheard = signals.stop == TERMINATED or signals.asked[0]
        if unheard and not signals.done and signal.SIGTERM in taken:
            signal.raise_signal(signal.SIGTERM)  # it came too late for the run


def _norms(state: TrainState) -> dict[str, float]:
    """Return the norm of each parameter that every process has a copy of, as far as it has one."""
    if is_sharded(state.model):
        return {}

    def plain(p: Any) -> bool:
        return type(p) is nn.Parameter and p.is_floating_point() and p.dtype.itemsize > 1 and p.layout is torch.strided

    named = {name: p.detach() for name, p in state.model.named_parameters() if plain(p)}
    if not named:
        return {}
    norms = torch.stack([norm.double() for norm in torch._foreach_norm([*named.values()])])
    return dict(zip(named, norms.nan_to_num(0.0).tolist(), strict=True))


class Council:
    """The processes of a run, between updates: what any has heard, all obey behind the same update; and they share a clock.

    An exchange is begun at one boundary and read at a later one, so it is there by then. How many boundaries lie between
    follows from the time that they took, which is exchanged too: the same everywhere.
    """

    def __init__(self, state: TrainState) -> None:
        self._began = time.monotonic()
        self._time = 0.0  # what all agree on, in seconds
        self._met, self._next, self._gap = 0, 1, 1  # boundaries so far, at the next exchange, and between two
        self._asked, self._since = 0, 0  # boundaries at the last exchange, and between it and the one before
        self._answer: Callable[[], list[float]] | None = None
        self._sent = [False, False]  # what was asked for in it
        self._marks: list[str] = []  # and what else
        state._lease.clock = self.clock
        here.step, here.thread = state.step, threading.get_ident()

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._time

    def meet(self, state: TrainState, signals: Signals) -> None:
        """Hear the last answer and ask again, if it is time to."""
        self._met += 1
        here.step = state.step
        if self._met < self._next:
            return
        self._hear(signals)
        self._ask(state, signals, {})
        state._lease.clock = self.clock  # which may be another's, if a hook went back to a snapshot

    def close(self, state: TrainState, signals: Signals, order: int) -> None:
        """Hear the last answer, and meet once more, at the end of an epoch: here everybody waits for all.

        Args:
            state: the state.
            signals: what was heard.
            order: a checksum of the order of the data.

        Raises:
            RuntimeError: this process has stopped, and the others don't come; or they have other weights, or other data.
        """
        self._hear(signals)
        with together("the end of an epoch" if state.stop is None else f"the end of its run ({state.stop})"):
            self._ask(state, signals, {**_norms(state), ORDER: order})
            self._hear(signals)

    def _ask(self, state: TrainState, signals: Signals, marks: Mapping[str, float]) -> None:
        """Begin an exchange; also of marks that have to be the same everywhere, by what to say where they aren't."""
        same = (state.step, state.skipped, state.epoch, *marks.values())
        self._sent = [*signals.asked]
        facts = [*self._sent, time.monotonic() - self._began, *same, *(-c for c in same)]
        self._answer, self._marks = agreeing(facts), [*marks]
        self._asked, self._since = self._met, self._met - self._asked
        self._next = self._met + self._gap

    def _hear(self, signals: Signals) -> None:
        if self._answer is None:
            return
        (stop, save, now, *same), self._answer = self._answer(), None
        most, least = same[: len(same) // 2], [-c for c in same[len(same) // 2 :]]
        if most[:3] != least[:3]:
            counters = [[*map(int, values[:3])] for values in (least, most)]
            raise RuntimeError(
                f"{APART}: (step, skipped, epoch) is {counters[0]} in one and {counters[1]} in another. {ADVICE}"
            )
        for mark, low, high in zip(self._marks, least[3:], most[3:], strict=True):
            if high - low > ROUNDING * max(abs(low), abs(high)):
                raise RuntimeError(f"{APART}: {mark}" if mark == ORDER else f"{APART}: {_DRIFT.format(mark, low, high)}")
        took, self._time = now - self._time, now
        if self._since and took > 0:
            wanted = int(PERIOD * self._since / took)  # but not all at once: one may have been out of the ordinary
            self._gap = max(min(wanted, self._gap * 16, 4096), self._gap // 8, 1)
        signals.asked = [asked and not sent for asked, sent in zip(signals.asked, self._sent, strict=True)]  # the rest is new
        signals.stop = TERMINATED if stop else signals.stop
        signals.save = signals.save or bool(save)
