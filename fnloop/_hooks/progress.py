"""Show the progress of a run: in a log, a terminal or a notebook."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
import textwrap
import time
from typing import ClassVar, Protocol, TextIO

import attrs
from torch import Tensor
from tqdm.utils import disp_len

from fnloop._core.history import (
    SINCE,
    Layout,
    Record,
    first_record,
    is_evaluated,
    is_row,
    lay_out,
    metric_names,
    mode_by_name,
    number_of_epoch,
    records_since,
    table,
    unfinished,
    update_best,
)
from fnloop._core.metrics import Last, read
from fnloop._core.optimizers import optimizers_in
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState, count_parameters
from fnloop._core.types import EPOCH, RECORD, Call
from fnloop._display import checks, tables
from fnloop._display.screen import Screen, columns_of, has_colors, paint
from fnloop._display.tables import HTML_WIDTH, printable, shorten, terminal_width, width_of
from fnloop._hooks.hook import Hook

# --------------------------------------------------------------------------------------------------
# Show the progress of a run: in a log, a terminal or a notebook.

BRIEFEST = 0.1  # seconds between two drawings of an evaluation, which reads nothing


class progress(Hook):
    """Show the progress of a run: in a terminal, a notebook or a log.

    The first line says what the run works with and how long it is. The last one says why it ended:
    its target, the reason of a stop, Ctrl-C or a signal; and the best value.

    In a terminal, a table grows above a bar. The table has a line for each evaluation and each end
    of an epoch. With ``record_every`` it has faint lines in between, at most one every 10 seconds:
    they have the means since the last record, in the columns of ``train``. The evaluated loaders
    come first, and the best values so far have a star. Columns that do not fit the width are left
    out, gradient norms and learning rates first. The time is that since the last line that is not
    faint. A stream that evaluates nothing has a line for each record. The bar shows the running
    epoch: updates per second, without the time of evaluations and hooks; the running loss; and an
    estimate of the time left of the whole run. During an evaluation, it shows that instead. What a
    hook prints appears above the bar, and a tqdm bar of a hook below it. Colors are left out if
    NO_COLOR is set.

    A notebook has the same in one output of the cell, without the faint lines: ``live_plot`` draws
    the curve.

    A log, which is a file that is not a terminal, has a line for each evaluation and each end of an
    epoch. In between, it has a line every 30 seconds; with ``record_every``, at most one every 10
    seconds, with the metrics of the newest record.

    It reads from the device when the bar is drawn or such a line is written, and at no other time.
    With several processes, the main one shows it; the loss between two records is then that of its
    own share of the batches. On an accelerator, the time of hooks counts in the updates per second,
    because a hook may wait for the device.

    Args:
        refresh: the least time between two drawings, in seconds, at least 0.5.
        file: an open text file to write to; by default the notebook, or else stderr.
        since: which values may be the best: those of the "phase", if there is one, or of the whole
            "run".

    Returns:
        A hook.

    Raises:
        TypeError: file is not an open file.
        ValueError: refresh is below 0.5, or there is no such ``since``.

    Example:
        >>> import fnloop as fl, sys, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> hook = progress(file=sys.stdout)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(hook,))
        Toy on cpu, 1 parameter, float32, 1 epoch of 3 updates
        epoch 1/1  step 3  train/loss -1.0000  train/lr 1.0e+00  0...s
        done: epoch 1/1, step 3, after 0...s
    """

    def __init__(
        self, refresh: float = 0.5, file: TextIO | None = None, *, since: str = "phase"
    ) -> None:
        meaning = "the seconds between two drawings, each of which reads from the device"
        checks.number("progress", "refresh", refresh, meaning, least=0.5)
        if file is not None and not (hasattr(file, "write") and hasattr(file, "isatty")):
            raise TypeError(
                "progress expects file as an open text file, such as sys.stdout, or None; "
                f"got {checks.describe(file)}"
            )
        self.refresh, self.file = refresh, file
        self.since = checks.choice("progress", "since", since, SINCE)
        self._following: _Following | None = None  # a run, on its main process
        self._next = -math.inf  # when to show something, unless there is a record
        self._newest: TrainState | None = None  # the state at the newest boundary

    def __repr__(self) -> str:
        given = {"refresh": self.refresh, "since": self.since}
        usual = {"refresh": 0.5, "since": "phase"}
        changed = {name: value for name, value in given.items() if value != usual[name]}
        return repr(Call(progress, (), changed))

    def begin(self, state: TrainState) -> TrainState:
        """Say what the run works with."""
        if state.backend.main:
            self._follow(state)
        return state

    def _follow(self, state: TrainState) -> _Following:
        self._following = _Following(_make_view(self.file, self.refresh), state, self.since)
        return self._following

    def __call__(self, state: TrainState) -> TrainState:
        self._newest = state
        if time.monotonic() < self._next and RECORD not in state.events:
            return state
        if not state.backend.main:
            self._next = math.inf
            return state
        following = self._following or self._follow(state)
        self._next = following.pass_boundary(state)
        return state

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Show an evaluation."""
        if self._following is not None:
            self._following.evaluate(state, loader, done, total)

    def flush(self, state: TrainState) -> TrainState:
        """Show why the run ended."""
        if self._following is not None:
            self._following.finish(state)
        return state

    def close(self) -> None:
        """Leave the output in order."""
        if self._following is not None:
            error = sys.exc_info()[1]  # with which the run ends, if it does not end by itself
            reached = getattr(error, "state", None)
            newest = reached if isinstance(reached, TrainState) else self._newest
            self._following.close(newest, describe_failure(error))
        self._following, self._next, self._newest = None, -math.inf, None


