"""Whether the checkpoints of a run are what its script makes of each other."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import attrs

from fnloop._core.state import TrainState, snapshot, unwrap
from fnloop._core.types import Step
from fnloop._extensions.checkpoints.format import CheckpointError, Contents
from fnloop._extensions.checkpoints.made_with import describe_making
from fnloop._extensions.checkpoints.place import Place, place_at
from fnloop._extensions.checkpoints.save import collect_contents, versions
from fnloop._extensions.checkpoints.saved import Saved
from fnloop._extensions.checkpoints.serialize import Json
from fnloop.debug._diff import Difference, Finding, compare_contents, compare_histories, is_measured
from fnloop.debug._replay import Origin, Pair, begun_before, continue_from, restored_from
from fnloop.extend import (
    Rehearsal,
    checks,
    collectives,
    is_sharded,
    on_main_process,
    reprs,
    short_traceback,
    tables,
)

WHAT = "fnloop.debug.verify"  # as messages about processes that wait name it


@short_traceback
def verify(
    folder: str | os.PathLike[str],
    step: Step,
    state: TrainState,
    loaders: object,
    spans: int | Literal["changed"] | None = 3,
) -> Report:
    """Repeat the updates between neighbouring checkpoints, and compare every bit.

    So a run can be audited with its script and its data. The spans to repeat are drawn by the
    system's generator, so they cannot be known beforehand. Compared are the weights, the buffers,
    the optimizers, the slots and the metrics of middleware, the counters, the generators, and the
    records between the two checkpoints, with their evaluations. Each checkpoint also has a digest
    of its records, each chained to the one before it. It shows where a history was edited.

    Args:
        folder: what the hook ``checkpoint(folder)`` wrote to: a folder, or an address such as
            ``"s3://bucket/run"``.
        step: that of the run.
        state: a state of the same script, ``TrainState.create(...)``. It is copied, and stays as it
            is.
        loaders: those of the run, also those that it evaluated.
        spans: how many pairs of neighbouring checkpoints to draw; None checks every pair. With 0
            nothing is trained: the checksums of all files and the digests are compared. With
            "changed" it is every pair whose updates were made by code that has changed since: what
            holds of them would have the same bits today.

    Returns:
        The report. ``report.ok`` is whether everything that was checked holds. ``report.spans`` has
        each span: whether it holds, the first record that differs, and the first tensor.
        ``report.faults`` names damaged files, edited records, and checkpoints that were changed.
        ``report.changed`` names what is not as it was when the run was made: the step, a function,
        the device, a version. ``report.touched`` has the updates that were made by other code.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another model or optimizer.
        ValueError: there is only one checkpoint; or no span can be made again, for the reason in
            the message, such as another number of processes.
        TypeError: an argument has the wrong type.
        StaleStateError: the state has been advanced.
        ImportError: the package for such addresses is not installed.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.tensor([x]) for x in (1.0, 2.0, 3.0)]
        >>> others = [torch.tensor([x]) for x in (1.0, 2.0, 5.0)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
        ...     state = fl.fit(step, toy(), batches, hooks=(saves,))
        ...     report, other = (verify(folder, step, toy(), data) for data in (batches, others))
        >>> report
        verify: 2 of 2 spans hold, bit for bit
        steps   holds  record  name  of the run, and made again
        1 to 2  yes
        2 to 3  yes
        >>> other.ok, [(span.start, span.stop, span.holds, span.name) for span in other.spans]
        (False, [(1, 2, True, ''), (2, 3, False, 'model.w')])

    Notes:
        Hooks are not called. What a hook changed by itself, such as weights, or an epoch that it
        ended early, is not made again: a report names the hooks that may have changed something.
        Nor is what a script changed between two calls of ``fit``. A span within which a phase began
        is left out. What hooks keep or add to records, ``state.extra``, times and closing records
        are not compared.

        Of two spans that differ on both sides of a checkpoint, the run is made again across it. If
        it then comes to the later one, the checkpoint itself was changed, and is named. On another
        device, or with another version of torch, bits may differ for good reason: the report says
        so, with the largest difference.

        A checkpoint names the code that the updates before it were made by: the step, the functions
        that it was given, what these refer to, and versions. What a function reads when it is
        called, such as a number of another module or a file, is not code: to be sure of it, make
        every span again.

        A digest is not a signature: an edit of all checkpoints can chain it again, and then only
        the spans show it. With spans drawn, the checksums of files are compared for their
        checkpoints only. The cost is that of the updates and evaluations of the spans. With several
        processes, all of them must call it, as many as trained the run. A model that is sharded
        over processes cannot be copied: then ``state`` is trained in place, and is stale
        afterwards.
    """
    __tracebackhide__ = True
    run = Rehearsal.of("verify", step, state, loaders, before="folder, ")
    place = place_at("verify", "folder", folder)
    if spans is not None and spans != "changed":
        meaning = 'pairs of checkpoints, or None for all, or "changed"'
        spans = checks.integer("verify", "spans", spans, meaning, least=0)
    with place.reading():
        drawn, report = on_main_process(lambda: _look(place, run, spans), WHAT)
        again = _Again(run)
        made: list[tuple[Span, Sequence[Saved]]] = []
        for start, stop, fault in drawn:
            if fault is not None:
                made.append((Span(start.step, stop.step, None, text=fault), ()))
                continue
            for saved in (start, stop):
                place.fetch_on_all(saved.path)
            made.append((again.make(start, [stop])[0], (start, stop)))
        faults = (*report.faults, *(() if report.elsewhere else _find_changed(again, made)))
    notes = report.notes
    if again.not_made:
        notes += (f"not compared in records: {checks.join_names([*again.not_made])}",)
    spans_made = tuple(span for span, _ in made)
    return attrs.evolve(report, spans=spans_made, faults=faults, notes=notes)


# --------------------------------------------------------------------------------------------------
# What is known without training: which spans there are, and whether files and digests are right.


def _look(
    place: Place, run: Rehearsal, spans: int | Literal["changed"] | None
) -> tuple[list[tuple[Saved, Saved, str | None]], Report]:
    """Return the two checkpoints of each span that was drawn, and what is known without training.

    With each pair comes why it cannot be made again, if it cannot.
    """
    damaged: list[str] = []
    saved = Saved.all_in(place, damaged)
    model, device = unwrap(run.state), run.state.backend.device
    here = {**versions(), **describe_making(run.step, model, device, ())}
    changes = [_compare_making(one.facts, here) for one in saved]
    touched = tuple(_find_touched(saved, changes))
    pairs = [(a, b) for a, b in itertools.pairwise(saved) if a.position < b.position]
    if spans == "changed":
        pairs = [(a, b) for a, b in pairs if any(t.holds(a.step, b.step) for t in touched)]
    reasons = {} if spans == 0 else {b.position: _why_not(a, b, run.state) for a, b in pairs}
    possible = [(a, b) for a, b in pairs if reasons.get(b.position) is None]
    if spans not in (0, "changed") and not possible:
        raise ValueError(f"verify: no span of {place.name} can be made again: {_explain(reasons)}")
    count = min(spans, len(possible)) if isinstance(spans, int) else len(possible)
    drawn = sorted(random.SystemRandom().sample(range(len(possible)), count))
    ends = [one for i in drawn for one in possible[i]]
    bad: dict[Path, str] = {}
    for path in dict.fromkeys(one.path for one in ends or saved):
        try:
            place.verify(path)
        except CheckpointError as error:
            bad[path] = str(error)
    faults = (*damaged, *bad.values(), *_check_records([s for s in saved if s.path not in bad]))
    changed = {name: text for found in changes for name, text in found.items()}
    moved = [changed[name] for name in ("device", "torch") if name in changed]
    whole = lambda a, b: next((bad[one.path] for one in (a, b) if one.path in bad), None)
    spans_drawn = [(a, b, whole(a, b)) for a, b in map(possible.__getitem__, drawn)]
    notes = _notes(saved, reasons, drawn)
    if spans == "changed" and not touched:
        notes.append("no update was made by code that has changed since")
    return spans_drawn, Report((), faults, changed, tuple(notes), "; ".join(moved), touched)


def _explain(reasons: Mapping[tuple[int, int, int], str | None]) -> str:
    found = next(filter(None, reasons.values()), None)
    return found or (
        "there is no pair of neighbouring checkpoints. Keep more of them, "
        "checkpoint(folder, keep=None), or compare the checksums and the digest alone: "
        "verify(..., spans=0)"
    )


def _why_not(start: Saved, stop: Saved, state: TrainState) -> str | None:
    """Return why the updates between two checkpoints cannot be made again; None if they can."""
    origin, where = Origin(start, stop, stop), f"steps {start.step} to {stop.step}"
    if (made_on := stop.processes) != state.backend.data_size:
        return (
            f"{where} were made on {made_on} process{'es' * (made_on != 1)}, and here are "
            f"{state.backend.data_size}: start as many"
        )
    begun = begun_before(stop.step, stop.phases, start.phases)
    if begun is not None:
        return (
            f"the phase {begun.name!r} began within {where}, and what the script changed there is "
            "not known"
        )
    if origin.targets is None:
        return f"{where} were saved outside of a run, or by an older fnloop"
    return None


def _notes(
    saved: Sequence[Saved], reasons: Mapping[tuple[int, int, int], str | None], drawn: Sequence[int]
) -> list[str]:
    """Return what the report says besides: what is left out, and what hooks may have changed."""
    notes = [f"left out: {reason}" for reason in reasons.values() if reason is not None]
    hooks = saved[-1].facts.get("made_with", {}).get("hooks", ()) if drawn else ()
    if hooks:
        names = checks.join_names([*hooks])
        notes.append(f"hooks are not called, and what they change is not made again: {names}")
    return notes


# --- what the run was made with


def _compare_making(facts: Mapping[str, Json], here: Mapping[str, Json]) -> dict[str, str]:
    """Return what a checkpoint says that its run was made with, and is not so here."""
    kept = facts.get("made_with", {})
    was = {**facts.get("versions", {}), **kept}
    names = [name for name in ("step", "device", *versions()) if name in was]
    found = {
        name: f"{name} was {was[name]}, and is {here[name]}"
        for name in names
        if was[name] != here[name]
    }
    own: Mapping[str, str] = here["functions"]
    functions: Mapping[str, str] = kept.get("functions", own)
    for name in sorted({*functions, *own}):
        if functions.get(name) != own.get(name):
            how = "has other code" if name in functions and name in own else "is not in both"
            found[name] = f"the function {name} {how}"
    return found


def _find_touched(
    saved: Sequence[Saved], changes: Sequence[Mapping[str, str]]
) -> Iterator[Touched]:
    """Yield the updates that other code has made, in stretches with the same changes.

    A checkpoint names the code that has made the updates since the one before it.
    """
    rows = zip([0, *(one.step for one in saved)], saved, changes, strict=False)
    made = [
        (begin, one.step, tuple(text for name, text in found.items() if name != "device"))
        for begin, one, found in rows
        if begin != one.step
    ]
    for texts, stretch in itertools.groupby(made, lambda row: row[2]):
        steps = [*stretch]
        if texts:
            yield Touched(steps[0][0], steps[-1][1], texts)


# --- digests


def _check_records(saved: Sequence[Saved]) -> list[str]:
    """Return which checkpoints have records that are not those of the run.

    The digest of each must be that of its records, and the records of each must be the first ones
    of the next.
    """
    faults: list[str] = []
    chains, digests = _Chains(), []
    for one in saved:
        try:
            digests.append((one, chains.of(one)))
        except CheckpointError as error:
            faults.append(str(error))
    for i, (one, own) in enumerate(digests):
        if one.facts.get("digest", own[-1]) != own[-1]:
            near = [other for other, _ in (*digests[i + 1 : i + 2], *digests[i - 1 : i])]
            faults.append(
                f"{one.path.name}: its records were edited, as its digest is not theirs"
                f"{_differing(one, near)}"
            )
    agree = lambda i, j: digests[j][1][: len(digests[i][1])] == digests[i][1]
    links = [(i, i + 1, agree(i, i + 1)) for i in range(len(digests) - 1)]
    for first, last in _groups(links):
        inside = [one for one, _ in digests[first + 1 : last]]
        if inside and agree(first, last):
            faults += [
                f"{one.path.name}: its records were edited, as those of the checkpoints around it "
                f"agree{_differing(one, [digests[last][0]])}"
                for one in inside
            ]
        else:
            a, b = digests[first][0], digests[last][0]
            faults.append(
                f"{a.path.name} and {b.path.name}: the records of one were edited, or the run went "
                f"back in between{_differing(a, [b])}"
            )
    return faults


class _Chains:
    """The digests of histories. Blocks of records that several have are read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[str]] = {}

    def of(self, saved: Saved) -> list[str]:
        """Return the digest of the first records of a checkpoint: of none, of one, of two, ..."""
        found = [""]
        for block in saved.blocks:
            key = (block, found[-1])
            if key not in self._known:
                self._known[key] = saved.digests(found[-1], saved.rows_in(block))
            found += self._known[key]
        return [*found, *saved.digests(found[-1], saved.facts["history"])]


