"""Which tensor of a state each tensor of a checkpoint is for, and so how it is to be sharded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._checkpoint.format import TRAINING
from fnloop._checkpoint.optimizers import templates_of_optimizers
from fnloop._core.average import named_tensors
from fnloop._core.serialize import Json
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState

__all__ = ["templates_of"]


def templates_of(state: TrainState, facts: Mapping[str, Json]) -> dict[str, dict[str, Tensor]]:
    """Return tensors of a state by the groups and names of those in a checkpoint.

    They are of the same shape, or have a prefix of the shape: a complex number may be a pair.

    Args:
        state: the state.
        facts: the contents of ``state.json``.
    """
    module = unwrap(state)
    model = {
        strip_compile_prefix(name): value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    own = dict(named_tensors(module))
    averages = {
        slot: model | {key: own[name] for name, key in kept["tensors"].items() if name in own}
        for slot, kept in facts.get("averages", {}).items()
    }
    optimizer = templates_of_optimizers(state, facts.get("optimizer", {}))
    return {**averages, TRAINING: model, "model": model, "optimizer": optimizer}
