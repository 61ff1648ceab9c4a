"""Show the progress of a run: in a log, a terminal or a notebook."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import sys
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TextIO
from weakref import WeakValueDictionary

import attrs
from torch import Tensor
from tqdm.utils import disp_len

from fnloop._core.history import Phase
from fnloop._core.metrics import Last
from fnloop._core.records import Record
from fnloop._core.runs import RunInfo
from fnloop._core.state import TrainState
from fnloop._extensions.histories.table import Row, starred, update_best, without_intervals
from fnloop._extensions.hooks.terminal import Screen, columns_of, has_colors, paint
from fnloop._hooks.hook import Hook
from fnloop.extend import (
    BuiltIn,
    Call,
    Metrics,
    Monitored,
    Stop,
    Wrapper,
    better,
    checks,
    groups,
    optimizers,
    reprs,
    tables,
)


class progress(BuiltIn):
    """Show the progress of a run: in a terminal, a notebook or a log.

    The first line describes the run and its length. The last line says why it ended: its target,
    the reason of a stop, Ctrl-C or a signal. It also has the best value of the metric that
    ``checkpoint(best=...)``, ``restore_best`` or ``early_stop`` watches, or else of the loss.

    In a terminal, a table grows above a bar. The table has a line for each evaluation and each end
    of an epoch. With ``record_every`` it has faint lines in between, at most one every 10 seconds:
    they have the means since the last record, in the columns of ``train``. The evaluated loaders
    come first. A star marks a value that is better than all above it: the last star of a column is
    at its best value. ``print(state.history)`` has the same stars. Columns that do not fit the
    width are left out, gradient norms and learning rates first. The time is counted from the last
    line that is not faint. A stream that evaluates nothing has a line for each record. The bar
    shows the running epoch: updates per second, without the time of evaluations and hooks; the
    running loss; and an estimate of the time left of the whole run. During an evaluation, it shows
    the progress of the evaluation instead. What a hook prints appears above the bar, and a tqdm bar
    of a hook takes its place. Colors are left out if NO_COLOR is set.

    Args:
        refresh: the least time between two drawings, in seconds, at least 0.5.
        file: an open text file to write to; by default the notebook, or else stderr.
        since: what a value with a star is better than: all of the "phase", if there is one, or of
            the whole "run".

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

    Notes:
        A notebook has the same in one output of the cell, without the faint lines: ``live_plot``
        draws the curve.

        A log, which is a file that is not a terminal, has a line for each evaluation and each end
        of an epoch. In between, it has a line every 30 seconds; with ``record_every``, at most one
        every 10 seconds, with the metrics of the newest record.

        It reads from the device when the bar is drawn or such a line is written, and at no other
        time. With several processes, the main one shows it; the loss between two records is then
        that of its own share of the batches. On an accelerator, the time of hooks counts in the
        updates per second, because a hook may wait for the device.

    Replaces: lightning.TQDMProgressBar, keras.ProgbarLogger,
    pytorch_accelerated.ProgressBarCallback
    """

    untried = "it only shows the run"

    def __init__(
        self, refresh: float = 0.5, file: TextIO | None = None, *, since: str = "phase"
    ) -> None:
        meaning = "the seconds between two drawings, each of which reads from the device"
        refresh = checks.number("progress", "refresh", refresh, meaning, least=0.5)
        if file is not None and not checks.has_methods(file, "write", "isatty"):
            raise TypeError(
                "progress expects file as an open text file, such as sys.stdout, or None; "
                f"got {checks.describe(file)}"
            )
        self.refresh, self.file = refresh, file
        self.since = checks.choice("progress", "since", since, Monitored.SINCE)
        self._view: _View | None = None  # a run, on its main process
        self._next = -math.inf  # when to show something, unless there is a record
        self._newest: TrainState | None = None  # the state at the newest boundary
        self.ranked: Monitored | None = None  # by what the hooks of this run rank

    def __repr__(self) -> str:
        given = {"refresh": self.refresh, "since": self.since}
        usual = {"refresh": 0.5, "since": "phase"}
        changed = {name: value for name, value in given.items() if value != usual[name]}
        return repr(Call(progress, (), changed))

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Find the metric whose best value the last line names."""
        self.ranked = _find_ranked(hooks)

    def begin(self, state: TrainState) -> TrainState:
        """Say what the run works with."""
        if state.backend.main:
            self._follow(state)
        return state

    def _follow(self, state: TrainState) -> _View:
        self._view = _make_view(self, state)
        self._view.start(describe_start(state))
        return self._view

    def __call__(self, state: TrainState) -> TrainState:
        self._newest = state
        if time.monotonic() < self._next and "record" not in state.events:
            return state  # all that most updates cost
        if not state.backend.main:
            self._next = math.inf
            return state
        view = self._view or self._follow(state)  # a call by hand comes without ``begin``
        self._next = view.pass_boundary(state)
        return state

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Show an evaluation."""
        if self._view is not None:
            self._view.pass_batch(state, loader, done, total)

    def flush(self, state: TrainState) -> TrainState:
        """Show why the run ended."""
        if self._view is not None:
            self._view.finish(state)
        return state

    def close(self) -> None:
        """Leave the output in order."""
        if self._view is not None:
            error = sys.exc_info()[1]  # with which the run ends, if it does not end by itself
            reached = getattr(error, "state", None)
            newest = reached if isinstance(reached, TrainState) else self._newest
            self._view.close(newest, describe_failure(error))
        self._view, self._next, self._newest = None, -math.inf, None


# --------------------------------------------------------------------------------------------------
# What a run says about itself, the same in a terminal, a log and a notebook.

HOW_TO_CONTINUE = (
    "to continue: fit again with the state that was returned, or with resume(folder, state)"
)
LONGEST_REASON = 100  # characters of an error in the last line


def describe_start(state: TrainState) -> list[str]:
    """Return what a run works with, and what it is going to do, in parts of a sentence."""
    backend = state.backend
    parameters = reprs.count_parameters(state.model)
    parts = [f"{type(state.model).__name__} on {backend.device}", *parameters.split(", ")]
    if precision := backend.precision if state.run is None else state.run.precision:
        parts.append(f"amp {precision}")
    else:
        parts += sorted({str(p.dtype).removeprefix("torch.") for p in state.model.parameters()})
    if backend.world_size > 1:
        parts.append(f"{backend.world_size} processes")
    return [*parts, *_describe_targets(state)]


def _describe_targets(state: TrainState) -> list[str]:
    run, phase, parts = _run(state), Phase.running(state.phases), []
    if phase.name:
        parts.append(f"phase {phase.name}")
    left, updates = (run.epochs or 0) - phase.epoch, (run.total_steps or 0) - run.first_step
    length, epochs = run.steps_per_epoch or 0, reprs.format_count(left, "epoch")
    each = reprs.format_count(length, "update")
    if not left:
        parts += [f"{each} per epoch"] if length else []
    elif length and updates == left * length:
        parts.append(f"{epochs} of {each}")
    else:  # of different lengths, or of an unknown one
        parts.append(epochs)
        if length and updates > 0:
            parts.append(f"{reprs.format_count(updates, 'update')} in all")
    if run.total_steps is not None and not run.epochs:
        parts.append(f"to step {run.total_steps:,}")
    if run.total_items is not None:
        parts.append(f"to {run.total_items:,} items")
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
    first = reprs.shorten(first, LONGEST_REASON)
    return f"failed: {type(error).__name__}" + (f": {first}" if first else "")


def describe_end(reason: str, position: Position, seconds: float) -> str:
    """Return the last line, but for what was best: why a run has ended, and where."""
    parts = [position.epoch_text, position.step_text, position.skipped_text]
    where = ", ".join([*filter(None, parts), f"after {tables.format_duration(seconds)}"])
    return f"{reason}{';' if ':' in reason else ':'} {where}"


def _find_ranked(hooks: Sequence[Hook]) -> Monitored | None:
    """Return by what hooks keep the best, or else what they watch; None if nothing is known."""
    kept = (layer.ranks for layer in BuiltIn.among(hooks))
    watched = (
        Monitored("progress", key, mode, "phase" if since == "phase" else "run")
        for hook in [hook.innermost if isinstance(hook, Wrapper) else hook for hook in hooks]
        if not isinstance(hook, BuiltIn)
        for key in ((hook.monitors,) if isinstance(hook.monitors, str) else hook.monitors or ())
        if (mode := getattr(hook, "mode", None) or reprs.mode_by_name(key)) in ("min", "max")
        for since in [getattr(hook, "since", "phase")]
    )
    return next(filter(None, (*kept, *watched)), None)


def _best_ranked(ranked: Monitored, state: TrainState) -> tuple[str, Record] | None:
    """Return a metric and its best record; None if no record has it."""
    key = ranked.key
    best: Record | None = None
    for record in state.history.since(ranked.first(state)):
        if math.isfinite(value := record.metrics.get(key, math.nan)):
            best = record if best is None or ranked.better(value, best.metrics[key]) else best
    return None if best is None else (key, best)


def _best_by_name(best: Mapping[str, Record], run: RunInfo) -> tuple[str, Record] | None:
    """Return the best loss of the first evaluated loader, or else its first other metric."""
    place = {loader: i for i, loader in enumerate(run.evaluated)}

    def rank(name: str) -> tuple[bool, int]:
        return not name.endswith("/loss"), place.get(name.partition("/")[0], len(place))

    if run.models:
        best = _best_models(best)
    if run.turns or not best:  # a mean of losses that may oppose each other says nothing
        return None
    name = min(best, key=rank)
    return name, best[name]


def describe_values(state: TrainState) -> list[str]:
    """Return "loss" and "lr": those of a record of this boundary, or else the running ones.

    With several optimizers the rates are "lr/matrices", ...; those of further groups are left out.
    With turns, the losses are "d/loss", ... in place of their mean.
    The running ones are read from the device: one read.
    """
    first = [one.param_groups[0] for one in optimizers(state).values()]
    rates = {
        f"lr{label}": Last(group["lr"])
        for label, group in groups(state).items()
        if any(group is each for each in first)
    }
    if _run(state).models:
        return _describe_losses(state)
    losses = [f"{turn}/loss" for turn in _run(state).turns] or ["loss"]
    if "record" in state.events:
        metrics = state.history[-1].metrics
        values = {
            name: metrics[f"{group}/{name}"]
            for name in (*losses, *rates)
            for group in ("train", "recent")
            if f"{group}/{name}" in metrics
        }
        known = {n: r.compute() for n, r in rates.items() if not isinstance(r.value, Tensor)}
        values |= {name: rate for name, rate in known.items() if name not in values}
    else:
        running = state.metrics
        of = {name: running.get(f"recent/{name}", running.get(name)) for name in losses}
        values = Metrics({k: m for k, m in of.items() if m is not None} | rates).read()
    return [f"{name} {reprs.format_metric(name, value)}" for name, value in values.items()]


def _describe_losses(state: TrainState) -> list[str]:
    """Return the lowest and the highest of the losses of a stack. One read from the device."""
    running = state.metrics.get("recent/loss", state.metrics.get("loss"))
    losses = [] if running is None else [*Metrics(loss=running).read().values()]
    if not losses:
        return []
    low, high = (reprs.format_metric("loss", value) for value in (min(losses), max(losses)))
    return [f"losses {low} to {high}"]


def _best_models(best: Mapping[str, Record]) -> dict[str, Record]:
    """Return the best record of each metric of the models of a stack, of the best model only."""
    found: dict[tuple[str, str], str] = {}
    for name, record in best.items():
        kind = name.split("/")[0], name.split("/")[-1]
        other = found.get(kind)
        mode = reprs.mode_by_name(name) or "min"
        if other is None or better(record.metrics[name], best[other].metrics[other], mode):
            found[kind] = name
    return {name: best[name] for name in found.values()}


# --------------------------------------------------------------------------------------------------
# How far a run is, how fast it is, and how long it will still take.


def _format_count_of(done: int, total: int | None) -> str:
    """Format how many of how many, aligned; or, without a total, how many."""
    if total is None:
        return f"{done:,}"
    of = f"{total:,}"
    return f"{done:{len(of)},}/{of}"


def _format_left(seconds: float) -> str:
    """Format an estimate of the time left, which is not exact to a tenth of a second."""
    shown = tables.format_duration(seconds) if seconds >= 9.95 else f"{math.ceil(seconds)}s"
    return f"{shown} left"


def _format_rate(rate: float, unit: str = "step") -> str:
    """Format a rate: per second, or, if it is below 1, the seconds of each.

    Example:
        >>> _format_rate(1234.5), _format_rate(12.345), _format_rate(0.25, "batch")
        ('1,234 step/s', '12.3 step/s', '4.00 s/batch')
    """
    value, of = (rate, f"{unit}/s") if rate >= 1 else (1 / rate, f"s/{unit}")
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {of}"


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

    @property
    def epoch_text(self) -> str:
        """The number of the epoch and of the last one, in words."""
        return f"epoch {self.epoch}" + (f"/{self.epochs}" if self.epochs else "")

    @property
    def step_text(self) -> str:
        """The updates applied, in words."""
        return f"step {self.step:,}"

    @property
    def count_text(self) -> str:
        """How many updates, or batches, of how many."""
        return _format_count_of(self.done, self.total)

    @property
    def skipped_text(self) -> str:
        """How many updates were skipped, in words; "" if none was."""
        return f"{self.skipped:,} skipped" if self.skipped else ""

    @property
    def left_text(self) -> str:
        """The time left, in words; "" if it is unknown."""
        return "" if self.left is None else _format_left(self.left)

    def rate_text(self, unit: str = "step") -> str:
        """Return the rate in words; "" if it is unknown."""
        return _format_rate(self.rate, unit) if self.rate else ""


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
        self._seen = state.history  # whose records are taken into account
        self._is_stream = is_stream(state)
        self._ended = state.epoch
        # Where the running epoch began, or a later step of it.
        self._ended_at = state.step - bool(state.batch)
        rows = (record.seconds for record in reversed(state.history) if Row(record).is_whole)
        self._row_at = next(rows, 0.0)  # the seconds of the newest row
        self._length: int | None = None  # of an epoch, if it is not known beforehand
        self._evaluated: dict[str, _Evaluated] = {}  # by loader
        self._began: dict[str, float] = {}  # when the evaluation of each loader of a record did
        self._evaluations = 0.0  # seconds of all evaluations
        self._begin_epoch(state, _done(state))

    def look(self, state: TrainState) -> Position:
        """Return the position at a boundary. After the end of an epoch, measure the next one."""
        ended = "epoch" in state.events
        self.position = self._at_end_of_epoch(state) if ended else self._amid_epoch(state)
        self._looked = time.monotonic()
        return self.position

    def at(self, state: TrainState) -> Position:
        """Return the position that was looked at last, with the counters of a state."""
        number = state.epoch + ("epoch" not in state.events)
        return attrs.evolve(self.position, epoch=number, step=state.step, skipped=state.skipped)

    def _amid_epoch(self, state: TrainState) -> Position:
        done = _done(state)
        if state.epoch != self._epoch or done < self._initial:
            self._begin_epoch(state, done)  # of a snapshot, or not seen
        return self._position(state, state.epoch + 1, done, self._total(state, done), done)

    def _at_end_of_epoch(self, state: TrainState) -> Position:
        if state.epoch - 1 != self._epoch:
            self._begin_epoch(state, 0)
        made = self._count(state) - self._epoch_first
        done = _run(state).steps_per_epoch or self._initial + made
        position = self._position(state, state.epoch, done, done, 0)
        self._length = self._length if self._initial else done
        self._begin_epoch(state, 0)
        return position

    def _position(
        self, state: TrainState, epoch: int, done: int, total: int | None, begun: int
    ) -> Position:
        made, seconds = done - self._initial, self._active(state)
        rate = made / seconds if made > 0 and seconds > 0 else None
        left = self._left(state, begun)
        return Position(
            epoch, _run(state).epochs, state.step, done, total, rate, left, state.skipped
        )

    def _begin_epoch(self, state: TrainState, done: int) -> None:
        """Measure the rate from here on; ``done`` updates of the epoch were made before."""
        self._epoch, self._initial = state.epoch, done
        self._epoch_first = self._count(state)
        self._trained = _run(state).live.stopwatch.trained
        self._epoch_began: float | None = None  # when it was, as far as hooks can know
        self._evaluations_before = self._evaluations

    def _active(self, state: TrainState) -> float:
        """Return the seconds of this epoch without evaluations and hooks.

        On an accelerator, hooks count: the device may still be at work on updates, and it is a hook
        that waits for it.
        """
        now, trained = time.monotonic(), _run(state).live.stopwatch.trained - self._trained
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

    def look_at_evaluation(
        self, state: TrainState, loader: str, done: int, total: int | None
    ) -> Position:
        """Return how far the evaluation of a loader is, with the time left of the whole run."""
        now = time.monotonic()
        passed = now - self._began.setdefault(loader, now)
        rate = done / passed if passed > 0 and done else None
        rest = None if rate is None or total is None else (total - done) / rate
        left = self._left_in_evaluation(state, loader, passed, rest)
        return attrs.evolve(self.at(state), done=done, total=total, rate=rate, left=left)

    def _left_in_evaluation(
        self, state: TrainState, loader: str, passed: float, rest: float | None
    ) -> float | None:
        """Return how many seconds the rest of a run takes that is evaluating, if that is known.

        Args:
            state: the state that is evaluated.
            loader: the name of the loader.
            passed: the seconds since the evaluation began.
            rest: the seconds that the rest of it takes, or None.
        """
        if self.position.left is None:
            return None
        trained = self._began[loader] - self._looked
        left = max(self.position.left - trained, 0.0)
        if loader in self._evaluated:  # this one is a part of the estimate
            return max(left - passed, rest or 0.0)
        if rest is None:
            return None
        updates = self._updates_left(state, 0 if "epoch" in state.events else _done(state)) or 0
        between = self._count(state) - self._first or self._usual_length(state) or math.inf
        return left + rest + updates // between * (passed + rest)

    def read_records(self, state: TrainState) -> list[Row]:
        """Return the new records, with the numbers of their epochs, from 1. Call it before look."""
        new = []
        for record in state.history.since(self._seen):
            seconds = max(record.seconds - self._row_at, 0.0)
            row = Row.of(record, seconds, self._ended, self._ended_at)
            new.append(row)
            if record.epoch > self._ended:
                self._ended, self._ended_at = record.epoch, record.step
            self._row_at = record.seconds if row.is_whole or self._is_stream else self._row_at
            if row.evaluated:
                self._note_evaluations(state, row.evaluated)
        self._seen = state.history
        return new

    def _note_evaluations(self, state: TrainState, loaders: list[str]) -> None:
        """Note when the loaders of a record were evaluated, and how long each of them took."""
        took, now = _run(state).live.stopwatch.evaluated or 0.0, self._count(state)
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
        run, length = _run(state), self._usual_length(state)
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
        run, length, left = _run(state), self._usual_length(state), []
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
    counted = run.total_items is not None and (state.items or 0) >= run.total_items
    return state.stop is not None or reached or made or counted


def _run(state: TrainState) -> RunInfo:
    return state.run or RunInfo()


def _done(state: TrainState) -> int:
    """Return the updates of the running epoch, including skipped ones."""
    return _run(state).windows.updates(state.batch)


def is_stream(state: TrainState) -> bool:
    """Return whether there may be no other records than those of intervals."""
    run = state.run
    return run is not None and run.batches_per_epoch is None and not run.evaluated


# --------------------------------------------------------------------------------------------------
# A run that is shown. What it shows is the same everywhere; a terminal, a notebook and a log write
# it, each in its own way.

BRIEFEST = 0.1  # seconds between two drawings of an evaluation, which reads nothing
RECENT = 10.0  # seconds between two lines, if there are records of ``record_every`` only


def _make_view(hook: progress, state: TrainState) -> _View:
    file = hook.file or sys.stderr
    if file is None or getattr(file, "closed", False):  # as in a daemon
        file = io.StringIO()
    if hook.file is None and reprs.in_notebook():
        kind = _Notebook
    elif file.isatty() and os.environ.get("TERM") != "dumb":  # which cannot redraw a line
        kind = _Terminal
    else:
        kind = _Log
    return kind(hook, state, file)


class _View(ABC):
    """A run that is shown, by its main process.

    Args:
        hook: the hook, with its settings.
        state: a state of the run, of before its first update.
        file: the terminal or the log.
    """

    def __init__(self, hook: progress, state: TrainState, file: TextIO) -> None:
        self.refresh, self.ranked, self.file = hook.refresh, hook.ranked, file
        self.pace, self.state, self.is_stream = Pace(state), state, is_stream(state)
        # A state that continues a run may have the events of its last boundary, such as the end of
        # an epoch, which is not one of this run.
        self.pace.look(attrs.evolve(state, events=frozenset()))
        first = state.phases[-1].records if state.phases and hook.since == "phase" else 0
        before = state.history.since(first)
        self.best: dict[str, Record] = functools.reduce(update_best, before, {})  # of each metric
        self.quiet = 0.0  # until when nothing is shown of an evaluation
        self.next = 0.0  # when to draw the bar of an epoch again
        self.written = time.monotonic()  # when the last line was
        self.finished = False

    @abstractmethod
    def start(self, parts: list[str]) -> None:
        """Show what the run works with, and where it begins."""

    @abstractmethod
    def add(self, row: Row) -> None:
        """Show a record."""

    @abstractmethod
    def show(self, state: TrainState) -> float:
        """Show a boundary, if it is time to. Return when it is time again."""

    @abstractmethod
    def show_evaluation(self, loader: str, position: Position) -> None:
        """Show an evaluation, if it is time to: a position in the batches of a loader."""

    @abstractmethod
    def end(self, *lines: str) -> None:
        """Show why the run ended, and how to continue it."""

    def pass_boundary(self, state: TrainState) -> float:
        """Show a boundary, and return when to show the next one."""
        self.finished = False
        self.read(state)
        self.pace.look(state)
        return self.show(state)

    def read(self, state: TrainState) -> None:
        """Show the new records."""
        self.state = state
        for row in self.pace.read_records(state):
            self.best = update_best(self.best, row.record)
            for line in self.marked(row).by_model(_run(state).models):
                self.add(line)

    def marked(self, row: Row) -> Row:
        """Return a row with the names of its metrics that are better than all above."""
        best = starred(self.best, row.record, _run(self.state).turns)
        return attrs.evolve(row, best=best)

    def pass_batch(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Show how far an evaluation is."""
        if not done:
            self.pace.begin_evaluation(loader)
        if (now := time.monotonic()) >= self.quiet:
            self.quiet = now + BRIEFEST
            position = self.pace.look_at_evaluation(state, loader, done, total)
            self.show_evaluation(loader, position)

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
        line = describe_end(reason, self.pace.at(state), seconds) + self.describe_best()
        self.end(line, *[HOW_TO_CONTINUE] * Stop.interrupts(state.stop))

    def describe_best(self) -> str:
        """Return the best value that a run has made, by what its hooks rank, if they do."""
        found = _best_ranked(self.ranked, self.state) if self.ranked else None
        found = found or _best_by_name(self.best, _run(self.state))
        if found is None:
            return ""
        name, record = found
        value = reprs.format_metric(name, record.metrics[name])
        return f"; best {name} {value} at step {record.step:,}"

    def parts_of_epoch(self, state: TrainState) -> list[str]:
        """Return what stands beside the bar of an epoch, the most important first."""
        values, turns = describe_values(state), len(_run(state).turns)
        rate, skipped = self.pace.position.rate_text(), self.pace.position.skipped_text
        return [self.pace.position.count_text, *values[:turns], rate, skipped, *values[turns:]]

    def with_column(self, names: Iterable[str]) -> list[str]:
        """Return the metrics that have a column: the means of intervals only of a stream."""
        return [*names] if self.is_stream else without_intervals(names)


