"""Show the progress of a run: in a log, a terminal or a notebook."""

from __future__ import annotations

import io
import math
import os
import sys
import time
from typing import Protocol, TextIO

import attrs

from fnloop._core.call import Call
from fnloop._core.events import EPOCH, RECORD
from fnloop._core.phase import SINCE
from fnloop._core.state import TrainState
from fnloop._display import checks, html
from fnloop._hooks.progress_log import LogView
from fnloop._hooks.progress_notebook import NotebookView
from fnloop._hooks.progress_pace import Entry, Pace, Position, is_over
from fnloop._hooks.progress_terminal import TerminalView
from fnloop._hooks.progress_text import Best, describe_end, describe_failure, describe_start
from fnloop._hooks.wrapper import Hook

__all__ = ["progress"]

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
    if file is None and html.in_notebook():
        return NotebookView(refresh)
    out: TextIO = file or sys.stderr
    if out is None or getattr(out, "closed", False):  # as in a daemon
        out = io.StringIO()
    has_bar = out.isatty() and os.environ.get("TERM") != "dumb"  # it cannot redraw a line
    return TerminalView(out, refresh) if has_bar else LogView(out)
