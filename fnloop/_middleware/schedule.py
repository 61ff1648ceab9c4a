"""Schedules: any number of a parameter group as a function of the updates applied."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any

import attrs
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fnloop._core.call import name_of
from fnloop._core.metrics import Last
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.run_info import RunInfo
from fnloop._core.state import SCHEDULED, UPDATE, TrainState, with_slot
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._display.checks import described
from fnloop._display.log import log
from fnloop._step.update import report
from fnloop.schedules._schedule import check_schedule

__all__ = ["schedule", "torch_scheduler"]


@middleware("step")
def schedule(fn: Callable[[int, int | None], float], field: str = "lr") -> Any:
    """Set a number of every parameter group before each update: its initial value × ``fn(step, total_steps)``.

    Update i (from 0) uses ``fn(i, total)``. What was skipped doesn't count. The initial value of a group is kept in the
    group itself as ``initial_lr``, as torch's schedulers do: to change a learning rate under a schedule, set
    ``group["initial_lr"]``. The value used is the metric "lr" (``lr/1``, ... for further groups).

    The slot ``state.slots["schedule(lr)"]`` is the total that was used last. A run with another one says so once, in a
    warning, where the value is another one for it.

    Args:
        fn: ``(step, total_steps) -> factor``: one of ``fnloop.schedules``, or any function. ``total_steps`` is None
            where the length of the run isn't known.
        field: which number of a parameter group: "lr", "weight_decay", "momentum", ...

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: ``fn`` is not a function, or ``field`` not a name. When it runs: ``fn`` returns something else than a
            number.
        ValueError: when it runs: the groups have no such number, ``fn`` needs a length that isn't known, or a group has
            another value than the schedule had set and the same initial value. A tensor that was changed in place
            is not seen, as that takes a host read.

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
            f'schedule expects field as the name of a number of the parameter groups, such as "lr"; got {described(field)}'
        )
    name, initial = f"schedule({field})", f"initial_{field}"
    last, last_initial = SCHEDULED + field, SCHEDULED + initial

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            total = state.run.total_steps if state.run else None
            factor = _factor(fn, state, total)
            groups = state.optimizer.param_groups
            for group in groups:
                if initial not in group:
                    group[initial] = _number(group, field)
                elif group[field] is not group.get(last):
                    _check_own(group, field, name)
                _set(group, field, group[initial] * factor)
                group[last], group[last_initial] = group[field], group[initial]
            if total != state.slots.get(name, total):
                state = _replanned(state, fn, field, total, factor)
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


def _factor(fn: Callable[[int, int | None], float], state: TrainState, total: int | None) -> float:
    __tracebackhide__ = True
    try:
        factor = fn(state.step, total)
    except (TypeError, ValueError) as error:
        if total is None:
            raise ValueError(_unknown_length(f"schedule({name_of(fn)})", state)) from error
        raise
    if type(factor) is not float and not isinstance(factor, Real | Tensor):
        raise TypeError(
            f"schedule({name_of(fn)}) must return a number, the factor on the initial value; at step {state.step} of {total} "
            f"it returned {described(factor)}"
        )
    return factor


def _check_own(group: dict[str, Any], field: str, name: str) -> None:
    """Raise if a group has another number than the schedule has set, unless it has another initial number too."""
    __tracebackhide__ = True
    found, last, initial = group[field], group.get(SCHEDULED + field), f"initial_{field}"
    if (
        last is None
        or _same(found, last)
        or not _same(group[initial], group.get(SCHEDULED + initial))
    ):
        return
    raise ValueError(
        f'{name}: group["{field}"] is {_shown(found)}, and the schedule had set it to {_shown(last)}: it would be overwritten. '
        f'The schedule multiplies the initial value: write group["{initial}"] = ..., and leave group["{field}"] as it was '
        f'(group["{field}"] = group["{SCHEDULED}{field}"]); or leave {name} out of the pipeline'
    )


def _same(value: Any, other: Any) -> bool:
    """Return whether two numbers are equal, or two tensors one and the same: what is in them is not read."""
    tensors = isinstance(value, Tensor) or isinstance(other, Tensor)
    return value is other or (not tensors and bool(value == other))


