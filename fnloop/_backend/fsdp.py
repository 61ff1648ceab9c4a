"""Models whose parameters are sharded over processes (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from fnloop._backend.torch_compat import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "check_sharded",
    "combined",
    "full",
    "is_sharded",
    "like_sharded",
    "local_part",
    "reshard",
    "roots",
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
    """Return a full tensor sharded like a template, without communication."""
    kind = _dtensor()
    if kind is None or not isinstance(template, kind) or isinstance(value, kind):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(
        value.to(template.device), template.device_mesh, template.placements, src_data_rank=None
    )
