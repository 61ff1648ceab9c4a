"""What a person sees while a run goes on: lines, bars in a terminal, or one output of a cell."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

from torch import Tensor
from tqdm import tqdm

from fnloop._core.history import History, records_since
from fnloop._core.history_table import table
from fnloop._core.metrics import Last, read
from fnloop._core.record import Record
from fnloop._core.state import EPOCH, RECORD, TrainState
from fnloop._display import checks, html

__all__ = ["progress"]

ROWS = 20  # of the table in a notebook; the middle of a longer run is left out


class progress:
    """Show how a run goes, in a terminal or a notebook.

    In a terminal it is a bar per epoch; in a notebook a bar and a table of epochs that grows, in one output that is drawn
    again in its place; elsewhere a line per record. A bar has the loss, the learning rate, updates per second and the time
    that is left. It reads from the device when it refreshes, and not in between. With several processes the main one shows it;
    between two records the loss is that of its share.

    Args:
        refresh: seconds between two looks, at least 0.5.
        file: where to; a notebook, or else stderr, by default.

    Returns:
        A hook.

    Raises:
        TypeError: file is not an open file.
        ValueError: refresh is below 0.5.

    Example:
        >>> import fnloop as fl, sys, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(progress(file=sys.stdout),))
        epoch 1  step 3  train/loss -1
    """

    def __init__(self, refresh: float = 0.5, file: TextIO | None = None) -> None:
        checks.number(
            "progress",
            "refresh",
            refresh,
            "the seconds between two looks, to leave the device alone",
            least=0.5,
        )
        if file is not None and not (hasattr(file, "write") and hasattr(file, "isatty")):
            raise TypeError(
                f"progress expects file as an open text file, such as sys.stdout, or None; got {checks.described(file)}"
            )
        self.refresh, self.file = refresh, file
        self._view: _View | None = None  # made at the first boundary of a run
        self._done = 0  # updates of the running epoch, skipped ones too

    def __repr__(self) -> str:
        return "progress()" if self.refresh == 0.5 else f"progress(refresh={self.refresh})"

    def __call__(self, state: TrainState) -> TrainState:
        if not state.backend.main:
            return state
        if self._view is None:
            self._view = _view(self.file, self.refresh)
        self._done = _position(state, self._done)
        self._view.boundary(state, self._done)
        if EPOCH in state.events:
            self._done = 0
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Show where the run ended."""
        if self._view is not None:
            self._view.flush(state, self._done)
        return state

    def close(self) -> None:
        """Finish the bar, when the run is left."""
        if self._view is not None:
            self._view.close()
        self._view, self._done = None, 0


class _View(Protocol):
    """A way to show a run. ``done`` is the number of updates of the running epoch; a skipped one counts."""

    def boundary(self, state: TrainState, done: int) -> None: ...
    def flush(self, state: TrainState, done: int) -> None: ...
    def close(self) -> None: ...


def _view(file: TextIO | None, refresh: float) -> _View:
    if file is None and html.in_notebook():
        return _Cell(refresh)
    out: Any = file or sys.stderr
    return _Bars(out, refresh) if out.isatty() else _Lines(out)


