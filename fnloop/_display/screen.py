"""The bottom line of a terminal, and the log of the library."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

from fnloop._display.tables import printable, terminal_width, wrap

# --------------------------------------------------------------------------------------------------
# The bottom line of a terminal, which tqdm draws, and what is printed above it.

_STYLES = {"bold": "1", "dim": "2", "green": "32", "yellow": "33", "cyan": "36"}


def columns_of(file: TextIO) -> int:
    """Return how many characters a line of a terminal has now."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be no real file
        if (columns := os.get_terminal_size(file.fileno()).columns) > 0:
            return columns
    return shutil.get_terminal_size().columns


def has_colors(file: TextIO) -> bool:
    """Return whether to write in colors: to a terminal that has them, unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not file.isatty():
        return False
    return os.name != "nt" or "WT_SESSION" in os.environ


def paint(text: str, *styles: str) -> str:
    """Return a text in a style: bold, dim or a color.

    Example:
        >>> paint("best", "bold")
        '\\x1b[1mbest\\x1b[0m'
    """
    return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m" if text else ""


class Screen:
    """A terminal whose bottom line is redrawn in place: a bar of tqdm.

    While the line is shown, what the program prints to the terminal appears above it: sys.stdout,
    sys.stderr and the handlers of ``logging`` that write to them are redirected. :meth:`close`
    restores them, and removes the line.

    Args:
        file: the terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file.stream if isinstance(file, _Above) else file
        self._bar: _Bar | None = None
        self._redirected = contextlib.ExitStack()

    def draw(self, line: str) -> None:
        """Show a line at the bottom, instead of the one that is there."""
        with tqdm.get_lock():
            if self._bar is None:
                self._bar = _Bar(self.file)
                for name in ("stdout", "stderr"):
                    self._redirect(name, self._bar)
            self._bar.set_description_str(printable(line, self.file))

    def print(self, *lines: str) -> None:
        """Write lines above the bottom line."""
        with contextlib.suppress(OSError):  # the terminal is gone, which must not end a run
            tqdm.write(printable("\n".join(lines), self.file), file=self.file)
            self.file.flush()

    def close(self) -> None:
        """Remove the bottom line, and give the streams back."""
        with contextlib.suppress(OSError):
            self._redirected.close()
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _redirect(self, name: str, bar: _Bar) -> None:
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            above = _Above(stream, bar)
            _replace(name, stream, above)
            self._redirected.callback(_replace, name, above, stream)
            self._redirected.callback(above.flush)


class _Bar(tqdm):
    """A line of text. No thread watches it."""

    monitor_interval = 0

    def __init__(self, file: TextIO) -> None:
        super().__init__(  # with what a variable TQDM_... could change
            file=file, bar_format="{desc}", leave=False, disable=False, ncols=0, nrows=20
        )
        self.sp = self._show
        self.is_cut = False  # whether a part of a line is where the bar was
        self._shown = 0  # the columns that it takes

    def _show(self, line: str) -> None:
        rows = max(self._shown - 1, 0) // columns_of(self.fp)  # a narrower terminal has wrapped it
        start = "\n" if self.is_cut else f"\x1b[{rows}A\r\x1b[J" if rows else "\r"
        self.fp.write(f"{start}{line}\x1b[K")
        self.fp.flush()
        self.is_cut, self._shown = False, disp_len(line)


class _Above:
    """A stream whose lines appear above the bars.

    DummyTqdmFile of tqdm shows no prompt, and nothing of a bar that a hook draws.
    """

    def __init__(self, stream: TextIO, bar: _Bar) -> None:
        self.stream, self._bar, self._process = stream, bar, os.getpid()
        self._rest = ""  # a part of a line

    def write(self, text: str) -> int:
        if self._bar.disable or _is_called_by_tqdm():  # closed, or it has made room
            self.stream.write(text)
            return len(text)
        in_worker = os.getpid() != self._process  # of a loader, with a copy of the bar
        with contextlib.nullcontext() if in_worker else tqdm.get_lock():
            lines, end, self._rest = (self._rest + text).rpartition("\n")
            if end and in_worker:
                self.stream.write(f"\r\x1b[K{lines}\n")
            elif end and self._bar.is_cut:
                self.stream.write(f"{lines}\n")
                self._bar.is_cut = False
                self._bar.refresh()
            elif end:
                tqdm.write(lines, file=self.stream)
            if "\r" in self._rest:
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self._rest:
            self._make_room()
        self.stream.flush()

    def fileno(self) -> int:
        """Return the descriptor, which ``input`` and a debugger ask for to write a prompt."""
        if not _is_called_by_tqdm():
            self._make_room()
        return self.stream.fileno()

    def _make_room(self) -> None:
        """Remove the bar until it is drawn again, and write a part of a line, if there is one."""
        if os.getpid() == self._process:
            with tqdm.get_lock():
                if not self._bar.is_cut:
                    self._bar.clear(nolock=True)
                self.stream.write(self._rest)
                self._bar.is_cut |= bool(self._rest)
                self._rest = ""

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:
        return other is self or self.stream == other  # tells tqdm which bars are on this terminal

    def __hash__(self) -> int:
        return hash(self.stream)


def _is_called_by_tqdm() -> bool:
    """Return whether it is a bar, such as one of a hook, that calls the method that asks."""
    here = inspect.currentframe()
    method = here and here.f_back
    caller = method and method.f_back
    return caller is not None and caller.f_globals.get("__name__", "").startswith("tqdm.")


def _replace(name: str, old: Any, new: Any) -> None:
    """Replace a stream of ``sys``, also in the handlers of ``logging`` that write to it."""
    if getattr(sys, name) is old:  # otherwise it was replaced meanwhile
        setattr(sys, name, new)
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for handler in {each for logger in loggers for each in getattr(logger, "handlers", ())}:
        # A handler whose stream is a property, as that of logging.lastResort, follows ``sys``.
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is old:
            handler.setStream(new)


# --------------------------------------------------------------------------------------------------
# The logger of the library: `logging.getLogger("fnloop")`.

log = logging.getLogger("fnloop")


WIDEST = 120  # columns of a line in a file


def _wrap(record: logging.LogRecord) -> bool:
    """Wrap a message at words where Python itself writes it: no handler was added."""
    if not log.hasHandlers() and sys.stderr is not None:
        width = terminal_width() - 1 if sys.stderr.isatty() else WIDEST
        wrapped = (wrap(line, width) for line in record.getMessage().splitlines())
        record.msg = "\n".join(itertools.chain(*wrapped))
        record.args = ()
    return True


log.addFilter(_wrap)


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same text before."""
    log.warning(text)
