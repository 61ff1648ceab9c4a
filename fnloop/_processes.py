"""Several processes: how they are joined, and what they tell each other beside gradients, over a group on the host."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from fnloop import _checks
from fnloop._backend import Backend, accelerator, backend_of, device_in, fully_sharded, launched, needs_placing, on_host, place
from fnloop._encode import Saved
from fnloop._metrics import fetched
from fnloop._rendezvous import default_store, own_store
from fnloop._sharded import check_sharded, is_sharded, local_part
from fnloop._watch import begin_watch, end_watch, finish, together

__all__ = [
    "ORDER",
    "agreed", "agreeing", "any_process", "at_home", "broadcast", "exchanges", "gather", "gather_objects", "is_lost", "join",
    "largest", "main_only", "merged", "on_leaving", "others", "reduce", "summed", "sync_buffers",
]  # fmt: skip

ORDER = (
    "each has the data in another order. A sampler draws from a generator of its own: seed it, the same in every process; or "
    "leave the order to fnloop, DataLoader(dataset, batch_size, shuffle=True)"
)
HEAD = 2040  # bytes that travel with their number, at once; what is longer follows
_log = logging.getLogger("fnloop")

# --- joining


def join(model: nn.Module, optimizer: Optimizer, given: Any = None) -> tuple[nn.Module, Optimizer, Backend]:
    """Find out where a model is to live, and put it there; with several processes, the same weights in each.

    Args:
        model: the user's module; one that is sharded already (``fully_shard``) stays as it is.
        optimizer: its optimizer.
        given: a Backend, which is believed; an ``accelerate.Accelerator`` with settings of the user's; or None.

    Returns:
        The module and the optimizer to use, without wrappers, and the facts.

    Raises:
        RuntimeError: this process is one of several, but they could not be joined.
        NotImplementedError: accelerate is configured for an engine that takes the training step over.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if type(optimizer).__module__.startswith("accelerate."):  # whose wrapper costs more than a small step
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    if isinstance(given, Backend):
        return model, optimizer, given
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"  # what matters to a process that is alone
    if given is None and not (launched() or configured):
        return model, optimizer, Backend(_home(model))
    if given is None and dist.is_initialized() and "LOCAL_RANK" not in os.environ:  # by hand, without a launcher
        found, backend = None, Backend(_home(model), dist.get_rank(), dist.get_world_size())
    else:
        found = given if given is not None else accelerator()
        backend = backend_of(found)
    if backend.world_size == 1:
        return model, optimizer, attrs.evolve(backend, device=_home(model))
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise ValueError("the model has lazy parameters, which know no shape yet: call it once, model(x), before this")
    _control()  # a collective: made now, where every process comes by
    if is_sharded(model):
        check_sharded(model)
        _broadcast_tensors([p.detach() for p in others(model, optimizer)])
        return model, optimizer, backend
    if found is not None and found.distributed_type == "FSDP":
        model, optimizer = fully_sharded(found, model, optimizer)
        return model, optimizer, backend
    _move(model, optimizer, backend.device)
    _broadcast_tensors([p.detach() for p in (*model.parameters(), *others(model, optimizer), *model.buffers())])
    return model, optimizer, backend


def _home(model: nn.Module) -> torch.device:
    home = next(iter(model.parameters()), None)
    return home.device if home is not None else next(iter(model.buffers()), torch.empty(0)).device


