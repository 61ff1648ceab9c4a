"""Make updates of a run again, and find the first at which two runs diverge."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from fnloop._core.history import History, Phase
from fnloop._core.records import Record
from fnloop._core.state import TrainState, snapshot, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._core.view import take_back
from fnloop._extensions.checkpoints.counters import Targets
from fnloop._extensions.checkpoints.format import CheckpointError, Contents
from fnloop._extensions.checkpoints.restore import restore
from fnloop._extensions.checkpoints.save import collect_contents
from fnloop._extensions.checkpoints.saved import Saved
from fnloop._hooks.hook import when
from fnloop._loop.evaluate import open_loader
from fnloop._loop.fit import train
from fnloop._loop.plan import Plan
from fnloop._step.pipeline import pipeline
from fnloop.debug._diff import (
    BITS,
    Difference,
    common,
    compare_contents,
    compare_tensors,
    compare_values,
    contents_of,
    find_differing,
)
from fnloop.extend import (
    Batch,
    Metrics,
    Moment,
    PipelineStep,
    Reader,
    Stop,
    check_not_stale,
    checks,
    containers,
    isolated,
    on_main_process,
    optimizers,
    reprs,
    rng,
    short_traceback,
    tables,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Make an update of a run again, bit for bit, from the nearest checkpoint before it.


@short_traceback
def replay(
    folder: str | os.PathLike[str],
    step: Step,
    state: TrainState,
    loaders: object,
    *,
    update: int,
    epochs: int | None = None,
    steps: int | None = None,
) -> Update:
    """Repeat an update of a run, bit for bit, and look into it.

    The run is restored from the nearest checkpoint before the update, and continued up to it. Hooks
    are not called, and nothing is evaluated. So what a hook has changed since that checkpoint, such
    as weights, or an epoch that it ended early, is not repeated. ``Update.confirmed`` says whether
    a checkpoint has the same bits.

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
        TypeError: an argument has the wrong type.
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

    Notes:
        Updates that were skipped have no number: they are made again on the way, and ``before`` is
        the state after them. With ``accumulate`` an update has a window of batches. With
        ``alternate`` it is a round, and ``grads`` are those of the last turn of each optimizer.
        With ``tbptt`` it has one window of a batch. If ``spike_guard(then="back")`` went back, so
        that a number was given twice, it is the first one after the newest checkpoint below that
        number; for another one, give the path of the checkpoint to begin with.

        ``cuda_graph`` is left out, which changes no number. ``compiled(update=True)`` compiles the
        loss function only, which rounds differently. ``plateau`` depends on the records of
        the run, which are taken from a checkpoint after the update.
    """
    __tracebackhide__ = True
    step = PipelineStep.checked(step, "replay", "folder, ")
    check_not_stale(state, "replay")
    where = checks.folder_path("replay", "folder", folder)
    update = checks.integer("replay", "update", update, "state.step after the update")
    meaning = "a target of the run, or None"
    if epochs is not None:
        epochs = checks.integer("replay", "epochs", epochs, meaning, least=0)
    if steps is not None:
        steps = checks.integer("replay", "steps", steps, meaning, least=0)
    Reader.each(loaders)  # checks them
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
        return self.start.phases

    @property
    def targets(self) -> Targets | None:
        """The targets of the run that made the update, if a checkpoint has them."""
        own = self.start.targets
        if self.later is None:
            return own
        in_one_phase = [p.name for p in self.later.phases] == [p.name for p in self.phases]
        return (self.later.targets if in_one_phase else None) or own


def find_origin(folder: Path, update: int) -> Origin:
    """Return from where an update can be made again.

    Raises:
        CheckpointError: there is no checkpoint.
        ValueError: all are after the update, or its phase began after the nearest one before it.
    """
    saved = Saved.all_in(folder)
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
    begun = begun_before(update, () if later is None else later.phases, origin.phases)
    if begun is not None:
        raise ValueError(
            f"replay: update {update} is of the phase {begun.name!r}, which began at step "
            f"{begun.step}, and the nearest checkpoint before it, of step {origin.start.step}, "
            "is of before the phase. What the script changed between the two is not known: "
            "give a later update, or save more often"
        )
    return origin


def begun_before(update: float, phases: Iterable[Phase], known: Sequence[Phase]) -> Phase | None:
    """Return the first of some phases that began before an update, besides those of before."""
    names = {phase.name for phase in known}
    return next((p for p in phases if p.step < update and p.name not in names), None)


def restored_from(origin: Origin, state: TrainState, caller: str = "replay") -> TrainState:
    """Return the state to begin with.

    Args:
        origin: where it begins.
        state: one of the same script, which is loaded in place.
        caller: the function, for messages.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer.
        ValueError: a hook had stopped the run there; or the update was made on another number of
            processes.
    """
    made_on = (origin.later or origin.start).processes
    if made_on != state.backend.data_size:
        raise ValueError(
            f"replay: the update was made on {made_on} process{'es' * (made_on != 1)}, and here "
            f"are {state.backend.data_size}, which would take other batches for it: start as many"
        )
    restored = restore(origin.start.path, state, shapes="file")
    take_back(restored)  # in a run the model holds what is this process's own
    if restored.stop is None or Stop.interrupts(restored.stop):
        return restored
    if origin.later is None:
        raise ValueError(
            f"{caller}: the run was stopped at step {restored.step} ({restored.stop}), and "
            "there is no later checkpoint"
        )
    return attrs.evolve(restored, stop=None)


# --- the run

Pair = tuple[Record | None, Record | None]  # a record that is made again, and that of the run


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
    check_records("replay", origin, step, update)
    restored = restored_from(origin, snapshot(state))
    watched = recording(step, recorder)
    reached = continue_from(origin, watched, restored, loaders, targets, until=update)
    made = recorder.made(watched, loaders, reached)
    if made is None:
        raise ValueError(
            f"replay: there is no update {update}: the run ended at step {reached.step}, epoch "
            f"{reached.epoch}" + (f" ({reached.stop})" if reached.stop is not None else "")
        )
    bad: tuple[object, ...] | None = ()
    if not all(bool(out.loss.isfinite()) for out in (*made.outputs, made.output)):
        bad = find_bad_samples(step, made.before, made.batches, made.indices)
    return attrs.evolve(made, nonfinite=bad, confirmed=_confirm(origin, made.after))


def check_records(caller: str, origin: Origin, step: PipelineStep, update: int) -> None:
    """Raise if an update depends on records that no checkpoint has."""
    folding = [member for member in step.members if member.name.partition("(")[0] == "plateau"]
    if folding and origin.later is None:
        raise ValueError(
            f"{caller}: {folding[0]!r} depends on the records of the run, and no checkpoint has "
            f"those between step {origin.start.step}, the newest checkpoint, and update {update}"
        )


def continue_from(
    origin: Origin,
    step: PipelineStep,
    state: TrainState,
    loaders: object,
    targets: Targets | None = None,
    *,
    until: float,
    each: Callable[[TrainState], bool] = lambda state: False,
    made: list[Pair] | None = None,
    ends: Callable[[TrainState], bool] | None = None,
) -> TrainState:
    """Continue a run that was restored. Return the state that it reaches.

    Args:
        origin: where it continues.
        step, loaders: those of the run.
        state: the restored state.
        targets: those of the run; None for those that its checkpoints have.
        until: the update to end after.
        each: called at every boundary; whether to end there.
        made: receives the records, which are made again too, each with that of the run. By default
            they are taken from the checkpoint, and nothing is evaluated.
        ends: of a run that is to be another one: whether it ends at a boundary. It keeps the
            records that it makes, where the run has made some, and evaluates every loader at its
            end.

    Raises:
        ValueError: the targets are not known.
    """
    __tracebackhide__ = True
    records = None if origin.later is None else origin.newest.history(verified=True)
    watched = tuple(key for _, key in step.watched)
    given = until, records, each, state.history, watched
    follow = _Follow(*given, made) if ends is None else _Another(*given, ends)
    plan = follow.with_records(_plan(origin, step, state, loaders, targets, follow))
    if not plan.resumed(state).todo:
        return state
    with rng.reserved_generators(), Reader.unmoved(loaders):
        reached = train(plan, state)
    take_back(reached)  # the end of a run has put the average into the model
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
    if (targets := targets or origin.targets) is None:
        raise ValueError(
            f"replay: {origin.start.path.name} does not say how long the run was to be, which "
            "schedules may depend on: it was saved outside of a run, or by an older fnloop. Give "
            "the targets that fit had: replay(..., epochs=..., steps=...)"
        )
    # Targets of its own, which are replaced: those of a phase count from where it began.
    phase = Phase.running(state.phases).name or None
    plan = Plan.of(step, state, loaders, epochs=1, hooks=(follow,), phase=phase)
    return attrs.evolve(plan, **attrs.asdict(targets))


class _Follow:
    """A hook that gives the run the records that it had, and ends it after an update.

    Args:
        until: the update.
        records: the history of the run; None if it is not known further than the checkpoint.
        each: called at every boundary; whether to end there.
        history: that of the checkpoint.
        watched: the metrics that the step watches.
        made: receives the records that are made, each with that of the run; None: none is made.
    """

    def __init__(
        self,
        until: float,
        records: History | None,
        each: Callable[[TrainState], bool],
        history: History,
        watched: tuple[str, ...],
        made: list[Pair] | None = None,
    ) -> None:
        self.until, self.records, self.each, self.made = until, records, each, made
        self.history = history  # as it was after the boundary before
        self.reached: TrainState | None = None
        self.reports = watched  # these may come in a later record of the run
        self._again: tuple[str, ...] = ()  # what names of metrics begin with that are made again

    def with_records(self, plan: Plan) -> Plan:
        """Return the plan with records, and evaluations, where the run has made some."""
        if self.made is None or self.records is None:
            return plan
        known = self.records.keys()
        evaluated = plan.loaders.evaluated
        loaders = [name for name in evaluated if any(k.startswith(f"{name}/") for k in known)]
        return self._at_records(plan, loaders, known)

    def _at_records(self, plan: Plan, loaders: Sequence[str], known: Sequence[str]) -> Plan:
        def at(prefix: str) -> Moment:
            return when(lambda state: self._has_made(state, prefix))

        evaluations = ((at("train/"), ()), *((at(f"{name}/"), (name,)) for name in loaders))
        recent = Metrics.RECENT
        every = at(recent) if any(name.startswith(recent) for name in known) else None
        self._again = ("train/", recent, *(f"{name}/" for name in loaders))
        return attrs.evolve(plan, evaluations=evaluations, record_every=every)

    def _is_made(self, record: Record) -> bool:
        """Return whether a record of the run has metrics that are made again."""
        return any(name.startswith(self._again) for name in record.metrics)

    def _has_made(self, state: TrainState, prefix: str) -> bool:
        """Return whether the run has made a record at a boundary, with some metrics."""
        assert self.records is not None
        record = next(iter(self.records.since(len(self.history), closing=False)), None)
        if record is None or (record.step, record.epoch) != (state.step, state.epoch):
            return False
        return any(name.startswith(prefix) for name in record.metrics)

    def __call__(self, state: TrainState) -> TrainState:
        if self.reached is not None:  # the run has ended
            return state
        state = self._with_records_of_run(state)
        ended = self.each(state)
        if ended or state.step >= self.until:
            self.reached = state
            # As a signal does: without the record with which a run ends, and its evaluation.
            return attrs.evolve(state, stop=Stop("replayed", "interrupted"))
        return state

    def _with_records_of_run(self, state: TrainState) -> TrainState:
        """Return the state with the records that the run had made, as far as they are known."""
        if self.records is None:
            return state
        before, self.history = self.history, self._records_at(state)
        if self.made is not None:
            made, its = (
                each.since(len(before), closing=False) for each in (state.history, self.history)
            )
            if not made:  # it may have had the numbers of hooks alone
                made = [attrs.evolve(x, metrics={}) for x in its if not self._is_made(x)]
            self.made += itertools.zip_longest(made, its)
        here = any(record.step == state.step for record in self.history[-1:])
        events = state.events if here else state.events - {"record"}
        return attrs.evolve(state, history=self.history, events=events)

    def _records_at(self, state: TrainState) -> History:
        """Return the records that the run had made at a boundary.

        To those of the boundary before, this one adds its own: one, and those with which the run
        ended there. A guard may have gone back: then several are of the same update.
        """
        assert self.records is not None
        n, here, added = len(self.history), (state.step, state.epoch), False
        while n < len(self.records):
            record = self.records[n]
            at = record.step, record.epoch
            if not (at <= here if record.closing else at == here and not added):
                break
            n, added = n + 1, added or not record.closing
        return self.history if n == len(self.history) else self.records[:n]

    def restore(self, state: TrainState) -> TrainState:
        """Return the state that a run has reached as it was before the run was ended."""
        if self.reached is None:
            return state
        reached = self.reached
        return attrs.evolve(
            state, stop=reached.stop, history=reached.history, events=reached.events,
            todo=reached.todo, phases=reached.phases, ends=reached.ends, slots=reached.slots,
        )  # fmt: skip


class _Another(_Follow):
    """The same for a run that is to be another one, and keeps the records that it makes.

    Args:
        until, records, each, history, watched: as above.
        ends: whether the run ends at a boundary.
    """

    def __init__(
        self,
        until: float,
        records: History | None,
        each: Callable[[TrainState], bool],
        history: History,
        watched: tuple[str, ...],
        ends: Callable[[TrainState], bool],
    ) -> None:
        super().__init__(until, records, each, history, watched)
        self.ends = ends
        self._every = self.history if self.records is None else self.records
        self._moments = {(r.step, r.epoch): r for r in self._every.since(closing=False)}

    def with_records(self, plan: Plan) -> Plan:
        """Return the plan with records where the run has made some, and at its end."""
        return self._at_records(plan, [*plan.loaders.evaluated], self._every.keys())

    def _has_made(self, state: TrainState, prefix: str) -> bool:
        if prefix != Metrics.RECENT and self.ends(state):
            return True
        record = self._moments.get((state.step, state.epoch))
        return record is not None and any(name.startswith(prefix) for name in record.metrics)

    def _with_records_of_run(self, state: TrainState) -> TrainState:
        return state


# --- what is known of the update


def _indices(loaders: object, state: TrainState, batches: int) -> tuple[object, ...]:
    """Return the indices of the samples of the batches that follow a state."""
    source = open_loader(Reader.each(loaders)["train"], state)
    with isolated(state.backend.device):
        found = source.indices(state.epoch, state.batch, state.samples)
        known: Sequence[object] = [*itertools.islice(found, batches)]
    return (*known, *[None] * (batches - len(known)))


def _confirm(origin: Origin, state: TrainState) -> bool | None:
    """Return whether the checkpoint of a state has the same bits; None if there is none."""
    at = Saved.position_of(state)
    saved = next((one.path for one in origin.same if one.position == at), None)
    if saved is None:
        return None
    try:
        mine = contents_of(state)
    except NotImplementedError:
        return None
    return on_main_process(lambda: _same_bits(mine, saved), "fnloop.debug.replay")


def _same_bits(mine: Contents, path: Path) -> bool | None:
    try:
        return not compare_contents(mine, contents_of(path, history=False), BITS)
    except CheckpointError:  # it is damaged
        return None


# --------------------------------------------------------------------------------------------------
# The first update at which two runs diverge, and what differs in it first.

_PARTS = ("counters", "model", "optimizer", "slots")


@attrs.frozen(repr=False)
class Bisection:
    """Where two runs diverge, as :func:`bisect` has found it. It is falsy if they do not.

    Args:
        update: ``state.step`` after the first update that differs; None if there is none, or it
            cannot be known.
        what: what differs in it first: "batch", "draws", "module", "loss", "gradient", "optimizer"
            (what the update did, from the same gradients) or "skipped" (only one was applied). Or
            "beginning": the first checkpoint that both have differs already. Or "not made again":
            a run differs from what its script makes again. "" if the runs are equal.
        name: the name of the module, the parameter or the tensor; of "not made again", "a" or "b".
        text: how it differs.
        between: the steps of the last checkpoints that are equal, and of the first that differ.
        difference: what differs in the latter.
        restores: how many checkpoints were read.

    Example:
        >>> Bisection(812, "module", "3", "1 of 8 elements differ, by up to 1", (800, 900))
        Bisection(update=812, what=module, name=3, text=1 of 8 elements differ, by up to 1,
                  between=(800, 900), restores=0)
    """

    update: int | None = None
    what: str = ""
    name: str = ""
    text: str = "the runs are equal"
    between: tuple[int | None, int | None] = (None, None)
    difference: Difference = attrs.field(factory=Difference)
    restores: int = 0

    def __bool__(self) -> bool:
        return bool(self.what)

    def _facts(self) -> dict[str, object]:
        facts = attrs.asdict(self, recurse=False, filter=lambda f, value: f.name != "difference")
        return {name: value for name, value in facts.items() if value not in (None, "")}

    def __repr__(self) -> str:
        return reprs.record_text("Bisection", self._facts())

    def _repr_html_(self) -> str:
        shown = reprs.facts("Bisection", self._facts())
        return tables.stack(shown, self.difference._repr_html_()) if self.difference else shown


@short_traceback
def bisect(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    step: Step | tuple[Step, Step],
    state: TrainState,
    loaders: object,
) -> Bisection:
    """Find the first update at which two runs diverge, and the first thing that differs in it.

    Bisection finds the first checkpoints that differ, of those that both runs have. From the last
    equal ones, both runs are continued up to the first update that differs. This update is repeated
    in both, and compared: its batches, the outputs of modules in the order in which they return,
    the losses, the gradients and the optimizer.

    Args:
        a, b: the folders of the two runs, which ``checkpoint(folder)`` wrote to.
        step: that of both, or a pair of them.
        state: a state of the same script, ``TrainState.create(...)``. It is copied, and stays as it
            is.
        loaders: those of both; or a pair of mappings with names, ``({"train": ...}, {"train":
            ...})``.

    Returns:
        The update, and the first module whose output differs, or whatever else differs first.

    Raises:
        ValueError: the runs have no checkpoint of the same step; or as :func:`replay`.
        CheckpointError: there is no checkpoint, or it is of another model or optimizer.
        TypeError: an argument has the wrong type.
        StaleStateError: the state has been advanced.
        NotImplementedError: there are several processes.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def other_loss(model, batch):                       # another loss in the third update
        ...     return toy_loss(model, batch)[0] * (2 if batch.item() == 3 else 1)
        >>> batches = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
        >>> steps = fl.pipeline()(toy_loss), fl.pipeline()(other_loss)
        >>> with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
        ...     for step, folder in zip(steps, (a, b)):
        ...         saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...         state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     found = bisect(a, b, steps, toy(), batches)
        >>> found.update, found.what, found.text
        (3, 'loss', '1 of 1 elements differ, by up to 9; first: -9 and -18, 8,388,608 ulps apart')

    Notes:
        If the two are made again alike, one of them was not made by its script: its first
        checkpoint that differs is not what it would have been. A faulty device or a kernel that is
        not deterministic makes such a run, and so does a hook that changes weights.
    """
    __tracebackhide__ = True
    steps, each_loaders = pair_of(step, PipelineStep), pair_of(loaders, Mapping)
    for one, given in zip(steps, each_loaders, strict=True):
        PipelineStep.checked(one, "bisect", "a, b, ")
        Reader.each(given)  # checks them
    check_not_stale(state, "bisect")
    if state.backend.world_size > 1:
        raise NotImplementedError(
            "bisect works in one process: call it in a script that is started without torchrun"
        )
    saved = [Saved.all_in(checks.folder_path("bisect", n, f)) for n, f in (("a", a), ("b", b))]
    both = common(*saved)
    if not both:
        reached = [f"{run[0].step} to {run[-1].step}" for run in saved]
        raise ValueError(
            "bisect: the runs have no checkpoint of the same step: those of a are of steps "
            f"{reached[0]}, and those of b of steps {reached[1]}"
        )
    place, found, reads = _find_first(both)
    if not found:
        return Bisection(between=(both[-1][0].step, None), restores=reads)
    hit = both[place][0].step
    if not place:
        return Bisection(
            None, "beginning", "", "the first checkpoints that both runs have differ already",
            (None, hit), found, reads,
        )  # fmt: skip
    runs = [
        _Run(one, given, state, _origin(run, start))
        for one, given, run, start in zip(steps, each_loaders, saved, both[place - 1], strict=True)
    ]
    made = _find_divergence(runs, both[place], found)
    between = (both[place - 1][0].step, hit)
    return attrs.evolve(made, between=between, difference=found, restores=reads + made.restores)


def pair_of(given: object, kind: type) -> tuple:
    """Return what is for the two runs: a pair of its kind, or one thing for both.

    A list of two mappings is one thing, a training loader of two batches.
    """
    pairs, asked = (tuple, all) if kind is Mapping else ((tuple, list), any)
    listed: Sequence[object] = given if checks.is_list(given) and isinstance(given, pairs) else ()
    if len(listed) == 2 and asked(isinstance(one, kind) for one in listed):
        return tuple(listed)
    return given, given


def _find_first(both: Sequence[tuple[Saved, Saved]]) -> tuple[int, Difference, int]:
    """Return the first pair of checkpoints that differ, by bisection.

    Runs that have diverged are taken to stay so.

    Returns:
        Its position, what differs, and how many checkpoints were read.
    """
    high, low = len(both) - 1, -1
    found, reads = find_differing(*both[high]), 2
    if not found:
        return high, found, reads
    while high - low > 1:
        middle = (low + high) // 2
        inside = find_differing(*both[middle])
        reads += 2
        if inside:
            high, found = middle, inside
        else:
            low = middle
    return high, found, reads


# --- both runs again


class _Run(NamedTuple):
    """One of the two runs."""

    step: PipelineStep
    loaders: object
    state: TrainState
    origin: Origin


def _origin(run: Sequence[Saved], start: Saved) -> Origin:
    later = run[run.index(start) + 1 :]
    return Origin(start, later[0] if later else None, run[-1])


def _find_divergence(
    runs: Sequence[_Run], ends: tuple[Saved, Saved], difference: Difference
) -> Bisection:
    """Continue both runs until they differ, and compare the update with which they do."""
    until, marks = ends[0].step, []
    found: list[tuple[_Mark, _Mark]] = []

    def note(state: TrainState) -> bool:
        marks.append(_mark(state))
        return False

    def compare(state: TrainState) -> bool:
        mine, its = marks[compared[0]], _mark(state)
        compared[0] += 1
        found.extend([(mine, its)] if mine != its else [])
        return bool(found) or compared[0] == len(marks)

    compared, reached = [0], []
    for run, each in zip(runs, (note, compare), strict=True):
        restored = restored_from(run.origin, snapshot(run.state))
        given = run.origin, run.step, restored, run.loaders
        reached.append(continue_from(*given, until=until, each=each))
    if not found:
        return _explain_not_made(reached, ends)
    mine, its = found[0]
    if mine.step != its.step:
        text = f"update {max(mine.step, its.step)} was applied in one run, and skipped in the other"
        return Bisection(max(mine.step, its.step), "skipped", "", text, restores=2)
    recorders = [Recorder(mine.step, modules=True) for _ in runs]
    updates = [
        make_again(run.origin, run.step, run.state, run.loaders, recorder)
        for run, recorder in zip(runs, recorders, strict=True)
    ]
    what = first_difference(updates, recorders)
    return Bisection(mine.step, *what, restores=4)


class _Mark(NamedTuple):
    """What is noted of a run after each update: the update, and a checksum of the state."""

    step: int
    state: int | None


def _mark(state: TrainState) -> _Mark:
    contents = collect_contents(state, parts=_PARTS)
    facts = [contents.facts.get(part) for part in ("model", "optimizer", "slots", "batch", "epoch")]
    return _Mark(state.step, containers.checksum([facts, *map(dict, contents.groups.values())]))


def _explain_not_made(reached: Sequence[TrainState], ends: tuple[Saved, Saved]) -> Bisection:
    """Return which of the runs is not what its script makes again."""
    for name, state, end in zip("ab", reached, ends, strict=True):
        its = contents_of(end.path, history=False)
        found = compare_contents(contents_of(state), its, ("model", "optimizer"))
        if found:
            first = found.tensor or found.findings[0]
            text = (
                f"run {name} is not made again by its script: at step {end.step}, {first.name} of "
                f"its checkpoint is not what it becomes again: {first.text}"
            )
            return Bisection(None, "not made again", name, text, restores=4)
    text = "both runs are made again alike, as far as weights and optimizers are concerned"
    return Bisection(None, "not made again", "", text, restores=4)


# --- one update of both


def first_difference(
    updates: Sequence[Update], recorders: Sequence[Recorder]
) -> tuple[str, str, str]:
    """Return what differs first in an update, its name, and how."""
    a, b = updates
    if (found := compare_values(a.batches, b.batches)) is not None:
        return "batch", "", found[0] + _whose(updates)
    for mine, its in zip(recorders[0].calls, recorders[1].calls, strict=False):
        if (called := _compare_calls(mine, its)) is not None:
            return called
    losses = [[out.loss for out in update.outputs] for update in updates]
    if (found := compare_values(*losses)) is not None:
        return "loss", "", found[0]
    for finding in compare_tensors(a.grads, b.grads):
        return "gradient", finding.name, finding.text
    inside = compare_contents(contents_of(a.after), contents_of(b.after), _PARTS)
    first = inside.findings[0] if inside else None
    return "optimizer", "" if first is None else first.name, "" if first is None else first.text


def _whose(updates: Sequence[Update]) -> str:
    """Return of which samples the batches of two updates are, in words."""
    one, other = (update._samples() for update in updates)
    if one == other:
        return one and f"; both have samples {one}"
    return f"; one has samples {one or 'unknown'}, and the other {other or 'unknown'}"


def _compare_calls(a: Called, b: Called) -> tuple[str, str, str] | None:
    """Return what differs in two calls of modules."""
    if (a.name, a.kind) != (b.name, b.kind):
        called = (f"{call.name or 'the model'} ({call.kind})" for call in (a, b))
        return "module", a.name, " is called in one, and in the other ".join(called)
    if (found := compare_values(a.output, b.output)) is None:
        return None
    if a.draws != b.draws:
        text = f"before {a.name or 'the model'} ({a.kind}) was called, one had drawn other numbers"
        return "draws", a.name, f"{text}; its output: {found[0]}"
    return "module", a.name, f"the output of {a.kind}: {found[0]}"


# --------------------------------------------------------------------------------------------------
# An update that was made again, and which of its samples made the loss infinite or NaN.


@attrs.frozen(eq=False, repr=False)
class Update:
    """An update that :func:`replay` has made again.

    Args:
        batches: the batches that it was made of: one, or a window of them.
        indices: for each batch, the indices of its samples in the dataset; by name, if the batch is
            made of several; None where they are not known, as of a stream. With several processes,
            each has its own.
        before: the state before the update.
        grads: the gradients that the optimizer took, by the name of the parameter.
        after: the state after the update.
        outputs: loss, weight, aux and metrics of each call of the loss function: one for each
            batch, or for each piece of it with ``microbatch``; two with ``sam``; one for each turn
            with ``alternate``.
        output: the same of the whole update.
        nonfinite: the indices of the samples whose loss, evaluated alone, is infinite or NaN, if
            that of the update is; (batch, row) where there are no indices. None if they cannot be
            evaluated alone, or the weights were not finite before.
        confirmed: whether a checkpoint of the state after it has the same bits; None if there is no
            such checkpoint, or each process has a part of the state (``local_sgd``).

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.debug import replay
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...     state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     update = replay(folder, step, toy(), batches, update=3)
        >>> update
        Update(update=3, epoch=0, batch=2, loss=-9, gradient norm=3, confirmed=True)
    """

    batches: tuple[Batch, ...]
    indices: tuple[object, ...]
    before: TrainState
    grads: Mapping[str, Tensor]
    after: TrainState
    outputs: tuple[Output, ...]
    output: Output
    nonfinite: tuple[object, ...] | None = ()
    confirmed: bool | None = None

    def _samples(self) -> str:
        """Return the indices of its samples in words; "" if they are not known."""
        known = [index for index in self.indices if index is not None]
        return checks.join_names([str(i) for index in known for i in _flat(index)], 8)

    def _facts(self) -> dict[str, object]:
        norm = get_total_norm(list(self.grads.values())) if self.grads else math.nan
        facts: dict[str, object] = {
            "update": self.after.step,
            "epoch": self.before.epoch,
            "batch": self.before.batch,
            "loss": reprs.format_number(float(self.output.loss)),
            "gradient norm": reprs.format_number(float(norm)),
        }
        if samples := self._samples():
            facts["samples"] = samples
        if self.nonfinite:
            facts["not finite"] = "sample " + checks.join_names([*map(str, self.nonfinite)], 8)
        elif not _is_finite(self.before):
            facts["not finite"] = "the weights before the update"
        if self.confirmed is not None:
            facts["confirmed"] = self.confirmed
        return facts

    def __repr__(self) -> str:
        return reprs.record_text("Update", self._facts())

    def _repr_html_(self) -> str:
        return reprs.facts("Update", self._facts())


def _flat(index: object) -> list[object]:
    if isinstance(index, Mapping):
        return [f"{name} {i}" for name, part in index.items() for i in _flat(part)]
    return [*index] if isinstance(index, list | tuple) else [index]


def _is_finite(state: TrainState) -> bool:
    return all(bool(p.isfinite().all()) for p in state.model.parameters())


def find_bad_samples(
    step: PipelineStep,
    state: TrainState,
    batches: Sequence[Batch],
    indices: Sequence[object],
) -> tuple[object, ...] | None:
    """Return the samples whose loss is not finite when they are evaluated alone.

    Args:
        step: the step, which is evaluated.
        state: the state before the update.
        batches: the batches.
        indices: the indices of the samples of each, or None.

    Returns:
        Their indices, or (batch, row); None if they cannot be evaluated alone, or the weights are
        not finite already.
    """
    if not _is_finite(state):
        return None
    found: list[object] = []
    try:
        for n, (batch, index) in enumerate(zip(batches, indices, strict=True)):
            pieces = containers.pieces_of(batch, 1)
            names: list[object] = [(n, row) for row in range(len(pieces))]
            if isinstance(index, list) and len(index) == len(pieces):
                names = index
            for name, piece in zip(names, pieces, strict=True):
                if not math.isfinite(float(step.evaluate(state, piece).loss)):
                    found.append(name)
    except Exception:  # a loss function may be unable to take one sample, and a batch to be cut
        return None
    return tuple(found)


# --------------------------------------------------------------------------------------------------
# What is kept of one update while it is made again, and the step that keeps it.


class Called(NamedTuple):
    """A call of a module.

    Args:
        name: its name in the model; "" is the model itself.
        kind: its class.
        output: what it returned.
        draws: a checksum of torch's generators before the call.
    """

    name: str
    kind: str
    output: object
    draws: int


@attrs.define(eq=False, repr=False)
class Recorder:
    """What is kept of an update.

    Args:
        update: ``state.step`` after it.
        modules: whether to keep what each module returns.
        before: the state before it; None as long as it was not begun.
        window: what the step was given.
        outputs: those of the loss function.
        grads: the gradients that the optimizers took, by the name of the parameter.
        calls: the calls of modules, in the order in which they returned.
        output: that of the update; None as long as it was not applied.
    """

    update: int
    modules: bool = False
    before: TrainState | None = None
    window: Batch = None
    outputs: list[Output] = attrs.field(factory=list)
    grads: dict[str, Tensor] = attrs.field(factory=dict)
    calls: list[Called] = attrs.field(factory=list)
    output: Output | None = None
    _active: bool = False
    _kept: bool = False

    def __repr__(self) -> str:
        return f"update={self.update}"

    def around(self, step: Step) -> Step:
        """Return a step that keeps what there is to know about the update, if it makes it."""

        def replayed(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if state.step + 1 != self.update or self.output is not None:
                return step(state, batch)
            self.before, self.window = snapshot(state), batch
            for kept in (self.outputs, self.grads, self.calls):  # of an update that was skipped
                kept.clear()
            with self._recording(state):
                state, out = step(state, batch)
            self.output = out if out.skip is None else None
            return state, out

        return replayed

    def inside(self, step: Step) -> Step:
        """Return a step that keeps the outputs of the loss function, as backward starts from it."""

        def noted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            state, out = step(state, batch)
            if self._active:
                self.outputs.append(_detached(out))
            return state, out

        return noted

    def made(self, step: PipelineStep, loaders: object, reached: TrainState) -> Update | None:
        """Return the update that was recorded, and the state after it; None: it was not applied."""
        if self.output is None or self.before is None:
            return None
        batches: tuple[Batch, ...] = tuple(self.window) if step.window > 1 else (self.window,)
        indices = _indices(loaders, self.before, len(batches))
        outputs = tuple(self.outputs) or (self.output,)
        grads = dict(self.grads)
        return Update(batches, indices, self.before, grads, reached, outputs, self.output)

    @contextlib.contextmanager
    def _recording(self, state: TrainState) -> Iterator[None]:
        __tracebackhide__ = True
        names = {
            id(p): torch_compat.strip_compile_prefix(n) for n, p in unwrap(state).named_parameters()
        }
        self._active = True
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_active", False)
            for optimizer in optimizers(state).values():
                before = functools.partial(self._keep_gradients, names, True)
                after = functools.partial(self._keep_gradients, names, False)
                stack.callback(optimizer.register_step_pre_hook(before).remove)
                stack.callback(optimizer.register_step_post_hook(after).remove)
            if self.modules:
                self._watch_modules(unwrap(state), stack)
            yield

    def _keep_gradients(
        self, names: dict[int, str], before: bool, optimizer: Optimizer, *_: object
    ) -> None:
        """Keep the gradients before a step; after it, those that its closure has computed."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = {names[id(p)]: p.grad for p in params if p.grad is not None and id(p) in names}
        if before:
            self._kept = bool(held)
        if before or not self._kept:
            self.grads |= {name: grad.detach().clone() for name, grad in held.items()}

    def _watch_modules(self, model: nn.Module, stack: contextlib.ExitStack) -> None:
        draws: dict[str, int] = {}
        for name, module in model.named_modules():

            def begin(module: nn.Module, given: object, name: str = name) -> None:
                draws[name] = draws_now(model)

            def end(module: nn.Module, given: object, output: object, name: str = name) -> None:
                kept = containers.map_leaves(output, _copied)
                self.calls.append(Called(name, type(module).__name__, kept, draws[name]))

            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)