class _Lines:
    """A line per record."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.printed: Record | None = None  # the last one

    def boundary(self, state: TrainState, done: int) -> None:
        if RECORD in state.events:
            self.printed = state.history[-1]
            print(_line(state), file=self.file, flush=True)

    def flush(self, state: TrainState, done: int) -> None:
        if (
            RECORD in state.events
            and state.history[-1].closing
            and state.history[-1] is not self.printed
        ):
            self.boundary(state, done)

    def close(self) -> None: ...


class _Bars:
    """A bar per epoch, in a terminal."""

    def __init__(self, file: TextIO, refresh: float) -> None:
        self.file, self.refresh = file, refresh
        self.bar: Any = None
        self.next = 0.0  # when to look again

    def boundary(self, state: TrainState, done: int) -> None:
        if time.monotonic() >= self.next or EPOCH in state.events or RECORD in state.events:
            self.draw(state, done)
        if EPOCH in state.events:
            self.close()

    def draw(self, state: TrainState, done: int) -> None:
        if RECORD not in state.events:
            self.next = time.monotonic() + self.refresh
        if self.bar is None:
            total = state.run.steps_per_epoch if state.run else None
            settings = {"unit": "step", "file": self.file, "mininterval": 0, "dynamic_ncols": True}
            self.bar = tqdm(total=total, desc=_epoch(state), **settings)
        self.bar.set_postfix_str(_facts(state), refresh=False)
        self.bar.n = done
        self.bar.refresh()

    def flush(self, state: TrainState, done: int) -> None:
        if self.bar is not None and EPOCH not in state.events:
            self.draw(state, done)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None


class _Cell:
    """One output of a notebook's cell: a table of this run's records, and below it the bar of the running epoch."""

    def __init__(self, refresh: float) -> None:
        self.refresh = refresh
        self.output = html.Display()
        self.history = History()
        self.first: int | None = None  # how many records there were before this run
        self.names: dict[
            str, None
        ] = {}  # of the metrics since then, and in how many records they were found
        self.known = 0
        self.epoch, self.done, self.total = "", 0, None  # of the bar
        self.facts = ""
        self.began, self.initial, self.seen = (
            0.0,
            0,
            0.0,
        )  # when the epoch began, how far it was then, the last boundary
        self.next = 0.0  # when to draw again
        self.over = False

    def boundary(self, state: TrainState, done: int) -> None:
        now, epoch = time.monotonic(), _epoch(state)
        if self.first is None:
            self.first, self.began, self.initial = (
                len(state.history) - (RECORD in state.events),
                now,
                done,
            )
        elif epoch != self.epoch:
            self.began, self.initial = self.seen, 0
        self.seen, self.over = now, False
        self.read(state.history)
        self.epoch, self.done, self.total = epoch, done, state.run and state.run.steps_per_epoch
        if now >= self.next:
            self.facts, self.next = _facts(state), now + self.refresh
            self.draw()

    def flush(self, state: TrainState, done: int) -> None:
        """Draw the end of the run, and why it came, if that is before the target."""
        self.read(state.history)
        self.over = True
        if EPOCH not in state.events:
            self.facts = _facts(state)
        self.draw(
            bar=EPOCH not in state.events, note=f"stopped: {state.stop}" if state.stop else ""
        )

    def close(self) -> None:
        if not self.over:
            self.draw(note="the run ended here")

    def read(self, history: History) -> None:
        """Take note of the records that are new."""
        if len(history) < self.known:  # a hook has gone back to a snapshot
            self.names, self.known = {}, self.first or 0
        if len(history) > self.known:
            new = records_since(history, max(self.known, self.first or 0))
            self.names.update(dict.fromkeys(name for record in new for name in record.metrics))
            self.known = len(history)
        self.history = history

    def draw(self, bar: bool = True, note: str = "") -> None:
        parts, text = [], []
        if len(self.history) > (self.first or 0):
            rows = table(self.history, [*self.names], self.first or 0, ROWS)
            parts.append(html.table(rows))
            text.append(html.table_text(rows, fixed=2))
        if bar:
            settings: Any = {
                "total": self.total,
                "initial": self.initial,
                "unit": "step",
                "ncols": 0,
            }
            meter = tqdm.format_meter(
                self.done,
                elapsed=self.seen - self.began,
                prefix=self.epoch,
                postfix=self.facts,
                **settings,
            )
            parts.append(html.bar(self.done, self.total, meter))
            text.append(meter)
        if note:
            parts.append(html.line(note))
            text.append(note)
        self.output.show(html.Shown(html.stacked(*parts), "\n".join(text)))


def _position(state: TrainState, before: int) -> int:
    """Return the updates of the running epoch, skipped ones too; ``before`` is what it was at the last boundary."""
    if EPOCH in state.events:
        return (state.run and state.run.steps_per_epoch) or before + 1
    return -(-state.batch // (state.run.window if state.run else 1))


def _epoch(state: TrainState) -> str:
    of = f"/{state.run.epochs}" if state.run and state.run.epochs else ""
    return f"epoch {state.epoch + (EPOCH not in state.events)}{of}"


def _facts(state: TrainState) -> str:
    """Return what is known now: the record if there is one, else the running loss, which is read from the device."""
    facts: dict[str, float] = {}
    lr = Last(state.optimizer.param_groups[0]["lr"])
    if RECORD in state.events:
        facts.update(state.history[-1].metrics)
        if not isinstance(lr.value, Tensor):  # which would be a read more
            facts.setdefault("lr", lr.compute())
    else:
        running = {"loss": state.metrics["loss"]} if "loss" in state.metrics else {}
        facts.update(read({**running, "lr": lr}))
    return ", ".join(f"{name} {value:.4g}" for name, value in facts.items())


def _line(state: TrainState) -> str:
    record = state.history[-1]
    metrics = "  ".join(f"{name} {value:.5g}" for name, value in record.metrics.items())
    epoch = record.epoch + (EPOCH not in state.events)  # the one that is running, or has just ended
    return f"epoch {epoch}  step {record.step}  {metrics}"
