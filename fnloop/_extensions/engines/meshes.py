"""Models that are sharded over processes: on which meshes, and which modules gather parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from fnloop.extend import fsdp, is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def check_sharded(model: nn.Module) -> tuple[int, list[int]]:
    """Find out how the processes of a sharded model share the data.

    Returns:
        Which share this process has; and for each share, the rank of the first process that has it.

    Raises:
        ValueError: some parameters are not sharded.
        NotImplementedError: a parameter is placed in another way than by ``fully_shard``, alone or
            after ``parallelize_module`` on the second dimension of a mesh; or than by
            ``parallelize_module`` alone, over all processes.
    """
    sharded = _sharded_parameters(model)
    if is_split_alone(model):
        _check_split_alone(sharded)
        return 0, [0]
    named = model.named_parameters()
    whole = [name for name, p in named if p.requires_grad and name not in sharded]
    if whole:
        raise ValueError(
            "some parameters of this model are sharded, but others are not "
            f"({', '.join(whole[:3])}, ...), and their gradients would not be averaged. Call "
            "fully_shard(model) on the whole model last"
        )
    split = [p.device_mesh for p in sharded.values() if _is_split_twice(p)]
    share, firsts = _check_meshes({p.device_mesh for p in sharded.values()}, split)
    managed = {id(p) for root in roots(model) for p in root.parameters()}
    for name, p in sharded.items():
        if id(p) not in managed or not (split or _is_data_parallel(p.placements)):
            raise NotImplementedError(
                f"the parameter {name} is placed as {p.placements} on a mesh of "
                f"{tuple(p.device_mesh.shape)}, which fully_shard does not do. For tensor "
                'parallelism, call parallelize_module(model, mesh["tensor"], plan), and then '
                'fully_shard(model, mesh=mesh["data"]), on a mesh of two dimensions (data, '
                "tensor). Without it, call fully_shard(model) over all processes, or over a mesh "
                "of two dimensions (replicate, shard)"
            )
    return share, firsts


def is_split_alone(model: nn.Module) -> bool:
    """Return whether a model is split by tensor parallelism, and not by ``fully_shard``.

    Then all processes have the same data, and the same gradients of what is not split.
    """
    return is_sharded(model) and not roots(model)


def _sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    named = ((name, fsdp.as_sharded(p)) for name, p in model.named_parameters())
    return {name: sharded for name, sharded in named if sharded is not None}


def _check_split_alone(parameters: Mapping[str, DTensor]) -> None:
    size = dist.get_world_size()
    for name, p in parameters.items():
        if p.device_mesh.size() != size:
            raise NotImplementedError(
                f"parallelize_module has split the parameter {name} over {p.device_mesh.size()} of "
                f"{size} processes, and nothing averages its gradient over the others. On a mesh "
                "of two dimensions (data, tensor), call parallelize_module(model, mesh["
                '"tensor"], plan), and then fully_shard(model, mesh=mesh["data"])'
            )


def _check_meshes(meshes: set[DeviceMesh], split: list[DeviceMesh]) -> tuple[int, list[int]]:
    """Return what :func:`check_sharded` does, from the meshes of a model.

    Args:
        meshes: those of all parameters.
        split: those of the parameters that tensor parallelism has split, or replicated.

    Raises:
        NotImplementedError: they are not of all processes.
    """
    ranks = [*range(dist.get_world_size())]
    share, firsts = dist.get_rank(), ranks
    fits = all(mesh.size() == len(ranks) for mesh in split or meshes)
    if split and fits:  # the processes of a row have the same data
        grid = split[0].mesh.tolist()
        share = next(n for n, row in enumerate(grid) if share in row)
        firsts = [row[0] for row in grid]
        columns = [grid, *map(list, zip(*grid, strict=True))]
        fits = all(mesh.mesh.tolist() in columns for mesh in meshes)
    if not fits:
        raise NotImplementedError(
            f"this model is sharded over meshes of {sorted({mesh.size() for mesh in meshes})} of "
            f"{len(ranks)} processes; fnloop deals the data to all processes, so every parameter "
            "must be sharded or replicated over all of them (fully_shard), or over the first "
            "dimension of one mesh whose second is for tensor parallelism"
        )
    return share, firsts


def _is_data_parallel(placements: Sequence[Placement]) -> bool:
    """Return whether placements are those of ``fully_shard``: shard, or replicate and shard."""
    return placements[-1].is_shard() and (
        len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())
    )


def _is_split_twice(parameter: DTensor) -> bool:
    """Return whether ``fully_shard`` and ``parallelize_module`` have placed a parameter."""
    return parameter.device_mesh.ndim == 2 and not parameter.placements[0].is_replicate()


def roots(model: nn.Module) -> list[Any]:
    """Return the outermost modules of a model on which ``fully_shard`` was called."""
    inner: set[nn.Module] = set()
    found = []
    for module in _sharded_modules(model):  # outer ones first
        found += [] if module in inner else [module]
        inner.update(module.modules())
    return found


def _sharded_modules(model: nn.Module) -> list[Any]:
    if not is_sharded(model):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def around_sharded(
    model: nn.Module, before: Callable[[], object], after: Callable[[], object]
) -> Iterator[None]:
    """Call functions before and after each forward of an outermost module under ``fully_shard``.

    That is where a sharded model gathers its parameters.
    """
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        if not depth:
            before()
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            after()

    with contextlib.ExitStack() as stack:
        for module in _sharded_modules(model):
            # Before torch's own hook, and after it.
            handle = module.register_forward_pre_hook(enter, prepend=True)
            stack.callback(handle.remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
