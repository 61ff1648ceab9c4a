"""Hooks that send records somewhere: to a file, to trackers, from the main process only."""

from __future__ import annotations

import copy
import csv
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import os
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypedDict

import attrs

from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.retention import read_run_id
from fnloop._extensions.hooks.accelerated import trackers
from fnloop._extensions.hooks.keep import checkpoint, differ_only, restore_best
from fnloop._hooks.hook import Hook
from fnloop.extend import (
    BuiltIn,
    Call,
    Stop,
    Wrapper,
    checks,
    collectives,
    name_of,
    on_main_process,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Keep a table of the history in a file that always equals it, also after a resume.
#
# A record is appended as soon as it is made, and handed to the operating system at once. If the
# file differs from the history (a new column, records after the checkpoint being resumed, a line
# truncated by a crash), it is rewritten: into a temporary file beside it, which is then renamed.

_COUNTERS = ("epoch", "step", "seconds")
_Path = str | os.PathLike[str]


def to_csv(path: _Path) -> TableWriter:
    """Keep a table of the history in a CSV file: epoch, step, seconds, items, and the metrics.

    Each record is written at once, so a kill loses none. The file equals ``state.history``: a run
    that is resumed from an earlier checkpoint cuts off the rows after it, and one that is started
    again after a power failure writes the rows that the disk has lost. A file belongs to one
    run, whose identity is in a hidden file beside it (``.a.csv.run`` for ``a.csv``). Another run is
    refused before its first update, and the file is not touched. Of two that begin before there is
    a row, the first is refused at its next record. A closing record has 1 in the
    column ``closing``, which exists only if there is such a record. If a record lacks a metric, its
    cell is empty. NaN and the infinities are ``nan``, ``inf`` and ``-inf``, which pandas can read.
    When there are several processes, the first one writes.

    Args:
        path: the file, one for each run. It is made absolute at once, with ``~`` expanded. Missing
            folders are created.

    Returns:
        A hook.

    Raises:
        ValueError: the path is an address or a folder, or a file that this hook has not written.
            When a run begins: the file has the rows of another run. Later: another run has begun to
            write it.
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
        epoch,step,seconds,items,train/loss,train/lr
        1,1,...,1,0.0,1.0
        2,2,...,2,-1.0,1.0

    Replaces: lightning.CSVLogger, keras.CSVLogger
    """
    return CsvWriter(Call(to_csv), path)


def to_jsonl(path: _Path, events: bool = False) -> TableWriter:
    """Keep the history in a file of JSON lines, one for each record.

    A line has epoch, step, seconds, items and metrics.
    It works as :func:`to_csv` does, but a line has only the metrics of its own record. NaN is
    ``null``. The infinities are ``1e999`` and ``-1e999``, because JSON cannot represent them;
    Python, pandas and JavaScript parse these as infinity.

    Args:
        path: the file, one for each run. It is made absolute at once, with ``~`` expanded. Missing
            folders are created.
        events: whether it also has a line for each event, at its place between the records, for
            people and programs that watch a run: "begin", "resume", "save", "skip", "spike",
            "stop", "end" and "error".

    Returns:
        A hook.

    Raises:
        ValueError: the path is an address or a folder, or a file that this hook has not written.
            When a run begins: the file has the rows of another run.
        TypeError: path is not a path, or events is not a bool.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = to_jsonl(Path(folder, "a.jsonl"))
        ...     state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        ...     print(Path(folder, "a.jsonl").read_text())
        {"epoch": 1, "step": 1, "seconds": ..., "items": 1, "train/loss": 0.0, "train/lr": 1.0}
        {"epoch": 2, "step": 2, "seconds": ..., "items": 2, "train/loss": -1.0, "train/lr": 1.0}

    Notes:
        The line of an event is ``{"event": "skip", "step": 812, "skipped": 1, "epoch": 2, "time":
        1790000000.0, "reason": ...}``: where the run is after it, and seconds since 1970. "save" is
        told before a hook saves, so that a kill afterwards loses no line. It has "unsaved", the
        seconds of training that a lost machine would cost at this moment, and "saves_took", the
        seconds that all saves before it have taken since the run began or was resumed. A run that
        is resumed from an earlier checkpoint cuts off the events after it, too. A power failure may
        lose some.
    """
    if checks.flag("to_jsonl", "events", events, "whether it also has a line for each event"):
        return EventWriter(Call(to_jsonl, (), {"events": True}), path)
    return JsonWriter(Call(to_jsonl), path)


class TableWriter(BuiltIn):
    """A hook that keeps a file equal to the history, a line for each record.

    A hidden file next to the table holds the identity of its run, because the table has no place
    for it that every reader skips.

    Args:
        call: the call that makes it, without the path.
        path: the path, as it was typed.
    """

    is_of_one_run = True
    beginning: ClassVar[bytes]  # the pattern of the first bytes of a file

    def __init__(self, call: Call, path: _Path) -> None:
        name = name_of(call.factory)
        typed = checks.typed_path(name, "path", path, f"runs/a.{name[3:]}")
        self.path = file = checks.folder_path(name, "path", path)
        self.call = attrs.evolve(call, args=(typed,))
        # The contents of the file: columns, number of records (None: unknown), bytes.
        self._names: tuple[str, ...] = ()
        self._count: int | None = None
        self._size = 0
        folder = next(parent for parent in file.parents if parent.exists())
        found = b""
        if file.is_file():
            with file.open("rb") as opened:
                found = opened.read(1000)
        if found[:1] == b"\0" and self._run_id() is not None:
            found = found.lstrip(b"\0")  # a power failure may put zeros in the place of rows
        is_other = found and not re.match(self.beginning, found)
        if file.is_dir() or not folder.is_dir() or is_other:
            raise ValueError(
                f"{name}({typed!r}): there is something else at that path. Give another path, or "
                "remove what is there"
            )

    @property
    def _id_file(self) -> Path:
        """The hidden file next to the table."""
        return self.path.with_name(f".{self.path.name}.run")

    def _run_id(self) -> str | None:
        """Return the identity of the run whose file it is, if there is a hidden file."""
        return read_run_id(self._id_file)

    def header(self, names: Sequence[str]) -> str:
        """Return the first line for some names of metrics, or "" if there is none."""
        return ""

    @abstractmethod
    def row(self, record: Record, names: Sequence[str]) -> str:
        """Return the line of a record."""

    def __repr__(self) -> str:
        return repr(self.call)

    def tried(self, place: Path) -> tuple[Hook, str]:
        """Return a hook that writes to another file."""
        copied = copy.copy(self)
        copied.path = place.with_suffix(self.path.suffix)
        return copied, "file"

    def begin(self, state: TrainState) -> TrainState:
        """Claim the file for this run.

        Raises:
            ValueError: the file has the rows of another run.
        """
        on_main_process(lambda: self._claim(state), repr(self))
        self._count = None
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if self._count is None or "record" in state.events:
            self._update(state)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Make the file equal to the history."""
        self._update(state)
        return state

    def settle(self, state: TrainState) -> TrainState:
        """Make the file equal to the history of a run that has already ended, if it is its file."""
        if state.backend.rank == 0 and self._belongs_to(state):
            disk.remove_parts(self.path.resolve())
            self._count = None
            self._update(state)
        return state

    def check_beside(self, hooks: Sequence[Hook]) -> None:
        """Raise if another one writes other lines to the same file. Two may write the same ones.

        Raises:
            ValueError: it does.
        """
        path = os.path.realpath(self.path)
        sharing = [each for each in TableWriter.among(hooks) if os.path.realpath(each.path) == path]
        kinds = {*map(type, sharing)}
        if len(sharing) > 1 and (len(kinds) > 1 or EventWriter in kinds):
            raise ValueError(
                f"{sharing[0]!r} and {sharing[1]!r} write the same file, and one would undo what "
                "the other writes: leave one out, or give each its own path"
            )

    def _claim(self, state: TrainState) -> None:
        if self._read_first_row() is not None and not self._belongs_to(state):
            raise ValueError(
                f"{self!r}: {self.path} has the rows of another run. To continue that run, restore "
                "its state first: state = resume(folder, state). To begin a new one, give it "
                "another path, or move the file away"
            )
        self._check_written()
        disk.remove_parts(self.path.resolve())
        if self._run_id() != state.run_id:
            disk.make_folder(self.path.parent)
            disk.replace_file(self._id_file, state.run_id.encode())

    def _check_written(self) -> None:
        """Raise ValueError if the file has what would be lost."""

    def _belongs_to(self, state: TrainState) -> bool:
        """Return whether the file belongs to this run: by its hidden file, or by its first row."""
        if (run := self._run_id()) is not None:
            return run == state.run_id
        first = self._read_first_row()
        if first is None or not len(state.history):
            return False
        expected = self.row(state.history[0], ())
        return _first_cells(first) == _first_cells(expected)

    def _read_first_row(self) -> str | None:
        """Return the first row of the file, or None if it has none."""
        if not self.path.exists():
            return None
        with self.path.open(encoding="utf-8", errors="replace") as file:
            lines = list(itertools.islice(file, 2))
        rows = lines[bool(self.header(())) :]
        return rows[0] if rows and rows[0].strip() else None

    def _update(self, state: TrainState) -> None:
        """Make the file equal to the history, in the first process.

        Raises:
            ValueError: another run has begun to write the file.
        """
        if state.backend.rank != 0:
            return
        new = self.new_records(state)
        if not self._can_append(len(state.history) - len(new), new):
            if self._run_id() not in (None, state.run_id):
                raise ValueError(
                    f"{self!r}: another run has begun to write {self.path}: give each run a path "
                    "of its own"
                )
            self._rewrite(state.history)
        elif new:
            self._write("".join(self.row(record, self._names) for record in new))
        self._count = len(state.history)

    def _can_append(self, known: int, new: Sequence[Record]) -> bool:
        """Return whether the file lacks only rows at its end, and has a column for all they need.

        The file also has to be as this hook left it. It has rows to lose after a hook went back.
        """
        if self._count != known or not self.path.exists():
            return False
        names = _merge_names(self._names, *map(_cells_of, new))
        same_columns = self.header(names) == self.header(self._names)
        return same_columns and self.path.stat().st_size == self._size

    def _write(self, text: str) -> None:
        """Append lines to the file."""
        with self.path.open("ab") as file:
            self._size += file.write(text.encode())

    def _rewrite(self, history: History) -> None:
        found = {*itertools.chain.from_iterable(map(_cells_of, history))}
        self._names = tuple(n for n in ("items", *history.keys(), "closing") if n in found)
        lines = self._lines([self.row(record, self._names) for record in history])
        text = (self.header(self._names) + "".join(lines)).encode()
        self._size = len(text)
        path = self.path.resolve()  # so that a link stays a link
        if path.exists() and path.read_bytes() == text:
            return
        disk.make_folder(path.parent)
        disk.replace_file(path, text)

    def _lines(self, records: Sequence[str]) -> Sequence[str]:
        """Return the lines of the file, given those of the records."""
        return records


class CsvWriter(TableWriter):
    """A hook that keeps a CSV file of the history."""

    beginning = rb"epoch,step,seconds(,|\r?\n)"

    def header(self, names: Sequence[str]) -> str:
        return _csv_line([*_COUNTERS, *names])

    def row(self, record: Record, names: Sequence[str]) -> str:
        cells = _cells_of(record)
        counters = (record.epoch, record.step, record.seconds)
        return _csv_line([*counters, *(cells.get(name, "") for name in names)])


class JsonWriter(TableWriter):
    """A hook that keeps a file of JSON lines of the history."""

    beginning = rb'{"(epoch": \d+, "step": \d+, "seconds": |event": ")'

    def row(self, record: Record, names: Sequence[str]) -> str:
        counters = {"epoch": record.epoch, "step": record.step, "seconds": record.seconds}
        return _json_line({**counters, **_cells_of(record)})

    def _check_written(self) -> None:
        if any(map(_event_in, self._written())):
            raise ValueError(
                f"{self!r}: {self.path} has events, which would be lost: write "
                f"to_jsonl({self.call.args[0]!r}, events=True), or give another path"
            )

    def _written(self) -> Sequence[bytes]:
        return self.path.read_bytes().splitlines() if self.path.exists() else ()


class EventWriter(JsonWriter):
    """A hook that keeps a file of the history, with a line for each event between the records.

    Where a run is, is a number that grows with each update, applied or skipped. What was told there
    or later is cut off if a run begins before it, or goes back.
    """

    _now = 0  # where the run is
    _end = sys.maxsize  # from where on events are cut off
    _spikes = 0  # how many are written

    def _check_written(self) -> None: ...

    def begin(self, state: TrainState) -> TrainState:
        state = super().begin(state)
        if state.backend.rank == 0 and state.run is not None:
            self._spikes, self._now = len(_spikes_of(state)), _place_of(state)
            self._cut_off(state, self._now + 1)
            fresh = not (state.step or state.skipped or len(state.history))
            self._tell(state, "begin" if fresh else "resume", {})
            state.run.live.notices.listeners.append(self._tell)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        self._tell_spikes(self.poll(state))
        return super().__call__(state)

    def poll(self, state: TrainState) -> TrainState:
        """Cut off what a hook has taken back, by the first update after that."""
        now, before = _place_of(state), self._now
        self._now = now
        if now < before:
            self._spikes = min(self._spikes, len(_spikes_of(state)))
            self._cut_off(state, now)
        return state

    def flush(self, state: TrainState) -> TrainState:
        self._tell_spikes(state)
        state = super().flush(state)
        if state.stop is not None:
            self._tell(state, "stop", {"kind": Stop.kind_of(state.stop), "reason": str(state.stop)})
        if "end" in state.events:
            self._tell(state, "end", {})
        return state

    def settle(self, state: TrainState) -> TrainState:
        """Tell of the end of a run that was killed before it could."""
        state = super().settle(state)
        if state.backend.rank == 0 and self._belongs_to(state):
            events = [row for line in self._written() if (row := _event_in(line))]
            ended = events and events[-1]["event"] == "end"
            if not ended and state.stop is None:
                self._tell(state, "end", {})
        return state

    def failed(self, state: TrainState, error: BaseException) -> None:
        self._update(state)
        self._tell(state, "error", {"error": f"{type(error).__name__}: {error}"})

    def _tell_spikes(self, state: TrainState) -> None:
        spikes = _spikes_of(state)
        for spike in spikes[self._spikes :]:
            self._tell(state, "spike", {"loss": spike["loss"], "median": spike["median"]})
        self._spikes = len(spikes)

    def _tell(self, state: object, event: str, facts: Mapping[str, object]) -> None:
        """Append the line of an event."""
        assert isinstance(state, TrainState)
        if state.backend.rank != 0:
            return
        self.poll(state)
        at = {"step": state.step, "skipped": state.skipped, "epoch": state.epoch}
        self._write(_json_line({"event": event, **at, "time": time.time(), **facts}))

    def _cut_off(self, state: TrainState, end: int) -> None:
        """Leave only events before a place in the file."""
        self._count, self._end = None, end
        self._update(state)
        self._end = sys.maxsize

    def _lines(self, records: Sequence[str]) -> Sequence[str]:
        found, left = list[str](), iter(records)
        for line in self._written():
            event = _event_in(line)
            if event is None:  # the line of a record: it is as the history has it now
                found += itertools.islice(left, 1)
            elif event["step"] + event["skipped"] < self._end:
                found.append(line.decode() + "\n")
        return [*found, *left]


def _place_of(state: TrainState) -> int:
    return state.step + state.skipped


def _spikes_of(state: TrainState) -> Sequence[Mapping[str, object]]:
    return state.extra.get("spikes", ())  # where ``spike_guard`` notes them


class Event(TypedDict):
    """What is read of the line of an event."""

    event: str | None
    step: int
    skipped: int


def _event_in(line: bytes) -> Event | None:
    """Return the event of a line, or None if it is another line. One that was cut is never kept."""
    if not line.startswith(b'{"event": '):
        return None
    try:
        return json.loads(line)
    except ValueError:
        return {"event": None, "step": sys.maxsize, "skipped": 0}


def _first_cells(row: str) -> list[str]:
    """Return epoch, step and seconds as they are written."""
    return [cell.strip("{} \n") for cell in row.split(",")[: len(_COUNTERS)]]


def _merge_names(*names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain.from_iterable(names)))


def _cells_of(record: Record) -> dict[str, float]:
    """Return the cells of a row after the counters: items, metrics, and 1 for a closing record."""
    items = {} if record.items is None else {"items": record.items}
    return {**items, **record.metrics, **({"closing": 1} if record.closing else {})}


def _csv_line(cells: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # which quotes a name with either
    return text.getvalue().removesuffix("\r\n") + "\n"


def _json_line(cells: Mapping[str, object]) -> str:
    items = (f"{json.dumps(name)}: {_json(value)}" for name, value in cells.items())
    return f"{{{', '.join(items)}}}\n"


def _json(value: object) -> str:
    if not isinstance(value, float) or math.isfinite(value):
        return json.dumps(value)
    return "null" if math.isnan(value) else "1e999" if value > 0 else "-1e999"


# --------------------------------------------------------------------------------------------------
# Send records to an experiment tracker.

# fn(client, state): the client of each tracker has a class of its own.
Also = Callable[[Any, TrainState], object]
_Plain = str | bool | int | float | None


class track(BuiltIn):
    """Send every record to a tracker: ``track("tensorboard", folder="runs/a")``.

    Each metric is sent with the step of its record. The tracker is opened after the first update
    and closed when the run ends, also on an exception; a later run continues in it. When there are
    several processes, only the first one sends.

    Args:
        tracker: "tensorboard", "wandb", "mlflow" or any other name that accelerate knows; or a
            class or an instance of ``accelerate.tracking.GeneralTracker``.
        folder: where it writes. tensorboard and aim need one; wandb, mlflow (for artifacts),
            dvclive and swanlab take one.
        config: hyperparameters, sent once: plain data, possibly in nested mappings;
            ``{"a": {"b": 1}}`` becomes ``a.b``.
        also: ``fn(client, state)``, called after the numbers of a record are sent, for what is not
            a number: pictures, histograms, the graph. ``client`` is the tracker's own object, which
            writes to the same run: the ``SummaryWriter`` of tensorboard, the run of wandb, the
            active run of mlflow (``mlflow.log_figure`` writes to it), and what the ``tracker`` of
            another GeneralTracker is. ``"epoch" in state.events`` says whether an epoch has ended.
            Only the process that sends calls it, so it must not wait for the others.
        project: the project or experiment that the run belongs to; for tensorboard, a folder in
            ``folder``.
        **settings: other arguments of the class, such as ``name="a"`` for ``wandb.init``.

    Returns:
        A hook.

    Raises:
        ValueError: there is no tracker of that name, it needs a folder, or it does not take one.
        TypeError: an argument has the wrong type.
        ImportError: the package of the tracker is not installed; the message says what to install.

    Example:
        >>> import fnloop as fl, torch
        >>> from accelerate.tracking import GeneralTracker
        >>> from fnloop.testing import toy, toy_loss
        >>> class Show(GeneralTracker):
        ...     name, requires_logging_directory, tracker = "show", False, None
        ...     def store_init_configuration(self, values):
        ...         print(values)
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> hook = track(Show(), config={"model": {"width": 1}})
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 2
        >>> state = fl.fit(step, toy(lr=0.5), batches, hooks=(hook,))
        {'model.width': 1}
        2 {'train/loss': -0.25, 'train/lr': 0.5}

        A histogram of the weights, at every epoch::

            def weights(writer, state):
                for name, weight in state.model.named_parameters():
                    writer.add_histogram(name, weight, state.step)

            track("tensorboard", folder="runs/a", also=weights)

    Source: https://huggingface.co/docs/accelerate/usage_guides/tracking

    Replaces: lightning.WandbLogger, lightning.TensorBoardLogger, keras.TensorBoard,
    transformers.report_to
    """

    untried = "it would send records to a tracker"
    is_of_one_run = True

    def __init__(
        self,
        tracker: object,
        folder: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        also: Also | None = None,
        project: str | None = None,
        **settings: object,
    ) -> None:
        if also is not None:
            checks.function("track", "also", also, "a function (client, state)", 2)
        if folder is not None:
            folder = checks.typed_path("track", "folder", folder)
        if project is not None:
            checks.text("track", "project", project, "the name of a project")
        self.config = _flatten({} if config is None else config)
        self._tracker = read_tracker(tracker, project, folder, settings)
        self._tracker.config = self.config
        given = {"folder": folder, "also": also, "project": project}  # settings may have API keys
        shown = {name: value for name, value in given.items() if value is not None}
        self._call = Call(track, (self._tracker.name,), shown)
        self.also, self._open = also, False
        self._first_step = 0  # of the run

    def __repr__(self) -> str:
        return repr(self._call)

    def begin(self, state: TrainState) -> TrainState:
        """Note where this run begins."""
        self._first_step = state.step
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if state.backend.rank == 0:
            # Those of this boundary, and those made before the first update: where `every` has
            # skipped the hook, it has skipped the records too.
            steps = (state.step, self._first_step)
            records = [record for record in self.new_records(state) if record.step in steps]
            if not self._open:
                self._tracker.start(min([state.step, *(record.step for record in records)]))
                self._open = True
            self._send(state, records)
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Send the closing record, if there is one."""
        if self._open:
            self._send(state, [record for record in self.new_records(state) if record.closing])
        return state

    def close(self) -> None:
        """Close the tracker. A failure is logged, because no caller could catch it."""
        if self._open:
            self._open = False
            try:
                self._tracker.finish()
            except Exception as error:
                log.error("%r: could not be closed: %s", self, error)

    def _send(self, state: TrainState, records: list[Record]) -> None:
        for record in records:
            self._tracker.log(record.metrics, record.step)
        if records and self.also is not None:
            try:
                self.also(self._tracker.client, state)
            except Exception as error:
                error.add_note(f"while in {name_of(self.also)}(client, state) of {self!r}")
                raise


def _flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, _Plain]:
    """Return nested mappings as one, with values that every tracker takes."""
    if not isinstance(config, Mapping):
        raise TypeError(
            "track expects config as a mapping, such as {'lr': 0.1}; got "
            f"{checks.describe(config)}. For an object, write vars(config)"
        )
    flat: dict[str, _Plain] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{name}."))
        else:
            flat[name] = _to_plain(name, value)
    return flat


