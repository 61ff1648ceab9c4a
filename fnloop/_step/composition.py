"""What can be known to be wrong when a step is composed, or from the first reply of a step."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from fnloop._core.call import name_of
from fnloop._core.carry import TBPTT
from fnloop._core.middleware import Middleware
from fnloop._core.state import TrainState
from fnloop._core.torchmetrics import COLLECTION_HINT, names_in
from fnloop._core.types import RINGS, Output
from fnloop._display.checks import describe
from fnloop._step.pieces import RETRY
from fnloop._step.update import CLOSURE, CREATE_GRAPH, OPTIMIZER

__all__ = [
    "check_around",
    "check_loss_fn",
    "check_middleware",
    "check_step_reply",
    "in_order",
    "is_guard",
    "is_ours",
    "rings_of",
    "total_in",
    "window_in",
]


def is_ours(member: Middleware) -> bool:
    """Return whether a middleware comes with fnloop."""
    return member.call is not None and (member.call.factory.__module__ or "").startswith("fnloop.")


def is_guard(member: Middleware) -> bool:
    """Return whether a middleware of fnloop's may leave updates out."""
    return member.name in ("skip_nonfinite", "spike_guard") or (
        member.name == "amp" and member.gradient is not None  # in fp16
    )


def rings_of(listed: Sequence[Middleware]) -> list[tuple[str, list[str]]]:
    """Return what acts in each ring of a pipeline, in its order, the innermost ring first."""
    own = {"gradient": ["backward"], "update": [OPTIMIZER]}
    acting = {
        ring: [repr(m) for m in in_order(listed, ring) if getattr(m, ring) is not None]
        for ring in RINGS
    }
    acting["forward"] += [f"{m!r} in evaluation" for m in listed if m.evaluation is not None]
    return [
        (ring, own.get(ring, []) + names) for ring, names in acting.items() if names or ring in own
    ]


def check_around(
    listed: Sequence[Middleware],
    ignored: Sequence[str],
    explain: Callable[[Middleware, str, Sequence[str]], str],
) -> None:
    """Raise if a step that makes its updates by itself would ignore a middleware around it.

    Args:
        listed: the middleware.
        ignored: the rings, and other parts of a middleware, that it would ignore.
        explain: returns the message, from a middleware, what it does, and those of its parts.

    Raises:
        ValueError: it would.
    """
    for member in listed:
        found = [part for part in ignored if getattr(member, part) is not None]
        acts = None
        if "loss_fn" in found:
            acts = "replaces the loss function"
        elif found:
            acts = f"acts in the {found[0]} ring"
        elif member.window > 1:
            acts = "takes windows"
        elif member.name in (CLOSURE, CREATE_GRAPH):
            acts = "says how the optimizer is called"
        if acts is not None:
            raise ValueError(explain(member, acts, found))


def check_middleware(listed: Sequence[Middleware]) -> None:
    """Raise unless these middleware can be together.

    Raises:
        TypeError: something is not a middleware.
        ValueError: two have one name or report one, both take windows, or their order makes no
            sense.
    """
    for member in listed:
        if not isinstance(member, Middleware):
            _fail_as_member(member)
    names = [member.name for member in listed]
    for name in names:
        if names.count(name) > 1:
            twice = [m for m in listed if m.name == name]
            raise ValueError(
                f"{' and '.join(map(repr, twice))} have one name, {name!r}, and would share what "
                f"they keep in state.slots. Leave one out{_other_name(twice[-1])}."
            )
    windowed = [m for m in listed if m.window > 1]
    if len(windowed) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, windowed))} both take several batches at once. Leave one out."
        )
    for a, b in itertools.combinations(listed, 2):
        _check_names(a, b)
    for member in listed:
        if member.check is not None:
            member.check(listed)


def _other_name(member: Middleware) -> str:
    """Return what else to do about a name, if the factory of the middleware takes one."""
    if member.call is None or "name" not in inspect.signature(member.call.factory).parameters:
        return ""
    return ', or give one another name: name="..."'


