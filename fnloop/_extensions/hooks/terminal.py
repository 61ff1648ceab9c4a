"""The bottom line of a terminal, and what is printed above it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterable
from typing import TextIO

from tqdm.utils import disp_len

from fnloop.extend import reprs

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
    """A terminal whose bottom line is redrawn in place.

    While the line is shown, what the program prints to the terminal appears above it: sys.stdout,
    sys.stderr and the handlers of ``logging`` that write to them are redirected. A part of a line,
    such as a bar of a hook, takes its place until it is drawn again. :meth:`close` gives the
    streams back, and removes the line.

    Args:
        file: the terminal.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = self._out = file
        while isinstance(self.file, _Above):  # of a run in a hook, which makes room for this one
            self.file = self.file.stream
        self._line = ""
        self._shown = 0  # the columns that it takes now
        self._part = ""  # what the program has printed where it was, without an end of the line
        self._lock, self._process = threading.RLock(), os.getpid()
        self._redirected: contextlib.ExitStack | None = None

    def draw(self, line: str) -> None:
        """Show a line at the bottom, instead of the one that is there."""
        with self._lock, contextlib.suppress(OSError):  # the terminal may be gone
            if self._redirected is None:
                self._redirected = contextlib.ExitStack()
                for name in ("stdout", "stderr"):
                    self._redirect(self._redirected, name)
            self._line = reprs.printable(line, self.file)
            self._show(self._line)

    def print(self, *lines: str) -> None:
        """Write lines above the bottom line."""
        with self._lock, contextlib.suppress(OSError):
            self._show("")
            self.write(reprs.printable("\n".join([*lines, ""]), self.file), self._out)

    def close(self) -> None:
        """Remove the bottom line, and give the streams back."""
        with self._lock, contextlib.suppress(OSError):
            if self._redirected is not None:
                self._redirected.close()
            self.make_room()
            self._out.flush()
        self._redirected, self._line = None, ""

    def write(self, text: str, stream: TextIO) -> None:
        """Write what the program prints, and the line below it again."""
        with self._lock:
            self.make_room()
            stream.write(text)
            self._part = _open_part(self._part, text)
            if self._line and not self._part:
                stream.flush()
                self._show(self._line)

    def is_of_this_process(self) -> bool:
        """Return whether this is the terminal of a run, and not the copy that a worker has."""
        return os.getpid() == self._process

    def make_room(self) -> None:
        """Remove the line until it is drawn again."""
        if self._shown and self.is_of_this_process():
            with self._lock:
                self._show("")

    def _show(self, line: str) -> None:
        rows = max(self._shown - 1, 0) // columns_of(self.file)  # a narrower one has wrapped it
        start = "\n" if self._part else f"\x1b[{rows}A\r\x1b[J" if rows else "\r"
        if line or self._shown or self._part:
            self._out.write(f"{start}{line}{_ERASE}")
            self._out.flush()
        self._shown, self._part = disp_len(line), ""

    def _redirect(self, redirected: contextlib.ExitStack, name: str) -> None:
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            above = _Above(stream, self)
            _replace(name, stream, above)
            redirected.callback(_replace, name, above, stream)


_ERASE = "\x1b[K"  # the rest of the line


def _open_part(before: str, text: str) -> str:
    """Return what stands in the last line after a text; "" if that is empty or has ended.

    Example:
        >>> _open_part("", "a\\nb"), _open_part("9 %", "\\r10 %"), _open_part("9 %", "\\r   \\r")
        ('b', '10 %', '')
    """
    line = (before + text).rpartition("\n")[2].rpartition(f"\r{_ERASE}")[2].replace(_ERASE, "")
    return next(filter(None, reversed(line.split("\r"))), "").strip(" ")


class _Above:
    """A stream whose lines appear above the bottom line of a screen."""

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self.stream, self._screen = stream, screen
        self._held, self._is_open = "", False  # of a worker: a text, and whether a line is begun

    def write(self, text: str) -> int:
        if self._screen.is_of_this_process():
            self._screen.write(text, self.stream)
        else:  # in one piece, because the run writes to the same terminal
            self._held += text
            if text.endswith("\n"):
                self.flush()
        return len(text)

    def flush(self) -> None:
        if self._held:
            start = "" if self._is_open else f"\r{_ERASE}"
            text, self._held = self._held, ""
            self._is_open = not text.endswith("\n")
            self.stream.write(f"{start}{text}")
        self.stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def fileno(self) -> int:
        """Return the descriptor, which ``input`` and a debugger ask for to write a prompt."""
        self._screen.make_room()
        return self.stream.fileno()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def _replace(name: str, old: object, new: object) -> None:
    """Replace a stream of ``sys``, also in the handlers of ``logging`` that write to it."""
    if getattr(sys, name) is old:  # otherwise it was replaced meanwhile
        setattr(sys, name, new)
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [each for each in known if isinstance(each, logging.Logger)]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        # A handler whose stream is a property, as that of logging.lastResort, follows ``sys``.
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is old:
            handler.setStream(new)
