"""A picture of the history that is drawn again as the run goes on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fnloop._core.call import Call
from fnloop._core.history import History
from fnloop._core.history_plot import check_plot
from fnloop._core.state import TrainState
from fnloop._display import checks, html, plot

__all__ = ["live_plot"]


class live_plot:
    """Draw ``state.history.plot()`` at every report: in its place in a notebook, or into a file.

    It looks at the history alone, so it reads nothing from the device. With several processes the main one draws.

    Args:
        file: where to save the picture, in the format of its suffix (``"runs/a.png"``); None is the output of a cell.
        mode: "min" or "max", or a mapping from metrics to one of them, as in :meth:`History.plot`.
        x: what is on the x axis, "step" or "epoch".
        refresh: seconds between two pictures, at least 0; drawing one takes a fraction of a second. The last report of a run
            is always drawn.

    Returns:
        A hook.

    Raises:
        ImportError: matplotlib is not installed (the extra ``fnloop[plot]``).
        TypeError: file is not the name of a file.
        ValueError: there is no notebook to draw in, and no file was given; or another argument is none of its choices.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from pathlib import Path
        >>> from fnloop.testing import toy, toy_loss
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     draws = live_plot(Path(folder, "run.png"))
        ...     state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, epochs=2, hooks=(draws,))
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
        plot.need("live_plot")
        check_plot(mode, x)
        self._typed = file
        if file is not None:
            file = checks.folder_path("live_plot", "file", file, example="run.png")
            plot.check_file("live_plot", file)
        elif not html.in_notebook():
            raise ValueError(
                "live_plot draws in a notebook, and this is none. To save the picture: live_plot('run.png')"
            )
        checks.number("live_plot", "refresh", refresh, "the seconds between two pictures", least=0)
        self.file, self.mode, self.x, self.refresh = file, mode, x, refresh
        self._output = html.Display()
        self._waiting: History | None = None  # what is to be drawn
        self._drawn: History | None = None
        self._next = 0.0

    def __repr__(self) -> str:
        given = {"mode": self.mode, "x": self.x, "refresh": self.refresh}
        changed = {k: v for k, v in given.items() if v != {"x": "step", "refresh": 1.0}.get(k)}
        return repr(Call(live_plot, (str(self._typed),) if self.file else (), changed))

    def __call__(self, state: TrainState) -> TrainState:
        self._look(state)
        if self._waiting is not None and time.monotonic() >= self._next:
            self._draw()
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Draw the last report, when the run ends."""
        self._look(state)
        self._draw()
        return state

    def close(self) -> None:
        """Let go of the output, when the run is left; what still waits is drawn as far as that is possible."""
        with contextlib.suppress(Exception):  # what ended the run is more important
            self._draw()
        self._output, self._waiting, self._drawn, self._next = html.Display(), None, None, 0.0

    def _look(self, state: TrainState) -> None:
        """Let a history that has not been drawn wait for its turn."""
        if state.backend.rank == 0 and state.history is not self._drawn and state.history.keys():
            self._waiting = state.history

    def _draw(self) -> None:
        if self._waiting is None:
            return
        history, self._waiting = self._waiting, None
        self._drawn = history
        figure = history.plot(mode=self.mode, x=self.x)
        if self.file is None:
            self._output.show(figure)
        else:
            _save(figure, self.file)
        self._next = time.monotonic() + self.refresh


def _save(figure: Any, file: Path) -> None:
    """Save a figure so that whoever looks at the file sees a whole one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.stem}.unfinished{file.suffix}")
    figure.savefig(unfinished)
    os.replace(unfinished, file)
