"""Checks of arguments, in one place: say what was given, what was expected, and what to type instead."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = [
    "choice",
    "described",
    "flag",
    "folder_path",
    "function",
    "instance",
    "integer",
    "listed",
    "mapping",
    "metric_name",
    "number",
    "scalar",
    "text",
    "typed_path",
]


def described(value: Any, most: int = 60) -> str:
    """Return a short text for any value: a class by its name, anything else by its repr and its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    try:
        text = repr(value)
    except Exception:  # a repr that fails must not hide the message
        return f"a {type(value).__name__}"
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    plain = value is None or isinstance(
        value, bool | int | float | str | bytes | list | tuple | dict | set
    )
    return text if plain else f"{text} ({type(value).__name__})"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def integer(
    owner: str,
    name: str,
    value: Any,
    meaning: str = "",
    *,
    least: int = 1,
    wrong_type: type[Exception] = ValueError,
) -> int:
    """Return an int, having checked that it is one (not a bool) and at least ``least``.

    Raises:
        ValueError: it is too small, or not an int (``wrong_type``, for those that raise TypeError then).
    """
    of = f", {meaning}" if meaning else ""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least:
        error = ValueError if whole else wrong_type
        raise error(f"{owner} expects {name} as an int >= {least}{of}; got {described(value)}")
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
    parts = [
        f">= {least:g}" if least > -math.inf else "",
        f"> {above:g}" if above > -math.inf else "",
    ]
    parts += [f"<= {most:g}" if most < math.inf else "", "finite" if finite else ""]
    wanted = " and ".join(part for part in parts if part)
    of = f", {meaning}" if meaning else ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{owner} expects {name} as a number{f' {wanted}' if wanted else ''}{of}; got {described(value)}"
        )
    if not (least <= value <= most and value > above) or (finite and not math.isfinite(value)):
        raise ValueError(f"{owner} expects {name} {wanted}{of}; got {value}")
    return value


def flag(owner: str, name: str, value: Any, meaning: str = "") -> bool:
    """Return a bool, having checked that it is one.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"{owner} expects {name} as True or False{f', {meaning}' if meaning else ''}; got {described(value)}"
        )
    return value


def choice(owner: str, name: str, value: Any, options: Iterable[str], also: str = "") -> str:
    """Return one of several words, having checked that it is one.

    Raises:
        ValueError: it is something else.
    """
    known = list(options)
    if not isinstance(value, str) or value not in known:
        wanted = ", ".join(f'"{option}"' for option in known)
        raise ValueError(f"{owner} expects {name} as one of {wanted}{also}; got {described(value)}")
    return value


def text(owner: str, name: str, value: Any, meaning: str) -> str:
    """Return a str that is not empty, having checked that it is one.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{owner} expects {name} as {meaning}, a str; got {described(value)}")
    if not value:
        raise ValueError(f"{owner} expects {name} as {meaning}; got an empty str")
    return value


def mapping(owner: str, name: str, value: Any, meaning: str) -> Mapping[Any, Any]:
    """Return a mapping, having checked that it is one.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{owner} expects {name} as a mapping, {meaning}; got {described(value)}")
    return value


def instance(owner: str, name: str, value: Any, kind: type, meaning: str) -> Any:
    """Return a value, having checked that it is of a class.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{owner} expects {name} as {meaning}; got {described(value)}")
    return value


def function(
    owner: str, name: str, value: Any, meaning: str, arguments: int, *, also: Any = ()
) -> Any:
    """Return a function, having checked that it can be called with a number of arguments.

    Args:
        owner: what was called.
        name: the name of its argument.
        value: the function.
        meaning: what it is to be: "a function (aux, batch) -> scalar".
        arguments: how many positional arguments it will be given.
        also: whether a class (``type``) or a module (``nn.Module``) is right too, since it can be called.

    Raises:
        TypeError: it is not a function, or takes other arguments.
    """
    if not callable(value) or (isinstance(value, type | nn.Module) and not isinstance(value, also)):
        hint = f". Call it: {value.__name__}(...)" if isinstance(value, type) else ""
        raise TypeError(f"{owner} expects {name} as {meaning}; got {described(value)}{hint}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(value)
        try:
            signature.bind(*(None,) * arguments)
        except TypeError as error:
            called = getattr(value, "__name__", type(value).__name__)
            raise TypeError(
                f"{owner} expects {name} as {meaning}; {called} takes {signature}"
            ) from error
    return value


def scalar(owner: str, name: str, value: Any) -> Any:
    """Return a number or a tensor that holds one, having checked that it is one, without a read from the device.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            found = f"shape {tuple(value.shape)}" if value.ndim else f"dtype {value.dtype}"
            raise TypeError(
                f"{owner} expects {name} as a number or a scalar tensor; got a tensor of {found}: add .sum()"
            )
    elif not isinstance(value, Real):  # numpy's too
        raise TypeError(
            f"{owner} expects {name} as a number or a scalar tensor; got {described(value)}"
        )
    return value


def metric_name(owner: str, name: str, value: Any) -> str:
    """Return the name of a metric, having checked that it is one.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty.
    """
    if not isinstance(value, str):
        raise TypeError(
            f'{owner} expects {name} as the name of a metric, such as "valid/loss"; got {described(value)}'
        )
    if not value:
        raise ValueError(
            f'{owner} expects {name} as the name of a metric, such as "valid/loss"; got an empty name'
        )
    return value


def typed_path(owner: str, name: str, value: Any, example: str = "runs/a") -> str:
    """Return a path as it was typed, having checked that it is one on this machine.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, or an address such as ``s3://...``.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(
            f'{owner} expects {name} as a path, such as "{example}"; got {described(value)}'
        )
    text = os.fspath(value)
    if not text.strip():
        raise ValueError(f'{owner} expects {name} as a path, such as "{example}"; got an empty one')
    if "\0" in text:
        raise ValueError(
            f"{owner} expects {name} as a path, which has no null character; got {described(text)}"
        )
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/+", text) and not re.match(r"[A-Za-z]:[/\\]", text):
        raise ValueError(
            f"{owner} writes to and reads from the disks of this machine; got {text!r}. Mount it, or copy the folder afterwards"
        )
    return text


def folder_path(owner: str, name: str, value: Any, example: str = "runs/a") -> Path:
    """Return an absolute path, with ``~`` expanded, so that a later change of the working directory does not move it.

    Raises:
        TypeError, ValueError: as :func:`typed_path`.
    """
    typed = typed_path(owner, name, value, example)
    try:
        return Path(typed).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(
            f"{owner} expects {name} as a path; got {typed!r}, and there is no such user"
        ) from error
