"""The vocabulary: losses, steps, outputs, metrics, and middleware, which transform steps."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, Self

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded
from fnloop._core.parts import Part, State
from fnloop._core.saved import Pending, kind_name
from fnloop._display import checks, reprs

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# The vocabulary: what a loss function, a step, an output and a metric are.
#
# A *step* is `(state, batch) -> (state, Output)` at every layer. A *middleware* wraps a step and
# returns a step. Its *ring* decides which steps it wraps (the table is in `Middleware`), and
# `pipeline` keeps the listed order within a ring.
#
# This module knows nothing about states or models. `state` defines the record, `_step.pipeline` the
# composition.

Batch = Any  # a matter between a loader and a loss function
Aux = Mapping[str, Any]  # what a loss function returns besides the loss
Settings = ParamSpec("Settings")  # the arguments of a factory, which what decorates it keeps
Ring = Literal["forward", "evaluation", "loss", "gradient", "update", "device", "step"]
RINGS = ("forward", "loss", "gradient", "update", "device", "step")
EVALUATION = "evaluation"  # the ring that an update does not pass through


class LossFn(Protocol):
    """The type of a loss function, ``(model, batch) -> loss`` or ``(loss, aux)``, for annotations.

    You write one, or :func:`supervised` makes it. It returns the mean loss of a batch, and may add
    a mapping ``aux``. To skip a batch, it returns ``skip(reason)``. In an evaluation it may
    return ``(None, aux)``, for every batch: then there are metrics, and no loss.

    Example:
        >>> import fnloop as fl, torch
        >>> def squared(model: torch.nn.Linear, batch: torch.Tensor) -> torch.Tensor:
        ...     return model(batch).square().mean()
        >>> def scaled(loss_fn: fl.LossFn, factor: float) -> fl.Step:
        ...     return fl.pipeline(fl.clip(factor))(loss_fn)
        >>> scaled(squared, 2.0)
        pipeline(clip(2.0))(squared)
    """

    # Not nn.Module: a function may ask for a class of its own.
    def __call__(self, model: Any, batch: Batch, /) -> Tensor | tuple[Tensor | None, Aux] | Skip:
        """Return the mean loss over the items of ``batch``, and optionally a mapping ``aux``.

        ``aux["weight"]`` overrides the number of items that the loss is the mean of. By default
        that is the leading dimension of the batch. It is an int, or a scalar tensor on the device
        such as a token count.

        An int of 0 skips the batch. If every batch of a window is skipped, no update is made. A
        tensor of 0 adds nothing to the gradient, but the update is made, with a gradient of zero if
        all weights are 0: to skip it, the host would have to wait for the device. NaN, infinite and
        negative tensors count as 0, and the next report raises a ValueError.
        """
        ...


class Step(Protocol):
    """The type of a step, ``(state, batch) -> (state, Output)``, for annotations.

    What ``pipeline(...)(loss_fn)`` returns is one, and so is what a middleware wraps and what it
    returns. A hook is a ``Callable[[TrainState], TrainState]``, or a :class:`Hook`.

    Example:
        >>> import fnloop as fl, torch
        >>> @fl.middleware("gradient")
        ... def halved(factor: float = 0.5):
        ...     def wrap(step: fl.Step) -> fl.Step:
        ...         def halving(state: fl.TrainState, batch: torch.Tensor):
        ...             state, out = step(state, batch)
        ...             for p in state.model.parameters():
        ...                 if p.grad is not None:
        ...                     p.grad.mul_(factor)
        ...             return state, out
        ...         return halving
        ...     return wrap
        >>> halved(factor=0.25)
        halved(factor=0.25)
    """

    def __call__(self, state: State, batch: Batch, /) -> tuple[State, Output]: ...


class Wrap(Protocol):
    """The type of a function that takes a step and returns a step, for annotations.

    Example:
        >>> import fnloop as fl
        >>> def noting(notes: list) -> Wrap:
        ...     def wrap(step: fl.Step) -> fl.Step:
        ...         def noted(state: fl.TrainState, batch: Batch):
        ...             notes.append(state.step)
        ...             return step(state, batch)
        ...         return noted
        ...     return wrap
        >>> fl.Middleware("noting", step=noting([]))
        Middleware('noting', step=wrap)
    """

    def __call__(self, step: Step, /) -> Step: ...


class Metric(Protocol):
    """A value that can be combined over batches, windows and processes in any grouping.

    Example:
        >>> import attrs
        >>> @attrs.frozen
        ... class Largest:
        ...     value: float
        ...     def combine(self, other):
        ...         return Largest(max(self.value, other.value))
        ...     def compute(self):
        ...         return self.value
        >>> found: Metric = Largest(1.0)
        >>> found.combine(Largest(3.0)).compute()
        3.0
    """

    def combine(self, other: Self, /) -> Self:
        """Return the metric of both parts. Neither is changed."""
        ...

    def compute(self) -> float:
        """Return the value. Only this method reads from the device.

        A metric with several values returns a mapping, from names to numbers.
        """
        ...


def values_of(name: str, metric: Metric) -> Mapping[str, Any]:
    """Compute a metric. Return its values by the names under which they are reported.

    A metric with several values is reported as ``name/value``. If it has an attribute ``key``, and
    was kept under that name, its values stand alone: it is left out of their names.
    """
    __tracebackhide__ = True
    value: object = metric.compute()
    if isinstance(value, float) or not isinstance(value, Mapping):
        return {name: value}
    key = getattr(metric, "key", None)
    prefix = f"{name}/"
    if key is not None and f"/{name}".endswith(f"/{key}"):
        prefix = name.removesuffix(key)
    return {f"{prefix}{part}": number for part, number in value.items()}


@attrs.frozen(eq=False, repr=False, slots=False)
class Output:
    """What a step returns with the new state: loss, weight, aux and metrics of a batch or a window.

    Args:
        loss: the mean loss, a scalar tensor; detached once backward has run. None in an evaluation
            whose loss function returns ``(None, aux)``.
        weight: the number of items that ``loss`` is the mean of; an int, or a scalar tensor on the
            device. Of samples that several processes compute parts of, it is a share.
        aux: what the loss function returned with the loss; for a window, the aux of its last batch.
        metrics: name to metric.
        skip: why this update is skipped, or None. A middleware sets it. Such an update
            counts in ``state.skipped``, and changes no other counter.

    Example:
        >>> import torch
        >>> Output(torch.tensor(0.5), weight=32, aux={"output": torch.zeros(32, 10)})
        Output(loss=0.5, weight=32, aux=[output], metrics=[])
    """

    loss: Tensor  # shape=()
    weight: float | Tensor
    aux: Aux = attrs.field(factory=dict)
    metrics: Mapping[str, Metric] = attrs.field(factory=dict)
    skip: str | None = None

    def __repr__(self) -> str:
        facts = [
            f"loss={', '.join(self._losses('{:.6g}'.format))}",
            f"weight={_as_number(self.weight)}",
            f"aux=[{', '.join(self.aux)}]",
            f"metrics=[{', '.join(self.metrics)}]",
        ]
        if self.skip:
            facts.append(f"skip={self.skip!r}")
        return f"Output({', '.join(facts)})"

    def _losses(self, show: Callable[[float], str]) -> list[str]:
        """Return the loss as text: for a stack, that of each model."""
        if self.loss is None:
            return ["None"]
        values = self.loss.detach().flatten()
        return [*map(show, values[:8].tolist()), *["..."] * (len(values) > 8)]

    def _repr_html_(self) -> str:
        losses = self._losses(lambda value: reprs.format_metric("loss", value))
        shown = {
            "loss": ", ".join(losses),
            "weight": reprs.format_number(_as_number(self.weight)),
        }
        for name, metric in self.metrics.items():
            values = values_of(name, metric)
            shown |= {part: reprs.format_metric(part, value) for part, value in values.items()}
        shown |= {f"aux[{name!r}]": reprs.summarize(value) for name, value in self.aux.items()}
        return reprs.facts("Output", shown | ({"skip": self.skip} if self.skip else {}))


def _as_number(weight: float | Tensor) -> float:
    """Return a weight as an int if it is a whole number."""
    value = float(weight)
    return int(value) if value.is_integer() else value


# --------------------------------------------------------------------------------------------------
# Views: weights that a reader of a state sees instead of those that are trained.


class View:
    """Weights that a reader of a state sees instead of those that are trained.

    If the slot of a middleware is one, everything that evaluates or saves the model sees it. If it
    is the middleware's field ``view``, the evaluations of its step do.

    Write :meth:`changes` and :meth:`show`. The other methods are for weights that each process has
    by itself, and for what continues from other weights.

    Attributes:
        apart: whether the model has other weights in each process.
        beside: whether an evaluation evaluates the model too, for the field ``view``. Then the
            metrics of the view are those of the middleware's name, such as "valid/ema/loss", and
            :meth:`show` gives a model of its own.

    Example:
        >>> import copy, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Doubled(View):
        ...     beside = True
        ...     @contextlib.contextmanager
        ...     def show(self, state):
        ...         model = copy.deepcopy(state.model)
        ...         model.w.data.mul_(2)
        ...         yield model
        >>> step = fl.pipeline(fl.Middleware("doubled", view=Doubled()))(toy_loss)
        >>> state = fl.fit(step, toy(w=3.0), ([torch.ones(1)], [torch.ones(1)]), hooks=())
        >>> state.history["valid/loss"], state.history["valid/doubled/loss"]
        ((2.0,), (4.0,))
    """

    apart: bool = False
    beside: bool = False
    _kinds: ClassVar[set[str]] = set()

    def __init_subclass__(cls) -> None:
        View._kinds.add(kind_name(cls))

    @staticmethod
    def is_pending(slot: object) -> bool:
        """Return whether a slot that was restored will be a view."""
        return isinstance(slot, Pending) and slot.kind in View._kinds

    def changes(self, state: State) -> Sequence[Tensor]:
        """Return the parameters and buffers of the model that :meth:`show` gives other values.

        They get back their own bit for bit. With none, readers see the model as it is.
        """
        return ()

    def show(self, state: State) -> contextlib.AbstractContextManager[nn.Module]:
        """Show the weights within a ``with`` block. It gives the model that has them.

        If the model is :attr:`apart`, every process is here, so they may exchange weights.
        """
        return contextlib.nullcontext(state.model)

    def hand_over(self, state: State) -> None:
        """Leave in the model what the caller of a run is to see. Every process is here."""

    def take_back(self, state: State) -> None:
        """Undo :meth:`hand_over`, because training continues. Every process is here."""

    def begin_again(self, state: State) -> View | None:
        """Return what a slot holds when the model is given weights that readers have seen.

        Such as the best ones, from which training continues. None: its ``init`` makes it again.
        """
        return None


# --------------------------------------------------------------------------------------------------
# Middleware: a transform of steps as a record, and the decorator that makes one.

# Its numbers are a copy: it may add those that it computes.
Report = Callable[[str | None, dict[str, float]], Mapping[str, float]]

# The functions of a middleware that are not a ring: what each is, and how many arguments it takes.
_PARTS = {
    "init": ("a function state -> what its slot holds, or None", 1),
    "loss_fn": ("a function loss function -> loss function, or None", 1),
    "keep": ("a function state -> put back, or None", 1),
    "check": ("a function of all middleware of a pipeline, or None", 1),
    "check_state": ("a function (state, all middleware of a pipeline), or None", 2),
    "report": ("a function (loader, numbers) -> more numbers by name, or None", 2),
}
# Those that are names, and of what.
_NAMES = {
    "loaders": "loaders",
    "passes": "arguments",
    "adds": "metrics",
    "uses": "optimizers",
    "traits": "traits",
}
TRAITS = (
    *("by_closure", "carries", "commutes", "create_graph", "compiles", "counts_items"),
    *("per_phase", "repeats", "skips", "stacks", "sums", "timed"),
)


@attrs.frozen(repr=False, eq=False)
class Middleware:
    """A middleware: for each ring that it acts in, a function that takes a step and returns one.

    Most are made with the decorator :func:`middleware`. Write the record itself for a middleware
    that acts in several rings, keeps something in ``state.slots[name]``, or takes several batches
    at once. What it keeps between updates is in this slot, never in a closure, which a snapshot
    would not copy and a checkpoint would not save.

    | ring | wraps | sees |
    |---|---|---|
    | `forward` | the loss function, in both phases | the batch; then loss, aux, metrics |
    | `evaluation` | the forward ring, in evaluation only | the same |
    | `loss` | the forward ring, in training only | the scalar that backward starts from |
    | `gradient` | backward | gradients, in `.grad` |
    | `update` | the optimizer's step | the new parameters |
    | `device` | all of the above | only device work, no host values |
    | `step` | everything | counters, the host |

    Args:
        name: the name of its slot, used in errors too; it must be unique in a pipeline.
        forward, loss, gradient, update, device, step: ``step -> step`` for that ring, or None.
        init: ``state -> value`` that makes its slot ``state.slots[name]``, or None if it has no
            slot.
        window: how many batches one call of the step takes.
        windows: by the first epoch, the batches that one call takes from then on in a run, if that
            varies; ``window`` is the most.
        windows_by: "step" if ``windows`` is by the first update instead; or "epoch".
        total: the samples of one update of a run, in all processes together, where that says how
            many batches it takes; ``window`` is the most. Or None.
        loss_fn: ``loss function -> loss function``, applied once when a step is made, or None.
        passes: names of keyword arguments that its ``loss_fn`` passes to the loss function.
        check: called with all middleware of a pipeline when it is composed; raises if they are
            incompatible; or None.
        check_state: called with a state and all middleware of the pipeline, when a step first meets
            the state's model; raises if they are incompatible; or None.
        evaluation: ``step -> step`` around the forward ring, in evaluation only, or None.
        view: the weights that its evaluations see instead of the model, or beside it; or None.
        report: ``(loader, numbers) -> more numbers``, by name, for a report; or None. It is called
            for each loader of a report: "train", "recent", "valid", ..., or None in a bare
            ``evaluate``; ``numbers`` are those of the loader, without the prefix. Names that are
            there already are refused.
        adds: the names of the metrics that it adds to reports, if all of them are known: to those
            of evaluations, if it acts in them, and to those of training. A name stands for all that
            begin with it and a slash, too. Of numbers in ``passes``, those of training have each.
        monitors: the metric that it looks at, such as "valid/loss", or None.
        loaders: names of loaders that it is for; a run without one of them is refused.
        brings: the parts of checkpoints that are its own: how its slot is saved, if not as plain
            data, attrs records and objects with a ``state_dict`` are.
        keep: ``state -> put_back``, called before each update that may be left out; or None. It
            copies what the rings of the middleware change in place, and ``put_back()`` gives that
            back: if the update is skipped, if it fails before a weight has changed, or before
            ``retry_on_oom`` repeats it. For a tensor it is ``before = t.clone()``, then
            ``return lambda: t.copy_(before)``. It is called before the step ring if the middleware
            acts there, and else before the forward pass, within ``cuda_graph`` too.
        order: by ring, where it comes: below 0 inside of all that are listed, above 0 around them.
        precision: what it computes in, "bf16" or "fp16"; "" is that of the model, and None that of
            the run.
        uses: the names of the optimizers that update; none are all of them.
        traits: what else a run has to know of it, any of

            - "carries": the loss function takes and returns a carry, which is its slot, and each
              batch is as many updates as it has windows
            - "by_closure": the optimizer is given a closure; "create_graph": whose gradients have a
              graph too
            - "commutes": in the gradient ring, it multiplies gradients by one number at most, or
              looks at them, so it may act once on the sum of several batches
            - "compiles": the step of the optimizer is compiled
            - "counts_items": it uses ``state.items``, which a run then reads after each update
            - "per_phase": its slot is made again when a phase of a run begins
            - "repeats": it may call the loss function again for one batch
            - "skips": it may skip an update. One that is not of fnloop may in any case
            - "stacks": it works with a stack of models
            - "sums": it adds up the gradients of several batches, and comes next to backward, an
              ``extend.Backward``, if all that are listed before it commute
            - "timed": the times of evaluations are measured: "time/evaluate"
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
    init: Callable[[State], object] | None = None
    window: int = 1
    windows: Mapping[int, int] = attrs.field(factory=dict, kw_only=True)
    windows_by: str = attrs.field(default="epoch", kw_only=True)
    total: int | None = attrs.field(default=None, kw_only=True)
    loss_fn: Callable[[LossFn], LossFn] | None = attrs.field(default=None, kw_only=True)
    passes: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    check: Callable[[Sequence[Middleware]], None] | None = attrs.field(default=None, kw_only=True)
    check_state: Callable[..., None] | None = attrs.field(default=None, kw_only=True)
    evaluation: Wrap | None = attrs.field(default=None, kw_only=True)
    view: View | None = attrs.field(default=None, kw_only=True)
    report: Report | None = attrs.field(default=None, kw_only=True)
    adds: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    monitors: str | None = attrs.field(default=None, kw_only=True)
    loaders: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    brings: tuple[Part, ...] = attrs.field(default=(), kw_only=True)
    keep: Callable[[State], Callable[[], object]] | None = attrs.field(default=None, kw_only=True)
    order: Mapping[str, int] = attrs.field(factory=dict, kw_only=True)
    precision: str | None = attrs.field(default=None, kw_only=True)
    uses: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    traits: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    call: Call | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        checks.text("Middleware", "name", self.name, "the name of its slot, used in errors too")
        owner = f"Middleware({self.name!r})"
        for ring, wrap in self.wraps.items():
            checks.function(owner, ring, wrap, "a function step -> step, or None", 1, also=type)
        parts = attrs.asdict(self, recurse=False)
        for part, (meaning, arguments) in _PARTS.items():
            if parts[part] is not None:
                also = () if part.startswith("check") else type
                checks.function(owner, part, parts[part], meaning, arguments, also=also)
        if self.call is not None:
            meaning = "the call that made it, which middleware() sets, or None"
            checks.instance(owner, "call", self.call, Call, meaning)
        if self.view is not None:
            checks.instance(owner, "view", self.view, View, "a View, or None")
        for part, of in _NAMES.items():
            given = parts[part]
            if part == "adds" and given is None:  # they are not known
                continue
            for name in checks.instance(owner, part, given, tuple, "a tuple of names"):
                checks.text(owner, part, name, f"names of {of}")
        for trait in self.traits:
            checks.choice(owner, "traits", trait, TRAITS)
        for part in checks.instance(owner, "brings", self.brings, tuple, "a tuple of parts"):
            checks.instance(owner, "brings", part, Part, "parts, such as Part.of_slot(...)")
        if self.monitors is not None:
            checks.text(owner, "monitors", self.monitors, "the name of a metric, or None")
        checks.integer(owner, "window", self.window, "the batches that one call of the step takes")
        if self.total is not None:
            checks.integer(owner, "total", self.total, "the samples of one update, or None")

    @property
    def is_ours(self) -> bool:
        """Whether it comes with fnloop."""
        return self.call is not None and (self.call.factory.__module__ or "").startswith("fnloop.")

    @property
    def wraps(self) -> dict[str, Wrap]:
        """What it does in each ring that it acts in, by the name of the ring."""
        rings = attrs.filters.include(*RINGS, EVALUATION)
        found = attrs.asdict(self, recurse=False, filter=rings)
        return {ring: wrap for ring, wrap in found.items() if wrap is not None}

    def _fields(self) -> dict[str, Any]:
        return attrs.asdict(self, recurse=False, filter=attrs.filters.exclude("call"))

    def __repr__(self) -> str:
        if self.call:
            return repr(self.call)
        plain = Middleware(self.name)._fields()
        given = {name: value for name, value in self._fields().items() if value != plain[name]}
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


