"""An update is a transaction: attempted, then committed to the weights, or put back."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import apply_optimizer
from fnloop._core.code import is_of_library, names_in, walk
from fnloop._core.optimizers import (
    Handle,
    Optimizers,
    check_used,
    explain_untrained,
    optimizers_in,
    wants_closure,
)
from fnloop._core.rng import mark_generators
from fnloop._core.several import Several
from fnloop._core.state import (
    Buffers,
    Ownership,
    TrainState,
    advance_used,
    all_parameters,
    current_parameters,
    parameters,
    with_slots,
    with_used,
)
from fnloop._core.types import Batch, Middleware, Output, Skip, Step, Wrap, skip
from fnloop._display import checks
from fnloop._step.engine import engine_of
from fnloop._step.gradients import fail_to_train

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# An update is a transaction. It is attempted: the gradients are made. Then it is committed by
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
    every = (keep_buffers, *keep)

    def transacted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        put_back = [each(state) for each in every]
        outer, HOST.attempt = HOST.attempt, Attempt(state.slots, put_back, keep)
        made = None
        try:
            new, out = judged(state, batch)
            made = out
        finally:
            HOST.attempt = outer  # a middleware may call a step of another state
            HOST.settle(state, made, put_back)
        return new, out

    return transacted


def may_skip(loss_fn: object) -> bool:
    """Return whether a loss function may call :func:`skip`, by the names in its code.

    The code of functions that it refers to is looked at too. What is known by this is whether
    buffers have to be copied before each update, so that they can be restored: other loss functions
    do not pay for that.
    """
    return any(
        value is skip
        or isinstance(value, Skip)
        or (
            isinstance(value, FunctionType)
            and not is_of_library(value)
            and "skip" in names_in(value)
        )
        for value in walk((loss_fn,), lambda value: not is_of_library(value))
    )


def may_skip_in(members: Iterable[Middleware], *rings: str) -> bool:
    """Return whether third-party middleware in these rings may skip a batch or an update."""
    users = [m for m in members if not m.is_ours]
    return any(not m.wraps.keys().isdisjoint(rings) for m in users)


def agreeing(step: Step) -> Step:
    """Return a step that skips an update on all processes if it does so on one."""

    def agreed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        state, out = step(state, batch)
        return state, engine_of(state).agree(out)[0]

    return agreed


def around(step: Step, keep: Keep) -> Step:
    """Return a step of the step ring, with what it keeps as in a transaction."""

    def kept(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        put_back, made = keep(state), None
        try:
            new, out = step(state, batch)
            made = out
        finally:
            HOST.settle(state, made, [put_back])
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


# By model: its parameters when its buffers were looked up, and these.
_buffers: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]] = WeakKeyDictionary()


def keep_buffers(state: TrainState) -> PutBack:
    """Keep the buffers of a model, such as running statistics, for a transaction."""
    params = current_parameters(state).found
    found, buffers = _buffers.get(state.model, (None, None))
    if buffers is None or found is not params:  # its parameters were looked up again
        buffers = Buffers(state.model)
        _buffers[state.model] = params, buffers
    return functools.partial(buffers.keep().put_back, unseen=True)


# --------------------------------------------------------------------------------------------------
# The outermost of the three steps, that of the optimizers, which commits an update.

OPTIMIZER = "the optimizer's step"  # the name of that layer in messages


def update(
    step: Step, name: str, by_closure: bool = False, used: tuple[str, ...] | None = None
) -> Step:
    """Return the step that applies the gradients, unless they are left out, and then clears them.

    Args:
        step: the gradient step: a :func:`transaction`, if it may skip an update.
        name: the name of the loss function.
        by_closure: whether to give the optimizer a closure that it could do without.
        used: the names of the optimizers to update with; None: all.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        cache = current_parameters(state, beginning=True)
        params = cache.found
        for p in params:
            p.grad = None  # of an earlier batch, if any
        try:
            own = state if used is None else with_used(state, used)
            cache = cache if used is None else current_parameters(own)
            if not cache.apart:
                check_used(state.model, state.optimizer, used)
                cache.apart = True
            if by_closure or _evaluates(own.optimizer):  # then there is only one
                new, out = _by_closure(step, own, batch)
            else:
                new, out = step(own, batch)
                if out.skip is None:
                    if not cache.checked:
                        _check_gradients(new, out, name, state.optimizer)
                    Ownership.give_up(new)  # until all of the parameters have changed
                    apply, given = HOST.apply, new.optimizer
                    ones = [*given.values()] if type(given) is Optimizers else [given]
                    if isinstance(new.model, Several):
                        new.model.update(ones, apply, apply is not apply_optimizer)
                    else:
                        for one in ones:
                            apply(one)
        finally:
            for p in params:
                p.grad = None
        applied = out.skip is None
        if used is not None:
            return advance_used(state, new, applied), out
        return Ownership.advance(new, applied), out

    return update


