"""An update is a transaction: whether it is left out is decided here, and what is restored."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn

from fnloop._core.rng import mark_generators
from fnloop._core.state import (
    Buffers,
    TrainState,
    all_parameters,
    current_parameters,
    owns_handles,
    with_slots,
)
from fnloop._core.types import Batch, Middleware, Output, Step, Wrap, is_ours, wraps_of
from fnloop._display import checks
from fnloop._step.engine import engine_of
from fnloop._step.gradients import skipped_with

# --------------------------------------------------------------------------------------------------
# An update is a transaction. It is attempted: the gradients are made. Then it is applied by
# `update`, or what the attempt has changed is put back. What leaves an update out sets `out.skip`,
# and undoes nothing by itself. The list of what is put back has the buffers, what schedules have
# set, and what middleware keep. Weights and optimizers need no place in it: an attempt does not
# change them.

PutBack = Callable[[], object]
Keep = Callable[[TrainState], PutBack]


class Attempt(NamedTuple):
    """What an update that is skipped goes back to.

    Args:
        slots: the slots of the state that the update was given.
        put_back: functions that undo what the update has changed.
        keep: what middleware keep, to be kept again within the update.
    """

    slots: Mapping[str, object]
    put_back: Sequence[PutBack]
    keep: Sequence[Keep]


def transaction(step: Step, members: Sequence[Middleware], leaves_out: bool) -> Step:
    """Return a gradient step that leaves nothing changed where it skips an update.

    It is the step itself if nothing can leave one out, and costs nothing then.

    Args:
        step: the gradient step.
        members: the middleware of the pipeline.
        leaves_out: whether the function that is trained may skip a batch.
    """
    keep = [m.keep for m in members if m.keep is not None and m.step is None]
    leaves_out |= may_skip_in(members, "forward", "loss", "gradient")
    if not (leaves_out or keep or any("skips" in m.traits for m in members)):
        return step
    judged = agreeing(step) if may_skip_in(members, "gradient") else step
    every = (keeping_buffers(), *keep)

    def transacted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        put_back = [each(state) for each in every]
        outer, _current.attempt = _current.attempt, Attempt(state.slots, put_back, keep)
        made = None
        try:
            new, out = judged(state, batch)
            made = out
        finally:
            _current.attempt = outer  # a middleware may call a step of another state
            settle(state, made, put_back)
        return new, out

    return transacted


def may_skip_in(members: Iterable[Middleware], *rings: str) -> bool:
    """Return whether third-party middleware in these rings may skip a batch or an update."""
    users = [m for m in members if not is_ours(m)]
    return any(not wraps_of(m).keys().isdisjoint(rings) for m in users)


def agreeing(step: Step) -> Step:
    """Return a step that skips an update on all processes if it does so on one."""

    def agreed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, batch)
        return state, skip_together(state, out)

    return agreed


def settle(state: TrainState, out: Output | None, put_back: Sequence[PutBack]) -> None:
    """Put back what a step has changed, unless it has made an update of the weights.

    It has made none if it skips the update, or if it raised before a weight had changed. It
    is called after the step, in ``finally``, so that it adds no frame to a traceback.

    Args:
        state: the state that the step was given.
        out: the output of the step; None if it raised.
        put_back: functions that undo what the step changes besides the weights.
    """
    if out is not None:
        if out.skip is not None:
            undo(put_back)
    elif owns_handles(state):
        with contextlib.suppress(RuntimeError):  # the device may be lost
            undo(put_back)


def undo(put_back: Sequence[PutBack]) -> None:
    """Put back what an update has changed that was left out."""
    if is_recorded():  # nothing was computed: a replay does
        return
    for each in put_back:
        each()


def repeating() -> Keep:
    """Return what marks a state, for forward and backward that may have to begin again.

    What it returns puts back what they have changed: buffers, what middleware keep, random draws,
    and gradients, which must not be there when the state is marked.
    """
    keep_buffers = keeping_buffers()

    def mark(state: TrainState) -> PutBack:
        kept = [each(state) for each in _current.attempt.keep] if _current.attempt else []
        generators = mark_generators(state.backend.device)
        put_back = [keep_buffers(state), *kept, generators, engine_of(state).mark_draws()]

        def begin_again() -> None:
            for p in all_parameters(state):
                p.grad = None
            undo(put_back)

        return begin_again

    return mark


def around(step: Step, keep: Keep) -> Step:
    """Return a step of the step ring, with what it keeps as in a transaction."""

    def kept(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        put_back, made = keep(state), None
        try:
            new, out = step(state, batch)
            made = out
        finally:
            settle(state, made, [put_back])
        return new, out

    return kept


def then(act: Callable[[TrainState, Batch, Output], tuple[TrainState, Output]]) -> Wrap:
    """Return a wrap that acts after a step, unless the step skips its update or its batch.

    Args:
        act: ``(state, batch, out) -> (state, out)``, with what the step has returned. Messages name
            the layer by the name of the function.

    Returns:
        A wrap for any ring of a middleware.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> @fl.middleware("gradient")
        ... def halved():
        ...     def halve(state, batch, out):
        ...         for p in state.model.parameters():
        ...             p.grad.mul_(0.5)
        ...         return state, out
        ...     return then(halve)
        >>> state, out = fl.pipeline(halved())(toy_loss)(toy(), torch.tensor([4.0]))
        >>> state.model.w.item()
        -2.0
    """

    def wrap(step: Step) -> Step:
        def acting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            return (state, out) if out.skip is not None else act(state, batch, out)

        # A code of its own, by which errors name the middleware.
        acting.__code__ = acting.__code__.replace(co_name=act.__name__)
        return acting

    return wrap


def keeping_buffers() -> Keep:
    """Return what keeps the buffers of a model, such as running statistics, for a transaction."""
    known: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]] = WeakKeyDictionary()

    def keep(state: TrainState) -> PutBack:
        params = current_parameters(state).found
        found, buffers = known.get(state.model, (None, None))
        if buffers is None or found is not params:  # its parameters were looked up again
            buffers = Buffers(state.model)
            known[state.model] = params, buffers
        return functools.partial(buffers.keep().put_back, unseen=True)

    return keep


def skip_together(state: TrainState, out: Output) -> Output:
    """Return an output that is skipped if it is skipped on any process. A collective."""
    return skipped_with(engine_of(state).largest(out.skip is not None), out)


# --------------------------------------------------------------------------------------------------
# Decisions of the host about an update, and who makes them.

Judge = Callable[[TrainState, bool], str | None]


class Host(Protocol):
    """What decides whether to apply an update."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge, /) -> str | None:
        """Return why to skip the update, or None. See :func:`decide`."""
        ...


