"""Set the learning rate, or another number of the parameter groups, before each update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from fnloop._core.call import name_of
from fnloop._core.metrics import Last
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.run_length import explain_unknown_length
from fnloop._core.state import SCHEDULED, TrainState, with_slot
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._step.update import report
from fnloop.schedules._schedule import check_schedule

__all__ = ["schedule"]

_Fn = Callable[[int, int | None], float]
_Value = float | Tensor  # of a parameter group
_Group = dict[str, Any]


@middleware("step")
def schedule(fn: _Fn, field: str = "lr") -> Middleware:
    """Set a number of every parameter group before each update.

    The number is its initial value × ``fn(step, total_steps)``. Update i (from 0) uses
    ``fn(i, total)``. Skipped updates do not count. Each group keeps its initial value as
    ``initial_lr``, as torch's schedulers do: to change a learning rate under a schedule, set
    ``group["initial_lr"]``. The value used is the metric "lr" (``lr/1``, ... for further groups).

    The slot ``state.slots["schedule(lr)"]`` holds the total that was used last. A run with another
    total logs one warning if that changes the value.

    Args:
        fn: ``(step, total_steps) -> factor``: one of ``fnloop.schedules``, or your own function.
            ``total_steps`` is None if the length of the run is unknown.
        field: the key of the number in a parameter group: "lr", "weight_decay", "momentum", ...

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: ``fn`` is not a function, or ``field`` is not a key. When it runs: ``fn`` returns
            something other than a number.
        ValueError: when it runs: the groups have no such number, ``fn`` needs a length that is
            unknown, or the value of a group was changed although its initial value was not. A
            tensor that was changed in place is not noticed, because that would need a device read.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(schedule(lambda i, total: 1 - i / total))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([1.0])] * 4, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75 + 0.5 + 0.25
        -2.5
    """
    check_schedule("schedule", fn)
    if not isinstance(field, str) or not field:
        raise TypeError(
            'schedule expects field as the key of a number in the parameter groups, such as "lr"; '
            f"got {checks.describe(field)}"
        )
    name, initial = f"schedule({field})", f"initial_{field}"
    last, last_initial = SCHEDULED + field, SCHEDULED + initial

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            total = state.run.total_steps if state.run else None
            factor = _compute_factor(fn, state, total)
            groups = state.optimizer.param_groups
            for group in groups:
                if initial not in group:
                    group[initial] = _read_number(group, field)
                elif group[field] is not group.get(last):
                    _check_unchanged(group, field, name)
                _set(group, field, group[initial] * factor)
                group[last], group[last_initial] = group[field], group[initial]
            if total != state.slots.get(name, total):
                state = _replan(state, fn, field, total, factor)
            used = {
                f"{field}/{i}" if i else field: Last(_copy(group[field]))
                for i, group in enumerate(groups)
            }
            state, out = step(state, batch)
            return state, report(out, used, "schedule")

        return scheduled

    def init(state: TrainState) -> int | None:
        return state.run.total_steps if state.run else None

    return Middleware(name, step=wrap, init=init)


def _compute_factor(fn: _Fn, state: TrainState, total: int | None) -> float:
    __tracebackhide__ = True
    try:
        factor = fn(state.step, total)
    except (TypeError, ValueError) as error:
        if total is None:
            raise ValueError(explain_unknown_length(f"schedule({name_of(fn)})", state)) from error
        raise
    if type(factor) is not float and not isinstance(factor, Real | Tensor):
        raise TypeError(
            f"schedule({name_of(fn)}) must return a number, the factor on the initial value; "
            f"at step {state.step} of {total} it returned {checks.describe(factor)}"
        )
    return factor


def _check_unchanged(group: _Group, field: str, name: str) -> None:
    """Raise if a group has a new value since the last update, but not a new initial value."""
    __tracebackhide__ = True
    found, last, initial = group[field], group.get(SCHEDULED + field), f"initial_{field}"
    if last is None or _is_same(found, last):
        return
    if not _is_same(group[initial], group.get(SCHEDULED + initial)):
        return
    raise ValueError(
        f'{name}: group["{field}"] is {_format(found)}, but the schedule had set it to '
        f"{_format(last)}, and would overwrite it now. The schedule multiplies the initial value: "
        f'write group["{initial}"] = ..., and leave group["{field}"] as it was '
        f'(group["{field}"] = group["{SCHEDULED}{field}"]); or leave {name} out of the pipeline'
    )


def _is_same(value: _Value | None, other: _Value | None) -> bool:
    """Return whether two numbers are equal, or two tensors identical; no tensor is read."""
    tensors = isinstance(value, Tensor) or isinstance(other, Tensor)
    return value is other or (not tensors and bool(value == other))


def _format(value: _Value) -> str:
    if isinstance(value, Tensor):  # a host read, for the error that ends the run
        return f"the tensor {value.item():g}" if value.numel() == 1 else "a tensor"
    return f"{value:g}"


def _replan(state: TrainState, fn: _Fn, field: str, total: int | None, factor: float) -> TrainState:
    """Return the state with the new total, and warn if the value depends on the total."""
    name = f"schedule({field})"
    before = state.slots[name]
    if total is None:
        return state
    planned: float | None = None
    with contextlib.suppress(Exception):  # the function may be undefined after the planned end
        planned = fn(state.step, before)
    if before is not None and planned != factor and state.backend.main:
        initial = state.optimizer.param_groups[0][f"initial_{field}"]
        unit = f" × initial_{field}" if isinstance(initial, Tensor) else ""
        scale = 1 if unit else initial
        otherwise = "" if planned is None else f" instead of {planned * scale:.3g}{unit}"
        log.warning(
            f"schedule({name_of(fn)}): the run was planned for {before} updates and now has "
            f"{total}: at step {state.step} {field} is {factor * scale:.3g}{unit}{otherwise}"
        )
    return with_slot(state, name, total)


def _read_number(group: _Group, field: str) -> _Value:
    """Return a copy of a number of a group, or raise if the group has no such number."""
    value = group.get(field)
    if not _is_number(value):
        keys = [k for k, v in group.items() if _is_number(v)]
        known = [k for k in keys if not k.startswith(("initial_", SCHEDULED))]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they "
            f"have {', '.join(known)}"
        )
    return _copy(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _copy(value: Any) -> _Value:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: _Group, field: str, value: _Value) -> None:
    current = group[field]
    if isinstance(current, Tensor):
        # The tensor of a capturable optimizer. Unlike copy_, fill_ does not wait for the device.
        current.fill_(value)
    else:
        group[field] = value
