"""A copy of what updates change, which a middleware keeps in its slot to go back to.

It is plain data, so that a checkpoint can hold it. Going back changes tensors in place: the model
and the optimizers stay the same objects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import attrs
import torch
from torch import Tensor

from fnloop._core import left_out
from fnloop._core.average import Average
from fnloop._core.optimizers import Group, groups_in, optimizers_in
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.state import TrainState
from fnloop._step.rates import RATIO

__all__ = ["Kept", "go_back", "keep"]

Kept = Group  # what keep returns: plain data by name
COUNTERS = ("step", "updates")


def keep(state: TrainState, without: str) -> Kept:
    """Return a copy of the weights, the optimizers, the slots of the step, and the counters.

    What hooks keep is about records, which stay, as the updates left out of ended epochs do.

    Args:
        state: the state after an update.
        without: the name of the slot that the copy will be part of.
    """
    memo = _shared(state)
    averages = {name: slot for name, slot in state.slots.items() if isinstance(slot, Average)}
    left = {without, left_out.SLOT, *averages, *(state.run.hook_slots if state.run else ())}
    slots = {name: state.slots[name] for name in state.slots.keys() - left}
    return {
        "counters": {name: copy.copy(getattr(state, name)) for name in COUNTERS},
        "model": {name: tensor.detach().clone() for name, tensor in _tensors(state)},
        "optimizers": [
            [copy.deepcopy(optimizer.state.get(p), memo) for p in _updated(optimizer)]
            for optimizer in optimizers_in(state.optimizer).values()
        ],
        "groups": [copy.deepcopy(_settings(group), memo) for group in groups_in(state.optimizer)],
        "averages": {
            name: {"tensors": {k: t.clone() for k, t in slot.items()}, "count": slot.count}
            for name, slot in averages.items()
        },
        "slots": copy.deepcopy(slots, memo),
    }


def go_back(state: TrainState, kept: Kept) -> TrainState:
    """Return the state with the values of a copy. The position in the data stays where it is.

    Updates that were made since the copy count as skipped ones.

    Raises:
        ValueError: the state has other parameters than the copy.
    """
    memo, tensors = _shared(state), dict(_tensors(state))
    groups, optimizers = groups_in(state.optimizer), list(optimizers_in(state.optimizer).values())
    if (
        tensors.keys() != kept["model"].keys()
        or len(groups) != len(kept["groups"])
        or [len(saved) for saved in kept["optimizers"]] != [len(_updated(o)) for o in optimizers]
    ):
        raise ValueError("the snapshot is of a state with other parameters")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(kept["model"][name])
    for optimizer, saved in zip(optimizers, kept["optimizers"], strict=True):
        for p, values in zip(_updated(optimizer), saved, strict=True):
            if values is None:
                optimizer.state.pop(p, None)
            else:
                optimizer.state[p] = _changed(optimizer.state.get(p), values, memo)
    for group, settings in zip(groups, kept["groups"], strict=True):
        for name in _settings(group).keys() - settings.keys():
            del group[name]  # such as what a schedule had set, which it compares with what is there
        for name, value in settings.items():
            group[name] = _changed(group.get(name), value, memo)
    slots = dict(state.slots)
    for name, saved in kept["averages"].items():
        average = slots.get(name)
        if isinstance(average, Average):
            average.count = saved["count"]
            for k, tensor in average.items():
                tensor.copy_(saved["tensors"][k])
    for name, saved in kept["slots"].items():
        if name in slots:
            like, saved = copy.deepcopy((slots[name], saved), memo)
            slots[name] = materialize(like, saved) if has_pending(saved) else saved
    counters = {name: copy.copy(value) for name, value in kept["counters"].items()}
    skipped = state.step + state.skipped - counters["step"]
    return attrs.evolve(state, slots=slots, skipped=skipped, **counters)


def _shared(state: TrainState) -> dict[int, object]:
    """Return what copies refer to and do not copy: the model, its tensors and the optimizers."""
    live = [state.model, *(t for _, t in _tensors(state)), *optimizers_in(state.optimizer).values()]
    live += [p for group in groups_in(state.optimizer) for p in group["params"]]
    return {id(one): one for one in live}


def _tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    yield from state.model.named_parameters()
    yield from state.model.named_buffers()


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settings(group: Group) -> Group:
    """Return the settings of a group; its ratio is there during an update only."""
    return {name: value for name, value in group.items() if name not in ("params", RATIO)}


def _changed(now: object, value: object, memo: dict[int, object]) -> object:
    """Return a value, in the tensors that are there now where they fit."""
    if isinstance(value, Tensor):
        if isinstance(now, Tensor) and id(now) not in memo and _kind(now) == _kind(value):
            return now.copy_(value)
        return value.clone()
    if isinstance(value, dict):
        held = now if isinstance(now, dict) else {}
        return {name: _changed(held.get(name), part, memo) for name, part in value.items()}
    return copy.deepcopy(value, memo)


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device