class EagerHost:
    """Reads the flag and decides at once."""

    def decide(self, state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
        # A host read: whether this update counts decides the step counter, and schedules with it.
        return judge(state, bool(flag))


class _Current(threading.local):
    host: Host = EagerHost()
    eager: bool = False
    attempt: Attempt | None = None  # of the update that is being made, if it may be left out
    in_part: bool = False  # whether a batch of a window is being taken for itself


_current = _Current()


def decide(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> tuple[TrainState, Output]:
    """Decide on the host whether an update is applied, by a flag that was computed on the device.

    Use it in your own guards, that is, middleware of the gradient ring that skip updates. A skipped
    update changes nothing but the position in the data and ``state.skipped``: the buffers of the
    model, such as running statistics, and slots are restored. The flag is read once. If it is set
    in one process, it counts as set in all. Within ``cuda_graph`` the graph is split here: its
    first part is replayed, the host decides, and the rest is replayed only if the update is
    applied.

    Args:
        state: the state.
        out: the output so far.
        flag: a scalar tensor.
        judge: ``(state, flag) -> why the update is skipped, or None``, with the flag as a bool. It
            may change its slot, in place, only if it skips the update: an applied one may
            still fail.

    Returns:
        What a step returns. ``out.skip`` is what the judge returned.

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

    Notes:
        An update that is skipped already stays skipped, and the judge is not called. With several
        processes, each must call this in every update. List the middleware after ``accumulate``.
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
    if _current.attempt is not None and not _current.in_part:
        state = with_slots(state, _current.attempt.slots)
    return state, attrs.evolve(out, skip=skip)


@contextlib.contextmanager
def in_parts() -> Iterator[None]:
    """Take each batch of a window for itself, within a ``with`` block."""
    outer, _current.in_part = _current.in_part, True
    try:
        yield
    finally:
        _current.in_part = outer


def current_attempt() -> Attempt | None:
    """Return the attempt of the update that is being made; None if it cannot be left out."""
    return _current.attempt


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
