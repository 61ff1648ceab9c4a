"""Where a state lives: the device, and which process of how many. The only module that knows accelerate.

Several processes are torch's own affair (``torch.distributed``), started by ``torchrun``, ``accelerate launch`` or a notebook's
launcher. accelerate finds out how this one was launched and what ``accelerate config`` says; what the processes have to tell
each other beside gradients goes over a group of its own, on the host.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._encode import Saved
from fnloop._metrics import fetched

__all__ = [
    "Backend", "agreed", "agreeing", "any_process", "at_home", "broadcast", "full", "gather", "gather_objects", "is_sharded",
    "join", "largest", "like_sharded", "local_part", "main_only", "merged", "needs_placing", "others", "place", "reduce",
    "reshard", "roots", "summed", "sync_buffers", "trackers",
]  # fmt: skip

_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}


@attrs.frozen
class Backend:
    """Facts about where a state lives: ``state.backend``.

    Args:
        device: the device that batches are moved to.
        rank: the number of this process, from 0.
        world_size: how many processes train together.
        precision: "bf16" or "fp16" if ``accelerate config`` asks for mixed precision, else None.
        settings: arguments for torch's DistributedDataParallel, such as ``bucket_cap_mb``.
        prepare: called with each DistributedDataParallel module that is made, to register a communication hook.

    Example:
        >>> from fnloop.testing import toy
        >>> backend = toy().backend
        >>> backend.device, backend.rank, backend.world_size, backend.main
        (device(type='cpu'), 0, 1, True)
    """

    device: torch.device = attrs.field(converter=torch.device)
    rank: int = 0
    world_size: int = 1
    precision: str | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    prepare: Callable[[Any], Any] | None = attrs.field(default=None, repr=False)

    @property
    def main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # facts, not handles


# --- how this process was launched


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
    model = _bare(model)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # what accelerate's wraps; it costs more than a small step
    if isinstance(given, Backend):
        return model, optimizer, given
    configured = any(name.startswith("ACCELERATE_") for name in os.environ)
    if given is None and not (_launched() or configured):
        return model, optimizer, Backend(_home(model))
    if given is None and dist.is_initialized() and "LOCAL_RANK" not in os.environ:  # by hand, without a launcher
        accelerator, backend = None, Backend(_home(model), dist.get_rank(), dist.get_world_size())
    else:
        accelerator = given if given is not None else _accelerator()
        backend = _backend_of(accelerator)
    if backend.world_size == 1:
        return model, optimizer, attrs.evolve(backend, device=_home(model))
    _control()  # a collective: made now, where every process comes by
    if is_sharded(model):
        _check_sharded(model)
        _broadcast_tensors([p.detach() for p in others(model, optimizer)])
        return model, optimizer, backend
    if accelerator is not None and accelerator.distributed_type == "FSDP":
        model, optimizer = _fully_sharded(accelerator, model, optimizer)
        return model, optimizer, backend
    _move(model, optimizer, backend.device)
    _broadcast_tensors([p.detach() for p in (*model.parameters(), *others(model, optimizer), *model.buffers())])
    return model, optimizer, backend


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or (dist.is_available() and dist.is_initialized())


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model


def _home(model: nn.Module) -> torch.device:
    home = next(iter(model.parameters()), None)
    return home.device if home is not None else next(iter(model.buffers()), torch.empty(0)).device


@functools.cache
def _accelerator() -> Any:
    from accelerate import Accelerator
    from accelerate.state import PartialState

    made = bool(PartialState._shared_state)  # by the user: its settings stand
    found = Accelerator() if made or torch.accelerator.is_available() else Accelerator(cpu=True)
    if found.num_processes == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError(
            f"this process is one of WORLD_SIZE={os.environ['WORLD_SIZE']}, but accelerate was set up in this script before as "
            f"if it were alone. Make it Accelerator(cpu=True) where there is no GPU, or leave it to TrainState.create"
        )
    return found


def _backend_of(accelerator: Any) -> Backend:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    fsdp1 = kind == "FSDP" and not accelerator.is_fsdp2
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or fsdp1:
        raise NotImplementedError(
            f"accelerate is configured for {'FSDP 1' if fsdp1 else kind}, which takes gradients and updates into its own "
            f"hands, so "
            f"that no middleware can see them. Use FSDP 2 (accelerate config, fsdp_version: 2), or torch's fully_shard, for "
            f"models that don't fit one device"
        )
    precision = _PRECISIONS.get(accelerator.mixed_precision)
    if precision is None and accelerator.mixed_precision != "no":
        raise NotImplementedError(
            f"accelerate is configured for mixed_precision={accelerator.mixed_precision!r}; fnloop knows bf16 and fp16"
        )
    settings, prepare, handler = {}, None, accelerator.ddp_handler
    if handler is not None:
        settings, prepare = handler.to_kwargs(), handler.register_comm_hook
    return Backend(
        accelerator.device, accelerator.process_index, accelerator.num_processes, precision, settings=settings, prepare=prepare
    )


def _fully_sharded(accelerator: Any, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    model, wrapped = accelerator.prepare(model, optimizer)
    accelerator._models.remove(model)  # it keeps what it has seen for as long as it lives
    accelerator._optimizers.remove(wrapped)
    return model, wrapped.optimizer


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


# --- sharded tensors (torch.distributed.fsdp.fully_shard)


def _dtensor() -> type | None:
    """Return torch's class of sharded tensors, if anybody has imported it: nothing is sharded before."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(model: nn.Module) -> bool:
    """Say whether parameters of a model are spread over processes."""
    kind = _dtensor()
    return kind is not None and any(isinstance(p, kind) for p in model.parameters())


