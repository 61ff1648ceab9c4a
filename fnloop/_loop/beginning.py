"""What happens before the first update of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import attrs

from fnloop._core.metrics import RECENT, Metrics
from fnloop._core.optimizers import explain_untrained, optimizers_in
from fnloop._core.runs import pending
from fnloop._core.saved import Pending
from fnloop._core.state import TrainState, bring, changed, trains_all
from fnloop._core.types import Metric, name_of
from fnloop._data.source import Source
from fnloop._display.checks import join_names
from fnloop._display.screen import warn_once
from fnloop._extensions import extensions
from fnloop._hooks.hook import BuiltIn, Hook, begin_records, every_layer
from fnloop._loop.errors import check_returned, explain, first_change, warn_on_main
from fnloop._loop.plan import Plan
from fnloop._step.pipeline import PipelineStep

# --------------------------------------------------------------------------------------------------
# What happens before the first update of a run: hooks, modes of modules, slots, and metrics.


def first_state(plan: Plan, state: TrainState) -> TrainState:
    """Return the state with which a run begins, given one that knows the facts about the run."""
    __tracebackhide__ = True
    by = (*plan.step.pipeline.middleware, *every_layer(plan.hooks))
    state = bring(state, [part for one in by for part in one.brings])
    state = _begin_hooks(plan.hooks, state)
    _to_training_mode(state)
    if plan.record_every is None:
        state = changed(state, metrics=Metrics(state.metrics).without_recent())
    plan.step.begin_run(state)
    for suggest in extensions("hints as a run begins"):
        suggest({"train": plan.loaders.train, **plan.loaders.evaluated}, state)
    tell_untrained(state)
    try:
        state = complete(plan.step, state)
    except Exception as error:
        explain(error, state, plan.step, "the making of slots", state.batch)
        raise
    if pending(state.todo) or state.ends is not None:
        _warn_of_unknown(state)
    for note in extensions("what is noted before a run"):
        note(state)
    # Hooks have tried the other parts.
    if parts := BuiltIn.parts_saved(plan.hooks) & {"slots", "metrics"}:
        _try_to_save(plan.step, state, parts)
    return state


def _try_to_save(step: PipelineStep, state: TrainState, parts: Collection[str]) -> None:
    """Raise CheckpointError if no checkpoint could hold slots, or metrics as far as known."""
    known = {**_unseen_metrics(step, {}), **state.metrics}
    for check in extensions("what a checkpoint can hold"):
        check(attrs.evolve(state, metrics=known), parts)


def complete(step: PipelineStep, state: TrainState) -> TrainState:
    """Return a state with its slots, and with objects in place of what a checkpoint has of them."""
    __tracebackhide__ = True
    state = step.init_slots(state)
    if not any(map(_is_pending, state.metrics.values())):
        return state
    read = {name: m for name, m in state.metrics.items() if isinstance(m, Pending)}
    unseen = _unseen_metrics(step, {k.removeprefix(RECENT): m.kind for k, m in read.items()})
    made = {
        name: Pending.fill(like, metric)
        for name, metric in read.items()
        if (like := unseen.get(name.removeprefix(RECENT))) is not None
    }
    return attrs.evolve(state, metrics={**state.metrics, **made})


def _is_pending(metric: object) -> bool:
    return isinstance(metric, Pending)


def _unseen_metrics(step: PipelineStep, read: Mapping[str, str]) -> dict[str, Metric]:
    """Return the metrics of a step that are known before any batch, by the names of a report.

    Args:
        step: the step.
        read: by name the classes of those that a checkpoint has.
    """
    found: dict[str, Metric] = {}
    for unseen_metrics in extensions("metrics known before any batch"):
        found |= unseen_metrics(step.pipeline.middleware, read)
    for turn, inner in step.turns.items():
        found |= {
            step.prefixed(turn, name): metric for name, metric in _unseen_metrics(inner, {}).items()
        }
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
        begin_records(hook, state)
        try:
            new = check_returned(hook, state, hook.begin(state), "begin")
            _check_position(hook, state, new)
        except Exception as error:
            error.add_note(f"while in {name_of(hook)}, before the first update")
            raise
        state = new if new.run is not None else attrs.evolve(new, run=run)
    return state


def _check_position(hook: Hook, before: TrainState, new: TrainState) -> None:
    if changed := first_change(before, new, ("step", "epoch", "batch")):
        raise ValueError(
            f"the method begin of {name_of(hook)} changed {changed}, but the run is planned "
            "already: restore before fit"
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
    for keep_statistics in extensions("norm layers that are frozen"):
        keep_statistics(state)


# --------------------------------------------------------------------------------------------------
# What a run is told once.


def tell_untrained(state: TrainState) -> None:
    """Log once, on the main process, which parameters no optimizer has."""
    if not state.backend.main or trains_all(state):
        return
    if left := explain_untrained(state.model, optimizers_in(state.optimizer).values()):
        warn_once(f"fit: {left}")


def check_length(source: Source, epoch: int, first: int, samples: int, batches: int) -> None:
    """Log once if a loader has given more or fewer batches in an epoch than its length says.

    Args:
        source: the training loader.
        epoch: the number of the epoch, from 0.
        first: the batches of the epoch that were consumed before, which may have had another size.
        samples: their samples, if known.
        batches: the batches of the epoch, in all processes, with the padding of the last round.
    """
    said = source.left(epoch, first, samples)
    if said is None or (given := batches - first) == source.padded(said):
        return
    length = source.length_in(epoch)
    left = f" from batch {first} on, where {said} were left" if first else ""
    warn_once(
        f"fit: the length of the training loader is {length}, but an epoch of it had {given} "
        f"batches{left}. Schedules, and the number of updates, are made for {length}: let __len__ "
        "return the number of batches, or leave it out"
    )
