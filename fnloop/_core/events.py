"""What happened at a boundary: the values of ``TrainState.events``."""

from __future__ import annotations

UPDATE = "update"  # an update was applied, not skipped
EPOCH = "epoch"  # an epoch was completed
RECORD = "record"  # a record was appended to the history
START = "start"  # no update was tried yet
END = "end"  # the boundary is the last one: the target is reached, or a hook has stopped the run
