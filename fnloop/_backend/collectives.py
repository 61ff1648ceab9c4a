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
from fnloop._backend.watchdog import start_watchdog, stop_watchdog, wait_for_work, waiting_for_all
from fnloop._display.log import log

__all__ = [
    "ORDER_MISMATCH",
    "all_gather_tensor",
    "all_reduce_max",
    "all_reduce_max_tensor",
    "all_to_all_tensor",
    "any_rank",
    "broadcast_tensors",
    "check_collective_count",
    "collective_count",
    "control_group",
    "counted_collectives",
    "counts_here",
    "data_shares",
    "gather_from_all",
    "gather_objects",
    "is_lost",
    "keep_alive",
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
INLINE_BYTES = 2040  # bytes that are sent together with their length; the rest follows


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


def is_lost(error: BaseException) -> bool:
    """Return whether an error means that another process has ended."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


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
    stop_watchdog()
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        _drain()
        _inflight.clear()  # while the interpreter is still alive
        for holder in list(shutdown_callbacks):
            holder.close()
        dist.destroy_process_group()
        control_group.cache_clear()


def _group(device: torch.device) -> dist.ProcessGroup | None:
    return control_group() if device.type == "cpu" else None


# --- tensors and counts


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Copy tensors of the main process into those of every process."""
    tensors = [t for t in tensors if 0 not in t.stride()]  # an expanded tensor cannot be written to
    if tensors:
        group = _group(tensors[0].device) or dist.group.WORLD
        broadcast_coalesced(group, tensors)


def sync_buffers(model: nn.Module) -> None:
    """Copy the buffers of the main process, such as running statistics, to every process."""
    with waiting_for_all("an exchange of the model's buffers"):
        broadcast_tensors([local_part(b).detach() for b in model.buffers()])


_inflight: deque[dist.Work] = deque(maxlen=64)


def keep_alive(work: Any) -> dist.Work:
    """Keep the handle of a collective alive for a while, and return it.

    Otherwise a gloo thread may drop the last reference and need the GIL to free the tensors: see
    :func:`_drain`.
    """
    _inflight.append(work)
    return work


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


def gather_objects(value: object) -> list[Any]:
    """Return the values of all shares of the data in their order, with tensors on the host.

    Of processes that have the same share, that of the first counts.
    """
    every = gather_from_all(value)
    return [every[rank] for rank in _sharing] if _sharing else every


def gather_from_all(value: object) -> list[Any]:
    """Return the values of all processes by rank, with tensors on the host."""
    size = rank_and_size()[1]
    if size == 1:
        return [value]
    mine = pickled(value)
    with waiting_for_all("an exchange of metrics or results"):
        heads = _gathered(
            torch.cat([torch.tensor([len(mine)]).view(torch.uint8), mine[:INLINE_BYTES]]),
            8 + INLINE_BYTES,
        )
        lengths = [int(head[:8].view(torch.int64)) for head in heads]
        longest = max(lengths)
        tails = (
            _gathered(mine[INLINE_BYTES:], longest - INLINE_BYTES)
            if longest > INLINE_BYTES
            else [mine[:0]] * size
        )
    whole = [
        torch.cat([head[8:], tail])[:length]
        for head, tail, length in zip(heads, tails, lengths, strict=True)
    ]
    return [pickle.loads(part.numpy().tobytes()) for part in whole]


def _gathered(mine: Tensor, size: int) -> list[Tensor]:
    """Return the bytes of every process, padded with zeros to a size."""
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    padded = nn.functional.pad(mine, (0, size - len(mine)))
    wait_for_work(keep_alive(dist.all_gather(parts, padded, group=control_group(), async_op=True)))
    return parts


def pickled(value: object) -> Tensor:
    """Return a pickled value as bytes on the host."""
    return torch.frombuffer(bytearray(pickle.dumps(to_cpu(value))), dtype=torch.uint8)


def start_all_reduce_max(numbers: Iterable[float]) -> Callable[[], list[float]]:
    """Start to find the largest of each number over all processes.

    Returns:
        A function that waits for the numbers and returns them.
    """
    values = torch.tensor([*numbers], dtype=torch.float64)
    work = keep_alive(
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=control_group(), async_op=True)
    )

    def wait() -> list[float]:
        wait_for_work(work, "an agreement")
        return values.tolist()

    return wait


def all_reduce_max(numbers: Iterable[float]) -> list[float]:
    """Return the largest of each number over all processes."""
    if rank_and_size()[1] == 1:
        return [*map(float, numbers)]
    return start_all_reduce_max(numbers)()


def any_rank(flag: bool) -> bool:
    """Return whether a flag is set in any process."""
    return all_reduce_max([flag])[0] > 0


def start_all_reduce_sum(value: float | Tensor) -> Callable[[], Any]:
    """Start to sum a number over all processes, of those with the same data only the first.

    Returns:
        A function that waits for the sum and returns it.
    """
    total = (
        value.detach().clone()
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=torch.float64)
    )
    if _sharing and not counts_here():
        total.zero_()
    work = keep_alive(dist.all_reduce(total, group=_group(total.device), async_op=True))

    def wait() -> Any:
        _finish(work, total, "a sum")
        return total if isinstance(value, Tensor) else total.item()

    return wait


def all_reduce_max_tensor(value: Tensor) -> Tensor:
    """Return the largest value of a scalar over all processes, on its device."""
    value = value.clone()
    work = keep_alive(
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_group(value.device), async_op=True)
    )
    _finish(work, value, "an agreement")
    return value


# --- tensors of a known shape, on their device


def all_gather_tensor(mine: Tensor) -> list[Tensor]:
    """Return the tensors of all processes, by rank. They must have one shape and one dtype."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    group = _group(mine.device)
    _finish(keep_alive(dist.all_gather(parts, mine, group=group, async_op=True)), mine, "a sum")
    return parts


def all_to_all_tensor(mine: Tensor) -> Tensor:
    """Return what each process has for this one, given what this one has for each of them.

    Args:
        mine: what each process gets, by rank along the first dimension; contiguous.

    Returns:
        What this process gets, by the rank of who sends it along the first dimension.
    """
    theirs = torch.empty_like(mine)
    group = _group(mine.device)
    _finish(keep_alive(dist.all_to_all_single(theirs, mine, group=group, async_op=True)), mine,
            "a sum of gradients")  # fmt: skip
    return theirs
