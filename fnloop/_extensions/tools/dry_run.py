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
from types import FrameType
from typing import TypeVar

import attrs

from fnloop._backend import torch_compat
from fnloop._core.history import History
from fnloop._core.several import Several
from fnloop._core.state import TrainState, snapshot, without_metrics
from fnloop._core.types import Middleware, Output, Step
from fnloop._data.held import own_copy
from fnloop._data.loaders import Padding, batch_size_of, check_loader, sharded, unmarked
from fnloop._data.source import first_batches, open_source, unmoved
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.format import CheckpointError
from fnloop._extensions.checkpoints.restore import restore
from fnloop._extensions.checkpoints.save import check_resumable, save
from fnloop._extensions.middleware.metric import derive, metric
from fnloop._extensions.middleware.schedule import plateau, schedule, torch_scheduler
from fnloop._extensions.middleware.times import throughput, timings
from fnloop._hooks.hook import BuiltIn, Hook, HookFn, Wrapper, every
from fnloop._loop.errors import check_returned, why_empty
from fnloop._loop.evaluate import open_loader
from fnloop._loop.fit import train
from fnloop._loop.plan import (
    Plan,
)
from fnloop._step.pipeline import PipelineStep, pipeline
from fnloop._step.update import MissingNumberError
from fnloop.extend import (
    Batch,
    Moment,
    Stop,
    Wrap,
    check_not_stale,
    checks,
    collectives,
    isolated,
    name_of,
    optimizers,
    tables,
)

Value = TypeVar("Value")
Result = TypeVar("Result")
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
        found = tables.format_count(count, "problem") if count else "no problem"
        return [f"{self.title}: {found}", tables.Table(columns, self.findings)]