def draws_now(model: nn.Module) -> int:
    """Return a checksum of torch's generators: the CPU's, and that of the model's device."""
    states = [torch.default_generator.get_state()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return functools.reduce(lambda crc, state: zlib.crc32(state.numpy().tobytes(), crc), states, 0)


def _copied(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _detached(out: Output) -> Output:
    aux = {name: containers.map_leaves(value, _copied) for name, value in out.aux.items()}
    return attrs.evolve(out, loss=out.loss.detach().clone(), aux=aux)


# --- the step


def recording(step: PipelineStep, recorder: Recorder) -> PipelineStep:
    """Return the same step with a recorder around and inside of it, and without CUDA graphs.

    A graph makes the same numbers, but what is replayed calls no Python.
    """
    return listing(step, (_updates(recorder),), (_losses(recorder),))


def listing(
    step: PipelineStep, around: Sequence[Middleware], inside: Sequence[Middleware] = ()
) -> PipelineStep:
    """Return the same step with more middleware, listed last, and without CUDA graphs.

    Args:
        step: the step.
        around: middleware of the step ring.
        inside: middleware of the loss ring: of steps in turn, that of each of them.
    """
    if step.turns:
        steps = {name: listing(one, inside) for name, one in step.turns.items()}
        return pipeline(*step.pipeline.middleware, *around)(step.with_turns(steps))
    listed = step.pipeline.middleware
    kept = [attrs.evolve(m, device=None) if m.is_ours else m for m in listed]
    return step.listing((*kept, *(inside if step.has_all_rings else ()), *around))


@middleware("loss")
def _losses(recorder: Recorder) -> Middleware:
    return Middleware("replay, losses", loss=recorder.inside)


@middleware("step")
def _updates(recorder: Recorder) -> Middleware:
    return Middleware("replay", step=recorder.around, order={"step": 1})
