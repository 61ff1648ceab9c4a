"""Models whose parameters are sharded over processes (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fnloop._backend.torch_compat import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "check_sharded",
    "combined",
    "extent_in",
    "from_local_part",
    "full",
    "is_sharded",
    "like_sharded",
    "local_part",
    "reshard",
    "roots",
    "split_dim",
]


def _dtensor() -> type[DTensor] | None:
    """Return torch's class of sharded tensors; None before its import, when nothing is sharded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are sharded over processes."""
    kind = _dtensor()
    return kind is not None and any(isinstance(p, kind) for p in model.parameters())


def check_sharded(model: nn.Module) -> None:
    """Raise unless ``fully_shard`` alone shards every parameter of a model over all processes."""
    kind = _dtensor()
    assert kind is not None
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
    sizes = {p.device_mesh.size() for p in sharded.values()}
    if sizes != {dist.get_world_size()}:
        raise NotImplementedError(
            f"this model is sharded over meshes of {sorted(sizes)} of {dist.get_world_size()} "
            "processes; fnloop gives each process its own share of the data, so every parameter "
            "must be sharded or replicated over all of them (fully_shard)"
        )
    managed = {id(p) for root in roots(model) for p in root.parameters()}
    for name, p in sharded.items():
        if id(p) not in managed or not _is_data_parallel(p.placements):
            raise NotImplementedError(
                f"the parameter {name} is placed as {p.placements} on a mesh of "
                f"{tuple(p.device_mesh.shape)}, which fully_shard alone does not do. Tensor "
                "parallelism needs the same batch in several processes, but fnloop gives each "
                "process its own share of the data. Leave parallelize_module out, and call "
                "fully_shard(model) over all processes, or over a mesh of two dimensions "
                "(replicate, shard)"
            )


def _is_data_parallel(placements: Sequence[Placement]) -> bool:
    """Return whether placements are those of ``fully_shard``: shard, or replicate and shard."""
    return placements[-1].is_shard() and (
        len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())
    )


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


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward without a backward has gathered."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds, in the same memory."""
    kind = _dtensor()
    return local_tensor(tensor) if kind is not None and isinstance(tensor, kind) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return a full tensor. This is a collective if the tensor is sharded."""
    kind = _dtensor()
    return tensor.full_tensor() if kind is not None and isinstance(tensor, kind) else tensor


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
    kind = _dtensor()
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
