"""What several processes of a run agree on between updates.

They must stop after the same update, although a signal may reach any one of them at any time. So
they exchange pending requests periodically and read the result at a later boundary: no process
blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fnloop._backend.collectives import ORDER_MISMATCH, start_all_reduce_max
from fnloop._backend.watchdog import DIVERGED, explain_lost, here, waiting_for_all
from fnloop._core.merge import check_alike, check_counters_alike
from fnloop._core.state import TrainState
from fnloop._loop.interrupts import Interrupts

__all__ = ["Consensus"]

PERIOD = 0.1  # seconds between two exchanges, in the long run
LONGEST_GAP = 1024  # boundaries between two exchanges


class Consensus:
    """The other processes of a run: a request seen by one is obeyed by all after the same update.

    They also share a clock. An exchange is begun at one boundary and read at a later one, so its
    result is there by then. The number of boundaries between them follows from the time that they
    took, which is exchanged too, so it is the same everywhere.

    Args:
        state: the state at the beginning of the run.
    """

    def __init__(self, state: TrainState) -> None:
        self._began = time.monotonic()
        self._agreed_time = 0.0
        self._boundaries, self._next, self._gap = 0, 1, 1
        self._last, self._since = 0, 0  # the boundary of the last exchange; how many it spanned
        self._result: Callable[[], list[float]] | None = None
        self._sent = [False, False]  # the requests in the exchange that is under way
        here.step, here.thread = state.step, threading.get_ident()

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._agreed_time

    def poll(self, state: TrainState, interrupts: Interrupts) -> None:
        """Read the last exchange and begin another, if it is time to."""
        self._boundaries += 1
        here.step = state.step
        if self._boundaries >= self._next:
            self._receive(interrupts)
            self._send(state, interrupts, 0)

    def hurry(self) -> None:
        """Exchange at the next boundaries: those that follow may be further apart in time."""
        self._next, self._gap = self._boundaries + 1, 1
        self._last, self._since = self._next, 0  # what was measured before says nothing about them

    def barrier(self, state: TrainState, interrupts: Interrupts, order: int) -> None:
        """Wait for all processes at the end of an epoch, and compare them.

        Args:
            state: the state.
            interrupts: what was requested of this process.
            order: a checksum of the order of the data.

        Raises:
            RuntimeError: this process has stopped while the others continued; or the processes have
                different weights or different data.
        """
        self._receive(interrupts)
        end = "the end of an epoch" if state.stop is None else f"the end of its run ({state.stop})"
        with waiting_for_all(end):
            self._send(state, interrupts, order)
            self._receive(interrupts)
            check_alike(state, "the comparison of the weights")
        self.hurry()

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        explain_lost(error)

    def _send(self, state: TrainState, interrupts: Interrupts, order: int) -> None:
        """Begin an exchange.

        Args:
            state: its counters must be the same everywhere.
            interrupts: the requests to pass on.
            order: the checksum of the order of the data, at the end of an epoch.
        """
        same = (state.step, state.skipped, state.epoch, order)
        self._sent = [*interrupts.requested]
        elapsed = time.monotonic() - self._began
        # The largest of -x is the smallest of x: one reduction finds both.
        facts = [*self._sent, elapsed, *same, *(-value for value in same)]
        self._result = start_all_reduce_max(facts, "the exchange between two updates")
        self._last, self._since = self._boundaries, self._boundaries - self._last
        self._next = self._boundaries + self._gap

    def _receive(self, interrupts: Interrupts) -> None:
        """Read the result of the exchange that is under way."""
        if self._result is None:
            return
        (stop, save, now, *same), self._result = self._result(), None
        most, least = same[: len(same) // 2], [-value for value in same[len(same) // 2 :]]
        check_counters_alike(most[:-1], least[:-1])
        if most[-1] != least[-1]:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        self._adapt_gap(now - self._agreed_time)
        self._agreed_time = now
        # A request that came during the exchange is not in it.
        pairs = zip(interrupts.requested, self._sent, strict=True)
        interrupts.requested = [requested and not sent for requested, sent in pairs]
        if save:
            interrupts.ask_to_save()
        if stop:
            interrupts.terminate()

    def _adapt_gap(self, took: float) -> None:
        """Choose the number of boundaries to the next exchange, by the time of the last ones."""
        if self._since and took > 0:
            wanted = int(PERIOD * self._since / took)
            # In steps, because the last ones may have been out of the ordinary.
            self._gap = max(min(wanted, self._gap * 16, LONGEST_GAP), self._gap // 8, 1)
