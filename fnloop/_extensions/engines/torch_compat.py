"""What torch does not document of process groups, and of DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fnloop.extend import torch_compat


def leaf_of(node: object) -> Tensor | None:
    """Return the leaf that an autograd node accumulates into. Fallback: DDP searches for leaves."""
    return getattr(node, "variable", None)


# --- several processes

_c10d = getattr(dist, "distributed_c10d", None)


def process_groups() -> list[dist.ProcessGroup]:
    """Return all process groups. Fallback: the default one."""
    world = getattr(_c10d, "_world", None)
    return cast(list[dist.ProcessGroup], [dist.group.WORLD] if world is None else [*world.pg_map])


def default_store() -> dist.Store:
    """Return the store in which the processes of the default group have met."""
    name = "_get_default_store"
    return torch_compat.required(_c10d, name, name, "when there are several processes")()


@contextlib.contextmanager
def meeting_in(store: object) -> Iterator[None]:
    """Make new groups meet in this store instead of the default one."""
    why = "when there are several processes"
    world, group = (
        torch_compat.required(_c10d, "_world", "distributed_c10d._world", why),
        dist.group.WORLD,
    )
    backend, usual = world.pg_map[group]
    world.pg_map[group] = backend, store
    try:
        yield
    finally:
        world.pg_map[group] = backend, usual


def collectives_begun(group: object) -> int | None:
    """Return how many collectives of a group this process has begun, or None."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if count is None else count()
    except RuntimeError:  # a backend that does not count
        return None


def broadcast_coalesced(group: dist.ProcessGroup | None, tensors: list[Tensor]) -> None:
    """Broadcast tensors of the main process in place. Fallback: one tensor after the other."""
    at_once = getattr(dist, "_broadcast_coalesced", None)
    if at_once is not None:
        at_once(group, tensors, 250 << 20, 0)  # as torch's DDP does
        return
    for t in tensors:
        dense = t.contiguous()
        dist.broadcast(dense, 0, group=group)
        t.copy_(dense)


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """Return the parameters and buffers that DDP is told to ignore. Fallback: none."""
    return sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def settings_of_ddp(ddp: DistributedDataParallel) -> dict[str, object]:
    """Return the settings of a DDP by the names of its arguments. Fallback: defaults."""
    held = vars(ddp)
    given: dict[str, object] = {name: held[name] for name in _DDP_SETTINGS if name in held}
    given["delay_all_reduce_named_params"] = held.get("_delay_all_reduce_params")
    given["bucket_cap_mb_list"] = held.get("bucket_bytes_cap_list")
    if not held.get("bucket_bytes_cap_default", True):
        given["bucket_cap_mb"] = held["bucket_bytes_cap"] / 2**20
    return given


_DDP_SETTINGS = (  # attributes that have the names of arguments
    *("broadcast_buffers", "forward_sync_buffers", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "batched_grad_copy", "skip_all_reduce_unused_params"),
    *("mixed_precision", "process_group"),
)


def hooks_of_ddp(ddp: DistributedDataParallel) -> list[tuple[Callable[..., object], object]]:
    """Return the communication hooks of a DDP, each with its state.

    Raises:
        RuntimeError: torch does not tell.
        NotImplementedError: a hook is one of torch's own in C++, which has no object.
    """
    known_as = "DistributedDataParallel._comm_hooks"
    hooks = torch_compat.required(ddp, "_comm_hooks", known_as, "to keep your communication hook")
    tell = torch_compat.found(ddp, "_get_ddp_logging_data", dict)
    if not hooks and (builtin := tell().get("comm_hook")):
        raise NotImplementedError(
            f"this model is in DistributedDataParallel with the hook {builtin}, which cannot be "
            "taken over. Register a function: model.register_comm_hook(None, "
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)"
        )
    return [*hooks]


def reduce_in_backward(ddp: DistributedDataParallel, loss: Tensor) -> Tensor:
    """Return a loss whose backward averages gradients over processes, in buckets that stay as made.

    Fallback: DDP's own forward. It sorts the buckets again after the first update, so that a
    resumed run on three processes or more may differ from an uninterrupted one in the last bits.
    """
    prepare = getattr(getattr(ddp, "reducer", None), "prepare_for_forward", None)
    finish = getattr(ddp, "_post_forward", None)
    if finish is None or prepare is None:
        return cast(Tensor, DistributedDataParallel.forward(ddp, loss))
    prepare()
    return finish(loss)
