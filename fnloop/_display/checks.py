"""Checks of arguments. An error says what was given, what was expected, and what to type."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import operator
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn, TypeGuard, TypeVar, cast

import attrs
import numpy as np
from torch import Tensor, nn

T = TypeVar("T")
F = TypeVar("F")
_Types = type | tuple[type, ...]
_PLAIN = bool | int | float | str | bytes | list | tuple | dict | set | None


def describe(value: object, most: int = 60) -> str:
    """Return a short line for any value: the name of a class, or else a repr and its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if kind := record_in(value):
        return (
            f"the DictConfig that Hydra makes of a {kind} in a list or a mapping: "
            'write instantiate(config, _convert_="all")'
        )
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a repr that fails must not hide the message
        return f"a {type(value).__name__}"
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return text if isinstance(value, _PLAIN) else f"{text} ({type(value).__name__})"


def of_omegaconf(value: object) -> bool:
    """Return whether a value is a list or a mapping of OmegaConf."""
    return type(value).__module__.startswith("omegaconf.")


def record_in(value: object) -> str:
    """Return the name of the class that a DictConfig was made of an instance of, or nothing."""
    kind = sys.modules["omegaconf"].OmegaConf.get_type(value) if of_omegaconf(value) else None
    return kind.__name__ if isinstance(kind, type) and kind not in (dict, list) else ""


def plain(value: T) -> T:
    """Return a value as Python's own: a number of NumPy, and a list or a mapping of OmegaConf.

    What is in a list, a tuple or a dict is looked at too. Anything else stays the same object. A
    number of few bits is the one that was typed, not the nearest that it can hold.

    Example:
        >>> plain([np.int64(3), np.float32(0.7)])
        [3, 0.7]
    """
    return cast("T", _plain(value))


