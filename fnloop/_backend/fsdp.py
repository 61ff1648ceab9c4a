"""Models whose parameters are sharded over processes, by ``fully_shard`` or tensor parallelism."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fnloop._backend.torch_compat import local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def _dtensor() -> type[DTensor] | None:
    """Return torch's class of sharded tensors; None before its import, when nothing is sharded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


_WHOLE = {Tensor, nn.Parameter}  # classes of tensors that are never sharded


def has_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether some tensors are sharded over processes."""
    kind, others = _dtensor(), {*map(type, tensors)} - _WHOLE
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


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward without a backward has gathered."""
    if is_sharded(model):
        from torch.distributed.fsdp import FSDPModule

        for module in (each for each in model.modules() if isinstance(each, FSDPModule)):
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
    kind = None if tensor.__class__ in _WHOLE else _dtensor()
    return local_tensor(tensor) if kind is not None and isinstance(tensor, kind) else tensor


def as_sharded(tensor: Tensor) -> DTensor | None:
    """Return a tensor if it is sharded, else None."""
    kind = None if tensor.__class__ in _WHOLE else _dtensor()
    return tensor if kind is not None and isinstance(tensor, kind) else None


def full(tensor: Tensor) -> Tensor:
    """Return a full tensor. This is a collective if the tensor is sharded."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.full_tensor()


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in tensors of one mesh, NaN if one is there.

    This is a collective if they are sharded. torch raises for a part without elements, and what
    reduces over processes may drop NaN.
    """
    parts = [part for tensor in tensors if (part := local_part(tensor)).numel()]
    own = get_total_norm(parts, math.inf)
    if not tensors or (like := as_sharded(tensors[0])) is None:
        return own
    # Without a part that has elements, its dtype would be another one than in other processes.
    own = own.to(functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors)))
    from torch.distributed.tensor import DTensor, Partial

    both = torch.stack([own.nan_to_num(0.0, math.inf), own.isnan().to(own.dtype)])
    mesh, here = like.device_mesh, local_part(like).device
    shared = DTensor.from_local(both.to(here), mesh, [Partial("max")] * mesh.ndim)
    found, has_nan = shared.full_tensor()
    return torch.where(has_nan > 0, math.nan, found)


def combined(result: Tensor) -> Tensor:
    """Return this process's part of what was computed from a sharded tensor.

    What has a partial result in each process, such as a norm, is combined first: a collective.
    """
    if (sharded := as_sharded(result)) is None:
        return result
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in sharded.placements]
    return local_part(sharded.redistribute(placements=whole))


def like_sharded(value: Tensor, template: Tensor) -> Tensor:
    """Return a tensor sharded like a template.

    That is without communication, unless the value is sharded in another way.
    """
    if (like := as_sharded(template)) is None:
        return value
    place = like.device_mesh, like.placements
    if (sharded := as_sharded(value)) is not None:
        same = (sharded.device_mesh, sharded.placements) == place
        return value if same else sharded.redistribute(*place)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), *place, src_data_rank=None)
