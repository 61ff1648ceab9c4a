"""Partial checkpoints: which parts of a state one holds, and how ``only=`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fnloop._extensions.checkpoints.format import (
    PARTS,
    TRAINED,
    CheckpointError,
)
from fnloop._extensions.checkpoints.serialize import (
    Json,
)
from fnloop.extend import checks

# --------------------------------------------------------------------------------------------------
# The parts of a state, and which of them a checkpoint holds.
#
# A checkpoint that was saved with `only=...` is *partial*: it lists its parts in `state.json` and
# in the manifest. A run cannot be resumed from it.

_NAMES = (*PARTS, TRAINED)


def read_parts(owner: str, only: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts that ``only`` names, in one order, each once; all of them for None.

    "trained" is a part of the model, and is left out next to it.

    Raises:
        ValueError: it is something else, or names none.
    """
    if only is None:
        return PARTS
    try:
        parts = tuple(only)
    except TypeError:
        parts = ()
    if not parts or not all(isinstance(part, str) and part in _NAMES for part in parts):
        hint = f": write only=({only!r},)" if isinstance(only, str) and only in _NAMES else ""
        raise ValueError(
            f"{owner} expects only= as a tuple of {', '.join(_NAMES)}; got "
            f"{checks.describe(only)}{hint}"
        )
    return tuple(
        part for part in _NAMES if part in parts and not (part == TRAINED and "model" in parts)
    )


def held_parts(facts: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the parts that a checkpoint holds, by its manifest or its ``state.json``."""
    return tuple(facts["parts"]) if is_partial(facts) else PARTS


def is_partial(facts: Mapping[str, Json]) -> bool:
    """Return whether a checkpoint lacks some parts, by its manifest or its ``state.json``."""
    return "parts" in facts


def explain_partial(path: Path, held: Sequence[str]) -> str:
    """Return what a partial checkpoint holds, and how to restore that."""
    only = ", ".join(f'"{part}"' for part in held) + ("," if len(held) == 1 else "")
    return (
        f"{path} is a partial checkpoint, which holds only {', '.join(held)}. To restore that: "
        f'restore("{path}", state, only=({only}))'
    )


def check_held(path: Path, facts: Mapping[str, Json], parts: Sequence[str]) -> None:
    """Raise unless a checkpoint holds these parts."""
    held = held_parts(facts)
    known = (*held, TRAINED) if "model" in held else held
    if not {*parts} <= {*known}:
        raise CheckpointError(explain_partial(path, held))
