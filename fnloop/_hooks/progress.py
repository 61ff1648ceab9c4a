"""Show the progress of a run: in a log, a terminal or a notebook."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

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
    """Show the progress of a run, in a terminal or a notebook.

    In a terminal it is a bar per epoch. In a notebook it is a bar below a table of records, redrawn
    in place. In a log, it is a line per record. A bar has the loss, the learning rate, updates per
    second and the remaining time. It reads from the device when it is redrawn, and at no other
    time. When there are several processes, the main one shows it; the loss between two records is
    then that of its own share of the batches.

    Args:
        refresh: the least time between two drawings, in seconds, at least 0.5.
        file: an open text file to write to; by default the notebook, or else stderr.

    Returns:
        A hook.

    Raises:
        TypeError: file is not an open file.
        ValueError: refresh is below 0.5.

    Example:
        >>> import fnloop as fl, sys, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> hook = progress(file=sys.stdout)
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(hook,))
        epoch 1  step 3  train/loss -1
    """

    def __init__(self, refresh: float = 0.5, file: TextIO | None = None) -> None:
        meaning = "the seconds between two drawings, each of which reads from the device"
        checks.number("progress", "refresh", refresh, meaning, least=0.5)
        if file is not None and not (hasattr(file, "write") and hasattr(file, "isatty")):
            raise TypeError(
                "progress expects file as an open text file, such as sys.stdout, or None; "
                f"got {checks.describe(file)}"
            )
        self.refresh, self.file = refresh, file
        self._view: _View | None = None  # made at the first boundary of a run
        self._done = 0  # updates of the current epoch, including skipped ones

    def __repr__(self) -> str:
        return "progress()" if self.refresh == 0.5 else f"progress(refresh={self.refresh})"

    def __call__(self, state: TrainState) -> TrainState:
        if not state.backend.main:
            return state
        if self._view is None:
            self._view = _make_view(self.file, self.refresh)
        self._done = _count_updates(state, self._done)
        self._view.update(state, self._done)
        if EPOCH in state.events:
            self._done = 0
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Show where the run ended."""
        if self._view is not None:
            self._view.finish(state, self._done)
        return state

    def close(self) -> None:
        """Close the view."""
        if self._view is not None:
            self._view.close()
        self._view, self._done = None, 0


class _View(Protocol):
    """A way to show a run. ``done`` counts the updates of the current epoch, also skipped ones."""

    def update(self, state: TrainState, done: int) -> None:
        """Show a boundary."""
        ...

    def finish(self, state: TrainState, done: int) -> None:
        """Show the end of the run."""
        ...

    def close(self) -> None:
        """Leave the output as it is; the run may have failed."""
        ...


def _make_view(file: TextIO | None, refresh: float) -> _View:
    if file is None and html.in_notebook():
        return _NotebookView(refresh)
    out: TextIO = file or sys.stderr
    return _TerminalView(out, refresh) if out.isatty() else _LogView(out)


