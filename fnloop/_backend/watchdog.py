"""Watch what each process waits for, and fail if processes wait for each other in different places.

All processes begin the same collectives in the same order. Those of the library have names, and
each process notes the names of the latest, from its first one on. Torch counts all others: those
of backward and of the user's functions. A thread of each process looks once a second at what the
process waits for, at these names and at these counts. A place that has not changed is written to a
store, and the thread of the first process compares the places. Two processes never meet again if

* the n-th exchange has one name in one process and another name in the other; or
* one waits in an exchange that the other has not begun, and the other is in a collective of torch
  that the first has not begun.

A process that is only slow has begun nothing that the others have not.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn, TypedDict

import torch.distributed as dist

from fnloop._backend.torch_compat import collectives_begun, process_groups
from fnloop._display.log import log

__all__ = [
    "ADVICE",
    "DIVERGED",
    "Watchdog",
    "begin_exchange",
    "explain_lost",
    "here",
    "raise_verdict",
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
NAMES = 64  # how many of the latest exchanges a process remembers: so far may one be ahead
DIVERGED = "the processes have diverged"
ADVICE = (
    "Middleware and hooks must decide the same in every process: decide by the history, by "
    "counters, or by fnloop.reduce(...)"
)
_LOST = (
    "another process has ended or stopped by itself: its own traceback says why. If it has none, a "
    "hook or a loader there decided by what only it knew: decide by the history, by counters, or "
    "by fnloop.reduce(...)"
)


class Here:
    """Where the run of this process is. It is updated at each boundary."""

    step: int | None = None
    thread: int | None = None  # the identifier of the thread that the run is in


here = Here()
# What this process waits for, and since when. Empty, or one entry.
_waiting: list[tuple[str, float]] = []
# The latest exchanges that this process has begun: their numbers, from 1, and their names.
_begun: deque[tuple[int, str]] = deque([(0, "")], maxlen=NAMES)
_watch: Watchdog | None = None


def begin_exchange(what: str) -> str:
    """Note that this process begins a collective of the library. Return the name of it.

    Args:
        what: what it is for, in addition to what an enclosing :class:`waiting_for_all` says.
    """
    texts = dict.fromkeys((_waiting[0][0], what) if _waiting else (what,))
    name = ": ".join(text.partition("(")[0].rstrip() for text in texts)
    _begun.append((_begun[-1][0] + 1, name))
    return name


class waiting_for_all:
    """A context in which this process waits for all others.

    Args:
        what: what it waits for, as errors name it; the same in every process, but for an addition
            in parentheses.
    """

    __slots__ = ("_outermost", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._outermost = not _waiting
        if self._outermost:
            _waiting.append((self._what, time.monotonic()))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._outermost:
            _waiting.clear()
        if error is not None:
            explain_lost(error)


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
    try:
        work.wait()  # raises the error of the collective
    except RuntimeError as error:
        explain_lost(error)
        raise


def _wait(work: dist.Work) -> None:
    while not work.is_completed():
        _raise_if_judged()
        # A timeout, or an error of the collective, which the caller raises.
        with contextlib.suppress(RuntimeError):
            work.wait(timedelta(seconds=POLL_SECONDS))


def _raise_if_judged() -> None:
    if _watch is not None and _watch.verdict:
        _watch.raised = True
        time.sleep(NOTICE_SECONDS)
        raise RuntimeError(f"{DIVERGED}: {_watch.verdict}. {ADVICE}")


def raise_verdict(what: str) -> NoReturn:
    """Raise, because an exchange of this process has met another exchange.

    The other process may not know of it, so both wait until the watchdog has compared their places.

    Args:
        what: what the exchange was for.
    """
    with waiting_for_all(what):
        for _ in range(4 * math.ceil(DEADLOCK_SECONDS / POLL_SECONDS)):
            _raise_if_judged()
            time.sleep(POLL_SECONDS)
    raise RuntimeError(f"{DIVERGED}: {what} has met another exchange. {ADVICE}")


def verdict() -> str | None:
    """Return where the processes wait for each other without ever meeting, or None."""
    return None if _watch is None else _watch.verdict


def explain_lost(error: BaseException) -> None:
    """Note in an error of a collective what is known about the other processes."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset")
    is_lost = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    found = verdict()
    note = f"{DIVERGED}: {found}. {ADVICE}" if found else _LOST
    if is_lost and note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def start_watchdog(store: Any, group: dist.ProcessGroup) -> None:
    """Start the watchdog of this process.

    Args:
        store: a store that all processes can read and write.
        group: the group of the library's exchanges, whose names are noted.
    """
    global _watch
    _watch = Watchdog(store.clone(), group, dist.get_rank(), dist.get_world_size())
    _watch.start()


