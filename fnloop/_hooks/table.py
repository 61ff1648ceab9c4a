"""Keep a table of the history in a file that always equals it, also after a resume.

A record is appended as soon as it is made, and handed to the operating system at once. If the file
differs from the history (a new column, records after the checkpoint being resumed, a line truncated
by a crash), it is rewritten: into a temporary file beside it, which is then renamed.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.disk import make_folder, remove_parts, replace_file
from fnloop._checkpoint.retention import read_run_id
from fnloop._core.call import Call
from fnloop._core.events import RECORD
from fnloop._core.history import History, records_since
from fnloop._core.record import Record
from fnloop._core.state import TrainState
from fnloop._display.checks import folder_path, typed_path
from fnloop._hooks.wrapper import Hook

__all__ = ["to_csv", "to_jsonl"]

_COUNTERS = ("epoch", "step", "seconds")
_Path = str | os.PathLike[str]


def to_csv(path: _Path) -> TableWriter:
    """Keep a table of the history in a CSV file: epoch, step, seconds, a column for each metric.

    Each record is written at once, so a kill loses none. The file equals ``state.history``: a run
    that is resumed from an earlier checkpoint cuts off the rows after it, and one that is started
    again after a power failure writes the rows that the disk has lost. A file belongs to one
    run; another run is refused before its first update, and the file is not touched. A closing
    record has 1 in the column ``closing``, which exists only if there is such a record. If a record
    lacks a metric, its cell is empty. NaN and the infinities are ``nan``, ``inf`` and ``-inf``,
    which pandas can read. When there are several processes, the first one writes.

    Args:
        path: the file, one for each run. It is made absolute at once, with ``~`` expanded. Missing
            folders are created.

    Returns:
        A hook.

    Raises:
        ValueError: the path is an address or a folder, or a file that this hook has not written.
            When a run begins: the file has the rows of another run.
        TypeError: path is not a path.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = to_csv(Path(folder, "a.csv"))
        ...     state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        ...     print(Path(folder, "a.csv").read_text())
        epoch,step,seconds,train/loss,train/lr
        1,1,...,0.0,1.0
        2,2,...,-1.0,1.0
    """
    return _make_writer(
        to_csv, path, _format_csv_header, _format_csv_row, rb"epoch,step,seconds(,|\r?\n)"
    )


def to_jsonl(path: _Path) -> TableWriter:
    """Keep a table of the history in a file of JSON lines, one for each record.

    A line has epoch, step, seconds and metrics.
    It works as :func:`to_csv` does, but a line has only the metrics of its own record. NaN is
    ``null``. The infinities are ``1e999`` and ``-1e999``, because JSON cannot represent them;
    Python, pandas and JavaScript parse these as infinity.

    Args:
        path: the file, one for each run. It is made absolute at once, with ``~`` expanded. Missing
            folders are created.

    Returns:
        A hook.

    Raises:
        ValueError: the path is an address or a folder, or a file that this hook has not written.
            When a run begins: the file has the rows of another run.
        TypeError: path is not a path.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = to_jsonl(Path(folder, "a.jsonl"))
        ...     state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        ...     print(Path(folder, "a.jsonl").read_text())
        {"epoch": 1, "step": 1, "seconds": ..., "train/loss": 0.0, "train/lr": 1.0}
        {"epoch": 2, "step": 2, "seconds": ..., "train/loss": -1.0, "train/lr": 1.0}
    """
    beginning = rb'{"epoch": \d+, "step": \d+, "seconds": '
    return _make_writer(to_jsonl, path, lambda names: "", _format_json_row, beginning)


def _make_writer(
    factory: Callable[[_Path], TableWriter],
    path: _Path,
    format_header: Callable[[Sequence[str]], str],
    format_row: Callable[[Record, Sequence[str]], str],
    beginning: bytes,
) -> TableWriter:
    """Check the path and make a hook. ``beginning`` is the pattern of the file's first bytes."""
    name = factory.__name__
    typed = typed_path(name, "path", path, f"runs/a.{name[3:]}")
    file = folder_path(name, "path", path)
    folder = next(parent for parent in file.parents if parent.exists())
    found = _read_beginning(file) if file.is_file() else b""
    if found[:1] == b"\0" and read_run_id(_run_id_file(file)) is not None:
        found = found.lstrip(b"\0")  # a power failure may put zeros in the place of rows
    is_other = found and not re.match(beginning, found)
    if file.is_dir() or not folder.is_dir() or is_other:
        raise ValueError(
            f"{name}({typed!r}): there is something else at that path. Give another path, or "
            "remove what is there"
        )
    return TableWriter(Call(factory, (typed,)), file, format_header, format_row)


def _read_beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1000)


def _run_id_file(path: Path) -> Path:
    """Return the hidden file next to a table that holds the identity of its run."""
    return path.with_name(f".{path.name}.run")