def _shown(value: float | Tensor) -> str:
    if isinstance(value, Tensor):  # a host read, for the error that ends the run
        return f"the tensor {value.item():g}" if value.numel() == 1 else "a tensor"
    return f"{value:g}"


def _replanned(
    state: TrainState,
    fn: Callable[[int, int | None], float],
    field: str,
    total: int | None,
    factor: Any,
) -> TrainState:
    """Return the state of a run that has another length than was known before; warn if the value depends on it."""
    name = f"schedule({field})"
    before = state.slots[name]
    if total is None:
        return state
    planned: Any = None
    with contextlib.suppress(
        Exception
    ):  # a function of the user's may end where the run was to end
        planned = fn(state.step, before)
    if before is not None and planned != factor and state.backend.main:
        initial = state.optimizer.param_groups[0][f"initial_{field}"]
        unit = f" × initial_{field}" if isinstance(initial, Tensor) else ""
        scale = 1 if unit else initial
        otherwise = "" if planned is None else f", and would have been {planned * scale:.3g}{unit}"
        log.warning(
            f"schedule({name_of(fn)}): the run was planned for {before} updates and now has {total}: at step {state.step} "
            f"{field} is {factor * scale:.3g}{unit}{otherwise}"
        )
    return with_slot(state, name, total)


def _unknown_length(what: str, state: TrainState) -> str:
    if state.run is None:
        return (
            f"{what} needs the length of the run, which a bare step does not know: call fit(step, state, loaders, ...), "
            "or give every length in steps"
        )
    return f"{what} needs the length of the run, but the training loader has none: call fit(step, state, loaders, steps=...)"


def _number(group: dict[str, Any], field: str) -> float | Tensor:
    value = group.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        kinds = (
            k
            for k, v in group.items()
            if isinstance(v, int | float | Tensor) and not isinstance(v, bool)
        )
        numbers = [k for k in kinds if not k.startswith(("initial_", SCHEDULED))]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they have {', '.join(numbers)}"
        )
    return _copy(value)


def _copy(value: float | Tensor) -> float | Tensor:
    return value.clone() if isinstance(value, Tensor) else value


def _set(group: dict[str, Any], field: str, value: float | Tensor) -> None:
    if isinstance(
        group[field], Tensor
    ):  # a capturable optimizer: in place, and without waiting for the device, as copy_ would
        group[field].fill_(value)
    else:
        group[field] = value


class _Read(RunInfo):
    """Facts about a run that remember which of its lengths were read: what is made by those holds for them only."""

    def __init__(self, **facts: Any) -> None:
        object.__setattr__(self, "info", RunInfo(**facts))
        object.__setattr__(self, "lengths", {})
        super().__init__(**facts)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name in _LENGTHS:
            self.lengths[name] = value
        return value

    def __repr__(self) -> str:
        return repr(self.info)

    def _repr_html_(self) -> str:
        return self.info._repr_html_()

    def __eq__(self, other: object) -> bool:
        return self.info == (other.info if isinstance(other, _Read) else other)

    def __hash__(self) -> int:
        return hash(self.info)


_LENGTHS = frozenset({"epochs", "total_steps", "steps_per_epoch", "batches_per_epoch", "window"})


