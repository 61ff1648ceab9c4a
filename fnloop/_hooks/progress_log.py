"""Progress in a log: a line per record, and one from time to time in between."""

from __future__ import annotations

import contextlib
import time
from typing import TextIO

from fnloop._core.events import RECORD
from fnloop._core.history_table import is_row, lay_out
from fnloop._core.state import TrainState
from fnloop._display.encoding import printable
from fnloop._hooks.progress_pace import Entry, Position
from fnloop._hooks.progress_text import (
    RECENT,
    format_count_of,
    format_duration,
    format_epoch,
    format_left,
    format_rate,
    format_skipped,
    format_value,
    running_values,
)

__all__ = ["LogView"]

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
