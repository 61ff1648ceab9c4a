"""What happened at a boundary: the values of ``TrainState.events``."""

from __future__ import annotations

__all__ = ["AGAIN", "END", "EPOCH", "PENDING", "RECORD", "START", "STOP", "UPDATE"]

UPDATE = "update"  # an update was applied, not skipped
EPOCH = "epoch"  # an epoch was completed
RECORD = "record"  # a record was appended to the history
START = "start"  # no update was tried yet
STOP = "stop: "  # and the reason: a hook has stopped the run, and what is due at its end follows
END = "end"  # the boundary is the last one: the target is reached, or a hook has stopped the run
AGAIN = "again"  # a hook has stopped the run, and what is due at its end is asked now
PENDING = "pending"  # the run stopped before this boundary's record: the next run begins with it
