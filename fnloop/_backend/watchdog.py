"""What several processes wait for. If they wait for each other in different places, the job fails and says where.

A thread of each process looks once a second at what the process waits in, and at how many collectives it has begun in each
group: nothing is noted in an update for that. What has not moved is written to a store, and the thread of the first process
compares. All processes begin the same collectives in the same order. So if one waits in an exchange that another has not begun,
and that other one has begun a collective that the first has not, they never meet. A process that is only slow has begun nothing
that the others have not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fnloop._backend.torch_compat import collectives_begun, process_groups
from fnloop._display.log import log

__all__ = [
    "ADVICE",
    "DIVERGED",
    "Watchdog",
    "here",
    "start_watchdog",
    "stop_watchdog",
    "verdict",
    "wait_for_work",
    "waiting_for_all",
]

STALL_WARNING_SECONDS = 30  # seconds that a process waits for the others before it says so
HOLD = 10  # seconds that the processes stand still in places that never meet before the job fails
GRACE = 3  # seconds for all processes to hear of it before the first one ends
LAST = 15  # seconds until a process that still waits then is ended
PERIOD = 1  # seconds between two looks
DIVERGED = "the processes have come apart"
ADVICE = (
    "What a middleware or a hook decides must be the same everywhere: decide by the history, by counters, or by "
    "fnloop.reduce(...)"
)


class Here:
    """Where the run of this process is; written at each boundary."""

    step: int | None = None
    thread: int | None = None  # the identifier of the thread that the run is in


here = Here()
_waiting: list[
    tuple[str, float, int]
] = []  # what this process waits for the others in, since when, and behind which exchange
_watch: Watchdog | None = None


class waiting_for_all:
    """Note that this process waits for all others, within a ``with`` block.

    Args:
        what: what it waits in, as an error says it; the same in every process.
    """

    __slots__ = ("_outermost", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._outermost = not _waiting
        if self._outermost:
            _waiting.append(
                (self._what, time.monotonic(), 0 if _watch is None else _begun(_watch.group))
            )

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _waiting.clear()


def wait_for_work(work: Any, what: str = "an exchange") -> None:
    """Wait for an exchange that was begun.

    Args:
        work: the exchange.
        what: what it is, unless :class:`together` says so.

    Raises:
        RuntimeError: the other processes never come, since they wait for this one in another place.
    """
    if not work.is_completed():
        with waiting_for_all(what):
            _wait(work)
    work.wait()  # raises what went wrong in it


def _wait(work: Any) -> None:
    while not work.is_completed():
        if _watch is not None and _watch.verdict:
            _watch.told = True
            time.sleep(GRACE)
            raise RuntimeError(f"{DIVERGED}: {_watch.verdict}. {ADVICE}")
        with contextlib.suppress(
            RuntimeError
        ):  # of the time that is up, or the exchange's own, which finish raises
            work.wait(timedelta(seconds=PERIOD))


def verdict() -> str | None:
    """Return where the processes wait for each other, if they never meet there."""
    return None if _watch is None else _watch.verdict


def start_watchdog(store: Any, group: Any) -> None:
    """Look at this process from now on.

    Args:
        store: what all processes can read and write.
        group: the group of what is waited for in :class:`together`.
    """
    global _watch
    _watch = Watchdog(store.clone(), group, dist.get_rank(), dist.get_world_size())
    _watch.start()


def stop_watchdog() -> None:
    """Look no more."""
    global _watch
    if _watch is not None:
        _watch.ended.set()
        _watch.join(2 * PERIOD)
        _watch = None


class Watchdog(threading.Thread):
    """The thread that looks.

    Args:
        store: what all processes can read and write.
        group: the group of what is waited for in :class:`together`.
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, store: Any, group: Any, rank: int, size: int) -> None:
        super().__init__(name="fnloop", daemon=True)
        self.store, self.group, self.rank, self.size = (
            dist.PrefixStore("places", store),
            group,
            rank,
            size,
        )
        self.ended = threading.Event()
        self.verdict: str | None = None
        self.told = False  # whether an error of this process says so
        self._said = 0.0  # the wait that was spoken of
        self._place, self._since = "", time.monotonic()
        self._shown: str | None = None
        self._seen: dict[int, tuple[str, float]] = {}  # of each process, by the first one

    def run(self) -> None:
        """Look once a second."""
        try:
            while not self.ended.wait(PERIOD):
                self._warn()
                self._look()
        except ValueError:  # the script has ended the groups
            return
        except RuntimeError:  # the store has ended, with the process or the launcher that held it
            lost = time.monotonic()
        while not self.ended.wait(PERIOD):
            self._warn()
            if time.monotonic() - lost > HOLD:
                self.verdict = "process 0 or the launcher has ended, and the others wait for it"

    def _warn(self) -> None:
        """Say so, once, where the others do not come for long."""
        for what, since, _ in _waiting[:]:
            if time.monotonic() - since > STALL_WARNING_SECONDS and self._said != since:
                self._said = since
                log.warning(
                    "process %d has waited %d s in %s for the others. Every process has to come there: look for what only some "
                    "do ('if rank == 0', on_main(...), a hook that stops by what only one of them knows, a loader that is of "
                    "another length in each)",
                    self.rank, STALL_WARNING_SECONDS, what,
                )  # fmt: skip

    def _look(self) -> None:
        now, place = time.monotonic(), json.dumps(_place(self.group))
        if place != self._place:
            self._place, self._since = place, now
        still = now - self._since
        shown = place if still >= 2 * PERIOD else ""
        if shown != self._shown:
            self.store.set(f"place of {self.rank}", shown)
            self._shown = shown
        if not shown:
            return
        if self.rank == 0 and self.verdict is None:
            self._judge(now)
        if self.verdict is None and self.store.check(["verdict"]):
            self.verdict, self._since = self.store.get("verdict").decode(), now
        elif self.verdict is not None and not self.told and still > GRACE + LAST:
            blocked = json.loads(place)
            if blocked["waits"] is not None or blocked["inside"]:
                self._end()

    def _judge(self, now: float) -> None:
        """Compare the places of all processes that have stood still for long."""
        places = {}
        for rank in range(self.size):
            key = f"place of {rank}"
            text = self.store.get(key).decode() if self.store.check([key]) else ""
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now
            if text and now - self._seen[rank][1] >= HOLD:
                places[rank] = json.loads(text)
        found = never_meet(places, self.size)
        if found:
            said = [_said(rank, places[rank]) for rank in found]
            self.store.set("verdict", f"{said[0]}, and {said[1]}: they never meet there")

    def _end(self) -> None:
        """End this process: it waits for one that has failed, in a collective that nothing interrupts."""
        log.error("%s: %s. Process %d still waits, and is ended", DIVERGED, self.verdict, self.rank)
        with contextlib.suppress(Exception):  # a notebook's stderr is not a file
            faulthandler.dump_traceback()
        os._exit(1)


