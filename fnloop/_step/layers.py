"""The layers of a step, by the code that runs in them: which one an exception came from."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import NamedTuple

import torch

from fnloop._step.gradients import NoGradientError

__all__ = ["STEP", "Layers"]

STEP = "the step"  # the name of the place, if an exception was raised in none of the layers
# The file from which torch calls a function decorated with no_grad.
_NO_GRAD = torch.no_grad()(lambda: None).__code__.co_filename


class _Layer(NamedTuple):
    """A layer.

    Args:
        code: what runs in it.
        name: its name in messages.
        is_users: whether the user wrote it.
    """

    code: CodeType
    name: str
    is_users: bool


class Layers:
    """The layers of a step, innermost first."""

    def __init__(self) -> None:
        self._layers: list[_Layer] = []
        self._names: dict[CodeType, str] = {}

    def add(
        self,
        step: Callable[..., object],
        name: str,
        is_users: bool = False,
        in_training: bool = True,
    ) -> None:
        """Add a layer around those that are there; or give it a name, if it is not in training.

        A function decorated with ``torch.no_grad()`` is looked into, because all decorated
        functions have the same code.
        """
        function = inspect.unwrap(step)
        code = getattr(function, "__code__", None)
        if code is None:
            code = getattr(type(function).__call__, "__code__", None)
        if code is None:
            return
        known = self._names.get(code)  # two middleware of one factory share their code
        self._names[code] = name if known in (None, name) else f"{known} or {name}"
        if in_training:
            self._layers.append(_Layer(code, name, is_users))

    def layer_of(self, error: BaseException) -> str:
        """Return the name of the innermost layer in which an exception was raised."""
        name = STEP
        for code in _codes(error):
            name = self._names.get(code, name)
        return name

    def explain(self, error: BaseException) -> None:
        """Add to an exception what the layers know about it: which middleware is to blame."""
        codes = [*_codes(error)]
        inside, passed = [*self._layers], []
        for code in codes:  # from the outermost to the innermost
            if any(code is layer.code for layer in inside):
                while inside[-1].code is not code:
                    inside.pop()
                passed.append(inside.pop())
        users = [layer for layer in passed if layer.is_users]
        if isinstance(error, NoGradientError) and users:
            names = _decorated_with_no_grad(codes, users) or [layer.name for layer in users]
            error.args = (
                f"{error}. Is {' or '.join(names)} under torch.no_grad()? Only its own work may be",
            )
        raised_in = passed[-1].code if passed else None
        if (
            isinstance(error, TypeError | ValueError)
            and "unpack" in str(error)
            and inside
            and inside[-1].is_users
            and codes
            and (raised_in is None or codes[-1] is raised_in)
        ):
            error.add_note(
                f"{inside[-1].name} must return (state, out), and has returned something else: "
                "write return state, out"
            )


def _codes(error: BaseException) -> Iterator[CodeType]:
    """Yield the code of each frame of a traceback, from the outermost to the innermost."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _decorated_with_no_grad(codes: list[CodeType], layers: list[_Layer]) -> list[str]:
    """Return the names of the layers that ``torch.no_grad()`` decorates."""
    return [
        layer.name
        for outside, inside in itertools.pairwise(codes)
        if outside.co_filename == _NO_GRAD
        for layer in layers
        if layer.code is inside
    ]
