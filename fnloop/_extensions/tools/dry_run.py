"""A run on trial: two updates, one batch of each loader, each hook once, one save."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from fnloop._core.state import TrainState
from fnloop._core.types import Middleware, Output, Step
from fnloop._data.loaders import sharded
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.format import CheckpointError
from fnloop._extensions.checkpoints.restore import restore
from fnloop._extensions.checkpoints.save import check_resumable, save
from fnloop._extensions.middleware.metric import derive, metric
from fnloop._extensions.middleware.schedule import plateau, schedule, torch_scheduler
from fnloop._extensions.middleware.times import throughput, timings
from fnloop._hooks.hook import BuiltIn, Hook, Wrapper, every
from fnloop._loop.errors import check_returned
from fnloop._step.pipeline import pipeline
from fnloop.extend import (
    Batch,
    Moment,
    PipelineStep,
    Rehearsal,
    Stop,
    Wrap,
    checks,
    collectives,
    containers,
    name_of,
    optimizers,
    reprs,
    tables,
    torch_compat,
)

Value = TypeVar("Value")
Result = TypeVar("Result")
HookFn = Callable[[TrainState], TrainState]
UPDATES = 2


@attrs.frozen
class Finding:
    """A line of a :class:`Report`.

    Args:
        kind: "loader", "metric", "update", "record", "hook", "resume" or "graph"; of
            ``check_script`` "same", "resume", "evaluation", "accumulation" or "host read".
        name: what it is about.
        text: what was seen.
        problem: whether something would not work.
    """

    kind: str
    name: str
    text: str
    problem: bool = False


@attrs.frozen(repr=False)
class Report(tables.Shown):
    """What :func:`dry_run` has seen: a table as text, and in a notebook as HTML.

    Args:
        findings: the lines.
        title: what has seen it.
    """

    findings: tuple[Finding, ...]
    title: str = "dry run"

    @property
    def problems(self) -> tuple[str, ...]:
        """What would not work, such as what would not resume."""
        found = [f for f in self.findings if f.problem]
        by_name = ("loader", "metric", "hook")
        return tuple(f"{f.kind}{f' {f.name}' * (f.kind in by_name)}: {f.text}" for f in found)

    def _parts(self) -> list[str | tables.Table[Finding]]:
        columns: list[tables.Column[Finding]] = [
            tables.Column("what", lambda f: f.kind, left=True),
            tables.Column("name", lambda f: f.name, left=True),
            tables.Column("seen", lambda f: f"{'! ' * f.problem}{f.text}", left=True),
        ]
        count = len(self.problems)
        found = reprs.format_count(count, "problem") if count else "no problem"
        return [f"{self.title}: {found}", tables.Table(columns, self.findings)]


def dry_run(
    step: Step,
    state: TrainState,
    loaders: object,
    hooks: Sequence[HookFn] | None = (),
) -> Report:
    """Try a run before it starts: everything once, on copies of the state.

    It makes two updates, evaluates one batch of every other loader, makes a record, calls every
    hook once, saves, restores, and compares the restored run with the uninterrupted one, bit for
    bit. It raises what ``fit`` would raise before its first update. A loader, metric or hook that
    raises later is named as a problem in the report, and the rest is tried without it.

    Args:
        step: as in ``fit``.
        state: the newest state.
        loaders: as in ``fit``. An iterator is refused, because reading it would use it up.
        hooks: as in ``fit``, but none by default.

    Returns:
        A report: the batches of each loader, how many items a loss is a mean of, times, records,
        what each hook did, whether the run resumes, and whether ``cuda_graph`` could capture its
        update, which is a problem only if it is listed. It prints as a table; ``problems`` is a
        tuple of what would not work.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError, ValueError, KeyError: as ``fit``; or a loader is an iterator.
        NotImplementedError: the model is sharded.
        Exception: any exception of an update, with a note of where.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> batches = [torch.ones(2)] * 8
        >>> report = dry_run(fl.pipeline()(toy_loss), toy(), (batches, batches))
        >>> [finding.text for finding in report.findings if finding.kind == "resume"]
        ['bit for bit, in the middle of an epoch']

    Notes:
        Nothing is left behind: the state and all generators stay as they are, and so do the
        positions of loaders that continue where they were. Checkpoints are written to a temporary
        folder. ``checkpoint``, ``to_csv``, ``to_jsonl`` and ``profiled`` write there as well, and
        not to their own paths. ``track``, ``progress``, ``live_plot`` and ``time_limit`` are not
        called. Your own hooks and loaders are called as they are: what they write by themselves,
        they write. Up to three copies of the model and the optimizer exist at once.

        With several processes, every process has to call it. Each tries its share of the data, and
        all return the same report: times are those of the main process, and a problem of some
        processes names them. The temporary folder is in the current one if there are several
        machines.

    Replaces: lightning.fast_dev_run
    """
    __tracebackhide__ = True
    trial = trial_of("dry_run", step, state, loaders, hooks, several=True)
    trial.check_metrics()
    step, failed = _tried_metrics(trial.step)
    trial = attrs.evolve(trial, step=step)
    findings, first = _read(trial)
    if "train" not in first:
        return Report(_of_all([*findings, *failed.values()]))
    # Hooks may need the numbers of a loader that raises: a training batch stands in for its batch.
    one_batch = {name: sharded([first.get(name, first["train"])]) for name in trial.loaders}
    trial = attrs.evolve(trial, loaders={**one_batch, "train": trial.loaders["train"]})
    with _temporary_folder(state) as folder:
        findings += _train(trial, first, folder)
        resumed, obstacles = _resume(trial, folder)
    findings += [*resumed, *failed.values()]
    for explain_uncapturable in extensions("graphs of an update"):
        obstacles += explain_uncapturable(trial.copy(), first["train"])
        problem = bool(obstacles) and _must_be_captured(step)
        texts = obstacles or ["nothing was seen that cuda_graph could not capture"]
        findings += [Finding("graph", "update", text, problem) for text in texts]
    return Report(_of_all(findings))


# --- several processes


@contextlib.contextmanager
def _temporary_folder(state: TrainState) -> Iterator[Path]:
    """Make a folder that all processes see, and remove it when all are done."""
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", state.backend.world_size))
    place = None if one_machine == state.backend.world_size else Path.cwd()
    with contextlib.ExitStack() as stack:
        folder = ""
        if state.backend.main:
            made = tempfile.TemporaryDirectory(prefix="fnloop-dry-run-", dir=place)
            folder = stack.enter_context(made)
        yield Path(collectives.gather_from_all(folder)[0])
        collectives.gather_from_all(None)


def _of_all(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return what the main process has seen, and the problems of all processes."""
    seen = collectives.gather_from_all(tuple(findings))
    found = dict.fromkeys(seen[0]) | dict.fromkeys(f for each in seen for f in each if f.problem)
    return tuple(_naming_processes(f, seen) if f.problem else f for f in found)