def _begun(group: Any) -> int:
    """Return how many collectives of a group this process has begun; 0 if torch does not count them."""
    return collectives_begun(group) or 0


def _place(control: Any) -> dict[str, Any]:
    """Return what this process waits in, the step it is after, and how many collectives it has begun in each group."""
    counts = {}
    for group in process_groups():
        counts[group.group_name] = _begun(group)
    what, _, behind = next(iter(_waiting[:]), (None, 0.0, 0))
    return {
        "waits": what,
        "behind": behind,
        "step": here.step,
        "control": counts.pop(control.group_name, 0),
        "counts": counts,
        "inside": dist.get_backend() != "gloo"
        or _in_torch(),  # gloo counts what is sent to one process too
    }


def _in_torch() -> bool:
    """Return whether the run's thread is in backward or in a collective."""
    frame = sys._current_frames().get(here.thread or threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.autograd", "torch.distributed")
    )


def never_meet(places: Mapping[int, Mapping[str, Any]], size: int) -> tuple[int, int] | None:
    """Return two processes that wait for each other in different places, by the rank; None if there may be none.

    Args:
        places: rank to place, of those that have stood still.
        size: how many processes there are.
    """
    waiting = [rank for rank, place in places.items() if place["waits"] is not None]
    for a in waiting:
        mine = places[a]
        for b, theirs in places.items():
            further = any(
                count > mine["counts"].get(name, count) for name, count in theirs["counts"].items()
            )
            if theirs["control"] <= mine["control"] and further and theirs["inside"]:
                return a, b
    if len(waiting) == size and len({places[rank]["behind"] for rank in waiting}) == 1:
        return next(
            ((a, b) for a in waiting for b in waiting if places[a]["waits"] != places[b]["waits"]),
            None,
        )
    return None


def _said(rank: int, place: Mapping[str, Any]) -> str:
    where = f"waits in {place['waits']}" if place["waits"] is not None else "is in an update"
    after = f" after step {place['step']}" if place["step"] is not None else ""
    return f"process {rank} {where}{after}"
