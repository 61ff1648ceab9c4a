"""Make an update of a run again, bit for bit, from the nearest checkpoint before it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.format import CheckpointError
from fnloop._checkpoint.listing import Saved, read_history, saved_in
from fnloop._checkpoint.restore import restore
from fnloop._checkpoint.targets import Targets, decode_targets
from fnloop._core.history import History
from fnloop._core.phase import Phase, decode_phases, unfinished
from fnloop._core.rng import isolated, reserved_generators
from fnloop._core.snapshot import snapshot
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.stops import INTERRUPTED, is_interruption
from fnloop._core.types import Batch
from fnloop._data.loaders import read_loaders
from fnloop._display import checks
from fnloop._loop.epochs import train_epochs
from fnloop._loop.evaluate import open_loader
from fnloop._loop.interrupts import Interrupts
from fnloop._loop.peers import is_alone
from fnloop._loop.phases import has_left
from fnloop._loop.plan import Plan, check_step, make_plan
from fnloop._step.pipeline import PipelineStep
from fnloop.debug._difference import compare_states
from fnloop.debug._recorder import Recorder, members_of, recording
from fnloop.debug._update import Update, find_bad_samples

__all__ = ["Origin", "continue_from", "find_origin", "make_again", "replay", "restored_from"]


def replay(
    folder: str | os.PathLike[str],
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    *,
    update: int,
    epochs: int | None = None,
    steps: int | None = None,
) -> Update:
    """Make an update of a run again, bit for bit, and look into it.

    A run is a function of its state: it is restored from the nearest checkpoint before the update,
    and continued up to it. Hooks are not called, and nothing is evaluated. So what a hook of the
    run has changed by itself since that checkpoint (weights, an epoch that it ended early) is not
    made again; ``Update.confirmed`` says whether a checkpoint has the same bits.

    Updates that were skipped have no number: they are made again on the way, and ``before`` is the
    state after them. With ``accumulate`` an update has a window of batches. With ``alternate`` it
    is a round, and ``grads`` are those of the last turn of each optimizer. With ``tbptt`` it has
    one window of a batch. If ``spike_guard(then="back")`` went back, so that a number was given
    twice, it is the first one after the newest checkpoint below that number; for another one, give
    the path of the checkpoint to begin with.

    ``cuda_graph`` is left out, which changes no number. ``plateau`` depends on the records of the
    run, which are taken from a checkpoint after the update.

    Args:
        folder: the folder of the run, which the hook ``checkpoint(folder)`` wrote to; or one
            checkpoint of it, to begin with.
        step: that of the run.
        state: a state of the same script, ``TrainState.create(...)``. It is copied, and stays as it
            is.
        loaders: those of the run.
        update: ``state.step`` after the update.
        epochs, steps: the targets of the run, which schedules may depend on: ``state.epoch`` and
            ``state.step`` at its end. By default those that its checkpoints have.

    Returns:
        The batches and the indices of their samples, the state before and after, the gradients, and
        the loss and the metrics of each micro-batch.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another model or optimizer.
        ValueError: the update is before the first checkpoint, after the end of the run, in a phase
            that began after the checkpoint, or was made on another number of processes; the
            checkpoints do not have the targets; or there is no checkpoint after the update, and
            ``plateau`` needs its records.
        TypeError: an argument is not what it should be.
        StaleStateError: the state has been advanced.
        NotImplementedError: the model is sharded over processes, so it cannot be copied.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...     state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     update = replay(folder, step, toy(), batches, update=2)
        >>> update.before.model.w.item(), update.grads["w"].item(), update.after.model.w.item()
        (-1.0, 2.0, -3.0)
    """
    __tracebackhide__ = True
    check_step(step, "replay")
    check_not_stale(state, "replay")
    where = checks.folder_path("replay", "folder", folder)
    checks.integer("replay", "update", update, "state.step after the update")
    for name, target in (("epochs", epochs), ("steps", steps)):
        if target is not None:
            checks.integer("replay", name, target, "a target of the run, or None", least=0)
    read_loaders(loaders)  # checks them
    # The main process decides, because the others may see other checkpoints.
    origin = on_main_process(lambda: find_origin(where, update), "fnloop.debug.replay")
    given = None if epochs is None and steps is None else Targets(epochs, steps)
    return make_again(origin, step, state, loaders, Recorder(update), given)


# --- where to begin


@attrs.frozen
class Origin:
    """The checkpoint from which an update is made again, and what later ones say.

    Args:
        start: the checkpoint.
        later: the next one, after the update; None if there is none.
        newest: the newest one of the run.
        same: the one of the state after the update; None if there is none.
    """

    start: Saved
    later: Saved | None
    newest: Saved
    same: tuple[Saved, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that had begun at the checkpoint."""
        return decode_phases(self.start.facts.get("phases", []))

    @property
    def targets(self) -> Targets | None:
        """The targets of the run that made the update, if a checkpoint has them."""
        own = decode_targets(self.start.facts)
        if self.later is None:
            return own
        phases = decode_phases(self.later.facts.get("phases", []))
        in_one_phase = [p.name for p in phases] == [p.name for p in self.phases]
        return (decode_targets(self.later.facts) if in_one_phase else None) or own


