"""Make updates of a run again, and find the first at which two runs diverge."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fnloop._core.history import History, Phase
from fnloop._core.records import Record
from fnloop._core.state import TrainState, snapshot, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._extensions.checkpoints.counters import Targets
from fnloop._extensions.checkpoints.restore import restore
from fnloop._extensions.checkpoints.save import collect_contents
from fnloop._extensions.checkpoints.saved import Saved
from fnloop._hooks.hook import when
from fnloop._step.pipeline import pipeline
from fnloop.debug._diff import (
    Difference,
    common,
    compare_contents,
    compare_saved,
    compare_tensors,
    compare_values,
    contents_of,
    explain_not_made,
    find_differing,
)
from fnloop.debug._watch import Gradients, noting
from fnloop.extend import (
    Batch,
    Metrics,
    Moment,
    PipelineStep,
    Rehearsal,
    Stop,
    View,
    checks,
    containers,
    host,
    isolated,
    on_main_process,
    reprs,
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
    run = Rehearsal.of("replay", step, state, loaders, before="folder, ")
    where = checks.folder_path("replay", "folder", folder)
    update = checks.integer("replay", "update", update, "state.step after the update")
    meaning = "a target of the run, or None"
    if epochs is not None:
        epochs = checks.integer("replay", "epochs", epochs, meaning, least=0)
    if steps is not None:
        steps = checks.integer("replay", "steps", steps, meaning, least=0)
    # The main process decides, because the others may see other checkpoints.
    origin = on_main_process(lambda: find_origin(where, update), "fnloop.debug.replay")
    given = None if epochs is None and steps is None else Targets(epochs, steps)
    return make_again(origin, run, Recorder(update), given)


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

    @staticmethod
    def among(saved: Sequence[Saved], at: int, update: int = -1) -> Origin:
        """Return the origin at one of the checkpoints of a run, for an update."""
        later = saved[at + 1 :]
        same = tuple(one for one in later if one.step == update)
        return Origin(saved[at], next(iter(later), None), saved[-1], same)

    @property
    def targets(self) -> Targets | None:
        """The targets of the run that made the update, if a checkpoint has them."""
        own = self.start.targets
        if self.later is None:
            return own
        in_one_phase = [p.name for p in self.later.phases] == [p.name for p in self.start.phases]
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
    origin = Origin.among(saved, earlier[-1], update)
    later = () if origin.later is None else origin.later.phases
    begun = begun_before(update, later, origin.start.phases)
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
    _take_back(restored)
    if restored.stop is None or Stop.interrupts(restored.stop):
        return restored
    if origin.later is None:
        raise ValueError(
            f"{caller}: the run was stopped at step {restored.step} ({restored.stop}), and "
            "there is no later checkpoint"
        )
    return attrs.evolve(restored, stop=None)


def _take_back(state: TrainState) -> None:
    """Let the model of a state outside of a run hold what it holds in one: this process's own."""
    for slot in state.slots.values():
        if isinstance(slot, View):
            slot.take_back(state)


# --- the run

Pair = tuple[Record | None, Record | None]  # a record that is made again, and that of the run
# When which loaders are evaluated, and when a record of an interval is made.
Moments = tuple[Sequence[tuple[Moment, Sequence[str]]], Moment | None]


