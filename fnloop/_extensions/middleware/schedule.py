"""Numbers of the parameter groups as a function of time, or of a metric."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, NoReturn, Protocol

import attrs
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fnloop._core.history import Phase
from fnloop._core.metrics import Last
from fnloop._core.records import Record
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState
from fnloop._core.types import LossFn, Middleware, Output, Step, middleware
from fnloop.extend import (
    Batch,
    Fold,
    Monitored,
    Setting,
    all_parameters,
    checks,
    groups,
    host,
    name_of,
    number_in,
    optimizers,
    report,
    set_number,
    warn_once,
    with_slot,
)
from fnloop.schedules import (
    check_schedule,
    explain_unknown_length,
    refuse_torch_scheduler,
    takes_state,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Set the learning rate, or another number of the parameter groups, before each update.

Group = dict[str, Any]  # a parameter group of an optimizer
# Settings that torch refuses below 0 when it makes an optimizer.
_NOT_NEGATIVE = ("lr", "weight_decay", "momentum", "betas", "eps")
Rate = float | Tensor
_Fn = Callable[[int, int | None], float] | Callable[[TrainState], float]


@middleware("step")
def schedule(
    fn: _Fn,
    field: str = "lr",
    only: str | Sequence[str] | None = None,
    *,
    absolute: bool = False,
    by: str = "step",
) -> Middleware:
    """Change the learning rate, or another setting, during a run: ``schedule(cosine(warmup=0.1))``.

    Before each update, the setting becomes its initial value × ``fn(step, total_steps)`` in every
    parameter group. Update i (from 0) uses ``fn(i, total)``. In a phase, i counts from where
    it began, and the total is its length. Skipped updates do not count, and neither do updates in
    which the optimizer rested (see :func:`using`).

    Each group keeps its initial value as ``initial_lr``, as torch's schedulers do: to change a
    learning rate under a schedule, set ``group["initial_lr"]``. The value used is the metric "lr"
    (``lr/1``, ... for further groups, ``lr/head`` for one with ``group["name"] = "head"``;
    ``lr/rest``, ``lr/rest/1``, ... with several optimizers).

    Args:
        fn: ``(step, total_steps) -> factor``: one of ``fnloop.schedules``, or your own function.
            ``total_steps`` is None if the length of the run is unknown. A function of one argument
            gets the state: ``lambda state: 0.9**state.epoch`` is a rate by epoch.
        field: the key of the number in a parameter group: "lr", "weight_decay", "momentum", ...;
            "betas.0" is the first of the tuple ``group["betas"]``.
        only: the names of the optimizers whose groups to set, or of parameter groups
            (``group["name"]``), such as ``("head",)``; all by default. A pipeline may have several
            schedules of one field for different groups.
        absolute: whether ``fn`` returns the number itself, and not a factor.
        by: "step", or "items": then it is ``fn(items, total_items)``, with the items of the updates
            before (``state.items``; samples, or tokens by ``aux["weight"]``) and the target of
            ``fit(items=...)``, which is None without one. In a phase both count from where it
            began.

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: ``fn`` is not a function, ``field`` is not a key, ``only`` has something other
            than names, ``absolute`` is not a bool, or with "items" ``fn`` is a function of the
            state. When it runs: ``fn`` returns something other than a number.
        ValueError: when composing: two schedules name one optimizer or group, or this and a
            ``torch_scheduler`` set its learning rate. When it runs: there is no optimizer and no
            group of a name in ``only``, or there are both; two schedules set one field of one
            group; the groups have no such number, ``fn`` needs a length that is unknown, or
            the value of a group was changed although its initial value was not; or ``fn`` returns
            NaN or infinity. A tensor is not read, so what is wrong in one, or was changed in place,
            is not noticed. A rate below 0 logs one warning.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(schedule(lambda i, total: 1 - i / total))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.tensor([1.0])] * 4, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75 + 0.5 + 0.25
        -2.5

    Notes:
        The slot ``state.slots["schedule(lr)"]`` holds the total that was used last. A run with
        another total logs one warning if that changes the value.

    Replaces: keras.LearningRateScheduler, pytorch_accelerated.CosineLrScheduler
    """
    of_state = takes_state(fn)
    if not of_state:
        check_schedule("schedule", fn)
    elif (counted := _counter_of(fn)) is not None:
        raise TypeError(
            f"schedule calls a function of one argument with the state; {name_of(fn)} takes "
            f"{counted}. Write schedule(lambda state: ...) with state.{counted.rstrip('s')} in it, "
            "or a function (step, total_steps) -> factor"
        )
    if not isinstance(field, str) or not field:
        raise TypeError(
            'schedule expects field as the key of a number in the parameter groups, such as "lr"; '
            f"got {checks.describe(field)}"
        )
    checks.flag("schedule", "absolute", absolute, "whether fn returns the number itself")
    checks.choice("schedule", "by", by, ("step", "items"))
    if of_state and by == "items":
        raise TypeError(
            'schedule(..., by="items") expects fn as a function (items, total_items) -> number; '
            f"got {name_of(fn)}, which takes the state: leave by= out, and use state.items in it"
        )
    names = _names("schedule", only)
    name, initial = _slot_name("schedule", (field, *(names or ()))), f"initial_{field}"

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            done, total = _progress(state, by)
            groups = _used_groups(state, names, "schedule")
            if not groups:
                return step(state, batch)
            kept, shares = [(g, dict(g)) for g in groups.values()], _by_updates(state, groups)
            factors: list[Rate] = []
            for lost, own in shares.items():
                lost = lost if by == "step" else 0
                i, of = done - lost, total and total - lost
                factor = _compute_factor(fn, of_state, state, i, of, by=by)
                factors.append(factor)
                if type(factor) is not float or not 0.0 <= factor < math.inf:
                    _check_setting(f"schedule({name_of(fn)})", field, factor, f"{by} {i} of {of}")
                for group in own:
                    set_number(group, field, factor, name, absolute)
            used = Setting.used(groups, field)
            if total is not None and total != state.slots.get(name, total):
                (lost, own), *_ = shares.items()
                base = 1.0 if absolute else own[0][initial]
                unit = f" × {initial}" if isinstance(base, Tensor) else ""
                show = lambda rate: f"{rate * (1 if unit else base):.3g}{unit}"
                call, before = f"schedule({name_of(fn)})", state.slots[name]
                _warn_of_total(state, call, field, fn, before, factors[0], show, lost, by)
                state = with_slot(state, name, total)
            put_back, made = _putting_back(kept, field), None
            try:
                new, out = step(state, batch)
                made = out
            finally:
                host().settle(state, made, [put_back])
            return new, report(out, used, "schedule")

        return scheduled

    def init(state: TrainState) -> float | None:
        for group in _chosen_groups(state, names, "schedule").values():
            Setting(group, field).keep_initial()
        return _total(state, by)

    return Middleware(
        name,
        step=wrap,
        init=init,
        adds=(field,),
        traits=("stacks", "per_phase", *["counts_items"] * (by == "items")),
        check=_check_names,
        check_state=_check_groups_apart,
    )


def _counter_of(fn: Callable[..., object]) -> str | None:
    """Return the name of the only argument of a function if it is that of a counter."""
    name = next(iter(inspect.signature(fn).parameters))
    return name if name in ("epoch", "epochs", "step", "steps") else None


def _names(owner: str, only: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names of optimizers or groups as a tuple; None is all of them."""
    if only is None:
        return None
    given: object = only
    names = (only,) if isinstance(only, str) else tuple(only) if checks.is_list(given) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"{owner} expects only as names of optimizers or of parameter groups, such as "
            f'("rest",), or None for all; got {checks.describe(only)}'
        )
    return tuple(names)