def _check_sharded(model: nn.Module) -> None:
    kind: Any = _dtensor()
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, kind)]
    if whole:
        raise ValueError(
            f"some parameters of this model are sharded, and others are not ({', '.join(whole[:3])}, ...): nobody would "
            f"average the gradients of those. Call fully_shard(model) on the whole model last"
        )
    sharded: list[Any] = [p for p in model.parameters() if isinstance(p, kind)]
    sizes = {p.device_mesh.size() for p in sharded}
    if sizes != {dist.get_world_size()}:
        raise NotImplementedError(
            f"this model is sharded over meshes of {sorted(sizes)} of {dist.get_world_size()} processes; fnloop gives each "
            f"process "
            f"its own share of the data, so every parameter must be sharded or replicated over all of them (fully_shard)"
        )


def roots(model: nn.Module) -> list[Any]:
    """Return the outermost modules of a model that ``fully_shard`` was called on."""
    from torch.distributed.fsdp import FSDPModule

    inner: set[nn.Module] = set()
    found = []
    for module in model.modules():  # outer ones first
        if isinstance(module, FSDPModule):
            found += [] if module in inner else [module]
            inner.update(module.modules())
    return found


def reshard(model: nn.Module) -> None:
    """Let go of what a forward without a backward has gathered: until then the model shows its parameters whole."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, sharing its memory."""
    kind = _dtensor()
    return tensor._local_tensor if kind is not None and isinstance(tensor, kind) else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """Return a tensor whole; a collective where it is sharded."""
    kind = _dtensor()
    return tensor.full_tensor() if kind is not None and isinstance(tensor, kind) else tensor  # type: ignore[attr-defined]


def like_sharded(value: Tensor, template: Tensor) -> Tensor:
    """Return a whole tensor spread as another one is; no communication, since every process has all of it."""
    kind = _dtensor()
    if kind is None or not isinstance(template, kind) or isinstance(value, kind):
        return value
    from torch.distributed.tensor import distribute_tensor

    where: Any = template
    return distribute_tensor(value.to(where.device), where.device_mesh, where.placements, src_data_rank=None)


# --- what processes tell each other


