"""Put a model and its optimizers in place in every process: what it is in, and which weights."""

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

from fnloop._extensions.engines import accelerated
from fnloop._extensions.engines.exchanges import (
    DIVERGED,
    broadcast_tensors,
    check_collective_count,
    control_group,
    share_data,
)
from fnloop._extensions.engines.launch import (
    accelerator,
    backend_of,
    check_joined,
    launched,
)
from fnloop._extensions.engines.meshes import check_sharded, is_split_alone
from fnloop._extensions.engines.wrappers import (
    check_averages_once,
    check_engines,
    check_settings_kept,
    check_whole,
    settings_of,
)
from fnloop.extend import Backend, checks, collectives, is_sharded, local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WEIGHTS = "the sharing of the first weights"


def join(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    given: Backend | accelerated.Accelerator | None = None,
    data: DeviceMesh | None = None,
    exact: bool = False,
) -> tuple[nn.Module, Sequence[Optimizer], Backend]:
    """Put a model in place, as :func:`fnloop._backend.processes.join` says."""
    if data is not None:
        _check_dimension(data, exact)
    model, optimizers, backend = _join(model, optimizers, given, data)
    return model, optimizers, _exact(model, backend) if exact else backend


def _join(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    given: Backend | accelerated.Accelerator | None,
    data: DeviceMesh | None,
) -> tuple[nn.Module, Sequence[Optimizer], Backend]:
    wrapped = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
    model = model if wrapped is None else wrapped.module
    check_engines(model)
    optimizers = [*map(_without_wrapper, optimizers)]
    if isinstance(given, Backend):
        return model, optimizers, given
    backend, found = _where(model, given)
    if backend.world_size == 1:
        return model, optimizers, attrs.evolve(backend, device=Backend.of(model).device)
    backend = _seal(model, backend, wrapped)
    _compare(model, optimizers, backend)
    backend = _deal(model, backend, data)
    model, optimizers = _share(model, optimizers, backend, found)
    return model, optimizers, backend


def _where(
    model: nn.Module, given: accelerated.Accelerator | None
) -> tuple[Backend, accelerated.Accelerator | None]:
    """Return where this process is, and accelerate's object if it says so."""
    if given is None:
        # The one setting that matters to a single process.
        configured = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
        if not (launched() or configured):
            return Backend.of(model), None
        # Without a launcher: the script has called init_process_group itself.
        if dist.is_initialized() and "LOCAL_RANK" not in os.environ:
            here = Backend.of(model).device
            return Backend(here, dist.get_rank(), dist.get_world_size()), None
        given = accelerator()
    else:
        launched()
        check_joined(given)
    return backend_of(given), given


def _seal(
    model: nn.Module, backend: Backend, wrapped: nn.parallel.DistributedDataParallel | None
) -> Backend:
    """Return the backend with the settings of a user's DDP.

    Raises:
        NotImplementedError: a wrapper averages gradients by itself, or a setting would not be kept.
        ValueError: the model has lazy parameters.
    """
    check_averages_once(model)
    check_settings_kept(backend.settings, model)
    if any(map(nn.parameter.is_lazy, model.parameters())):
        raise ValueError(
            "the model has lazy parameters, which have no shape yet: call it once, model(x), "
            "before this"
        )
    if wrapped is None:
        return backend
    settings, register = settings_of(wrapped)
    prepare = backend.prepare if register is None else register
    return attrs.evolve(backend, settings={**backend.settings, **settings}, prepare=prepare)


def _compare(model: nn.Module, optimizers: Sequence[Optimizer], backend: Backend) -> None:
    """Raise in every process unless all of them have one model. The first collectives."""
    control_group()  # making it is a collective, and every process comes here
    check_collective_count(backend.device)
    collectives.on_every_process(lambda: check_whole(model), "the comparison of the models")
    _check_same_model(model, optimizers)


def _deal(model: nn.Module, backend: Backend, data: DeviceMesh | None) -> Backend:
    """Return the backend with which share of the data this process has. A collective."""
    size = backend.world_size
    share, ranks = check_sharded(model) if is_sharded(model) else (backend.rank, [*range(size)])
    row: list[int] = []
    if data is None:
        backend = attrs.evolve(backend, data_rank=share, data_size=len(ranks))
    elif len(ranks) < size:
        raise NotImplementedError(
            "the mesh of this model, which parallelize_module has split, says already which "
            "processes have the same data: leave data= out"
        )
    else:
        backend, ranks, row = _dealt_along(data, backend)
    share_data(ranks, row)
    return backend