def _naming_processes(problem: Finding, seen: Sequence[Sequence[Finding]]) -> Finding:
    ranks = [str(rank) for rank, findings in enumerate(seen) if problem in findings]
    if len(ranks) == len(seen):
        return problem
    who = f"process{'es' * (len(ranks) > 1)} {checks.join_names(ranks)}: "
    return attrs.evolve(problem, text=who + problem.text)


# --- loaders


def _read(trial: Rehearsal) -> tuple[list[Finding], dict[str, Batch]]:
    """Read two batches of each loader, and evaluate the first one.

    Return what was seen, and the first batches, but those of loaders that raise.
    """
    found: dict[str, Finding] = {}
    raised_everywhere: set[str] = set()

    def without_those_that_raise(
        given: Mapping[str, Value], do: Callable[[str, Value], Result]
    ) -> dict[str, Result]:
        """Do something with each. Leave those out with which any process cannot do it."""
        done, raised = {}, set()
        for name, value in given.items():
            try:
                done[name] = do(name, value)
            except Exception as error:
                raised.add(name)
                found[name] = Finding("loader", name, _in_words(error), problem=True)
        every = collectives.gather_from_all(raised)
        raised_everywhere.update(set.intersection(*every))
        raised = set().union(*every)
        return {name: result for name, result in done.items() if name not in raised}

    def update(name: str, seen: tuple[str, Batch, str]) -> Batch:
        alone = attrs.evolve(trial, loaders={name: sharded([seen[1]])})
        advance(alone, trial.copy(), 1, trial.state.epoch + 2)
        return note(name, seen, _rows(seen[1]))

    def note(name: str, seen: tuple[str, Batch, str], items: str) -> Batch:
        before, batch, after = seen
        found[name] = Finding("loader", name, f"{before}; {items}; {after}")
        return batch

    read = without_those_that_raise(trial.loaders, lambda name, _: _read_one(trial, name))
    begun = trial.begun() if "train" in read else trial.state
    evaluate = lambda name, seen: note(name, seen, _items(trial.step, begun, seen[1]))
    first = without_those_that_raise(read, evaluate)
    if "train" in read and "train" in raised_everywhere:
        # A run evaluates no batch of it, and a loss function may be for training only. An update
        # exchanges gradients, so all processes try one, or none.
        first = without_those_that_raise({"train": read["train"]}, update) | first
    return [found[name] for name in trial.loaders if name in found], first


