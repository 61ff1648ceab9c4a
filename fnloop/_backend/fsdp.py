"""Models whose parameters are spread over processes (``torch.distributed.fsdp.fully_shard``)."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fnloop._backend.torch_compat import local_tensor

__all__ = ["check_sharded", "full", "is_sharded", "like_sharded", "local_part", "reshard", "roots"]


def _dtensor() -> type | None:
    """Return torch's class of sharded tensors, if anybody has imported it: nothing is sharded before."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_sharded(model: nn.Module) -> bool:
    """Say whether parameters of a model are spread over processes."""
    kind = _dtensor()
    return kind is not None and any(isinstance(p, kind) for p in model.parameters())


def check_sharded(model: nn.Module) -> None:
    """Raise unless ``fully_shard``, and nothing else, spreads every parameter of a model over all processes."""
    kind: Any = _dtensor()
    whole = [
        name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, kind)
    ]
    if whole:
        raise ValueError(
            f"some parameters of this model are sharded, and others are not ({', '.join(whole[:3])}, ...): nobody would "
            f"average the gradients of those. Call fully_shard(model) on the whole model last"
        )
    sharded: dict[str, Any] = {
        name: p for name, p in model.named_parameters() if isinstance(p, kind)
    }
    sizes = {p.device_mesh.size() for p in sharded.values()}
    if sizes != {dist.get_world_size()}:
        raise NotImplementedError(
            f"this model is sharded over meshes of {sorted(sizes)} of {dist.get_world_size()} processes; fnloop gives each "
            f"process its own share of the data, so every parameter must be sharded or replicated over all of them "
            f"(fully_shard)"
        )
    managed = {id(p) for root in roots(model) for p in root.parameters()}
    for name, p in sharded.items():
        if id(p) not in managed or not _is_data_parallel(p.placements):
            raise NotImplementedError(
                f"the parameter {name} is spread as {p.placements} over a mesh of {tuple(p.device_mesh.shape)}, which "
                f"fully_shard alone does not do: with tensor parallelism several processes need the same batch, and fnloop "
                f"gives each process its own share of the data. Leave parallelize_module out, and call fully_shard(model) "
                f"over all processes, or over a mesh of two dimensions (replicate, shard)"
            )


def _is_data_parallel(placements: Any) -> bool:
    """Return whether a parameter is spread as ``fully_shard`` does it: sharded, or replicated in groups that shard."""
    return placements[-1].is_shard() and (
        len(placements) == 1 or (len(placements) == 2 and placements[0].is_replicate())
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
    return local_tensor(tensor) if kind is not None and isinstance(tensor, kind) else tensor


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
    return distribute_tensor(
        value.to(where.device), where.device_mesh, where.placements, src_data_rank=None
    )
