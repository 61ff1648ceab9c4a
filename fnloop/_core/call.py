"""Calls as values: how settings, middleware, schedules and hooks show, compare and pickle."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs

__all__ = ["Call", "name_of"]


def name_of(value: object) -> str:
    """Return a setting as it was typed: the name of a function, the repr of anything else."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return value.__name__
    if isinstance(value, functools.partial):
        return repr(Call(value.func, value.args, value.keywords))
    return repr(value)


@attrs.frozen(repr=False)
class Call:
    """A call as it was typed. What a call made shows, compares and pickles as that call.

    Args:
        factory: the function that was called.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Example:
        >>> Call(round, (2.5,), {"ndigits": 1}), Call(max, (1, 2))()
        (round(2.5, ndigits=1), 2)
    """

    factory: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        keywords = (f"{name}={name_of(value)}" for name, value in self.kwargs.items())
        return f"{name_of(self.factory)}({', '.join([*map(name_of, self.args), *keywords])})"

    def __call__(self) -> object:
        """Make the call again, and return what it returns."""
        return self.factory(*self.args, **self.kwargs)