def others(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    """Return what the optimizer trains beside the model."""
    own = {id(p) for p in model.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]


def _move(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    model.to(device)
    for p in others(model, optimizer):
        p.data = p.data.to(device)
    for p, state in optimizer.state.items():
        on_host = {"step"} - {name for name, v in state.items() if isinstance(v, Tensor) and v.device.type != "cpu"}
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in on_host:
                state[name] = value.to(p.device)


# --- what processes tell each other


def _world() -> tuple[int, int]:
    """Return the rank of this process and how many there are, joining them if they were launched and have not been."""
    if not dist.is_available() or (not dist.is_initialized() and not launched()):
        return 0, 1
    if not dist.is_initialized():
        accelerator()
    return dist.get_rank(), dist.get_world_size()


@functools.cache
def _control() -> Any:
    """Return a group on the host that nobody else uses: what is said there can't get between gradients."""
    atexit.register(_leave)
    if sys.version_info < (3, 12):
        os.register_at_fork(before=_settle)
    store = own_store(distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    with default_store(store):
        group = dist.new_group(backend="gloo")
    begin_watch(store, group)
    return group


def is_lost(error: BaseException) -> bool:
    """Say whether an error means that another process isn't there any more."""
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


on_leaving: weakref.WeakSet[Any] = weakref.WeakSet()  # things with leave(), which let go of their groups


def _leave() -> None:
    """Take the groups down in order, when the script is at its end: else gloo's threads may abort the process.

    Not behind an exception: others may be waiting for this process, and are told by its end.
    """
    end_watch()
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        _settle()
        _recent.clear()  # here, and not when there is no Python any more
        for holder in list(on_leaving):
            holder.leave()
        dist.destroy_process_group()
        _control.cache_clear()


def _group(device: torch.device) -> Any:
    return _control() if device.type == "cpu" else None


def _broadcast_tensors(tensors: list[Tensor]) -> None:
    tensors = [t for t in tensors if 0 not in t.stride()]  # an expanded one can't be written to
    if tensors:
        group: Any = _group(tensors[0].device) or dist.group.WORLD
        dist._broadcast_coalesced(group, tensors, 250 << 20, 0)  # type: ignore[attr-defined]  # as torch's DDP does


def sync_buffers(model: nn.Module) -> None:
    """Give every process the buffers of the main one (running statistics of BatchNorm and the like)."""
    with together("an exchange of the model's buffers"):
        _broadcast_tensors([local_part(b).detach() for b in model.buffers()])


_recent: deque[Any] = deque(maxlen=64)


def _begun(work: Any) -> Any:
    """Keep an exchange that has begun for a while, and return it.

    Else gloo's thread may be the last to let go of it, and has to enter Python to let go of its tensors: see :func:`_settle`.
    """
    _recent.append(work)
    return work


def _settle() -> None:
    """Let gloo's threads come to rest, before this process ends or forks, to start the workers of a loader.

    One that enters Python at that moment holds a lock that CPython 3.11 doesn't free in the child, which waits for it for ever.
    DDP's works are not ours to keep.
    """
    time.sleep(0.002)


def exchanges() -> int:
    """Return how many collectives there have been so far, of others than ours."""
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()


def _finish(work: Any, value: Tensor, what: str) -> None:
    """Wait for an exchange of a value: on the host; or on its device, while the host continues."""
    if value.device.type == "cpu":
        finish(work, what)
    else:
        work.wait()


def gather_objects(value: Any) -> list[Any]:
    """Return what every process gave, by rank; tensors come to the host."""
    size = _world()[1]
    if size == 1:
        return [value]
    mine = _pickled(value)
    with together("an exchange of metrics or results"):
        heads = _gathered(torch.cat([torch.tensor([len(mine)]).view(torch.uint8), mine[:HEAD]]), 8 + HEAD)
        lengths = [int(head[:8].view(torch.int64)) for head in heads]
        longest = max(lengths)
        tails = _gathered(mine[HEAD:], longest - HEAD) if longest > HEAD else [mine[:0]] * size
    whole = [torch.cat([head[8:], tail])[:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]
    return [pickle.loads(part.numpy().tobytes()) for part in whole]


def _gathered(mine: Tensor, size: int) -> list[Tensor]:
    """Return the bytes that every process gave, with zeros behind them to so many."""
    parts = [torch.empty(size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
    padded = nn.functional.pad(mine, (0, size - len(mine)))
    finish(_begun(dist.all_gather(parts, padded, group=_control(), async_op=True)))
    return parts


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(on_host(value))), dtype=torch.uint8)


def agreeing(numbers: Iterable[float]) -> Callable[[], list[float]]:
    """Begin to find the largest of each number over all processes; call what is returned for them."""
    values = torch.tensor([*numbers], dtype=torch.float64)
    work = _begun(dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_control(), async_op=True))

    def wait() -> list[float]:
        finish(work, "an agreement")
        return values.tolist()

    return wait


def agreed(numbers: Iterable[float]) -> list[float]:
    """Return the largest of each number over all processes."""
    if _world()[1] == 1:
        return [*map(float, numbers)]
    return agreeing(numbers)()


def any_process(fact: bool) -> bool:
    """Say whether something holds in any process."""
    return agreed([fact])[0] > 0


def summed(value: float | Tensor) -> Callable[[], Any]:
    """Begin to sum a number over all processes; call what is returned for the sum."""
    total = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    work = _begun(dist.all_reduce(total, group=_group(total.device), async_op=True))

    def wait() -> Any:
        _finish(work, total, "a sum")
        return total if isinstance(value, Tensor) else total.item()

    return wait


def largest(value: Tensor) -> Tensor:
    """Return the largest of a number over all processes, on the device."""
    value = value.clone()
    work = _begun(dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_group(value.device), async_op=True))
    _finish(work, value, "an agreement")
    return value


def main_only(do: Callable[[], Any], what: str) -> Any:
    """Let the main process do something, and all others wait for it; an error there is an error everywhere."""
    rank, size = _world()
    if size == 1:
        return do()
    result: Any = None
    error: BaseException | None = None
    if rank == 0:
        try:
            result = do()
        except BaseException as raised:
            error = raised
    with together(what):
        failed = broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on the main process: {failed}")
    return broadcast(result)


def merged(metrics: Mapping[str, Any], partial: Iterable[str] | None = None) -> dict[str, Any]:
    """Combine metrics over all processes, in the order of their ranks, with one exchange.

    Args:
        metrics: name to metric, what this process has seen.
        partial: the names of those that are of this process's share of the data, all by default; the others are the same
            everywhere already.

    Returns:
        Name to metric, on the host where there are several processes; the same in each.
    """
    if _world()[1] == 1:
        return dict(metrics)
    mine = fetched({k: m for k, m in metrics.items() if not isinstance(m, Saved)})
    sent = {k: m.on_host() if hasattr(m, "on_host") else m for k, m in mine.items()}
    parts = gather_objects((set(mine if partial is None else partial), sent))
    shared = set().union(*(names for names, _ in parts))  # who has had no batch of its own doesn't know
    whole = dict(parts[0][1])
    for _, part in parts[1:]:
        for name, metric in part.items():
            if name not in whole:
                whole[name] = metric
            elif name in shared:
                whole[name] = whole[name].combine(metric)
    return whole


# --- the public collectives


def gather(tree: Any) -> Any:
    """Collect what every process has: tensors one behind the other, anything else in a list.

    Every process has to call it. Shares may be of different length.

    Args:
        tree: tensors in any nesting of lists, tuples and mappings, the same in every process.

    Returns:
        The same nesting: tensors concatenated along their first dimension, by rank (scalars: stacked); of anything
        else a list with one for each process. In one process tensors stay as they are.

    Raises:
        ValueError: the processes gave different structures.

    Example:
        >>> gather({"seen": torch.tensor([1, 2]), "loss": torch.tensor(0.5), "name": "a"})
        {'seen': tensor([1, 2]), 'loss': tensor([0.5000]), 'name': ['a']}
    """

    def concatenated(parts: list[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts
        return torch.cat([p.unsqueeze(0) if p.ndim == 0 else p for p in parts])

    with together("fnloop.gather"):
        parts = gather_objects(tree)
    return at_home(tree, _zipped(parts, concatenated))


def reduce(tree: Any, how: str = "mean") -> Any:
    """Reduce what every process has to one value, the same in each.

    Every process has to call it. ``reduce(state.metrics)`` is what the run has measured since the epoch began, everywhere.

    Args:
        tree: tensors, numbers and metrics in any nesting of lists, tuples and mappings, the same in every process.
        how: "mean", "sum", "min" or "max", element by element; metrics are combined, whatever it is.

    Returns:
        The same nesting.

    Raises:
        ValueError: there is no such way, or the processes gave different structures.
        TypeError: there is something else in it.

    Example:
        >>> reduce({"loss": torch.tensor([1.0, 3.0]), "n": 2})
        {'loss': tensor([1., 3.]), 'n': 2.0}
    """
    ways = {"mean": torch.mean, "sum": torch.sum, "min": torch.amin, "max": torch.amax}
    _checks.choice("reduce", "how", how, ways)

    def reduced(parts: list[Any]) -> Any:
        first = parts[0]
        if hasattr(first, "combine"):
            return functools.reduce(lambda a, b: a.combine(b), parts)
        if isinstance(first, Tensor):
            stacked = torch.stack(parts)
            return ways[how](stacked if how != "mean" or stacked.is_floating_point() else stacked.double(), dim=0)
        if isinstance(first, int | float):
            return {"mean": sum(parts) / len(parts), "sum": sum(parts), "min": min(parts), "max": max(parts)}[how]
        raise TypeError(f"reduce expects tensors, numbers and metrics; got {first!r:.60} ({type(first).__name__})")

    with together("fnloop.reduce"):
        parts = gather_objects(tree)
    return at_home(tree, _zipped(parts, reduced))


def broadcast(tree: Any, source: int = 0) -> Any:
    """Give every process what one of them has.

    Every process has to call it.

    Args:
        tree: anything that pickles; what the others give is not looked at.
        source: the rank of the process that has it.

    Returns:
        What the source gave; tensors on this process's device if that is where its own are.

    Raises:
        ValueError: there is no such process.

    Example:
        >>> broadcast({"seed": 7})
        {'seed': 7}
    """
    rank, size = _world()
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < size:
        raise ValueError(f"broadcast expects source as a rank from 0 to {size - 1}; got {source!r}")
    if size == 1:
        return tree
    data = _pickled(tree) if rank == source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([len(data)])
    with together("fnloop.broadcast"):
        finish(_begun(dist.broadcast(length, source, group=_control(), async_op=True)))
        data = data if rank == source else torch.empty(int(length), dtype=torch.uint8)
        finish(_begun(dist.broadcast(data, source, group=_control(), async_op=True)))
    return at_home(tree, tree if rank == source else pickle.loads(data.numpy().tobytes()))


def _zipped(parts: list[Any], leaf: Callable[[list[Any]], Any]) -> Any:
    """Zip what the processes gave."""
    first = parts[0]
    container = isinstance(first, Mapping | list | tuple)
    if not all(isinstance(part, type(first)) for part in parts) or (
        container and any(_shape(p) != _shape(first) for p in parts)
    ):
        raise ValueError(f"the processes gave different structures: {', '.join(f'{part!r:.40}' for part in parts)}")
    if isinstance(first, Mapping):
        return {k: _zipped([part[k] for part in parts], leaf) for k in first}
    if isinstance(first, list | tuple):
        zipped = [_zipped(list(values), leaf) for values in zip(*parts, strict=True)]
        return type(first)(*zipped) if hasattr(first, "_fields") else type(first)(zipped)
    return leaf(parts)


def _shape(container: Any) -> Any:
    return container.keys() if isinstance(container, Mapping) else len(container)


def at_home(mine: Any, tree: Any) -> Any:
    """Move what came over the host to where this process's own tensors are."""
    if _world()[1] == 1 or not needs_placing(torch.device("cpu")):
        return tree
    device = device_in(mine)
    return tree if device is None else place(tree, device)
