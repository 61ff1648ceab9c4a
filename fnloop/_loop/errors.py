"""What an exception says about the run that it ended: where it happened, and the state reached."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence

from fnloop._core.records import Record
from fnloop._core.state import (
    Ownership,
    TrainState,
    check_not_stale,
    went_back,
)
from fnloop._core.types import EPOCH, Searching, name_of
from fnloop._data.source import Source
from fnloop._display.checks import describe
from fnloop._hooks.hook import Hook, unwrap_hook
from fnloop._step.pipeline import PipelineStep

log = logging.getLogger("fnloop")
TRAIN_LOSS = "train/loss"  # is in each record of an epoch in which an update was applied
READ_ONCE = " An iterator can be read once: pass a list, or a function that makes one."


def explain(
    error: BaseException, state: TrainState, step: PipelineStep, phase: object, batch: int
) -> TrainState | None:
    """Note in an exception where in the run it happened, and attach the last consistent state.

    Args:
        error: the exception.
        state: the last consistent state.
        step: the step of the run.
        phase: what the run was doing: a loader, a hook, a description; None for the step, whose
            layers name themselves.
        batch: the batches consumed in the epoch.

    Returns:
        The state that was attached; None if no state owns the model.
    """
    if phase is None:
        step.explain(error)
        where = f"{step.layer_of(error)}, train"
    elif state.run is not None and phase in state.run.evaluated:
        layer = step.layer_of(error, "")
        where = f"{layer}, {phase}" if layer else f"the {phase} loader"
    else:
        where = f"{name_of(phase) if callable(phase) else phase}, train"
    epoch = state.epoch + (EPOCH not in state.events)  # the running one, or the one just completed
    error.add_note(f"while in {where}, epoch {epoch}, batch {batch}, step {state.step}")
    if "backward through the graph a second time" in str(error):
        error.add_note(
            "fnloop calls backward: if the loss function does, leave it out there. If it keeps a "
            "tensor of an earlier batch, detach that"
        )
    of_sparse = any(words in str(error) for words in ("'Sparse", "norm_sparse"))
    if isinstance(error, RuntimeError) and of_sparse:  # which NotImplementedError is
        error.add_note(
            "a gradient is sparse, as that of an embedding with sparse=True, and torch has no such "
            'function for it: leave out sparse=True, or name others, such as clip(1.0, only="head")'
        )
    if Ownership.of(state).generation is None:
        error.add_note(
            "the optimizer was changing the weights: they are between two updates, so this "
            "exception has no attribute state. Go back to a checkpoint or to a snapshot"
        )
    if not Ownership.belongs_to(state):
        return None
    state = Ownership.leave_run(state)
    with contextlib.suppress(AttributeError):
        error.state = state  # type: ignore[attr-defined]
    return state


def note_pair(error: BaseException, loader: object) -> None:
    """Note in an exception if the batches were read from two lists that look like a pair."""
    if not isinstance(loader, list) or len(loader) != 2:
        return
    if all(isinstance(each, list) and (len(each) > 2 or _is_of_batches(each)) for each in loader):
        error.add_note(
            "the training loader is a list of two lists, so each of these is a batch. If they are "
            "the loaders, write a pair: fit(step, state, (train, valid))"
        )


def _is_of_batches(values: list[object]) -> bool:
    return bool(values) and isinstance(values[0], list | tuple | dict)


def tell_hooks(hooks: Sequence[Hook], state: TrainState, error: Exception) -> None:
    """Tell the hooks with a method ``failed`` that the run has failed."""
    for hook in hooks:
        try:
            unwrap_hook(hook).failed(state, error)
        except Exception as another:
            note_failed_too(error, hook, another)


def note_failed_too(error: BaseException, hook: Hook, another: Exception) -> None:
    """Note in the error that ends a run that a hook has failed after it."""
    error.add_note(f"then {name_of(hook)} failed too: {type(another).__name__}: {another}")


def check_returned(hook: Hook, before: TrainState, new: object, method: str = "") -> TrainState:
    """Return what a hook, or a method of it, returned: the newest state of this run, or a copy.

    Args:
        hook: the hook.
        before: the state that it was called with.
        new: what it returned.
        method: the name of the method; the hook itself without one.

    Raises:
        TypeError: it is not a state.
        StaleStateError: it has been advanced.
        ValueError: it holds an average; or, at the end of a run, it is of another run; or the hook
            itself has changed what only a run may change.
    """
    __tracebackhide__ = True
    if new is before:
        check_not_stale(before)
        return before
    name = f"the method {method} of {name_of(hook)}" if method else name_of(hook)
    if not isinstance(new, TrainState):
        raise TypeError(
            f"a hook takes a state and returns one, but {name} returned {new!r:.60}. Did "
            "you forget 'return state'?"
        )
    check_not_stale(new, name, trains=True)
    if method in ("flush", "settle"):
        _check_run(name, before, new)
    elif not method:
        _check_counters(hook, before, new)
    return new


def check_numbers(hook: Hook, numbers: object, record: Record) -> None:
    """Raise unless a record can take what the method ``numbers`` of a hook returned.

    Raises:
        TypeError: it is not a mapping.
        ValueError: the record has one of the names already.
    """
    if not isinstance(numbers, Mapping):
        raise TypeError(
            f"the method numbers of {name_of(hook)} must return a mapping from names to numbers, "
            f'such as {{"valid/ap": 0.5}}; it returned {describe(numbers)}'
        )
    if taken := [name for name in numbers if name in record.metrics]:
        raise ValueError(
            f"{name_of(hook)} adds the number {taken[0]!r}, which the record has already: "
            "choose another name"
        )


def _check_run(name: str, before: TrainState, new: TrainState) -> None:
    if new.run_id != before.run_id:
        raise ValueError(
            f"{name} returned a state of another run. Return the state that it was called with, "
            "or attrs.evolve(state, ...) of it; to go back, a snapshot of this run, or "
            "restore(path, state) of a checkpoint of this run"
        )


def _check_counters(hook: Hook, before: TrainState, new: TrainState) -> None:
    """Raise if a hook has changed what only a run may change.

    Raises:
        ValueError: it has.
    """
    name, advice = name_of(hook), 'attrs.evolve(state, ends="epoch")'
    if new.ends not in (None, "epoch"):
        raise ValueError(f"{name} set state.ends to {new.ends!r}; write {advice}")
    if went_back(before, new):
        if len(new.phases) < len(before.phases):
            raise ValueError(
                f"{name} went back to a snapshot from before the phase {before.phases[-1].name!r} "
                "began; go back to one that was taken in it"
            )
        _check_run(name, before, new)
        return
    _check_run(name, before, new)
    if changed := first_change(before, new, (*TrainState.COUNTERS, "phases")):
        raise ValueError(
            f"{name} changed {changed}, but a run counts by itself. To end the epoch, return "
            f"{advice}; to go back, return a snapshot"
        )


def first_change(before: TrainState, new: TrainState, fields: Iterable[str]) -> str | None:
    """Return which field of a state differs first, and how, in words; None if none does."""
    for field in fields:
        if (found := getattr(new, field)) != (known := getattr(before, field)):
            return f"state.{field} from {known} to {found}"
    return None


def explain_no_batches(state: TrainState, source: Source) -> str:
    """Return why the training loader may have given no batch."""
    why = source.why_empty() or (READ_ONCE if state.epoch else "")
    return f"the training loader gave no batch in epoch {state.epoch + 1}.{why}"


def check_not_empty(sources: Mapping[str, Source]) -> None:
    """Raise ValueError if one of the loaders to evaluate has no batch, as far as that is known."""
    for name, source in sources.items():
        if source.length_in(0) == 0:
            raise ValueError(f"the {name} loader gave no batch.{source.why_empty()}")


def explain_no_updates(state: TrainState, reason: str | None) -> str | None:
    """Return why a run would never reach its target in steps; None if it may.

    So it is where the last two whole epochs left out all of their updates, as the records of the
    ends of these epochs show. A run that is resumed counts the same. An epoch in which a gradient
    overflowed in fp16 does not count: the loss scale finds its way, or raises.

    Args:
        state: the state at the end of an epoch.
        reason: why the last update was left out, if that is known.
    """
    epoch, history = state.epoch, state.history
    if epoch < 2 or not len(history) or TRAIN_LOSS in history[-1].metrics:
        return None
    ends: dict[int, Record] = {}  # of each of the last epochs its first record, that of its end
    for record in reversed(history.since(closing=False)):
        if record.epoch < epoch - 2:
            break
        ends[record.epoch] = record
    before = ends[epoch - 2].step if epoch - 2 in ends else 0 if epoch == 2 else None
    newest = [ends[n] for n in (epoch - 1, epoch) if n in ends]
    if before != state.step or len(newest) < 2 or any(TRAIN_LOSS in r.metrics for r in newest):
        return None
    searching = (slot for slot in state.slots.values() if isinstance(slot, Searching))
    if any(slot.overflowed >= epoch - 2 for slot in searching):
        return None
    why = "" if reason is None else f" ({reason})"
    return (
        f"all updates of epochs {epoch - 1} and {epoch} were left out{why}, so this run stays at "
        f"step {state.step} and would never reach its target: look at the loss function and the "
        "guards that leave updates out, or give a target in epochs, fit(..., epochs=...)"
    )


def warn_on_main(state: TrainState, message: str) -> None:
    """Log a warning, on the main process."""
    if state.backend.main:
        log.warning(message)
