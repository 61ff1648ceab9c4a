"""Several processes: how they are joined, and what they tell each other beside gradients, over a group on the host."""

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
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnloop._backend.fsdp import local_part
from fnloop._backend.launch import accelerator, launched
from fnloop._backend.rendezvous import own_store
from fnloop._backend.torch_compat import (
    broadcast_coalesced,
    collectives_begun,
    default_store,
    meeting_in,
)
from fnloop._backend.transfer import to_cpu
from fnloop._backend.watchdog import start_watchdog, stop_watchdog, wait_for_work, waiting_for_all
from fnloop._display.log import log

__all__ = [
    "ORDER_MISMATCH",
    "all_reduce_max",
    "all_reduce_max_tensor",
    "any_rank",
    "broadcast_tensors",
    "check_collective_count",
    "collective_count",
    "control_group",
    "gather_objects",
    "is_lost",
    "keep_alive",
    "pickled",
    "rank_and_size",
    "shutdown_callbacks",
    "start_all_reduce_max",
    "start_all_reduce_sum",
    "sync_buffers",
]

ORDER_MISMATCH = (
    "each has the data in another order. A sampler draws from a generator of its own: seed it, the same in every process; or "
    "leave the order to fnloop, DataLoader(dataset, batch_size, shuffle=True)"
)
INLINE_BYTES = 2040  # bytes that travel with their number, at once; what is longer follows


# --- what processes tell each other


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and how many there are, joining them if they were launched and have not been."""
    if not dist.is_available() or (not dist.is_initialized() and not launched()):
        return 0, 1
    if not dist.is_initialized():
        accelerator()
    return dist.get_rank(), dist.get_world_size()


@functools.cache
def control_group() -> Any:
    """Return a group on the host that nobody else uses: what is said there can't get between gradients."""
    atexit.register(_shutdown)
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_drain)
    store = own_store(default_store(), dist.get_rank(), dist.get_world_size())
    with meeting_in(store):
        group = dist.new_group(backend="gloo")
    start_watchdog(store, group)
    return group


def is_lost(error: BaseException) -> bool:
    """Say whether an error means that another process isn't there any more."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


shutdown_callbacks: weakref.WeakSet[Any] = (
    weakref.WeakSet()
)  # things with close(), which let go of their groups


def _shutdown() -> None:
    """Take the groups down in order, when the script is at its end: else gloo's threads may abort the process.

    Not behind an exception: others may be waiting for this process, and are told by its end.
    """
    stop_watchdog()
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        _drain()
        _inflight.clear()  # here, and not when there is no Python any more
        for holder in list(shutdown_callbacks):
            holder.close()
        dist.destroy_process_group()
        control_group.cache_clear()


def _group(device: torch.device) -> Any:
    return control_group() if device.type == "cpu" else None


def broadcast_tensors(tensors: list[Tensor]) -> None:
    tensors = [t for t in tensors if 0 not in t.stride()]  # an expanded one can't be written to
    if tensors:
        group: Any = _group(tensors[0].device) or dist.group.WORLD
        broadcast_coalesced(group, tensors)


def sync_buffers(model: nn.Module) -> None:
    """Give every process the buffers of the main one (running statistics of BatchNorm and the like)."""
    with waiting_for_all("an exchange of the model's buffers"):
        broadcast_tensors([local_part(b).detach() for b in model.buffers()])


_inflight: deque[Any] = deque(maxlen=64)


def keep_alive(work: Any) -> Any:
    """Keep an exchange that has begun for a while, and return it.

    Else gloo's thread may be the last to let go of it, and has to enter Python to let go of its tensors: see :func:`_settle`.
    """
    _inflight.append(work)
    return work


def _drain() -> None:
    """Let gloo's threads come to rest, before this process ends or forks, to start the workers of a loader.

    One that enters Python at that moment holds a lock that CPython 3.11 doesn't free in the child, which waits for it for ever.
    DDP's works are not ours to keep.
    """
    time.sleep(0.002)


_counts = True  # whether torch counts the collectives of the default group
_calls = itertools.count()


def collective_count() -> int:
    """Return how many collectives this process has begun in the default group, which fnloop's own messages do not use.

    Where torch does not count them, it returns a new number each time: a function then seems to use collectives, and is
    called on padding too, which is slower and right.
    """
    begun = collectives_begun(dist.group.WORLD) if _counts else None
    return next(_calls) if begun is None else begun


def check_collective_count(device: torch.device) -> None:
    """Find out whether torch counts the collectives of the default group. Every process must call it."""
    global _counts
    before = collectives_begun(dist.group.WORLD)
    dist.all_reduce(torch.zeros(1, device=device))
    _counts = collectives_begun(dist.group.WORLD) != before
    if not _counts:
        log.warning(
            "torch %s does not count the collectives of %s: fnloop assumes that every loss function uses some, so a process "
            "without a batch runs it too",
            torch.__version__, dist.get_backend(),
        )  # fmt: skip


def _finish(work: Any, value: Tensor, what: str) -> None:
    """Wait for an exchange of a value: on the host; or on its device, while the host continues."""
    if value.device.type == "cpu":
        wait_for_work(work, what)
    else:
        work.wait()


def gather_objects(value: Any) -> list[Any]:
    """Return what every process gave, by rank; tensors come to the host."""
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
    """Return the bytes that every process gave, with zeros behind them to so many."""
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    padded = nn.functional.pad(mine, (0, size - len(mine)))
    wait_for_work(keep_alive(dist.all_gather(parts, padded, group=control_group(), async_op=True)))
    return parts


def pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(to_cpu(value))), dtype=torch.uint8)


def start_all_reduce_max(numbers: Iterable[float]) -> Callable[[], list[float]]:
    """Begin to find the largest of each number over all processes; call what is returned for them."""
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


def any_rank(fact: bool) -> bool:
    """Say whether something holds in any process."""
    return all_reduce_max([fact])[0] > 0


def start_all_reduce_sum(value: float | Tensor) -> Callable[[], Any]:
    """Begin to sum a number over all processes; call what is returned for the sum."""
    total = (
        value.detach().clone()
        if isinstance(value, Tensor)
        else torch.tensor(float(value), dtype=torch.float64)
    )
    work = keep_alive(dist.all_reduce(total, group=_group(total.device), async_op=True))

    def wait() -> Any:
        _finish(work, total, "a sum")
        return total if isinstance(value, Tensor) else total.item()

    return wait


def all_reduce_max_tensor(value: Tensor) -> Tensor:
    """Return the largest of a number over all processes, on the device."""
    value = value.clone()
    work = keep_alive(
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_group(value.device), async_op=True)
    )
    _finish(work, value, "an agreement")
    return value
