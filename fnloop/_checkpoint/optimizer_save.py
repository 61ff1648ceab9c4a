"""Save an optimizer: its facts as JSON, its tensors by name."""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections.abc import Mapping

import torch
from torch import Tensor

from fnloop._backend.containers import map_leaves
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import (
    UNSAVED,
    NamedOptimizer,
    has_own_state_dict,
    is_list_of_groups,
)
from fnloop._core.optimizers import UNFROZEN
from fnloop._core.serialize import (
    Json,
    as_flattened,
    as_number,
    as_safetensor,
    encode,
    is_flattened,
)

__all__ = ["encode_optimizer"]

NAMED_ONLY = (  # a checkpoint can only name these, and the new optimizer must have them
    *(type, enum.Enum, functools.partial),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(torch.device, torch.layout, torch.memory_format),
)


def encode_optimizer(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the facts of an optimizer, and add its tensors to ``tensors``.

    Raises:
        TypeError, CheckpointError: something in it cannot be saved; the message says where it is.
    """
    facts: dict[str, Json] = {"class": named.class_name}
    for name, p in named.parameters().items():
        if name in named.foreign:
            tensors[f"parameter.{name}"] = as_safetensor(p)
    if has_own_state_dict(named.optimizer):
        return facts | _encode_own_state_dict(named, tensors)
    return facts | _encode_by_name(named, tensors)


def _encode_own_state_dict(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    if named.sharded:
        raise CheckpointError(
            f"{named.class_name} has its own state_dict and the model is sharded over processes, "
            "so it is unknown which of its tensors are shards. "
            "Use an optimizer of torch.optim, or a model that is not sharded"
        )
    encoded = _encode_state_dict(named.holder.state_dict(), tensors, "state_dict")
    return {
        "param_groups": [
            {"params": names, **({UNFROZEN: True} if group.get(UNFROZEN) else {})}
            for names, group in zip(named.group_names(), named.optimizer.param_groups, strict=True)
        ],
        "state_dict": _reject_objects(encoded, "state_dict"),
    }


def _encode_by_name(named: NamedOptimizer, tensors: dict[str, Tensor]) -> dict[str, Json]:
    state = named.holder.state
    groups = zip(named.group_names(), named.optimizer.param_groups, strict=True)
    facts: dict[str, Json] = {
        "param_groups": [
            {"params": names, **_encode_group(group, tensors, f"param_groups.{i}")}
            for i, (names, group) in enumerate(groups)
        ],
        "state": {},
    }
    on_host = []
    names = {id(p): name for name, p in named.parameters().items()}
    for p in state:  # in its order: parameters may have been trained later than others
        if (name := names.get(id(p))) is not None:
            before = len(tensors)
            facts["state"][name] = _encode_state(state[p], tensors, name)
            # From the end: a list of all for each parameter takes quadratic time.
            new = list(itertools.islice(reversed(tensors), len(tensors) - before))[::-1]
            on_host += [key for key in new if tensors[key].device.type == "cpu" != p.device.type]
    shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    if shared:
        facts["state_of_all"] = _encode_state(shared, tensors, "state_of_all")
    if on_host:
        facts["on_host"] = on_host
    return facts


def _encode_state(value: object, tensors: dict[str, Tensor], path: str) -> Json:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{path} in the optimizer's state is a {type(value).__name__}; "
            "a checkpoint expects a dict"
        )
    return _reject_objects(encode(map_leaves(dict(value), as_flattened), tensors, path), path)


def _encode_group(
    group: Mapping[str, object], tensors: dict[str, Tensor], path: str
) -> dict[str, Json]:
    """Return the settings of a group as JSON that a person can read."""
    encoded = {}
    for key, value in group.items():
        if key in UNSAVED:
            continue
        if isinstance(value, NAMED_ONLY):
            encoded[key] = {"$setting": getattr(value, "__qualname__", str(value))}
        elif isinstance(value, Tensor) and not value.ndim and not value.is_complex():
            encoded[key] = _encode_scalar(value, group, tensors, path)
        else:
            at = f"{path}.{key}"
            encoded[key] = _reject_objects(encode(value, tensors, at), at)
    return encoded


def _encode_scalar(
    value: Tensor, group: Mapping[str, Json], tensors: dict[str, Tensor], path: str
) -> dict[str, Json]:
    number = as_number(value) if value.is_floating_point() else value.item()
    encoded = {
        "$scalar": encode(number, tensors, path),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    parameters = [p for p in group["params"] if isinstance(p, Tensor)]
    if value.device.type == "cpu" and any(p.device.type != "cpu" for p in parameters):
        encoded["on_host"] = True
    return encoded


def _encode_state_dict(value: object, tensors: dict[str, Tensor], path: str) -> Json:
    """Return a state_dict as JSON. Its groups are encoded as by :func:`_encode_group`.

    That includes the groups of optimizers inside.
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and not key.startswith("$") for key in value
    ):
        _reject_tensor_keys(value, path)
        return encode(value, tensors, path)
    encoded = {}
    for key, inner in value.items():
        at = f"{path}.{key}"
        if is_list_of_groups(key, inner):
            encoded[key] = [
                {
                    "params": list(group["params"]),
                    **_encode_group(group, tensors, f"{at}.{i}"),
                }
                for i, group in enumerate(inner)
            ]
            # Raises if the parameters are not plain positions.
            encode([group["params"] for group in encoded[key]], {}, at)
        else:
            encoded[key] = _encode_state_dict(inner, tensors, at)
    return encoded


def _reject_tensor_keys(value: object, path: str) -> None:
    if isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
        raise TypeError(
            f"{path} has tensors as keys, which mean nothing in another process: "
            "use the positions of the parameters"
        )


def _reject_objects(encoded: Json, path: str) -> Json:
    """Return encoded data, or raise if it contains an object, which could not be reconstructed."""
    if isinstance(encoded, dict):
        if "$saved" in encoded and not is_flattened(encoded["$saved"]):
            raise TypeError(
                f"{path} is a {encoded['$saved']}, an object, which could not be reconstructed: "
                "keep plain data there"
            )
        for key, value in encoded.items():
            _reject_objects(value, f"{path}.{key}")
    elif isinstance(encoded, list):
        for i, value in enumerate(encoded):
            _reject_objects(value, f"{path}.{i}")
    return encoded
