"""Plot the history while a run trains."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fnloop._core.call import Call
from fnloop._core.history import History
from fnloop._core.history_plot import check_plot
from fnloop._core.state import TrainState
from fnloop._display import checks, html, plot
from fnloop._hooks.wrapper import Hook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["live_plot"]

PAUSE = 9  # the least time between two drawings, as a multiple of the time that the first one took


class live_plot(Hook):
    """Draw ``state.history.plot()`` at every record: in place in a notebook, or into a file.

    With ``fit(..., record_every=...)`` the curves grow within an epoch too. It uses only the
    history, so it reads nothing from the device. When there are several processes, the main one
    draws.

    Args:
        file: where to save the figure, in the format of its suffix (``"runs/a.png"``); None is the
            output of the cell.
        mode: "min" or "max", or a mapping from metrics to one of them, as in :meth:`History.plot`.
        x: the unit of the x axis, "step" or "epoch".
        refresh: the least time between two drawings, in seconds; 0 draws every record. A drawing
            takes a fraction of a second. If it takes longer, because the history is very long, the
            hook waits longer too, and takes at most a tenth of the time. The last record of a run
            is always drawn.

    Returns:
        A hook.

    Raises:
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        TypeError: file is not a path.
        ValueError: no file was given and this is not a notebook; or another argument is not one of
            its choices.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 3
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hook = live_plot(Path(folder, "run.png"))
        ...     state = fl.fit(step, toy(), batches, epochs=2, hooks=(hook,))
        ...     Path(folder, "run.png").read_bytes()[1:4]
        b'PNG'
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        mode: Mapping[str, str] | str | None = None,
        x: str = "step",
        refresh: float = 1.0,
    ) -> None:
        plot.require_matplotlib("live_plot")
        check_plot(mode, x)
        self._typed = file
        if file is not None:
            file = checks.folder_path("live_plot", "file", file, example="run.png")
            plot.check_file("live_plot", file)
        elif not html.in_notebook():
            raise ValueError(
                "live_plot() draws in a notebook, and this is not one. To draw into a file, write "
                "live_plot('run.png')"
            )
        checks.number("live_plot", "refresh", refresh, "the seconds between two drawings", least=0)
        self.file, self.mode, self.x, self.refresh = file, mode, x, refresh
        self._output = html.Display()
        self._pending: History | None = None  # not drawn yet
        self._drawn: History | None = None
        self._next = 0.0

    def __repr__(self) -> str:
        given = {"mode": self.mode, "x": self.x, "refresh": self.refresh}
        changed = {k: v for k, v in given.items() if v != {"x": "step", "refresh": 1.0}.get(k)}
        return repr(Call(live_plot, (str(self._typed),) if self.file else (), changed))

    def __call__(self, state: TrainState) -> TrainState:
        self._take(state)
        if self._pending is not None and time.monotonic() >= self._next:
            self._draw()
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Draw the last record."""
        self._take(state)
        self._draw()
        return state

    def close(self) -> None:
        """Draw what is pending, if that is possible, and release the output."""
        with contextlib.suppress(Exception):  # do not mask the exception that ended the run
            self._draw()
        self._output, self._pending, self._drawn, self._next = html.Display(), None, None, 0.0

    def _take(self, state: TrainState) -> None:
        """Note that the history is to be drawn, if it is new."""
        if state.backend.rank == 0 and state.history is not self._drawn and state.history.keys():
            self._pending = state.history

    def _draw(self) -> None:
        if self._pending is None:
            return
        began = time.monotonic()
        history, self._pending = self._pending, None
        self._drawn = history
        figure = history.plot(mode=self.mode, x=self.x)
        if self.file is None:
            self._output.show(figure)
        else:
            _save(figure, self.file)
        now = time.monotonic()
        pause = max(self.refresh, PAUSE * (now - began)) if self.refresh else 0.0
        self._next = now + pause


def _save(figure: Figure, file: Path) -> None:
    """Save a figure. A reader of the file always finds a complete one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.stem}.unfinished{file.suffix}")
    figure.savefig(unfinished)
    os.replace(unfinished, file)