def _used_groups(state: TrainState, only: Sequence[str] | None, owner: str) -> Mapping[str, Group]:
    """Return the chosen groups of the optimizers that the step updates with, as ``using`` says."""
    found = groups(state) if only is None else _chosen_groups(state, only, owner)
    used = optimizers(state, used=True)
    if len(used) == len(optimizers(state)):
        return found
    own = {id(group) for one in used.values() for group in one.param_groups}
    return {label: group for label, group in found.items() if id(group) in own}


def _chosen_groups(
    state: TrainState, only: Collection[str] | None, owner: str
) -> Mapping[str, Group]:
    """Return parameter groups by what follows the name of a number of them in a report.

    Args:
        state: the state.
        only: names of optimizers, each of which stands for all of its groups, or of groups
            (``group["name"]``). None: all groups.
        owner: the middleware, for messages.

    Raises:
        ValueError: there is no optimizer and no group of such a name, or there are both.
    """
    named, every = optimizers(state), groups(state)
    if only is None:
        return every
    chosen: set[int] = set()
    for name in only:
        own = [group for group in every.values() if group.get("name") == name]
        if name in named and own:
            raise ValueError(
                f"{owner} names {name!r}, which is an optimizer and a parameter group: give one of "
                "them another name"
            )
        if name not in named and not own:
            raise ValueError(_explain_unknown(owner, name, named, every.values()))
        chosen.update(map(id, own or named[name].param_groups))
    return {label: group for label, group in every.items() if id(group) in chosen}


def _explain_unknown(
    owner: str, name: str, named: Mapping[str, Optimizer], groups: Iterable[Group]
) -> str:
    """Return why no optimizer and no group has a name."""
    labels = [*dict.fromkeys(str(g["name"]) for g in groups if g.get("name"))]
    there = f", and groups named {checks.join_names(labels, 5)}" if labels else ""
    if "" not in named:
        return (
            f"{owner} names the optimizer {name!r}, but this state has "
            f"{checks.join_names([*named], 5)}{there}"
        )
    if labels:
        return (
            f"{owner} names the parameter group {name!r}, but the groups with a name are "
            f"{checks.join_names(labels, 5)}"
        )
    return (
        f"{owner} names the optimizer {name!r}, but this state, or this turn of alternate, has one "
        "optimizer, without a name: leave out only=, or give a parameter group this name: "
        f'{{"params": ..., "name": "{name}"}}'
    )


# The slot of how many updates of the run, or of its newest phase, an optimizer rested in, by name.
_RESTS = "rests"


def _by_updates(state: TrainState, groups: Mapping[str, Group]) -> dict[int, list[Group]]:
    """Return groups by in how many updates of the run, or its phase, their optimizers rested."""
    if not (lost := state.slots.get(_RESTS)):
        return {0: [*groups.values()]}
    found: dict[int, list[Group]] = {}
    for name, one in optimizers(state).items():
        own = {*map(id, one.param_groups)}
        if ours := [group for group in groups.values() if id(group) in own]:
            found.setdefault(lost.get(name, 0), []).extend(ours)
    return found


