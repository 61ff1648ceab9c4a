"""What a process has of a window of batches, and the marks in a stream of batches."""

from __future__ import annotations

from typing import NamedTuple

from fnloop._core.types import Batch

__all__ = ["END", "Padding", "Window"]

END = object()


class Padding:
    """A padding batch for a process whose data ran out.

    It contributes nothing to gradients or metrics. It is only run if the forward pass performs
    collectives, in which the other processes would otherwise wait: see
    :class:`fnloop._step.evaluation.CollectiveProbe`.

    Args:
        batch: a batch of another process.
    """

    __slots__ = ("batch",)

    def __init__(self, batch: Batch) -> None:
        self.batch = batch


class Window(NamedTuple):
    """What is known of a window when there are several processes.

    Args:
        batch_size: samples in each of its batches, in every process; 0 if that may differ.
        padding: for each of its batches, whether it is padding; empty if none is.
    """

    batch_size: int = 0
    padding: tuple[bool, ...] = ()