def stop_watchdog() -> bool:
    """Stop the watchdog of this process at the end of the script.

    Returns:
        Whether it has found that processes never meet, so that their groups cannot be destroyed.
    """
    global _watch
    if _watch is None:
        return False
    _watch.stopped.set()
    _watch.join(2 * POLL_SECONDS)
    judged, _watch = _watch.verdict is not None, None
    if judged:
        # A thread of gloo waits for a process that never comes, and cannot be interrupted. The
        # destructor of a group would wait for that thread, so it must not run as Python ends.
        for group in process_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return judged


class Watchdog(threading.Thread):
    """The thread that watches.

    Args:
        store: a store that all processes can read and write.
        group: the group of the library's exchanges, whose names are noted.
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
        for what, since in _waiting[:]:
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
        found = never_meet(places)
        if found:
            self.store.set("verdict", _describe(places, *found))

    def _end(self) -> None:
        """End this process, which waits in a collective that cannot be interrupted."""
        log.error(
            "%s: %s. Process %d still waits and is terminated", DIVERGED, self.verdict, self.rank
        )
        with contextlib.suppress(Exception):  # a notebook's stderr is not a file
            faulthandler.dump_traceback()
        os._exit(1)


class _Place(TypedDict):
    """What a process waits for, as it is written to the store."""

    waits: str | None
    begun: list[tuple[int, str]]
    step: int | None
    counts: dict[str, int]
    inside: bool


def _place(control: dist.ProcessGroup) -> _Place:
    """Return what this process waits for, its last step, and what it has begun."""
    others = (group for group in process_groups() if group.group_name != control.group_name)
    waits = next(iter(_waiting[:]), None)
    return {
        "waits": None if waits is None else waits[0],
        "begun": [*_begun],
        "step": here.step,
        "counts": {group.group_name: collectives_begun(group) or 0 for group in others},
        # gloo also counts messages to a single process.
        "inside": dist.get_backend() != "gloo" or _in_torch(),
    }


def _in_torch() -> bool:
    """Return whether the run's thread is in backward or in a collective."""
    frame = sys._current_frames().get(here.thread or threading.main_thread().ident or 0)
    return frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.autograd", "torch.distributed")
    )


def never_meet(places: Mapping[int, _Place]) -> tuple[int, int] | None:
    """Return the ranks of two processes that wait for each other in different places, or None.

    Args:
        places: rank to place, of the processes that have not moved for long.
    """
    for a, mine in places.items():
        for b, theirs in places.items():
            if a < b and _parting(mine, theirs):
                return a, b
    for a, mine in places.items():
        for b, theirs in places.items():
            further = any(
                count > mine["counts"].get(name, count) for name, count in theirs["counts"].items()
            )
            is_earlier = theirs["begun"][-1][0] < mine["begun"][-1][0]
            if mine["waits"] is not None and is_earlier and further and theirs["inside"]:
                return a, b
    return None


def _parting(mine: _Place, theirs: _Place) -> tuple[str, str] | None:
    """Return the names of the first exchange that has two, of those that both remember."""
    known = dict(mine["begun"])
    both = ((known.get(number, name), name) for number, name in theirs["begun"])
    return next((names for names in both if names[0] != names[1]), None)


def _describe(places: Mapping[int, _Place], a: int, b: int) -> str:
    """Say where two processes are that never meet."""
    first, second = (_describe_one(rank, places[rank]) for rank in (a, b))
    found = f"{first}, and {second}: they never meet there"
    names = _parting(places[a], places[b])
    if names is None or all(name in found for name in names):
        return found
    return f"{found}. Before, process {a} began {names[0]}, and process {b} {names[1]}"


def _describe_one(rank: int, place: _Place) -> str:
    where = "" if place["waits"] is None else f"waits in {place['waits']}"
    if place["step"] is None:
        return f"process {rank} {where or 'is outside of a run'}"
    after = f"after step {place['step']}" if place["step"] else "before the first update"
    return f"process {rank} {where or 'is in an update'} {after}"