class _View(Protocol):
    """A way to show a run."""

    def start(self, state: TrainState, parts: list[str], position: Position) -> None:
        """Show what the run works with, and where it begins."""
        ...

    def add(self, entry: Entry, best: set[str]) -> None:
        """Show a record, and mark its metrics that are the best so far."""
        ...

    def show(self, state: TrainState, position: Position) -> float:
        """Show a boundary, if it is time to. Return when it is time again."""
        ...

    def evaluate(
        self, position: Position, loader: str, done: int, total: int | None, rate: float | None
    ) -> None:
        """Show an evaluation, if it is time to."""
        ...

    def finish(self, text: str) -> None:
        """Show why the run ended."""
        ...


class _Following:
    """A run that is shown."""

    def __init__(self, view: _View, state: TrainState, since: str) -> None:
        self.view, self.pace, self.best = view, Pace(state), Best(state, since)
        self.state = state  # as it was shown last, with its position
        self.position = self.pace.look(attrs.evolve(state, events=frozenset()))
        self.looked = self.evaluation_began = time.monotonic()
        self.quiet = 0.0  # until when nothing is shown of an evaluation
        self.finished = False
        view.start(state, describe_start(state), self.position)

    def pass_boundary(self, state: TrainState) -> float:
        """Show a boundary, and return when to show the next one."""
        self.finished = False
        self.read(state)
        self.position, self.looked = self.pace.look(state), time.monotonic()
        self.state = state
        return self.view.show(state, self.position)

    def read(self, state: TrainState) -> None:
        """Show the new records."""
        for entry in self.pace.read_records(state):
            self.view.add(entry, self.best.update(entry.record))

    def evaluate(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Show an evaluation."""
        now = time.monotonic()
        if not done:
            self.evaluation_began = now
            self.pace.begin_evaluation(loader)
        if now < self.quiet:
            return
        self.quiet = now + BRIEFEST
        passed = now - self.evaluation_began
        rate = done / passed if passed > 0 and done else None
        rest = None if rate is None or total is None else (total - done) / rate
        trained = self.evaluation_began - self.looked
        left = self.pace.left_in_evaluation(state, loader, self.position, trained, passed, rest)
        position = attrs.evolve(_place(self.position, state), left=left)
        self.view.evaluate(position, loader, done, total, rate)

    def finish(self, state: TrainState) -> None:
        """Show why the run ended, if it has."""
        self.read(state)
        if is_over(state) and not self.finished:
            self.finished = True
            self.tell(state, f"stopped: {state.stop}" if state.stop else "done")

    def close(self, newest: TrainState | None, reason: str) -> None:
        """Say why the run ended, and where it was, if nothing has said it yet."""
        if not self.finished:
            self.tell(newest or self.state, reason)

    def tell(self, state: TrainState, reason: str) -> None:
        """Show the last line."""
        seconds = time.monotonic() - self.pace.began
        position = _place(self.position, state)
        self.view.finish(describe_end(reason, position, seconds, self.best))


def _place(position: Position, state: TrainState) -> Position:
    """Return a position with the counters of a state."""
    number = state.epoch + (EPOCH not in state.events)
    return attrs.evolve(position, epoch=number, step=state.step, skipped=state.skipped)


def _make_view(file: TextIO | None, refresh: float) -> _View:
    if file is None and tables.in_notebook():
        return NotebookView(refresh)
    out: TextIO = file or sys.stderr
    if out is None or getattr(out, "closed", False):  # as in a daemon
        out = io.StringIO()
    has_bar = out.isatty() and os.environ.get("TERM") != "dumb"  # it cannot redraw a line
    return TerminalView(out, refresh) if has_bar else LogView(out)


# --------------------------------------------------------------------------------------------------
# What a run says about itself, the same in a terminal, a log and a notebook.

LONGEST_REASON = 100  # characters of an error in the last line
RECENT = 10.0  # seconds between two lines, if there are records of ``record_every`` only


class Best:
    """The best record of each evaluated metric so far.

    Args:
        state: a state of the run, of before its first update.
        since: whether the records of the "phase" count, or all of the "run".
    """

    def __init__(self, state: TrainState, since: str) -> None:
        self.records: dict[str, Record] = {}
        self.loaders = () if state.run is None else state.run.evaluated
        self.turns = () if state.run is None else state.run.turns
        for record in records_since(state.history, first_record(state.phases, since)):
            self.records = update_best(self.records, record)

    def update(self, record: Record) -> set[str]:
        """Take a record into account, and return the names of its metrics that are the best now."""
        self.records = update_best(self.records, record)
        newest = {name for name, best in self.records.items() if best is record}
        return {name for name in newest if not self._is_mean_of_turns(name)}

    def _is_mean_of_turns(self, name: str) -> bool:
        """Return whether a loss is a mean of losses that may oppose each other."""
        *groups, title = name.split("/")
        return bool(self.turns) and title == "loss" and not {*groups} & {*self.turns}


# --- numbers


def format_duration(seconds: float) -> str:
    """Format a time in at most seven characters.

    Example:
        >>> [format_duration(s) for s in (2.04, 41.6, 187.0, 4320.0, 190_000.0)]
        ['2.0s', '42s', '3m 07s', '1h 12m', '2d 04h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest}s"
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes}m {rest:02}s"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}h" if days else f"{hours}h {minutes:02}m"


def format_left(seconds: float) -> str:
    """Format an estimate of the time left, which is not exact to a tenth of a second."""
    return f"{format_duration(seconds) if seconds >= 9.95 else f'{math.ceil(seconds)}s'} left"


def format_rate(rate: float, unit: str = "step") -> str:
    """Format a rate: per second, or, if it is below 1, the seconds of each.

    Example:
        >>> format_rate(1234.5), format_rate(12.345), format_rate(0.25, "batch")
        ('1,234 step/s', '12.3 step/s', '4.00 s/batch')
    """
    value, of = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {of}"


def format_count_of(done: int, total: int | None) -> str:
    """Format how many of how many, aligned; or, without a total, how many."""
    if total is None:
        return f"{done:,}"
    of = f"{total:,}"
    return f"{done:{len(of)},}/{of}"


def format_value(name: str, value: float) -> str:
    """Format a metric: four decimals, two of a large one, and a learning rate like ``3.0e-04``."""
    if "lr" in name.split("/"):
        return f"{value:.1e}"
    small = value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6
    return f"{value:.2e}" if small else f"{value:,.4f}" if abs(value) < 100 else f"{value:,.2f}"


def running_values(state: TrainState) -> dict[str, float]:
    """Return "loss" and "lr": those of a record of this boundary, or else the running ones.

    With several optimizers the rates are "lr/matrices", ...; those of further groups are left out.
    With turns, the losses are "d/loss", ... in place of their mean.
    The running ones are read from the device: one read.
    """
    rates = {
        f"lr/{name}" if name else "lr": Last(one.param_groups[0]["lr"])
        for name, one in optimizers_in(state.optimizer).items()
    }
    turns = () if state.run is None else state.run.turns
    losses = [f"{turn}/loss" for turn in turns] or ["loss"]
    if RECORD in state.events:
        metrics = state.history[-1].metrics
        values = {
            name: metrics[f"{group}/{name}"]
            for name in (*losses, *rates)
            for group in ("train", "recent")
            if f"{group}/{name}" in metrics
        }
        for name, rate in rates.items():
            if name not in values and not isinstance(rate.value, Tensor):
                values[name] = rate.compute()
        return values
    of = {name: state.metrics.get(f"recent/{name}", state.metrics.get(name)) for name in losses}
    return read({name: metric for name, metric in of.items() if metric is not None} | rates)


# --- sentences


def format_epoch(position: Position | Entry) -> str:
    """Return the number of the epoch, from 1, and of the last one."""
    return f"epoch {position.epoch}" + (f"/{position.epochs}" if position.epochs else "")


def format_skipped(position: Position | Entry) -> str:
    """Return how many updates were skipped so far; "" if none was."""
    return f"{position.skipped:,} skipped" if position.skipped else ""


def describe_start(state: TrainState) -> list[str]:
    """Return what a run works with, and what it is going to do, in parts of a sentence."""
    run, backend = state.run, state.backend
    parameters = count_parameters(state.model)
    parts = [f"{type(state.model).__name__} on {backend.device}", *parameters.split(", ")]
    if precision := backend.precision if run is None else run.precision:
        parts.append(f"amp {precision}")
    else:
        parts += sorted({str(p.dtype).removeprefix("torch.") for p in state.model.parameters()})
    if backend.world_size > 1:
        parts.append(f"{backend.world_size} processes")
    return [*parts, *_describe_targets(state)]


def _describe_targets(state: TrainState) -> list[str]:
    run, parts = state.run, []
    if run is None:
        return parts
    phase = unfinished(state.phases)
    if phase is not None:
        parts.append(f"phase {phase.name}")
    left = (run.epochs or 0) - (0 if phase is None else phase.epoch)
    epochs = tables.format_count(left, "epoch") if left else ""
    updates = (run.total_steps or 0) - run.first_step
    if not epochs and run.steps_per_epoch:
        parts.append(f"{tables.format_count(run.steps_per_epoch, 'update')} per epoch")
    elif epochs and run.steps_per_epoch and updates == left * run.steps_per_epoch:
        parts.append(f"{epochs} of {tables.format_count(run.steps_per_epoch, 'update')}")
    elif epochs:  # of different lengths, or of an unknown one
        parts.append(epochs)
        known = run.steps_per_epoch and updates > 0
        parts += [f"{tables.format_count(updates, 'update')} in all"] if known else []
    if run.total_steps is not None and not run.epochs:
        parts.append(f"to step {run.total_steps:,}")
    if run.evaluated:
        parts.append(f"evaluated on {', '.join(run.evaluated)}")
    if state.step:
        parts.append(f"from step {state.step:,}")
    return parts


def describe_failure(error: BaseException | None) -> str:
    """Return why a run ended before its end: of an error, the class and the first line.

    Example:
        >>> describe_failure(ValueError("no\\nmore")), describe_failure(KeyboardInterrupt())
        ('failed: ValueError: no', 'interrupted at once')
    """
    if not isinstance(error, Exception):
        return "interrupted at once" if isinstance(error, KeyboardInterrupt) else "ended early"
    first, *_ = [*str(error).splitlines(), ""]
    first = shorten(first, LONGEST_REASON)
    return f"failed: {type(error).__name__}" + (f": {first}" if first else "")


def describe_end(reason: str, position: Position, seconds: float, best: Best) -> str:
    """Return the last line: why a run has ended, where, and what was best."""
    parts = [format_epoch(position), f"step {position.step:,}", format_skipped(position)]
    where = ", ".join([*filter(None, parts), f"after {format_duration(seconds)}"])
    return f"{reason}{';' if ':' in reason else ':'} {where}{_describe_best(best)}"


def _describe_best(best: Best) -> str:
    """Return the best loss of the first evaluated loader, or else its first other metric."""
    place = {loader: i for i, loader in enumerate(best.loaders)}

    def rank(name: str) -> tuple[bool, int]:
        return not name.endswith("/loss"), place.get(name.partition("/")[0], len(place))

    names = sorted(best.records, key=rank)
    if best.turns or not names or mode_by_name(names[0]) is None:
        return ""
    record = best.records[names[0]]
    value = format_value(names[0], record.metrics[names[0]])
    return f"; best {names[0]} {value} at step {record.step:,}"


# --------------------------------------------------------------------------------------------------
# How far a run is, how fast it is, and how long it will still take.


@attrs.frozen
class Entry:
    """A new record.

    Args:
        record: the record.
        epoch: the number, from 1, of its epoch; 0 before the first update.
        epochs: the number of the last epoch, or None if there is no such target.
        seconds: the time since the row above it, or since the run began.
        skipped: updates skipped so far.
    """

    record: Record
    epoch: int
    epochs: int | None
    seconds: float
    skipped: int = 0


@attrs.frozen
class Position:
    """Where a run is.

    Args:
        epoch: the number, from 1, of the epoch that is running or has just ended.
        epochs: the number of the last one, or None if there is no such target.
        step: updates applied.
        done: updates of this epoch, including skipped ones.
        total: updates of this epoch at its end, or None if that is unknown.
        rate: updates per second of this epoch, without evaluations and hooks; None if unknown.
        left: the seconds until the end of the run; None if that is unknown.
        skipped: updates skipped so far.
    """

    epoch: int
    epochs: int | None
    step: int
    done: int
    total: int | None
    rate: float | None = None
    left: float | None = None
    skipped: int = 0


@attrs.frozen
class _Evaluated:
    """The newest evaluation of a loader.

    Args:
        seconds: how long it took.
        before: the updates that had been made at the one before it, or as the run began.
        newest: the updates that had been made at it.
    """

    seconds: float
    before: int
    newest: int


class Pace:
    """Follows a run from its first boundary to its last.

    Args:
        state: a state of the run, of before its first update.
    """

    def __init__(self, state: TrainState) -> None:
        self.began = time.monotonic()
        self._first = self._count(state)
        self._known = len(state.history)  # how many records are taken into account
        self._is_stream = is_stream(state)
        self._ended = state.epoch
        # Where the running epoch began, or a later step of it.
        self._ended_at = state.step - bool(state.batch)
        rows = (record.seconds for record in reversed(state.history) if is_row(record))
        self._row_at = next(rows, 0.0)  # the seconds of the newest row
        self._length: int | None = None  # of an epoch, if it is not known beforehand
        self._evaluated: dict[str, _Evaluated] = {}  # by loader
        self._began: dict[str, float] = {}  # when the evaluation of each loader of a record did
        self._evaluations = 0.0  # seconds of all evaluations
        self._begin_epoch(state, _done(state))

    def look(self, state: TrainState) -> Position:
        """Return the position at a boundary. After the end of an epoch, measure the next one."""
        run, ended = _run(state), EPOCH in state.events
        if state.epoch - ended != self._epoch or (not ended and _done(state) < self._initial):
            self._begin_epoch(state, 0 if ended else _done(state))  # of a snapshot, or not seen
        made = self._count(state) - self._epoch_first
        done = (run.steps_per_epoch or self._initial + made) if ended else _done(state)
        made, seconds = done - self._initial, self._active(state)
        position = Position(
            state.epoch + (not ended),
            run.epochs,
            state.step,
            done,
            done if ended else self._total(state, done),
            made / seconds if made > 0 and seconds > 0 else None,
            self._left(state, 0 if ended else done),
            state.skipped,
        )
        if ended:
            self._length = self._length if self._initial else done
            self._begin_epoch(state, 0)
        return position

    def _begin_epoch(self, state: TrainState, done: int) -> None:
        """Measure the rate from here on; ``done`` updates of the epoch were made before."""
        self._epoch, self._initial = state.epoch, done
        self._epoch_first = self._count(state)
        self._trained = _run(state).stopwatch.trained
        self._epoch_began: float | None = None  # when it was, as far as hooks can know
        self._evaluations_before = self._evaluations

    def _active(self, state: TrainState) -> float:
        """Return the seconds of this epoch without evaluations and hooks.

        On an accelerator, hooks count: the device may still be at work on updates, and it is a hook
        that waits for it.
        """
        now, trained = time.monotonic(), _run(state).stopwatch.trained - self._trained
        if self._epoch_began is None:
            self._epoch_began = now - trained
        if state.backend.device.type == "cpu":
            return trained
        return now - self._epoch_began - (self._evaluations - self._evaluations_before)

    def _count(self, state: TrainState) -> int:
        return state.step + state.skipped

    def begin_evaluation(self, loader: str) -> None:
        """Note that the evaluation of a loader begins."""
        self._began[loader] = time.monotonic()

    def left_in_evaluation(
        self,
        state: TrainState,
        loader: str,
        before: Position,
        trained: float,
        passed: float,
        rest: float | None,
    ) -> float | None:
        """Return how many seconds the rest of a run takes that is evaluating, if that is known.

        Args:
            state: the state that is evaluated.
            loader: the name of the loader.
            before: the position at the last boundary that was looked at.
            trained: the seconds from then to the beginning of the evaluation.
            passed: the seconds since it began.
            rest: the seconds that the rest of it takes, or None.
        """
        if before.left is None:
            return None
        left = max(before.left - trained, 0.0)
        if loader in self._evaluated:  # this one is a part of the estimate
            return max(left - passed, rest or 0.0)
        if rest is None:
            return None
        updates = self._updates_left(state, 0 if EPOCH in state.events else _done(state)) or 0
        between = self._count(state) - self._first or self._usual_length(state) or math.inf
        return left + rest + updates // between * (passed + rest)

    def read_records(self, state: TrainState) -> list[Entry]:
        """Return the new records. Call this before :meth:`look`."""
        history, epochs = state.history, _run(state).epochs
        self._known = min(self._known, len(history))  # a hook may have returned a snapshot
        new = []
        for record in records_since(history, self._known):
            number = number_of_epoch(record, self._ended, self._ended_at)
            seconds = max(record.seconds - self._row_at, 0.0)
            new.append(Entry(record, number, epochs, seconds, state.skipped))
            if record.epoch > self._ended:
                self._ended, self._ended_at = record.epoch, record.step
            self._row_at = record.seconds if is_row(record) or self._is_stream else self._row_at
            if loaders := {k.partition("/")[0]: None for k in record.metrics if is_evaluated(k)}:
                self._note_evaluations(state, [*loaders])
        self._known = len(history)
        return new

    def _note_evaluations(self, state: TrainState, loaders: list[str]) -> None:
        """Note when the loaders of a record were evaluated, and how long each of them took."""
        took, now = _run(state).stopwatch.evaluated or 0.0, self._count(state)
        self._evaluations += took
        began = {loader: at for loader, at in self._began.items() if loader in loaders}
        self._began = {}
        if began.keys() != {*loaders}:  # not all were seen: let each take as long
            began = {loader: i * took / len(loaders) for i, loader in enumerate(loaders)}
        ends = [*[*began.values()][1:], next(iter(began.values())) + took]
        for (loader, at), end in zip(began.items(), ends, strict=True):
            known = self._evaluated.get(loader)
            newest = self._first if known is None else known.newest
            self._evaluated[loader] = _Evaluated(max(end - at, 0.0), newest, now)

    def _usual_length(self, state: TrainState) -> int | None:
        """Return the updates of an epoch, if they are known."""
        return _run(state).steps_per_epoch or self._length

    def _total(self, state: TrainState, done: int) -> int | None:
        """Return the updates of the epoch, or those until the target, if it is reached before."""
        run, length = _run(state), _run(state).steps_per_epoch or self._length
        if run.total_steps is None:
            return length
        until = done + max(run.total_steps - state.step, 0)
        return until if length is None else min(length, until)

    def _left(self, state: TrainState, done: int) -> float | None:
        """Return how many seconds the rest of the run takes, if that is known."""
        made, updates = self._count(state) - self._first, self._updates_left(state, done)
        if updates is None or made <= 0:
            return None
        passed = time.monotonic() - self.began - self._evaluations
        seconds = updates * passed / made
        end = self._count(state) + updates
        for each in self._evaluated.values():
            # After one at the start alone, assume that there is one at the end of each epoch.
            if between := each.newest - each.before or self._usual_length(state):
                seconds += (end - each.newest) // between * each.seconds
        return max(seconds, 0.0)

    def _updates_left(self, state: TrainState, done: int) -> int | None:
        """Return how many updates the run will still make, if that is known."""
        run, left = _run(state), []
        length = run.steps_per_epoch or self._length
        if run.epochs is not None and length is not None:
            left.append((run.epochs - state.epoch) * length - done)
        if run.total_steps is not None:
            left.append(run.total_steps - state.step)
        return max(min(left), 0) if left else None


def is_over(state: TrainState) -> bool:
    """Return whether a run is at its end."""
    run = _run(state)
    reached = run.epochs is not None and state.epoch >= run.epochs
    made = run.total_steps is not None and state.step >= run.total_steps
    return state.stop is not None or reached or made


def _run(state: TrainState) -> RunInfo:
    return state.run or RunInfo()


def _done(state: TrainState) -> int:
    """Return the updates of the running epoch, including skipped ones."""
    return -(-state.batch // _run(state).window)


def is_stream(state: TrainState) -> bool:
    """Return whether there may be no other records than those of intervals."""
    run = state.run
    return run is not None and run.batches_per_epoch is None and not run.evaluated


# --------------------------------------------------------------------------------------------------
# Progress in a terminal: a table that grows above a bar.

SPARE = 3  # columns at the end of the line, where a terminal writes "^C"
SHORTEST, LONGEST = 10, 40  # bars, in columns
NUMBERS = 68  # columns for what stands beside the bar


class TerminalView:
    """A line per record, and below them the bar of what is running: an epoch or an evaluation.

    A record of ``record_every`` has its means in the columns of ``train``, and is faint. It has a
    line only some time after the line above it, unless there may be no other records.

    Args:
        file: the terminal.
        refresh: the least time between two drawings that read from the device, in seconds.
    """

    newest: ClassVar[dict[int, object]] = {}  # the table that got the last line of each terminal

    def __init__(self, file: TextIO, refresh: float) -> None:
        self.screen, self.refresh, self.table = Screen(file), refresh, object()
        self.colors = has_colors(file)
        self.layout: Layout | None = None  # of the lines so far
        self.names: dict[str, None] = {}  # of their metrics, in order
        self.width = 0  # of the terminal that the layout was made for
        self.last_step = 0  # the greatest that is expected
        self.is_stream = False  # whether there may be no other records than those of intervals
        self.next = 0.0  # when to draw the bar of an epoch again
        self.written = time.monotonic()  # when the last line was

    def start(self, state: TrainState, parts: list[str], position: Position) -> None:
        self.last_step = (state.run and state.run.total_steps) or 0
        self.is_stream = is_stream(state)
        lines, width = [parts[0]], max(columns_of(self.screen.file) - 1, 1)
        for part in parts[1:]:  # broken between two parts, but for one that is longer than a line
            longer = f"{lines[-1]}, {part}"
            lines[-1:] = [longer] if len(longer) < width else [f"{lines[-1]},", part]
        lines = [short for line in lines for short in textwrap.wrap(line, width)]
        self.print(*(self.paint(line, "dim") for line in lines))
        # From here on there is a bar, also before a loader forks workers that may print.
        count = [format_count_of(position.done, position.total)]
        self.draw(format_epoch(position), position, count)

    def add(self, entry: Entry, best: set[str]) -> None:
        if faint := not is_row(entry.record) and not self.is_stream:
            if time.monotonic() < self.written + RECENT:
                return
            entry = attrs.evolve(entry, record=_as_training(entry.record))
        self.written = time.monotonic()
        record = attrs.evolve(entry.record, epoch=entry.epoch)
        head = self.layout and self.layout.head()
        layout = self.lay_out(entry, best)
        line = layout.line(record, entry.seconds, best)
        place = id(self.screen.file)
        below_own = self.newest.get(place) is self.table  # not below the lines of a run in a hook
        above = [] if layout.head() == head and below_own else layout.head()
        self.newest[place] = self.table
        for sign, styles in {"*": ("bold", "green"), "│": ("dim",)}.items():
            line = line if faint else line.replace(sign, self.paint(sign, *styles))
        line = self.paint(line, "dim") if faint else line
        self.print(*(self.paint(title, "dim") for title in above), line)

    def lay_out(self, entry: Entry, best: set[str]) -> Layout:
        """Return the columns for a record: those of the lines above it, if it fits them."""
        record, layout = entry.record, self.layout
        width = columns_of(self.screen.file) - 1
        self.names.update(dict.fromkeys(record.metrics))
        hidden = () if self.is_stream else ("recent/",)
        names = [name for name in self.names if not name.startswith(hidden)]
        if (
            layout is None
            or width != self.width
            or not layout.names.issuperset(names)
            or len(layout.line(record, entry.seconds, best)) > width_of(layout.columns)
        ):
            last, passed = max(self.last_step, record.step), [entry.seconds]
            layout = lay_out([record], names, width, last, passed)
            self.layout, self.width = layout, width
        return layout

    def show(self, state: TrainState, position: Position) -> float:
        """Draw the bar of the epoch, or that of the next one if it has ended."""
        now = time.monotonic()
        if now < self.next and not (RECORD in state.events and is_row(state.history[-1])):
            return self.next
        self.next = now + self.refresh
        if EPOCH in state.events:
            if is_over(state):
                return self.next
            following = attrs.evolve(position, epoch=position.epoch + 1, done=0)
            self.draw(format_epoch(following), following, [])
            return self.next
        parts = [format_count_of(position.done, position.total)]
        rate = [format_rate(position.rate)] if position.rate else []
        rate += [format_skipped(position)] if position.skipped else []
        found = running_values(state).items()
        values = [f"{name} {format_value(name, value)}" for name, value in found]
        first = 0 if state.run is None else len(state.run.turns)  # their losses stay longest
        parts += [*values[:first], *rate, *values[first:]]
        self.draw(format_epoch(position), position, parts)
        return self.next

    def evaluate(
        self, position: Position, loader: str, done: int, total: int | None, rate: float | None
    ) -> None:
        """Draw the bar of an evaluation."""
        parts = [format_count_of(done, total)]
        parts += [format_rate(rate, "batch")] if rate else []
        position = attrs.evolve(position, done=done, total=total)
        self.draw(f"{format_epoch(position)}  {loader}", position, parts)

    def draw(self, label: str, position: Position, parts: list[str]) -> None:
        """Draw a bar and what stands beside it. What does not fit goes, the last first.

        First the bar is made shorter. The time left stays longest.
        """
        width = columns_of(self.screen.file) - SPARE
        left = [] if position.left is None else [format_left(position.left)]
        beside = disp_len("  ".join([label, " 100% ", *parts, *left]))
        bar = self.bar(position.done, position.total, width - max(NUMBERS, beside))
        while parts and disp_len("  ".join([label, bar, *parts, *left])) > width:
            parts = parts[:-1]
        line = "  ".join(part for part in (label, bar, *parts, *left) if part)
        if disp_len(line) > width:
            line = "  ".join([label, *left])[:width]
        self.screen.draw(printable(line, self.screen.file))

    def bar(self, done: int, total: int | None, width: int) -> str:
        """Return a percentage and a bar; nothing if the total is not known."""
        if not total:
            return ""
        length = min(max(width, SHORTEST), LONGEST)
        part = min(done / total, 1.0)
        filled = int(part * length)
        drawn = self.paint("━" * filled, "cyan") + self.paint("─" * (length - filled), "dim")
        return f"{int(part * 100):3}% {drawn}"

    def finish(self, text: str) -> None:
        """Remove the bar, and write the last line."""
        self.screen.close()
        width = max(columns_of(self.screen.file) - 1, 1)
        self.print(*textwrap.wrap(text, width, break_on_hyphens=False))

    def close(self) -> None:
        """Remove the bar."""
        self.screen.close()

    def paint(self, text: str, *styles: str) -> str:
        return paint(text, *styles) if self.colors else text

    def print(self, *lines: str) -> None:
        self.screen.print(*(printable(line, self.screen.file) for line in lines))


def _as_training(record: Record) -> Record:
    """Return a record of ``record_every`` with its means under the names of training metrics."""
    metrics = record.metrics.items()
    named = {f"train/{name.removeprefix('recent/')}": value for name, value in metrics}
    return attrs.evolve(record, metrics=named)


# --------------------------------------------------------------------------------------------------
# Progress in a notebook: one output of a cell, a table above a bar.

ROWS = 20  # of the table; the middle of a longer run is left out


class NotebookView:
    """A table of this run's records, above the bar of what is running, redrawn in place.

    Args:
        refresh: the least time between two drawings, in seconds.
    """

    def __init__(self, refresh: float) -> None:
        self.refresh, self.output = refresh, tables.Display()
        self.facts = ""
        self.rows: list[Record] = []
        self.best: dict[str, Record] = {}  # of each metric, the row that is the best
        self.is_stream = False  # whether there may be no other records than those of intervals
        self.before: Record | None = None  # the row before the first one
        self.bar: tuple[int, int | None, str] | None = None  # done, the total, and a text
        self.drawn = self.next = 0.0  # when it was drawn, and when to draw it again

    def start(self, state: TrainState, parts: list[str], position: Position) -> None:
        self.facts, self.is_stream = ", ".join(parts), is_stream(state)
        rows = (row for row in reversed(state.history) if self.is_stream or is_row(row))
        self.before = next(rows, None)

    def add(self, entry: Entry, best: set[str]) -> None:
        if not is_row(entry.record) and not self.is_stream:
            return
        self.rows.append(attrs.evolve(entry.record, epoch=entry.epoch))
        self.best |= dict.fromkeys(best, self.rows[-1])
        if self.is_stream and len(self.rows) > 2 * ROWS:
            del self.rows[ROWS]  # which is never shown

    def show(self, state: TrainState, position: Position) -> float:
        """Draw the bar of the epoch."""
        now = time.monotonic()
        if now >= self.next:
            parts = [format_rate(position.rate)] if position.rate else []
            parts += [format_skipped(position)] if position.skipped else []
            values = running_values(state).items()
            parts += [f"{name} {format_value(name, value)}" for name, value in values]
            self.set_bar(position, format_epoch(position), parts)
            self.drawn, self.next = now, now + self.refresh
            self.draw()
        return self.next

    def evaluate(
        self, position: Position, loader: str, done: int, total: int | None, rate: float | None
    ) -> None:
        """Draw the bar of an evaluation."""
        now = time.monotonic()
        if now >= self.drawn + self.refresh:
            self.drawn = now
            parts = [format_rate(rate, "batch")] if rate else []
            where = attrs.evolve(position, done=done, total=total)
            self.set_bar(where, f"{format_epoch(position)} · {loader}", parts)
            self.draw()

    def set_bar(self, position: Position, label: str, parts: list[str]) -> None:
        """Set what the bar shows."""
        count = format_count_of(position.done, position.total)
        left = [] if position.left is None else [format_left(position.left)]
        self.bar = position.done, position.total, " · ".join([label, count, *parts, *left])

    def finish(self, text: str) -> None:
        """Show the reason of the end instead of the bar."""
        self.bar = None
        self.draw(text)

    def close(self) -> None: ...

    def draw(self, note: str = "") -> None:
        """Draw everything again."""
        parts, text = [tables.faint(self.facts)], [self.facts]
        if self.rows:
            hidden = () if self.is_stream else ("recent/",)
            names = [name for name in metric_names(self.rows) if not name.startswith(hidden)]
            shown = table(
                self.rows, names, width=HTML_WIDTH, most=ROWS, before=self.before, best=self.best
            )
            parts.append(shown.html())
            text.append(shown.text(terminal_width()))
        if self.bar is not None:
            parts.append(tables.bar(*self.bar))
            text.append(self.bar[2])
        if note:
            parts.append(tables.line(note))
            text.append(note)
        self.output.show(tables.Rendered(tables.stack(*parts), "\n".join(text)))


# --------------------------------------------------------------------------------------------------
# Progress in a log: a line per record, and one from time to time in between.

HEARTBEAT = 30.0  # seconds between two lines, if there is no record


class LogView:
    """Lines of plain text, each flushed.

    Args:
        file: the log.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.written = time.monotonic()  # when the last line was

    def start(self, state: TrainState, parts: list[str], position: Position) -> None:
        self.write([", ".join(parts)])

    def add(self, entry: Entry, best: set[str]) -> None:
        if not is_row(entry.record):
            return
        record = entry.record
        names = [n for n in record.metrics if not n.startswith("recent/") and "/watch/" not in n]
        fields = lay_out([record], names).fields
        ordered = [field.name for field in fields if field.name]
        epoch = format_epoch(entry)
        values = (_format(name, record.metrics[name], name in best) for name in ordered)
        step, skipped = f"step {record.step:,}", format_skipped(entry)
        self.write([epoch, step, *values, skipped, format_duration(entry.seconds)])

    def show(self, state: TrainState, position: Position) -> float:
        """Write how far the run is, if it is time to."""
        pause = RECENT if RECORD in state.events else HEARTBEAT
        if time.monotonic() >= self.written + pause:
            values = running_values(state).items()
            numbers = [_format(name, value) for name, value in values]
            rate = format_rate(position.rate) if position.rate else ""
            part = f"{position.done * 100 // position.total}%" if position.total else ""
            step = f"step {position.step:,}"
            self.write_status(position, [part, step, format_skipped(position), *numbers, rate])
        return self.written + HEARTBEAT

    def evaluate(
        self, position: Position, loader: str, done: int, total: int | None, rate: float | None
    ) -> None:
        """Write how far an evaluation is, if it is time to."""
        if time.monotonic() >= self.written + HEARTBEAT:
            speed = format_rate(rate, "batch") if rate else ""
            evaluated = f"{loader} {format_count_of(done, total).strip()}"
            self.write_status(position, [f"step {position.step:,}", evaluated, speed])

    def write_status(self, position: Position, parts: list[str]) -> None:
        """Write where a run is."""
        left = "" if position.left is None else format_left(position.left)
        self.write([format_epoch(position), *parts, left])

    def finish(self, text: str) -> None:
        self.write([text])

    def close(self) -> None: ...

    def write(self, parts: list[str]) -> None:
        """Write a line."""
        self.written = time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed file ends no run
            print(printable("  ".join(filter(None, parts)), self.file), file=self.file, flush=True)


def _format(name: str, value: float, is_best: bool = False) -> str:
    return f"{name} {format_value(name, value)}{'*' if is_best else ''}"