def make_again(
    origin: Origin, run: Rehearsal, recorder: Recorder, targets: Targets | None = None
) -> Update:
    """Make an update again.

    Args:
        origin: the checkpoint from which it is made.
        run: the run.
        recorder: keeps what there is to know about the update.
        targets: those of the run; None for those that its checkpoints have.
    """
    __tracebackhide__ = True
    step, update = run.step, recorder.update
    check_records("replay", origin, step, update)
    restored = restored_from(origin, snapshot(run.state))
    watched = attrs.evolve(run, step=recording(step, recorder))
    reached = continue_from(origin, watched, restored, targets, until=update)
    made = recorder.made(watched, reached)
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
    run: Rehearsal,
    state: TrainState,
    targets: Targets | None = None,
    *,
    until: float = math.inf,
    each: Callable[[TrainState], bool] = lambda state: False,
    made: list[Pair] | None = None,
    ends: Callable[[TrainState], bool] | None = None,
) -> TrainState:
    """Continue a run that was restored. Return the state that it reaches.

    Args:
        origin: where it continues.
        run: the run.
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
    if (targets := targets or origin.targets) is None:
        raise ValueError(
            f"replay: {origin.start.path.name} does not say how long the run was to be, which "
            "schedules may depend on: it was saved outside of a run, or by an older fnloop. Give "
            "the targets that fit had: replay(..., epochs=..., steps=...)"
        )
    records = None if origin.later is None else origin.newest.history(verified=True)
    watched = tuple(key for _, key in run.step.watched)
    given = until, records, each, state.history, watched
    follow = _Follow(*given, made) if ends is None else _Another(*given, ends=ends)
    evaluations, recent = follow.moments_of([name for name in run.loaders if name != "train"])
    with host().replaced(records=False):  # a graph makes the same numbers, but calls no Python
        reached = run.train(
            state, **attrs.asdict(targets), hooks=(follow,), evaluations=evaluations,
            record_every=recent,
        )  # fmt: skip
    if reached is state:  # there is nothing to do
        return state
    _take_back(reached)
    return follow.restore(reached)


@attrs.define(eq=False, repr=False, slots=False)
class _Follow:
    """A hook that gives the run the records that it had, and ends it after an update.

    Args:
        until: the update.
        records: the history of the run; None if it is not known further than the checkpoint.
        each: called at every boundary; whether to end there.
        history: that of the checkpoint, and then as it was after the boundary before.
        reports: the metrics that the step watches, which may come in a later record of the run.
        made: receives the records that are made, each with that of the run; None: none is made.
        reached: the state where the run was ended.
    """

    until: float
    records: History | None
    each: Callable[[TrainState], bool]
    history: History
    reports: tuple[str, ...]
    made: list[Pair] | None = None
    reached: TrainState | None = None
    _again: tuple[str, ...] = ()  # what names of metrics begin with that are made again

    def moments_of(self, loaders: Sequence[str]) -> Moments:
        """Return when to evaluate these and to make records: where the run has made some."""
        if self.made is None or self.records is None:
            return (), None
        known = self.records.keys()
        found = [name for name in loaders if any(k.startswith(f"{name}/") for k in known)]
        return self._at_records(found, known)

    def _at_records(self, loaders: Sequence[str], known: Sequence[str]) -> Moments:
        def at(prefix: str) -> Moment:
            return when(lambda state: self._has_made(state, prefix))

        evaluations = [(at("train/"), ()), *((at(f"{name}/"), (name,)) for name in loaders)]
        recent = Metrics.RECENT
        every = at(recent) if any(name.startswith(recent) for name in known) else None
        self._again = ("train/", recent, *(f"{name}/" for name in loaders))
        return evaluations, every

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


@attrs.define(eq=False, repr=False, slots=False)
class _Another(_Follow):
    """The same for a run that is to be another one, and keeps the records that it makes.

    Args:
        ends: whether the run ends at a boundary.
    """

    ends: Callable[[TrainState], bool] = attrs.field(kw_only=True)

    def moments_of(self, loaders: Sequence[str]) -> Moments:
        """Return when to evaluate these and to make records: also at the end."""
        every = self.history if self.records is None else self.records
        self._moments = {(r.step, r.epoch): r for r in every.since(closing=False)}
        return self._at_records(loaders, every.keys())

    def _has_made(self, state: TrainState, prefix: str) -> bool:
        if prefix != Metrics.RECENT and self.ends(state):
            return True
        record = self._moments.get((state.step, state.epoch))
        return record is not None and any(name.startswith(prefix) for name in record.metrics)

    def _with_records_of_run(self, state: TrainState) -> TrainState:
        return state


# --- what is known of the update


def _indices(run: Rehearsal, state: TrainState, batches: int) -> tuple[object, ...]:
    """Return the indices of the samples of the batches that follow a state."""
    source = run.source(state)
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
    found = on_main_process(lambda: compare_saved(saved, mine), "fnloop.debug.replay")
    return None if found is None else not found


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
    each = zip(pair_of(step, PipelineStep), pair_of(loaders, Mapping), strict=True)
    runs = [Rehearsal.of("bisect", one, state, given, before="a, b, ") for one, given in each]
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
    starts = zip(saved, both[place - 1], strict=True)
    origins = [Origin.among(run, run.index(start)) for run, start in starts]
    made = _find_divergence([*zip(origins, runs, strict=True)], both[place])
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


def _find_divergence(
    runs: Sequence[tuple[Origin, Rehearsal]], ends: tuple[Saved, Saved]
) -> Bisection:
    """Continue both runs until they differ, and compare the update with which they do."""
    until, marks = ends[0].step, []
    found: list[tuple[int, int]] = []  # the update of both

    def note(state: TrainState) -> bool:
        marks.append(_mark(state))
        return False

    def compare(state: TrainState) -> bool:
        mine, its = marks[compared[0]], _mark(state)
        compared[0] += 1
        found.extend([(mine[0], its[0])] if mine != its else [])
        return bool(found) or compared[0] == len(marks)

    compared, reached = [0], []
    for (origin, run), each in zip(runs, (note, compare), strict=True):
        restored = restored_from(origin, snapshot(run.state))
        reached.append(continue_from(origin, run, restored, until=until, each=each))
    if not found:
        return _explain_not_made(reached, ends)
    mine, its = found[0]
    if mine != its:
        text = f"update {max(mine, its)} was applied in one run, and skipped in the other"
        return Bisection(max(mine, its), "skipped", "", text, restores=2)
    recorders = [Recorder(mine, modules=True) for _ in runs]
    updates = [make_again(*run, recorder) for run, recorder in zip(runs, recorders, strict=True)]
    what = first_difference(updates, recorders)
    return Bisection(mine, *what, restores=4)


def _mark(state: TrainState) -> tuple[int, int]:
    """Return what is noted of a run after each update: the update, and a checksum of the state."""
    contents = collect_contents(state, parts=_PARTS)
    facts = [contents.facts.get(part) for part in ("model", "optimizer", "slots", "batch", "epoch")]
    return state.step, containers.checksum([facts, *map(dict, contents.groups.values())])


def _explain_not_made(reached: Sequence[TrainState], ends: tuple[Saved, Saved]) -> Bisection:
    """Return which of the runs is not what its script makes again."""
    for name, state, end in zip("ab", reached, ends, strict=True):
        if found := compare_saved(end.path, contents_of(state)):
            text = explain_not_made(f"run {name}", "its script", end.step, found)
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

    def made(self, run: Rehearsal, reached: TrainState) -> Update | None:
        """Return the update that was recorded, and the state after it; None: it was not applied."""
        if self.output is None or self.before is None:
            return None
        batches: tuple[Batch, ...] = tuple(self.window) if run.step.window > 1 else (self.window,)
        indices = _indices(run, self.before, len(batches))
        outputs = tuple(self.outputs) or (self.output,)
        grads = dict(self.grads)
        return Update(batches, indices, self.before, grads, reached, outputs, self.output)

    @contextlib.contextmanager
    def _recording(self, state: TrainState) -> Iterator[None]:
        __tracebackhide__ = True
        self._active = True
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_active", False)
            seen = stack.enter_context(Gradients(state))
            if self.modules:
                self._watch_modules(unwrap(state), stack)
            yield
        for name, p in unwrap(state).named_parameters():
            if id(p) in seen.found:
                self.grads[torch_compat.strip_compile_prefix(name)] = seen.found[id(p)]

    def _watch_modules(self, model: nn.Module, stack: contextlib.ExitStack) -> None:
        draws: dict[str, int] = {}
        for name, module in model.named_modules():

            def begin(module: nn.Module, given: object, name: str = name) -> None:
                draws[name] = draws_now(model)

            stack.callback(module.register_forward_pre_hook(begin).remove)

        def end(name: str, module: nn.Module, output: object) -> None:
            kept = containers.map_leaves(output, _copied)
            self.calls.append(Called(name, type(module).__name__, kept, draws[name]))

        stack.enter_context(noting(model.named_modules(), end))


def draws_now(model: nn.Module) -> int:
    """Return a checksum of torch's generators: the CPU's, and that of the model's device."""
    states = [torch.default_generator.get_state()]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return containers.checksum(states)


