"""Models whose parameters are sharded over processes, by ``fully_shard`` or tensor parallelism."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fnloop._backend.torch_compat import local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def _dtensor() -> type[DTensor] | None:
    """Return torch's class of sharded tensors; None before its import, when nothing is sharded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


WHOLE = {Tensor, nn.Parameter}  # classes of tensors that are never sharded


def has_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether some tensors are sharded over processes."""
    kind, others = _dtensor(), {*map(type, tensors)} - WHOLE
    return bool(others) and kind is not None and any(issubclass(cls, kind) for cls in others)


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are sharded over processes.

    Args:
        model: the model.

    Returns:
        Whether any parameter is a DTensor, as ``fully_shard`` makes them.

    Example:
        >>> import torch
        >>> is_sharded(torch.nn.Linear(1, 1))
        False
    """
    return has_sharded(model.parameters())


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
    kind = _dtensor()
    assert kind is not None
    if is_split_alone(model):
        _check_split_alone(model, kind)
        return 0, [0]
    whole = [
        name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, kind)
    ]
    if whole:
        raise ValueError(
            "some parameters of this model are sharded, but others are not "
            f"({', '.join(whole[:3])}, ...), and their gradients would not be averaged. Call "
            "fully_shard(model) on the whole model last"
        )
    sharded = {name: p for name, p in model.named_parameters() if isinstance(p, kind)}
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


def _check_split_alone(model: nn.Module, kind: type[DTensor]) -> None:
    size = dist.get_world_size()
    for name, p in model.named_parameters():
        if isinstance(p, kind) and not spans_all(p):
            raise NotImplementedError(
                f"parallelize_module has split the parameter {name} over {p.device_mesh.size()} of "
                f"{size} processes, and nothing averages its gradient over the others. On a mesh "
                "of two dimensions (data, tensor), call parallelize_module(model, mesh["
                '"tensor"], plan), and then fully_shard(model, mesh=mesh["data"])'
            )


def spans_all(tensor: Tensor) -> bool:
    """Return whether the mesh of a sharded tensor has all processes."""
    return tensor.device_mesh.size() == dist.get_world_size()  # type: ignore[attr-defined]


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
    from torch.distributed.fsdp import FSDPModule

    inner: set[nn.Module] = set()
    found = []
    for module in model.modules():  # outer ones first
        if isinstance(module, FSDPModule):
            found += [] if module in inner else [module]
            inner.update(module.modules())
    return found


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


def _sharded_modules(model: nn.Module) -> list[Any]:
    if not is_sharded(model):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward without a backward has gathered."""
    for module in _sharded_modules(model):
        module.reshard()


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors by the mesh that they are on, since torch takes one mesh at a time."""
    kind = _dtensor()
    if kind is None:
        return [[*tensors]]
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, kind) else None
        groups.setdefault(mesh, []).append(tensor)
    return [*groups.values()]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory.

    Args:
        tensor: a tensor, such as a parameter or a gradient, sharded or not.

    Returns:
        A plain tensor: of a sharded one its local part, and else the tensor itself.

    Example:
        >>> import torch
        >>> local_part(torch.ones(2))
        tensor([1., 1.])
    """
    kind = None if tensor.__class__ in WHOLE else _dtensor()
    return local_tensor(tensor) if kind is not None and isinstance(tensor, kind) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return a full tensor. This is a collective if the tensor is sharded."""
    kind = None if tensor.__class__ in WHOLE else _dtensor()
    return tensor.full_tensor() if kind is not None and isinstance(tensor, kind) else tensor


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in tensors of one mesh, NaN if one is there.

    This is a collective if they are sharded. torch raises for a part without elements, and what
    reduces over processes may drop NaN.
    """
    parts = [part for tensor in tensors if (part := local_part(tensor)).numel()]
    own = get_total_norm(parts, math.inf)
    kind = _dtensor()
    if kind is None or not tensors or not isinstance(tensors[0], kind):
        return own
    from torch.distributed.tensor import Partial

    both = torch.stack([own.nan_to_num(0.0, math.inf), own.isnan().to(own.dtype)])
    mesh = tensors[0].device_mesh
    shared = kind.from_local(
        both.to(local_part(tensors[0]).device), mesh, [Partial("max")] * mesh.ndim
    )
    found, has_nan = shared.full_tensor()
    return torch.where(has_nan > 0, math.nan, found)


def combined(result: Tensor) -> Tensor:
    """Return this process's part of what was computed from a sharded tensor.

    What has a partial result in each process, such as a norm, is combined first: a collective.
    """
    kind = _dtensor()
    if kind is None or not isinstance(result, kind):
        return result
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in result.placements]
    return local_part(result.redistribute(placements=whole))


def like_sharded(value: Tensor, template: Tensor) -> Tensor:
    """Return a tensor sharded like a template.

    That is without communication, unless the value is sharded in another way.
    """
    kind = _dtensor()
    if kind is None or not isinstance(template, kind):
        return value
    if isinstance(value, kind):
        if (value.device_mesh, value.placements) == (template.device_mesh, template.placements):
            return value
        return value.redistribute(template.device_mesh, template.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(template.device), template.device_mesh, template.placements, src_data_rank=None
    )


# --- which part of a tensor is where


def split_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which a tensor is split over processes.

    It is None for a tensor that is whole in this process, or placed in a way that ``fully_shard``
    does not use. :func:`full` returns either.
    """
    kind = None if tensor.__class__ in WHOLE else _dtensor()
    if kind is None or not isinstance(tensor, kind):
        return None
    from torch.distributed.tensor import Shard

    dims = []
    for i, placement in enumerate(tensor.placements):
        if type(placement) is Shard and tensor.device_mesh.size(i) > 1:
            dims.append(placement.dim)
        elif not placement.is_replicate() and tensor.device_mesh.size(i) > 1:
            return None
    return dims[0] if len(dims) == 1 else None


def extent_in(tensor: Tensor, length: int) -> tuple[int, int, bool]:
    """Return what this process holds of a dimension that is split over processes as a tensor is.

    The rule is that of ``torch.chunk``.

    Args:
        tensor: a tensor with a :func:`split_dim`.
        length: the length of the dimension.

    Returns:
        From where to where; and whether this process is the first of those that hold the same.
    """
    start, stop, first = 0, length, True
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    for i, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_shard() and mesh.size(i) > 1:
            width = -(-length // mesh.size(i))
            start = min(mesh.get_local_rank(i) * width, length)
            stop = min(start + width, length)
        else:
            first = first and mesh.get_local_rank(i) == 0
    return start, stop, first


def from_local_part(local: Tensor, shape: Sequence[int], like: Tensor, dim: int) -> Tensor:
    """Return a tensor of which each process holds a part, without communication.

    Args:
        local: the part of this process, as :func:`extent_in` says.
        shape: the shape of the whole tensor.
        like: a tensor with a :func:`split_dim`, over the same processes.
        dim: the dimension along which the tensor is split.
    """
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        [Shard(dim) if p.is_shard() else p for p in like.placements],  # type: ignore[attr-defined]
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