def find_origin(folder: Path, update: int) -> Origin:
    """Return from where an update can be made again.

    Raises:
        CheckpointError: there is no checkpoint.
        ValueError: all are after the update, or its phase began after the nearest one before it.
    """
    saved = saved_in(folder)
    earlier = [i for i, one in enumerate(saved) if one.step < update]
    if not earlier:
        raise ValueError(
            f"replay: update {update} is before the first checkpoint in {folder}, which is of step "
            f"{saved[0].step}. An update is made again from a checkpoint before it: keep more of "
            "them, checkpoint(folder, keep=None), and one of the beginning, (at_start() | "
            "every(epochs=1))(checkpoint(folder, keep=None))"
        )
    at = earlier[-1]
    later = saved[at + 1] if at + 1 < len(saved) else None
    same = tuple(one for one in saved[at + 1 :] if one.step == update)
    origin = Origin(saved[at], later, saved[-1], same)
    known = {phase.name for phase in origin.phases}
    begun = () if later is None else decode_phases(later.facts.get("phases", []))
    for phase in begun:
        if phase.name not in known and phase.step < update:
            raise ValueError(
                f"replay: update {update} is of the phase {phase.name!r}, which began at step "
                f"{phase.step}, and the nearest checkpoint before it, of step {origin.start.step}, "
                "is of before the phase. What the script changed between the two is not known: "
                "give a later update, or save more often"
            )
    return origin


def restored_from(origin: Origin, state: TrainState) -> TrainState:
    """Return the state to begin with, a copy of one of the same script.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
        ValueError: a hook had stopped the run there; or the update was made on another number of
            processes.
    """
    made_on = (origin.later or origin.start).facts.get("processes", 1)
    if made_on != state.backend.data_size:
        raise ValueError(
            f"replay: the update was made on {made_on} process{'es' * (made_on != 1)}, and here "
            f"are {state.backend.data_size}, which would take other batches for it: start as many"
        )
    restored = restore(origin.start.path, snapshot(state))
    if restored.stop is None or is_interruption(restored.stop):
        return restored
    if origin.later is None:
        raise ValueError(
            f"replay: the run was stopped at step {restored.step} ({restored.stop}), and there is "
            "no later checkpoint"
        )
    return attrs.evolve(restored, stop=None)


# --- the run


def make_again(
    origin: Origin,
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    recorder: Recorder,
    targets: Targets | None = None,
) -> Update:
    """Make an update again.

    Args:
        origin: the checkpoint from which it is made.
        step, state, loaders: as in :func:`replay`.
        recorder: keeps what there is to know about the update.
        targets: those of the run; None for those that its checkpoints have.
    """
    __tracebackhide__ = True
    update = recorder.update
    _check_records(origin, step, update)
    restored = restored_from(origin, state)
    watched = recording(step, recorder)
    reached = continue_from(origin, watched, restored, loaders, targets, until=update)
    if recorder.output is None or recorder.before is None:
        raise ValueError(
            f"replay: there is no update {update}: the run ended at step {reached.step}, epoch "
            f"{reached.epoch}" + (f" ({reached.stop})" if reached.stop is not None else "")
        )
    window, before = recorder.window, recorder.before
    batches: tuple[Batch, ...] = tuple(window) if watched.window > 1 else (window,)
    indices = _indices(loaders, before, len(batches))
    bad: tuple[object, ...] | None = ()
    if not all(bool(out.loss.isfinite()) for out in (*recorder.outputs, recorder.output)):
        bad = find_bad_samples(step, before, batches, indices)
    outputs = tuple(recorder.outputs) or (recorder.output,)
    made = Update(
        batches, indices, before, dict(recorder.grads), reached, outputs, recorder.output, bad
    )
    return attrs.evolve(made, confirmed=_confirm(origin, made.after))


