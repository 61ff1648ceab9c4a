"""Profile some updates of a run with torch's profiler."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
from torch import profiler

from fnloop._core.call import Call
from fnloop._core.state import TrainState
from fnloop._display import checks
from fnloop._hooks.wrapper import Hook

__all__ = ["profiled"]

ROWS = 15  # of the table


@attrs.define
class _Position:
    """How far a run is.

    Args:
        tried: the updates that were tried before the last boundary, in the run.
        done: those of this process.
        rank: the number of this process.
        device: what the table is sorted by.
    """

    tried: int
    rank: int
    device: str
    done: int = 0


@attrs.frozen(repr=False, eq=False)
class profiled(Hook):
    """Profile some updates with ``torch.profiler``: a trace, and a table of what takes longest.

    It measures ``updates`` updates of this process, after the first ``start`` ones: with what comes
    between them, such as loading, hooks and evaluations. Then it writes a trace, and the main
    process prints a table of the operators that took longest. If the run ends before that, also by
    an exception, they are of the updates that were made. Otherwise nothing is measured, and nothing
    costs time. The trace is a file such as ``updates-11-to-20-rank-0.pt.trace.json``, one for each
    process; open it in chrome://tracing, https://ui.perfetto.dev or TensorBoard.
    ``on_main(profiled(...))`` measures the main process only. It changes no number.

    Args:
        start: the updates before those that are measured, at least 1. The profiler warms up in the
            last of them.
        updates: how many updates are measured, at least 1. Long traces are slow to open.
        folder: where to write; created if it does not exist. A trace of the same name is replaced.

    Returns:
        A hook.

    Raises:
        ValueError: a number is below 1.
        TypeError: folder is not a path.

    Example:
        >>> import contextlib, io, os, tempfile, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 5
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with contextlib.redirect_stdout(io.StringIO()) as table:
        ...         hooks = (profiled(start=1, updates=2, folder=folder),)
        ...         state = fl.fit(step, toy(), batches, hooks=hooks)
        ...     os.listdir(folder), "Self CPU" in table.getvalue()
        (['updates-2-to-3-rank-0.pt.trace.json'], True)

    Source: https://docs.pytorch.org/docs/stable/profiler.html
    """

    start: int = 10
    updates: int = 10
    folder: str | os.PathLike[str] = attrs.field(kw_only=True)
    _path: Path = attrs.field(init=False)
    _position: list[_Position] = attrs.field(factory=list, init=False)  # empty, or that of a run
    _running: list[profiler.profile] = attrs.field(factory=list, init=False)  # empty, or one

    def __attrs_post_init__(self) -> None:
        meaning = "the updates before those that are measured"
        checks.integer("profiled", "start", self.start, meaning)
        checks.integer("profiled", "updates", self.updates, "the updates that are measured")
        object.__setattr__(self, "_path", checks.folder_path("profiled", "folder", self.folder))

    def __repr__(self) -> str:
        given = {"start": self.start, "updates": self.updates}
        given = {name: value for name, value in given.items() if value != 10}
        return repr(Call(profiled, (), {**given, "folder": os.fspath(self.folder)}))

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: count its updates from here."""
        backend = state.backend
        tried = state.step + state.skipped
        self._position[:] = [_Position(tried, backend.rank, backend.device.type)]
        self._path.mkdir(parents=True, exist_ok=True)
        self._start_or_stop()
        return state

    def __call__(self, state: TrainState) -> TrainState:
        if self._position and state.step + state.skipped > self._position[0].tried:
            position = self._position[0]
            position.tried, position.done = state.step + state.skipped, position.done + 1
            if self._running:
                self._running[0].step()
            self._start_or_stop()
        return state

    def close(self) -> None:
        """Write what was measured, if the run ends before all was."""
        if self._running:
            self._stop()
        self._position.clear()

    def _start_or_stop(self) -> None:
        done = self._position[0].done
        if done == self.start - 1:
            plan = profiler.schedule(wait=0, warmup=1, active=self.updates + 1, repeat=1)
            measure = profiler.profile(schedule=plan, acc_events=True)  # older ones warn without
            measure.start()
            self._running[:] = [measure]
        elif done == self.start + self.updates:
            self._stop()

    def _stop(self) -> None:
        """Write the trace, and print the table on the main process."""
        measure, position = self._running.pop(), self._position[0]
        measure.stop()
        if position.done <= self.start:
            return  # it was still warming up
        name = f"updates-{self.start + 1}-to-{position.done}-rank-{position.rank}.pt.trace.json"
        measure.export_chrome_trace(str(self._path / name))
        if position.rank == 0:
            by = "cpu" if position.device == "cpu" else "device"
            found = measure.key_averages()
            print(found.table(sort_by=f"self_{by}_time_total", row_limit=ROWS), flush=True)
            print(f"trace: {self._path / name}", flush=True)
