"""Checks of arguments, in one place: say what was given, what was expected, and what to type instead."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["described", "folder_path", "integer", "listed", "metric_name", "number", "typed_path"]


def described(value: Any, most: int = 60) -> str:
    """Return a short text for any value: a class by its name, anything else by its repr and its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = repr(value)
    except Exception:  # a repr that fails must not hide the message
        return f"a {type(value).__name__}"
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    plain = value is None or isinstance(value, bool | int | float | str | bytes | list | tuple | dict | set)
    return text if plain else f"{text} ({type(value).__name__})"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def integer(
    owner: str, name: str, value: Any, meaning: str = "", *, least: int = 1, wrong_type: type[Exception] = ValueError
) -> int:
    """Return an int, having checked that it is one (not a bool) and at least ``least``.

    Raises:
        ValueError: it is too small, or not an int (``wrong_type``, for those that raise TypeError then).
    """
    of = f", {meaning}" if meaning else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(f"{owner} expects {name} as an int >= {least}{of}; got {described(value)}")
    if value < least:
        raise ValueError(f"{owner} expects {name} >= {least}{of}; got {value}")
    return value


def number(
    owner: str,
    name: str,
    value: Any,
    meaning: str = "",
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    finite: bool = True,
) -> Any:
    """Return a number (not a bool, not NaN), having checked that it is in a range.

    Raises:
        ValueError: it is not an int or a float, is out of the range, or is not finite where it has to be.
    """
    parts = [f">= {least:g}" if least > -math.inf else "", f"> {above:g}" if above > -math.inf else ""]
    parts += [f"<= {most:g}" if most < math.inf else "", "finite" if finite else ""]
    wanted = " and ".join(part for part in parts if part)
    of = f", {meaning}" if meaning else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{owner} expects {name} as a number{f' {wanted}' if wanted else ''}{of}; got {described(value)}")
    if not (least <= value <= most and value > above) or (finite and not math.isfinite(value)):
        raise ValueError(f"{owner} expects {name} {wanted}{of}; got {value}")
    return value


def metric_name(owner: str, name: str, value: Any) -> str:
    """Return the name of a metric, having checked that it is one.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f'{owner} expects {name} as the name of a metric, such as "valid/loss"; got {described(value)}')
    if not value:
        raise ValueError(f'{owner} expects {name} as the name of a metric, such as "valid/loss"; got an empty name')
    return value


def typed_path(owner: str, name: str, value: Any, example: str = "runs/a") -> str:
    """Return a path as it was typed, having checked that it is one on this machine.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, or an address such as ``s3://...``.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f'{owner} expects {name} as a path, such as "{example}"; got {described(value)}')
    text = os.fspath(value)
    if not text:
        raise ValueError(f'{owner} expects {name} as a path, such as "{example}"; got an empty one')
    if "\0" in text:
        raise ValueError(f"{owner} expects {name} as a path, which has no null character; got {described(text)}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/+", text) and not re.match(r"[A-Za-z]:[/\\]", text):
        raise ValueError(
            f"{owner} writes to and reads from the disks of this machine; got {text!r}. Mount it, or copy the folder afterwards"
        )
    return text


def folder_path(owner: str, name: str, value: Any) -> Path:
    """Return an absolute path, with ``~`` expanded, so that a later change of the working directory does not move it.

    Raises:
        TypeError, ValueError: as :func:`typed_path`.
    """
    text = typed_path(owner, name, value)
    return Path(os.path.abspath(os.path.expanduser(text)))
