"""What a process has of a window of batches."""

from __future__ import annotations

from typing import Any

__all__ = ["END", "Padding", "unwrap_padding"]

END = object()


class Padding:
    """The batch of another process, for one that has none left. It counts for nothing.

    Nobody looks at it, unless a forward exchanges something with other processes, who would wait for it: see :class:`Talk`.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: Any) -> None:
        self.batch = batch


def unwrap_padding(batch: Any, window: int) -> tuple[Any, tuple[bool, ...]]:
    """Return what a step takes, with borrowed batches as themselves; and which they are, or nothing if none is."""
    window_of = (batch,) if window == 1 else batch
    borrowed = tuple(type(b) is Padding for b in window_of)
    if not any(borrowed):
        return batch, ()
    real = tuple(b.batch if lent else b for b, lent in zip(window_of, borrowed, strict=True))
    return (real[0] if window == 1 else real), borrowed