class Searching:
    """A value of a slot that skips updates until it has found its number.

    Attributes:
        overflowed: the epoch of the newest update that it has left out; -1 if none.
    """

    overflowed: int


def middleware(
    ring: Ring, *, init: Callable[[State], object] | None = None
) -> Callable[[Callable[Settings, Middleware | Wrap]], Callable[Settings, Middleware]]:
    """Make your own middleware for one ring: decorate a function of its settings.

    The function takes the settings and returns ``wrap``, which takes a step and returns one. It may
    also return a :class:`Middleware`, if it acts in several rings, or if the settings decide what
    its slot begins with.

    Args:
        ring: "forward", "loss", "gradient", "update", "device" or "step"; or "evaluation", around
            the forward ring in evaluation only.
        init: ``state -> value`` that makes its slot ``state.slots[name]``, where the name is that
            of the function; None: it has no slot. What it keeps between updates is there, and not
            in a closure, which a snapshot would not copy and a checkpoint would not save.

    Returns:
        A decorator. The decorated function returns a :class:`Middleware` that prints as the call
        that made it, is equal to another from the same call, and can be pickled.

    Raises:
        TypeError: ``init`` is not a function of the state.
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

        One that remembers the largest loss so far, in a slot:

        >>> from fnloop.testing import toy, toy_loss
        >>> @fl.middleware("update", init=lambda state: {"largest": torch.zeros(())})
        ... def worst():
        ...     def wrap(step):
        ...         def remembering(state, batch):
        ...             state, out = step(state, batch)
        ...             slot = state.slots["worst"]
        ...             slot["largest"] = torch.maximum(slot["largest"], out.loss)
        ...             return state, out
        ...         return remembering
        ...     return wrap
        >>> batches = [torch.tensor([1.0]), torch.tensor([-3.0])]
        >>> state = fl.fit(fl.pipeline(worst())(toy_loss), toy(), batches, hooks=())
        >>> state.slots["worst"]["largest"].item()               # the losses are 0 and -1 × -3
        3.0
    """
    if not isinstance(ring, str) or ring not in (*RINGS, EVALUATION):
        function = isinstance(ring, types.FunctionType)
        given = f"the function {ring.__name__}" if function else checks.describe(ring)
        raise ValueError(
            f"middleware() expects {EVALUATION} or a ring, one of {', '.join(RINGS)}; got {given}. "
            f'Write @middleware("gradient") above a function of settings that returns step -> step.'
        )
    if init is not None:
        checks.function(f'middleware("{ring}")', "init", init, _PARTS["init"][0], 1, also=type)

    def decorate(
        factory: Callable[Settings, Middleware | Wrap],
    ) -> Callable[Settings, Middleware]:
        if not callable(factory) or isinstance(factory, type | nn.Module):
            raise TypeError(
                f'middleware("{ring}") decorates a function of settings that returns step -> step; '
                f"got {checks.describe(factory)}"
            )
        if _takes_step(factory):
            name = name_of(factory)
            raise TypeError(
                f'middleware("{ring}") decorates a function of settings that returns step -> step, '
                f"but {name} takes the step itself. Put it into a function of its settings, of "
                f"none for example: def {name}(): return wrap, where wrap takes the step"
            )

        @functools.wraps(factory)
        def make(*args: Settings.args, **kwargs: Settings.kwargs) -> Middleware:
            checks.arguments(factory.__name__, factory, args, kwargs)
            args, kwargs = checks.plain(args), checks.plain(kwargs)
            made = factory(*args, **kwargs)
            call = Call(make, args, kwargs)
            if isinstance(made, Middleware):
                if init is not None:
                    raise TypeError(
                        f"{call!r} returned a Middleware, which makes its slot itself: write "
                        f'@middleware("{ring}") without init, and Middleware(..., init=...)'
                    )
                return attrs.evolve(made, call=call)
            if not callable(made):
                raise TypeError(
                    f"{call!r} must return a function step -> step, but it returned {made!r}. "
                    f"Did you forget 'return wrap' at its end?"
                )
            wraps: dict[str, Any] = {ring: made}
            return Middleware(factory.__name__, **wraps, init=init, call=call)

        # pipeline(clip) looks for this to say that the call is missing
        vars(make)["is_middleware_factory"] = True
        return make

    return decorate


