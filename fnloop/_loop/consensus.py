"""What the processes of a run agree on between updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fnloop._backend import torch_compat
from fnloop._backend.collectives import ORDER_MISMATCH, start_all_reduce_max
from fnloop._backend.fsdp import is_sharded
from fnloop._backend.watchdog import ADVICE, DIVERGED, here, waiting_for_all
from fnloop._core.state import TrainState
from fnloop._loop.interrupts import TERMINATED, Interrupts

__all__ = ["Consensus"]

PERIOD = 0.1  # seconds between two exchanges, in the long run
ROUNDING = 1e-3  # by what norms may differ between processors of different kinds
_WEIGHTS_DIFFER = (
    "the norm of the weight {} is from {:g} to {:g}. What a hook or a middleware does to weights must be the same everywhere: "
    "draw from torch, which draws the same everywhere behind backward, or fnloop.broadcast(...) what was drawn"
)


def _norms(state: TrainState) -> dict[str, float]:
    """Return the norm of each parameter that every process has a copy of, as far as it has one."""
    if is_sharded(state.model):
        return {}

    def plain(p: Any) -> bool:
        return (
            type(p) is nn.Parameter
            and p.is_floating_point()
            and p.dtype.itemsize > 1
            and p.layout is torch.strided
        )

    named = {name: p.detach() for name, p in state.model.named_parameters() if plain(p)}
    if not named:
        return {}
    norms = torch.stack([norm.double() for norm in torch_compat.foreach_norm([*named.values()])])
    return dict(zip(named, norms.nan_to_num(0.0).tolist(), strict=True))


class Consensus:
    """The processes of a run, between updates: what any has heard, all obey behind the same update; and they share a clock.

    An exchange is begun at one boundary and read at a later one, so it is there by then. How many boundaries lie between
    follows from the time that they took, which is exchanged too: the same everywhere.
    """

    def __init__(self, state: TrainState) -> None:
        self._began = time.monotonic()
        self._time = 0.0  # what all agree on, in seconds
        self._met, self._next, self._gap = (
            0,
            1,
            1,
        )  # boundaries so far, at the next exchange, and between two
        self._asked, self._since = (
            0,
            0,
        )  # boundaries at the last exchange, and between it and the one before
        self._answer: Callable[[], list[float]] | None = None
        self._sent = [False, False]  # what was asked for in it
        self._marks: list[str] = []  # and what else
        state._lease.clock = self.clock
        here.step, here.thread = state.step, threading.get_ident()

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._time

    def meet(self, state: TrainState, signals: Interrupts) -> None:
        """Hear the last answer and ask again, if it is time to."""
        self._met += 1
        here.step = state.step
        if self._met < self._next:
            return
        self._hear(signals)
        self._ask(state, signals, {})
        state._lease.clock = self.clock  # which may be another's, if a hook went back to a snapshot

    def close(self, state: TrainState, signals: Interrupts, order: int) -> None:
        """Hear the last answer, and meet once more, at the end of an epoch: here everybody waits for all.

        Args:
            state: the state.
            signals: what was heard.
            order: a checksum of the order of the data.

        Raises:
            RuntimeError: this process has stopped, and the others don't come; or they have other weights, or other data.
        """
        self._hear(signals)
        with waiting_for_all(
            "the end of an epoch" if state.stop is None else f"the end of its run ({state.stop})"
        ):
            self._ask(state, signals, {**_norms(state), ORDER_MISMATCH: order})
            self._hear(signals)

    def _ask(self, state: TrainState, signals: Interrupts, marks: Mapping[str, float]) -> None:
        """Begin an exchange; also of marks that have to be the same everywhere, by what to say where they aren't."""
        same = (state.step, state.skipped, state.epoch, *marks.values())
        self._sent = [*signals.asked]
        facts = [*self._sent, time.monotonic() - self._began, *same, *(-c for c in same)]
        self._answer, self._marks = start_all_reduce_max(facts), [*marks]
        self._asked, self._since = self._met, self._met - self._asked
        self._next = self._met + self._gap

    def _hear(self, signals: Interrupts) -> None:
        if self._answer is None:
            return
        (stop, save, now, *same), self._answer = self._answer(), None
        most, least = same[: len(same) // 2], [-c for c in same[len(same) // 2 :]]
        if most[:3] != least[:3]:
            counters = [[*map(int, values[:3])] for values in (least, most)]
            raise RuntimeError(
                f"{DIVERGED}: (step, skipped, epoch) is {counters[0]} in one and {counters[1]} in another. {ADVICE}"
            )
        for mark, low, high in zip(self._marks, least[3:], most[3:], strict=True):
            if high - low > ROUNDING * max(abs(low), abs(high)):
                raise RuntimeError(
                    f"{DIVERGED}: {mark}"
                    if mark == ORDER_MISMATCH
                    else f"{DIVERGED}: {_WEIGHTS_DIFFER.format(mark, low, high)}"
                )
        took, self._time = now - self._time, now
        if self._since and took > 0:
            wanted = int(
                PERIOD * self._since / took
            )  # but not all at once: one may have been out of the ordinary
            self._gap = max(min(wanted, self._gap * 16, 4096), self._gap // 8, 1)
        signals.asked = [
            asked and not sent for asked, sent in zip(signals.asked, self._sent, strict=True)
        ]  # the rest is new
        signals.stop = TERMINATED if stop else signals.stop
        signals.save = signals.save or bool(save)
