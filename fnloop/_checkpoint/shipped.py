"""The parts of checkpoints that extensions of fnloop bring, which a new state has not met yet."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fnloop._core.parts import Part
from fnloop._core.serialize import Json

# Where each is, by its entry in a checkpoint. It is imported if a checkpoint has that.
_PLACES = {
    "averages": ("fnloop._core.averages", "AVERAGES"),
    "apart": ("fnloop._extensions.engines.apart", "APART"),
    "exact": ("fnloop._extensions.engines.exact", "EXACT"),
}


def shipped_in(facts: Mapping[str, Json]) -> dict[str, Part]:
    """Return those of these parts that a checkpoint has, by name."""
    found = {name: place for name, place in _PLACES.items() if name in facts}
    return {k: getattr(importlib.import_module(file), part) for k, (file, part) in found.items()}
