"""What a batch of a run was worth, or a change of its script: the run made again, and another."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._core.state import TrainState, snapshot, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._extensions.checkpoints.counters import Targets, decode_targets
from fnloop._extensions.checkpoints.format import shares_in
from fnloop._extensions.checkpoints.saved import Saved
from fnloop.debug._diff import (
    BITS,
    Difference,
    compare_contents,
    compare_saved,
    contents_of,
    explain_not_made,
    is_measured,
)
from fnloop.debug._replay import (
    Origin,
    Recorder,
    begun_before,
    check_records,
    continue_from,
    first_difference,
    listing,
    pair_of,
    recording,
    restored_from,
)
from fnloop.extend import (
    Batch,
    PipelineStep,
    Reader,
    Rehearsal,
    checks,
    containers,
    reprs,
    short_traceback,
    tables,
)


@short_traceback
def without(
    folder: str | os.PathLike[str],
    step: Step | tuple[Step, Step],
    state: TrainState,
    loaders: object,
    *,
    batch: int | tuple[int, int],
    rows: Sequence[int] | None = None,
    until: int | None = None,
) -> Report:
    """Repeat a run without one of its batches, and report what the batch has changed.

    From the nearest checkpoint before the batch, the run is repeated twice: as it was, and without
    the batch. All other updates keep their batches, rates and random draws of torch. So every
    difference comes from the batch. The update of the batch is left out: it changes nothing, but it
    counts in ``state.step``, so that the updates after it keep their numbers. With ``accumulate``
    its window is made of the other batches, by their weights.

    With a pair of steps nothing is left out. The first one is that of the run, and from the update
    of the batch on the second one continues it: an A/B test of a change of the script. A pair of
    the same step twice is equal, bit for bit. If it is not, the report names the update, and what
    differs in it first.

    Args:
        folder: the folder of the run, which the hook ``checkpoint(folder)`` wrote to; or one
            checkpoint of it, to begin with.
        step: that of the run; or a pair of it and another.
        state: a state of the same script, ``TrainState.create(...)``. It is copied, and stays as it
            is.
        loaders: those of the run. All but "train" are evaluated where the run has recorded them,
            and at the end.
        batch: the position of the batch, counted from 0 over the epochs of the run, each of them
            whole; or a pair of the epoch and the position in it, as ``replay`` shows them.
        rows: which of its samples to leave out, counted from 0 in the batch; None: all. Those that
            are left make a smaller batch, and its loss is their mean. ``replay`` has the index in
            the dataset of each row.
        until: ``state.step`` where both end. None: that of the newest checkpoint.

    Returns:
        The report: from which update on the weights differ, by how much after one, two, four,
        eight, ... updates and at the end, and which metrics differ. It is falsy if nothing does.
        ``report.states`` are both states at the end.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another model or optimizer.
        ValueError: no checkpoint is from before the batch; the run has no such batch, or did not
            get to ``until``; the batch has no such row; a phase began on the way; the run was made
            on several processes; or the training loader is an iterator, which cannot be read twice.
        TypeError: an argument has the wrong type or value.
        StaleStateError: the state has been advanced.
        NotImplementedError: there are several processes, or the state is a stack of models; or a
            batch is to be left out of ``tbptt``, or of turns with batches of their own.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...     state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     report = without(folder, step, toy(), batches, batch=1)
        >>> [state.model.w.item() for state in report.states]
        [-6.0, -4.0]
        >>> report.apart, report.weights[-1].distance
        (2, 2.0)

    Notes:
        Batches of the same window that come after it draw other numbers, and so do the samples that
        are left of it. Python's and NumPy's generators are seeded once in an epoch: what a loss
        function draws from them in the rest of the epoch is drawn as if the batch had never been
        there. Optimizers and averages do not see an update that is left out. ``plateau`` sees the
        records of its own run. The items of the batch are not counted, so a schedule by items comes
        later.

        Hooks are not called, and what they change is not made again. ``report.confirmed`` says
        whether the first run has the bits of a checkpoint on its way: if it does not, the report
        says how it differs. The cost is that of the updates from the checkpoint to ``until``,
        twice, with a checksum of the weights after each, and a copy of them for each row of the
        first table.
    """
    __tracebackhide__ = True
    steps = pair_of(step, PipelineStep)
    tried = [Rehearsal.of("without", one, state, loaders, before="folder, ") for one in steps]
    where = checks.folder_path("without", "folder", folder)
    if until is not None:
        until = checks.integer("without", "until", until, "state.step where both end, or None")
    changes = isinstance(step, tuple | list)
    batch = _check_batch(batch)
    chosen = None if rows is None else _check_rows(rows, changes)
    if state.backend.world_size > 1:
        raise NotImplementedError(
            "without works in one process: call it in a script that is started without torchrun"
        )
    train = tried[0].loaders["train"]
    for once in (leaf for leaf in Reader.of(train).leaves() if isinstance(leaf, Iterator)):
        raise ValueError(
            f"without reads the training loader twice, and {checks.describe(once)} can be read "
            "once: give what makes it, such as a list, a DataLoader, or a function that returns it"
        )
    _check_steps(steps, changes)
    place = _place(batch, tried[0])
    way = _find_way(where, place, until, tried)
    return _Runs(way, place, tried, until).compare(changes, chosen)


# --------------------------------------------------------------------------------------------------
# What can be left out, and where to begin.

Place = tuple[int, int]  # an epoch, and a batch of it


def _check_batch(batch: object) -> int | Place:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        meaning = "of (epoch, batch)"
        epoch = checks.integer("without", "batch[0]", batch[0], meaning, least=0)
        return epoch, checks.integer("without", "batch[1]", batch[1], meaning, least=0)
    meaning = "a position in the run, or as a pair (epoch, batch)"
    return checks.integer("without", "batch", batch, meaning, least=0)


def _check_rows(rows: object, changes: bool) -> frozenset[int]:
    if changes:
        raise TypeError(
            "without leaves samples out of a run with one step: give rows= or a pair of steps, not "
            "both"
        )
    if isinstance(rows, str | bytes) or not isinstance(rows, Sequence | range) or not rows:
        raise TypeError(
            "without expects rows as a list of the samples to leave out, such as [0, 3], or None "
            f"for the whole batch; got {checks.describe(rows)}"
        )
    return frozenset(checks.integer("without", "a row of rows", row, least=0) for row in rows)


def _check_steps(steps: tuple[PipelineStep, PipelineStep], changes: bool) -> None:
    """Raise unless one step can go without a batch, or two can be compared update by update."""
    one, other = steps
    if changes:
        if one.window != other.window:
            raise ValueError(
                "without compares two steps update by update, and these take up to "
                f"{one.window} and {other.window} batches in each: list accumulate with the same "
                "number in both"
            )
    elif one.carries:
        raise NotImplementedError(
            "without leaves a batch out of one update, but with tbptt a batch makes several, and "
            "leaves a carry: compare two steps instead, without(folder, (step, other), ...)"
        )
    elif one.turns and one.window > 1:
        raise NotImplementedError(
            "without leaves a batch out of one update, but here each turn of alternate takes "
            "batches of its own, and would take those of another: compare two steps instead, "
            "without(folder, (step, other), ...)"
        )


def _place(batch: int | Place, run: Rehearsal) -> Place:
    """Return the epoch of a batch, and its position there.

    Raises:
        ValueError: the epoch has no such batch.
    """
    source = run.source(run.state)
    if isinstance(batch, tuple):
        length = source.length_in(batch[0])
        if length is not None and batch[1] >= length:
            raise ValueError(
                f"without: epoch {batch[0]} has no batch {batch[1]}. It has {length:,}, which are "
                "counted from 0"
            )
        return batch
    epoch, left = 0, batch
    while (length := source.length_in(epoch)) is not None and left >= length > 0:
        same = 1 if source.reader.varies else left // length  # epochs of this length
        epoch, left = epoch + same, left - same * length
    return epoch, left


def _spell_batches(end: Place, run: Rehearsal) -> str:
    """Return how many batches are before a place, or, of a stream, where it is."""
    lengths = [run.source(run.state).length_in(epoch) for epoch in range(end[0])]
    if None in lengths:
        return f"{end[0]} epochs and {end[1]} batches"
    return f"{sum(map(int, filter(None, lengths))) + end[1]:,} batches, counted from 0"


@attrs.frozen
class _Way:
    """The way of a run that is made again.

    Args:
        origin: the checkpoint to begin with.
        until: ``state.step`` at the end.
        legs: the targets of the run, each with the position up to which it had them.
        confirms: the last checkpoint on the way; None if there is none.
    """

    origin: Origin
    until: int
    legs: tuple[tuple[Place, Targets], ...]
    confirms: Saved | None


_END = (1 << 62, 0)


def _place_of(saved: Saved) -> Place:
    return saved.facts["epoch"], saved.facts["batch"]


def _find_way(
    folder: Path,
    place: Place,
    until: int | None,
    runs: Sequence[Rehearsal],
) -> _Way:
    """Return how a run is made again.

    Raises:
        CheckpointError: there is no checkpoint.
        ValueError: it cannot be made again.
    """
    saved = Saved.all_in(folder)
    earlier = [i for i, one in enumerate(saved) if _place_of(one) <= place]
    epoch, batch = place
    if not earlier:
        first = _place_of(saved[0])
        raise ValueError(
            f"without: there is no checkpoint before batch {batch} of epoch {epoch} in {folder}: "
            f"the first one is at batch {first[1]} of epoch {first[0]}. Keep more of them, "
            "checkpoint(folder, keep=None), and one of the beginning, (at_start() | "
            "every(epochs=1))(checkpoint(folder, keep=None))"
        )
    origin = Origin.among(saved, earlier[-1])
    start, later = origin.start, saved[earlier[-1] + 1 :]
    if (made_on := shares_in(start.facts) or 1) > 1:
        raise ValueError(
            f"without works in one process, and this run was made on {made_on}, with other batches "
            "in each"
        )
    if until is None and _place_of(saved[-1]) <= place:
        raise ValueError(
            f"without: there is no batch {batch} of epoch {epoch} before the newest checkpoint, of "
            f"step {saved[-1].step}, where both runs end: up to there the run has "
            f"{_spell_batches(_place_of(saved[-1]), runs[0])}. If it went further, give until="
        )
    end = saved[-1].step if until is None else until
    phases = (phase for one in later for phase in one.phases)
    begun = begun_before(end, phases, start.phases)
    if begun is not None:
        raise ValueError(
            f"without: the phase {begun.name!r} began at step {begun.step}, after the checkpoint "
            f"to begin with, of step {start.step}, and what the script changed there is not known. "
            f"End before it, until={begun.step}, or leave out a batch after a later checkpoint"
        )
    if origin.targets is None:
        raise ValueError(
            f"without: {start.path.name} does not say how long the run was to be, which schedules "
            "may depend on: it was saved outside of a run, or by an older fnloop"
        )
    for run in runs:
        check_records("without", origin, run.step, end)
    legs: list[tuple[Place, Targets]] = [(_END, origin.targets)]
    for before, one in zip((start, *later), later, strict=False):
        targets = decode_targets(one.facts)
        if targets is not None and targets != legs[-1][1] and before is not start:
            legs[-1:] = [(_place_of(before), legs[-1][1]), (_END, targets)]
    on_way = [one for one in later if start.step < one.step <= end]
    return _Way(origin, end, tuple(legs), on_way[-1] if on_way else None)


# --------------------------------------------------------------------------------------------------
# The update without the batch.


@attrs.frozen(repr=False)
class _Gap:
    """What is left out of a run.

    Args:
        place: the position of the batch.
        rows: the samples of it; None: all.
        of: the step.
        counts: whether its update counts as applied if it has no other batch; None: nothing is left
            out, but the rows are checked.
    """

    place: Place
    rows: frozenset[int] | None
    of: PipelineStep
    counts: bool | None = None

    def __repr__(self) -> str:
        return f"batch={self.place}"

    def around(self, step: Step) -> Step:
        epoch, batch_out = self.place

        def without(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            window = [*batch] if self.of.window > 1 else [batch]
            at = batch_out - state.batch
            if state.epoch != epoch or not 0 <= at < len(window):
                return step(state, batch)
            window[at : at + 1] = self._left_of(window[at])
            if self.counts is None:
                return step(state, batch)
            if not window:
                return self.of.without_batch(state, self.counts)
            return step(state, window if self.of.window > 1 else window[0])

        return without

    def _left_of(self, batch: Batch) -> list[Batch]:
        """Return what is left of the batch: a smaller one, or none."""
        if self.rows is None:
            return []
        samples = containers.samples_in(batch)
        if (most := max(self.rows)) >= samples:
            raise ValueError(
                f"without: the batch has {reprs.format_count(samples, 'sample')}, counted from "
                f"0, so there is no row {most}"
            )
        kept = [row for row in range(samples) if row not in self.rows]
        return [containers.rows_of(batch, kept)] if kept else []


def _with(run: Rehearsal, gap: _Gap) -> Rehearsal:
    """Return a run that leaves something out."""
    return attrs.evolve(run, step=listing(run.step, (_leaving_out(gap),)))


@middleware("step")
def _leaving_out(gap: _Gap) -> Middleware:
    # Innermost: schedulers and what else counts updates see one that was applied.
    return Middleware("without", step=gap.around, order={"step": -1})


# --------------------------------------------------------------------------------------------------
# Both runs, from the last boundary before the batch.


class _Runs:
    """Makes both runs.

    Args:
        way: how the run is made again.
        place: the position of the batch.
        runs: both of them.
        until: as in :func:`without`.
    """

    def __init__(
        self, way: _Way, place: Place, runs: Sequence[Rehearsal], until: int | None
    ) -> None:
        self._way, self._place, self._runs, self._until = way, place, runs, until

    def compare(self, changes: bool, rows: frozenset[int] | None) -> Report:
        """Make both runs, and compare them."""
        __tracebackhide__ = True
        one, two = self._runs
        base, counts = self._find_base(_with(one, _Gap(self._place, rows, one.step)))
        way, first = self._way, _Notes(self._way.confirms)
        a = self._run(one, snapshot(base), lambda s: s.step >= way.until, first.note)
        if a.step < way.until and self._until is not None:
            raise ValueError(
                f"without: the run does not get to until={way.until}: it ended at step {a.step}, "
                f"epoch {a.epoch}{_why(a)}"
            )
        first.close()
        end = a.epoch, a.batch
        two = two if changes else _with(two, _Gap(self._place, rows, two.step, counts))
        second = _Notes(None, first)
        b = self._run(two, snapshot(base), lambda s: (s.epoch, s.batch) >= end, second.note)
        parts = ("counters", *BITS, "slots")
        difference = compare_contents(contents_of(a), contents_of(b), parts)
        weights = [*second.distances]
        if not weights or weights[-1].update != a.step:
            weights.append(_distance(a.step, _weights(a), _weights(b)))
        at = second.differs
        update = base.step + counts
        made = Report(
            self._place, None if rows is None else tuple(sorted(rows)), changes,
            update, a.step, None if at is None else first.steps[at], tuple(weights),
            tuple(_metrics(*(each.history[len(base.history) :] for each in (a, b)))),
            (a, b), difference, confirmed=first.confirmed, notes=tuple(first.texts),
        )  # fmt: skip
        if not changes or at is None:
            return made
        return attrs.evolve(made, first=self._explain((one, two), base, first, second, at))

    def _run(
        self,
        run: Rehearsal,
        state: TrainState,
        ends: Callable[[TrainState], bool],
        note: Callable[[TrainState], object] = lambda state: None,
        own: bool = True,
    ) -> TrainState:
        """Continue a run up to its end. ``own``: it keeps and makes its own records."""
        __tracebackhide__ = True
        done = False

        for stop, targets in self._way.legs:
            if done or (state.epoch, state.batch) >= stop:
                continue

            def each(state: TrainState, stop: Place = stop) -> bool:
                nonlocal done
                note(state)
                done = ends(state)
                return done or (state.epoch, state.batch) >= stop

            given = self._way.origin, run, state, targets
            state = continue_from(*given, each=each, ends=ends if own else None)
        return state

    def _find_base(self, run: Rehearsal) -> tuple[TrainState, bool]:
        """Return the state before the update of the batch, and whether the run applied that.

        How many batches an update takes is known where it has taken them. So the states of all
        boundaries that may be the last one before the batch are kept, up to the next one.
        """
        __tracebackhide__ = True
        epoch, batch = self._place
        found: list[TrainState] = []

        def keep(state: TrainState) -> None:
            if state.epoch == epoch and 0 <= batch - state.batch < run.step.window:
                found[:] = [snapshot(state)]

        restored = restored_from(self._way.origin, snapshot(run.state), "without")
        keep(restored)
        is_past = lambda s: (s.epoch, s.batch) > self._place
        reached = self._run(run, restored, is_past, keep, own=False)
        if not found:
            raise ValueError(
                f"without: the run has no batch {batch} in epoch {epoch}: it was read up to "
                f"batch {reached.batch} of epoch {reached.epoch}{_why(reached)}. Batches are "
                "counted from 0"
            )
        if (reached.epoch, reached.batch) <= self._place:
            raise ValueError(
                f"without: the run has no batch {batch} in epoch {epoch}: it ended at step "
                f"{reached.step}, epoch {reached.epoch}{_why(reached)}"
            )
        if reached.step > self._way.until:
            raise ValueError(
                f"without: batch {batch} of epoch {epoch} is in update {reached.step}, and both "
                f"runs are to end at step {self._way.until}: give a later until="
            )
        return found[0], reached.step > found[0].step

    def _explain(
        self, runs: Sequence[Rehearsal], base: TrainState, a: _Notes, b: _Notes, at: int
    ) -> str:
        """Return what differs first, in words: of the first update after which the weights do."""
        __tracebackhide__ = True
        if a.steps[at] != b.steps[at]:
            return f"update {max(a.steps[at], b.steps[at])} was applied by one, and skipped by one"
        recorders = [Recorder(a.steps[at], modules=True) for _ in runs]
        updates = []
        for run, recorder in zip(runs, recorders, strict=True):
            watched = attrs.evolve(run, step=recording(run.step, recorder))
            reached = self._run(watched, snapshot(base), lambda s, r=recorder: s.step >= r.update)
            updates.append(recorder.made(watched, reached))
        if None in updates:
            return "what is left out differs"
        what, name, text = first_difference(updates, recorders)
        if not text:
            return (
                "made once more, this update is alike in both: what it computes does not depend on "
                "the state alone, but on a kernel that is not deterministic, a clock, or something "
                "that the script changes by itself"
            )
        return f"{what} {name}: {text}" if name else f"{what}: {text}"


def _why(state: TrainState) -> str:
    return "" if state.stop is None else f" ({state.stop})"


# --- what is noted of each update


class _Notes:
    """What is noted of a run after each of its updates.

    Args:
        confirms: a checkpoint of the run, to compare with; or None.
        other: the notes of the other run, to compare with; None in the first run.

    Attributes:
        steps: ``state.step`` after each.
        differs: the place of the first update after which the weights differ from the other run's.
        distances: how far they are from them.
        confirmed: whether the state has the bits of the checkpoint; None if it was not reached.
        texts: why it has not.
    """

    def __init__(self, confirms: Saved | None, other: _Notes | None = None) -> None:
        self._confirms, self._other = confirms, other
        self._marks: list[int] = []
        self._copies: dict[int, dict[str, Tensor]] = {}
        self.steps: list[int] = []
        self.differs: int | None = None
        self.distances: list[Distance] = []
        self.confirmed: bool | None = None
        self.texts: list[str] = []

    def note(self, state: TrainState) -> None:
        """Note what an update has made."""
        n, other = len(self.steps), self._other
        self.steps.append(state.step)
        if other is None:
            self._marks.append(_mark(state))
            if not (n + 1) & n:  # after 1, 2, 4, 8, ... updates
                weights = _weights(state)  # on the host: a device may have no room for them
                self._copies[n] = {k: p.to("cpu", copy=True) for k, p in weights.items()}
            self._confirm(state)
            return
        if self.differs is None and n < len(other._marks) and _mark(state) != other._marks[n]:
            self.differs = n
        if n in other._copies and self.differs is not None:
            weights = other._copies.pop(n)
            self.distances.append(_distance(other.steps[n], weights, _weights(state)))

    def close(self) -> None:
        """Note that the run has ended."""
        if self._confirms is not None:
            self.confirmed = False
            self.texts.append(
                f"the script does not come to the checkpoint of step {self._confirms.step}: are "
                "the step, the state and the loaders those of the run? Hooks are not called"
            )

    def _confirm(self, state: TrainState) -> None:
        """Compare the state with the checkpoint, if it is the same place of the run."""
        if self._confirms is None or tuple(Saved.position_of(state)) != self._confirms.position:
            return
        path, self._confirms = self._confirms.path, None
        if (found := compare_saved(path, contents_of(state))) is None:
            return
        self.confirmed = not found
        if found:
            self.texts.append(explain_not_made("the run", "this script", state.step, found))


def _mark(state: TrainState) -> int:
    return containers.checksum([_weights(state), dict(unwrap(state).named_buffers())])


def _weights(state: TrainState) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in unwrap(state).named_parameters()}


def _distance(update: int, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Distance:
    """Return how far weights are apart; NaN if they have other names or shapes."""
    if {k: p.shape for k, p in a.items()} != {k: p.shape for k, p in b.items()}:
        return Distance(update, math.nan, math.nan)
    apart = _norm(_wide(p) - _wide(b[name]) for name, p in a.items())
    norm = _norm(map(_wide, a.values()))
    return Distance(update, apart, apart / norm if norm else math.inf if apart else 0.0)


def _wide(p: Tensor) -> Tensor:
    return p.cpu().to(torch.complex128 if p.is_complex() else torch.float64)


def _norm(tensors: Iterator[Tensor]) -> float:
    squares = [torch.linalg.vector_norm(t).square() for t in tensors]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


# --- metrics


def _metrics(a: History, b: History) -> Iterator[Apart]:
    """Yield the metrics that differ: from which record on, and by how much in the last of both."""
    both = [*zip(*(each.since(closing=False) for each in (a, b)), strict=False)]
    names = dict.fromkeys(name for mine, its in both for name in (*mine.metrics, *its.metrics))
    for name in names:
        pairs = [(mine, its) for mine, its in both if name in mine.metrics and name in its.metrics]
        first = next((mine for mine, its in pairs if _differs(name, mine, its)), None)
        if first is not None and not is_measured(name):
            mine, its = pairs[-1]
            yield Apart(name, first.step, mine.step, mine.metrics[name], its.metrics[name])


def _differs(name: str, a: Record, b: Record) -> bool:
    x, y = a.metrics[name], b.metrics[name]
    return x != y and not (math.isnan(x) and math.isnan(y))


# --------------------------------------------------------------------------------------------------
# The report.


@attrs.frozen
class Distance:
    """How far the weights of two runs are apart.

    Args:
        update: ``state.step`` after the update.
        distance: the norm of their difference, over all parameters.
        share: that norm, as a share of the norm of the weights of the first run.
    """

    update: int
    distance: float
    share: float


@attrs.frozen
class Apart:
    """A metric that differs between two runs.

    Args:
        name: its name, such as "valid/loss".
        since: the step of the first record in which it differs.
        at: the step of the last record that has it.
        a, b: its values there, of the run and of the other one.
    """

    name: str
    since: int
    at: int
    a: float
    b: float

    @property
    def difference(self) -> float:
        """What is left out, or changed, has changed it by this: the other run's minus the run's."""
        return self.b - self.a


@attrs.frozen(repr=False)
class Report(tables.Shown):
    """What :func:`without` has found: where two runs diverge, and by how much.

    It is falsy if they are equal, bit for bit.

    Args:
        batch: the epoch of the batch, and its position there.
        rows: the samples of it that were left out; None: all, or none if the step changes.
        changes: whether two steps were compared.
        update: the update of the batch: ``state.step`` after it.
        until: ``state.step`` where the first run ended.
        apart: the first update after which the weights differ; None if there is none.
        weights: how far they are apart after some updates.
        metrics: those that differ.
        states: those at the end: of the run, and of the other one. Their histories have the records
            that both have made.
        difference: what differs between the states.
        first: of two steps: what differs first in the update ``apart``.
        confirmed: whether the run that was made again has the bits of its last checkpoint before
            ``until``; None if there is none.
        notes: how it differs from that.

    Example:
        >>> from fnloop.testing import toy
        >>> weights, metrics = (Distance(2, 0.5, 0.25),), (Apart("valid/loss", 4, 4, 1.0, 1.5),)
        >>> report = Report((0, 1), None, False, 2, 4, 2, weights, metrics)
        >>> report.metrics[0].difference, bool(report)
        (0.5, True)
    """

    batch: tuple[int, int]
    rows: tuple[int, ...] | None
    changes: bool
    update: int
    until: int
    apart: int | None
    weights: tuple[Distance, ...] = ()
    metrics: tuple[Apart, ...] = ()
    states: tuple[TrainState, ...] = attrs.field(default=(), eq=False)
    difference: Difference = attrs.field(factory=Difference)
    first: str = ""
    confirmed: bool | None = None
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.apart is not None or self.metrics or self.difference)

    def _title(self) -> str:
        epoch, batch = self.batch
        which = f"batch {batch} of epoch {epoch} (update {self.update})"
        if self.changes:
            return f"the second step from {which} on, up to step {self.until}"
        if self.rows is None:
            return f"without {which}, up to step {self.until}"
        rows = f"row{'s' * (len(self.rows) > 1)} {checks.join_names([*map(str, self.rows)], 8)}"
        return f"without {rows} of {which}, up to step {self.until}"

    def _parts(self) -> list[str | tables.Table]:
        parts: list[str | tables.Table] = [self._title()]
        if not self:
            parts.append("both runs are equal, bit for bit")
        elif self.apart is None:
            found = self.difference.findings
            parts.append(
                "the weights are equal, bit for bit"
                + (f"; {found[0].name} is not: {found[0].text}" if found else "")
            )
        else:
            why = f": {self.first}" if self.first else ""
            parts.append(f"the weights diverge in update {self.apart}{why}")
            parts.append(tables.Table(_WEIGHTS, self.weights))
        if self.metrics:
            parts.append(tables.Table(_columns(self.changes), self.metrics))
        if self.confirmed:
            parts.append("the run itself is made again, bit for bit, as its checkpoint says")
        elif self.confirmed is None:
            parts.append("no checkpoint on the way says whether the run itself is made again")
        return [*parts, *self.notes]


_WEIGHTS: list[tables.Column[Distance]] = [
    tables.Column("after update", lambda d: str(d.update)),
    tables.Column("weights apart by", lambda d: reprs.format_number(d.distance)),
    tables.Column("of their norm", lambda d: f"{d.share:.3%}"),
]


def _columns(changes: bool) -> list[tables.Column[Apart]]:
    a, b = ("first step", "second step") if changes else ("with it", "without it")
    return [
        tables.Column("metric", lambda m: m.name, left=True),
        tables.Column("differs from step", lambda m: str(m.since)),
        tables.Column("at step", lambda m: str(m.at)),
        tables.Column(a, lambda m: reprs.format_metric(m.name, m.a)),
        tables.Column(b, lambda m: reprs.format_metric(m.name, m.b)),
        tables.Column("difference", lambda m: f"{m.difference:+.3g}"),
    ]
