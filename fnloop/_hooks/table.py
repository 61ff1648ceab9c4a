"""Tables of what is recorded: a file that equals the history, at every moment and after every resume.

A record is appended as it is made and handed to the operating system at once. Where the file isn't what the history says (a
new column, records behind the checkpoint that a run goes on from, a line that a crash tore), it is written anew beside its
place and renamed.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.retention import is_run_id
from fnloop._core.call import Call
from fnloop._core.history import History
from fnloop._core.record import Record
from fnloop._core.state import RECORD, TrainState
from fnloop._display.checks import folder_path, typed_path

__all__ = ["to_csv", "to_jsonl"]

_FIRST = ("epoch", "step", "seconds")
_Path = str | os.PathLike[str]
_Head = Callable[[Sequence[str]], str]
_Row = Callable[[Record, Sequence[str]], str]


def to_csv(path: _Path) -> TableWriter:
    """Keep a table of the history in a CSV file: epoch, step, seconds, and a column for each metric.

    A row is there as soon as its record is, and a kill loses none. The file equals ``state.history``: a run that continues from
    an earlier checkpoint cuts off the rows after it. A file belongs to one run: another one is refused before its first update,
    and the file is not touched. A closing record has 1 in the column ``closing``, which is there if there is one. A metric that
    a record does not have is an empty cell, and not a number is ``nan``, ``inf`` or ``-inf``: pandas reads each as what it is.
    With several processes, the first writes.

    Args:
        path: the file; made with its folders if it is not there, absolute at once, with ``~`` expanded. One for each run.

    Returns:
        A hook.

    Raises:
        ValueError: there is a file at the path that this hook has not written, or a folder; or it is an address. When a run
            begins: the file has the rows of another run.
        TypeError: it is not a path.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.csv")
        ...     state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=2, hooks=(to_csv(path),))
        ...     print(path.read_text())
        epoch,step,seconds,train/loss
        1,1,...,0.0
        2,2,...,-1.0
    """
    return _sink(to_csv, path, _csv_line, _csv_row, rb"epoch,step,seconds(,|\r?\n)")


def to_jsonl(path: _Path) -> TableWriter:
    """Keep a table of the history in a file of JSON lines: epoch, step, seconds and the metrics of a record in each.

    As :func:`to_csv`, but a line has the metrics of its record only. NaN is ``null`` and the infinities are ``1e999`` and
    ``-1e999``, since JSON has no word for them: every reader takes them, and those of Python, pandas and JavaScript read
    infinity.

    Args:
        path: the file; made with its folders if it is not there, absolute at once, with ``~`` expanded. One for each run.

    Returns:
        A hook.

    Raises:
        ValueError: there is a file at the path that this hook has not written, or a folder; or it is an address. When a run
            begins: the file has the rows of another run.
        TypeError: it is not a path.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.jsonl")
        ...     state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=2, hooks=(to_jsonl(path),))
        ...     print(path.read_text())
        {"epoch": 1, "step": 1, "seconds": ..., "train/loss": 0.0}
        {"epoch": 2, "step": 2, "seconds": ..., "train/loss": -1.0}
    """
    return _sink(
        to_jsonl, path, lambda names: "", _json_row, rb'{"epoch": \d+, "step": \d+, "seconds": '
    )


def _sink(
    make: Callable[..., Any], path: _Path, head: _Head, row: _Row, ours: bytes
) -> TableWriter:
    """Make a sink, if the path can be one's: ``ours`` is a pattern of how its file begins."""
    name = make.__name__
    typed = typed_path(name, "path", path, f"runs/a.{name[3:]}")
    home = folder_path(name, "path", path)
    folder = next(parent for parent in home.parents if parent.exists())
    begun = _beginning(home) if home.is_file() else b""
    if home.is_dir() or not folder.is_dir() or (begun and not re.match(ours, begun)):
        raise ValueError(
            f"{name}({typed!r}): there is something else at that path. Give another path, or remove it"
        )
    return TableWriter(Call(make, (typed,)), home, head, row)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1000)