def _plain(value: object) -> object:
    kind, foreign = type(value), of_omegaconf(value)
    if isinstance(value, np.floating):
        return float(str(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Sequence) and (kind is list or kind is tuple or foreign):
        items = [_plain(item) for item in value]
        same = not foreign and all(map(operator.is_, items, value))
        return value if same else tuple(items) if kind is tuple else items
    if isinstance(value, Mapping) and (kind is dict or foreign):
        parts = {key: _plain(item) for key, item in value.items()}
        same = not foreign and all(map(operator.is_, parts.values(), value.values()))
        return value if same else parts
    return value


def join_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are.

    Example:
        >>> join_names(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence, such as a list, a tuple or a range, but no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


class _OfTheClass:
    """The fields of an attrs class, which its instances do not have."""

    def __init__(self, fields: object) -> None:
        self.fields = fields

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:
            return self.fields
        raise AttributeError("__attrs_attrs__")


def hide_fields(cls: type[attrs.AttrsInstance]) -> None:
    """Let the instances of an attrs class look like those of any other class.

    Hydra would make a DictConfig of each one in a list or a mapping, because OmegaConf takes what
    shows fields for a configuration.
    """
    cls.__attrs_attrs__ = _OfTheClass(cls.__attrs_attrs__)  # type: ignore[assignment]


def make_plain(record: attrs.AttrsInstance) -> None:
    """Make the settings of an attrs record plain, which may be frozen."""
    names = [field.name for field in attrs.fields(type(record)) if field.init]
    for name, value in fields_of(record, names).items():
        object.__setattr__(record, name, plain(value))


def fields_of(record: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record that have these names, each with its value."""
    return {name: getattr(record, name) for name in names}


def integer(
    owner: str,
    name: str,
    value: object,
    meaning: str = "",
    *,
    least: int = 1,
    wrong_type: type[Exception] = ValueError,
) -> int:
    """Return a value as an int if it is one, also of NumPy, but no bool, of at least ``least``.

    Raises:
        ValueError: it is too small; or it is not an int, unless ``wrong_type`` is another class.
    """
    value = plain(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= least:
            return value
        wrong_type = ValueError
    of = f", {meaning}" if meaning else ""
    raise wrong_type(f"{owner} expects {name} as an int >= {least}{of}; got {describe(value)}")


def number(
    owner: str,
    name: str,
    value: object,
    meaning: str = "",
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    finite: bool = True,
    wrong_type: type[Exception] = ValueError,
) -> float:
    """Return a value as a number if it is one, also of NumPy, but no bool or NaN, in a range.

    Raises:
        ValueError: it is out of the range, or is not finite although it has to be; or it is not a
            number, unless ``wrong_type`` is another class.
    """
    bounds = [
        f">= {least:g}" if least > -math.inf else "",
        f"> {above:g}" if above > -math.inf else "",
        f"<= {most:g}" if most < math.inf else "",
        "finite" if finite else "",
    ]
    wanted, of = " and ".join(filter(None, bounds)), f", {meaning}" if meaning else ""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        kind = "a finite number" if wanted == "finite" else f"a number {wanted}".rstrip()
        raise wrong_type(f"{owner} expects {name} as {kind}{of}; got {describe(value)}")
    given = cast("float", value)
    within = least <= given <= most and (given > above or above == -math.inf)
    if not within or (finite and not math.isfinite(given)):
        raise ValueError(f"{owner} expects {name} {wanted or 'other than nan'}{of}; got {given}")
    return given


def flag(owner: str, name: str, value: object, meaning: str = "") -> bool:
    """Return a value as a bool if it is one, also of NumPy.

    Raises:
        TypeError: it is not.
    """
    of = f", {meaning}" if meaning else ""
    return instance(owner, name, plain(value), bool, f"True or False{of}")


def choice(owner: str, name: str, value: str, options: Iterable[str], also: str = "") -> str:
    """Return a value if it is one of some words.

    Raises:
        ValueError: it is not.
    """
    known = list(options)
    if not isinstance(value, str) or value not in known:
        wanted = ", ".join(f'"{option}"' for option in known)
        raise ValueError(f"{owner} expects {name} as one of {wanted}{also}; got {describe(value)}")
    return value


def text(owner: str, name: str, value: str, meaning: str) -> str:
    """Return a value if it is a str that is not empty.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty.
    """
    if not instance(owner, name, value, str, f"{meaning}, a str"):
        raise ValueError(f"{owner} expects {name} as {meaning}; got an empty str")
    return value


LONGEST_NAME = 200  # a file system takes 255 bytes, of which a checkpoint adds some


def name_of_file(owner: str, name: str, value: str, written: str | None = None) -> str:
    """Return a text if a file can have it in its name.

    Args:
        owner, name: what was given it, for messages.
        value: the text.
        written: how it is written in the name of the file, if in another way.

    Raises:
        ValueError: it is too long.
    """
    if (length := len((written or value).encode())) > LONGEST_NAME:
        raise ValueError(
            f"{owner} expects {name} of at most {LONGEST_NAME} characters, because the name of a "
            f"file has it; got {length}: {value:.20}..."
        )
    return value


def mapping(
    owner: str, name: str, value: Mapping[str, object], meaning: str
) -> Mapping[str, object]:
    """Return a value if it is a mapping.

    Raises:
        TypeError: it is not.
    """
    return instance(owner, name, value, Mapping, f"a mapping, {meaning}")


def instance(owner: str, name: str, value: object, kind: type[T], meaning: str) -> T:
    """Return a value if it is an instance of a class.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{owner} expects {name} as {meaning}; got {describe(value)}")
    return value


def has_methods(value: object, *names: str) -> TypeGuard[Any]:
    """Return whether a value has methods of all these names."""
    return all(callable(getattr(value, name, None)) for name in names)


def module_of(value: object) -> str:
    """Return the name of the module that defines a function or a class; "" if there is none."""
    return getattr(value, "__module__", None) or ""


def notes_of(error: BaseException) -> list[str]:
    """Return the notes that were added to an exception."""
    return getattr(error, "__notes__", [])


def known_as(value: object) -> str:
    """Return the name of a function or a class; of anything else, that of its class."""
    return getattr(value, "__name__", type(value).__name__)


def function(
    owner: str, name: str, value: F, meaning: str, arguments: int, *, also: _Types = ()
) -> F:
    """Return a value if it is a function that can be called with a number of arguments.

    Args:
        owner: the function that was called.
        name: its argument.
        value: the value of the argument.
        meaning: what is expected: "a function (aux, batch) -> scalar".
        arguments: the number of positional arguments that the function will be given.
        also: classes of callables that are accepted too: ``type`` for classes, ``nn.Module`` for
            modules.

    Raises:
        TypeError: it is not a function, or takes other arguments.
    """
    given: object = value  # for type checkers, which would narrow ``value``
    if not callable(given) or (isinstance(given, type | nn.Module) and not isinstance(given, also)):
        hint = f". Call it: {given.__name__}(...)" if isinstance(given, type) else ""
        raise TypeError(f"{owner} expects {name} as {meaning}; got {describe(given)}{hint}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(given)
        try:
            signature.bind(*(None,) * arguments)
        except TypeError as error:
            raise TypeError(
                f"{owner} expects {name} as {meaning}; {known_as(given)} takes {signature}"
            ) from error
    return value


def arguments(
    owner: str, function: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Raise if a function does not take these arguments.

    Args:
        owner: the name of the function, or of a class.
        function: the function, or the ``__init__`` of the class.
        args: those that are given by position, without ``self``.
        kwargs: those that are given by name.

    Raises:
        TypeError: it does not; the message says what it takes.
    """
    if not isinstance(function, FunctionType):
        return
    code = function.__code__
    every = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = [name for name in every if name != "self"]
    by_place = [name for name in every[: code.co_argcount] if name != "self"]
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        for name in kwargs:
            if name not in names:
                left = [each for each in names[len(args) :] if each not in kwargs]
                no_argument(owner, name, left)
    if len(args) > len(by_place) and not code.co_flags & inspect.CO_VARARGS:
        rest = ", ".join(names[len(by_place) :])
        raise TypeError(
            f"{owner} takes {', '.join(by_place) or 'nothing'} by position"
            f"{rest and f', and by name: {rest}'}; got {describe(args[len(by_place)])} as number "
            f"{len(by_place) + 1}"
        )


def no_argument(owner: str, name: str, names: Collection[str], hint: str = "") -> NoReturn:
    """Raise TypeError for an argument that a function does not have.

    Args:
        owner: the name of the function.
        name: that of the argument.
        names: those of the arguments that it has, and that are not given.
        hint: what to write, if that is known.
    """
    hint = hint or suggestion(name, names, 0.8)
    hint = hint or (f": it takes {', '.join(names)}" if names else "")
    raise TypeError(f"{owner} has no argument {name}={hint}")


def suggestion(name: str, names: Iterable[str], cutoff: float = 0.6, of: str = "") -> str:
    """Return the question for the nearest name, after ``of``, or an empty str if none is near."""
    near = difflib.get_close_matches(name, [*names], 1, cutoff)
    return f". Did you mean {of + near[0]!r}?" if near else ""


def scalar(owner: str, name: str, value: object) -> Any:
    """Return a value if it is a number or a scalar tensor, without a read from the device.

    Raises:
        TypeError: it is not.
    """
    if value.__class__ is float:  # the usual case, at the cost of nothing else
        return value
    expected = f"{owner} expects {name} as a number or a scalar tensor"
    if isinstance(value, Tensor):
        if value.ndim or value.is_complex():
            found = f"shape {tuple(value.shape)}" if value.ndim else f"dtype {value.dtype}"
            raise TypeError(f"{expected}; got a tensor of {found}: add .sum()")
    elif not isinstance(value, Real | np.bool_):  # also a number of NumPy
        raise TypeError(f"{expected}; got {describe(value)}")
    return value


def as_number(owner: str, value: object) -> float:
    """Return a number, or a tensor of one element, as a float. It reads a tensor to the host.

    Raises:
        TypeError: it is not a number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{owner} must be a number; got {describe(value)}")


def metric_name(owner: str, name: str, value: str) -> str:
    """Return a value if it can be the name of a metric.

    Raises:
        TypeError: it is not a str.
        ValueError: it is empty, or no file can hold it.
    """
    expected = f'{owner} expects {name} as the name of a metric, such as "valid/loss"'
    if not isinstance(value, str):
        raise TypeError(f"{expected}; got {describe(value)}")
    if not value:
        raise ValueError(f"{expected}; got an empty name")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{expected}; got a lone surrogate: {describe(value)}") from None
    return value


def own_metric_name(owner: str, value: str) -> None:
    """Raise unless a metric of one's own can have this name in reports.

    Raises:
        TypeError, ValueError: it is not a name, or it is that of another metric.
    """
    metric_name(owner, "a name", value)
    first = value.split("/")[0]
    taken = {"lr": "the learning rates", "recent": "the metrics since the last record"}
    if value == "loss" or first in taken:
        raise ValueError(
            f"{owner}({value}=...) would replace {taken.get(first, 'the loss')}, which a run "
            f'always reports as "{first}": choose another name'
        )


def is_address(value: object) -> bool:
    """Return whether a value is an address such as ``s3://...``, rather than a path.

    Example:
        >>> is_address("s3://bucket/a"), is_address("runs/a")
        (True, False)
    """
    if not isinstance(value, str | os.PathLike):
        return False
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", str(os.fspath(value))) is not None


def typed_path(
    owner: str, name: str, value: str | os.PathLike[str], example: str = "runs/a"
) -> str:
    """Return a path as it was typed, if it is one on this machine.

    Raises:
        TypeError: it is not a path.
        ValueError: it is empty, or an address such as ``s3://...``.
    """
    expected = f'{owner} expects {name} as a path, such as "{example}"'
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{expected}; got {describe(value)}")
    text = os.fspath(value)
    if not text.strip():
        raise ValueError(f"{expected}; got an empty one")
    if "\0" in text:
        raise ValueError(f"{expected}, without a null character; got {describe(text)}")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/+", text) and not re.match(r"[A-Za-z]:[/\\]", text):
        raise ValueError(
            f"{owner} writes to and reads from the disks of this machine; got {text!r}. "
            "Mount it, or copy the folder afterwards. (Addresses of checkpoints are written as "
            'text, such as "s3://bucket/a": a Path loses a slash)'
        )
    return text


def folder_path(
    owner: str, name: str, value: str | os.PathLike[str], example: str = "runs/a"
) -> Path:
    """Return an absolute path, with ``~`` expanded.

    A later change of the working directory does not affect it.

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
