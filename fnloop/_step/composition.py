"""What can be known to be wrong when a step is composed, or from the first reply of a step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence

from torch import nn

from fnloop._core.call import name_of
from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.types import Output
from fnloop._display.checks import describe

__all__ = ["check_loss_fn", "check_middleware", "check_step_reply", "is_ours"]


def is_ours(member: Middleware) -> bool:
    """Return whether a middleware comes with fnloop."""
    return member.call is not None and (member.call.factory.__module__ or "").startswith("fnloop.")


def check_middleware(listed: Sequence[Middleware]) -> None:
    """Raise unless these middleware can be together.

    Raises:
        TypeError: something is not a middleware.
        ValueError: two have one name, both take windows, or their order makes no sense.
    """
    for member in listed:
        if not isinstance(member, Middleware):
            _fail_as_member(member)
    names = [member.name for member in listed]
    for name in names:
        if names.count(name) > 1:
            twice = " and ".join(repr(m) for m in listed if m.name == name)
            raise ValueError(
                f"{twice} have one name, {name!r}, and would share what they keep in state.slots. "
                "Leave one out."
            )
    windowed = [m for m in listed if m.window > 1]
    if len(windowed) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, windowed))} both take several batches at once. Leave one out."
        )
    for member in listed:
        if member.check is not None:
            member.check(listed)


def _fail_as_member(member: object) -> None:
    name = getattr(member, "__name__", type(member).__name__)
    if getattr(member, "is_middleware_factory", False):
        raise TypeError(
            f"pipeline expects middleware; {name} is a function that makes one. "
            f"Call it: {name}(...)"
        )
    if isinstance(getattr(member, "middleware", None), tuple):
        raise TypeError(
            f"pipeline expects middleware, got {member!r}. To join two, write "
            "pipeline(*p.middleware, ...)"
        )
    hint = f" A loss function goes into the second call: pipeline(...)({name})."
    raise TypeError(
        f"pipeline expects middleware, such as clip(1.0); got {describe(member)}."
        f"{hint if callable(member) else ''}"
    )


def check_loss_fn(loss_fn: object) -> None:
    """Raise TypeError unless this is a function of a model and a batch."""
    if isinstance(loss_fn, Middleware):
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a loss function; got the middleware {loss_fn!r}. "
            f"List it in the first call: pipeline({loss_fn!r}, ...)"
        )
    kind = loss_fn if isinstance(loss_fn, type) else type(loss_fn)
    if issubclass(kind, nn.Module):
        name = kind.__name__
        raise TypeError(
            "pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got the module "
            f"{name}. For batches (x, y) and a criterion, write supervised({name}(...)); "
            "otherwise write def loss_fn(model, batch): ..."
        )
    if not callable(loss_fn):
        raise TypeError(
            "pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got "
            f"{describe(loss_fn)}"
        )
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"a loss function takes (model, batch), but {name_of(loss_fn)} takes {signature}"
            ) from error


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
