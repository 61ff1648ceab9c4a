"""Collectives over a control group on the host: what processes exchange besides gradients."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import pickle
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnloop._backend.fsdp import local_part
from fnloop._backend.launch import accelerator, launched
from fnloop._backend.rendezvous import choose_interface, own_store
from fnloop._backend.torch_compat import (
    broadcast_coalesced,
    collectives_begun,
    default_store,
    meeting_in,
    process_groups,
)
from fnloop._backend.transfer import to_cpu
from fnloop._backend.watchdog import (
    DIVERGED,
    begin_exchange,
    raise_verdict,
    start_watchdog,
    stop_watchdog,
    wait_for_work,
    waiting_for_all,
)
from fnloop._display.log import log

__all__ = [
    "ORDER_MISMATCH",
    "all_gather_tensor",
    "all_reduce_max",
    "all_reduce_max_tensor",
    "all_to_all_tensor",
    "any_rank",
    "broadcast_object",
    "broadcast_tensors",
    "check_collective_count",
    "collective_count",
    "control_group",
    "counted_collectives",
    "counts_here",
    "data_shares",
    "gather_from_all",
    "gather_objects",
    "pickled",
    "rank_and_size",
    "share_data",
    "shutdown_callbacks",
    "start_all_reduce_max",
    "start_all_reduce_sum",
    "sync_buffers",
]

ORDER_MISMATCH = (
    "each has the data in another order. If a sampler draws from a generator of its own, seed it "
    "with the same number in every process; or leave the order to fnloop: DataLoader(dataset, "
    "batch_size, shuffle=True)"
)
EXCHANGE = "an exchange of metrics or results"
INLINE_BYTES = 2032  # bytes that are sent together with their length; the rest follows
WIDTH = 16  # numbers in a reduction on the host: of one size, since gloo ends a process otherwise


# --- groups


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of processes.

    Processes that a launcher has started are joined first, if they have not been yet.
    """
    if not dist.is_available() or (not dist.is_initialized() and not launched()):
        return 0, 1
    if not dist.is_initialized():
        accelerator()
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


_sharing: list[int] = []  # by share of the data, the rank of the process that counts for it


def share_data(ranks: Sequence[int]) -> None:
    """Say which processes count in sums and gathers, since the others have the same data as one.

    Args:
        ranks: for each share of the data, the first process that has it.

    Raises:
        NotImplementedError: another model of this program shares the data in another way.
    """
    if _sharing and _sharing != [*ranks]:
        raise NotImplementedError(
            f"this model shares the data among {len(ranks)} processes, and another model of this "
            f"program among {len(_sharing)}. Give all of them the same mesh: tensor parallelism, "
            "or none"
        )
    _sharing[:] = ranks


def counts_here() -> bool:
    """Return whether this process counts in sums: of those with the same data only the first."""
    return len(_sharing) == dist.get_world_size() or dist.get_rank() in _sharing


def data_shares() -> int:
    """Return to how many processes, or rows of a mesh, the data are distributed."""
    return len(_sharing) or rank_and_size()[1]


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
    """Copy the buffers of the main process, such as running statistics, to every process."""
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
    """Return how many collectives this process has begun, but for fnloop's control messages.

    Where torch does not count them, it returns a new number each time: a function then seems to use
    collectives, and is called on padding too, which is slower and right.
    """
    begun = counted_collectives()
    return next(_calls) if begun is None else begun


def counted_collectives() -> int | None:
    """Return how many collectives this process has begun, in all groups, if that is known.

    Fnloop's control messages do not count.
    """
    if not _counts:
        return None
    groups = (group for group in process_groups() if group is not control_group())
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


def gather_objects(value: object, what: str = EXCHANGE) -> list[Any]:
    """Return the values of all shares of the data in their order, with tensors on the host.

    Of processes that have the same share, that of the first counts.

    Args:
        value: that of this process.
        what: what it is for, as errors name it; the same in every process.
    """
    every = gather_from_all(value, what)
    return [every[rank] for rank in _sharing] if _sharing else every


def gather_from_all(value: object, what: str = EXCHANGE) -> list[Any]:
    """Return the values of all processes by rank, with tensors on the host.

    Args:
        value: that of this process.
        what: what it is for, as errors name it; the same in every process.
    """
    size = rank_and_size()[1]
    if size == 1:
        return [value]
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


def broadcast_object(value: object, source: int, what: str) -> Any:
    """Return the value of one process, in every process.

    Args:
        value: that of this process.
        source: the rank of the process whose value it is.
        what: what it is for, as errors name it; the same in every process.
    """
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
    return torch.frombuffer(bytearray(pickle.dumps(to_cpu(value))), dtype=torch.uint8)


def start_all_reduce_max(
    numbers: Iterable[float], what: str = "an agreement"
) -> Callable[[], list[float]]:
    """Start to find the largest of each number over all processes.

    Args:
        numbers: those of this process, at most 14.
        what: what it is for, as errors name it; the same in every process.

    Returns:
        A function that waits for the numbers and returns them.
    """
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
    """Return the largest of each number over all processes.

    Args:
        numbers: those of this process.
        what: what it is for, as errors name it; the same in every process.

    Raises:
        RuntimeError: the processes have different numbers of numbers.
    """
    given = [*map(float, numbers)]
    if rank_and_size()[1] == 1:
        return given
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


def any_rank(flag: bool, what: str = "an agreement") -> bool:
    """Return whether a flag is set in any process."""
    return all_reduce_max([flag], what)[0] > 0


def start_all_reduce_sum(value: float | Tensor, what: str = "a sum") -> Callable[[], Any]:
    """Start to sum a number over all processes, of those with the same data only the first.

    Args:
        value: that of this process.
        what: what it is for, as errors name it; the same in every process.

    Returns:
        A function that waits for the sum and returns it.
    """
    number = isinstance(value, Tensor)
    total = value.detach().clone() if number else torch.tensor(float(value), dtype=torch.float64)
    if _sharing and not counts_here():
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
