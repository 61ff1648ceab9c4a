"""The first reply of a user's middleware is checked; from then on, its step is called directly."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.types import EVALUATION, Batch, Output, Step
from fnloop._step.composition import check_step_reply
from fnloop._step.engine import engine_of

__all__ = ["Replaceable", "calls_noted", "checked_once"]

Replaceable = (
    Any  # a functools.partial, whose function can be replaced; its __setstate__ is untyped
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
    vars(checked).update(getattr(step, "__dict__", {}))
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