def _differing(one: Saved, others: Sequence[Saved]) -> str:
    """Return the first record that differs from those of another checkpoint."""
    for other in others:
        mine, its = (each.history() for each in (one, other))
        both = min(len(mine), len(its))
        if (found := compare_histories(mine[:both], its[:both])) is not None:
            return f". {found.name}: {found.text}"
    return ""


def _groups(pairs: Iterable[tuple[int, int, bool]]) -> Iterator[tuple[int, int]]:
    """Yield from where to where pairs follow each other of which none is right."""
    first = last = -1
    for a, b, right in pairs:
        if right or a != last:
            if last >= 0:
                yield first, last
            first, last = (-1, -1) if right else (a, b)
        else:
            last = b
    if last >= 0:
        yield first, last


# --------------------------------------------------------------------------------------------------
# Make spans again, and compare what is reached with the checkpoints.

_PARTS = (
    *("counters", "model", "optimizer", "slots", "averages", "apart", "generators"),
    *("metrics", "shares"),
)


class _Again:
    """Makes spans of a run again.

    Args:
        run: the run.
    """

    def __init__(self, run: Rehearsal) -> None:
        self._run, self._state = run, run.state
        self._in_place = is_sharded(run.state.model)
        self.not_made: dict[str, None] = {}  # the metrics of records that are not made again

    def make(self, start: Saved, stops: Sequence[Saved]) -> list[Span]:
        """Continue from a checkpoint, and compare what is reached with later ones on the way.

        Every process must call it.

        Returns:
            A span for each of these, all from the first one.
        """
        __tracebackhide__ = True
        waiting, found = [*stops], []
        made: list[Pair] = []
        origin = Origin(start, stops[-1], stops[-1])
        given = self._state if self._in_place else snapshot(self._state)
        restored = restored_from(origin, given)

        def compare(state: TrainState) -> bool:
            if Saved.position_of(state) >= waiting[0].position:
                stop = waiting.pop(0)
                difference = _compare_with(state, stop)
                found.append(_span(start, stop, difference, made))
            return not waiting

        reached = continue_from(origin, self._run, restored, each=compare, made=made)
        if self._in_place:
            self._state = reached
        for one, its in made:
            known = () if one is None else one.metrics
            lost = () if its is None else (name for name in its.metrics if name not in known)
            self.not_made |= dict.fromkeys(name for name in lost if not is_measured(name))
        left = stops[-1].history().since(len(reached.history), closing=False)
        if left and not waiting:
            record = f"record of step {left[0].step}"
            text = "is not at a boundary of the run"
            found[-1] = attrs.evolve(found[-1], holds=False, name=record, text=text)
        why = "" if reached.stop is None else f" ({reached.stop})"
        text = f"made again, the run ends at step {reached.step}, epoch {reached.epoch}{why}"
        return [*found, *(Span(start.step, one.step, False, text=text) for one in waiting)]


