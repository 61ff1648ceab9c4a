"""The optimizers of a state in a checkpoint: one, or several by name.

One is kept as it is. Of several, the facts are kept under "several", and the names of their tensors
begin with the name of the optimizer and a slash.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.optimizer import NamedOptimizer
from fnloop._checkpoint.optimizer_load import PreparedLoad, SavedOptimizer, prepare_load
from fnloop._checkpoint.optimizer_save import encode_optimizer
from fnloop._checkpoint.regroup import regroup
from fnloop._core.serialize import Json, tensors_in
from fnloop._core.state import TrainState

__all__ = ["encode_optimizers", "prepare_loads", "templates_of_optimizers"]

_SEVERAL = "several"


def encode_optimizers(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the facts of the optimizers of a state, and add their tensors to ``tensors``.

    Raises:
        TypeError, CheckpointError: something in one of them cannot be saved.
    """
    named = NamedOptimizer.of_state(state)
    if "" in named:
        return encode_optimizer(named[""], tensors)
    facts = {}
    for name, one in named.items():
        own: dict[str, Tensor] = {}
        facts[name] = encode_optimizer(one, own)
        for key, tensor in own.items():
            tensors[f"{name}/{key}"] = tensor
    return {_SEVERAL: facts}


def prepare_loads(state: TrainState, saved: SavedOptimizer, strict: bool) -> list[PreparedLoad]:
    """Check that the saved optimizers fit those of a state, and return how to load each.

    Their groups are made as they were where ``unfreeze`` had changed them.

    Args:
        state: the state.
        saved: all that was saved, by :func:`encode_optimizers`.
        strict: whether the parameters must have the shapes that they had.

    Raises:
        CheckpointError: they are others, or do not fit.
    """
    named = NamedOptimizer.of_state(state)
    facts: Mapping[str, Json] = saved.facts.get(_SEVERAL, {"": saved.facts})
    if named.keys() != facts.keys():
        raise CheckpointError(
            f"{saved.path} has {_describe({k: v['class'] for k, v in facts.items()})}, and this "
            f"state has {_describe({k: one.class_name for k, one in named.items()})}. Create the "
            "former, or leave them out: restore(path, state, only=('model',))"
        )
    held = {name: {*one.parameters()} for name, one in named.items()}
    for name, one in named.items():
        others = {p for other, names in held.items() if other != name for p in names}
        regroup(one, facts[name]["param_groups"], others)
    return [
        prepare_load(one, _part(saved, name, facts[name]), strict) for name, one in named.items()
    ]


def templates_of_optimizers(state: TrainState, facts: Mapping[str, Json]) -> dict[str, Tensor]:
    """Return, for the tensors of saved optimizers, the parameter that each belongs to, by name."""
    named, found = NamedOptimizer.of_state(state), {}
    for name, own in facts.get(_SEVERAL, {"": facts}).items():
        if name not in named:
            continue
        prefix = f"{name}/" if name else ""
        for parameter, p in {**named[name].own, **named[name].parameters()}.items():
            found[f"{prefix}parameter.{parameter}"] = p
            encoded = own.get("state", {}).get(parameter)
            found |= {prefix + key: p for key in tensors_in(encoded)}
    return found


def _part(saved: SavedOptimizer, name: str, facts: Mapping[str, Json]) -> SavedOptimizer:
    """Return one of the saved optimizers."""
    if not name:
        return saved
    prefix = f"{name}/"
    names = [name for name in saved.tensors if name.startswith(prefix)]
    own = {name.removeprefix(prefix): saved.tensors.pop(name) for name in names}
    return attrs.evolve(saved, facts=facts, tensors=own)


def _describe(classes: Mapping[str, str]) -> str:
    if "" in classes:
        return f"one optimizer without a name ({classes['']})"
    return f"the optimizers {', '.join(f'{name} ({kind})' for name, kind in classes.items())}"
