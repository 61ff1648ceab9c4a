"""Text for a file that may not have every sign, such as a console of Windows."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["printable"]

_PLAIN = str.maketrans("━─│┌…→×", "#-||.>x")


def printable(text: str, file: TextIO | None = None) -> str:
    """Return a text that a file can encode: if need be with lines of ASCII, and with "?".

    Args:
        text: the text.
        file: where it will be written; by default sys.stdout.

    Example:
        >>> import io
        >>> printable("a │ b…", io.TextIOWrapper(io.BytesIO(), "ascii"))
        'a | b.'
    """
    file = sys.stdout if file is None else file
    encoding = getattr(file, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # there is no such encoding
        return text.translate(_PLAIN)
    return text
