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


def dtensor() -> type[DTensor] | None:
    """Return torch's class of sharded tensors; None before its import, when nothing is sharded."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


WHOLE = {Tensor, nn.Parameter}  # classes of tensors that are never sharded


def has_sharded(tensors: Iterable[Tensor]) -> bool:
    """Return whether some tensors are sharded over processes."""
    kind, others = dtensor(), {*map(type, tensors)} - WHOLE
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
    kind = dtensor()
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
    kind = None if tensor.__class__ in WHOLE else dtensor()
    return local_tensor(tensor) if kind is not None and isinstance(tensor, kind) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return a full tensor. This is a collective if the tensor is sharded."""
    kind = None if tensor.__class__ in WHOLE else dtensor()
    return tensor.full_tensor() if kind is not None and isinstance(tensor, kind) else tensor


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in tensors of one mesh, NaN if one is there.

    This is a collective if they are sharded. torch raises for a part without elements, and what
    reduces over processes may drop NaN.
    """
    parts = [part for tensor in tensors if (part := local_part(tensor)).numel()]
    own = get_total_norm(parts, math.inf)
    kind = dtensor()
    if kind is None or not tensors or not isinstance(tensors[0], kind):
        return own
    # Without a part that has elements, its dtype would be another one than in other processes.
    own = own.to(functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors)))
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
    kind = dtensor()
    if kind is None or not isinstance(result, kind):
        return result
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in result.placements]
    return local_part(result.redistribute(placements=whole))


def like_sharded(value: Tensor, template: Tensor) -> Tensor:
    """Return a tensor sharded like a template.

    That is without communication, unless the value is sharded in another way.
    """
    kind = dtensor()
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