def _evaluates(optimizer: Handle) -> bool:
    """Return whether the only optimizer evaluates the loss by itself."""
    if type(optimizer) is Optimizers:
        return len(optimizer) == 1 and wants_closure(type(next(iter(optimizer.values()))))
    return wants_closure(type(optimizer))


def _check_gradients(state: TrainState, out: Output, name: str, whole: Handle) -> None:
    """Check which parameters have a gradient, in the first update and after each change of them.

    Raises:
        ValueError: none of those that the optimizers update has one.
    """
    __tracebackhide__ = True
    if out.weight.__class__ is int and not out.weight:  # this process had no batch
        return
    cache, optimizers = current_parameters(state), optimizers_in(whole).values()
    if all(p.grad is None for p in cache.trained):
        fail_to_train(state, name, any(p.grad is not None for p in cache.found))
    cache.checked = True
    if not cache.has_changed or not state.backend.main:  # a run says it when it begins
        return
    if (untrained := explain_untrained(state.model, optimizers)) is not None:
        log.warning("update %d: %s", state.step + 1, untrained)


def _only(optimizer: Handle) -> Handle:
    """Return the only optimizer of an update that calls it with a closure."""
    if type(optimizer) is not Optimizers:
        return optimizer
    if len(optimizer) > 1:
        raise TypeError(
            "closure() calls the step of one optimizer, but this state has several: say which one, "
            f'using("{next(iter(optimizer))}"), or leave closure() out of the pipeline'
        )
    return next(iter(optimizer.values()))