def _takes_step(factory: Callable[..., object]) -> bool:
    """Return whether the only argument that a function needs is named "step"."""
    with contextlib.suppress(ValueError):  # without a signature
        parameters = inspect.signature(factory).parameters.values()
        needed = [
            p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        return needed == ["step"]
    return False


# --------------------------------------------------------------------------------------------------
# Calls as values: how settings, middleware, schedules and hooks show, compare and pickle.


def name_of(value: object) -> str:
    """Return a setting as it was typed: the name of a function, the repr of anything else.

    Args:
        value: the setting.

    Returns:
        The text, for messages.

    Example:
        >>> name_of(print), name_of("lr"), name_of(functools.partial(int, base=2))
        ('print', "'lr'", 'int(base=2)')
    """
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

    @staticmethod
    def of(kind: type, made: object) -> Call:
        """Return the call of a class that made an object, without settings that are as usual."""
        _, *parameters = inspect.signature(kind.__init__).parameters.values()
        given = checks.fields_of(made, [each.name for each in parameters])
        changed = {p.name: given[p.name] for p in parameters if given[p.name] != p.default}
        args = [changed.pop(each.name) for each in parameters if each.default is each.empty]
        return Call(kind, (*args,), changed)

    def __repr__(self) -> str:
        keywords = (f"{name}={name_of(value)}" for name, value in self.kwargs.items())
        return f"{name_of(self.factory)}({', '.join([*map(name_of, self.args), *keywords])})"

    def takes(self, argument: str) -> bool:
        """Return whether the function has an argument of this name."""
        return argument in inspect.signature(self.factory).parameters

    def __call__(self) -> object:
        """Make the call again, and return what it returns."""
        return self.factory(*self.args, **self.kwargs)


checks.hide_fields(Middleware)


# --------------------------------------------------------------------------------------------------
# What a loss function returns to leave a batch out.

MOST_REASONS = 20  # that are logged


@attrs.frozen
class Skip:
    """The reply of a loss function that leaves its batch out.

    Args:
        reason: why.
    """

    reason: str

    def output(self, state: State, name: str, said: set[str]) -> Output:
        """Return the output for the batch.

        Args:
            state: the state.
            name: the name of the function that leaves it out.
            said: the reasons that were logged before.
        """
        if is_sharded(state.model):
            raise NotImplementedError(
                f"{name} returned {self!r}, but under fully_shard every process takes part in "
                'every forward and backward: compute the loss, and return loss, {"weight": 0}'
            )
        if self.reason not in said and len(said) < MOST_REASONS:
            said.add(self.reason)
            log.warning("%s leaves a batch out: %s (logged once)", name, self.reason)
        first = next((p for p in state.model.parameters() if p.is_floating_point()), None)
        dtype = torch.float32 if first is None else torch.promote_types(first.dtype, torch.float32)
        loss = torch.zeros((), dtype=dtype, device=state.backend.device)
        return Output(loss, 0, {}, {}, self.reason)


def skip(reason: str) -> Skip:
    """Skip a batch: return this from a loss function instead of a loss.

    The batch does not count in the window of ``accumulate``, in its divisor or in metrics. If every
    batch of an update is skipped, on all processes, there is no update: ``state.skipped`` counts
    it, and ``state.step``, schedules, averages and the buffers of the model stay as they are. In an
    evaluation the batch is skipped too. A warning is logged the first time that a reason is given.

    Args:
        reason: why, in a few words, the same for all batches that are skipped for it.

    Returns:
        What the loss function returns, alone.

    Raises:
        TypeError: the reason is not a str.
        ValueError: it is empty.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def loss_fn(model, batch):
        ...     return skip("too long") if len(batch) > 2 else toy_loss(model, batch)
        >>> step = fl.pipeline(fl.accumulate(2))(loss_fn)
        >>> state, out = step(toy(), [torch.ones(3), torch.tensor([4.0])])
        >>> state.model.w.item()                    # the gradient of the other batch alone
        -4.0
        >>> state, out = step(state, [torch.ones(3)])
        >>> out.skip, state.step, state.skipped
        ('too long', 1, 1)

    Notes:
        With several processes each decides by itself. But a loss function that exchanges something
        with the others, as ``SyncBatchNorm`` does, has to decide alike in all of them; under
        ``fully_shard`` any forward does so, and this is refused. There, return a weight of 0:
        ``return loss, {"weight": 0}``.

    Replaces: lightning.training_step
    """
    return Skip(checks.text("skip", "reason", reason, "why the batch is left out"))


# --------------------------------------------------------------------------------------------------
# What happened at a boundary: the values of `TrainState.events`.

UPDATE = "update"  # an update was applied, not skipped
EPOCH = "epoch"  # an epoch was completed
RECORD = "record"  # a record was appended to the history
START = "start"  # no update was tried yet
END = "end"  # the boundary is the last one: the target is reached, or a hook has stopped the run
