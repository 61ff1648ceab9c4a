"""The counters of a checkpoint, and the time that was spent until it was written."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fnloop._checkpoint.format import COUNTERS
from fnloop._core.phase import decode_phases
from fnloop._core.rng import SEED_BITS
from fnloop._core.serialize import Json
from fnloop._core.state import TrainState
from fnloop._core.stops import decode_left, decode_stop, left_in_events

__all__ = ["check_counters", "check_seconds", "updates_by_name"]


def updates_by_name(facts: Mapping[str, Json], state: TrainState) -> dict[str, int]:
    """Return the updates of each optimizer of a state; those of all, if it had another name."""
    saved = facts.get("updates", {})
    return {name: _check_count(name, saved.get(name, facts["step"])) for name in state.updates}


def _check_count(name: str, value: Json, most: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise TypeError(f"{name} is {value!r:.60}")
    return value


def check_counters(facts: Mapping[str, Json]) -> dict[str, object]:
    """Return the saved counters, the stop, and what was left at that boundary.

    Raises:
        TypeError: one of them cannot be a counter.
    """
    counters: dict[str, object] = {name: facts[name] for name in COUNTERS if name != "stop"}
    for name, value in counters.items():
        _check_count(name, value, SEED_BITS if name == "seed" else 1 << 62)
    events, left = left_in_events(facts.get("news", []))
    return counters | {
        "stop": decode_stop(facts["stop"], facts.get("stop_kind")),
        "events": events,
        "left": decode_left(facts["left"]) if "left" in facts else left,
        "phases": decode_phases(facts.get("phases", [])),
        "ends": "epoch" if facts.get("ends") else None,
    }


def check_seconds(facts: Mapping[str, Json]) -> float:
    """Return the time spent in runs; 0 in checkpoints of older versions, which do not have it.

    Raises:
        TypeError: it cannot be a time.
    """
    value = facts.get("seconds", 0.0)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise TypeError(f"seconds is {value!r:.60}")
    return float(value)
