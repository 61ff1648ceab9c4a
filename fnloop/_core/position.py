"""The position of a stream in the middle of an epoch, as plain data."""

from __future__ import annotations

from typing import TypedDict, cast

__all__ = ["Position", "check_position"]


class Position(TypedDict):
    """Where the training loader was after a batch. A checkpoint holds it.

    Args:
        epoch: the epoch.
        batch: how many batches were drawn; with ``shards`` above 1, by this process.
        shards: how many processes read a part of their own; 1 if each reads the whole stream.
        keeper: the name of the class that knows it.
        state: what its ``state_dict`` returned.
        next: a checksum of the batch that came next; None if there was none.
    """

    epoch: int
    batch: int
    shards: int
    keeper: str
    state: object
    next: int | None


def check_position(value: object) -> Position:
    """Return what was read from a checkpoint.

    Raises:
        TypeError: it cannot be a position.
    """
    kinds = {"epoch": int, "batch": int, "shards": int, "keeper": str, "next": int | None}
    if not isinstance(value, dict) or {*value} != {*kinds, "state"}:
        raise TypeError(f"a position of the loader is {value!r:.60}")
    for name, kind in kinds.items():
        if not isinstance(value[name], kind):
            raise TypeError(f"{name} of a position of the loader is {value[name]!r:.60}")
    return cast(Position, value)
