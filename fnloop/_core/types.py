"""The vocabulary: what a loss function, a step, an output and a middleware are.

A *step* is ``(state, batch) -> (state, Output)`` at every layer. A *middleware* wraps a step and gives a step. Which
steps it wraps is decided by its *ring*, and ``pipeline`` keeps the listed order within a ring:

    ring       wraps                                          sees
    forward    the loss function, in training and evaluation  the batch; then loss, aux, metrics
    loss       forward, in training only                      the scalar that backward starts from
    gradient   backward                                       gradients, in the parameters' .grad
    update     the optimizer's step                           the new parameters
    device     all of the above                               only device work, no host values
    step       everything                                     counters, the host

Nothing here knows about states or models: see ``_state`` for the record and ``_pipeline`` for the composition.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import attrs
from torch import Tensor, nn

from fnloop._display import checks, html

__all__ = [
    "RINGS",
    "Batch",
    "Call",
    "LossFn",
    "Metric",
    "Middleware",
    "Output",
    "Step",
    "Wrap",
    "middleware",
    "name_of",
]

Batch = Any
State = TypeVar("State")
RINGS = ("forward", "loss", "gradient", "update", "device", "step")


class LossFn(Protocol):
    """What a user writes: the mean loss of a batch, or ``(loss, aux)``."""

    def __call__(
        self, model: nn.Module, batch: Batch, /
    ) -> Tensor | tuple[Tensor, Mapping[str, Any]]:
        """Return the mean loss over the items of ``batch``, a scalar, and what else is worth knowing (``aux``).

        ``aux["weight"]`` overrides the number of items that the loss is the mean of (by default the leading dimension
        of the batch): an int, or a scalar tensor on the device such as a token count. An int of 0 leaves the batch out, and
        no update is made if that leaves none of its window. A tensor of 0 adds nothing to the gradient, but the update is
        made, with a gradient of zero if all are 0: to leave it out, the host would have to wait for the device. NaN, infinite
        and negative tensors count as 0, and the next report raises a ValueError that names them.
        """
        ...


class Step(Protocol[State]):
    """``(state, batch) -> (state, Output)``, at every layer of a pipeline."""

    def __call__(self, state: State, batch: Batch, /) -> tuple[State, Output]: ...


Wrap = Callable[[Step], Step]


class Metric(Protocol):
    """A monoid: ``combine`` over batches, windows and processes, ``compute`` once."""

    def combine(self, other: Any, /) -> Any:
        """Return the metric of both; neither is changed."""
        ...

    def compute(self) -> float:
        """Return the value. This is the one place that reads from the device."""
        ...


@attrs.frozen(eq=False, repr=False, slots=False)
class Output:
    """What a step has found out about a batch (or about a window of them).

    Args:
        loss: the mean loss, a scalar tensor; detached once backward has run.
        weight: the number of items that ``loss`` is the mean of; an int, or a scalar tensor on the device.
        aux: what the loss function returned beside the loss (of the last batch, if there was a window of them).
        metrics: name to metric.
        skip: why this update is to be left out, or None. A middleware sets it; no update follows then.

    Example:
        >>> import torch
        >>> Output(torch.tensor(0.5), weight=32, aux={"output": torch.zeros(32, 10)})
        Output(loss=0.5, weight=32, aux=[output], metrics=[])
    """

    loss: Tensor  # shape=()
    weight: int | Tensor
    aux: Mapping[str, Any] = attrs.field(factory=dict)
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)
    skip: str | None = None

    def __repr__(self) -> str:
        skip = f", skip={self.skip!r}" if self.skip else ""
        weight = _plain(self.weight)
        aux, metrics = ", ".join(self.aux), ", ".join(self.metrics)
        return f"Output(loss={float(self.loss):.6g}, weight={weight}, aux=[{aux}], metrics=[{metrics}]{skip})"

    def _repr_html_(self) -> str:
        shown = {"loss": html.number(float(self.loss)), "weight": html.number(_plain(self.weight))}
        shown |= {name: html.number(metric.compute()) for name, metric in self.metrics.items()}
        shown |= {f"aux[{name!r}]": html.described(value) for name, value in self.aux.items()}
        return html.facts("Output", shown | ({"skip": self.skip} if self.skip else {}))


def _plain(weight: int | Tensor) -> float:
    value = float(weight)
    return int(value) if value.is_integer() else value


def name_of(value: Any) -> str:
    """Show a setting as it was typed: a function by its name, anything else by its repr."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return value.__name__
    if isinstance(value, functools.partial):
        return Call(value.func, value.args, value.keywords).__repr__()
    return repr(value)


