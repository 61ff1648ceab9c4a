"""What happens before the first update of a run: hooks, modes of modules, slots, and metrics."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fnloop._core.call import name_of
from fnloop._core.elapsed import Elapsed
from fnloop._core.frozen import keep_statistics
from fnloop._core.running import RECENT, without_recent
from fnloop._core.serialize import Pending, materialize
from fnloop._core.state import TrainState
from fnloop._core.stops import BOUNDARY
from fnloop._core.types import Metric
from fnloop._display.checks import join_names
from fnloop._hooks.wrapper import Hook
from fnloop._loop.errors import check_returned, explain, warn_on_main
from fnloop._loop.hints import suggest
from fnloop._loop.plan import Plan
from fnloop._middleware.metric import unseen_metrics
from fnloop._step.alternate import AlternateStep
from fnloop._step.pipeline import PipelineStep
from fnloop._step.reports import prefixed

__all__ = ["complete", "first_state"]

ELAPSED = "fnloop.Elapsed"  # the class of times, as a checkpoint names it


def first_state(plan: Plan, state: TrainState) -> TrainState:
    """Return the state with which a run begins, given one that knows the facts about the run."""
    __tracebackhide__ = True
    state = _begin_hooks(plan.hooks, state)
    _to_training_mode(state)
    if plan.record_every is None:
        state = attrs.evolve(state, metrics=without_recent(state.metrics))
    plan.step.begin_run(state)
    suggest(plan.loaders, state)
    try:
        state = complete(plan.step, state)
    except Exception as error:
        explain(error, state, plan.step, "the making of slots", state.batch)
        raise
    if BOUNDARY in state.left or state.ends is not None:
        _warn_of_unknown(state)
    return state


def complete(step: PipelineStep, state: TrainState) -> TrainState:
    """Return a state with its slots, and with objects in place of what a checkpoint has of them."""
    __tracebackhide__ = True
    state, unseen = step.init_slots(state), _unseen_metrics(step)
    made = {}
    for name, metric in state.metrics.items():
        like = unseen.get(name.removeprefix(RECENT))
        if like is None and getattr(metric, "kind", None) == ELAPSED:
            like = Elapsed(0.0, is_rate="throughput/" in name)
        if like is not None and _is_pending(metric):
            made[name] = materialize(like, metric)
    return attrs.evolve(state, metrics={**state.metrics, **made}) if made else state


def _is_pending(metric: object) -> bool:
    return isinstance(metric, Pending)


def _unseen_metrics(step: PipelineStep) -> dict[str, Metric]:
    """Return the metrics of a step that are known before any batch, by the names of a report."""
    found = unseen_metrics(step.pipeline.middleware)
    for turn, inner in step.settings.steps.items() if isinstance(step, AlternateStep) else ():
        found |= {prefixed(turn, name): metric for name, metric in _unseen_metrics(inner).items()}
    return found


def _warn_of_unknown(state: TrainState) -> None:
    """Warn of metrics that the record with which a run begins cannot have."""
    if names := [name for name, metric in state.metrics.items() if _is_pending(metric)]:
        warn_on_main(
            state,
            f"fit: the record of step {state.step}, which the interrupted run has left to this "
            f"one, is made without {join_names(names)}: only a batch shows of which class they are",
        )


def _begin_hooks(hooks: Iterable[Hook], state: TrainState) -> TrainState:
    """Call the method ``begin`` of the hooks that have one. Return the state to start with.

    Raises:
        TypeError: a hook returned something other than a state.
        ValueError: a hook returned a state at another position.
        StaleStateError: a hook returned a state that has been advanced.
    """
    __tracebackhide__ = True
    run = state.run
    for hook in hooks:
        try:
            new = check_returned(hook, hook.begin(state), "begin")
            _check_position(hook, state, new)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}, before the first update")
            raise
        state = new if new.run is not None else attrs.evolve(new, run=run)
    return state


def _check_position(hook: Hook, before: TrainState, new: TrainState) -> None:
    for name in ("step", "epoch", "batch"):
        if (found := getattr(new, name)) != (known := getattr(before, name)):
            raise ValueError(
                f"the method begin of {name_of(hook)} changed state.{name} from {known} to "
                f"{found}, but the run is planned already: restore before fit"
            )


def _to_training_mode(state: TrainState) -> None:
    """Put a model that is in evaluation mode as a whole into training mode.

    Modules that are in evaluation mode by themselves stay so, and norm layers that are frozen are
    in it whatever the script did.
    """
    if not state.model.training:
        warn_on_main(
            state,
            "fit: the model was in evaluation mode as a whole; it is trained in training mode "
            "(model.train())",
        )
        state.model.train()
    keep_statistics(state)