def _compare_with(state: TrainState, stop: Saved) -> Difference:
    """Return what differs between a checkpoint and a state, in any process: all of them call it."""
    made = collect_contents(state, parts=tuple(_SAVED))
    found = collectives.on_every_process(lambda: _compare_own(state, made, stop), WHAT)
    every = collectives.gather_from_all(found, WHAT)
    first = next((each for each in every if each), every[0])
    others = sum(each.others + bool(each.tensor) for each in every) - bool(first.tensor)
    return attrs.evolve(first, others=others, largest=max(each.largest for each in every))


_SAVED = ("model", "optimizer", "slots", "counters", "metrics")


def _compare_own(state: TrainState, made: Contents, stop: Saved) -> Difference:
    """Return what differs between what this process would write, and what it has written."""
    its = stop.written(made, state.backend.main)
    groups = {**{name: {} for name in made.groups}, **its.groups}
    mine = {**{name: {} for name in groups}, **made.groups}
    kept = its.facts.get("made_with", {}).get("hook_slots", ())
    facts = its.facts if state.backend.main else made.facts
    ends = (attrs.evolve(its, groups=groups, facts=facts), attrs.evolve(made, groups=mine))
    one, other = (_comparable(each, kept) for each in ends)
    return compare_contents(one, other, _PARTS)