def _check_names(a: Middleware, b: Middleware) -> None:
    """Raise ValueError if two middleware are known to report one name, for one loader."""
    mine, its = _names_of(a), _names_of(b)
    if (both := mine.keys() & its.keys()) and _loaders_meet(_loaders_of(a), _loaders_of(b)):
        name = min(both)
        raise ValueError(
            f"{a!r} and {b!r} both report {name!r}: rename one"
            f"{COLLECTION_HINT if mine[name] or its[name] else ''}"
        )


def _names_of(member: Middleware) -> dict[str, bool]:
    """Return the names that ``metric`` and ``derive`` were given: whether a collection has them."""
    if member.call is None or not member.name.startswith(("metric(", "derive(")):
        return {}
    found = {name: True for shared in member.call.args for name in names_in(shared)}
    return found | {name: False for name, value in member.call.kwargs.items() if callable(value)}


def _loaders_of(member: Middleware) -> set[str]:
    """Return the names of the loaders that a middleware is for; "" is any that is evaluated."""
    if member.loaders:
        return {*member.loaders}
    if member.evaluation is not None:
        return {""}
    return {"train"} if member.loss is not None else {"train", ""}


def _loaders_meet(a: set[str], b: set[str]) -> bool:
    return bool(a & b or ("" in a and b != {"train"}) or ("" in b and a != {"train"}))


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
    kind = member if isinstance(member, type) else type(member)
    if kind.__module__.startswith("fnloop._hooks."):
        typed = f"{name_of(member)}{'(...)' if isinstance(member, type) else ''}"
        raise TypeError(
            f"pipeline expects middleware; {typed} is a hook: write fit(..., hooks=({typed},))"
        )
    hint = f" A loss function goes into the second call: pipeline(...)({name})."
    raise TypeError(
        f"pipeline expects middleware, such as clip(1.0); got {describe(member)}."
        f"{hint if callable(member) else ''}"
    )


# Names of the arguments of a loss function that were written in the wrong order.
_MODELS, _BATCHES = ("model", "net", "network", "module"), ("batch", "data", "inputs", "sample")


def check_loss_fn(loss_fn: object, carries: bool = False) -> None:
    """Raise TypeError unless this is a function of a model and a batch, and of a carry if asked."""
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
            signature.bind(*(None,) * (3 if carries else 2))
        except TypeError as error:
            taken = (
                "with tbptt a loss function takes (model, batch, carry)"
                if carries
                else ("a loss function takes (model, batch)")
            )
            name = name_of(loss_fn)
            raise TypeError(f"{taken}, but {name} takes {signature}") from error
        first, second = [*signature.parameters, "", ""][:2]
        if first in _BATCHES and second in _MODELS:
            raise TypeError(
                f"a loss function takes (model, batch), but {name_of(loss_fn)} takes {signature}: "
                f"write ({second}, {first})"
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


_ORDER = {
    # They say to others what to do: last, once for each update; and replay looks at that.
    "step": {"plateau": 1, "replay": 1, TBPTT: 2},
    "gradient": {"microbatch": -2, RETRY: -1},  # they are about backward alone: first
}


def in_order(members: Sequence[Middleware], ring: str) -> list[Middleware]:
    """Return middleware in their order in a ring: as listed, but for some that come first or last.

    Only those of them that act in the ring matter.
    """
    order = _ORDER.get(ring, {})
    return sorted(members, key=lambda member: order.get(member.name, 0))


def total_in(members: Iterable[Middleware]) -> int | None:
    """Return the samples of an update in all processes together, if a middleware says so."""
    return next((m.total for m in members if m.total is not None), None)


def window_in(epoch: int, members: Iterable[Middleware], most: int) -> int:
    """Return how many batches one call of a step takes in an epoch; ``most`` if it never varies."""
    windows = next((m.windows for m in members if m.windows), None)
    if windows is None:
        return most
    begun = [first for first in windows if first <= epoch]
    return windows[max(begun)] if begun else 1