# --------------------------------------------------------------------------------------------------
# In a terminal: a table that grows above a bar.

SPARE = 3  # columns at the end of the line, where a terminal writes "^C"
SHORTEST, LONGEST = 10, 40  # bars, in columns
NUMBERS = 68  # columns for what stands beside the bar


class _Terminal(_View):
    """A line per record, and below them the bar of what is running: an epoch or an evaluation.

    A record of ``record_every`` has its means in the columns of ``train``, and is faint. It has a
    line only some time after the line above it, unless there may be no other records.
    """

    # Which run wrote the last line of a table on each terminal: a run in a hook has a table of its
    # own, and below it this one needs its head again. Weak, or it would keep the state of a run.
    newest: ClassVar[WeakValueDictionary[int, _Terminal]] = WeakValueDictionary()

    def __init__(self, hook: progress, state: TrainState, file: TextIO) -> None:
        super().__init__(hook, state, file)
        self.screen, self.colors = Screen(file), has_colors(file)
        self.table: tables.Table[Row] = tables.Table(())  # the columns of the lines so far
        self.made_for: tuple[int, list[str]] = 0, []  # the width of the terminal, and metrics
        self.names: dict[str, None] = {}  # of all metrics so far, in order

    def start(self, parts: list[str]) -> None:
        lines, width = [parts[0]], max(columns_of(self.screen.file) - 1, 1)
        for part in parts[1:]:  # broken between two parts, but for one that is longer than a line
            longer = f"{lines[-1]}, {part}"
            lines[-1:] = [longer] if len(longer) < width else [f"{lines[-1]},", part]
        lines = [short for line in lines for short in textwrap.wrap(line, width)]
        self.screen.print(*(self.paint(line, "dim") for line in lines))
        # From here on there is a bar, also before a loader forks workers that may print.
        self.draw(self.pace.position, [self.pace.position.count_text])

    def add(self, row: Row) -> None:
        if faint := not row.is_whole and not self.is_stream:
            if time.monotonic() < self.written + RECENT:
                return
            row = attrs.evolve(row, record=_as_training(row.record))
        self.written = time.monotonic()
        head, place = self.table.head(), id(self.screen.file)
        self.table = self.suit(row)
        line, above = self.table.line(row), self.table.head()
        if above == head and self.newest.get(place) is self:
            above = []
        self.newest[place] = self
        for sign, styles in {"*": ("bold", "green"), "│": ("dim",)}.items():
            line = line if faint else line.replace(sign, self.paint(sign, *styles))
        line = self.paint(line, "dim") if faint else line
        self.screen.print(*(self.paint(title, "dim") for title in above), line)

    def suit(self, row: Row) -> tables.Table[Row]:
        """Return the columns for a row: those of the lines above it, if it fits them."""
        width = columns_of(self.screen.file) - 1
        self.names.update(dict.fromkeys(row.record.metrics))
        made_for = width, self.with_column(self.names)
        if made_for == self.made_for and len(self.table.line(row)) <= self.table.width:
            return self.table
        self.made_for = made_for
        last = max(_run(self.state).total_steps or 0, row.record.step)
        return Row.lay_out([row], made_for[1], width, last)

    def show(self, state: TrainState) -> float:
        """Draw the bar of the epoch, or that of the next one if it has ended."""
        now = time.monotonic()
        # The values of a row are known, and cost no read.
        if now < self.next and not ("record" in state.events and Row(state.history[-1]).is_whole):
            return self.next
        self.next = now + self.refresh
        if "epoch" not in state.events:
            self.draw(self.pace.position, self.parts_of_epoch(state))
        elif not is_over(state):  # nothing is known of the next epoch yet
            following = self.pace.position.epoch + 1
            self.draw(attrs.evolve(self.pace.position, epoch=following, done=0), [])
        return self.next

    def show_evaluation(self, loader: str, position: Position) -> None:
        self.draw(position, [position.count_text, position.rate_text("batch")], f"  {loader}")

    def draw(self, position: Position, parts: list[str], loader: str = "") -> None:
        """Draw a bar and what stands beside it. What does not fit goes, the last first.

        First the bar is made shorter. The time left stays longest.
        """
        width = columns_of(self.screen.file) - SPARE
        label, parts = f"{position.epoch_text}{loader}", [*filter(None, parts)]
        left = [position.left_text] if position.left_text else []
        beside = disp_len("  ".join([label, " 100% ", *parts, *left]))
        # NUMBERS, so that the bar keeps its length while what stands beside it changes.
        bar = self.bar(position.done, position.total, width - max(NUMBERS, beside))
        while parts and disp_len("  ".join([label, bar, *parts, *left])) > width:
            parts = parts[:-1]
        line = "  ".join(part for part in (label, bar, *parts, *left) if part)
        if disp_len(line) > width:
            line = "  ".join([label, *left])[:width]
        self.screen.draw(line)

    def bar(self, done: int, total: int | None, width: int) -> str:
        """Return a percentage and a bar; nothing if the total is not known."""
        if not total:
            return ""
        length = min(max(width, SHORTEST), LONGEST)
        part = min(done / total, 1.0)
        filled = int(part * length)
        drawn = self.paint("━" * filled, "cyan") + self.paint("─" * (length - filled), "dim")
        return f"{int(part * 100):3}% {drawn}"

    def end(self, *lines: str) -> None:
        """Remove the bar, and write the last lines."""
        self.screen.close()
        width = max(columns_of(self.screen.file) - 1, 1)
        for line in lines:
            self.screen.print(*textwrap.wrap(line, width, break_on_hyphens=False))

    def close(self, newest: TrainState | None, reason: str) -> None:
        super().close(newest, reason)
        self.screen.close()  # an evaluation after the last line may have drawn a bar again

    def paint(self, text: str, *styles: str) -> str:
        return paint(text, *styles) if self.colors else text


