"""What several processes of a run agree on between updates.

They must stop after the same update, although a signal may reach any one of them at any time. So
they exchange pending requests periodically and read the result at a later boundary: no process
blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fnloop._backend import torch_compat
from fnloop._backend.collectives import ORDER_MISMATCH, is_lost, start_all_reduce_max
from fnloop._backend.fsdp import is_sharded
from fnloop._backend.watchdog import ADVICE, DIVERGED, here, verdict, waiting_for_all
from fnloop._core.state import TrainState
from fnloop._loop.interrupts import Interrupts

__all__ = ["Consensus"]

PERIOD = 0.1  # seconds between two exchanges, in the long run
LONGEST_GAP = 1024  # boundaries between two exchanges
TOLERANCE = 1e-3  # by which norms may differ between different kinds of processors
_COUNTERS = ("step", "skipped", "epoch")
_WEIGHTS_DIFFER = (
    "the norm of the weight {} is from {:g} to {:g}. What a hook or a middleware does to weights "
    "must be the same everywhere: draw from torch, whose generators agree after backward, or "
    "fnloop.broadcast(...) what was drawn"
)
_LOST = (
    "another process has ended or stopped by itself: its own traceback says why. If it has none, a "
    "hook or a loader there decided by what only it knew: decide by the history, by counters, or "
    "by fnloop.reduce(...)"
)


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
        self._marks: list[str] = []  # what else it checks
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
            self._send(state, interrupts, {})

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
            self._send(state, interrupts, {**_norms(state), ORDER_MISMATCH: order})
            self._receive(interrupts)
        self.hurry()

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        if is_lost(error):
            found = verdict()
            error.add_note(f"{DIVERGED}: {found}. {ADVICE}" if found else _LOST)

    def _send(self, state: TrainState, interrupts: Interrupts, marks: Mapping[str, float]) -> None:
        """Begin an exchange.

        Args:
            state: its counters must be the same everywhere.
            interrupts: the requests to pass on.
            marks: other numbers that must be the same, by what to say if they are not.
        """
        same = (state.step, state.skipped, state.epoch, *marks.values())
        self._sent = [*interrupts.requested]
        elapsed = time.monotonic() - self._began
        # The largest of -x is the smallest of x: one reduction finds both.
        facts = [*self._sent, elapsed, *same, *(-value for value in same)]
        self._result, self._marks = start_all_reduce_max(facts), [*marks]
        self._last, self._since = self._boundaries, self._boundaries - self._last
        self._next = self._boundaries + self._gap

    def _receive(self, interrupts: Interrupts) -> None:
        """Read the result of the exchange that is under way."""
        if self._result is None:
            return
        (stop, save, now, *same), self._result = self._result(), None
        most, least = same[: len(same) // 2], [-value for value in same[len(same) // 2 :]]
        self._check(most, least)
        self._adapt_gap(now - self._agreed_time)
        self._agreed_time = now
        # A request that came during the exchange is not in it.
        pairs = zip(interrupts.requested, self._sent, strict=True)
        interrupts.requested = [requested and not sent for requested, sent in pairs]
        if save:
            interrupts.ask_to_save()
        if stop:
            interrupts.terminate()

    def _check(self, most: list[float], least: list[float]) -> None:
        """Raise unless the largest and the smallest of each number agree."""
        n = len(_COUNTERS)
        if most[:n] != least[:n]:
            low, high = ([*map(int, values[:n])] for values in (least, most))
            raise RuntimeError(
                f"{DIVERGED}: ({', '.join(_COUNTERS)}) is {low} in one and {high} in another. "
                f"{ADVICE}"
            )
        for mark, low, high in zip(self._marks, least[n:], most[n:], strict=True):
            if high - low > TOLERANCE * max(abs(low), abs(high)):
                differ = mark if mark == ORDER_MISMATCH else _WEIGHTS_DIFFER.format(mark, low, high)
                raise RuntimeError(f"{DIVERGED}: {differ}")

    def _adapt_gap(self, took: float) -> None:
        """Choose the number of boundaries to the next exchange, by the time of the last ones."""
        if self._since and took > 0:
            wanted = int(PERIOD * self._since / took)
            # In steps, because the last ones may have been out of the ordinary.
            self._gap = max(min(wanted, self._gap * 16, LONGEST_GAP), self._gap // 8, 1)


def _norms(state: TrainState) -> dict[str, float]:
    """Return the norm of each parameter that every process has a copy of."""
    if is_sharded(state.model):
        return {}
    named = {name: p.detach() for name, p in state.model.named_parameters() if _has_norm(p)}
    if not named:
        return {}
    norms = torch.stack([norm.double() for norm in torch_compat.foreach_norm([*named.values()])])
    return dict(zip(named, norms.nan_to_num(0.0).tolist(), strict=True))


def _has_norm(p: Tensor) -> bool:
    wide = p.is_floating_point() and p.dtype.itemsize > 1
    return type(p) is nn.Parameter and wide and p.layout is torch.strided
