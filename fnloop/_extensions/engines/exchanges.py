"""What processes exchange besides gradients, and what each of them waits for.

It has the answers of several processes to the questions of :mod:`fnloop._backend.collectives`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import itertools
import json
import logging
import math
import os
import pickle
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, NoReturn, Protocol, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnloop._extensions.engines.launch import accelerator, choose_interface, launched, own_store
from fnloop._extensions.engines.torch_compat import (
    broadcast_coalesced,
    collectives_begun,
    default_store,
    meeting_in,
    process_groups,
)
from fnloop.extend import checks, collectives, containers, local_part

log = logging.getLogger("fnloop")

Tree = TypeVar("Tree")
DIVERGED, EXCHANGE = collectives.DIVERGED, collectives.EXCHANGE
ADVICE = (
    "Middleware and hooks must decide the same in every process: decide by the history, by "
    "counters, or by fnloop.reduce(...)"
)

# --------------------------------------------------------------------------------------------------
# Collectives over a control group on the host: what processes exchange besides gradients.

INLINE_BYTES = 2032  # bytes that are sent together with their length; the rest follows
WIDTH = 16  # numbers in a reduction on the host: of one size, since gloo ends a process otherwise


# --- groups


def several() -> ModuleType | None:
    """Return this module if there are several processes. Those that a launcher has started join."""
    if not dist.is_available() or (not dist.is_initialized() and not launched()):
        return None
    if not dist.is_initialized():
        accelerator()
    return sys.modules[__name__] if dist.get_world_size() > 1 else None


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


@functools.cache
def control_group() -> dist.ProcessGroup:
    """Return a dedicated gloo group, so that control messages cannot interleave with gradients."""
    atexit.register(_shutdown)
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_drain)
    choose_interface()  # the default group may be of NCCL, or made by others
    store = own_store(default_store(), dist.get_rank(), dist.get_world_size())
    with meeting_in(store):
        group: Any = dist.new_group(backend="gloo")
    start_watchdog(store, group)
    return group


_sharing: list[int] = []  # by share of the data, the rank of the first process that has it
# The processes with the share of this one, if each computes a part of it, and so counts in sums. If
# there is none, they repeat what the first one computes, and only that one counts.
_row: list[int] = []


def share_data(ranks: Sequence[int], row: Sequence[int] = ()) -> None:
    """Say how processes share the data, and which of them count in sums and gathers.

    Args:
        ranks: for each share of the data, the first process that has it.
        row: the processes that have the share of this one, if each computes a part of it. Without
            it, they repeat what the first one computes, which counts alone.

    Raises:
        NotImplementedError: another model of this program shares the data in another way.
    """
    if _sharing and (_sharing, _row) != ([*ranks], [*row]):
        raise NotImplementedError(
            f"this model shares the data among {len(ranks)} process{'es' * (len(ranks) > 1)}, and "
            f"another model of this program among {len(_sharing)}. Give all of them the same mesh, "
            "and the same data=: tensor parallelism, parts of batches, or none. Or train each in a "
            "program of its own"
        )
    _sharing[:], _row[:] = ranks, row


def counts_here() -> bool:
    return bool(_row) or not _sharing or dist.get_rank() in _sharing


def data_shares() -> int:
    return len(_sharing) or dist.get_world_size()


class Closable(Protocol):
    """An object that holds a process group until it is closed."""

    def close(self) -> None: ...


# Objects whose ``close()`` releases their groups.
shutdown_callbacks: weakref.WeakSet[Closable] = weakref.WeakSet()


def _shutdown() -> None:
    """Destroy the groups in order at the end of the script.

    Otherwise gloo's threads may abort the process. Not after an exception: other processes may be
    waiting, and learn of the failure when this one exits.
    """
    judged = stop_watchdog()
    if dist.is_initialized() and not hasattr(sys, "last_type") and not judged:
        _drain()
        _inflight.clear()  # while the interpreter is still alive
        for holder in list(shutdown_callbacks):
            holder.close()
        dist.destroy_process_group()
        control_group.cache_clear()


def _group(device: torch.device) -> dist.ProcessGroup | None:
    return control_group() if device.type == "cpu" else None


# --- tensors and counts


def broadcast_tensors(tensors: list[Tensor], what: str) -> None:
    """Copy tensors of the main process into those of every process.

    Args:
        tensors: those of this process.
        what: what they are, as errors name it.
    """
    tensors = [t for t in tensors if 0 not in t.stride()]  # an expanded tensor cannot be written to
    if tensors:
        group = _group(tensors[0].device) or dist.group.WORLD
        begin_exchange(what)
        with waiting_for_all(what):
            broadcast_coalesced(group, tensors)


def sync_buffers(model: nn.Module) -> None:
    buffers = [local_part(b).detach() for b in model.buffers()]
    broadcast_tensors(buffers, "an exchange of the model's buffers")


_inflight: deque[dist.Work] = deque(maxlen=64)


def _keep_alive(work: Any) -> dist.Work:
    """Keep the handle of a collective alive for a while, and return it.

    Otherwise a gloo thread may drop the last reference and need the GIL to free the tensors: see
    :func:`_drain`.
    """
    _inflight.append(work)
    return work


def _mark(name: str) -> int:
    """Return a number for the name of an exchange: what is sent says which exchange it is of.

    It is small, so that float64 holds the sum of its squares over all processes.
    """
    return zlib.crc32(name.encode()) % 65521


def _drain() -> None:
    """Let gloo's threads finish before this process ends or forks the workers of a loader.

    A thread that enters Python at that moment holds a lock that CPython 3.11 does not free in the
    child. The child would wait for it for ever. The handles of DDP's collectives cannot be kept
    alive here.
    """
    time.sleep(0.002)


_counts = True  # whether torch counts the collectives of the default group
_calls = itertools.count()


def collective_count() -> int:
    begun = counted_collectives()
    return next(_calls) if begun is None else begun


def counted_collectives(between_shares: bool = False) -> int | None:
    """Return how many collectives this process has begun, in all groups, if that is known.

    Fnloop's control messages do not count.

    Args:
        between_shares: whether only those with processes of other shares of the data count.
    """
    if not _counts:
        return None
    groups = (group for group in process_groups() if group is not control_group())
    if between_shares and _row:
        members = dist.get_process_group_ranks
        groups = (group for group in groups if not {*_row}.issuperset(members(group)))
    return sum(collectives_begun(group) or 0 for group in groups)


def check_collective_count(device: torch.device) -> None:
    """Find out whether torch counts collectives. Every process must call this."""
    global _counts
    before = collectives_begun(dist.group.WORLD)
    begin_exchange("the joining of the processes")
    with waiting_for_all("the joining of the processes"):
        dist.all_reduce(torch.zeros(1, device=device))
    _counts = collectives_begun(dist.group.WORLD) != before
    if not _counts:
        log.warning(
            "torch %s does not count the collectives of %s, so fnloop assumes that every loss "
            "function uses some: a process without a batch runs it too",
            *(torch.__version__, dist.get_backend()),
        )


def _finish(work: dist.Work, value: Tensor, what: str) -> None:
    """Wait for the collective of a value: on the host if the value is there, else on its device."""
    if value.device.type == "cpu":
        wait_for_work(work, what)
    else:
        work.wait()


# --- values


def gather_objects(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    return gather_from_all(value, what) if _row else gather_shares(value, what)


def gather_shares(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    every = gather_from_all(value, what)
    return [every[rank] for rank in _sharing] if _sharing else every


def gather_from_all(value: Tree, what: str = EXCHANGE) -> list[Tree]:
    size = dist.get_world_size()
    data = pickled(value)
    mark = _mark(begin_exchange(what))
    with waiting_for_all(what):
        head = torch.tensor([mark, len(data)]).view(torch.uint8)
        heads = _gathered(torch.cat([head, data[:INLINE_BYTES]]), 16 + INLINE_BYTES)
        marks, lengths = zip(*(head[:16].view(torch.int64).tolist() for head in heads), strict=True)
        if {*marks} != {mark}:
            raise_verdict(what)
        longest = max(lengths)
        tails = (
            _gathered(data[INLINE_BYTES:], longest - INLINE_BYTES)
            if longest > INLINE_BYTES
            else [data[:0]] * size
        )
    whole = [
        torch.cat([head[16:], tail])[:length]
        for head, tail, length in zip(heads, tails, lengths, strict=True)
    ]
    return [pickle.loads(part.numpy().tobytes()) for part in whole]


def _gathered(mine: Tensor, size: int) -> list[Tensor]:
    """Return the bytes of every process, padded with zeros to a size."""
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    padded = nn.functional.pad(mine, (0, size - len(mine)))
    work = dist.all_gather(parts, padded, group=control_group(), async_op=True)
    wait_for_work(_keep_alive(work))
    return parts


def broadcast_object(value: Tree, source: int, what: str) -> Tree:
    mine = dist.get_rank() == source
    data = pickled(value) if mine else torch.empty(0, dtype=torch.uint8)
    mark = _mark(begin_exchange(what))
    head = torch.tensor([mark, len(data)])
    with waiting_for_all(what):
        _broadcast(head, source)
        found, length = head.tolist()
        if found != mark:
            raise_verdict(what)
        data = data if mine else torch.empty(length, dtype=torch.uint8)
        _broadcast(data, source)
    return value if mine else pickle.loads(data.numpy().tobytes())


def _broadcast(tensor: Tensor, source: int) -> None:
    work = dist.broadcast(tensor, source, group=control_group(), async_op=True)
    wait_for_work(_keep_alive(work))


def pickled(value: object) -> Tensor:
    """Return a pickled value as bytes on the host."""
    return torch.frombuffer(bytearray(pickle.dumps(containers.to_cpu(value))), dtype=torch.uint8)


def start_all_reduce_max(
    numbers: Iterable[float], what: str = "an agreement"
) -> Callable[[], list[float]]:
    mark, given = _mark(begin_exchange(what)), [*numbers]
    # The largest of -x is the smallest of x: the marks of all processes are equal if both are.
    padding = [0.0] * (WIDTH - 2 - len(given))
    values = torch.tensor([mark, -mark, *given, *padding], dtype=torch.float64)
    work = _all_reduce(values, dist.ReduceOp.MAX)

    def wait() -> list[float]:
        wait_for_work(work, what)
        most, least, *largest = values.tolist()
        if most != -least:
            raise_verdict(what)
        return largest[: len(given)]

    return wait


def all_reduce_max(numbers: Iterable[float], what: str = "an agreement") -> list[float]:
    given = [*map(float, numbers)]
    if len(given) <= WIDTH - 2:
        return start_all_reduce_max(given, what)()
    most, least = start_all_reduce_max([len(given), -len(given)], what)()
    if most != -least:
        raise RuntimeError(
            f"{DIVERGED}: {what} has {-least:g} numbers in one process and {most:g} in another"
        )
    values = torch.tensor(given, dtype=torch.float64)
    wait_for_work(_all_reduce(values, dist.ReduceOp.MAX), what)
    return values.tolist()


def _all_reduce(values: Tensor, how: Any) -> dist.Work:
    group = _group(values.device)
    return _keep_alive(dist.all_reduce(values, op=how, group=group, async_op=True))


def all_reduce_sum(number: float, what: str) -> float:
    return start_all_reduce_sum(number, what)()


def start_all_reduce_sum(value: float | Tensor, what: str = "a sum") -> Callable[[], Any]:
    """Start to sum a number over all processes that count.

    Args:
        value: that of this process.
        what: what it is for, as errors name it; the same in every process.

    Returns:
        A function that waits for the sum and returns it.
    """
    number = isinstance(value, Tensor)
    total = value.detach().clone() if number else torch.tensor(float(value), dtype=torch.float64)
    if not counts_here():
        total.zero_()
    mark = _mark(begin_exchange(what))
    if total.device.type != "cpu" or total.ndim:
        work = _all_reduce(total, dist.ReduceOp.SUM)

        def wait_for_tensor() -> Tensor:
            _finish(work, total, what)
            return total

        return wait_for_tensor
    values = torch.zeros(WIDTH, dtype=torch.float64)
    values[0], values[1], values[2] = mark, mark * mark, total
    work = _all_reduce(values, dist.ReduceOp.SUM)

    def wait() -> Any:
        wait_for_work(work, what)
        marks, squares, found = values.numpy()[:3].tolist()
        # They are equal only if all marks are.
        if marks * marks != dist.get_world_size() * squares:
            raise_verdict(what)
        return total.fill_(found) if number else found

    return wait


def all_reduce_max_tensor(value: Tensor, what: str) -> Tensor:
    """Return the largest value of a tensor over all processes, on its device.

    Args:
        value: that of this process: a scalar, or a few numbers.
        what: what it is for, as errors name it; the same in every process.
    """
    if value.device.type == "cpu":
        found = all_reduce_max(value.double().flatten().tolist(), what)
        return torch.tensor(found, dtype=value.dtype).view(value.shape)
    value = value.clone()
    begin_exchange(what)
    _all_reduce(value, dist.ReduceOp.MAX).wait()
    return value


# --- tensors of a known shape, on their device


def all_gather_tensor(mine: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, by rank. They must have one shape and one dtype."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    begin_exchange("a sum of gradients")
    work = dist.all_gather(parts, mine, group=_group(mine.device), async_op=True)
    _finish(_keep_alive(work), mine, "a sum of gradients")
    return parts


PIECE = 1 << 25  # elements of tensors that are averaged in one message


def mean_over_processes_(tensors: Iterable[Tensor], what: str) -> None:
    """Replace floating tensors by their means over all processes, in place.

    Args:
        tensors: those of this process. All processes must have the same, in one order.
        what: what they are, as errors name it.
    """
    pieces: dict[object, list[list[Tensor]]] = {}
    for tensor in tensors:
        found = pieces.setdefault((tensor.device, tensor.dtype), [[]])
        if sum(t.numel() for t in found[-1]) + tensor.numel() > PIECE and found[-1]:
            found.append([])
        found[-1].append(tensor)
    for piece in itertools.chain.from_iterable(pieces.values()):
        # A sum in a narrow dtype would lose what the updates have changed.
        wide = torch.promote_types(piece[0].dtype, torch.float32)
        flat = torch.cat([t.reshape(-1).to(wide) for t in piece])
        begin_exchange(what)
        _finish(_all_reduce(flat, dist.ReduceOp.SUM), flat, what)
        flat /= dist.get_world_size()
        for tensor, mean in zip(piece, flat.split([t.numel() for t in piece]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def all_to_all_tensor(mine: Tensor) -> Tensor:
    """Return what each process has for this one, given what this one has for each of them.

    Args:
        mine: what each process gets, by rank along the first dimension; contiguous.

    Returns:
        What this process gets, by the rank of who sends it along the first dimension.
    """
    theirs = torch.empty_like(mine)
    begin_exchange("a sum of gradients")
    work = dist.all_to_all_single(theirs, mine, group=_group(mine.device), async_op=True)
    _finish(_keep_alive(work), mine, "a sum of gradients")
    return theirs


# --------------------------------------------------------------------------------------------------
# Watch what each process waits for, and fail if processes wait for each other in different places.
#
# All processes begin the same collectives in the same order. Those of the library have names, and
# each process notes the names of the latest, from its first one on. Torch counts all others: those
# of backward and of the user's functions. A thread of each process looks once a second at what the
# process waits for, at these names and at these counts. A place that has not changed is written to
# a store, and the thread of the first process compares the places. Two processes never meet again
# if
#
# * the n-th exchange has one name in one process and another name in the other; or
# * one waits in an exchange that the other has not begun, and the other is in a collective of torch
#   that the first has not begun.
#
# A process that is only slow has begun nothing that the others have not.

STALL_WARNING_SECONDS = 30  # how long a process waits for the others before it warns
DEADLOCK_SECONDS = 10  # how long processes wait in places that never meet before the job fails
NOTICE_SECONDS = 3  # how long all processes have to learn of a failure before the first ends
KILL_SECONDS = 15  # how long after that a process that still waits is ended
POLL_SECONDS = 1
NAMES = 64  # how many of the latest exchanges a process remembers: so far may one be ahead
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
    if is_lost and note not in checks.notes_of(error):
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
            "%s: %s. Process %d still waits and is terminated",
            DIVERGED,
            self.verdict,
            self.rank,
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
    for a, b in itertools.combinations(places, 2):
        if _parting(places[a], places[b]):
            return a, b
    for a, b in itertools.permutations(places, 2):
        mine, theirs = places[a], places[b]
        counts = theirs["counts"].items()
        further = any(count > mine["counts"].get(name, count) for name, count in counts)
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


# --------------------------------------------------------------------------------------------------
# What one process does, or each of them, while the others wait.


def _tried(do: Callable[[], Tree]) -> tuple[Tree | None, BaseException | None]:
    """Return what a function returns, and what it raises."""
    __tracebackhide__ = True
    try:
        return do(), None
    except BaseException as error:
        return None, error


def on_main_process(do: Callable[[], Tree], what: str) -> Tree:
    __tracebackhide__ = True
    result, error = _tried(do) if dist.get_rank() == 0 else (None, None)
    said = "" if error is None else f"{type(error).__name__}: {error}"
    failed, made = broadcast_object((said, result), 0, what)
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on the main process: {failed}")
    return made  # type: ignore[return-value]


def on_every_process(do: Callable[[], Tree], what: str) -> Tree:
    rank = dist.get_rank()
    result, error = _tried(do)
    errors = gather_from_all(None if error is None else _portable(error, what, rank), what)
    if error is not None:
        raise error
    for other, failed in enumerate(errors):
        if isinstance(failed, BaseException):
            raise failed
        if failed is not None:  # that process is elsewhere, and has exchanged something else
            raise RuntimeError(
                f"{DIVERGED}: process {rank} is in {what}, and process {other} is not. {ADVICE}"
            )
    return result  # type: ignore[return-value]


def _portable(error: BaseException, what: str, rank: int) -> Exception:
    """Return an error that another process can raise: the same, if it can be pickled."""
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            copied = pickle.loads(pickle.dumps(error))
            if type(copied) is type(error) and str(copied) == str(error):
                copied.add_note(f"{what} failed on process {rank}")
                return copied
    return RuntimeError(f"{what} failed on process {rank}: {type(error).__name__}: {error}")
