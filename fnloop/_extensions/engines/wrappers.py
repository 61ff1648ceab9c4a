"""What others have wrapped around a model: what is taken from it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fnloop._extensions.engines.torch_compat import hooks_of_ddp, ignored_by_ddp, settings_of_ddp
from fnloop.extend import torch_compat

# Wrappers that keep parts of the parameters in each process, or make backward or the update by
# themselves, by the package that has them. Others that keep parts are told by `check_whole`.
_ENGINES = {
    "torch": ("FullyShardedDataParallel",),
    "torch_xla": ("XlaFullyShardedDataParallel",),
    "fairscale": (
        "FullyShardedDataParallel",
        "ShardedDataParallel",
        "FlattenParamsWrapper",
        "Pipe",
    ),
    "deepspeed": ("DeepSpeedEngine", "PipelineModule"),
}
_WITHOUT = (
    "Give TrainState.create the model without it: fnloop averages gradients by itself. To shard a "
    "model over processes, call torch's fully_shard(model) before you make the optimizer"
)


def check_engines(model: nn.Module) -> None:
    """Raise if a model, or a part of it, is in a wrapper that trains by itself.

    Raises:
        NotImplementedError: it is; the message names the wrapper.
    """
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            package = cls.__module__.partition(".")[0]
            if cls.__name__ in _ENGINES.get(package, ()):
                kind = "FSDP 1 (FullyShardedDataParallel)" if package == "torch" else cls.__name__
                raise NotImplementedError(
                    f"{_part(name)} is in {kind} of {package}, which keeps parts of parameters in "
                    f"each process, or makes the update by itself. {_WITHOUT}"
                )
    if name := next((name for name, p in model.named_parameters() if hasattr(p, "ds_id")), None):
        raise NotImplementedError(
            f"the parameter {name} is partitioned by DeepSpeed (ZeRO 3), whose engine makes the "
            f"update by itself. {_WITHOUT}"
        )


def check_averages_once(model: nn.Module) -> None:
    """Raise if a part of a model averages gradients over processes by itself, or leaves some out.

    Raises:
        NotImplementedError: it does; the message names the part.
    """
    for name, module in model.named_modules():
        if any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
            raise NotImplementedError(
                f"{_part(name)} is in DistributedDataParallel of {type(module).__module__}, within "
                "what TrainState.create was given, so its gradients would be averaged twice. Give "
                "the model without it: fnloop averages gradients by itself"
            )
        if ignored := ignored_by_ddp(module):
            raise NotImplementedError(
                f"{_part(name)} tells DistributedDataParallel to ignore {ignored[0]}, and "
                "fnloop averages the gradients of all parameters that are trained: freeze it, "
                "fl.freeze(...), or keep it outside of the model"
            )


def _part(name: str) -> str:
    return f"the part {name} of this model" if name else "this model"


def check_whole(model: nn.Module) -> None:
    """Raise if a trained parameter of a model is only a part of what the model saves.

    A wrapper that cuts or joins parameters saves whole ones, by other names or in other shapes.

    Raises:
        NotImplementedError: it is; the message names the parameter.
    """
    saved = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    known = {id(value) for value in saved.values()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if not p.requires_grad or id(p) in known:
            continue
        value = saved.get(name)
        if value is None or value.shape != p.shape:
            has = "lacks it" if value is None else f"has it in the shape {tuple(value.shape)}"
            raise NotImplementedError(
                f"the parameter {torch_compat.strip_compile_prefix(name)} has the shape "
                f"{tuple(p.shape)}, and the state_dict of this {type(model).__name__} {has}: it is "
                "a part of what the model computes with, as wrappers that shard a model make it. "
                f"{_WITHOUT}"
            )


# --- settings of torch's DistributedDataParallel

_PASSED = (
    *("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "batched_grad_copy"),
    "bucket_cap_mb",
)
_NOT_KEPT = {
    "mixed_precision": 'leave it out, and list amp("bf16") in the pipeline',
    "delay_all_reduce_named_params": "leave it out",
    "skip_all_reduce_unused_params": "write find_unused_parameters=True",
    "bucket_cap_mb_list": "write bucket_cap_mb",
}


def settings_of(
    wrapped: DistributedDataParallel,
) -> tuple[dict[str, object], Callable[[DistributedDataParallel], object] | None]:
    """Return the settings that a user gave DDP, and what registers its communication hooks.

    Args:
        wrapped: the user's own.

    Returns:
        Arguments for another DDP, without defaults; and a function of that one, or None.

    Raises:
        NotImplementedError: one of them would not be kept; the message names it.
    """
    given = settings_of_ddp(wrapped)
    check_settings_kept(given, wrapped.module)
    settings = {name: given[name] for name in _PASSED if given.get(name)}
    hooks = hooks_of_ddp(wrapped)

    def register(ddp: DistributedDataParallel) -> None:
        for hook, state in hooks:
            ddp.register_comm_hook(state, hook)

    return settings, register if hooks else None


def check_settings_kept(given: Mapping[str, object], model: nn.Module) -> None:
    """Raise if a setting of DDP would not be kept.

    Args:
        given: the settings.
        model: the model that they are for.

    Raises:
        NotImplementedError: one would not; the message names it, and what to write instead.
    """
    for name, advice in _refused(given, model):
        raise NotImplementedError(
            f"DistributedDataParallel has {name} here, which fnloop would not keep: {advice}"
        )


def _refused(given: Mapping[str, object], model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the settings that cannot be kept, each with what to write instead."""
    yield from ((name, advice) for name, advice in _NOT_KEPT.items() if given.get(name))
    group = given.get("process_group")
    is_group = isinstance(group, dist.ProcessGroup)
    if is_group and dist.get_world_size(group) < dist.get_world_size():
        yield (
            "the process_group of some processes",
            'leave it out; to deal the data along a part of a mesh, write data=mesh["data"]',
        )
    shares = given.get("forward_sync_buffers", given.get("broadcast_buffers", True))
    if not shares and any(True for _ in model.buffers()):
        yield (
            "broadcast_buffers=False",
            "each update begins with the buffers of the main process, which a checkpoint holds. "
            "Leave it out; for statistics of all processes use nn.SyncBatchNorm",
        )