def _as_training(record: Record) -> Record:
    """Return a record of ``record_every`` with its means under the names of training metrics."""
    metrics = record.metrics.items()
    named = {f"train/{name.removeprefix('recent/')}": value for name, value in metrics}
    return attrs.evolve(record, metrics=named)


# --------------------------------------------------------------------------------------------------
# In a notebook: one output of a cell, a table above a bar.

ROWS = 20  # of the table; the middle of a longer run is left out


class _Notebook(_View):
    """A table of this run's records, above the bar of what is running, redrawn in place."""

    def __init__(self, hook: progress, state: TrainState, file: TextIO) -> None:
        super().__init__(hook, state, file)
        self.output, self.facts = tables.Display(), ""
        self.rows: list[Row] = []
        self.drawn = 0.0  # when it was drawn

    def start(self, parts: list[str]) -> None:
        self.facts = ", ".join(parts)

    def add(self, row: Row) -> None:
        if row.is_whole or self.is_stream:
            self.rows.append(row)
        if self.is_stream and len(self.rows) > 2 * ROWS:
            del self.rows[ROWS]  # which is never shown

    def show(self, state: TrainState) -> float:
        """Draw the bar of the epoch."""
        now = time.monotonic()
        if now >= self.next:
            self.next = now + self.refresh
            self.draw(self.pace.position, self.parts_of_epoch(state))
        return self.next

    def show_evaluation(self, loader: str, position: Position) -> None:
        if time.monotonic() >= self.drawn + self.refresh:
            self.draw(position, [loader, position.count_text, position.rate_text("batch")])

    def draw(self, position: Position, parts: list[str]) -> None:
        """Draw everything again."""
        self.drawn = time.monotonic()
        beside = filter(None, [position.epoch_text, *parts, position.left_text])
        text = " · ".join(beside)
        self.show_parts(tables.bar(position.done, position.total, text), text)

    def end(self, *lines: str) -> None:
        """Show the reason of the end instead of the bar."""
        self.show_parts(tables.stack(*map(tables.line, lines)), "\n".join(lines))

    def show_parts(self, last: str, last_text: str) -> None:
        """Show the facts, the table and a last part, which is given as HTML and as text."""
        parts, text = [tables.faint(self.facts)], [self.facts]
        if self.rows:
            names = self.with_column(Row.names(self.rows))
            table = Row.table(self.rows, names, reprs.HTML_WIDTH, ROWS)
            parts.append(table.html())
            text.append(table.text(reprs.terminal_width()))
        shown = tables.stack(*parts, last)
        self.output.show(tables.Rendered(shown, "\n".join([*text, last_text])))


