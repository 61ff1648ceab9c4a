"""Which part of a tensor that is sharded is in this process, as a file of a checkpoint has it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fnloop.extend import fsdp


def split_dim(tensor: Tensor) -> int | None:
    """Return the dimension along which a tensor is split over processes.

    It is None for a tensor that is whole in this process, or placed in a way that ``fully_shard``
    does not use. :func:`full` returns either.
    """
    if (sharded := fsdp.as_sharded(tensor)) is None:
        return None
    from torch.distributed.tensor import Shard

    dims = []
    for i, placement in enumerate(sharded.placements):
        if type(placement) is Shard and sharded.device_mesh.size(i) > 1:
            dims.append(placement.dim)
        elif not placement.is_replicate() and sharded.device_mesh.size(i) > 1:
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


def spans_all(tensor: Tensor) -> bool:
    """Return whether the mesh of a sharded tensor has all processes."""
    return tensor.device_mesh.size() == dist.get_world_size()  # type: ignore[attr-defined]
