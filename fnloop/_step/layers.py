"""The layers of a step: which one an exception came from, and whether one calls what it wraps."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, NamedTuple

import torch

from fnloop._backend.containers import vars_of
from fnloop._core.code import code_of
from fnloop._core.state import TrainState
from fnloop._core.types import EVALUATION, Batch, Middleware, Output, Step
from fnloop._display.checks import describe
from fnloop._step.engine import Backward, engine_of
from fnloop._step.gradients import NoGradientError

# --------------------------------------------------------------------------------------------------
# The layers of a step, by the code that runs in them: which one an exception came from.

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
        code = code_of(function) or code_of(type(function).__call__)
        if code is None:
            return
        known = self._names.get(code)  # two middleware of one factory share their code
        self._names[code] = name if known in (None, name) else f"{known} or {name}"
        if in_training:
            self._layers.append(_Layer(code, name, is_users))

    def layer_of(self, error: BaseException, otherwise: str) -> str:
        """Return the name of the innermost layer in which an exception was raised."""
        name = otherwise
        for code in _codes(error):
            name = self._names.get(code, name)
        return name

    def explain(self, error: BaseException, of_gradient: str) -> None:
        """Add to an exception what the layers know about it: which middleware is to blame."""
        codes = [*_codes(error)]
        inside, passed = [*self._layers], []
        for code in codes:  # from the outermost to the innermost
            if any(code is layer.code for layer in inside):
                while inside[-1].code is not code:
                    inside.pop()
                passed.append(inside.pop())
        users = [layer for layer in passed if layer.is_users]
        if isinstance(error, NoGradientError) and error.switched_off and users:
            names = _decorated_with_no_grad(codes, users) or [layer.name for layer in users]
            error.args = (
                f"{error}. Is {' or '.join(names)} under torch.no_grad()? Only its own work may be",
            )
        if isinstance(error, NoGradientError) and not error.switched_off and of_gradient:
            error.add_note(of_gradient)
        # Backward unpacks what the layer inside it returns.
        unpacking = {Backward.over.__code__, passed[-1].code if passed else None}
        if (
            isinstance(error, TypeError | ValueError)
            and "unpack" in str(error)
            and inside
            and inside[-1].is_users
            and codes
            and (not passed or codes[-1] in unpacking)
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


# --------------------------------------------------------------------------------------------------
# The first reply of a user's middleware is checked; from then on, its step is called directly.

Replaceable = (
    Any  # a functools.partial, whose function can be replaced; its __setstate__ is untyped
)


def check_step_reply(reply: object, name: str) -> None:
    """Raise TypeError unless a step has returned ``(state, out)``."""
    match reply:
        case (TrainState(), Output()) if type(reply) is tuple:
            return
        case tuple() | list():
            parts = ", ".join(type(part).__name__ for part in reply)
            given = f"a {type(reply).__name__} of ({parts})"
        case TrainState() | Output():
            given = f"the {type(reply).__name__} alone"
        case _:
            given = describe(reply)
    raise TypeError(
        f"{name} must return (state, out); it returned {given}. Write: return state, out"
    )


def checked_once(
    step: Step,
    member: Middleware,
    ring: str,
    noted: Callable[[], AbstractContextManager[list[int]]],
) -> Step:
    """Return a user's step whose first reply is checked.

    From then on it is called without a frame in between.

    Args:
        step: the step that the middleware has made.
        member: the middleware.
        ring: the ring in which it acts.
        noted: notes the calls of the loss function, within a ``with`` block.
    """

    def first(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        with noted() as calls:
            reply = step(state, batch)
        check_step_reply(reply, f"{member!r}, in its {ring} ring,")
        if not calls and reply[1].skip is None and engine_of(state).calls_every_batch:
            done = "evaluated" if ring == EVALUATION else "trained"
            raise ValueError(
                f"{member!r} did not call the step that it wraps, so nothing was {done}: "
                "write state, out = step(state, batch); or, to skip an update, return an "
                'Output with skip="why"'
            )
        checked.__setstate__((step, (), {}, vars(checked)))
        return reply

    checked: Replaceable = functools.partial(first)
    vars(checked).update(vars_of(step))
    return checked


@contextlib.contextmanager
def calls_noted(innermost: Replaceable) -> Iterator[list[int]]:
    """Note the calls of a step, which is a ``functools.partial``, within a ``with`` block."""
    calls: list[int] = []
    called = innermost.func

    def noting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        calls.append(1)
        return called(state, batch)

    innermost.__setstate__((noting, (), {}, None))
    try:
        yield calls
    finally:
        innermost.__setstate__((called, (), {}, None))