def _copied(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _detached(out: Output) -> Output:
    aux = {name: containers.map_leaves(value, _copied) for name, value in out.aux.items()}
    return attrs.evolve(out, loss=out.loss.detach().clone(), aux=aux)


# --- the step


def recording(step: PipelineStep, recorder: Recorder) -> PipelineStep:
    """Return the same step with a recorder around and inside of it."""
    return listing(step, (_updates(recorder),), (_losses(recorder),))


def listing(
    step: PipelineStep, around: Sequence[Middleware], inside: Sequence[Middleware] = ()
) -> PipelineStep:
    """Return the same step with more middleware, listed last.

    Args:
        step: the step.
        around: middleware of the step ring.
        inside: middleware of the loss ring: of steps in turn, that of each of them.
    """
    if step.turns:
        steps = {name: listing(one, inside) for name, one in step.turns.items()}
        return pipeline(*step.pipeline.middleware, *around)(step.with_turns(steps))
    innermost = inside if step.has_all_rings else ()
    return step.listing((*step.pipeline.middleware, *innermost, *around))


@middleware("loss")
def _losses(recorder: Recorder) -> Middleware:
    return Middleware("replay, losses", loss=recorder.inside)


@middleware("step")
def _updates(recorder: Recorder) -> Middleware:
    return Middleware("replay", step=recorder.around, order={"step": 1})