def _share(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    backend: Backend,
    found: accelerated.Accelerator | None,
) -> tuple[nn.Module, Sequence[Optimizer]]:
    """Give every process the main one's weights, as far as each has all of them. A collective."""
    if not is_sharded(model):
        if found is not None and found.distributed_type == "FSDP":
            return accelerated.fully_sharded(found, model, optimizers)
        _move(model, optimizers, backend.device)
    # Under `fully_shard`, each process has a part of its own of every tensor.
    alike = not is_sharded(model) or is_split_alone(model)
    held = (*model.parameters(), *model.buffers()) if alike else ()
    whole = (t for t in held if local_part(t) is t)
    weights = (*whole, *parameters_beside(model, optimizers))
    broadcast_tensors([t.detach() for t in weights], _WEIGHTS)
    return model, optimizers


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
    most, least = collectives.all_reduce_max([mark, -mark], what)
    if most == -least:
        return
    first, *others = collectives.gather_from_all(here, what)
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
        for name, value in state.items():
            if isinstance(value, Tensor) and (name != "step" or value.device.type != "cpu"):
                state[name] = value.to(p.device)


def _dealt_along(mesh: DeviceMesh, backend: Backend) -> tuple[Backend, list[int], list[int]]:
    """Return a backend whose data are dealt along a mesh, and what ``share_data`` is to know.

    A collective.

    Args:
        mesh: one dimension of a mesh.
        backend: that of this process.

    Raises:
        ValueError: in every process: what they gave is not one dimension of a mesh of all of them.
    """
    every = collectives.gather_from_all(mesh.mesh.tolist(), "the meshes of the data")
    for rank, ranks in enumerate(every):
        alike = all(every[each] == ranks for each in ranks) and len(ranks) == len(every[0])
        if rank not in ranks or not alike:
            raise ValueError(
                f"data expects one dimension of a mesh of all {len(every)} processes, and process "
                f"{rank} gave one of the processes {ranks}. Write mesh = init_device_mesh("
                f'"{mesh.device_type}", (shares, parts), mesh_dim_names=("data", "context")) with '
                f'shares * parts == {len(every)}, and data=mesh["data"]'
            )
    at = [ranks.index(rank) for rank, ranks in enumerate(every)]
    own, shares = at[backend.rank], len(every[0])
    row = [rank for rank, share in enumerate(at) if share == own]
    dealt = attrs.evolve(backend, data_rank=own, data_size=shares, parts=len(row))
    return dealt, [*map(at.index, range(shares))], row if len(row) > 1 else []


def _check_dimension(data: object, exact: bool) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    checks.instance(
        "TrainState.create", "data", data, DeviceMesh, 'a dimension of a mesh, mesh["data"]'
    )
    assert isinstance(data, DeviceMesh)
    if data.ndim != 1:
        names = data.mesh_dim_names or ()
        has = f"{data.ndim} dimensions" + (f" {names}" if names else "")
        name = "data" if "data" in names else (names or ("data",))[0]
        raise ValueError(
            f"data expects one dimension of a mesh, that along which the data are dealt; got a "
            f"mesh of {has}. Write data=mesh[{name!r}]"
        )
    if exact:
        raise NotImplementedError(
            "exact=True sums the gradients of whole batches, and with data= processes compute "
            "parts of them, whose sum depends on the parts: leave one of them out"
        )


def _exact(model: nn.Module, backend: Backend) -> Backend:
    """Return a backend on which a run has the same bits on any number of processes."""
    if is_sharded(model):
        raise NotImplementedError(
            "exact=True needs the whole model in every process, and fully_shard gives each a part "
            "of it: leave one of them out"
        )
    if backend.settings or backend.prepare is not None:
        raise ValueError(
            "exact=True sums gradients without DistributedDataParallel, so its settings and its "
            "communication hook would do nothing: leave DistributedDataParallelKwargs, or the "
            "settings of your own, out"
        )
    return attrs.evolve(backend, exact=True)
