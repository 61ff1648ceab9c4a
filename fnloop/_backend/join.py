"""Put a model and its optimizers in place in every process."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.collectives import (
    all_reduce_max,
    broadcast_tensors,
    check_collective_count,
    control_group,
    gather_from_all,
    share_data,
)
from fnloop._backend.fsdp import check_sharded, is_sharded, local_part
from fnloop._backend.launch import Backend, accelerator, backend_of, fully_sharded, launched
from fnloop._backend.watchdog import DIVERGED

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["join", "parameters_beside"]

_WEIGHTS = "the sharing of the first weights"


def join(
    model: nn.Module, optimizers: Sequence[Optimizer], given: Backend | Accelerator | None = None
) -> tuple[nn.Module, Sequence[Optimizer], Backend]:
    """Put a model and its optimizers on their device, with the same weights in every process.

    Args:
        model: the user's module; one that is already sharded (``fully_shard``) is not changed.
        optimizers: its optimizers.
        given: a Backend, which is used as it is; an ``accelerate.Accelerator`` with the user's
            settings; or None.

    Returns:
        The module and the optimizers without wrappers, and the backend.

    Raises:
        RuntimeError: there are several processes, but they could not be joined, or they have
            different models.
        NotImplementedError: accelerate is configured for an engine that runs the training step.
        ValueError: the model has lazy parameters, and there are several processes.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    optimizers = [*map(_without_wrapper, optimizers)]
    if isinstance(given, Backend):
        return model, optimizers, given
    # The one setting that matters to a single process.
    configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
    if given is None and not (launched() or configured):
        return model, optimizers, Backend(_device_of(model))
    # Without a launcher: the script has called init_process_group itself.
    if given is None and dist.is_initialized() and "LOCAL_RANK" not in os.environ:
        found, backend = None, Backend(_device_of(model), dist.get_rank(), dist.get_world_size())
    else:
        found = given if given is not None else accelerator()
        backend = backend_of(found)
    if backend.world_size == 1:
        return model, optimizers, attrs.evolve(backend, device=_device_of(model))
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise ValueError(
            "the model has lazy parameters, which have no shape yet: call it once, model(x), "
            "before this"
        )
    control_group()  # making it is a collective, and every process comes here
    check_collective_count(backend.device)
    _check_same_model(model, optimizers)
    if is_sharded(model):
        share, ranks = check_sharded(model)
        share_data(ranks)
        backend = attrs.evolve(backend, data_rank=share, data_size=len(ranks))
        beside = parameters_beside(model, optimizers)
        broadcast_tensors([p.detach() for p in beside], _WEIGHTS)
        return model, optimizers, backend
    share_data(range(backend.world_size))
    if found is not None and found.distributed_type == "FSDP":
        model, optimizers = fully_sharded(found, model, optimizers)
        return model, optimizers, backend
    _move(model, optimizers, backend.device)
    beside = parameters_beside(model, optimizers)
    weights = [p.detach() for p in (*model.parameters(), *beside, *model.buffers())]
    broadcast_tensors(weights, _WEIGHTS)
    return model, optimizers, backend


def _check_same_model(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise in every process if they have different models. A collective.

    It is the first exchange that depends on the model, so gloo would end a process later.
    """
    here = {
        **{f"parameter {name}": _kind_of(p) for name, p in model.named_parameters()},
        **{f"buffer {name}": _kind_of(b) for name, b in model.named_buffers()},
    }
    beside = enumerate(parameters_beside(model, optimizers))
    here |= {f"parameter {n} beside the model": _kind_of(p) for n, p in beside}
    what = "the comparison of the models"
    mark = zlib.crc32(repr(list(here.items())).encode())
    most, least = all_reduce_max([mark, -mark], what)
    if most == -least:
        return
    first, *others = gather_from_all(here, what)
    rank, theirs = next(
        (n, each) for n, each in enumerate(others, 1) if [*each.items()] != [*first.items()]
    )
    names = [name for name in (first | theirs) if first.get(name) != theirs.get(name)]
    if names:
        said = f"the {names[0]} is {theirs.get(names[0], 'missing')} in process {rank} and "
        said += f"{first.get(names[0], 'missing')} in process 0"
        said += f", and {len(names) - 1} more differ" if names[1:] else ""
    else:
        said = f"process {rank} has the parameters in another order than process 0"
    raise RuntimeError(
        f"{DIVERGED}: {said}. All processes must make the same model: TrainState.create gives "
        "them the weights of process 0"
    )


def _kind_of(tensor: Tensor) -> str:
    sharded = ", sharded" if local_part(tensor) is not tensor else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{sharded}"


def _without_wrapper(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer without accelerate's wrapper, which costs more than a small step."""
    wrapped = type(optimizer).__module__.startswith("accelerate.")
    return optimizer.optimizer if wrapped else optimizer  # type: ignore[attr-defined]


def _device_of(model: nn.Module) -> torch.device:
    home = next(iter(model.parameters()), None)
    return home.device if home is not None else next(iter(model.buffers()), torch.empty(0)).device


def parameters_beside(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of optimizers that are not in the model."""
    own = {id(p) for p in model.parameters()}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [p for group in groups for p in group["params"] if id(p) not in own]


def _move(model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
    model.to(device)
    for p in parameters_beside(model, optimizers):
        p.data = p.data.to(device)
    for p, state in (item for optimizer in optimizers for item in optimizer.state.items()):
        on_host = {"step"} - {
            name for name, v in state.items() if isinstance(v, Tensor) and v.device.type != "cpu"
        }
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in on_host:
                state[name] = value.to(p.device)