def _read_one(trial: Rehearsal, name: str) -> tuple[str, Batch, str]:
    """Return what was seen of a loader before its first batch was evaluated, and that batch.

    Nothing is exchanged with other processes: in one of them it may raise.
    """
    source = trial.source(trial.state, name, exchanges=False)
    batches, seconds = trial.read(source, 2)
    if not batches:
        raise ValueError(f"the {name} loader gave no batch.{source.why_empty()}")
    took = "first in " + ", next in ".join(map(tables.format_milliseconds, seconds))
    length = "unknown length"
    if source.length is not None:
        length = f"{source.length:,} batch{'es' * (source.length != 1)}"
    return f"{length}; {_shapes(batches[0])}", batches[0], took


def _in_words(error: Exception) -> str:
    """Return an exception in one line, with its notes."""
    parts = [f"{type(error).__name__}: {error}", *checks.notes_of(error)]
    return "; ".join(" ".join(part.split()) for part in parts)


def _shapes(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_shapes(part)}" for key, part in batch.items())
    if isinstance(batch, tuple | list):
        return ", ".join(_shapes(part) for part in batch)
    return reprs.summarize(batch)


def _items(step: PipelineStep, state: TrainState, batch: Batch) -> str:
    """Return how many items the loss of a batch is the mean of, and who says so."""
    try:
        out = step.evaluate(state, batch)
    except ValueError as error:
        if "cannot evaluate a loader" in str(error):  # of raw
            return _rows(batch)
        raise
    items = f"{reprs.format_number(float(out.weight))} items"
    if isinstance(out.aux, Mapping) and "weight" in out.aux:
        return f'{items}, by aux["weight"]'
    return _rows(batch) if float(out.weight) == containers.batch_size_of(batch) else items


def _rows(batch: Batch) -> str:
    return f"{containers.batch_size_of(batch)} items, its leading dimension"


# --- metrics and hooks that may raise


