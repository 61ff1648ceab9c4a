"""Lines of the user's code: which one changes a name, and which one is running."""

from __future__ import annotations

import dis
import types
from collections.abc import Sequence
from pathlib import Path

__all__ = ["describe_line", "find_line", "running_line"]

_STORES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF")
_LOADS = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF")
_PACKAGE = str(Path(__file__).parents[1])


def find_line(codes: Sequence[types.CodeType], name: str) -> str:
    """Return the first line that changes a name, or else one that uses it; "" if there is none."""
    for opnames in (_STORES, _LOADS):
        for code in codes:
            if code.co_name == "__init__":
                continue
            for instruction in dis.get_instructions(code):
                place = instruction.positions
                if (
                    instruction.opname in opnames
                    and instruction.argval == name
                    and place is not None
                    and place.lineno is not None
                ):
                    return describe_line(code, place.lineno)
    return ""


def describe_line(code: types.CodeType, line: int) -> str:
    """Return a line as text: the file, the number and the function."""
    return f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"


def running_line(frame: types.FrameType | None) -> str:
    """Return the line of the user that is running; "" if that is fnloop alone, as in backward."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE) and "/debug/" not in code.co_filename:
            return ""
        inside = "/torch/" in code.co_filename or code.co_filename.startswith((_PACKAGE, "<"))
        if not inside:
            return describe_line(code, frame.f_lineno)
        frame = frame.f_back
    return ""