# --------------------------------------------------------------------------------------------------
# In a log: a line per record, and one from time to time in between.

HEARTBEAT = 30.0  # seconds between two lines, if there is no record


class _Log(_View):
    """Lines of plain text, each flushed."""

    def start(self, parts: list[str]) -> None:
        self.write(", ".join(parts))

    def add(self, row: Row) -> None:
        if not row.is_whole:
            return
        metrics = row.record.metrics
        names = [name for name in without_intervals(metrics) if "/watch/" not in name]
        ordered = [column.name for column in Row.lay_out([row], names).columns if column.name]
        values = (
            f"{name} {reprs.format_metric(name, metrics[name])}{'*' if name in row.best else ''}"
            for name in ordered
        )
        at = attrs.evolve(self.pace.at(self.state), epoch=row.number, step=row.record.step)
        passed = tables.format_duration(row.seconds or 0.0)
        self.write(at.epoch_text, at.step_text, row.model, *values, at.skipped_text, passed)

    def show(self, state: TrainState) -> float:
        """Write how far the run is, if it is time to."""
        position, pause = self.pace.position, RECENT if "record" in state.events else HEARTBEAT
        if time.monotonic() >= self.written + pause:
            part = f"{position.done * 100 // position.total}%" if position.total else ""
            values = [position.skipped_text, *describe_values(state), position.rate_text()]
            self.write_at(position, part, position.step_text, *values)
        return self.written + HEARTBEAT

    def show_evaluation(self, loader: str, position: Position) -> None:
        """Write how far an evaluation is, if it is time to."""
        if time.monotonic() >= self.written + HEARTBEAT:
            evaluated = f"{loader} {position.count_text.strip()}"
            self.write_at(position, position.step_text, evaluated, position.rate_text("batch"))

    def end(self, *lines: str) -> None:
        for line in lines:
            self.write(line)

    def write_at(self, position: Position, *parts: str) -> None:
        """Write where a run is, and parts of a line."""
        self.write(position.epoch_text, *parts, position.left_text)

    def write(self, *parts: str) -> None:
        """Write a line, broken where it gets too long: between two parts, or two words of one."""
        self.written = time.monotonic()
        lines = [""]
        for part in filter(None, parts):
            if len(part) > reprs.WIDEST:  # a sentence: broken between two words
                lines[-1:] = [*filter(str.strip, lines), *reprs.wrap(part, reprs.WIDEST, "    ")]
                continue
            if lines[-1].strip() and len(lines[-1]) + 2 + len(part) > reprs.WIDEST:
                lines.append("  ")
            lines[-1] += f"  {part}" if lines[-1] else part
        with contextlib.suppress(OSError, ValueError):  # a full disk or a closed file ends no run
            print(reprs.printable("\n".join(lines), self.file), file=self.file, flush=True)
