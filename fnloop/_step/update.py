"""The outermost of the three steps, the optimizer's step, and what becomes of its output."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.optim import Optimizer

from fnloop._backend.torch_compat import apply_optimizer
from fnloop._core.metrics import update_, update_loss_
from fnloop._core.state import (
    TrainState,
    advance,
    after_batches,
    all_parameters,
    check_not_stale,
    give_up_ownership,
    parameters,
)
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._step.engine import engine_of

__all__ = ["OPTIMIZER", "consume", "report", "skip_together", "update", "wants_closure"]

OPTIMIZER = "the optimizer's step"  # the name of that layer in messages


def update(step: Step, may_skip: bool = False) -> Step:
    """Return the step that applies the gradients and then clears them.

    Args:
        step: the gradient step.
        may_skip: whether an inner step may skip an update on some processes only. Then all skip it.
    """

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        check_not_stale(state)
        params = all_parameters(state)
        for p in params:
            p.grad = None  # of an earlier batch, if any
        try:
            if wants_closure(type(state.optimizer)):
                return _by_closure(step, state, batch)
            new, out = step(state, batch)
            if may_skip:
                out = skip_together(state, out)
            applied = out.skip is None
            if applied:
                give_up_ownership(new)  # until the optimizer has changed all of the parameters
                apply_optimizer(new.optimizer)
        finally:
            for p in params:
                p.grad = None
        return advance(new, applied), out

    return update


def skip_together(state: TrainState, out: Output) -> Output:
    """Return an output that is skipped if it is skipped on any process. A collective."""
    if engine_of(state).any(out.skip is not None) and out.skip is None:
        return attrs.evolve(out, skip="left out by another process")
    return out


@functools.cache
def wants_closure(optimizer: type[Optimizer]) -> bool:
    """Return whether an optimizer evaluates the loss by itself."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it needs (LBFGS).

    The first evaluation is reported.
    """
    __tracebackhide__ = True
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
    state.optimizer.step(closure)  # type: ignore[arg-type]
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


def consume(state: TrainState, out: Output, batches: int, samples: int = 0) -> TrainState:
    """Return the state with a step's batches counted and its metrics combined into the epoch's.

    A skipped update does not count in the metrics.
    """
    __tracebackhide__ = True
    running = state.metrics
    if out.skip is not None:
        return after_batches(state, batches, samples, running)
    metrics = update_(running, out.metrics) if out.metrics else {**running}
    loss: Any = running.get("loss")
    metrics["loss"] = update_loss_(loss, out.loss, out.weight)
    return after_batches(state, batches, samples, metrics)
