"""A terminal in memory, and a clock that stands still, for tests of what is shown."""

import importlib
import io
import re
from types import SimpleNamespace

CLOCKED = ("_extensions.hooks.progress", "_core.runs", "_loop.run")


class Terminal(io.StringIO):
    """A file that claims to be a terminal."""

    def isatty(self):
        return True

    def lines(self):
        """Return what is on the screen, line by line, without colors."""
        lines, row, column = [""], 0, 0
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
        for sign in re.findall(r"\x1b\[[KA]|.|\n|\r", text):
            if sign == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif sign == "\r":
                column = 0
            elif sign == "\x1b[K":  # erases the rest of the line
                lines[row] = lines[row][:column]
            elif sign == "\x1b[A":  # goes up
                row -= 1
            else:
                lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]

    def drawings(self):
        """Return each state of the bottom line, in order, and what else follows a return."""
        return [part.removesuffix("\x1b[K") for part in self.getvalue().split("\r")]


def fake_clock(monkeypatch):
    """Return a clock for a run and for progress that stands still until a test moves it."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = clock.perf_counter = lambda: clock.now

    def takes(seconds, then=lambda state: state):
        """Return a hook that takes some time."""

        def hook(state):
            clock.now += seconds
            return then(state)

        return hook

    def timed(loss_fn, train=0.0, valid=0.0):
        """Return a loss function that takes some time."""

        def slow(model, batch):
            clock.now += train if model.training else valid
            return loss_fn(model, batch)

        return slow

    clock.takes, clock.timed = takes, timed
    for module in CLOCKED:
        monkeypatch.setattr(importlib.import_module(f"fnloop.{module}"), "time", clock)
    return clock
