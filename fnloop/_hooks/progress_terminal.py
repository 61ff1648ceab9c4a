"""Progress in a terminal: a table that grows above a bar."""

from __future__ import annotations

import textwrap
import time
from typing import ClassVar, TextIO

import attrs
from tqdm.utils import disp_len

from fnloop._core.events import EPOCH, RECORD
from fnloop._core.history_table import Layout, is_row, lay_out
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display.encoding import printable
from fnloop._display.screen import Screen, columns_of, has_colors, paint
from fnloop._display.tables import width_of
from fnloop._hooks.progress_pace import Entry, Position, is_over, is_stream
from fnloop._hooks.progress_text import (
    RECENT,
    format_count_of,
    format_epoch,
    format_left,
    format_rate,
    format_skipped,
    format_value,
    running_values,
)

__all__ = ["TerminalView"]

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
