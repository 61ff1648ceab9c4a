"""Times as metrics: marks on a device's timeline, the seconds between them, and peaks.

On a GPU a mark is a CUDA event, and the time between two of them is read when a report is made, or
when they have passed already. Elsewhere a mark is the time of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, Self

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import FIELDS

__all__ = ["Elapsed", "Event", "Mark", "Peak", "elapsed", "mark", "wait_and_read_clock"]

SETTLE = 64  # pairs of events to hold before looking which of them have passed


class Event(Protocol):
    """A point on the timeline of a device, as ``torch.cuda.Event``."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Self, /) -> float: ...


Mark = float | Event
Pair = tuple[Event, Event]


def mark(device: torch.device) -> Mark:
    """Return a mark of now, on the timeline of a device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wait_and_read_clock(device: torch.device) -> float:
    """Return the time of the host when a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@attrs.frozen(eq=False)
class Elapsed:
    """Seconds, by an amount: the mean seconds of one, or the amount in a second.

    Args:
        amount: a number or a scalar tensor.
        seconds: those that are known.
        pending: pairs of events whose distance is not known yet.
        is_rate: whether to compute amount / seconds; otherwise seconds / amount.
    """

    amount: float | Tensor
    seconds: float = 0.0
    pending: tuple[Pair, ...] = ()
    is_rate: bool = False

    per_process = True  # each process has its own, also if its step is outside of backward

    def combine(self, other: Elapsed) -> Elapsed:
        """Return that of both."""
        pending = self.pending + other.pending
        both = Elapsed(
            self.amount + other.amount, self.seconds + other.seconds, pending, self.is_rate
        )
        return both.settled(wait=False) if len(pending) > SETTLE else both

    def settled(self, wait: bool = True) -> Elapsed:
        """Return the same with the distances of events read: of all, or of those that passed."""
        seconds, pending = self.seconds, []
        for start, end in self.pending:
            if wait:
                end.synchronize()
            if wait or end.query():
                seconds += start.elapsed_time(end) / 1000
            else:
                pending.append((start, end))
        return attrs.evolve(self, seconds=seconds, pending=tuple(pending))

    def compute(self) -> float:
        """Return the mean or the rate; NaN if it would divide by 0."""
        amount, seconds = float(self.amount), self.settled().seconds
        above, below = (amount, seconds) if self.is_rate else (seconds, amount)
        return above / below if below else float("nan")

    def to_cpu(self) -> Elapsed:
        """Return a copy that can be sent to another process."""
        return attrs.evolve(self.settled(), amount=float(self.amount))

    def __deepcopy__(self, memo: object) -> Elapsed:
        return self.settled()  # an event cannot be copied

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"amount": self.amount, "seconds": self.settled().seconds}

    def from_parts(self, parts: Mapping[str, object]) -> Elapsed:
        """Return the metric that was saved."""
        amount = parts["amount"]
        if isinstance(amount, Tensor) and isinstance(self.amount, Tensor):
            amount = amount.to(self.amount.device)
        return attrs.evolve(self, amount=amount, seconds=parts["seconds"], pending=())


FIELDS[Elapsed] = ("amount", "seconds", "pending", "is_rate")  # read with those of other metrics


def elapsed(
    amount: float | Tensor, start: Mark, end: Mark, *, more: float = 0.0, is_rate: bool = False
) -> Elapsed:
    """Return the seconds between two marks of one kind, and ``more``, by an amount."""
    if isinstance(start, int | float) and isinstance(end, int | float):
        return Elapsed(amount, end - start + more, (), is_rate)
    assert not isinstance(start, int | float) and not isinstance(end, int | float)
    return Elapsed(amount, more, ((start, end),), is_rate)


class Peak:
    """The largest value of a gauge that keeps its own peak, read when a report is made.

    Args:
        gauge: returns the peak since it was last reset, without waiting for the device.
        value: the largest that was read so far.
    """

    per_process = True

    def __init__(self, gauge: Callable[[], float] | None, value: float = 0.0) -> None:
        self.gauge, self.value = gauge, value

    def combine(self, other: Peak) -> Peak:
        """Return the larger of both; the gauge is that of the newer."""
        return Peak(other.gauge, max(self.value, other.value))

    def compute(self) -> float:
        """Return the largest value so far. It is kept, because the gauge may be reset now."""
        if self.gauge is not None:
            self.value = max(self.value, self.gauge())
        return self.value

    def to_cpu(self) -> Peak:
        """Return a copy that can be sent to another process."""
        return Peak(None, self.compute())

    def to_parts(self) -> dict[str, object]:
        """Return what a checkpoint holds."""
        return {"value": self.compute()}

    def from_parts(self, parts: Mapping[str, object]) -> Peak:
        """Return the metric that was saved."""
        value = parts["value"]
        assert isinstance(value, float | int)
        return Peak(self.gauge, value)
