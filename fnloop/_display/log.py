"""The logger of the library: ``logging.getLogger("fnloop")``."""

from __future__ import annotations

import logging
import sys
import textwrap

from fnloop._display.tables import terminal_width

__all__ = ["log"]

log = logging.getLogger("fnloop")


def _wrap(record: logging.LogRecord) -> bool:
    """Wrap a message at words where Python itself writes it to a terminal: no handler was added."""
    if not log.hasHandlers() and sys.stderr is not None and sys.stderr.isatty():
        wrapper = textwrap.TextWrapper(
            terminal_width() - 1, break_long_words=False, break_on_hyphens=False
        )
        record.msg = "\n".join(map(wrapper.fill, record.getMessage().splitlines()))
        record.args = ()
    return True


log.addFilter(_wrap)
