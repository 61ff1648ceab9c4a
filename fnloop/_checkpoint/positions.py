"""The position of the training loader in a checkpoint that is written in mid-epoch."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fnloop._backend.collectives import gather_objects
from fnloop._backend.launch import Backend
from fnloop._checkpoint.format import COLLECTED
from fnloop._core.position import Position, check_position
from fnloop._core.serialize import Json, decode, encode, has_pending
from fnloop._core.state import TrainState
from fnloop._display.log import log

__all__ = ["POSITIONS", "decode_position", "encode_positions"]

POSITIONS = "positions"  # a key of the facts, and what the names of their tensors begin with


def encode_positions(state: TrainState, tensors: dict[str, Tensor]) -> dict[str, Json]:
    """Return the position of the loader as facts; those of all processes if each has its shard.

    A position that is not plain data is left out, with a warning: the run can be resumed all the
    same, by reading the loader again.
    """
    every = gather_objects(state.position, COLLECTED)
    if None in every:
        return {}
    if state.position is not None and state.position["shards"] == 1:
        every = every[:1]
    added: dict[str, Tensor] = {}
    try:
        encoded = encode(every, added, POSITIONS)
        if has_pending(decode(encoded, added)):
            raise TypeError(f"{POSITIONS} holds an object")
    except (TypeError, RecursionError) as error:
        log.warning(
            "save: the position of the training loader is left out, and a run that is resumed here "
            "reads the epoch again up to it: what state_dict() returns must be plain data (%s)",
            error,
        )
        return {}
    tensors.update(added)
    return {POSITIONS: encoded}


def decode_position(
    facts: Mapping[str, Json], tensors: Mapping[str, Tensor], backend: Backend
) -> Position | None:
    """Return the position of this process's loader, or None if it is not known.

    Raises:
        TypeError: it cannot be a position.
    """
    every = [check_position(own) for own in decode(facts.get(POSITIONS, []), tensors)]
    if not every or every[0]["shards"] not in (1, backend.data_size):
        return None
    return every[min(backend.data_rank, len(every) - 1)]
