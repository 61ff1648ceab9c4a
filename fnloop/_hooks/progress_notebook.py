"""Progress in a notebook: one output of a cell, a table above a bar."""

from __future__ import annotations

import time

import attrs

from fnloop._core.history_table import is_row, table
from fnloop._core.record import Record, metric_names
from fnloop._core.state import TrainState
from fnloop._display import html
from fnloop._display.tables import HTML_WIDTH, terminal_width
from fnloop._hooks.progress_pace import Entry, Position, is_stream
from fnloop._hooks.progress_text import (
    format_count_of,
    format_epoch,
    format_left,
    format_rate,
    format_skipped,
    format_value,
    running_values,
)

__all__ = ["NotebookView"]

ROWS = 20  # of the table; the middle of a longer run is left out


class NotebookView:
    """A table of this run's records, above the bar of what is running, redrawn in place.

    Args:
        refresh: the least time between two drawings, in seconds.
    """

    def __init__(self, refresh: float) -> None:
        self.refresh, self.output = refresh, html.Display()
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
        parts, text = [html.faint(self.facts)], [self.facts]
        if self.rows:
            hidden = () if self.is_stream else ("recent/",)
            names = [name for name in metric_names(self.rows) if not name.startswith(hidden)]
            shown = table(
                self.rows, names, width=HTML_WIDTH, most=ROWS, before=self.before, best=self.best
            )
            parts.append(shown.html())
            text.append(shown.text(terminal_width()))
        if self.bar is not None:
            parts.append(html.bar(*self.bar))
            text.append(self.bar[2])
        if note:
            parts.append(html.line(note))
            text.append(note)
        self.output.show(html.Rendered(html.stack(*parts), "\n".join(text)))
