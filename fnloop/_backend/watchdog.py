"""Watch what each process waits for, and fail if processes wait for each other in different places.

A thread of each process looks once a second at what the process waits for, and at how many
collectives it has begun in each group. An update notes nothing for that. A place that has not
changed is written to a store, and the thread of the first process compares the places. All
processes begin the same collectives in the same order. So if one process waits in an exchange that
another has not begun, and that other process has begun a collective that the first has not, they
never meet. A process that is only slow has begun nothing that the others have not.
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
from typing import Any, TypedDict

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

STALL_WARNING_SECONDS = 30  # how long a process waits for the others before it warns
DEADLOCK_SECONDS = 10  # how long processes wait in places that never meet before the job fails
NOTICE_SECONDS = 3  # how long all processes have to learn of a failure before the first ends
KILL_SECONDS = 15  # how long after that a process that still waits is ended
POLL_SECONDS = 1
DIVERGED = "the processes have diverged"
ADVICE = (
    "Middleware and hooks must decide the same in every process: decide by the history, by "
    "counters, or by fnloop.reduce(...)"
)


class Here:
    """Where the run of this process is. It is updated at each boundary."""

    step: int | None = None
    thread: int | None = None  # the identifier of the thread that the run is in


here = Here()
# What this process waits for, since when, and after which exchange. Empty, or one entry.
_waiting: list[tuple[str, float, int]] = []
_watch: Watchdog | None = None


class waiting_for_all:
    """A context in which this process waits for all others.

    Args:
        what: what it waits for, as errors name it; the same in every process.
    """

    __slots__ = ("_outermost", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._outermost = not _waiting
        if self._outermost:
            _waiting.append(
                (
                    self._what,
                    time.monotonic(),
                    0 if _watch is None else _collectives_in(_watch.group),
                )
            )

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _waiting.clear()


def wait_for_work(work: dist.Work, what: str = "an exchange") -> None:
    """Wait for a collective that was started.

    Args:
        work: the handle of the collective.
        what: what it is for, unless an enclosing :class:`waiting_for_all` names it.

    Raises:
        RuntimeError: the other processes wait for this one in another place.
    """
    if not work.is_completed():
        with waiting_for_all(what):
            _wait(work)
    work.wait()  # raises the error of the collective


def _wait(work: dist.Work) -> None:
    while not work.is_completed():
        if _watch is not None and _watch.verdict:
            _watch.raised = True
            time.sleep(NOTICE_SECONDS)
            raise RuntimeError(f"{DIVERGED}: {_watch.verdict}. {ADVICE}")
        # A timeout, or an error of the collective, which the caller raises.
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=POLL_SECONDS))


def verdict() -> str | None:
    """Return where the processes wait for each other without ever meeting, or None."""
    return None if _watch is None else _watch.verdict


def start_watchdog(store: Any, group: dist.ProcessGroup) -> None:
    """Start the watchdog of this process.

    Args:
        store: a store that all processes can read and write.
        group: the group of the collectives that :class:`waiting_for_all` encloses.
    """
    global _watch
    _watch = Watchdog(store.clone(), group, dist.get_rank(), dist.get_world_size())
    _watch.start()


def stop_watchdog() -> None:
    """Stop the watchdog of this process."""
    global _watch
    if _watch is not None:
        _watch.stopped.set()
        _watch.join(2 * POLL_SECONDS)
        _watch = None


class Watchdog(threading.Thread):
    """The thread that watches.

    Args:
        store: a store that all processes can read and write.
        group: the group of the collectives that :class:`waiting_for_all` encloses.
        rank: the rank of this process.
        size: the number of processes.
    """

    def __init__(self, store: dist.Store, group: dist.ProcessGroup, rank: int, size: int) -> None:
        super().__init__(name="fnloop", daemon=True)
        self.store = dist.PrefixStore("places", store)
        self.group, self.rank, self.size = group, rank, size
        self.stopped = threading.Event()
        self.verdict: str | None = None
        self.raised = False  # whether an error of this process says the verdict
        self._warned_since = 0.0  # the beginning of the wait that was warned of
        self._place, self._since = "", time.monotonic()
        self._shown: str | None = None
        self._seen: dict[int, tuple[str, float]] = {}  # of each process, by the first one

    def run(self) -> None:
        """Look once a second until the watchdog is stopped."""
        try:
            while not self.stopped.wait(POLL_SECONDS):
                self._warn()
                self._look()
        except ValueError:  # the script has destroyed the groups
            return
        except RuntimeError:  # the process or the launcher that held the store has ended
            self._wait_without_store()

    def _wait_without_store(self) -> None:
        lost = time.monotonic()
        while not self.stopped.wait(POLL_SECONDS):
            self._warn()
            if time.monotonic() - lost > DEADLOCK_SECONDS:
                self.verdict = (
                    "process 0 or the launcher has ended, and other processes wait for it"
                )

    def _warn(self) -> None:
        """Warn once when this process has waited long for the others."""
        for what, since, _ in _waiting[:]:
            if time.monotonic() - since > STALL_WARNING_SECONDS and self._warned_since != since:
                self._warned_since = since
                log.warning(
                    "process %d has waited %d s for the others in %s. All processes must reach "
                    "this call. Check for code that only some execute: 'if rank == 0', "
                    "on_main(...), a hook that stops by what only one process knows, a loader "
                    "whose length differs between processes",
                    *(self.rank, STALL_WARNING_SECONDS, what),
                )

    def _look(self) -> None:
        now, place = time.monotonic(), json.dumps(_place(self.group))
        if place != self._place:
            self._place, self._since = place, now
        still = now - self._since
        shown = place if still >= 2 * POLL_SECONDS else ""
        if shown != self._shown:
            self.store.set(f"place of {self.rank}", shown)
            self._shown = shown
        if not shown:
            return
        if self.rank == 0 and self.verdict is None:
            self._judge(now)
        if self.verdict is None and self.store.check(["verdict"]):
            self.verdict, self._since = self.store.get("verdict").decode(), now
        elif self.verdict is not None and not self.raised and still > NOTICE_SECONDS + KILL_SECONDS:
            blocked = json.loads(place)
            if blocked["waits"] is not None or blocked["inside"]:
                self._end()

    def _judge(self, now: float) -> None:
        """Compare the places of all processes that have not moved for long."""
        places = {}
        for rank in range(self.size):
            key = f"place of {rank}"
            text = self.store.get(key).decode() if self.store.check([key]) else ""
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now
            if text and now - self._seen[rank][1] >= DEADLOCK_SECONDS:
                places[rank] = json.loads(text)
        found = never_meet(places, self.size)
        if found:
            first, second = (_describe(rank, places[rank]) for rank in found)
            self.store.set("verdict", f"{first}, and {second}: they never meet there")

    def _end(self) -> None:
        """End this process, which waits in a collective that cannot be interrupted."""
        log.error(
            "%s: %s. Process %d still waits and is terminated", DIVERGED, self.verdict, self.rank
        )
        with contextlib.suppress(Exception):  # a notebook's stderr is not a file
            faulthandler.dump_traceback()
        os._exit(1)


def _collectives_in(group: dist.ProcessGroup) -> int:
    """Return how many collectives of a group this process has begun; 0 if they are not counted."""
    return collectives_begun(group) or 0


class _Place(TypedDict):
    """What a process waits for, as it is written to the store."""

    waits: str | None
    exchange: int
    step: int | None
    control: int
    counts: dict[str, int]
    inside: bool


def _place(control: dist.ProcessGroup) -> _Place:
    """Return what this process waits for, its last step, and its collectives in each group."""
    counts = {}
    for group in process_groups():
        counts[group.group_name] = _collectives_in(group)
    what, _, exchange = next(iter(_waiting[:]), (None, 0.0, 0))
    return {
        "waits": what,
        "exchange": exchange,
        "step": here.step,
        "control": counts.pop(control.group_name, 0),
        "counts": counts,
        # gloo also counts messages to a single process.
        "inside": dist.get_backend() != "gloo" or _in_torch(),
    }


def _in_torch() -> bool:
    """Return whether the run's thread is in backward or in a collective."""
    frame = sys._current_frames().get(here.thread or threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.autograd", "torch.distributed")
    )


def never_meet(places: Mapping[int, _Place], size: int) -> tuple[int, int] | None:
    """Return the ranks of two processes that wait for each other in different places, or None.

    Args:
        places: rank to place, of the processes that have not moved for long.
        size: the number of processes.
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
    if len(waiting) == size and len({places[rank]["exchange"] for rank in waiting}) == 1:
        return next(
            ((a, b) for a in waiting for b in waiting if places[a]["waits"] != places[b]["waits"]),
            None,
        )
    return None


def _describe(rank: int, place: _Place) -> str:
    where = f"waits in {place['waits']}" if place["waits"] is not None else "is in an update"
    after = f" after step {place['step']}" if place["step"] is not None else ""
    return f"process {rank} {where}{after}"