def _putting_back(kept: Sequence[tuple[Group, Group]], field: str) -> Callable[[], None]:
    """Return what gives groups the settings from before an update that is left out.

    A group that has gone back to other settings meanwhile has those. A tensor stays as it was set:
    it is filled in place, and a copy of it would cost every update.

    Args:
        kept: the groups, each with its settings before the number was set.
        field: the key of the number that was set.
    """
    numbers = [number_in(group, field) for group, _ in kept]

    def put_back() -> None:
        for (group, before), number in zip(kept, numbers, strict=True):
            if number_in(group, field) is number and not isinstance(number, Tensor):
                for name in group.keys() - before.keys():
                    del group[name]
                group.update(before)

    return put_back


def _slot_name(owner: str, given: Sequence[str]) -> str:
    return f"{owner}({', '.join(given)})" if given else owner


class _Setter(NamedTuple):
    """What a middleware of this module sets.

    Args:
        member: the middleware.
        factory: what made it.
        field: the key of the number.
        names: its ``only``.
    """

    member: Middleware
    factory: Callable[..., object]
    field: str
    names: tuple[str, ...] | None

    def conflicts(self, other: _Setter) -> bool:
        """Return whether two cannot act on one group. ``plateau`` multiplies a ``schedule``."""
        both = {self.factory, other.factory}
        return self.field == other.field and both != {schedule, plateau}

    def refuse(self, other: _Setter, of: str) -> NoReturn:
        if plateau in (self.factory, other.factory) and self.factory is not other.factory:
            scheduler = self if other.factory is plateau else other
            raise ValueError(
                f"{scheduler.member!r} sets the learning rate from the one before, which plateau "
                "would change: use schedule with plateau, or leave one out"
            )
        verb = "lower" if self.factory is plateau else "set"
        raise ValueError(
            f"{other.member!r} and {self.member!r} both {verb} {self.field} of one {of}: name "
            "others with only=, or leave one out"
        )


def _setters(listed: Sequence[Middleware]) -> Iterator[_Setter]:
    for member in listed:
        if member.call is None or member.call.factory not in (schedule, torch_scheduler, plateau):
            continue
        settings = inspect.signature(member.call.factory).bind(
            *member.call.args, **member.call.kwargs
        )
        names = _names(member.name, settings.arguments.get("only"))
        yield _Setter(member, member.call.factory, settings.arguments.get("field", "lr"), names)


def _check_names(listed: Sequence[Middleware]) -> None:
    """Raise if two set one field of all groups, or of one name."""
    for one, other in itertools.combinations(_setters(listed), 2):
        names, others = one.names, other.names
        meet = names is None or others is None or not {*names}.isdisjoint(others)
        if meet and other.conflicts(one):
            other.refuse(one, "optimizer")


def _check_groups_apart(state: TrainState, listed: Sequence[Middleware]) -> None:
    """Raise if two set one field of one group, which one names, and its optimizer the other."""
    chosen = [
        (setter, {*map(id, _chosen_groups(state, setter.names, setter.factory.__name__).values())})
        for setter in _setters(listed)
    ]
    for (one, own), (other, its) in itertools.combinations(chosen, 2):
        if other.conflicts(one) and own & its:
            other.refuse(one, "parameter group")


def _stretch(state: TrainState) -> tuple[int, int | None]:
    """Return where the run or its phase began, and how many updates it has, if that is known."""
    run = state.run
    if run is None or run.total_steps is None:
        return 0 if run is None else run.first_step, None
    return run.first_step, run.total_steps - run.first_step


def _total(state: TrainState, by: str) -> float | None:
    """Return how many updates, or items, the run or its phase has, if that is known."""
    if by == "step":
        return _stretch(state)[1]
    run = state.run
    return None if run is None or run.total_items is None else run.total_items - run.first_items


def _progress(state: TrainState, by: str) -> tuple[float, float | None]:
    """Return the updates, or items, of the run or its phase so far, and how many it has."""
    if by == "step":
        first, total = _stretch(state)
        return state.step - first, total
    first = 0 if state.run is None else state.run.first_items
    return (state.items or 0) - first, _total(state, by)


def _compute_factor(
    fn: Callable[..., Rate],
    of_state: bool,
    state: TrainState,
    step: float,
    total: float | None,
    owner: str = "schedule",
    by: str = "step",
) -> Rate:
    __tracebackhide__ = True
    try:
        factor = fn(state) if of_state else fn(step, total)
    except (TypeError, ValueError) as error:
        if total is None and by == "items":
            raise ValueError(
                f'{owner}({name_of(fn)}, by="items") needs the items of the whole run: call fit('
                "step, state, loaders, items=...), or give every length as a number of items"
            ) from error
        if total is None:
            raise ValueError(explain_unknown_length(f"{owner}({name_of(fn)})", state)) from error
        raise
    if type(factor) is not float and not isinstance(factor, Real | Tensor):
        raise TypeError(
            f"{owner}({name_of(fn)}) must return a number; at {by} {step} of {total} "
            f"it returned {checks.describe(factor)}"
        )
    if not isinstance(factor, Tensor) and factor != factor:
        raise ValueError(
            f"{owner}({name_of(fn)}) must return a number; at {by} {step} of {total} "
            "it returned nan"
        )
    return factor


