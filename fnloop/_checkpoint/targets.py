"""The targets of a run in a checkpoint, so that an update of it can be made again.

A schedule that depends on the length of the run sets the same rate then.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fnloop._core.run_info import RunInfo
from fnloop._core.serialize import Json

__all__ = ["TARGETS", "Targets", "decode_targets", "encode_targets"]

TARGETS = "targets"  # a key of the facts


@attrs.frozen
class Targets:
    """Where a run was to end.

    Args:
        epochs: the target for ``state.epoch``, or None.
        steps: what ``state.step`` was to be at the end, or None if that was not known.
    """

    epochs: int | None
    steps: int | None


def encode_targets(run: RunInfo) -> dict[str, Json]:
    """Return the targets of a run as JSON."""
    return {"epochs": run.epochs, "steps": run.total_steps}


def decode_targets(facts: Mapping[str, Json]) -> Targets | None:
    """Return the targets of the run that wrote a checkpoint; None if it was written by none.

    Checkpoints of older versions do not have them.
    """
    saved = facts.get(TARGETS)
    if saved is None:
        return None
    targets = Targets(saved["epochs"], saved["steps"])
    return None if targets == Targets(None, None) else targets
