"""Use a scheduler of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fnloop._core.call import name_of
from fnloop._core.events import UPDATE
from fnloop._core.middleware import Middleware, middleware
from fnloop._core.optimizers import begin_again, labelled_groups, note_set, selected
from fnloop._core.phase import unfinished
from fnloop._core.run_info import RunInfo
from fnloop._core.run_length import explain_unknown_length
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._display import checks
from fnloop._step.rates import numbers_used
from fnloop._step.update import report
from fnloop.schedules._schedule import refuse_torch_scheduler

__all__ = ["torch_scheduler"]

_ADVICE = (
    'begin a phase, which has a scheduler of its own: fit(..., phase="second"), with epochs= or '
    "steps= from here on"
)


@middleware("step")
def torch_scheduler(
    factory: Callable[[Optimizer, RunInfo], LRScheduler], only: str | None = None
) -> Middleware:
    """Use a scheduler of ``torch.optim.lr_scheduler``, stepped once after each applied update.

    In a phase, the scheduler is made again: each group begins with the rate that it had before its
    first scheduler, or with the one that was set since, and the lengths are those of the phase.

    If the factory reads a length of the run, the scheduler is valid for that length only: a run of
    another length raises before its first update. The lengths that the factory has read are
    ``scheduler.made_for``, which checkpoints and snapshots keep.

    Args:
        factory: ``(optimizer, run) -> scheduler``, called when the run starts; ``run.total_steps``,
            ``run.steps_per_epoch`` and ``run.epochs`` give its length.
        only: the name of the optimizer, such as "rest", if there are several: list one
            ``torch_scheduler`` for each of them that needs one.

    Returns:
        A middleware of the step ring; the scheduler is ``state.slots["torch_scheduler"]``, or
        ``state.slots["torch_scheduler(rest)"]``.

    Raises:
        TypeError: ``factory`` is not a function. When it runs: what it makes is not a scheduler of
            torch, or is one that steps by a metric.
        ValueError: when composing: a ``schedule`` sets the learning rate of the same optimizer.
            When it runs: the factory needs the length of the run in a bare step; the scheduler
            belongs to another optimizer; the run has another length than the scheduler
            was made for; or there are several optimizers, and ``only`` is not the name of one.

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
    """
    example = "torch_scheduler(lambda optimizer, run: ...), a function"
    wanted = "a function (optimizer, run) -> scheduler"
    refuse_torch_scheduler("torch_scheduler", wanted, factory)
    checks.function("torch_scheduler", "factory", factory, example, 2)
    if only is not None:
        checks.text("torch_scheduler", "only", only, "the name of one optimizer")
    name = f"torch_scheduler({name_of(factory)})"
    slot = "torch_scheduler" if only is None else f"torch_scheduler({only})"

    def init(state: TrainState) -> LRScheduler:
        __tracebackhide__ = True
        optimizer = _optimizer_of(state, only)
        begin_again(optimizer.param_groups)
        run = _RecordingRunInfo(**attrs.asdict(_stretch(state) or RunInfo(), recurse=False))
        try:
            scheduler = factory(optimizer, run)
        except TypeError as error:
            if state.run is None or state.run.total_steps is None:
                raise ValueError(explain_unknown_length(name, state)) from error
            raise
        _check_scheduler(scheduler, optimizer, name)
        # Not a copy: a function that the scheduler calls may read more lengths later.
        scheduler.made_for = run.lengths  # type: ignore[attr-defined]
        return scheduler

    def wrap(step: Step) -> Step:
        def scheduled(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            scheduler: Any = state.slots.get(slot)
            if made_for := getattr(scheduler, "made_for", None):  # old checkpoints have none
                _check_length(made_for, scheduler, state, name)
            _check_groups(scheduler, name)
            groups = labelled_groups({only or "": _optimizer_of(state, only)})
            used = numbers_used(groups, "lr")
            state, out = step(state, batch)
            if UPDATE in state.events:
                _advance(scheduler, name)
                note_set(scheduler.optimizer.param_groups)
            return state, report(out, used, "torch_scheduler")

        return scheduled

    return Middleware(slot, step=wrap, init=init, per_phase=True)


def _optimizer_of(state: TrainState, only: str | None) -> Optimizer:
    """Return the only optimizer of a state, or the one that is named."""
    __tracebackhide__ = True
    found = selected(state.optimizer, None if only is None else (only,), "torch_scheduler")
    if only is None and "" not in found:
        name = next(iter(found))
        raise ValueError(
            f"torch_scheduler is for one optimizer, but this state has {', '.join(found)}: name "
            f'one, torch_scheduler(factory, only="{name}"), or use schedule'
        )
    return next(iter(found.values()))


def _stretch(state: TrainState) -> RunInfo | None:
    """Return the facts about a run; in a phase, those of a run that is the phase alone."""
    run, phase = state.run, unfinished(state.phases)
    if run is None or phase is None:
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


def _advance(scheduler: LRScheduler, name: str) -> None:
    """Step a scheduler once."""
    __tracebackhide__ = True
    with warnings.catch_warnings():
        # torch mistakes the copied optimizer of a snapshot for one whose step was overridden.
        warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
        try:
            scheduler.step()
        except ValueError as error:  # OneCycleLR, after its end
            error.add_note(
                f"{name}: if the run is longer than the scheduler was made for, {_ADVICE}"
            )
            raise


def _check_scheduler(scheduler: object, optimizer: Optimizer, name: str) -> None:
    """Raise if this is not a scheduler of torch and of this optimizer that steps by itself."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "torch_scheduler steps once per update, but ReduceLROnPlateau steps by a metric: use "
            "it in a hook under every(epochs=1)"
        )
    if not isinstance(scheduler, LRScheduler):
        kind = type(scheduler)
        builtin = scheduler is None or kind.__module__ == "builtins"
        made = f"{scheduler!r:.60}" if builtin else f"a {kind.__module__}.{kind.__name__}"
        raise TypeError(
            f"{name} must make a torch.optim.lr_scheduler; it made {made}, which is not one. Use "
            "one of torch's, or write a function of the step instead of torch_scheduler: "
            "schedule(lambda step, total_steps: ...)"
        )
    if scheduler.optimizer is not optimizer:
        kind = type(scheduler).__name__
        raise ValueError(
            f"{name} made a {kind} of another optimizer than the state's, so it would never change "
            "the state's learning rate. Make it of the optimizer that the factory is given: "
            f"lambda opt, run: {kind}(opt, ...)"
        )


def _check_groups(scheduler: LRScheduler, name: str) -> None:
    """Raise if the optimizer has other groups than the scheduler was made for."""
    __tracebackhide__ = True
    groups, known = len(scheduler.optimizer.param_groups), len(scheduler.get_last_lr())
    if groups != known:
        raise ValueError(
            f"{name}: its {type(scheduler).__name__} was made for {known} parameter groups, and "
            f"the optimizer has {groups} now. Call unfreeze, or add_param_group, between two "
            "phases, each of which has a scheduler of its own, or use schedule(fn)"
        )


def _check_length(
    made_for: dict[str, int | None],
    scheduler: LRScheduler,
    state: TrainState,
    name: str,
) -> None:
    """Raise if the run has other lengths than the scheduler was made for."""
    __tracebackhide__ = True
    run = _stretch(state)
    for length, value in made_for.items():
        now = getattr(run, length, value)  # a bare step has no lengths, so none that differ
        if now != value:
            raise ValueError(
                f"{name}: its {type(scheduler).__name__} was made for a run of {length}={value}, "
                f"and this run has {length}={now}. To continue that run, call fit with the epochs= "
                f"or steps= that it was made for; otherwise {_ADVICE}"
            )
