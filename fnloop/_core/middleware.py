"""Middleware: a transform of steps as a record, and the decorator that makes one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fnloop._core.call import Call
from fnloop._core.types import EVALUATION, RINGS, LossFn, Wrap
from fnloop._display import checks

__all__ = ["Middleware", "middleware"]

Report = Callable[[str | None, Mapping[str, float]], Mapping[str, float]]

# The functions of a middleware that are not a ring: what each is, and how many arguments it takes.
_PARTS = {
    "init": ("a function state -> what its slot holds, or None", 1),
    "loss_fn": ("a function loss function -> loss function, or None", 1),
    "check": ("a function of all middleware of a pipeline, or None", 1),
    "check_state": ("a function (state, all middleware of a pipeline), or None", 2),
    "report": ("a function (loader, numbers) -> more numbers by name, or None", 2),
}


@attrs.frozen(repr=False, eq=False)
class Middleware:
    """A transform of steps: for each ring that it acts in, a function from a step to a step.

    Most are made with the decorator :func:`middleware`. Write the record itself for a middleware
    that acts in several rings, keeps something in ``state.slots[name]``, or takes several batches
    at once.

    Args:
        name: the name of its slot, used in errors too; it must be unique in a pipeline.
        forward, loss, gradient, update, device, step: ``step -> step`` for that ring, or None.
        init: ``state -> value`` that makes its slot ``state.slots[name]``, or None if it has no
            slot.
        window: how many batches one call of the step takes.
        windows: by the first epoch, the batches that one call takes from then on in a run, if that
            varies; ``window`` is the most.
        total: the samples of one update of a run, in all processes together, where that says how
            many batches it takes; ``window`` is the most. Or None.
        loss_fn: ``loss function -> loss function``, applied once when a step is made, or None.
        check: called with all middleware of a pipeline when it is composed; raises if they are
            incompatible; or None.
        check_state: called with a state and all middleware of the pipeline, when a step first meets
            the state's model; raises if they are incompatible; or None.
        evaluation: ``step -> step`` around the forward ring, in evaluation only, or None.
        report: ``(loader, numbers) -> more numbers``, by name, for a report; or None. It is called
            for each loader of a report: "train", "recent", "valid", ..., or None in a bare
            ``evaluate``; ``numbers`` are those of the loader, without the prefix. Names that are
            there already are refused.
        loaders: names of loaders that it is for; a run without one of them is refused.
        per_phase: whether its slot is made again when a phase of a run begins.
        call: the call that made it, set by :func:`middleware`; decides equality, repr and pickling.

    Raises:
        TypeError: a part of it is not a function, or the name is not a str.
        ValueError: the name is empty, or the window is not an int of at least 1.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def counted(step):
        ...     def count(state, batch):
        ...         state.slots["calls"].append(len(batch))
        ...         return step(state, batch)
        ...     return count
        >>> step = fl.pipeline(Middleware("calls", step=counted, init=lambda state: []))(toy_loss)
        >>> state, out = step(toy(), torch.ones(3))
        >>> state.slots["calls"]
        [3]
    """

    name: str
    forward: Wrap | None = None
    loss: Wrap | None = None
    gradient: Wrap | None = None
    update: Wrap | None = None
    device: Wrap | None = None
    step: Wrap | None = None
    init: Callable[[Any], object] | None = None
    window: int = 1
    windows: Mapping[int, int] = attrs.field(factory=dict, kw_only=True)
    total: int | None = attrs.field(default=None, kw_only=True)
    loss_fn: Callable[[LossFn], LossFn] | None = attrs.field(default=None, kw_only=True)
    check: Callable[[Sequence[Middleware]], None] | None = attrs.field(default=None, kw_only=True)
    check_state: Callable[..., None] | None = attrs.field(default=None, kw_only=True)
    evaluation: Wrap | None = attrs.field(default=None, kw_only=True)
    report: Report | None = attrs.field(default=None, kw_only=True)
    loaders: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    per_phase: bool = attrs.field(default=False, kw_only=True)
    call: Call | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.text("Middleware", "name", self.name, "the name of its slot, used in errors too")
        owner = f"Middleware({self.name!r})"
        for ring in (*RINGS, EVALUATION):
            if (wrap := getattr(self, ring)) is not None:
                checks.function(owner, ring, wrap, "a function step -> step, or None", 1, also=type)
        for part, (meaning, arguments) in _PARTS.items():
            if (given := getattr(self, part)) is not None:
                also = () if part.startswith("check") else type
                checks.function(owner, part, given, meaning, arguments, also=also)
        if self.call is not None:
            meaning = "the call that made it, which middleware() sets, or None"
            checks.instance(owner, "call", self.call, Call, meaning)
        for name in checks.instance(owner, "loaders", self.loaders, tuple, "a tuple of names"):
            checks.text(owner, "loaders", name, "names of loaders")
        checks.integer(owner, "window", self.window, "the batches that one call of the step takes")
        if self.total is not None:
            checks.integer(owner, "total", self.total, "the samples of one update, or None")

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in attrs.fields(Middleware) if f.name != "call"}

    def __repr__(self) -> str:
        if self.call:
            return repr(self.call)
        defaults: dict[str, object] = {"name": self.name, "window": 1, "windows": {}}
        defaults |= {"loaders": (), "per_phase": False}
        given = {k: v for k, v in self._fields().items() if v is not None and v != defaults.get(k)}
        return repr(Call(Middleware, (self.name,), given))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Middleware):
            return NotImplemented
        if self.call is None or other.call is None:
            return self.call == other.call and self._fields() == other._fields()
        return self.name == other.name and self.call == other.call

    def __hash__(self) -> int:
        return hash((self.name, self.call and self.call.factory))

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (self.call, ()) if self.call else (_remake, (self._fields(),))


def _remake(fields: Mapping[str, Any]) -> Middleware:
    return Middleware(**fields)


def middleware(ring: str) -> Callable[[Callable[..., object]], Callable[..., Middleware]]:
    """Turn a function of settings into a factory of middleware for one ring.

    The function takes the settings and returns ``wrap``, which takes a step and returns one. It may
    also return a :class:`Middleware`, if it acts in several rings or needs a slot.

    Args:
        ring: "forward", "loss", "gradient", "update", "device" or "step"; or "evaluation", around
            the forward ring in evaluation only.

    Returns:
        A decorator. The decorated function returns a :class:`Middleware` that prints as the call
        that made it, is equal to another from the same call, and can be pickled.

    Raises:
        ValueError: there is no such ring.

    Example:
        >>> import fnloop as fl, torch
        >>> @fl.middleware("gradient")
        ... def noise(std):
        ...     def wrap(step):
        ...         def noisy(state, batch):
        ...             state, out = step(state, batch)
        ...             for p in state.model.parameters():
        ...                 if p.grad is not None:
        ...                     p.grad.add_(torch.randn_like(p), alpha=std)
        ...             return state, out
        ...         return noisy
        ...     return wrap
        >>> noise(0.1)
        noise(0.1)
        >>> noise(0.1) == noise(0.1), noise(0.1) == noise(0.2)
        (True, False)
    """
    if not isinstance(ring, str) or ring not in (*RINGS, EVALUATION):
        function = isinstance(ring, types.FunctionType)
        given = f"the function {ring.__name__}" if function else checks.describe(ring)
        raise ValueError(
            f"middleware() expects {EVALUATION} or a ring, one of {', '.join(RINGS)}; got {given}. "
            f'Write @middleware("gradient") above a function of settings that returns step -> step.'
        )

    def decorate(factory: Callable[..., object]) -> Callable[..., Middleware]:
        if not callable(factory) or isinstance(factory, type | nn.Module):
            raise TypeError(
                f'middleware("{ring}") decorates a function of settings that returns step -> step; '
                f"got {checks.describe(factory)}"
            )

        @functools.wraps(factory)
        def make(*args: object, **kwargs: object) -> Middleware:
            made = factory(*args, **kwargs)
            call = Call(make, args, kwargs)
            if isinstance(made, Middleware):
                return attrs.evolve(made, call=call)
            if not callable(made):
                raise TypeError(
                    f"{call!r} must return a function step -> step, but it returned {made!r}. "
                    f"Did you forget 'return wrap' at its end?"
                )
            wraps: dict[str, Any] = {ring: made}
            return Middleware(factory.__name__, **wraps, call=call)

        # pipeline(clip) looks for this to say that the call is missing
        vars(make)["is_middleware_factory"] = True
        return make

    return decorate