def dry_run(
    step: Step, state: TrainState, loaders: object, hooks: Sequence[HookFn] | None = ()
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
    trial = Trial.of("dry_run", step, state, loaders, hooks, several=True)
    step, plan = trial.step, trial.plan
    found, checked = plan.loaders, plan.hooks
    plan.check_metrics(found.evaluated, state.history, Several.names_of(state.model), tried=True)
    step, failed = _tried_metrics(step)
    findings, first = _read(trial, step)
    if "train" not in first:
        return Report(_of_all([*findings, *failed.values()]))
    # Hooks may need the numbers of a loader that raises: a training batch stands in for its batch.
    evaluated = {name: sharded([first.get(name, first["train"])]) for name in found.evaluated}
    loaders = {"train": found.train, **evaluated}
    with _temporary_folder(state) as folder:
        findings += _train(step, state, loaders, first, checked, folder)
        resumed, obstacles = _resume(step, state, loaders, folder)
    findings += [*resumed, *failed.values()]
    for explain_uncapturable in extensions("graphs of an update"):
        obstacles += explain_uncapturable(at_start_of_epoch(state), first["train"])
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


def _read(trial: Trial, step: PipelineStep) -> tuple[list[Finding], dict[str, Batch]]:
    """Read two batches of each loader, and evaluate the first one.

    Return what was seen, and the first batches, but those of loaders that raise.
    """
    state, loaders = trial.state, trial.loaders
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

    def evaluate(name: str, seen: tuple[str, Batch, str]) -> Batch:
        return note(name, seen, _items(step, begun, seen[1]))

    def update(name: str, seen: tuple[str, Batch, str]) -> Batch:
        _, batch, _ = seen
        loader = sharded([batch])
        advance_copy(step, at_start_of_epoch(state), {name: loader}, 1, state.epoch + 2)
        return note(name, seen, f"{batch_size_of(batch)} items, its leading dimension")

    def note(name: str, seen: tuple[str, Batch, str], items: str) -> Batch:
        before, batch, after = seen
        found[name] = Finding("loader", name, f"{before}; {items}; {after}")
        return batch

    read = without_those_that_raise(loaders, lambda name, one: _read_one(state, name, one))
    begun = trial.begun(step) if "train" in read else state
    first = without_those_that_raise(read, evaluate)
    if "train" in read and "train" in raised_everywhere:
        # A run evaluates no batch of it, and a loss function may be for training only. An update
        # exchanges gradients, so all processes try one, or none.
        first = without_those_that_raise({"train": read["train"]}, update) | first
    return [found[name] for name in loaders if name in found], first


def _read_one(state: TrainState, name: str, loader: object) -> tuple[str, Batch, str]:
    """Return what was seen of a loader before its first batch was evaluated, and that batch.

    Nothing is exchanged with other processes: in one of them it may raise.
    """
    own, _ = unmarked(loader)
    own = own.loader if isinstance(own, sharded) else None
    source = open_loader(loader, state) if own is None else open_source(own, state.seed)
    seconds: list[float] = []
    batches: list[Batch] = []
    with isolated(state.backend.device), unmoved(loader):
        began = time.perf_counter()
        for batch in first_batches(source, state.backend.device, 2):
            seconds.append(time.perf_counter() - began)
            batches.append(own_copy(batch))
            began = time.perf_counter()
    if not batches:
        raise ValueError(f"the {name} loader gave no batch.{why_empty(source)}")
    took = "first in " + ", next in ".join(map(tables.format_milliseconds, seconds))
    length = "unknown length"
    if source.length is not None:
        length = f"{source.length:,} batch{'es' * (source.length != 1)}"
    first = batches[0].batch if isinstance(batches[0], Padding) else batches[0]
    return f"{length}; {_shapes(first)}", first, took


def _in_words(error: Exception) -> str:
    """Return an exception in one line, with its notes."""
    parts = [f"{type(error).__name__}: {error}", *checks.notes_of(error)]
    return "; ".join(" ".join(part.split()) for part in parts)


def _shapes(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_shapes(part)}" for key, part in batch.items())
    if isinstance(batch, tuple | list):
        return ", ".join(_shapes(part) for part in batch)
    return tables.summarize(batch)


def _items(step: PipelineStep, state: TrainState, batch: Batch) -> str:
    """Return how many items the loss of a batch is the mean of, and who says so."""
    try:
        out = step.evaluate(state, batch)
    except ValueError as error:
        if "cannot evaluate a loader" in str(error):  # of raw
            return f"{batch_size_of(batch)} items, its leading dimension"
        raise
    weight, by = float(out.weight), ""
    if isinstance(out.aux, Mapping) and "weight" in out.aux:
        by = ', by aux["weight"]'
    elif weight == batch_size_of(batch):
        by = ", its leading dimension"
    return f"{tables.format_number(weight)} items{by}"


# --- metrics and hooks that may raise


def _tried_metrics(step: PipelineStep) -> tuple[PipelineStep, dict[str, Finding]]:
    """Return a step whose metrics may raise, and where each of them that does is noted."""
    failed: dict[str, Finding] = {}

    def note(member: Middleware, error: Exception) -> None:
        name = repr(member)
        finding = Finding("metric", tables.shorten(name), _in_words(error), problem=True)
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
        def report(loader: str | None, numbers: Mapping[str, float]) -> Mapping[str, float]:
            try:
                return member.report(loader, numbers)  # type: ignore[misc]
            except MissingNumberError:
                raise
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

        called = lambda: check_returned(self.hook, state, self.hook(state))
        return self._try(called, state)

    def begin(self, state: TrainState) -> TrainState:
        begin = lambda: check_returned(self.hook, state, self.hook.begin(state), "begin")
        return self._try(begin, state)

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

    def flush(self, state: TrainState) -> TrainState:
        flush = lambda: check_returned(self.hook, state, self.hook.flush(state), "flush")
        return self._try(flush, state)


# --- updates, records and hooks


def _train(
    step: PipelineStep,
    state: TrainState,
    loaders: Mapping[str, object],
    first: Mapping[str, Batch],
    hooks: Sequence[Hook],
    folder: Path,
) -> list[Finding]:
    """Make the updates, the evaluations and the record, and call the hooks."""
    __tracebackhide__ = True
    copied, times = at_start_of_epoch(state), [time.perf_counter()]

    def end(state: TrainState) -> TrainState:
        if len(times) <= UPDATES:
            times.append(time.perf_counter())
        ends = len(times) > UPDATES and "epoch" not in state.events
        return attrs.evolve(state, ends="epoch") if ends else state

    innermost = [hook.innermost if isinstance(hook, Wrapper) else hook for hook in hooks]
    tried = [_safe(hook, folder / f"hook-{i}") for i, hook in enumerate(innermost)]
    called = [safe for safe, _ in tried if safe is not None]
    with unmoved(loaders):
        reached = train_trial(step, copied, loaders, epochs=copied.epoch + 1, hooks=(end, *called))
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
        shown = ", ".join(f"{key} {tables.format_metric(key, value)}" for key, value in of.items())
        updates.append(Finding("record", name, shown))
    findings = []
    for hook, (safe, text) in zip(hooks, tried, strict=True):
        error = None if safe is None else safe.error
        seen = text if error is None else _in_words(error)
        findings.append(
            Finding("hook", tables.shorten(name_of(hook)), seen, problem=error is not None)
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


def _resume(
    step: PipelineStep, state: TrainState, loaders: Mapping[str, object], folder: Path
) -> tuple[list[Finding], list[str]]:
    """Compare a run that was saved and restored after its first update with one that was not.

    Return what was seen, and what its updates read to the host.
    """
    __tracebackhide__ = True
    target = state.epoch + 2  # the same for all, as a schedule may depend on it
    compiles = any(m.name == "compiled" for m in step.pipeline.middleware)
    watch = HostReads()

    def advance(copied: TrainState, updates: int) -> TrainState:
        __tracebackhide__ = True
        with unmoved(loaders):  # as in a new process
            return advance_copy(step, copied, loaders, updates, target)

    with contextlib.nullcontext() if compiles else watch:
        straight = advance(at_start_of_epoch(state), UPDATES)
    try:
        check_resumable(state)
        half = advance(at_start_of_epoch(state), 1)
        began = time.perf_counter()
        save(half, folder / "checkpoint")
        saved = time.perf_counter()
        resumed = restore(folder / "checkpoint", at_start_of_epoch(state))
        took = [
            tables.format_milliseconds(saved - began),
            tables.format_milliseconds(time.perf_counter() - saved),
        ]
        resumed = advance(resumed, UPDATES - 1)
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


class HostReads(torch_compat.DispatchMode):
    """Notes where code of the user reads a tensor to the host during an update."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(
        self,
        func: object,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        assert callable(func)
        if torch_compat.reads_to_host(func):
            place = _reader()
            if place is not None and place not in self.places:
                self.places.append(place)
        return func(*args, **(kwargs or {}))


_UPDATES = ("/_step/", "/middleware/", "/engines/", "/alternate.py")  # where updates are made


def _reader() -> str | None:
    """Return the line of the user that reads to the host in an update, and in nothing else."""
    frame, place = sys._getframe(2), None
    while frame is not None:
        code = frame.f_code
        inside = code.co_filename.startswith(_PACKAGE)
        if inside and place is None:
            return None  # fnloop itself reads, where it may
        if inside:
            in_update = any(room in code.co_filename for room in _UPDATES)
            return place if in_update and not _in_evaluation(frame) else None
        if place is None and "/torch/" not in code.co_filename:
            where = f"{Path(code.co_filename).name}, line {frame.f_lineno}, in {code.co_name}"
            place = f"reads a tensor to the host ({where}): cuda_graph cannot capture that"
        frame = frame.f_back
    return None


def _in_evaluation(frame: FrameType | None) -> bool:
    """Return whether a frame is within an evaluation of a run."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("_loop/evaluate.py"):
            return True
        frame = frame.f_back
    return False


# --------------------------------------------------------------------------------------------------
# A few updates on a copy of a state, which leave the state and the generators as they are.

RATES = (schedule, torch_scheduler, plateau)  # they need the length or the records of a run
REPORTS = (metric, derive, timings, throughput)  # they change no update
ASSUMED = 1 << 30  # items of the run that is tried, which only its fit knows
EVALUATED = every(epochs=1)  # when a run evaluates by default


def at_start_of_epoch(state: TrainState) -> TrainState:
    """Return a copy of a state, at the start of its epoch, without what it has measured."""
    return attrs.evolve(
        without_metrics(snapshot(state)), batch=0, samples=0, history=History(), stop=None,
        ends=None, phases=(), generators=None, saved_on=None, events=frozenset(),
        todo=(),
    )  # fmt: skip


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


def train_trial(
    step: PipelineStep,
    copied: TrainState,
    loaders: Mapping[str, object],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    hooks: Sequence[HookFn] = (),
    evaluate_every: Moment = EVALUATED,
) -> TrainState:
    """Train a copy, as ``fit`` does, but let Ctrl-C and signals end the program as they usually do.

    There is nothing to keep.
    """
    __tracebackhide__ = True
    plan = Plan.of(step, copied, loaders, epochs, steps, hooks, evaluate_every)
    plan = attrs.evolve(plan, may_stall=True, assumed_items=ASSUMED)  # its hooks end it
    return train(plan, copied)


def train_copy(
    step: PipelineStep,
    state: TrainState,
    loader: object,
    updates: int,
    hooks: Sequence[HookFn] = (),
    epochs: int | None = None,
) -> TrainState:
    """Train a copy of a state for a few updates. A loader that is too short is repeated.

    With a target in ``epochs`` too, a run that leaves out all updates is not an error.
    """
    __tracebackhide__ = True
    check_loader(loader, "training", alone=True)
    copied = at_start_of_epoch(state)
    last = None if epochs is None else copied.epoch + epochs
    steps = copied.step + updates
    with unmoved(loader):
        return train_trial(step, copied, {"train": loader}, epochs=last, steps=steps, hooks=hooks)


def advance_copy(
    step: PipelineStep,
    copied: TrainState,
    loaders: Mapping[str, object],
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

    reached = train_trial(
        step, copied, loaders, epochs=epochs, hooks=(stop,), evaluate_every=evaluate_every
    )
    return attrs.evolve(reached, stop=None)


def contents_of(state: TrainState) -> dict[str, object]:
    """Return what two states that came to the same are compared by."""
    saved = {name: one.state_dict() for name, one in optimizers(state).items()}
    return {
        "model": state.model.state_dict(),
        "optimizer": saved if state.updates else saved[""],
        "slots": dict(state.slots), "counters": (state.step, state.epoch, state.batch),
    }  # fmt: skip


@attrs.frozen(eq=False)
class Trial:
    """A step, a state and loaders, of which runs are tried without harm.

    Args:
        step, state: what is tried.
        plan: what a run of it would do.
        loaders: its loaders by name.
    """

    step: PipelineStep
    state: TrainState
    plan: Plan
    loaders: Mapping[str, object]

    @staticmethod
    def of(
        owner: str,
        step: Step,
        state: TrainState,
        loaders: object,
        hooks: Sequence[HookFn] | None = (),
        several: bool = False,
    ) -> Trial:
        """Check what was given, and return it.

        Args:
            owner: who tries it.
            step, state, loaders, hooks: as in ``fit``.
            several: whether several processes may.

        Raises:
            StaleStateError, TypeError, ValueError, KeyError: as ``fit``; or a loader is an
                iterator.
            NotImplementedError: there are several processes, and only one may try it.
        """
        checked = PipelineStep.checked(step, owner)
        check_not_stale(state, owner)
        plan = Plan.of(checked, at_start_of_epoch(state), loaders, hooks=hooks)
        plan = attrs.evolve(plan, assumed_items=ASSUMED)
        named: dict[str, object] = {"train": plan.loaders.train, **plan.loaders.evaluated}
        for name, loader in named.items():
            if isinstance(loader, Iterator):
                raise ValueError(
                    f"{owner} would use up the {name} loader, which is an iterator: give a "
                    "function that returns one, or a list"
                )
        if state.backend.world_size > 1 and not several:
            raise NotImplementedError(
                f"{owner} works in one process: call it in a script that is started without "
                "torchrun"
            )
        return Trial(checked, state, plan, named)

    def copy(self) -> TrainState:
        """Return a copy of the state, at the start of its epoch."""
        return at_start_of_epoch(self.state)

    def begun(self, step: PipelineStep | None = None) -> TrainState:
        """Return a copy of the state as a run begins: with the facts about it, and all slots.

        Args:
            step: the step that makes the slots; that of the run by default.
        """
        copied, plan = self.copy(), self.plan
        source = open_loader(plan.loaders.train, copied, plan.total)
        run = plan.describe(copied, source, (*plan.loaders.evaluated,), None)
        return (step or plan.step).init_slots(attrs.evolve(copied, run=run))

    def batches(self, n: int) -> list[Batch]:
        """Return copies of the first batches of training, on the device of the state."""
        source, device = open_loader(self.plan.loaders.train, self.state), self.state.backend.device
        with unmoved(self.plan.loaders.train):
            return [own_copy(batch) for batch in first_batches(source, device, n)]

    def advance(
        self,
        copied: TrainState,
        loaders: Mapping[str, object],
        updates: int,
        epochs: int,
        evaluate_every: Moment,
    ) -> TrainState:
        """Make a number of updates of a longer run: see :func:`advance_copy`."""
        return advance_copy(self.step, copied, loaders, updates, epochs, evaluate_every)

    @staticmethod
    def contents(state: TrainState) -> dict[str, object]:
        """Return what two states that came to the same are compared by."""
        return contents_of(state)
