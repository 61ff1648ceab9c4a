"""What a run has read of its items: at once, or one update later where they are on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from fnloop._core.metrics import ITEMS, items_so_far
from fnloop._core.types import Metric

# The items of all applied updates are counted among the running metrics, see `items_so_far`. Where
# weights are numbers, that count is one. Where they are tensors it is on the device, and a decision
# that depends on it would have to wait for the update. So the count of the update before is used,
# whose copy to the host has been under way since then. Which of the two is used depends on the
# weights alone, on a CPU too, and checkpoints have what was read: so results agree.


class HostCopy:
    """A number on its way to the host. :meth:`read` waits for it, and for no later work.

    Args:
        value: a scalar tensor.
    """

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._value, self._event = value, None
        if value.device.type == "cuda":
            self._value = torch.empty((), dtype=value.dtype, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(value.device))

    def read(self) -> float:
        """Return the number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)


class _Unread:
    """The items of a process before an update, which nothing has read yet.

    Args:
        running: the running metrics before the update. The items in them never change in place.
        in_first_epoch: whether there was no epoch before theirs.
    """

    __slots__ = ("_in_first_epoch", "_running")

    def __init__(self, running: Mapping[str, Metric], in_first_epoch: bool) -> None:
        self._running = {name: running[name] for name in ("loss", ITEMS) if name in running}
        self._in_first_epoch = in_first_epoch

    def read(self) -> float:
        """Return the number. It waits for the device."""
        return items_so_far(self._running, self._in_first_epoch).compute()


@attrs.frozen(eq=False)
class Counted:
    """What is known of the items of all applied updates.

    Args:
        now: how many there are, over all processes; NaN if that is unknown, as in a state of an
            older version, and None if they were not read since the newest update.
        before: the same before the newest update; None if they were not read then.
        is_late: whether a weight was a tensor, so that ``now`` leaves the newest update out.
        late: then, the items of this process before the newest update, unless they were read.
        copy: then, those of this process with the newest update, which are read after the next
            one; None if the run does not follow them.
    """

    now: float | None = None
    before: float | None = None
    is_late: bool = False
    late: HostCopy | _Unread | None = None
    copy: HostCopy | None = None

    def after(
        self, weight: float | Tensor, running: Mapping[str, Metric], in_first_epoch: bool
    ) -> Counted:
        """Return what is known after an applied update.

        Args:
            weight: the items of the update.
            running: the running metrics before it.
            in_first_epoch: whether there was no epoch before theirs.
        """
        if not self.is_late and not isinstance(weight, Tensor):
            return UNREAD if self.now is None else Counted(before=self.now)
        late = self.copy or _Unread(running, in_first_epoch)
        return Counted(before=self.now, is_late=True, late=late)

    def own(self, running: Mapping[str, Metric], in_first_epoch: bool) -> float:
        """Return the items of this process; NaN if they are unknown.

        Args:
            running: the running metrics.
            in_first_epoch: whether there was no epoch before theirs.
        """
        if self.late is not None:
            return self.late.read()
        items = items_so_far(running, in_first_epoch).value
        return items if items.__class__ is int else float(items)

    def read(
        self, now: float, running: Mapping[str, Metric], in_first_epoch: bool, follow: bool
    ) -> Counted:
        """Return what is known once the items were read.

        Args:
            now: the items of all processes.
            running: the running metrics.
            in_first_epoch: whether there was no epoch before theirs.
            follow: whether they are read after the next update too.
        """
        copy = None
        if follow and self.is_late:
            count = items_so_far(running, in_first_epoch).value
            copy = HostCopy(count) if isinstance(count, Tensor) else None
        return Counted(as_count(now), self.before, self.is_late, copy=copy)


UNREAD = Counted()
NONE_YET = Counted(now=0)  # before the first update


def as_count(number: float) -> float:
    """Return a number of items: an int if it is one."""
    if number.__class__ is int:
        return number
    return int(number) if float(number).is_integer() else number


# --- in checkpoints


def encode_counted(counted: Counted) -> dict[str, object]:
    """Return what was read of the items as JSON."""
    numbers = [counted.now, counted.before]
    known = [None if number is None or math.isnan(number) else number for number in numbers]
    return {"items": {"now": known[0], "before": known[1], "late": counted.is_late}}


def decode_counted(saved: object) -> Counted:
    """Return what was read of the items from JSON.

    Raises:
        TypeError: it was not written by :func:`encode_counted`.
    """
    match saved:
        case None:  # a checkpoint in which the metrics say it, or of an older version
            return UNREAD
        case {"now": now, "before": before, "late": bool(late)} if _is_count(now) and _is_count(
            before
        ):
            return Counted(math.nan if now is None else now, before, late)
    raise TypeError(f"items is {saved!r:.60}")


def _is_count(value: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < math.inf)  # type: ignore