@middleware("step")
def torch_scheduler(factory: Callable[[Optimizer, RunInfo], Any]) -> Any:
    """Use a scheduler of ``torch.optim.lr_scheduler``, stepped once after each applied update.

    A scheduler that was made by the length of a run holds for that length: a run of another one raises before its
    first update. The lengths that ``factory`` has read are ``scheduler.made_for``, which checkpoints and snapshots have.

    Args:
        factory: ``(optimizer, run) -> scheduler``, called when the run starts; ``run.total_steps``,
            ``run.steps_per_epoch`` and ``run.epochs`` say how long it is.

    Returns:
        A middleware of the step ring; the scheduler is ``state.slots["torch_scheduler"]``.

    Raises:
        TypeError: ``factory`` is not a function, or what it makes is not a scheduler of torch that steps by itself.
        ValueError: when it runs: a bare step outside a run, with a factory that asks how long the run is; a scheduler of
            another optimizer; a run of another length than the scheduler was made for.

    Example:
        >>> import fnloop as fl, torch
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> from fnloop.testing import toy, toy_loss
        >>> decay = torch_scheduler(lambda opt, run: LinearLR(opt, 1.0, 0.5, total_iters=run.total_steps))
        >>> state = fl.fit(fl.pipeline(decay)(toy_loss), toy(), [torch.tensor([1.0])] * 2, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75
        -1.75
    """
    checks.function(
        "torch_scheduler",
        "factory",
        factory,
        "torch_scheduler(lambda opt, run: ...), a function",
        2,
    )
    name = f"torch_scheduler({name_of(factory)})"

    def init(state: TrainState) -> Any:
        __tracebackhide__ = True
        run = _Read(**attrs.asdict(state.run or RunInfo(), recurse=False))
        try:
            scheduler = factory(state.optimizer, run)
        except TypeError as error:
            if state.run is None or state.run.total_steps is None:
                raise ValueError(_unknown_length(name, state)) from error
            raise
        _check_scheduler(scheduler, state.optimizer, name)
        scheduler.made_for = (
            run.lengths
        )  # the same dict: a function that the scheduler calls may read more of them later
        return scheduler

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            scheduler: Any = state.slots.get("torch_scheduler")
            if made_for := getattr(scheduler, "made_for", None):  # a checkpoint of before has none
                _check_length(made_for, scheduler, state, name)
            used = Last(_copy(state.optimizer.param_groups[0]["lr"]))
            state, out = step(state, batch)
            if UPDATE in state.events:
                with (
                    warnings.catch_warnings()
                ):  # torch takes the copied optimizer of a snapshot for an overridden one
                    warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
                    try:
                        scheduler.step()
                    except ValueError as error:  # OneCycleLR, past its end
                        error.add_note(
                            f"{name}: if the run is longer than the scheduler was made for, {_anew(state)}"
                        )
                        raise
            return state, report(out, {"lr": used}, "torch_scheduler")

        return scheduled

    return Middleware("torch_scheduler", step=wrap, init=init)


def _check_scheduler(scheduler: Any, optimizer: Optimizer, name: str) -> None:
    """Raise unless this is a scheduler of torch that steps by itself, and of this optimizer."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "torch_scheduler steps once per update, but ReduceLROnPlateau steps by a metric: use it in a hook under "
            "every(epochs=1)"
        )
    if not isinstance(scheduler, LRScheduler):
        kind = f"{type(scheduler).__module__}.{type(scheduler).__name__}"
        what = (
            f"{scheduler!r:.60}"
            if scheduler is None or type(scheduler).__module__ == "builtins"
            else f"a {kind}"
        )
        raise TypeError(
            f"{name} must make a torch.optim.lr_scheduler; it made {what}, which is not one. Take one of torch's, or write "
            "what it does as a function of the step: schedule(lambda step, total_steps: ...) in the place of torch_scheduler"
        )
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"{name} made a {type(scheduler).__name__} of another optimizer than the state's, whose learning rate it would "
            f"never set. Make it of the one that it is given: lambda opt, run: {type(scheduler).__name__}(opt, ...)"
        )


def _check_length(made_for: dict[str, Any], scheduler: Any, state: TrainState, name: str) -> None:
    """Raise if a run has other lengths than a scheduler was made for."""
    __tracebackhide__ = True
    for length, value in made_for.items():
        now = getattr(state.run, length, value)  # a bare step has no lengths, and none that differ
        if now != value:
            raise ValueError(
                f"{name}: its {type(scheduler).__name__} was made for a run of {length}={value}, and this run has "
                f"{length}={now}. To continue it, call fit with the epochs= or steps= that it was made for; else {_anew(state)}"
            )


def _anew(state: TrainState) -> str:
    """Say how a scheduler is made anew."""
    on_device = any(isinstance(group["lr"], Tensor) for group in state.optimizer.param_groups)
    back = (
        'group["lr"].copy_(group["initial_lr"])'
        if on_device
        else 'group["lr"] = group["initial_lr"]'
    )
    return (
        "make it anew before fit:\n"
        f"    for group in state.optimizer.param_groups: {back}\n"
        '    state = attrs.evolve(state, slots={k: v for k, v in state.slots.items() if k != "torch_scheduler"})'
    )