def _to_plain(name: str, value: object) -> _Plain:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):  # also a number of NumPy
        return int(value) if isinstance(value, Integral) else float(value)
    if checks.is_list(value):
        return str([_to_plain(name, item) for item in value])
    raise TypeError(
        f"track expects plain data in config; got {name}={value!r:.60} ({type(value).__name__}). "
        "Write str(...) around it"
    )


# --------------------------------------------------------------------------------------------------
# Experiment trackers: those of accelerate, and the arguments that they need.


_EXTRAS = ("tensorboard", "wandb", "mlflow")
# By tracker, the argument that takes a folder.
_FOLDERS = {"wandb": "dir", "mlflow": "logging_dir", "dvclive": "dir", "swanlab": "logdir"}


@attrs.define
class Tracker:
    """One of accelerate's trackers, used without its process-wide state. See :func:`read_tracker`.

    Args:
        name: its name.
        kind: its class, or the tracker itself.
        args, settings: the arguments of its class.
    """

    name: str
    kind: Any  # a class is called with arguments that only it knows
    args: tuple[str, ...] = ()
    settings: Mapping[str, object] = attrs.field(factory=dict)
    config: Mapping[str, _Plain] = attrs.field(factory=dict, init=False)  # until it is sent
    _running: Any = None  # what accelerate makes; ``tracker`` differs from class to class

    def start(self, step: int) -> None:
        """Start the tracker. Values from this step on, left by a run that died, are overwritten.

        The first time, send the hyperparameters.
        """
        with trackers() as known:
            self._running = self.kind
            if isinstance(self.kind, type):
                purge = {"purge_step": step} if self.kind is known.TensorBoardTracker else {}
                self._running = self.kind(*self.args, **{**purge, **self.settings})
            # Otherwise each call would create accelerate's process-wide state.
            self._running.main_process_only = False
            self._running.start()
            if self.config and type(self._running) is known.TensorBoardTracker:
                _write_hparams(self._running, known.yaml, self.config)
            elif self.config:
                self._running.store_init_configuration(dict(self.config))
        self.config = {}

    @property
    def client(self) -> Any:
        """The tracker's own object: a SummaryWriter of tensorboard, a run of wandb, ..."""
        return self._running.tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers at a step."""
        with trackers():
            self._running.log(dict(values), step=step)

    def finish(self) -> None:
        """Close the tracker.

        If the service has given the run an identity, the next start continues that run.
        """
        with trackers() as known:
            if self.kind is known.WandBTracker:
                self.settings = {"resume": "allow", **self.settings, "id": self._running.tracker.id}
            elif self.kind is known.MLflowTracker:
                self.settings = {**self.settings, "run_id": self._running.tracker.info.run_id}
            self._running.finish()


def _write_hparams(running: Any, yaml: ModuleType, values: Mapping[str, object]) -> None:
    """Write hyperparameters into tensorboard's file of the run, and into ``hparams.yml``.

    Accelerate and ``SummaryWriter.add_hparams`` make a folder each, which tensorboard shows as a
    run of its own.
    """
    writer = running.tracker
    # torch.utils.tensorboard, or tensorboardX where that is missing.
    package = type(writer).__module__.rpartition(".")[0]
    summaries = importlib.import_module(f"{package}.summary")
    for summary in summaries.hparams(dict(values), {}):
        writer.file_writer.add_summary(summary)
    writer.flush()
    text = yaml.safe_dump(dict(values))
    Path(running.logging_dir, "hparams.yml").write_text(text, encoding="utf-8")


def read_tracker(
    tracker: object, project: str | None, folder: str | None, settings: Mapping[str, object]
) -> Tracker:
    """Return a tracker that is not started yet.

    Args:
        tracker: a name that accelerate knows, a class of trackers, or one tracker.
        project: the project that the run belongs to; None for a default.
        folder: where it writes, or None.
        settings: the other arguments of its class.

    Raises:
        ValueError: there is no tracker of that name, it needs a folder, or it does not take one.
        ImportError: its package is not installed.
        TypeError: it is none of these, or an argument is wrong.
    """
    with trackers() as known:
        classes, base = known.LOGGER_TYPE_TO_CLASS, known.GeneralTracker
    if isinstance(tracker, base):
        if project is not None or folder is not None or settings:
            raise TypeError(
                f"track expects no further arguments for the instance {_name_of(tracker)}: pass "
                "them where you make it, or pass its class"
            )
        return Tracker(_name_of(tracker), tracker)
    if isinstance(tracker, str):
        if tracker not in classes:
            names = ", ".join(f'"{name}"' for name in classes)
            raise ValueError(
                f"track expects one of {names}, or your own GeneralTracker; got {tracker!r}"
            )
        kind = classes[tracker]
    elif isinstance(tracker, type) and issubclass(tracker, base):
        kind = tracker
    else:
        raise TypeError(
            'track expects the name of a tracker, such as "tensorboard", or a GeneralTracker of '
            f"accelerate; got {tracker!r:.60}"
        )
    if kind.__module__ == base.__module__:
        _check_installed(kind.name)
    name = _name_of(kind)
    args, settings = _collect_arguments(name, kind, project, folder, settings)
    try:
        inspect.signature(kind).bind(*args, **settings)
    except TypeError as error:
        raise TypeError(
            f"track({name!r}) calls {kind.__name__}{inspect.signature(kind)}, but {error}"
        ) from None
    return Tracker(name, kind, args, settings)


def _collect_arguments(
    name: str, kind: type, project: str | None, folder: str | None, settings: Mapping[str, object]
) -> tuple[tuple[str, ...], Mapping[str, object]]:
    """Return the arguments of a class of trackers."""
    if getattr(kind, "requires_logging_directory", False):
        if folder is None:
            raise ValueError(f'track({name!r}) needs a folder: track({name!r}, folder="runs/a")')
        return (project or "", folder), settings
    if folder is not None and name not in _FOLDERS:
        raise ValueError(
            f"track({name!r}) takes no folder: leave it out, or use the argument of its class by "
            "name"
        )
    given = {} if folder is None else {_FOLDERS[name]: folder}
    return (project or "fnloop",), {**given, **settings}


def _name_of(tracker: object) -> str:
    return getattr(tracker, "name", None) or checks.known_as(tracker)


def _check_installed(name: str) -> None:
    found = importlib.util.find_spec(name)
    # A folder of that name, such as the one that wandb makes, is found too, but without an origin.
    if found is None or found.origin is None:
        package = f"'fnloop[{name}]'" if name in _EXTRAS else name.replace("_", "-")
        raise ImportError(
            f"track({name!r}) needs a package that is not installed: pip install {package}"
        )


# --------------------------------------------------------------------------------------------------
# Run a hook on the main process only.


@attrs.frozen(repr=False)
class on_main(Wrapper):
    """Run a hook on the main process only: one that prints, writes a file or talks to a server.

    The hook may only observe; the other processes would not see its changes. In one process it runs
    as without ``on_main``. Hooks of fnloop that write, such as ``track`` and ``to_csv``, do so on
    the main process by themselves.

    Args:
        hook: ``state -> state``, which returns the state that it is given.

    Returns:
        A hook.

    Raises:
        TypeError: the hook is not a function, or is ``checkpoint`` or ``restore_best``, which every
            process has to take part in.
        ValueError: when it runs: it returned another state.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def show(state):
        ...     print(state.step)
        ...     return state
        >>> hook = fl.every(epochs=1)(on_main(show))
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(hook,))
        3

    Replaces: lightning.rank_zero_only, accelerate.on_main_process
    """

    hook: Hook

    def __attrs_post_init__(self) -> None:
        self.take(self.hook, "on_main")
        moments = [moment for layer in self.inside for moment in layer.moments]
        if any(clock.learns for moment in moments for clock in moment.clocks):
            raise TypeError(
                f"{self.hook!r} tells all processes what its hook takes: list on_main inside it"
            )
        inner = self.innermost
        if isinstance(inner, checkpoint | restore_best):
            writes = ", and writes only on the main one" if isinstance(inner, checkpoint) else ""
            raise TypeError(f"{self.hook!r} needs all processes{writes}: list it without on_main")

    def __repr__(self) -> str:
        return f"on_main({name_of(self.hook)})"

    def __call__(self, state: TrainState) -> TrainState:
        return self.around(self.call, state)

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run, on the main process; everywhere if the hook needs all processes for it."""
        if isinstance(self.innermost, TableWriter):  # all learn of a file that is refused
            return self.hook.begin(state)
        return super().begin(state)

    def evaluating(self, state: TrainState, loader: str, done: int, total: int | None) -> None:
        """Follow an evaluation, on the main process."""
        if state.backend.main:
            super().evaluating(state, loader, done, total)

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the hook asks for the outputs, on the main process. A collective."""
        wanted = state.backend.main and super().collects(state, loader)
        return collectives.any_rank(wanted, "what a hook collects")

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation, on the main process."""
        if state.backend.main:
            super().receive(state, outputs)

    def around(self, call: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
        """Call a hook or its method on the main process, and raise if it returns another state.

        What the hook remembers of the run is its own.

        Raises:
            ValueError: it returns another state.
        """
        if state.backend.main and (new := call(state)) is not state:
            if isinstance(new, TrainState) and differ_only(new, state, "noted"):
                return new
            stops = isinstance(new, TrainState) and new.stop
            found = f"one that stops: {new.stop}" if stops else repr(new)
            raise ValueError(
                f"{self!r} must return the state that it is given, because the other processes "
                f"would not see the change; it returned {found}"
            )
        return state
