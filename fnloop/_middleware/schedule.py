"""Set the learning rate, or another number of the parameter groups, before each update."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from numbers import Real

from torch import Tensor

from fnloop._core.call import name_of
from fnloop._core.copies import with_slot
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.optimizers import (
    SCHEDULED,
    Group,
    initial_value,
    labelled_groups,
    selected,
    was_scheduled,
)
from fnloop._core.run_length import explain_unknown_length
from fnloop._core.state import TrainState, owns_handles
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._display.log import log
from fnloop._step.rates import RATIO, keep_settings, numbers_used, put_settings_back, set_number
from fnloop._step.update import report
from fnloop.schedules._schedule import check_schedule

__all__ = ["schedule"]

_Fn = Callable[[int, int | None], float]


@middleware("step")
def schedule(fn: _Fn, field: str = "lr", only: str | Sequence[str] | None = None) -> Middleware:
    """Set a number of every parameter group before each update.

    The number is its initial value × ``fn(step, total_steps)``. Update i (from 0) uses
    ``fn(i, total)``. In a phase, i counts from where it began, and the total is its length. Skipped
    updates do not count. Each group keeps its initial value as
    ``initial_lr``, as torch's schedulers do: to change a learning rate under a schedule, set
    ``group["initial_lr"]``. The value used is the metric "lr" (``lr/1``, ... for further groups,
    ``lr/head`` for one with ``group["name"] = "head"``; ``lr/rest``, ``lr/rest/1``, ... with
    several optimizers).

    The slot ``state.slots["schedule(lr)"]`` holds the total that was used last. A run with another
    total logs one warning if that changes the value.

    Args:
        fn: ``(step, total_steps) -> factor``: one of ``fnloop.schedules``, or your own function.
            ``total_steps`` is None if the length of the run is unknown.
        field: the key of the number in a parameter group: "lr", "weight_decay", "momentum", ...
        only: the names of the optimizers whose groups to set, such as ``("rest",)``; all by
            default. A pipeline may have several schedules of one field for different optimizers.

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: ``fn`` is not a function, ``field`` is not a key, or ``only`` has something else
            than names. When it runs: ``fn`` returns something other than a number.
        ValueError: when composing: two schedules set one field of one optimizer, or this and a
            ``torch_scheduler`` set its learning rate. When it runs: there is no optimizer of a name
            in ``only``, the groups have no such number, ``fn`` needs a length that is unknown, or
            the value of a group was changed although its initial value was not. A tensor that was
            changed in place is not noticed, because that would need a device read.

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
    names = _names(only)
    name, initial = _slot_name(field, names), f"initial_{field}"

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            first, total = _stretch(state)
            factor = _compute_factor(fn, state, state.step - first, total)
            groups = labelled_groups(selected(state.optimizer, names, "schedule"))
            kept = keep_settings(groups.values())
            for group in groups.values():
                ratio = group.get(RATIO) if field == "lr" else None
                set_number(group, field, factor if ratio is None else factor * ratio, name)
            used = numbers_used(groups, field)
            numbers = [group[field] for group in groups.values()]
            if total != state.slots.get(name, total):
                group = next(iter(groups.values()))
                state = _replan(state, name, fn, field, group, factor)
            try:
                new, out = step(state, batch)
            except BaseException:
                if owns_handles(state):  # nothing was updated, as where an update is left out
                    put_settings_back(kept, field, numbers)
                raise
            if out.skip is not None:
                put_settings_back(kept, field, numbers)
            return new, report(out, used, "schedule")

        return scheduled

    def init(state: TrainState) -> int | None:
        for group in labelled_groups(selected(state.optimizer, names, "schedule")).values():
            if was_scheduled(group, field):  # as in an earlier phase
                group[initial] = initial_value(group, field)
                group[SCHEDULED + field] = group[field]
        return _stretch(state)[1]

    return Middleware(name, step=wrap, init=init, check=_check_overlap, per_phase=True)


def _names(only: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of optimizers as a tuple; None is all of them."""
    if only is None:
        return None
    given: object = only
    names = (
        (only,) if isinstance(only, str) else tuple(only) if isinstance(given, tuple | list) else ()
    )
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            'schedule expects only as names of optimizers, such as ("rest",), or None for all; got '
            f"{checks.describe(only)}"
        )
    return tuple(names)


def _slot_name(field: str, names: tuple[str, ...] | None) -> str:
    return f"schedule({', '.join((field, *(names or ())))})"


def _check_overlap(listed: Sequence[Middleware]) -> None:
    """Raise if two schedules set one field of one optimizer."""
    found: list[tuple[Middleware, str, set[str] | None]] = []
    for member in listed:
        if member.call is None:
            continue
        factory = member.call.factory
        if factory is not schedule and getattr(factory, "__name__", "") != "torch_scheduler":
            continue
        settings = inspect.signature(factory).bind(*member.call.args, **member.call.kwargs)
        settings.apply_defaults()
        names = _names(settings.arguments.get("only"))
        field = settings.arguments.get("field", "lr")  # what a torch_scheduler sets
        for other, its_field, its_names in found:
            shared = names is None or its_names is None or its_names.intersection(names)
            if field == its_field and shared:
                raise ValueError(
                    f"{other!r} and {member!r} both set {field} of one optimizer: name others with "
                    "only=, or leave one out"
                )
        found.append((member, field, None if names is None else set(names)))


def _stretch(state: TrainState) -> tuple[int, int | None]:
    """Return where the run or its phase began, and how many updates it has, if that is known."""
    run = state.run
    if run is None or run.total_steps is None:
        return 0 if run is None else run.first_step, None
    return run.first_step, run.total_steps - run.first_step


def _compute_factor(fn: _Fn, state: TrainState, step: int, total: int | None) -> float:
    __tracebackhide__ = True
    try:
        factor = fn(step, total)
    except (TypeError, ValueError) as error:
        if total is None:
            raise ValueError(explain_unknown_length(f"schedule({name_of(fn)})", state)) from error
        raise
    if type(factor) is not float and not isinstance(factor, Real | Tensor):
        raise TypeError(
            f"schedule({name_of(fn)}) must return a number, the factor on the initial value; "
            f"at step {step} of {total} it returned {checks.describe(factor)}"
        )
    return factor


def _replan(
    state: TrainState, slot: str, fn: _Fn, field: str, group: Group, factor: float
) -> TrainState:
    """Return the state with the new total, and warn if the value depends on the total.

    Args:
        state: the state.
        slot: the name of the slot.
        fn: the schedule.
        field: what it sets.
        group: the first group.
        factor: what the schedule returns with the new total.
    """
    before, (first, total) = state.slots[slot], _stretch(state)
    if total is None:
        return state
    planned: float | None = None
    with contextlib.suppress(Exception):  # the function may be undefined after the planned end
        planned = fn(state.step - first, before)
    if before is not None and planned != factor and state.backend.main:
        initial = group[f"initial_{field}"]
        unit = f" × initial_{field}" if isinstance(initial, Tensor) else ""
        scale = 1 if unit else initial
        otherwise = "" if planned is None else f" instead of {planned * scale:.3g}{unit}"
        log.warning(
            f"schedule({name_of(fn)}): the run was planned for {before} updates and now has "
            f"{total}: at step {state.step} {field} is {factor * scale:.3g}{unit}{otherwise}"
        )
    return with_slot(state, slot, total)
