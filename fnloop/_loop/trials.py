"""A few updates on a copy of a state, which leave the state and the generators as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from fnloop._core.history import History
from fnloop._core.middleware import Middleware
from fnloop._core.optimizers import optimizers_in
from fnloop._core.snapshot import snapshot
from fnloop._core.state import TrainState
from fnloop._core.stops import INTERRUPTED
from fnloop._data.loaders import Loaders, check_loader
from fnloop._hooks.moments import Trigger
from fnloop._hooks.wrapper import HookFn
from fnloop._loop.epochs import train_epochs
from fnloop._loop.interrupts import Interrupts
from fnloop._loop.peers import is_alone
from fnloop._loop.plan import make_plan
from fnloop._middleware.derive import derive
from fnloop._middleware.ema import ema, swa
from fnloop._middleware.metric import metric
from fnloop._middleware.plateau import plateau
from fnloop._middleware.schedule import schedule
from fnloop._middleware.times import throughput, timings
from fnloop._middleware.torch_scheduler import torch_scheduler
from fnloop._step.pipeline import LossStep, Pipeline, PipelineStep, pipeline
from fnloop._step.raw import RawStep

__all__ = [
    "AVERAGES",
    "RATES",
    "REPORTS",
    "advance_copy",
    "at_start_of_epoch",
    "contents_of",
    "loaders_to_try",
    "train_copy",
    "train_trial",
    "with_members",
]

RATES = (schedule, torch_scheduler, plateau)  # they need the length or the records of a run
AVERAGES = (ema, swa)
REPORTS = (metric, derive, timings, throughput)  # they change no update


def at_start_of_epoch(state: TrainState) -> TrainState:
    """Return a copy of a state, at the start of its epoch, without what it has measured."""
    return attrs.evolve(
        snapshot(state), batch=0, samples=0, metrics={}, history=History(), stop=None,
        ends=None, phases=(), generators=None, saved_on=None, events=frozenset(),
        left=(),
    )  # fmt: skip


def with_members(
    step: PipelineStep,
    left_out: Collection[Callable[..., object]],
    inner: Sequence[Middleware] = (),
) -> PipelineStep:
    """Return the same step without some of its middleware, and with others inside the rest.

    Args:
        step: the step of a loss function, or of ``raw``.
        left_out: the factories whose middleware to leave out.
        inner: the middleware to list first.
    """
    listed = step.pipeline.middleware
    kept = [m for m in listed if m.call is None or m.call.factory not in left_out]
    composed = pipeline(*inner, *kept)
    if isinstance(step, RawStep):
        return RawStep(Pipeline(composed.middleware), step.fn, step.evaluated_by)
    assert isinstance(step, LossStep)
    return composed(step.loss_fn)


def train_trial(
    step: PipelineStep,
    copied: TrainState,
    loaders: Mapping[str, object],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[HookFn] = (),
    evaluate_every: Trigger | None = None,
) -> TrainState:
    """Train a copy, as ``fit`` does, but let Ctrl-C and signals end the program as they usually do.

    There is nothing to keep.
    """
    __tracebackhide__ = True
    moments = evaluate_every, None
    plan = make_plan(step, copied, loaders, epochs, steps, hooks, *moments, prefetch=1, phase=None)
    plan = attrs.evolve(plan, may_stall=True)  # its hooks end it
    *_, reached = train_epochs(plan, copied, Interrupts(is_alone(copied)))
    if reached.stop == INTERRUPTED:
        raise KeyboardInterrupt
    return reached


def train_copy(
    step: PipelineStep,
    state: TrainState,
    loader: object,
    updates: int,
    hooks: Sequence[HookFn] = (),
    epochs: int | None = None,
) -> TrainState:
    """Train a copy of a state for a few updates. A loader that is too short is repeated.

    With a target in ``epochs`` too, a run that leaves out all updates is not an error.
    """
    __tracebackhide__ = True
    check_loader(loader, "training", alone=True)
    copied = at_start_of_epoch(state)
    last = None if epochs is None else copied.epoch + epochs
    steps = copied.step + updates
    return train_trial(step, copied, {"train": loader}, epochs=last, steps=steps, hooks=hooks)


def advance_copy(
    step: PipelineStep,
    copied: TrainState,
    loaders: Mapping[str, object],
    updates: int,
    epochs: int,
    evaluate_every: Trigger | None = None,
) -> TrainState:
    """Make a number of updates of a longer run; those of one batch count as one."""
    __tracebackhide__ = True
    counted = itertools.count(1)

    def stop(state: TrainState) -> TrainState:
        return attrs.evolve(state, stop="enough") if next(counted) >= updates else state

    reached = train_trial(
        step, copied, loaders, epochs=epochs, hooks=(stop,), evaluate_every=evaluate_every
    )
    return attrs.evolve(reached, stop=None)


def contents_of(state: TrainState) -> dict[str, object]:
    """Return what two states that came to the same are compared by."""
    optimizers = {name: one.state_dict() for name, one in optimizers_in(state.optimizer).items()}
    return {
        "model": state.model.state_dict(),
        "optimizer": optimizers if state.updates else optimizers[""],
        "slots": dict(state.slots), "counters": (state.step, state.epoch, state.batch),
    }  # fmt: skip


def loaders_to_try(
    owner: str, state: TrainState, loaders: Loaders, several: bool = False
) -> dict[str, object]:
    """Return the loaders of a run by name, where they can be tried without harm.

    Args:
        owner: who tries them.
        state: the state.
        loaders: the loaders.
        several: whether several processes may.

    Raises:
        ValueError: one of them is an iterator.
        NotImplementedError: there are several processes, and only one may try them.
    """
    named: dict[str, object] = {"train": loaders.train, **loaders.evaluated}
    for name, loader in named.items():
        if isinstance(loader, Iterator):
            raise ValueError(
                f"{owner} would use up the {name} loader, which is an iterator: give a function "
                "that returns one, or a list"
            )
    if state.backend.world_size > 1 and not several:
        raise NotImplementedError(
            f"{owner} works in one process: call it in a script that is started without torchrun"
        )
    return named