@attrs.define(repr=False, eq=False)
class TableWriter:
    """A hook that keeps a file equal to the history, a line for each record.

    Args:
        call: what it was typed as.
        path: the file.
        head: ``names of the metrics -> first line``, or "" if there is none.
        row: ``(record, names) -> line``.

    A hidden file beside the table has the identity of its run, since a table has no place for it that every reader skips.
    """

    call: Call
    path: Path
    head: _Head
    row: _Row
    _names: tuple[str, ...] = attrs.field(
        default=(), init=False
    )  # what is in the file: columns, records, bytes
    _count: int | None = attrs.field(default=None, init=False)  # None: it has not looked yet
    _last: Record | None = attrs.field(default=None, init=False)
    _size: int = attrs.field(default=0, init=False)

    def __repr__(self) -> str:
        return repr(self.call)

    def begin(self, state: TrainState) -> TrainState:
        """Make the file this run's.

        Raises:
            ValueError: it has the rows of another run.
        """
        on_main_process(lambda: self._claim(state), repr(self))
        self._count = None
        return state

    def __call__(self, state: TrainState) -> TrainState:
        return self._written(state) if self._count is None or RECORD in state.events else state

    def flush(self, state: TrainState) -> TrainState:
        """Make the file equal to the history."""
        return self._written(state)

    def settle(self, state: TrainState) -> None:
        """Make the file equal to the history of a run that is at its end already, if the file is this run's."""
        if (
            state.backend.rank == 0
            and (first := self._first_row()) is not None
            and self._is_of(state, first)
        ):
            self._count = None
            self._written(state)

    @property
    def _note(self) -> Path:
        return self.path.with_name(f".{self.path.name}.run")

    def _claim(self, state: TrainState) -> None:
        first = self._first_row()
        if first is not None and not self._is_of(state, first):
            raise ValueError(
                f"{self!r}: {self.path} has the rows of another run. To continue that run, restore its state first: "
                "state = resume(folder, state). To begin a new one, give it another path, or move the file away"
            )
        self._note.parent.mkdir(parents=True, exist_ok=True)
        self._note.write_text(state.run_id, encoding="utf-8")

    def _is_of(self, state: TrainState, first: str) -> bool:
        """Return whether the file is of this run: by the note beside it, or by the time in its first row."""
        with contextlib.suppress(FileNotFoundError):
            note = self._note.read_text(encoding="utf-8", errors="replace")
            if is_run_id(note):
                return note == state.run_id
        if not len(state.history):
            return False
        start = self.row(state.history[0], ()).split(",")[
            :3
        ]  # epoch, step, and the seconds to the last digit
        return [cell.strip("{} \n") for cell in first.split(",")[:3]] == [
            cell.strip("{} \n") for cell in start
        ]

    def _first_row(self) -> str | None:
        """Return the first row of the file, or None if it has none."""
        if not self.path.exists():
            return None
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = list(itertools.islice(file, 2))
        rows = lines[bool(self.head(())) :]
        return rows[0] if rows and rows[0].strip() else None

    def _written(self, state: TrainState) -> TrainState:
        if state.backend.rank == 0:
            history = state.history
            if not self._continues_with(history):
                self._write(history)
            elif len(history) > (self._count or 0):
                self._append(history[-1])
            self._count, self._last = len(history), history[-1] if len(history) else None
        return state

    def _continues_with(self, history: History) -> bool:
        """Return whether the history is what is in the file, or one record more, and the file is as this hook has left it."""
        count = self._count
        if count is None or not self.path.exists() or self.path.stat().st_size != self._size:
            return False
        if len(history) - count not in (0, 1) or (count and history[count - 1] is not self._last):
            return False
        return not len(history) or self.head(_union(self._names, _cells(history[-1]))) == self.head(
            self._names
        )

    def _append(self, record: Record) -> None:
        line = self.row(record, self._names).encode()
        with self.path.open("ab") as file:
            file.write(line)
        self._size += len(line)

    def _write(self, history: History) -> None:
        self._names = _union(
            history.keys(), ["closing"] * any(record.closing for record in history)
        )
        text = (
            self.head(self._names) + "".join(self.row(record, self._names) for record in history)
        ).encode()
        self._size = len(text)
        path = self.path.resolve()  # a link stays one
        if path.exists() and path.read_bytes() == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        with beside.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)


def _union(names: Sequence[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*names, *more)))


def _cells(record: Record) -> dict[str, float]:
    """Return what is in a row besides the counters: the metrics, and whether it is a closing record."""
    return {**record.metrics, "closing": 1} if record.closing else dict(record.metrics)


def _csv_line(names: Sequence[str]) -> str:
    return _line([*_FIRST, *names])


def _csv_row(record: Record, names: Sequence[str]) -> str:
    cells = _cells(record)
    return _line(
        [record.epoch, record.step, record.seconds, *(cells.get(name, "") for name in names)]
    )


def _line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _json_row(record: Record, names: Sequence[str]) -> str:
    cells = {
        "epoch": record.epoch,
        "step": record.step,
        "seconds": record.seconds,
        **_cells(record),
    }
    return f"{{{', '.join(f'{json.dumps(name)}: {_number(value)}' for name, value in cells.items())}}}\n"


def _number(value: float) -> str:
    if math.isnan(value):
        return "null"
    return json.dumps(value) if math.isfinite(value) else ("1e999" if value > 0 else "-1e999")