class _LogView:
    """A line per record."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.printed: Record | None = None  # the last one

    def update(self, state: TrainState, done: int) -> None:
        if RECORD in state.events:
            self.printed = state.history[-1]
            print(_format_record(state), file=self.file, flush=True)

    def finish(self, state: TrainState, done: int) -> None:
        if RECORD not in state.events:
            return
        last = state.history[-1]
        if last.closing and last is not self.printed:
            self.update(state, done)

    def close(self) -> None: ...


class _TerminalView:
    """A bar per epoch."""

    def __init__(self, file: TextIO, refresh: float) -> None:
        self.file, self.refresh = file, refresh
        self.bar: tqdm | None = None
        self.next = 0.0  # when to draw again

    def update(self, state: TrainState, done: int) -> None:
        if time.monotonic() >= self.next or EPOCH in state.events or RECORD in state.events:
            self.draw(state, done)
        if EPOCH in state.events:
            self.close()

    def finish(self, state: TrainState, done: int) -> None:
        if self.bar is not None and EPOCH not in state.events:
            self.draw(state, done)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.bar = None

    def draw(self, state: TrainState, done: int) -> None:
        if RECORD not in state.events:
            self.next = time.monotonic() + self.refresh
        if self.bar is None:
            self.bar = tqdm(
                total=state.run.steps_per_epoch if state.run else None,
                desc=_format_epoch(state),
                unit="step",
                file=self.file,
                mininterval=0,
                dynamic_ncols=True,
            )
        self.bar.set_postfix_str(_format_metrics(state), refresh=False)
        self.bar.n = done
        self.bar.refresh()


class _NotebookView:
    """One output of a cell: a table of this run's records above the bar of the current epoch."""

    def __init__(self, refresh: float) -> None:
        self.refresh = refresh
        self.output = html.Display()
        self.history = History()
        self.first: int | None = None  # the number of records before this run
        self.names: dict[str, None] = {}  # of the metrics of this run, in order
        self.known = 0  # the number of records whose names are in ``names``
        self.epoch, self.done, self.total, self.metrics = "", 0, None, ""  # of the bar
        self.began, self.initial = 0.0, 0  # when the current epoch began, and at which update
        self.seen = 0.0  # when the last boundary was
        self.next = 0.0  # when to draw again
        self.finished = False

    def update(self, state: TrainState, done: int) -> None:
        now, epoch = time.monotonic(), _format_epoch(state)
        if self.first is None:
            self.first = len(state.history) - (RECORD in state.events)
            self.began, self.initial = now, done
        elif epoch != self.epoch:
            self.began, self.initial = self.seen, 0
        self.seen, self.finished = now, False
        self.read_names(state.history)
        self.epoch, self.done, self.total = epoch, done, state.run and state.run.steps_per_epoch
        if now >= self.next:
            self.metrics, self.next = _format_metrics(state), now + self.refresh
            self.draw()

    def finish(self, state: TrainState, done: int) -> None:
        self.read_names(state.history)
        self.finished = True
        if EPOCH not in state.events:
            self.metrics = _format_metrics(state)
        note = f"stopped: {state.stop}" if state.stop else ""
        self.draw(bar=EPOCH not in state.events, note=note)

    def close(self) -> None:
        if not self.finished:
            self.draw(note="the run ended here")

    def read_names(self, history: History) -> None:
        """Take the names of the metrics from new records."""
        if len(history) < self.known:  # a hook returned a snapshot
            self.names, self.known = {}, self.first or 0
        for record in records_since(history, max(self.known, self.first or 0)):
            self.names.update(dict.fromkeys(record.metrics))
        self.history, self.known = history, len(history)

    def draw(self, bar: bool = True, note: str = "") -> None:
        parts, text = [], []
        if len(self.history) > (self.first or 0):
            rows = table(self.history, [*self.names], self.first or 0, ROWS)
            parts.append(html.table(rows))
            text.append(html.table_text(rows, fixed=2))
        if bar:
            meter = self.format_meter()
            parts.append(html.bar(self.done, self.total, meter))
            text.append(meter)
        if note:
            parts.append(html.line(note))
            text.append(note)
        self.output.show(html.Rendered(html.stack(*parts), "\n".join(text)))

    def format_meter(self) -> str:
        return tqdm.format_meter(
            self.done,
            self.total,  # type: ignore[arg-type]  # None if the loader has no length
            elapsed=self.seen - self.began,
            initial=self.initial,
            prefix=self.epoch,
            postfix=self.metrics,
            unit="step",
            ncols=0,
        )


def _count_updates(state: TrainState, before: int) -> int:
    """Return the number of updates of the current epoch, including skipped ones.

    ``before`` is their number at the last boundary.
    """
    if EPOCH in state.events:
        return (state.run and state.run.steps_per_epoch) or before + 1
    return -(-state.batch // (state.run.window if state.run else 1))


def _format_epoch(state: TrainState) -> str:
    of = f"/{state.run.epochs}" if state.run and state.run.epochs else ""
    return f"epoch {_current_epoch(state)}{of}"


def _format_metrics(state: TrainState) -> str:
    """Show the record of this boundary, or else the running loss, which is read from the device."""
    values: dict[str, float] = {}
    lr = Last(state.optimizer.param_groups[0]["lr"])
    if RECORD in state.events:
        values.update(state.history[-1].metrics)
        if not isinstance(lr.value, Tensor):  # that would need another device read
            values.setdefault("lr", lr.compute())
    else:
        running = {"loss": state.metrics["loss"]} if "loss" in state.metrics else {}
        values.update(read({**running, "lr": lr}))
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _format_record(state: TrainState) -> str:
    record = state.history[-1]
    metrics = "  ".join(f"{name} {value:.5g}" for name, value in record.metrics.items())
    return f"epoch {_current_epoch(state)}  step {record.step}  {metrics}"


def _current_epoch(state: TrainState) -> int:
    """Return the number, from 1, of the epoch that is running or has just ended."""
    return state.epoch + (EPOCH not in state.events)
