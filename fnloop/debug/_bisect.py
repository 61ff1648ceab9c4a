"""The first update at which two runs diverge, and what differs in it first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs

from fnloop._checkpoint.listing import Saved, saved_in
from fnloop._checkpoint.save import collect_contents
from fnloop._core.state import TrainState, check_not_stale
from fnloop._data.loaders import read_loaders
from fnloop._data.position import checksum
from fnloop._display import checks, html
from fnloop._loop.peers import is_alone
from fnloop._loop.plan import check_step
from fnloop._step.pipeline import PipelineStep
from fnloop.debug._diff import common, find_differing
from fnloop.debug._difference import (
    Difference,
    compare_contents,
    compare_tensors,
    compare_values,
    contents_of,
)
from fnloop.debug._recorder import Called, Recorder
from fnloop.debug._replay import Origin, continue_from, make_again, restored_from
from fnloop.debug._update import Update

__all__ = ["Bisection", "bisect"]

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
        return html.record_text("Bisection", self._facts())

    def _repr_html_(self) -> str:
        shown = html.facts("Bisection", self._facts())
        return html.stack(shown, self.difference._repr_html_()) if self.difference else shown


def bisect(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    step: PipelineStep | tuple[PipelineStep, PipelineStep],
    state: TrainState,
    loaders: object,
) -> Bisection:
    """Find the first update at which two runs diverge, and what differs in it first.

    Of the checkpoints that both runs have, the first that differ are found by bisection. From the
    last equal ones both runs are continued, up to the first update that differs. That one is made
    again in both, and compared: its batches, the outputs of modules in the order in which they
    return, the losses, the gradients and the optimizer.

    If the two are made again alike, one of them was not made by its script: its first checkpoint
    that differs is not what it would have been. A faulty device or a kernel that is not
    deterministic makes such a run, and so does a hook that changes weights.

    Args:
        a, b: the folders of the two runs, which ``checkpoint(folder)`` wrote to.
        step: that of both, or a pair of them.
        state: a state of the same script, ``TrainState.create(...)``. It is copied, and stays as it
            is.
        loaders: those of both; or a pair of mappings with names, ``({"train": ...}, {"train":
            ...})``.

    Returns:
        The update, and the first module whose output differs, or what else does.

    Raises:
        ValueError: the runs have no checkpoint of the same step; or as :func:`replay`.
        CheckpointError: there is no checkpoint, or it is of another model or optimizer.
        TypeError: an argument is not what it should be.
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
    """
    __tracebackhide__ = True
    steps, each_loaders = _pair(step, PipelineStep), _pair(loaders, Mapping)
    for one, given in zip(steps, each_loaders, strict=True):
        check_step(one, "bisect")
        read_loaders(given)  # checks them
    check_not_stale(state, "bisect")
    if not is_alone(state):
        raise NotImplementedError(
            "bisect works in one process: call it in a script that is started without torchrun"
        )
    saved = [saved_in(checks.folder_path("bisect", n, f)) for n, f in (("a", a), ("b", b))]
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


def _pair(given: object, kind: type) -> tuple:
    """Return what is for the two runs: a pair of its kind, or one thing for both."""
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, kind) for x in given):
        return given
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
        restored = restored_from(run.origin, run.state)
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
    what = _first_difference(updates, recorders)
    return Bisection(mine.step, *what, restores=4)


class _Mark(NamedTuple):
    """What is noted of a run after each update: the update, and a checksum of the state."""

    step: int
    state: int | None


def _mark(state: TrainState) -> _Mark:
    contents = collect_contents(state, parts=_PARTS)
    facts = [contents.facts.get(part) for part in ("model", "optimizer", "slots", "batch", "epoch")]
    return _Mark(state.step, checksum([facts, *map(dict, contents.groups().values())]))


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


def _first_difference(
    updates: Sequence[Update], recorders: Sequence[Recorder]
) -> tuple[str, str, str]:
    """Return what differs first in an update, its name, and how."""
    a, b = updates
    if (found := compare_values(a.batches, b.batches)) is not None:
        return "batch", "", f"{found[0]}; the samples are {a.indices} and {b.indices}"
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
