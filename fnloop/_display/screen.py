"""The log of the library."""

from __future__ import annotations

import functools
import itertools
import logging
import sys

from fnloop._display.reprs import WIDEST, in_notebook, terminal_width, wrap

# --------------------------------------------------------------------------------------------------
# The logger of the library: `logging.getLogger("fnloop")`.

log = logging.getLogger("fnloop")


def _wrap(record: logging.LogRecord) -> bool:
    """Wrap a message at words where Python itself writes it: no handler was added."""
    if not log.hasHandlers() and sys.stderr is not None:
        width = terminal_width() - 1 if sys.stderr.isatty() else WIDEST
        wrapped = (wrap(line, width) for line in record.getMessage().splitlines())
        record.msg = "\n".join(itertools.chain(*wrapped))
        record.args = ()
    return True


log.addFilter(_wrap)


def tell(text: str) -> None:
    """Show what a user has to know, although nothing is wrong. A log hides what is not a warning.

    A notebook shows warnings as it shows errors, so there it is the output of the cell, unless the
    program has said where its logs go.
    """
    if in_notebook() and not log.hasHandlers():
        print("\n".join(wrap(text, WIDEST)))
    else:
        log.warning(text)


def warn_once(text: str) -> None:
    """Log a warning, unless this process has logged the same text before.

    Args:
        text: the warning, to the logger "fnloop".

    Example:
        >>> warn_once("the batches of this loader are small")
    """
    _warn(text)


@functools.cache
def _warn(text: str) -> None:
    log.warning(text)