@attrs.frozen(repr=False)
class Call:
    """A call as it was typed: how a composed thing shows itself, compares and pickles."""

    factory: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        settings = [
            *map(name_of, self.args),
            *(f"{k}={name_of(v)}" for k, v in self.kwargs.items()),
        ]
        return f"{name_of(self.factory)}({', '.join(settings)})"

    def __call__(self) -> Any:
        return self.factory(*self.args, **self.kwargs)


@attrs.frozen(repr=False, eq=False)
class Middleware:
    """A transform of steps: for each ring it acts in, a function that takes a step and returns one.

    Most are made with the decorator :func:`middleware`. Write the record itself where a middleware acts in several
    rings, keeps something in ``state.slots[name]``, or takes several batches at once.

    Args:
        name: what its slot and its errors are called; no two in a pipeline may have the same.
        forward, loss, gradient, update, device, step: ``step -> step`` for that ring, or None.
        init: ``state -> value`` that makes its slot ``state.slots[name]``, or None if it has none.
        window: how many batches one call of the step takes.
        loss_fn: ``loss function -> loss function``, applied once when a step is made, or None.
        check: is given all middleware of a pipeline when it is composed, and raises if they can't be together; or None.
        call: the call that made it, set by :func:`middleware`; equality, repr and pickling go by it.

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
    init: Callable[[Any], Any] | None = None
    window: int = 1
    loss_fn: Callable[[LossFn], LossFn] | None = attrs.field(default=None, kw_only=True)
    check: Callable[[Sequence[Middleware]], None] | None = attrs.field(default=None, kw_only=True)
    call: Call | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.text("Middleware", "name", self.name, "what its slot and its errors are called")
        owner = f"Middleware({self.name!r})"
        for ring in RINGS:
            if (wrap := getattr(self, ring)) is not None:
                checks.function(owner, ring, wrap, "a function step -> step, or None", 1, also=type)
        if self.init is not None:
            checks.function(
                owner,
                "init",
                self.init,
                "a function state -> what its slot holds, or None",
                1,
                also=type,
            )
        if self.loss_fn is not None:
            checks.function(
                owner,
                "loss_fn",
                self.loss_fn,
                "a function loss function -> loss function, or None",
                1,
                also=type,
            )
        if self.check is not None:
            checks.function(
                owner, "check", self.check, "a function of all middleware of a pipeline, or None", 1
            )
        if self.call is not None:
            checks.instance(
                owner,
                "call",
                self.call,
                Call,
                "the call that made it, which middleware() sets, or None",
            )
        checks.integer(owner, "window", self.window, "the batches that one call of the step takes")

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in attrs.fields(Middleware) if f.name != "call"}

    def __repr__(self) -> str:
        if self.call:
            return repr(self.call)
        given = {
            k: v
            for k, v in self._fields().items()
            if k != "name" and v is not None and (k, v) != ("window", 1)
        }
        return repr(Call(Middleware, (self.name,), given))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Middleware):
            return NotImplemented
        if self.call is None or other.call is None:
            return self.call == other.call and self._fields() == other._fields()
        return self.name == other.name and self.call == other.call

    def __hash__(self) -> int:
        return hash((self.name, self.call and self.call.factory))

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.call, ()) if self.call else (_remake, (self._fields(),))


def _remake(fields: Mapping[str, Any]) -> Middleware:
    return Middleware(**fields)


def middleware(ring: str) -> Callable[[Callable[..., Any]], Callable[..., Middleware]]:
    """Turn a function of settings into a factory of middleware for one ring.

    The function takes the settings and returns ``wrap``, which takes a step and returns one. It may also return a
    :class:`Middleware`, where there is more to say than one wrap in one ring.

    Args:
        ring: "forward", "loss", "gradient", "update", "device" or "step".

    Returns:
        A decorator. What it decorates returns a :class:`Middleware` that prints as the call that made it, is equal to
        another from the same call, and pickles.

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
    if not isinstance(ring, str) or ring not in RINGS:
        given = (
            f"the function {ring.__name__}"
            if isinstance(ring, types.FunctionType)
            else checks.described(ring)
        )
        raise ValueError(
            f"middleware() expects a ring, one of {', '.join(RINGS)}; got {given}. "
            f'Write @middleware("gradient") above a function of settings that returns step -> step.'
        )

    def decorate(factory: Callable[..., Any]) -> Callable[..., Middleware]:
        if not callable(factory) or isinstance(factory, type | nn.Module):
            raise TypeError(
                f'middleware("{ring}") decorates a function of settings that returns step -> step; '
                f"got {checks.described(factory)}"
            )

        @functools.wraps(factory)
        def make(*args: Any, **kwargs: Any) -> Middleware:
            made: Any = factory(*args, **kwargs)
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

        make.is_middleware_factory = True  # type: ignore[attr-defined]  # so that pipeline(clip) can say what is missing
        return make

    return decorate