def _check_setting(owner: str, field: str, number: Rate, place: str) -> None:
    """Raise if a number cannot be that of a group, or a factor on it. No tensor is read.

    Warn once if it is below 0, with which torch makes no optimizer, although it takes steps.

    Raises:
        ValueError: it is not finite.
    """
    __tracebackhide__ = True
    if isinstance(number, Tensor):
        return
    if not -math.inf < number < math.inf:
        raise ValueError(
            f"{owner} must give a finite number for {field}; at {place} it gave {number}"
        )
    if number < 0 and field.partition(".")[0] in _NOT_NEGATIVE:
        warn_once(
            f"{owner} gives a number below 0 for {field}, with which torch makes no optimizer: if "
            "that is not meant, give at least 0 (logged once)"
        )


def _warn_of_total(
    state: TrainState,
    call: str,
    field: str,
    fn: Callable[..., Rate],
    planned_for: float | None,
    value: Rate,
    show: Callable[[Rate], str] = "{:.3g}".format,
    rested: int = 0,
    by: str = "step",
) -> None:
    """Warn if the run has another number of updates than it was planned for, which a number shows.

    Args:
        state: the state.
        call: the schedule, as it is written.
        field: what it sets.
        fn: its function.
        planned_for: the number of updates that it was called with before, if that was known.
        value: what it returns now.
        show: returns a number as text.
        rested: the updates of the stretch in which its optimizer rested.
        by: what it counts.
    """
    done, total = _progress(state, by)
    if planned_for is None or takes_state(fn):  # a function of the state knows the new total only
        return
    planned: Rate | None = None
    with contextlib.suppress(Exception):  # the function may be undefined after the planned end
        lost = rested if by == "step" else 0
        planned = fn(done - lost, planned_for - lost)
    if planned != value and state.backend.main:
        unit = "updates" if by == "step" else by
        otherwise = "" if planned is None else f" instead of {show(planned)}"
        log.warning(
            f"{call}: the run was planned for {planned_for} {unit} and now has {total}: at step "
            f"{state.step} {field} is {show(value)}{otherwise}"
        )


# --------------------------------------------------------------------------------------------------
# Pass numbers that depend on the update to the loss function.