def _world() -> tuple[int, int]:
    """Return the rank of this process and how many there are, joining them if they were launched and have not been."""
    if not dist.is_available() or (not dist.is_initialized() and not _launched()):
        return 0, 1
    if not dist.is_initialized():
        _accelerator()
    return dist.get_rank(), dist.get_world_size()


@functools.cache
def _control() -> Any:
    """Return a group on the host that nobody else uses: what is said there can't get between gradients."""
    atexit.register(_leave)
    return dist.new_group(backend="gloo")


def _leave() -> None:
    """Take the groups down in order, when the script is at its end: else gloo's threads may abort the process.

    Not behind an exception: others may be waiting for this process, and are told by its end.
    """
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        dist.destroy_process_group()


def _group(device: torch.device) -> Any:
    return _control() if device.type == "cpu" else None


def _broadcast_tensors(tensors: list[Tensor]) -> None:
    if tensors:
        group: Any = _group(tensors[0].device) or dist.group.WORLD
        dist._broadcast_coalesced(group, tensors, 250 << 20, 0)  # type: ignore[attr-defined]  # as torch's DDP does


def sync_buffers(model: nn.Module) -> None:
    """Give every process the buffers of the main one (running statistics of BatchNorm and the like)."""
    _broadcast_tensors([local_part(b).detach() for b in model.buffers()])


_recent: deque[Tensor] = deque(maxlen=64)


def _kept(tensor: Tensor) -> Tensor:
    """Keep what was sent for a while.

    Else gloo's thread may be the last to let go of it, which takes Python's lock on threads; and a process that forks at that
    moment, to start the workers of a loader, gets children that wait for it for ever (seen with CPython 3.11).
    """
    _recent.append(tensor)
    return tensor


def gather_objects(value: Any) -> list[Any]:
    """Return what every process gave, by rank; tensors come to the host."""
    size = _world()[1]
    if size == 1:
        return [value]
    mine = _pickled(value)
    sizes = _kept(torch.zeros(size, dtype=torch.int64))
    sizes[dist.get_rank()] = len(mine)
    dist.all_reduce(sizes, group=_control())
    longest = int(sizes.max())
    parts = [_kept(torch.empty(longest, dtype=torch.uint8)) for _ in range(size)]
    dist.all_gather(parts, _kept(nn.functional.pad(mine, (0, longest - len(mine)))), group=_control())
    return [pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, sizes.tolist(), strict=True)]


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(_on_host(value))), dtype=torch.uint8)


def agreeing(numbers: Iterable[float]) -> Callable[[], list[float]]:
    """Begin to find the largest of each number over all processes; call what is returned for them."""
    values = _kept(torch.tensor([*numbers], dtype=torch.float64))
    work: Any = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_control(), async_op=True)

    def wait() -> list[float]:
        work.wait()
        return values.tolist()

    return wait


def agreed(numbers: Iterable[float]) -> list[float]:
    """Return the largest of each number over all processes."""
    return agreeing(numbers)() if _world()[1] > 1 else [*map(float, numbers)]


def any_process(fact: bool) -> bool:
    """Say whether something holds in any process."""
    return agreed([fact])[0] > 0


def summed(value: float | Tensor) -> Callable[[], Any]:
    """Begin to sum a number over all processes; call what is returned for the sum."""
    total = _kept(value.detach().clone() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64))
    work: Any = dist.all_reduce(total, group=_group(total.device), async_op=True)

    def wait() -> Any:
        work.wait()
        return total if isinstance(value, Tensor) else total.item()

    return wait