def _comparable(contents: Contents, hook_slots: Sequence[str]) -> Contents:
    """Return the contents without times, and without what hooks have changed or keep."""
    facts = json.loads(json.dumps(dict(contents.facts)))
    facts |= {"stop": None, "ends": None}
    facts["phases"] = [
        {k: v for k, v in phase.items() if k not in ("stop", "done")}
        for phase in facts.get("phases", ())
    ]
    if not facts["batch"]:  # those of Python and NumPy are for hooks that are still to be called
        facts["generators"] = None
    facts["slots"] = _without(hook_slots, facts.get("slots"))
    facts["brought"] = _without(hook_slots, facts.get("brought"))
    for name in ("metrics", "shares"):
        value = facts.get(name)
        times = [key for each in _mappings(value) for key in each if is_measured(key)]
        facts[name] = _without(times, value)
    left_out = [f"slots.{name}" for name in hook_slots]
    left_out += [] if facts["batch"] else ["generators"]
    groups = {
        group: {
            name: tensor
            for name, tensor in tensors.items()
            if not any(name == each or name.startswith(f"{each}.") for each in left_out)
            and not is_measured(re.sub(r"^(metrics|shares\.\d+)\.", "", name))
        }
        for group, tensors in contents.groups.items()
        if group not in hook_slots
    }
    return attrs.evolve(contents, facts=facts, groups=groups)