@functools.cache
def _check_takes_closure(optimizer: type[Optimizer]) -> None:
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"{optimizer.__name__}.step takes no closure: leave closure() out of the pipeline"
        )


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it needs (LBFGS).

    The first evaluation is reported.
    """
    __tracebackhide__ = True
    optimizer = _only(state.optimizer)
    _check_takes_closure(type(optimizer))
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        __tracebackhide__ = True
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(
                f"{type(optimizer).__name__} cannot skip an update ({replies[-1][1].skip})"
            )
        return engine_of(state).mean_loss(replies[-1][1])

    # The optimizer may change the parameters before, between and after its evaluations.
    Ownership.give_up(state)
    optimizer.step(closure)
    return replies[0]


# --------------------------------------------------------------------------------------------------
# The host of updates: what an update leaves to it, and what stands in for it.

Judge = Callable[[TrainState, bool], str | None]
Ask = Callable[[TrainState, Output, Tensor, Judge], str | None]


def _read(state: TrainState, out: Output, flag: Tensor, judge: Judge) -> str | None:
    # A host read: whether this update counts decides the step counter, and schedules with it.
    return judge(state, bool(flag))


class Host(threading.local):
    """What the updates of this thread leave to the host. See :func:`host`.

    Attributes:
        apply: calls the step of an optimizer.
        ask: decides whether an update is skipped.
        records: whether updates may be recorded.
        in_part: whether a batch of a window is being taken for itself, and not its update.
        attempt: what the update that is being made goes back to, if it can be skipped.
    """

    apply: Callable[[Optimizer], None] = staticmethod(apply_optimizer)
    ask: Ask = staticmethod(_read)
    records: bool = True
    in_part: bool = False
    attempt: Attempt | None = None

    @contextlib.contextmanager
    def replaced(self, **others: object) -> Iterator[None]:
        """Replace attributes, in this thread and within a ``with`` block."""
        before = {name: getattr(self, name) for name in others}
        vars(self).update(others)
        try:
            yield
        finally:
            vars(self).update(before)

    @property
    def is_recorded(self) -> bool:
        """Whether the update is being recorded: then numbers of the host become constants."""
        return self.ask is not _read

    def decide(
        self, state: TrainState, out: Output, flag: Tensor, judge: Judge
    ) -> tuple[TrainState, Output]:
        """Decide as :func:`fnloop.decide` does, also about a batch of a window."""
        out, agreed = engine_of(state).agree(out, flag)
        if out.skip is not None:
            return state, out
        assert agreed is not None
        skip = self.ask(state, out, agreed, judge)
        if skip is None:
            return state, out
        if self.attempt is not None and not self.in_part:
            state = with_slots(state, self.attempt.slots)
        return state, attrs.evolve(out, skip=skip)

    def settle(self, state: TrainState, out: Output | None, put_back: Sequence[PutBack]) -> None:
        """Put back what a step has changed, unless it has made an update of the weights.

        It has made none if it skips the update, or if it raised before a weight had changed. Call
        it after the step, in ``finally``.

        Args:
            state: the state that the step was given.
            out: the output of the step; None if it raised.
            put_back: functions that undo what the step changes besides the weights.
        """
        if out is not None:
            if out.skip is not None:
                self._undo(put_back)
        elif Ownership.belongs_to(state):
            with contextlib.suppress(RuntimeError):  # the device may be lost
                self._undo(put_back)

    def _undo(self, put_back: Sequence[PutBack]) -> None:
        if not self.is_recorded:  # in a record nothing is computed: a replay does
            for each in put_back:
                each()

    def mark(self, state: TrainState) -> PutBack:
        """Mark a state, for forward and backward that may have to begin again.

        Args:
            state: the state. There is no gradient in ``.grad``.

        Returns:
            What puts back what they have changed: buffers, what middleware keep, random draws, and
            gradients.
        """
        keep = (keep_buffers, *(self.attempt.keep if self.attempt else ()))
        put_back = [each(state) for each in keep]
        put_back += [mark_generators(state.backend.device), engine_of(state).mark_draws()]

        def begin_again() -> None:
            for p in all_parameters(state):
                p.grad = None
            self._undo(put_back)

        return begin_again


HOST = Host()


def host() -> Host:
    """Return what the updates of this thread leave to the host: calls of optimizers, and decisions.

    A middleware may take its place within a ``with`` block, ``host().replaced(...)``, around the
    step that it wraps. In the update ring it gives ``apply``. In the device ring, to record updates
    and replay them without Python, it gives ``ask`` too: an update is split where that is called.

    Returns:
        An object with

        - ``apply``: ``optimizer -> None``, calls the step of an optimizer
        - ``ask``: ``(state, out, flag, judge) -> why the update is skipped, or None``, decides what
          :func:`fnloop.decide` asks, alike in all processes; by default it reads the flag
        - ``records``: whether updates may be recorded; if not, leave them as they are
        - ``in_part``: whether a batch of a window is being taken for itself, and not its update
        - ``replaced(**others)``: replaces these in this thread, within a ``with`` block
        - ``is_recorded``: whether the update is being recorded. Numbers of the host become
          constants then
        - ``attempt``: what the update goes back to if it is skipped, with a list of functions in
          ``attempt.put_back``; None if it cannot be skipped
        - ``decide(state, out, flag, judge)``: as :func:`fnloop.decide`, and of a batch in a window
        - ``settle(state, out, put_back)``: called in ``finally`` after a step, calls the functions
          in the list ``put_back`` if it has made no update; ``out`` is None if it raised
        - ``mark(state)``: before forward and backward that may have to begin again, returns what
          puts back what they have changed: buffers, gradients, and the generators

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def twice(step):
        ...     def updated(state, batch):
        ...         apply = host().apply
        ...         with host().replaced(apply=lambda one: (apply(one), apply(one))):
        ...             return step(state, batch)
        ...     return updated
        >>> step = fl.pipeline(fl.Middleware("twice", update=twice))(toy_loss)
        >>> step(toy(), torch.tensor([3.0]))[0].model.w.item()
        -6.0
    """
    return HOST


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
    if HOST.in_part:
        raise ValueError(
            "decide is about whole updates, but here it is called for each batch of a window: list "
            "the middleware that calls it after accumulate. To leave a batch out of its window, "
            "return skip(reason) from the loss function"
        )
    return HOST.decide(state, out, flag, judge)