def largest(value: Tensor) -> Tensor:
    """Return the largest of a number over all processes, on the device."""
    value = _kept(value.clone())
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_group(value.device))
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
    failed = broadcast(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{what} failed on the main process: {failed}")
    return broadcast(result)


def merged(metrics: Mapping[str, Any], partial: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Combine metrics over all processes, in the order of their ranks, with one exchange.

    Args:
        metrics: name to metric, what this process has seen.
        partial: whether a metric is of this process's share of the data; else it is the same everywhere already.

    Returns:
        Name to metric, on the host where there are several processes; the same in each.
    """
    if _world()[1] == 1:
        return dict(metrics)
    mine = fetched({k: m for k, m in metrics.items() if not isinstance(m, Saved)})
    parts = gather_objects({k: m.on_host() if hasattr(m, "on_host") else m for k, m in mine.items()})
    whole = dict(parts[0])
    for part in parts[1:]:
        for name, metric in part.items():
            if name not in whole:
                whole[name] = metric
            elif partial(name):
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

    return at_home(tree, _together(gather_objects(tree), concatenated))


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
    if how not in ways:
        raise ValueError(f"reduce expects how as one of {', '.join(ways)}; got {how!r}")

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

    return at_home(tree, _together(gather_objects(tree), reduced))


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
    data = _kept(_pickled(tree) if rank == source else torch.empty(0, dtype=torch.uint8))
    length = _kept(torch.tensor([len(data)]))
    dist.broadcast(length, source, group=_control())
    data = data if rank == source else _kept(torch.empty(int(length), dtype=torch.uint8))
    dist.broadcast(data, source, group=_control())
    return at_home(tree, tree if rank == source else pickle.loads(data.numpy().tobytes()))


def _together(parts: list[Any], leaf: Callable[[list[Any]], Any]) -> Any:
    """Zip what the processes gave."""
    first = parts[0]
    container = isinstance(first, Mapping | list | tuple)
    if not all(isinstance(part, type(first)) for part in parts) or (container and len({len(part) for part in parts}) > 1):
        raise ValueError(f"the processes gave different structures: {', '.join(f'{part!r:.40}' for part in parts)}")
    if isinstance(first, Mapping):
        return {k: _together([part[k] for part in parts], leaf) for k in first}
    if isinstance(first, list | tuple):
        zipped = [_together(list(values), leaf) for values in zip(*parts, strict=True)]
        return type(first)(*zipped) if hasattr(first, "_fields") else type(first)(zipped)
    return leaf(parts)


def _on_host(tree: Any) -> Any:
    if not needs_placing(torch.device("cpu")):
        return tree
    from accelerate.utils import send_to_device

    return send_to_device(tree, torch.device("cpu"))


def at_home(mine: Any, tree: Any) -> Any:
    """Move what came over the host to where this process's own tensors are."""
    if _world()[1] == 1 or not needs_placing(torch.device("cpu")):
        return tree
    from accelerate.utils import find_device

    device = find_device(mine)
    return tree if device is None else place(tree, device)


# --- batches


def needs_placing(device: torch.device) -> bool:
    """Say whether a batch can be anywhere but on this device."""
    return device.type != "cpu" or torch.accelerator.is_available()


def place(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a nested batch to a device: from pinned memory and without blocking on CUDA.

    Args:
        batch: tensors in any nesting of tuples, named tuples, lists and mappings, or an object with ``.to``.
        device: where to.

    Returns:
        The batch there. What is no tensor, and what is there already, stays as it is.
    """
    if not needs_placing(device):
        return batch
    from accelerate.utils import recursively_apply, send_to_device

    if device.type == "cuda":
        batch = recursively_apply(lambda t: t if t.is_cuda or t.is_pinned() else t.pin_memory(), batch)
    return send_to_device(batch, device, non_blocking=device.type == "cuda")


@contextlib.contextmanager
def trackers() -> Iterator[Any]:
    """Give accelerate's trackers to use, without its process-wide state: their logger refuses to log without that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook: nobody asked for a bar
        from accelerate import PartialState, tracking
        from accelerate.logging import MultiProcessAdapter

    class Plain(MultiProcessAdapter):
        def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
            del kwargs  # where to log it, in accelerate's words
            self.logger.log(level, msg, *args)

    usual = tracking.logger
    if not PartialState._shared_state:
        tracking.logger = Plain(logging.getLogger("accelerate.tracking"), {})
    try:
        yield tracking
    finally:
        tracking.logger = usual