def _check_records(origin: Origin, step: PipelineStep, update: int) -> None:
    """Raise if the update depends on records that no checkpoint has."""
    folding = [member for member in members_of(step) if member.name == "plateau"]
    if folding and origin.later is None:
        raise ValueError(
            f"replay: {folding[0]!r} depends on the records of the run, and no checkpoint has "
            f"those between step {origin.start.step}, the newest checkpoint, and update {update}"
        )


def continue_from(
    origin: Origin,
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    targets: Targets | None = None,
    *,
    until: int,
    each: Callable[[TrainState], bool] = lambda state: False,
) -> TrainState:
    """Continue a run that was restored. Return the state that it reaches.

    Args:
        origin: where it continues.
        step, loaders: those of the run.
        state: the restored state.
        targets: those of the run; None for those that its checkpoints have.
        until: the update to end after.
        each: called at every boundary; whether to end there.

    Raises:
        ValueError: the targets are not known.
    """
    __tracebackhide__ = True
    records = None if origin.later is None else read_history(origin.newest.path)
    follow = _Follow(until, records, each)
    plan = _plan(origin, step, state, loaders, targets or origin.targets, follow)
    if plan.is_over(state) and not has_left(state, plan.phase):
        return state
    reached = state
    with reserved_generators():
        for reached in train_epochs(plan, state, Interrupts(is_alone(state))):  # noqa: B007
            pass
    if reached.stop == INTERRUPTED:
        raise KeyboardInterrupt
    return follow.restore(reached)


def _plan(
    origin: Origin,
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    targets: Targets | None,
    follow: _Follow,
) -> Plan:
    """Return the plan of the run, as it was made at first."""
    if targets is None:
        raise ValueError(
            f"replay: {origin.start.path.name} does not say how long the run was to be, which "
            "schedules may depend on: it was saved outside of a run, or by an older fnloop. Give "
            "the targets that fit had: replay(..., epochs=..., steps=...)"
        )
    running = unfinished(state.phases)
    name = None if running is None else running.name
    # Targets of its own, which are replaced: those of a phase count from where it began.
    given = (step, state, loaders, 1, None, (follow,), None, None, 1, name)
    return attrs.evolve(make_plan(*given), epochs=targets.epochs, steps=targets.steps)


class _Follow:
    """A hook that gives the run the records that it had, and ends it after an update.

    Args:
        until: the update.
        records: the history of the run; None if it is not known further than the checkpoint.
        each: called at every boundary; whether to end there.
    """

    def __init__(
        self, until: int, records: History | None, each: Callable[[TrainState], bool]
    ) -> None:
        self.until, self.records, self.each = until, records, each
        self.reached: TrainState | None = None

    def __call__(self, state: TrainState) -> TrainState:
        if self.reached is not None:  # the run has ended
            return state
        if self.records is not None:
            state = attrs.evolve(state, history=self._records_at(state))
        ended = self.each(state)
        if ended or state.step >= self.until:
            self.reached = state
            return attrs.evolve(state, stop="replayed")
        return state

    def _records_at(self, state: TrainState) -> History:
        """Return the records that the run had made at a boundary."""
        assert self.records is not None
        made = (r for r in self.records if r.step <= state.step and r.epoch <= state.epoch)
        return self.records[: sum(1 for _ in made)]

    def restore(self, state: TrainState) -> TrainState:
        """Return the state that a run has reached as it was before the run was ended."""
        if self.reached is None:
            return state
        names = ("stop", "history", "events", "left", "phases", "ends", "slots")
        return attrs.evolve(state, **{name: getattr(self.reached, name) for name in names})


# --- what is known of the update


def _indices(loaders: object, state: TrainState, batches: int) -> tuple[object, ...]:
    """Return the indices of the samples of the batches that follow a state."""
    source = open_loader(read_loaders(loaders).train, state)
    with isolated(state.backend.device):
        found = source.indices(state.epoch, state.batch, state.samples)
        known: Sequence[object] = [*itertools.islice(found, batches)]
    return (*known, *[None] * (batches - len(known)))


def _confirm(origin: Origin, state: TrainState) -> bool | None:
    """Return whether the checkpoint of a state has the same bits; None if there is none."""
    at = (state.step + state.skipped, state.epoch, state.batch)
    for saved in origin.same:
        if saved.position == at:
            try:
                return not compare_states(state, saved.path)
            except CheckpointError:  # it is damaged
                return None
    return None
