"""Decisions of the host about an update, and who makes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
from torch import Tensor

from fnloop._core.state import TrainState
from fnloop._core.types import Output

__all__ = ["EagerHost", "Host", "Judge", "host_decision", "is_recorded", "replace_host"]

Judge = Callable[[TrainState, bool], str | None]


class Host(Protocol):
    """What decides whether to apply an update."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge, /) -> str | None:
        """Return why to skip the update, or None. See :func:`host_decision`."""
        ...


class EagerHost:
    """Reads the flag and decides at once."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
        # A host read: whether this update counts decides the step counter, and schedules with it.
        return judge(state, bool(flag))


class _Current(threading.local):
    host: Host = EagerHost()


_current = _Current()


def host_decision(
    state: TrainState, out: Output, flag: Tensor, judge: Judge
) -> tuple[TrainState, Output]:
    """Decide on the host whether to apply an update, from a flag computed on the device.

    Args:
        state: the state.
        out: the output so far.
        flag: a scalar.
        judge: ``(state, flag) -> why to skip the update, or None``. It may change its slot, in
            place, only when it skips the update, because an applied one may still fail.

    Returns:
        What a step returns. While an update is recorded, the record is split here, and the host
        decides between its two parts whenever they are replayed.
    """
    skip = _current.host.decide(state, out, flag, judge)
    return state, out if skip is None else attrs.evolve(out, skip=skip)


def is_recorded() -> bool:
    """Return whether the update is being recorded: then numbers of the host become constants."""
    return not isinstance(_current.host, EagerHost)


@contextlib.contextmanager
def replace_host(host: Host) -> Iterator[None]:
    """Let another host decide in this thread, within a ``with`` block."""
    before, _current.host = _current.host, host
    try:
        yield
    finally:
        _current.host = before