def _tried_metrics(step: PipelineStep) -> tuple[PipelineStep, dict[str, Finding]]:
    """Return a step whose metrics may raise, and where each of them that does is noted."""
    failed: dict[str, Finding] = {}

    def note(member: Middleware, error: Exception) -> None:
        name = repr(member)
        finding = Finding("metric", reprs.shorten(name), _in_words(error), problem=True)
        failed.setdefault(name, finding)

    def tried(member: Middleware, wrap: Wrap | None) -> Wrap | None:
        def wrapped(step: Step) -> Step:
            replies: list[tuple[TrainState, Output]] = []

            def noting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
                replies.append(step(state, batch))
                return replies[-1]

            measured = wrap(noting)  # type: ignore[misc]

            def measure(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
                replies.clear()
                try:
                    return measured(state, batch)
                except Exception as error:
                    if not replies:  # it was the loss function that raised
                        raise
                    note(member, error)
                    return replies[-1]

            return measure

        return None if wrap is None else wrapped

    def derived(member: Middleware) -> Middleware:
        def report(loader: str | None, numbers: dict[str, float]) -> Mapping[str, float]:
            try:
                return member.report(loader, numbers)  # type: ignore[misc]
            except Exception as error:
                note(member, error)
                return {}

        return attrs.evolve(member, report=report)

    def guarded(member: Middleware) -> Middleware:
        factory = None if member.call is None else member.call.factory
        if factory is derive:
            return derived(member)
        if factory is not metric:
            return member
        return attrs.evolve(
            member,
            forward=tried(member, member.forward),
            loss=tried(member, member.loss),
            evaluation=tried(member, member.evaluation),
        )

    if not step.has_all_rings:  # raw and alternate have steps of their own inside
        return step, failed
    return step.listing([*map(guarded, step.pipeline.middleware)]), failed


class Tried(Wrapper):
    """A hook that is called at the end of an epoch, and never after it has raised: ``error``."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.error = hook, None

    def _try(self, call: Callable[[], Result], otherwise: Result) -> Result:
        if self.error is not None:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.error = error
            return otherwise

    def __call__(self, state: TrainState) -> TrainState:
        if "epoch" not in state.events:
            return state
        return self._try(lambda: check_returned(self.hook, state, self.hook(state)), state)

    def around(self, call: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
        checked = lambda: check_returned(self.hook, state, call(state), call.__name__)
        return self._try(checked, state)

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        self._try(lambda: self.hook.evaluating(state, loader, done, total), None)

    def collects(self, state: TrainState, loader: str) -> bool:
        return self._try(lambda: self.hook.collects(state, loader), False)

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        self._try(lambda: self.hook.receive(state, outputs), None)

    @property
    def reports(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.hook.reports

    @property
    def makes_records(self) -> Mapping[str, Moment]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict.fromkeys(self.hook.makes_records, every(epochs=1))

    def numbers(self, state: TrainState) -> Mapping[str, float]:
        return self._try(lambda: self.hook.numbers(state), {})


# --- updates, records and hooks


def _train(trial: Rehearsal, first: Mapping[str, Batch], folder: Path) -> list[Finding]:
    """Make the updates, the evaluations and the record, and call the hooks."""
    __tracebackhide__ = True
    state, hooks, times = trial.state, trial.hooks, [time.perf_counter()]

    def end(state: TrainState) -> TrainState:
        if len(times) <= UPDATES:
            times.append(time.perf_counter())
        ends = len(times) > UPDATES and "epoch" not in state.events
        return attrs.evolve(state, ends="epoch") if ends else state

    innermost = [hook.innermost if isinstance(hook, Wrapper) else hook for hook in hooks]
    tried = [_safe(hook, folder / f"hook-{i}") for i, hook in enumerate(innermost)]
    called = [safe for safe, _ in tried if safe is not None]
    reached = trial.train(trial.copy(), epochs=state.epoch + 1, hooks=(end, *called))
    updates = [
        Finding("update", str(i), f"{tables.format_milliseconds(after - before)}, with its batches")
        for i, (before, after) in enumerate(itertools.pairwise(times), 1)
    ]
    if reached.skipped > state.skipped:
        text = f"{reached.skipped - state.skipped} of {UPDATES} updates were skipped"
        updates.append(Finding("update", "skipped", text))
    record = reached.history[-1].metrics
    for name in first:
        of = {k.partition("/")[2]: v for k, v in record.items() if k.split("/")[0] == name}
        shown = ", ".join(f"{key} {reprs.format_metric(key, value)}" for key, value in of.items())
        updates.append(Finding("record", name, shown))
    findings = []
    for hook, (safe, text) in zip(hooks, tried, strict=True):
        error = None if safe is None else safe.error
        seen = text if error is None else _in_words(error)
        findings.append(
            Finding("hook", reprs.shorten(name_of(hook)), seen, problem=error is not None)
        )
    if reached.stop is not None:
        findings.append(Finding("hook", "stop", f"a hook stopped the run: {reached.stop}"))
    return [*updates, *findings]


def _safe(hook: Hook, place: Path) -> tuple[Tried | None, str]:
    """Return a hook that leaves no trace in place of one, or None, and what is to be said."""
    if hook.untried is not None:
        return None, f"not called: {hook.untried}"
    copied, where = hook.tried(place) if isinstance(hook, BuiltIn) else (hook, "")
    return Tried(copied), "called" + (f", with a temporary {where}" if where else "")


# --- resuming


def _resume(trial: Rehearsal, folder: Path) -> tuple[list[Finding], list[str]]:
    """Compare a run that was saved and restored after its first update with one that was not.

    Return what was seen, and what its updates read to the host.
    """
    __tracebackhide__ = True
    target = trial.state.epoch + 2  # the same for all, as a schedule may depend on it
    watch = HostReads()
    with contextlib.nullcontext() if compiles(trial.step) else watch:
        straight = advance(trial, trial.copy(), UPDATES, target)
    try:
        check_resumable(trial.state)
        half = advance(trial, trial.copy(), 1, target)
        began = time.perf_counter()
        save(half, folder / "checkpoint")
        saved = time.perf_counter()
        resumed = restore(folder / "checkpoint", trial.copy())
        took = [
            tables.format_milliseconds(saved - began),
            tables.format_milliseconds(time.perf_counter() - saved),
        ]
        resumed = advance(trial, resumed, UPDATES - 1, target)
    except CheckpointError as error:
        return [Finding("resume", "checkpoint", str(error), problem=True)], watch.places
    times = Finding("save", "checkpoint", f"saved in {took[0]}, restored in {took[1]}")
    if (where := find_difference(contents_of(straight), contents_of(resumed), "state")) is None:
        text = "bit for bit, in the middle of an epoch"
        return [times, Finding("resume", "checkpoint", text)], watch.places
    text = (
        f"one update after a restore, {where}: a loader whose batches differ each time, a kernel "
        "that is not deterministic, or something that no checkpoint holds, such as a buffer with "
        "persistent=False"
    )
    return [times, Finding("resume", "checkpoint", text, problem=True)], watch.places


# --- graphs


def _must_be_captured(step: PipelineStep) -> bool:
    """Return whether a step lists ``cuda_graph``, which raises where it cannot capture."""
    listed = (m.call for m in step.pipeline.middleware if m.name == "cuda_graph")
    return any(call is None or not call.kwargs.get("fallback") for call in listed)


# --------------------------------------------------------------------------------------------------
# Find where an update reads tensors to the host, which no graph can.

_PACKAGE = str(Path(__file__).parents[2])


class HostReads(torch_compat.Operators):
    """Notes where code of the user reads a tensor to the host during an update."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def see(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        if torch_compat.reads_to_host(func):
            place = _reader()
            if place is not None and place not in self.places:
                self.places.append(place)
        return func(*args, **kwargs)


_UPDATES = ("/_step/", "/middleware/", "/engines/", "/alternate.py")  # where updates are made


def _reader() -> str | None:
    """Return the line of the user that reads to the host in an update, and in nothing else."""
    frame, place, in_update = sys._getframe(3), None, False
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            in_update = in_update or any(room in file for room in _UPDATES)
            if place is None or not in_update or file.endswith("_loop/evaluate.py"):
                return None  # fnloop itself reads, where it may; or it is not an update
        elif place is None and "/torch/" not in file:
            where = f"{Path(file).name}, line {frame.f_lineno}, in {code.co_name}"
            place = f"reads a tensor to the host ({where}): cuda_graph cannot capture that"
        frame = frame.f_back
    return place if in_update else None


# --------------------------------------------------------------------------------------------------
# A few updates on a copy of a state, which leave the state and the generators as they are.

RATES = (schedule, torch_scheduler, plateau)  # they need the length or the records of a run
REPORTS = (metric, derive, timings, throughput)  # they change no update
ASSUMED = 1 << 30  # items of the run that is tried, which only its fit knows
EVALUATED = every(epochs=1)  # when a run evaluates by default


def trial_of(
    owner: str,
    step: Step,
    state: TrainState,
    loaders: object,
    hooks: Sequence[HookFn] | None = (),
    several: bool = False,
) -> Rehearsal:
    """Check what a run is tried with, and return a rehearsal of it.

    Args:
        owner: who tries it.
        step, state, loaders, hooks: as in ``fit``.
        several: whether several processes may.

    Raises:
        StaleStateError, TypeError, ValueError, KeyError: as ``fit``; or a loader is an iterator.
        NotImplementedError: there are several processes, and only one may try it; or the model is
            sharded.
    """
    trial = Rehearsal.of(owner, step, state, loaders, hooks)
    for name, loader in trial.loaders.items():
        if isinstance(loader, Iterator):
            raise ValueError(
                f"{owner} would use up the {name} loader, which is an iterator: give a "
                "function that returns one, or a list"
            )
    if state.backend.world_size > 1 and not several:
        raise NotImplementedError(
            f"{owner} works in one process: call it in a script that is started without torchrun"
        )
    return attrs.evolve(trial, assumed_items=ASSUMED)


def with_members(
    step: PipelineStep,
    left_out: Collection[Callable[..., object]] = (),
    inner: Sequence[Middleware] = (),
) -> PipelineStep:
    """Return the same step without what a trial leaves out, and with other middleware inside.

    Args:
        step: the step of a loss function, or of ``raw``.
        left_out: the factories whose middleware to leave out, besides those of rates and reports.
        inner: the middleware to list first.
    """
    without = {*left_out, *RATES, *REPORTS}
    listed = step.pipeline.middleware
    kept = [m for m in listed if m.call is None or m.call.factory not in without]
    return step.listing(pipeline(*inner, *kept).middleware)


def train_copy(
    step: PipelineStep,
    state: TrainState,
    loader: object,
    updates: int,
    hooks: Sequence[HookFn],
    epochs: int,
) -> TrainState:
    """Train a copy of a state for a few updates. A loader that is too short is repeated.

    With a target in epochs too, a run that leaves out all updates is not an error.
    """
    __tracebackhide__ = True
    trial = Rehearsal.of("fit", step, state, loader, alone="training")
    trial = attrs.evolve(trial, assumed_items=ASSUMED)
    last = state.epoch + epochs
    return trial.train(trial.copy(), epochs=last, steps=state.step + updates, hooks=hooks)


def advance(
    trial: Rehearsal,
    copied: TrainState,
    updates: int,
    epochs: int,
    evaluate_every: Moment = EVALUATED,
) -> TrainState:
    """Make a number of updates of a longer run; those of one batch count as one.

    It leaves the run as a signal does: nothing is evaluated or recorded only because it ends.
    """
    __tracebackhide__ = True
    counted = itertools.count(1)

    def stop(state: TrainState) -> TrainState:
        over = next(counted) >= updates
        return attrs.evolve(state, stop=Stop("tried", "interrupted")) if over else state

    reached = trial.train(copied, epochs=epochs, hooks=(stop,), evaluate_every=evaluate_every)
    return attrs.evolve(reached, stop=None)


def compiles(step: PipelineStep) -> bool:
    """Return whether a step is compiled, so that its operators cannot be watched."""
    return any(m.name == "compiled" for m in step.pipeline.middleware)


def contents_of(state: TrainState) -> dict[str, object]:
    """Return what two states that came to the same are compared by."""
    saved = {name: one.state_dict() for name, one in optimizers(state).items()}
    return {
        "model": state.model.state_dict(),
        "optimizer": saved if state.updates else saved[""],
        "slots": dict(state.slots), "counters": (state.step, state.epoch, state.batch),
    }  # fmt: skip