@middleware("step")
def scheduled(**functions: _Fn) -> Middleware:
    """Pass numbers that change during a run to the loss function, as named arguments.

    Use it for teacher forcing, temperatures, the weight of a KL term or a curriculum:
    ``scheduled(beta=schedules.linear())`` with ``loss_fn(model, batch, *, beta)``. Update i (from
    0) gets ``fn(i, total)``, counted as by :func:`schedule`; an evaluation gets that of the next
    update. The number is the metric "beta", the last one of a record.

    Args:
        **functions: by name, ``(step, total_steps) -> number``: one of ``fnloop.schedules``, or
            your own function. A function of one argument gets the state.

    Returns:
        A middleware of the step ring and the ring "evaluation". It replaces the loss function by
        one with these arguments.

    Raises:
        TypeError: there is no name, or something is not a function. When composing: the loss
            function has no such argument. When it runs: a function returns something other than a
            number.
        ValueError: when composing: a name is listed twice. When it runs: a function needs a length
            that is unknown, or returns NaN.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def loss_fn(model, batch, *, beta):
        ...     return beta * model.w * batch.mean()
        >>> step = fl.pipeline(scheduled(beta=lambda i, total: i / total))(loss_fn)
        >>> state = fl.fit(step, toy(), [torch.ones(1)] * 4, hooks=())
        >>> state.model.w.item(), state.history["train/beta"]        # -(0 + 0.25 + 0.5 + 0.75)
        (-1.5, (0.75,))

    Notes:
        The loss function gets a float. Where ``compiled`` or ``cuda_graph`` is listed, it gets a
        tensor without dimensions, on the device, which is filled before each update: so nothing is
        compiled or captured again. It is in double precision if a parameter is.

        A run with another total than before logs one warning for each number that this changes.
    """
    if not functions:
        raise TypeError("scheduled expects names and functions: scheduled(beta=schedules.linear())")
    wanted = "a function (step, total_steps) -> number, or one of the state"
    for name, fn in functions.items():
        refuse_torch_scheduler("scheduled", wanted, fn)
        if not takes_state(fn):
            checks.function("scheduled", name, fn, wanted, 2)
    of_state = {name: takes_state(fn) for name, fn in functions.items()}
    slot, passed = f"scheduled({', '.join(functions)})", _Passed()

    def compute(state: TrainState) -> dict[str, Rate]:
        __tracebackhide__ = True
        first, total = state.slots[slot] if state.run is None else _stretch(state)
        step = state.step - first
        found = {
            name: _compute_factor(fn, of_state[name], state, step, total, "scheduled")
            for name, fn in functions.items()
        }
        passed.put(found, state)
        return found

    def wrap(step: Step) -> Step:
        def with_numbers(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            numbers, stretch = compute(state), _stretch(state)
            if stretch[1] is not None and stretch != state.slots[slot]:
                for name, value in numbers.items():
                    call, before = f"scheduled({name_of(functions[name])})", state.slots[slot][1]
                    _warn_of_total(state, call, name, functions[name], before, value)
                state = with_slot(state, slot, stretch)
            found = {
                name: Last(value.clone() if isinstance(value, Tensor) else value)
                for name, value in numbers.items()
            }
            state, out = step(state, batch)
            return state, report(out, found, "scheduled")

        return with_numbers

    def evaluation(step: Step) -> Step:
        def with_numbers(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            compute(state)
            return step(state, batch)

        return with_numbers

    def loss_fn(given: LossFn) -> LossFn:
        @functools.wraps(given)
        def with_numbers(*args: Any) -> Any:
            __tracebackhide__ = True
            return given(*args, **passed.numbers)

        return with_numbers

    def check(listed: Sequence[Middleware]) -> None:
        every = [name for member in listed for name in member.passes]
        if twice := [name for name in functions if every.count(name) > 1]:
            raise ValueError(
                f"two middleware pass {twice[0]!r} to the loss function: leave one out"
            )
        passed.as_tensors |= any(m.name in ("compiled", "cuda_graph") for m in listed)

    return Middleware(
        slot,
        step=wrap,
        evaluation=evaluation,
        init=_stretch,
        traits=("per_phase", "stacks"),
        loss_fn=loss_fn,
        passes=tuple(functions),
        check=check,
        adds=(),
    )


class _Passed:
    """The numbers of the update, or evaluation, that is being made."""

    def __init__(self) -> None:
        self.as_tensors = False  # compiled and captured code would keep a float
        self.numbers: Mapping[str, Rate] = {}
        self._tensors: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def put(self, found: Mapping[str, Rate], state: TrainState) -> None:
        """Set the numbers for what comes next."""
        self.numbers = found if not self.as_tensors else self._filled(found, state)

    def _filled(self, found: Mapping[str, Rate], state: TrainState) -> dict[str, Rate]:
        doubles = any(p.dtype in (torch.float64, torch.complex128) for p in all_parameters(state))
        dtype, device = torch.float64 if doubles else torch.float32, state.backend.device
        filled: dict[str, Rate] = {}
        for name, value in found.items():
            key = name, device, dtype
            if key not in self._tensors:
                self._tensors[key] = torch.zeros((), device=device, dtype=dtype)
            filled[name] = self._tensors[key].fill_(value)
        return filled


# --------------------------------------------------------------------------------------------------
# Use a scheduler of `torch.optim.lr_scheduler`.

_ADVICE = (
    'begin a phase, which has a scheduler of its own: fit(..., phase="second"), with epochs= or '
    "steps= from here on"
)


class UpdateScheduler(Protocol):
    """A scheduler that is told the number of updates, as those of timm are."""

    def step_update(self, num_updates: int, /) -> object: ...
    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> object: ...


@middleware("step")
def torch_scheduler(
    factory: Callable[[Optimizer, RunInfo], LRScheduler | UpdateScheduler], only: str | None = None
) -> Middleware:
    """Use a scheduler of ``torch.optim.lr_scheduler``, stepped once after each applied update.

    The factory may also return a scheduler with ``step_update(num_updates)``, as those of timm are
    with ``t_in_epochs=False``. After each applied update it is called with the updates of the run,
    or of its phase, so far.

    In a phase, the scheduler is made again: each group begins with the rate that it had before its
    first scheduler, or with the one that was set since, and the lengths are those of the phase.

    If the factory reads a length of the run, the scheduler is valid for that length only: a run of
    another length raises before its first update. The lengths that the factory has read are
    ``scheduler.made_for``, which checkpoints and snapshots keep.

    Args:
        factory: ``(optimizer, run) -> scheduler``, called when the run starts; ``run.total_steps``,
            ``run.steps_per_epoch`` and ``run.epochs`` give its length.
        only: the name of an optimizer, such as "rest", or of a parameter group
            (``group["name"]``): the factory gets an optimizer with this group alone. List one
            ``torch_scheduler`` for each that needs one. With several optimizers, a name is needed.

    Returns:
        A middleware of the step ring; the scheduler is ``state.slots["torch_scheduler"]``, or
        ``state.slots["torch_scheduler(rest)"]``.

    Raises:
        TypeError: ``factory`` is not a function. When it runs: what it makes is not a scheduler of
            torch and has no ``step_update``, or is one that steps by a metric.
        ValueError: when composing: a ``schedule`` sets the learning rate of the same optimizer.
            When it runs: the factory needs the length of the run in a bare step; the scheduler
            belongs to another optimizer, or counts epochs; the run has another length than the
            scheduler was made for; there are several optimizers, and ``only`` is not the name of
            one; or the rate is NaN or infinite.

    Example:
        >>> import fnloop as fl, torch
        >>> from torch.optim.lr_scheduler import LinearLR
        >>> from fnloop.testing import toy, toy_loss
        >>> def decay(optimizer, run):
        ...     return LinearLR(optimizer, 1.0, 0.5, total_iters=run.total_steps)
        >>> step = fl.pipeline(torch_scheduler(decay))(toy_loss)
        >>> state = fl.fit(step, toy(), [torch.tensor([1.0])] * 2, epochs=1, hooks=())
        >>> state.model.w.item()            # 1 + 0.75
        -1.75

    Source: https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate

    Replaces: pytorch_accelerated.TrainerWithTimmScheduler
    """
    example = "torch_scheduler(lambda optimizer, run: ...), a function"
    wanted = "a function (optimizer, run) -> scheduler"
    refuse_torch_scheduler("torch_scheduler", wanted, factory)
    checks.function("torch_scheduler", "factory", factory, example, 2)
    if only is not None:
        meaning = "the name of one optimizer, or of one parameter group"
        checks.text("torch_scheduler", "only", only, meaning)
    name = f"torch_scheduler({name_of(factory)})"
    slot = _slot_name("torch_scheduler", () if only is None else (only,))

    def init(state: TrainState) -> LRScheduler | UpdateScheduler:
        __tracebackhide__ = True
        optimizer = _optimizer_of(state, only)
        for setting in _cycled(optimizer):
            setting.begin_again()
        stretch = _stretch_of(state, _rested(state, only))
        run = _RecordingRunInfo(**attrs.asdict(stretch or RunInfo(), recurse=False))
        try:
            scheduler = factory(optimizer, run)
        except TypeError as error:
            if state.run is None or state.run.total_steps is None:
                raise ValueError(explain_unknown_length(name, state)) from error
            raise
        _check_scheduler(scheduler, optimizer, name)
        # Not a copy: a function that the scheduler calls may read more lengths later.
        scheduler.made_for = run.lengths  # type: ignore[union-attr]
        if not isinstance(scheduler, LRScheduler):
            scheduler.made_for_groups = len(optimizer.param_groups)  # type: ignore[attr-defined]
            if done := _updates(state, only):
                scheduler.step_update(done)
        return scheduler

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            chosen = _used_groups(state, only and (only,), "torch_scheduler")
            if not chosen:
                return step(state, batch)
            scheduler: LRScheduler | UpdateScheduler = state.slots[slot]
            if made_for := getattr(scheduler, "made_for", None):  # old checkpoints have none
                _check_length(made_for, scheduler, state, name, _rested(state, only))
            optimizer = _optimizer_of(state, only)
            _check_groups(scheduler, optimizer, name)
            for group in chosen.values():
                _check_setting(name, "lr", group["lr"], f"step {_updates(state, only)}")
            used = Setting.used(chosen, "lr")
            state, out = step(state, batch)
            if "update" in state.events:
                _advance(scheduler, _updates(state, only), name)
                for setting in _cycled(optimizer):
                    setting.note_set()
            return state, report(out, used, "torch_scheduler")

        return scheduled

    return Middleware(
        slot,
        step=wrap,
        init=init,
        traits=("per_phase",),
        adds=("lr",),
        check=_check_names,
        check_state=_check_groups_apart,
    )


def _cycled(optimizer: Optimizer) -> list[Setting]:
    """Return the settings that schedulers of torch change."""
    keys = ("lr", "momentum", "betas")
    return [Setting(group, k) for group in optimizer.param_groups for k in keys if k in group]


def _optimizer_of(state: TrainState, only: str | None) -> Optimizer:
    """Return the only optimizer of a state, or the one or the group that is named."""
    __tracebackhide__ = True
    found = optimizers(state)
    if only is None and "" not in found:
        name = next(iter(found))
        raise ValueError(
            f"torch_scheduler is for one optimizer, but this state has {', '.join(found)}: name "
            f'one, torch_scheduler(factory, only="{name}"), or use schedule'
        )
    if only is None or only in found:
        return found[only or ""]
    named = _chosen_groups(state, (only,), "torch_scheduler").values()
    owners = [one for one in found.values() for group in one.param_groups if group in named]
    if len(owners) > 1:
        raise ValueError(
            f"torch_scheduler names the parameter group {only!r}, which two optimizers have: give "
            "each its own name"
        )
    return _OfGroup(owners[0], *named)


class _OfGroup(Optimizer):
    """One group of an optimizer, as an optimizer for a scheduler. It never steps.

    Args:
        optimizer: the optimizer.
        group: the group, which it shares with it.
    """

    def __init__(self, optimizer: Optimizer, group: Group) -> None:
        super().__init__([{**group}], optimizer.defaults)
        self.state, self.param_groups = optimizer.state, [group]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing, but let a scheduler note that an update was made."""


def _updates(state: TrainState, only: str | None) -> int:
    """Return the updates of an optimizer in a run so far; in a phase, those of the phase."""
    return state.step - _stretch(state)[0] - _rested(state, only)


def _rested(state: TrainState, only: str | None) -> int:
    """Return the updates of them in which the optimizer rested, or that of the group."""
    if only is None or not (lost := state.slots.get(_RESTS)):
        return 0
    found = optimizers(state)
    if only in found:
        return lost.get(only, 0)
    owners = (n for n, one in found.items() for g in one.param_groups if g.get("name") == only)
    return lost.get(next(owners, ""), 0)


def _stretch_of(state: TrainState, rested: int) -> RunInfo | None:
    """Return the facts about a run; in a phase, those of a run that is the phase alone.

    Updates in which the optimizer rested are not in its length.
    """
    run, phase = state.run, Phase.running(state.phases)
    if run is not None and rested and run.total_steps is not None:
        run = attrs.evolve(run, total_steps=run.total_steps - rested)
    if run is None or not phase.name:
        return run
    epochs = None if run.epochs is None else run.epochs - phase.epoch
    total = None if run.total_steps is None else run.total_steps - run.first_step
    return attrs.evolve(run, epochs=epochs, total_steps=total, first_step=0)


class _RecordingRunInfo(RunInfo):
    """Facts about a run that record which of its lengths are read.

    A scheduler that was made from a length is valid only for that length.
    """

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
        return self.info == (other.info if isinstance(other, _RecordingRunInfo) else other)

    def __hash__(self) -> int:
        return hash(self.info)


_LENGTHS = frozenset({"epochs", "total_steps", "steps_per_epoch", "batches_per_epoch", "window"})


def _advance(scheduler: LRScheduler | UpdateScheduler, updates: int, name: str) -> None:
    """Step a scheduler once, after that many updates."""
    __tracebackhide__ = True
    if not isinstance(scheduler, LRScheduler):
        scheduler.step_update(updates)
        return
    with warnings.catch_warnings():
        # torch mistakes the copied optimizer of a snapshot for one whose step was overridden.
        warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
        try:
            if isinstance(scheduler.optimizer, _OfGroup):
                scheduler.optimizer.step()  # else torch warns that the optimizer made no step
            scheduler.step()
        except ValueError as error:  # OneCycleLR, after its end
            error.add_note(
                f"{name}: if the run is longer than the scheduler was made for, {_ADVICE}"
            )
            raise


_BY_UPDATES = ("step_update", "state_dict", "load_state_dict")


def _check_scheduler(scheduler: object, optimizer: Optimizer, name: str) -> None:
    """Raise if this is not a scheduler of this optimizer that steps by updates alone."""
    if isinstance(scheduler, ReduceLROnPlateau):
        relative = ", relative=True" if scheduler.threshold_mode == "rel" else ""
        raise TypeError(
            "torch_scheduler steps once per update, but ReduceLROnPlateau steps by a metric. List "
            f'plateau("valid/loss", factor={scheduler.factor}, patience={scheduler.patience + 1}, '
            f"min_delta={scheduler.threshold}{relative}) in its place, whose patience counts the "
            "evaluation that lowers the rate too"
        )
    by_updates = checks.has_methods(scheduler, *_BY_UPDATES)
    if not isinstance(scheduler, LRScheduler) and not by_updates:
        kind = type(scheduler)
        builtin = scheduler is None or kind.__module__ == "builtins"
        made = f"{scheduler!r:.60}" if builtin else f"a {kind.__module__}.{kind.__name__}"
        raise TypeError(
            f"{name} must make a torch.optim.lr_scheduler; it made {made}, which is not one, and "
            f"not a scheduler with {', '.join(_BY_UPDATES)}. Use one of torch's, or write a "
            "function of the step instead of torch_scheduler: "
            "schedule(lambda step, total_steps: ...)"
        )
    if getattr(scheduler, "t_in_epochs", False) is True:
        kind = type(scheduler).__name__
        raise ValueError(
            f"{name} made a {kind} that counts epochs, but torch_scheduler counts updates. Write "
            f"{kind}(..., t_in_epochs=False), with its lengths in updates, such as "
            "run.total_steps and run.steps_per_epoch"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        kind = type(scheduler).__name__
        raise ValueError(
            f"{name} made a {kind} of another optimizer than the state's, so it would never change "
            "the state's learning rate. Make it of the optimizer that the factory is given: "
            f"lambda opt, run: {kind}(opt, ...)"
        )


def _check_groups(scheduler: object, optimizer: Optimizer, name: str) -> None:
    """Raise if the optimizer has other groups than the scheduler was made for."""
    __tracebackhide__ = True
    if isinstance(scheduler, LRScheduler):
        known = len(scheduler.get_last_lr())
    else:
        known = getattr(scheduler, "made_for_groups", 0)
    groups = len(optimizer.param_groups)
    if groups != known:
        raise ValueError(
            f"{name}: its {type(scheduler).__name__} was made for {known} parameter groups, and "
            f"the optimizer has {groups} now. Call unfreeze, or add_param_group, between two "
            "phases, each of which has a scheduler of its own, or use schedule(fn)"
        )


def _check_length(
    made_for: dict[str, int | None],
    scheduler: object,
    state: TrainState,
    name: str,
    rested: int,
) -> None:
    """Raise if the run has other lengths than the scheduler was made for."""
    __tracebackhide__ = True
    run = _stretch_of(state, rested)
    for length, value in made_for.items():
        now = getattr(run, length, value)  # a bare step has no lengths, so none that differ
        if now != value:
            raise ValueError(
                f"{name}: its {type(scheduler).__name__} was made for a run of {length}={value}, "
                f"and this run has {length}={now}. To continue that run, call fit with the epochs= "
                f"or steps= that it was made for; otherwise {_ADVICE}"
            )


# --------------------------------------------------------------------------------------------------
# Lower the learning rate when a metric does not improve any more.


@attrs.frozen
class _Wait:
    """What the records so far amount to.

    Args:
        ratio: the factor on the learning rate.
        reference: the value to improve on.
        evaluations: how many have not improved on it.
        resting: how many more do not count, after the rate was lowered.
    """

    ratio: float = 1.0
    reference: float | None = None
    evaluations: int = 0
    resting: int = 0


@middleware("step")
def plateau(
    key: str,
    factor: float = 0.1,
    patience: int = 10,
    min_delta: float = 1e-4,
    mode: str | None = None,
    min_ratio: float = 0.0,
    cooldown: int = 0,
    since: str = "phase",
    *,
    relative: bool = False,
    min_value: float | None = None,
    only: str | Sequence[str] | None = None,
) -> Middleware:
    """Multiply the learning rate by a factor when a metric has not improved for some evaluations.

    It multiplies what ``schedule`` sets, in whichever order the two are listed; without one, the
    initial rate. The factor is a function of the history, so nothing has to be saved, and a resumed
    run continues with the same rate. Closing records do not count. NaN is not an improvement.

    Args:
        key: the metric, such as "valid/loss".
        factor: what the rate is multiplied by each time; above 0 and below 1.
        patience: evaluations without improvement after which to lower the rate; at least 1.
        min_delta: the least improvement, in the units of the metric.
        mode: "min" if lower is better, "max" if higher; None: by the name, as in ``early_stop``.
        min_ratio: the lowest rate, as a fraction of the rate without this; from 0 to 1.
        cooldown: evaluations after each time that do not count as without improvement.
        since: which evaluations count: those of the "phase", if the run has phases, or of the whole
            "run".
        relative: whether ``min_delta`` is a share of the best value, as in torch, where this is the
            default: 0.01 is 1 % of its magnitude.
        min_value: the lowest rate, as a number. A rate that a ``schedule`` sets below it, as in a
            warm-up, is not raised. None: no such limit.
        only: the names of the optimizers whose rates to lower, or of parameter groups, as in
            ``schedule``; all by default.

    Returns:
        A middleware of the step ring.

    Raises:
        TypeError: key is not a str, a number is something else, or ``only`` has something other
            than names.
        ValueError: a setting is out of range, or mode is None and the name of the metric does not
            imply one. When composing: ``torch_scheduler`` is listed too, or another ``plateau`` of
            one of the groups. When it runs: there is no optimizer and no group of a name in
            ``only``.
        KeyError: when a run starts: there is no such loader, or the pipeline makes no such metric.
            At an evaluation: your own code, which might add it, has not added it.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(plateau("train/loss", patience=1, mode="max"))(toy_loss)
        >>> state = fl.fit(step, toy(lr=1.0), [torch.ones(1)], epochs=4, hooks=())
        >>> [round(rate, 4) for rate in state.history["train/lr"]]      # the loss falls
        [1.0, 1.0, 0.1, 0.01]

    Source: ``ReduceLROnPlateau`` of Keras, whose ``patience`` and ``cooldown`` count like this.
    torch's ``ReduceLROnPlateau(patience=n, cooldown=m, threshold=t, min_lr=r)`` is
    ``plateau(key, patience=n + 1, cooldown=m + 1, min_delta=t, relative=True, min_value=r)``.

    Replaces: keras.ReduceLROnPlateau, by_hand.ReduceLROnPlateau
    """
    watched = Monitored("plateau", key, mode, since)
    meaning = "what the rate is multiplied by"
    if checks.number("plateau", "factor", factor, meaning, above=0, most=1) == 1:
        raise ValueError(f"plateau expects factor below 1, {meaning}; got {factor!r}")
    checks.integer("plateau", "patience", patience, "a number of evaluations")
    checks.number("plateau", "min_delta", min_delta, "the least improvement", least=0)
    checks.number("plateau", "min_ratio", min_ratio, "a fraction of the rate", least=0, most=1)
    checks.integer("plateau", "cooldown", cooldown, "a number of evaluations", least=0)
    checks.flag("plateau", "relative", relative, "whether min_delta is a share of the best value")
    if min_value is not None:
        checks.number("plateau", "min_value", min_value, "the lowest rate", least=0)
    names = _names("plateau", only)

    def look(before: _Wait, record: Record) -> _Wait:
        if not watched.counts(record):
            return before
        value = record.metrics[key]
        resting = max(before.resting - 1, 0)
        reference = before.reference
        if reference is None or watched.better(value, target(reference)):
            return _Wait(before.ratio, value, 0, resting)
        if resting:
            return _Wait(before.ratio, reference, 0, resting)
        waited = (0 if before.resting else before.evaluations) + 1
        if waited < patience:
            return _Wait(before.ratio, reference, waited, 0)
        return _Wait(max(before.ratio * factor, min_ratio), reference, 0, cooldown)

    def target(reference: float) -> float:
        share = relative and math.isfinite(reference)  # of inf, it would be NaN
        margin = min_delta * abs(reference) if share else min_delta
        return reference - margin if watched.mode == "min" else reference + margin

    looked = Fold(look, _Wait())

    def wrap(step: Step) -> Step:
        def lowered(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if len(state.history):
                watched.check(state)
            ratio = looked(state.history, watched.first(state)).ratio
            groups = _used_groups(state, names, "plateau").values()
            kept = [(group, dict(group)) for group in groups]
            for group in groups:
                Setting(group, "lr").lower((ratio, min_value))
                set_number(group, "lr", 1.0, "plateau")
            put_back, made = _putting_back(kept, "lr"), None
            try:
                new, out = step(state, batch)
                made = out
            finally:
                host().settle(state, made, [put_back])
                for group in groups:
                    Setting(group, "lr").lower(None)
            return new, out

        return lowered

    name = _slot_name("plateau", names or ())
    order = {"step": 1}  # it says to others what to do, once for each update
    return Middleware(
        name,
        step=wrap,
        monitors=key,
        adds=(),
        order=order,
        check=_check_names,
        check_state=_check_groups_apart,
    )
