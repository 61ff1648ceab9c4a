"""The outermost of the three steps, that of the optimizers, and what becomes of its output."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from weakref import WeakKeyDictionary

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import apply_optimizer
from fnloop._core.copies import Buffers
from fnloop._core.optimizers import Optimizers, optimizers_in, wants_closure
from fnloop._core.skip import BY_ANOTHER
from fnloop._core.state import (
    TrainState,
    advance,
    begin_update,
    give_up_ownership,
    parameters,
)
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._step.engine import engine_of
from fnloop._step.host import Before, is_recorded, within_update

__all__ = [
    "CLOSURE",
    "CREATE_GRAPH",
    "OPTIMIZER",
    "replace_apply",
    "report",
    "skip_together",
    "update",
]

CLOSURE, CREATE_GRAPH = "closure", "closure(create_graph)"  # names of middleware
OPTIMIZER = "the optimizer's step"  # the name of that layer in messages


class _Current(threading.local):
    apply: Callable[[Optimizer], None] = staticmethod(apply_optimizer)


_current = _Current()


@contextlib.contextmanager
def replace_apply(apply: Callable[[Optimizer], None]) -> Iterator[None]:
    """Apply optimizers by another function in this thread, within a ``with`` block."""
    before, _current.apply = _current.apply, apply
    try:
        yield
    finally:
        _current.apply = before


def update(
    step: Step, may_skip: bool = False, by_closure: bool = False, guarded: bool = False
) -> Step:
    """Return the step that applies the gradients and then clears them.

    Args:
        step: the gradient step.
        may_skip: whether an inner step may skip an update on some processes only. Then all skip it.
        by_closure: whether to give the optimizer a closure that it could do without.
        guarded: whether an inner step may leave an update out. Then buffers are put back, such as
            running statistics, which its forward has changed.
    """
    known: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]] = WeakKeyDictionary()

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        params = begin_update(state)
        for p in params:
            p.grad = None  # of an earlier batch, if any
        try:
            if by_closure or wants_closure(type(state.optimizer)):  # then there is only one
                return _by_closure(step, state, batch)
            if guarded:
                before = Before(state, _buffers_of(state, params, known).keep())
                with within_update(before):
                    new, out = step(state, batch)
            else:
                before = None
                new, out = step(state, batch)
            if may_skip:
                out = skip_together(state, out)
            applied = out.skip is None
            if before is not None and not applied and not is_recorded():  # a graph does it itself
                before.buffers.put_back(unseen=True)
            if applied:
                give_up_ownership(new)  # until all of the parameters have changed
                apply = _current.apply
                for optimizer in optimizers_in(new.optimizer).values():
                    apply(optimizer)
        finally:
            for p in params:
                p.grad = None
        return advance(new, applied), out

    return update


def _buffers_of(
    state: TrainState,
    params: list[Tensor],
    known: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Buffers]],
) -> Buffers:
    """Return the buffers of a model, looked up again when its parameters are."""
    found, buffers = known.get(state.model, (None, None))
    if buffers is None or found is not params:
        buffers = Buffers(state.model)
        known[state.model] = params, buffers
    return buffers


def skip_together(state: TrainState, out: Output) -> Output:
    """Return an output that is skipped if it is skipped on any process. A collective."""
    if engine_of(state).any(out.skip is not None) and out.skip is None:
        return attrs.evolve(out, skip=BY_ANOTHER)
    return out


@functools.cache
def _check_takes_closure(optimizer: type[Optimizer | Optimizers]) -> None:
    if issubclass(optimizer, Optimizers):
        raise TypeError(
            "closure() calls the step of one optimizer, but this state has several: give all "
            "parameters to one, or leave closure() out of the pipeline"
        )
    if "closure" not in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"{optimizer.__name__}.step takes no closure: leave closure() out of the pipeline"
        )


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it needs (LBFGS).

    The first evaluation is reported.
    """
    __tracebackhide__ = True
    _check_takes_closure(type(state.optimizer))
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        __tracebackhide__ = True
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(
                f"{type(state.optimizer).__name__} cannot skip an update ({replies[-1][1].skip})"
            )
        return engine_of(state).mean_loss(replies[-1][1])

    # The optimizer may change the parameters before, between and after its evaluations.
    give_up_ownership(state)
    state.optimizer.step(closure)
    new, out = replies[0]
    return advance(new, applied=True), out


def report(out: Output, metrics: Mapping[str, Metric], by: str) -> Output:
    """Return an output with more metrics.

    Raises:
        ValueError: it has a metric of that name already.
    """
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(
            f"{by} reports the metric {name!r}, which another middleware inside it reports "
            "already: rename one"
        )
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics}, out.skip)