def _mappings(value: Json) -> list[dict[str, Json]]:
    """Return the mappings in a value of a file, which may hold anything."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is dict]


def _without(names: Collection[str], value: Json) -> Json:
    """Return a value without some names in its mappings."""
    if isinstance(value, list):
        return [_without(names, each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: each for name, each in value.items() if name not in names}


# --- records


def _compare_records(made: Iterable[Pair]) -> tuple[Finding, int] | None:
    """Return the first record of the run that differs from the one made again, and its step."""
    for again, its in made:
        if again is None or its is None:
            one = its or again
            assert one is not None
            text = "is in the run alone" if again is None else "is not in the run"
            return Finding("record", f"record of step {one.step}", text), one.step
        known = {name: value for name, value in its.metrics.items() if name in again.metrics}
        found = compare_histories([attrs.evolve(its, metrics=known)], [again])
        if found is None and its.items not in (None, again.items):
            found = Finding("record", "", f"items is {its.items}, and {again.items}")
        if found is not None:
            return attrs.evolve(found, name=f"record of step {its.step}"), its.step
    return None


def _span(start: Saved, stop: Saved, difference: Difference, made: Sequence[Pair]) -> Span:
    record = _compare_records(made)
    if record is not None:
        difference = attrs.evolve(difference, findings=(record[0], *difference.findings))
    if not difference:
        return Span(start.step, stop.step, True)
    counters = [finding for finding in difference.findings if finding.kind == "counter"]
    first = next(iter(counters), difference.tensor or difference.findings[-1])
    update = None if record is None else record[1]
    return Span(start.step, stop.step, False, update, first.name, first.text, difference)


# --- checkpoints that were changed


def _find_changed(again: _Again, made: Sequence[tuple[Span, Sequence[Saved]]]) -> Iterator[str]:
    """Yield which checkpoints were changed, of those between spans that differ.

    The run is made again across them: if it then comes to the last one, bit for bit, those on the
    way from which it differs are not of the run. The span after them is made too, because it may
    hold: a bit that is lost in rounding was changed anyway.
    """
    __tracebackhide__ = True
    ends = [(span, *pair) for span, pair in made if pair]
    places = [*{saved.path: saved for _, a, b in ends for saved in (a, b)}.values()]
    pairs = [(places.index(a), places.index(b), span.holds is True) for span, a, b in ends]
    following = {a: b for a, b, _ in pairs}
    for first, last in _groups(pairs):
        start, *stops = places[first : following.get(last, last) + 1]
        if len(stops) < 2:
            continue
        *inside, end = again.make(start, stops)
        for stop, span in zip(stops, inside, strict=False) if end.holds else ():
            if not span.holds:
                yield (
                    f"{stop.path.name} was changed: the run comes from step {start.step} to step "
                    f"{end.stop}, but not through it. {span.name}: {span.text}"
                )


# --------------------------------------------------------------------------------------------------
# The report.


@attrs.frozen
class Span:
    """The updates between two neighbouring checkpoints, made again.

    Args:
        start, stop: ``state.step`` of the two.
        holds: whether what is made again has every bit of the later one; None if it was not made
            again, for the reason in ``text``.
        update: the step of the first record that differs, if one does: with a record after each
            update, that is the first update that does.
        name: the first counter that differs; or else the first tensor, setting or record.
        text: how it differs: first what the checkpoint has, then what is made again.
        difference: all that differs.
    """

    start: int
    stop: int
    holds: bool | None
    update: int | None = None
    name: str = ""
    text: str = ""
    difference: Difference = attrs.field(factory=Difference, repr=False)


@attrs.frozen
class Touched:
    """Updates that were made by code that has changed since.

    Args:
        start, stop: ``state.step`` before the first and after the last of them.
        changed: what has changed, in words.
    """

    start: int
    stop: int
    changed: tuple[str, ...]

    def holds(self, start: int, stop: int) -> bool:
        """Return whether the updates from one step to another are among them."""
        return self.start <= start and stop <= self.stop


@attrs.frozen(repr=False)
class Report(tables.Shown):
    """What :func:`verify` has found.

    Args:
        spans: those that were made again.
        faults: damaged files, edited records, and checkpoints that were changed.
        changed: what is not as it was when the run was made, by its name, and how.
        notes: what was left out, and what hooks may have changed.
        elsewhere: how the device or torch differs from where the run was made; or "".
        touched: the updates that were made by code that has changed since.

    Example:
        >>> report = Report((Span(0, 4, True), Span(4, 8, False, None, "model.w", "1 and 2")))
        >>> report.ok, [span.name for span in report.spans]
        (False, ['', 'model.w'])
    """

    spans: tuple[Span, ...] = ()
    faults: tuple[str, ...] = ()
    changed: Mapping[str, str] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()
    elsewhere: str = ""
    touched: tuple[Touched, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything that was checked holds."""
        return not self.faults and all(span.holds for span in self.spans)

    @property
    def largest(self) -> float:
        """The largest difference of all tensors of all spans."""
        return max((span.difference.largest for span in self.spans), default=0.0)

    def _parts(self) -> list[str | tables.Table[Span]]:
        parts: list[str | tables.Table[Span]] = [f"verify: {self._title()}"]
        if self.spans:
            columns: list[tables.Column[Span]] = [
                tables.Column("steps", lambda span: f"{span.start} to {span.stop}", left=True),
                tables.Column("holds", _verdict, left=True),
                tables.Column("record", lambda s: "" if s.update is None else str(s.update)),
                tables.Column("name", lambda span: span.name, left=True),
                tables.Column("of the run, and made again", lambda span: span.text, left=True),
            ]
            parts.append(tables.Table(columns, self.spans))
        parts += [f"fault: {fault}" for fault in self.faults]
        parts += [f"changed: {'; '.join(each.changed)}. {self._say(each)}" for each in self.touched]
        said = {text for each in self.touched for text in each.changed}
        parts += [f"changed: {text}" for text in self.changed.values() if text not in said]
        return [*parts, *self.notes]

    def _say(self, touched: Touched) -> str:
        """Return which updates were made by other code, and whether today's makes the same."""
        text = f"Steps {touched.start} to {touched.stop} were made before that"
        made = [s for s in self.spans if s.holds is not None and touched.holds(s.start, s.stop)]
        if not made:
            return f"{text}, and none of them was made again"
        same = sum(bool(span.holds) for span in made)
        spans = reprs.format_count(len(made), "span")
        return f"{text}: {same} of {spans} made again would have the same bits today"

    def _title(self) -> str:
        if not self.spans:
            right = "are not as the run wrote them" if self.faults else "are as the run wrote them"
            return f"nothing was made again; files and records {right}"
        held = sum(span.holds is True for span in self.spans)
        text = f"{held} of {reprs.format_count(len(self.spans), 'span')} hold, bit for bit"
        if held == len(self.spans) or not self.elsewhere:
            return text
        return (
            f"{text}. Bits may differ here: {self.elsewhere}. The largest difference is "
            f"{self.largest:.3g}"
        )


def _verdict(span: Span) -> str:
    return {True: "yes", False: "no", None: "not made again"}[span.holds]