@attrs.define(repr=False, eq=False)
class TableWriter(Hook):
    """A hook that keeps a file equal to the history, a line for each record.

    A hidden file next to the table holds the identity of its run, because the table has no place
    for it that every reader skips.

    Args:
        call: the call that made it.
        path: the file.
        format_header: ``names of the metrics -> first line``, or "" if there is none.
        format_row: ``(record, names) -> line``.
    """

    call: Call
    path: Path
    format_header: Callable[[Sequence[str]], str]
    format_row: Callable[[Record, Sequence[str]], str]
    # The contents of the file: columns, number of records (None: unknown), last record, bytes.
    _names: tuple[str, ...] = attrs.field(default=(), init=False)
    _count: int | None = attrs.field(default=None, init=False)
    _last: Record | None = attrs.field(default=None, init=False)
    _size: int = attrs.field(default=0, init=False)

    def __repr__(self) -> str:
        return repr(self.call)

    begins_everywhere = True  # all processes learn of a file that is refused

    def begin(self, state: TrainState) -> TrainState:
        """Claim the file for this run.

        Raises:
            ValueError: the file has the rows of another run.
        """
        on_main_process(lambda: self._claim(state), repr(self))
        self._count = None
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if self._count is None or RECORD in state.events:
            self._update(state)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Make the file equal to the history."""
        self._update(state)
        return state

    def settle(self, state: TrainState) -> TrainState:
        """Make the file equal to the history of a run that has already ended, if it is its file."""
        if state.backend.rank == 0 and self._belongs_to(state):
            remove_parts(self.path.resolve())
            self._count = None
            self._update(state)
        return state

    def _claim(self, state: TrainState) -> None:
        if self._read_first_row() is not None and not self._belongs_to(state):
            raise ValueError(
                f"{self!r}: {self.path} has the rows of another run. To continue that run, restore "
                "its state first: state = resume(folder, state). To begin a new one, give it "
                "another path, or move the file away"
            )
        remove_parts(self.path.resolve())
        file = _run_id_file(self.path)
        if read_run_id(file) != state.run_id:
            make_folder(file.parent)
            replace_file(file, state.run_id.encode())

    def _belongs_to(self, state: TrainState) -> bool:
        """Return whether the file belongs to this run: by its hidden file, or by its first row."""
        run = read_run_id(_run_id_file(self.path))
        if run is not None:
            return run == state.run_id
        first = self._read_first_row()
        if first is None or not len(state.history):
            return False
        expected = self.format_row(state.history[0], ())
        return _first_cells(first) == _first_cells(expected)

    def _read_first_row(self) -> str | None:
        """Return the first row of the file, or None if it has none."""
        if not self.path.exists():
            return None
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = list(itertools.islice(file, 2))
        rows = lines[bool(self.format_header(())) :]
        return rows[0] if rows and rows[0].strip() else None

    def _update(self, state: TrainState) -> None:
        """Make the file equal to the history, in the first process."""
        if state.backend.rank != 0:
            return
        history = state.history
        new = records_since(history, self._count or 0)
        if not self._can_append(history, new):
            self._rewrite(history)
        elif new:
            self._append(new)
        self._count, self._last = len(history), history[-1] if len(history) else None

    def _can_append(self, history: History, new: list[Record]) -> bool:
        """Return whether the file lacks only rows at its end, and has a column for all they need.

        The file also has to be as this hook left it.
        """
        count = self._count
        if count is None or not self.path.exists() or self.path.stat().st_size != self._size:
            return False
        if count > len(history) or (count and history[count - 1] is not self._last):
            return False
        names = _merge_names(self._names, *map(_cells_of, new))
        return self.format_header(names) == self.format_header(self._names)

    def _append(self, records: list[Record]) -> None:
        text = "".join(self.format_row(record, self._names) for record in records).encode()
        with self.path.open("ab") as file:
            file.write(text)
        self._size += len(text)

    def _rewrite(self, history: History) -> None:
        closing = ["closing"] if any(record.closing for record in history) else []
        self._names = _merge_names(history.keys(), closing)
        lines = (self.format_row(record, self._names) for record in history)
        text = (self.format_header(self._names) + "".join(lines)).encode()
        self._size = len(text)
        path = self.path.resolve()  # so that a link stays a link
        if path.exists() and path.read_bytes() == text:
            return
        make_folder(path.parent)
        replace_file(path, text)


def _first_cells(row: str) -> list[str]:
    """Return epoch, step and seconds as they are written."""
    return [cell.strip("{} \n") for cell in row.split(",")[: len(_COUNTERS)]]


def _merge_names(*names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))


def _cells_of(record: Record) -> dict[str, float]:
    """Return the cells of a row after the counters: the metrics, and 1 for a closing record."""
    return {**record.metrics, "closing": 1} if record.closing else dict(record.metrics)


def _format_csv_header(names: Sequence[str]) -> str:
    return _format_csv_line([*_COUNTERS, *names])


def _format_csv_row(record: Record, names: Sequence[str]) -> str:
    cells = _cells_of(record)
    counters = (record.epoch, record.step, record.seconds)
    return _format_csv_line([*counters, *(cells.get(name, "") for name in names)])


def _format_csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _format_json_row(record: Record, names: Sequence[str]) -> str:
    counters = {"epoch": record.epoch, "step": record.step, "seconds": record.seconds}
    cells = {**counters, **_cells_of(record)}
    items = (f"{json.dumps(name)}: {_format_json_number(value)}" for name, value in cells.items())
    return f"{{{', '.join(items)}}}\n"


def _format_json_number(value: float) -> str:
    if math.isnan(value):
        return "null"
    return json.dumps(value) if math.isfinite(value) else ("1e999" if value > 0 else "-1e999")
