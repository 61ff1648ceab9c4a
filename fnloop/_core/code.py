"""The code of functions: what it refers to, and whether a library has it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType

from torch import nn


def code_of(function: object) -> CodeType | None:
    """Return the code of a function or a method in Python; None of anything else."""
    return getattr(function, "__code__", None)


def is_of_library(value: type | FunctionType) -> bool:
    """Return whether a function or a class is one of Python, NumPy, torch or fnloop."""
    return (value.__module__ or "").partition(".")[0] in ("builtins", "fnloop", "numpy", "torch")


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def names_in(function: FunctionType) -> set[str]:
    """Return the names that a function's code, and code inside of it, refers to."""
    return {name for code in codes_of(function.__code__) for name in code.co_names}


def walk(
    roots: Iterable[object], enters: Callable[[type | FunctionType], bool]
) -> Iterator[object]:
    """Yield values, and what their code refers to, directly or not.

    Args:
        roots: functions, and objects that can be called.
        enters: whether to look into a function or a class.
    """
    seen: set[int] = set()
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FunctionType):
            value = inspect.unwrap(value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting += [value.__func__, type(value.__self__)]
        elif isinstance(value, type):
            waiting += vars(value).values() if enters(value) else ()
        elif isinstance(value, FunctionType):
            if not enters(value):
                continue
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # a name that has no value yet
                    waiting.append(cell.cell_contents)
            names = names_in(value) & value.__globals__.keys()
            waiting += [value.__globals__[name] for name in names]
        elif callable(value) and not isinstance(value, nn.Module):
            waiting.append(type(value))
