"""The plan of a run: the arguments of ``fit``, checked."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterable, Sequence

import attrs
import torch

from fnloop._core.call import name_of
from fnloop._core.middleware import Middleware
from fnloop._core.monitor import check_names
from fnloop._core.run_info import RunInfo
from fnloop._core.state import TrainState, check_not_stale
from fnloop._data.loaders import Loaders, read_loaders, sharded
from fnloop._display import checks
from fnloop._hooks.checkpoint import checkpoint
from fnloop._hooks.early_stop import halt_on_nonfinite
from fnloop._hooks.progress import progress
from fnloop._hooks.triggers import ConditionalHook, Trigger, once
from fnloop._hooks.wrapper import Hook, layers
from fnloop._step.pipeline import Pipeline, PipelineStep

__all__ = ["Plan", "check_step", "make_plan"]


@attrs.frozen
class Plan:
    """What a run is to do.

    Args:
        step: the step.
        loaders: the loader to train on, and those to evaluate.
        epochs, steps: the targets for ``state.epoch`` and ``state.step``; None: not a target.
        hooks: the hooks, in the order in which they are called.
        evaluate_every: when to evaluate; None means never.
        prefetch: how many windows are fetched ahead.
    """

    step: PipelineStep
    loaders: Loaders
    epochs: int | None
    steps: int | None
    hooks: tuple[Hook, ...]
    evaluate_every: Trigger | None
    prefetch: int

    def is_over(self, state: TrainState) -> bool:
        """Return whether a run that has reached this state is at its end."""
        return (
            state.stop is not None
            or (self.steps is not None and state.step >= self.steps)
            or (self.epochs is not None and state.epoch >= self.epochs)
        )

    def is_due(self, state: TrainState) -> bool:
        """Return whether an evaluation is due at this boundary."""
        __tracebackhide__ = True
        return self.evaluate_every is not None and self.evaluate_every.due(state)

    def check(self, info: RunInfo) -> None:
        """Raise if a hook or a trigger cannot work in this run.

        Raises:
            ValueError: two hooks share a slot or a folder, or a trigger would never be due.
            KeyError: a hook monitors a metric that this run does not have.
        """
        every_layer = [layer for hook in self.hooks for layer in layers(hook)]
        _check_slots([hook.slot for hook in every_layer if isinstance(hook, once)])
        _check_folders([hook.folder for hook in every_layer if isinstance(hook, checkpoint)])
        check_names(every_layer, info.evaluated)
        if (check := getattr(self.evaluate_every, "check", None)) is not None:
            check(info)

    def check_position(self, state: TrainState) -> None:
        """Raise if the position within the epoch means nothing to this many processes."""
        now = state.backend.world_size
        in_shards = isinstance(self.loaders.train, sharded) and state.batch > 0
        if in_shards and state.saved_on not in (None, now):
            raise ValueError(
                f"this checkpoint was written in mid-epoch by {state.saved_on} processes, but this "
                f"run has {now}, whose shards of the loader differ: resume on {state.saved_on} "
                "processes, or from the end of an epoch"
            )

    def why_nothing_to_do(self, state: TrainState) -> str:
        """Return the message for a state that is at its end already."""
        if state.stop is not None:
            return (
                f"fit: nothing to do: the run was stopped ({state.stop}). To continue anyway, pass "
                "attrs.evolve(state, stop=None)"
            )
        given = {"epochs": self.epochs, "steps": self.steps}
        targets = [f"{name}={target}" for name, target in given.items() if target is not None]
        return (
            f"fit: nothing to do: the state is at epoch {state.epoch}, step {state.step}, and the "
            f"target is {', '.join(targets)}. Targets are absolute: increase one to continue"
        )


def make_plan(
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    epochs: int | None,
    steps: int | None,
    hooks: Sequence[Hook] | None,
    evaluate_every: Trigger | None,
    prefetch: int,
) -> Plan:
    """Check the arguments of ``fit`` and return the plan.

    Raises:
        StaleStateError: the state has been advanced already.
        TypeError, ValueError: an argument is not what it should be.
    """
    check_step(step, "fit")
    check_not_stale(state, "fit")
    found = read_loaders(loaders)
    for name, target in (("epochs", epochs), ("steps", steps)):
        if target is not None:
            meaning = f"the target for state.{name[:-1]}, or None"
            checks.integer("fit", name, target, meaning, least=0)
    checks.integer("fit", "prefetch", prefetch, "the windows that are fetched ahead")
    checked = _check_hooks((progress(), halt_on_nonfinite()) if hooks is None else hooks)
    _check_evaluate_every(evaluate_every)
    if epochs is None and steps is None:
        epochs = state.epoch + 1
    return Plan(step, found, epochs, steps, checked, evaluate_every, prefetch)


def check_step(step: object, caller: str) -> None:
    """Raise unless this is a step, as a pipeline makes it.

    Raises:
        TypeError: it is something else; the message says what to write.
    """
    if isinstance(step, PipelineStep):
        return
    name = name_of(step)
    if isinstance(step, TrainState):
        hint = f"The step comes first: {caller}(step, state, ...)"
    elif isinstance(step, Pipeline):
        hint = f"It lacks its loss function: write {name}(loss_fn)"
    elif isinstance(step, Middleware):
        hint = f"Write pipeline({name})(loss_fn)"
    elif callable(step) and not isinstance(step, torch.nn.Module):
        hint = f"If {name} is a loss function, write {caller}(pipeline()({name}), ...)"
    else:
        hint = "Write pipeline()(loss_fn)"
    raise TypeError(
        f"{caller} expects a step, as pipeline(...)(loss_fn) returns it; got {name:.60} "
        f"({type(step).__name__}). {hint}"
    )


def _check_evaluate_every(trigger: object) -> None:
    if trigger is not None and (isinstance(trigger, type) or not hasattr(trigger, "due")):
        raise TypeError(
            "fit expects evaluate_every as every(epochs=1), every(steps=100), when(predicate) or "
            f"None; got {checks.describe(trigger)}"
        )


def _check_hooks(hooks: object) -> tuple[Hook, ...]:
    if callable(hooks) or isinstance(hooks, str | bytes) or not isinstance(hooks, Sequence):
        raise TypeError(
            "fit expects hooks as a tuple, such as hooks=(progress(), early_stop(...)); got "
            f"{checks.describe(hooks)}"
        )
    for hook in hooks:
        _check_hook(hook)
    return tuple(hooks)


def _check_hook(hook: object) -> None:
    if isinstance(hook, type | torch.nn.Module) or not callable(hook):
        call = f" Call it: {hook.__name__}(...)" if isinstance(hook, type) else ""
        raise TypeError(f"a hook is a function state -> state; got {name_of(hook)}.{call}")
    if hasattr(hook, "due") and not isinstance(hook, ConditionalHook):
        raise TypeError(f"{hook!r} says when, but not what: write {hook!r}(hook)")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(hook)
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"a hook takes the state and nothing else, but {name_of(hook)} takes {signature}"
            ) from error


def _check_slots(slots: Sequence[str]) -> None:
    for slot in slots:
        if slots.count(slot) > 1:
            raise ValueError(
                f"two hooks would be remembered as {slot!r}, and one of them would never run: "
                "once(hook, name=...)"
            )


def _check_folders(folders: Iterable[os.PathLike[str]]) -> None:
    seen = set()
    for folder in folders:
        place = os.path.realpath(folder)
        if place in seen:
            raise ValueError(
                f"two checkpoint hooks share {folder}, and would remove each other's: give "
                "each its own folder"
            )
        seen.add(place)
