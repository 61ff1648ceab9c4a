"""Schedules: any number of a parameter group as a function of the updates applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fnloop._metrics import Last
from fnloop._state import UPDATE, RunInfo, TrainState
from fnloop._steps import report
from fnloop._types import Batch, Middleware, Output, Step, middleware, name_of
from fnloop.schedules import check_schedule

__all__ = ["schedule", "torch_scheduler"]


@middleware("step")
def schedule(fn: Callable[[int, int | None], float], field: str = "lr") -> Any:
    """Set a number of every parameter group before each update: its initial value × ``fn(step, total_steps)``.

    Update i (from 0) uses ``fn(i, total)``. What was skipped doesn't count. The initial value of a group is kept in the
    group itself as ``initial_lr``, as torch's schedulers do. The value used is the metric "lr" (``lr/1``, ... for
    further groups).

    Args:
        fn: ``(step, total_steps) -> factor``: one of ``fnloop.schedules``, or any function. ``total_steps`` is None
            where the length of the run isn't known.
        field: which number of a parameter group: "lr", "weight_decay", "momentum", ...

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: ``fn`` is no function.
        ValueError: when it runs: the groups have no such number, or ``fn`` needs a length that isn't known.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(schedule(lambda i, total: 1 - i / total))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([1.0])] * 4, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75 + 0.5 + 0.25
        -2.5
    """
    check_schedule("schedule", fn)
    initial = f"initial_{field}"

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            factor = _factor(fn, state)
            groups = state.optimizer.param_groups
            for group in groups:
                if initial not in group:
                    group[initial] = _number(group, field)
                _set(group, field, group[initial] * factor)
            used = {f"{field}/{i}" if i else field: Last(_copy(group[field])) for i, group in enumerate(groups)}
            state, out = step(state, batch)
            return state, report(out, used, "schedule")

        return scheduled

    return Middleware(f"schedule({field})", step=wrap)


def _factor(fn: Callable[[int, int | None], float], state: TrainState) -> float:
    __tracebackhide__ = True
    total = state.run.total_steps if state.run else None
    try:
        return fn(state.step, total)
    except (TypeError, ValueError) as error:
        if total is None:
            raise ValueError(_unknown_length(f"schedule({name_of(fn)})", state)) from error
        raise


def _unknown_length(what: str, state: TrainState) -> str:
    if state.run is None:
        return (
            f"{what} needs the length of the run, which a bare step doesn't know: call fit(step, state, "
            "loaders, ...), or give "
            f"every length in steps"
        )
    return f"{what} needs the length of the run, but the training loader has none: call fit(step, state, loaders, steps=...)"


def _number(group: dict[str, Any], field: str) -> float | Tensor:
    value = group.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        kinds = (k for k, v in group.items() if isinstance(v, int | float | Tensor) and not isinstance(v, bool))
        numbers = [k for k in kinds if not k.startswith("initial_")]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they have {', '.join(numbers)}"
        )
    return _copy(value)


def _copy(value: float | Tensor) -> float | Tensor:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], field: str, value: float | Tensor) -> None:
    if isinstance(group[field], Tensor):  # a capturable optimizer: in place, and without waiting for the device, as copy_ would
        group[field].fill_(value)
    else:
        group[field] = value


@middleware("step")
def torch_scheduler(factory: Callable[[Optimizer, RunInfo], Any]) -> Any:
    """Use a scheduler of ``torch.optim.lr_scheduler``, stepped once after each applied update.

    Args:
        factory: ``(optimizer, run) -> scheduler``, called when the run starts; ``run.total_steps``,
            ``run.steps_per_epoch`` and ``run.epochs`` say how long it is.

    Returns:
        A middleware of the step ring; the scheduler is ``state.slots["torch_scheduler"]``.

    Raises:
        TypeError: ``factory`` is no function, or what it makes is no scheduler that steps by itself.
        ValueError: a bare step outside a run, with a factory that asks how long the run is.

    Example:
        >>> import fnloop as fl, torch
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> from fnloop.testing import toy, toy_loss
        >>> decay = torch_scheduler(lambda opt, run: LinearLR(opt, 1.0, 0.5, total_iters=run.total_steps))
        >>> state = fl.fit(fl.pipeline(decay)(toy_loss), toy(), [torch.tensor([1.0])] * 2, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75
        -1.75
    """
    if not callable(factory):
        raise TypeError(
            f"torch_scheduler expects a function (optimizer, run) -> scheduler; got {factory!r}. Write "
            "torch_scheduler(lambda opt, run: ...)"
        )

    def init(state: TrainState) -> Any:
        __tracebackhide__ = True
        try:
            scheduler = factory(state.optimizer, state.run or RunInfo())
        except TypeError as error:
            if state.run is None or state.run.total_steps is None:
                raise ValueError(_unknown_length(f"torch_scheduler({name_of(factory)})", state)) from error
            raise
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise TypeError(
                "torch_scheduler steps once per update, but ReduceLROnPlateau steps by a metric: use it in a "
                "hook under every(epochs=1)"
            )
        if not hasattr(scheduler, "step") or not hasattr(scheduler, "optimizer"):
            raise TypeError(f"torch_scheduler({name_of(factory)}) must make a torch.optim.lr_scheduler; it made {scheduler!r}")
        return scheduler

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            used = Last(_copy(state.optimizer.param_groups[0]["lr"]))
            state, out = step(state, batch)
            if UPDATE in state.news:
                with warnings.catch_warnings():  # torch takes the copied optimizer of a snapshot for an overridden one
                    warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
                    state.slots["torch_scheduler"].step()
            return state, report(out, {"lr": used}, "torch_scheduler")

        return scheduled

    return Middleware("torch_scheduler", step=wrap, init=init)
