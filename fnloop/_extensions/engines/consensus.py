"""What several processes of a run agree on: the same pipelines, and when to stop or to save.

They must stop after the same update, although a signal may reach any one of them at any time. So
they exchange pending requests periodically and read the result at a later boundary: no process
blocks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import NoReturn

import torch

from fnloop._core.state import TrainState
from fnloop._core.types import Middleware
from fnloop._extensions.engines.alike import check_alike_in, check_counters_alike, compared_of
from fnloop._extensions.engines.exchanges import DIVERGED, explain_lost, here
from fnloop._extensions.engines.shares import ORDER_MISMATCH
from fnloop._hooks.hook import Hook
from fnloop.extend import Call, collectives

PERIOD = 0.1  # seconds between two exchanges, in the long run
LONGEST_GAP = 1024  # boundaries between two exchanges


class Consensus:
    """The other processes of a run: all act on a request seen by one, after the same update.

    They also share a clock. An exchange is begun at one boundary and read at a later one, so its
    result is there by then. The number of boundaries between them follows from the time that they
    took, which is exchanged too, so it is the same everywhere.
    """

    alone = False

    def __init__(self) -> None:
        self._began = 0.0
        self._agreed_time = 0.0
        self._boundaries, self._next, self._gap = 0, 1, 1
        self._last, self._since = 0, 0  # the boundary of the last exchange; how many it spanned
        self._result: Callable[[], list[float]] | None = None
        self._sent = [False, False]  # the requests in the exchange that is under way

    def compare(self, kind: str, members: Sequence[Middleware], saving: Sequence[Hook]) -> None:
        """Raise in every process if they have different steps, or hooks that save.

        Raises:
            RuntimeError: the settings of a middleware differ, or a process lacks one, or such a
                hook.
        """
        made = [("step", kind, f"a {kind}")]
        for member in members:
            if (settings := _settings_of(member)) is not None:
                made.append((member.name, repr(settings), f"{member!r:.200}"))
        # Their folders may differ, on machines of their own.
        made += [("hook", type(hook).__name__, f"{hook!r:.200}") for hook in saving]
        mark = zlib.crc32(repr([each[:2] for each in made]).encode())
        most, least = collectives.all_reduce_max([mark, -mark], _SAME)
        if most == -least:
            return
        first, *others = collectives.gather_from_all(made, _SAME)
        for rank, every in enumerate(others, 1):
            for mine, theirs in itertools.zip_longest(first, every):
                if mine is None or theirs is None or mine[:2] != theirs[:2]:
                    _raise_different(rank, mine, theirs)

    def begin(self, state: TrainState) -> None:
        """Start the clock."""
        self._began = time.monotonic()
        here.step, here.thread = state.step, threading.get_ident()

    def clock(self) -> float:
        """Return the seconds since the run began, as of the last exchange."""
        return self._agreed_time

    def poll(self, state: TrainState, requested: list[bool]) -> Sequence[bool] | None:
        """Read the last exchange and begin another, if it is time to. Return what any has asked."""
        self._boundaries += 1
        here.step = state.step
        if self._boundaries < self._next:
            return None
        asked = self._receive(requested)
        self._send(state, requested)
        return asked

    def hurry(self) -> None:
        """Exchange at the next boundaries: those that follow may be further apart in time."""
        self._next, self._gap = self._boundaries + 1, 1
        self._last, self._since = self._next, 0  # what was measured before says nothing about them

    def barrier(
        self, state: TrainState, requested: list[bool], order: int, items: float
    ) -> tuple[Sequence[bool], Iterable[float]]:
        """Wait for all processes at the end of an epoch, and compare them, in one message.

        Raises:
            RuntimeError: this process has stopped while the others continued; or the processes have
                different weights or different data.
        """
        before = self._receive(requested)
        end = "the end of an epoch" if state.stop is None else f"the end of its run ({state.stop})"
        mine = self._requests(requested), order, compared_of(state), items
        every = collectives.gather_from_all(mine, end)
        requests, orders, compared, all_items = zip(*every, strict=True)
        check_counters_alike([each.counters for each in compared])
        if {*orders} != {order}:
            raise RuntimeError(f"{DIVERGED}: {ORDER_MISMATCH}")
        check_alike_in(state, compared)
        asked = self._read(requested, *map(max, zip(*requests, strict=True)))
        self.hurry()
        return [*map(max, asked, before or asked)], all_items

    def explain(self, error: BaseException) -> None:
        """Note in an error what is known about the other processes."""
        explain_lost(error)

    def _requests(self, requested: list[bool]) -> list[float]:
        """Return the requests to pass on, and the time; note that they are sent."""
        self._sent = [*requested]
        return [*self._sent, time.monotonic() - self._began]

    def _send(self, state: TrainState, requested: list[bool]) -> None:
        """Begin an exchange of requests. The counters must be the same everywhere."""
        same = (state.step, state.skipped, state.epoch)
        # The largest of -x is the smallest of x: one reduction finds both.
        facts = [*self._requests(requested), *same, *(-value for value in same)]
        self._result = collectives.start_all_reduce_max(facts, "the exchange between two updates")
        self._last, self._since = self._boundaries, self._boundaries - self._last
        self._next = self._boundaries + self._gap

    def _receive(self, requested: list[bool]) -> Sequence[bool] | None:
        """Read the result of the exchange that is under way."""
        if self._result is None:
            return None
        (stop, save, now, *same), self._result = self._result(), None
        most, least = same[: len(same) // 2], [-value for value in same[len(same) // 2 :]]
        check_counters_alike([least, most])
        self._adapt_gap(now - self._agreed_time)
        return self._read(requested, stop, save, now)

    def _read(self, requested: list[bool], stop: float, save: float, now: float) -> Sequence[bool]:
        """Set the clock. Return what was requested of any process, which is done with here."""
        self._agreed_time = now
        # A request that came during the exchange is not in it.
        requested[:] = [
            asked and not sent for asked, sent in zip(requested, self._sent, strict=True)
        ]
        return bool(stop), bool(save)

    def _adapt_gap(self, took: float) -> None:
        """Choose the number of boundaries to the next exchange, by the time of the last ones."""
        if self._since and took > 0:
            wanted = int(PERIOD * self._since / took)
            # In steps, because the last ones may have been out of the ordinary.
            self._gap = max(min(wanted, self._gap * 16, LONGEST_GAP), self._gap // 8, 1)


# --------------------------------------------------------------------------------------------------
# The pipelines of all processes.

_SAME = "the comparison of the pipelines"


def _settings_of(member: Middleware) -> object | None:
    """Return what can be compared of a middleware; None of a user's that acts around updates only.

    Settings of a user's middleware may be those of its process, such as a path.
    """
    if member.call is not None and member.call.factory.__module__.startswith("fnloop."):
        return comparable(member.call)
    inside = {*member.wraps} - {"step", "evaluation"}
    return member.name if inside else None


def comparable(value: object) -> object:
    """Return what of a setting is the same in all processes: plain data, of the rest the names."""
    call = value if isinstance(value, Call) else getattr(value, "call", None)
    if isinstance(value, functools.partial):
        call = Call(value.func, value.args, value.keywords)
    if isinstance(call, Call):
        with contextlib.suppress(TypeError, ValueError):  # it has no signature
            bound = inspect.signature(call.factory).bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            call = Call(call.factory, (), bound.arguments)
        return [comparable(call.factory), comparable(call.args), comparable(call.kwargs)]
    if isinstance(value, int | float):  # 1 is 1.0
        return float(value)
    if value is None or isinstance(value, str | torch.dtype):
        return value
    if isinstance(value, Mapping):
        return [[comparable(key), comparable(part)] for key, part in value.items()]
    if isinstance(value, list | tuple):
        return [*map(comparable, value)]
    if isinstance(value, Set):  # of strings, in another order in each process
        return sorted(repr(comparable(part)) for part in value)
    return getattr(value, "__qualname__", type(value).__qualname__)


_Made = tuple[str, str, str]  # the name of a middleware, what is compared, and what is shown


def _raise_different(rank: int, first: _Made | None, other: _Made | None) -> NoReturn:
    if made := first if other is None else other if first is None else None:
        has, lacks = (rank, 0) if first is None else (0, rank)
        said = f"process {has} has {made[2]}, and process {lacks} does not"
    else:
        assert first is not None and other is not None
        shown = 1 if first[2] == other[2] else 2
        said = f"process {rank} has {other[shown]} where process 0 has {first[shown]}"
    raise RuntimeError(
        f"{DIVERGED}: {said}. All processes must make the same pipeline, with the same settings, "
        "and list the same hooks"
    )
