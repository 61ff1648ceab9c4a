"""Averages of weights in a checkpoint: each has a file that loads into the plain module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import like_sharded
from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._checkpoint.format import Contents
from fnloop._core.average import Average, named_tensors
from fnloop._core.serialize import Json, as_safetensor, from_safetensor
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState
from fnloop._display.log import log

__all__ = ["encode_averages", "with_averages", "without_averages"]


def without_averages(slots: Mapping[str, object]) -> Mapping[str, object]:
    """Return slots with None in the place of each average, which is saved in a file of its own."""
    averages = _averages_in(slots)
    return {**slots, **dict.fromkeys(averages)} if averages else slots


def _averages_in(slots: Mapping[str, object]) -> dict[str, Average]:
    """Return the averages among slots, by name."""
    if not isinstance(slots, Mapping):
        return {}
    return {name: v for name, v in slots.items() if isinstance(v, Average)}


def encode_averages(
    state: TrainState, group: Callable[[str], dict[str, Tensor]]
) -> dict[str, Json]:
    """Return the facts of all averages of a state, by name.

    Args:
        state: the state.
        group: returns the group of tensors of an average, by its name; they are added to it.
    """
    return {
        name: _encode(average, unwrap(state), group(name))
        for name, average in _averages_in(state.slots).items()
    }


def _encode(average: Average, module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Json]:
    names = {id(tensor): name for name, tensor in named_tensors(module)}
    places: dict[str, str] = {}  # of a tied tensor every name is in the file, and one is here
    for spelled, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            key = strip_compile_prefix(spelled)
            name = names.get(id(value), key)
            tensors[key] = as_safetensor(average.get(name, value))
            places[name] = key
    for name, tensor in average.items():
        if name not in places:  # the module does not save it
            tensors[name], places[name] = as_safetensor(tensor), name
    pairs = [name for name, tensor in average.items() if tensor.dtype is torch.complex128]
    kept = {name: places[name] for name in average}
    return {"count": average.count, "tensors": kept, "complex": pairs}


def with_averages(
    slots: Mapping[str, object], contents: Contents, state: TrainState
) -> dict[str, object]:
    """Return slots with the averages of weights that fit the model, in their places."""
    saved, found = contents.facts.get("averages", {}), _decode(contents, state)
    return {k: found.get(k, v) for k, v in slots.items() if k not in saved or k in found}


def _decode(contents: Contents, state: TrainState) -> dict[str, Average]:
    """Return the averages of a checkpoint that fit the model of a state; the log names others."""
    here = dict(named_tensors(unwrap(state)))
    found = {}
    for slot, facts in contents.facts.get("averages", {}).items():
        saved = contents.averages[slot]
        count, places, pairs = facts["count"], facts["tensors"], facts["complex"]
        tensors = {
            name: from_safetensor(saved[key]) if name in pairs else saved[key]
            for name, key in places.items()
        }
        if any(name not in here or here[name].shape != t.shape for name, t in tensors.items()):
            log.warning("restore: the average %r is of another model, and begins again", slot)
            continue
        placed = {name: _place(t, here[name]) for name, t in tensors.items()}
        found[slot] = Average(placed, count)
    return found


def _place(tensor: Tensor, like: Tensor) -> Tensor:
    return like_sharded(tensor.to(like.device), like.detach())
