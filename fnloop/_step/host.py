"""Decisions of the host about an update, and who makes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import attrs
from torch import Tensor

from fnloop._core.copies import KeptBuffers, with_slots
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop._display import checks
from fnloop._step.engine import engine_of

__all__ = [
    "Before",
    "EagerHost",
    "Host",
    "Judge",
    "before_update",
    "decide",
    "decide_any",
    "in_parts",
    "is_recorded",
    "leaves_graphs_out",
    "replace_host",
    "within_update",
    "without_graphs",
]

Judge = Callable[[TrainState, bool], str | None]


class Host(Protocol):
    """What decides whether to apply an update."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge, /) -> str | None:
        """Return why to skip the update, or None. See :func:`decide`."""
        ...


class Before(NamedTuple):
    """What an update that is left out goes back to.

    Args:
        state: the state that the update was given.
        buffers: the buffers of the model.
    """

    state: TrainState
    buffers: KeptBuffers


class EagerHost:
    """Reads the flag and decides at once."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
        # A host read: whether this update counts decides the step counter, and schedules with it.
        return judge(state, bool(flag))


class _Current(threading.local):
    host: Host = EagerHost()
    eager: bool = False
    before: Before | None = None  # of the update that is being made, if it may be left out
    in_part: bool = False  # whether a batch of a window is being taken for itself


_current = _Current()


def decide(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> tuple[TrainState, Output]:
    """Decide on the host whether an update is applied, by a flag that was computed on the device.

    It is for guards of your own, in the gradient ring: a middleware that leaves an update out. An
    update that is left out changes nothing but the position in the data and ``state.skipped``: the
    buffers of the model, such as running statistics, and slots are put back. The flag is read once,
    and any process that has it set sets it for all. Within ``cuda_graph`` the graph is split here:
    its first part is replayed, the host decides, and the rest is replayed only if the update is
    applied.

    An update that is left out already stays so, and the judge is not asked. With several processes
    each of them has to call this in every update. List the middleware after ``accumulate``.

    Args:
        state: the state.
        out: the output so far.
        flag: a scalar tensor.
        judge: ``(state, flag) -> why the update is left out, or None``, with the flag as a bool. It
            may change its slot, in place, only if it leaves the update out: an applied one may
            still fail.

    Returns:
        What a step returns. ``out.skip`` is what the judge has said.

    Raises:
        TypeError: the flag is not a scalar tensor, or the judge is not such a function.
        ValueError: it is called for each batch of a window of ``accumulate``.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> @fl.middleware("gradient")
        ... def at_most(limit):
        ...     def judge(state, flag):
        ...         return "the loss is too large" if flag else None
        ...     def wrap(step):
        ...         def guarded(state, batch):
        ...             state, out = step(state, batch)
        ...             return decide(state, out, out.loss > limit, judge)
        ...         return guarded
        ...     return wrap
        >>> state, out = fl.pipeline(at_most(1.0))(toy_loss)(toy(w=2.0), torch.ones(1))
        >>> out.skip, state.step, state.skipped
        ('the loss is too large', 0, 1)
    """
    if not isinstance(flag, Tensor) or flag.numel() != 1:
        raise TypeError(f"decide expects flag as a scalar tensor; got {checks.describe(flag)}")
    if not callable(judge):
        meaning = "judge as a function (state, flag) -> reason, or None"
        raise TypeError(f"decide expects {meaning}; got {checks.describe(judge)}")
    if _current.in_part:
        raise ValueError(
            "decide is about whole updates, but here it is called for each batch of a window: list "
            "the middleware that calls it after accumulate. To leave a batch out of its window, "
            "return skip(reason) from the loss function"
        )
    return decide_any(state, out, flag, judge)


def decide_any(
    state: TrainState, out: Output, flag: Tensor, judge: Judge
) -> tuple[TrainState, Output]:
    """Decide as :func:`decide` does, also about a batch of a window."""
    flag, out = engine_of(state).agree(flag, out)
    if out.skip is not None:
        return state, out
    skip = _current.host.decide(state, out, flag, judge)
    if skip is None:
        return state, out
    if _current.before is not None and not _current.in_part:
        state = with_slots(state, _current.before.state.slots)
    return state, attrs.evolve(out, skip=skip)


def before_update() -> Before | None:
    """Return what the update that is being made goes back to; None if nothing was kept."""
    return _current.before


@contextlib.contextmanager
def within_update(before: Before) -> Iterator[None]:
    """Note what an update goes back to if it is left out, within a ``with`` block."""
    _current.before = before
    try:
        yield
    finally:
        _current.before = None


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Take each batch of a window for itself, within a ``with`` block."""
    outer, _current.in_part = _current.in_part, True
    try:
        yield
    finally:
        _current.in_part = outer


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


def leaves_graphs_out() -> bool:
    """Return whether updates are made without CUDA graphs."""
    return _current.eager


@contextlib.contextmanager
def without_graphs() -> Iterator[None]:
    """Make updates without CUDA graphs in this thread, within a ``with`` block."""
    before, _current.eager = _current.eager, True
    try:
        yield
    finally:
        _current.eager = before
