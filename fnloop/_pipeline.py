"""Composition: forward, backward, update, and the rings of middleware around them.

    pipeline(a, b)(loss_fn) == pipe(loss_fn, forward, ...forward ring..., ...loss ring..., backward,
                                    ...gradient ring..., update, ...update ring..., ...device ring..., ...step ring...)

The three in the middle are all that a step does by itself. What is listed first is innermost, within a ring.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fnloop._backend import place
from fnloop._encode import like, waits
from fnloop._metrics import absorb, absorb_loss
from fnloop._rng import isolated
from fnloop._state import TrainState, advance, all_parameters, check_fresh, consumed, parameters, put
from fnloop._types import Batch, LossFn, Middleware, Output, Step, Wrap, name_of

__all__ = [
    "OPTIMIZER", "Backward", "Pipeline", "PipelineStep",
    "at_least_float32", "consume", "evaluating", "linear", "pipeline", "report", "supervised", "wants_closure",
]  # fmt: skip

OPTIMIZER = "the optimizer's step"  # the name of that layer, where a run says what it was doing

# --- the three steps in the middle


def forward(loss_fn: LossFn, name: str) -> Step:
    """Return the innermost step: call the loss function and read its reply."""
    checked = False

    def forward(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        nonlocal checked
        __tracebackhide__ = True
        reply: Any = loss_fn(state.model, batch)
        loss: Any
        loss, aux = reply if type(reply) is tuple and len(reply) == 2 else (reply, {})
        if not checked:
            _check_reply(reply, loss, aux, batch, name)
            checked = True
        weight = aux["weight"] if "weight" in aux else _leading(batch)
        return state, Output(loss, weight, aux)

    return forward


class Backward:
    """The step that fills ``.grad``, starting from the loss; the loss that it reports is never scaled.

    Args:
        forward: the step inside.
        scale: ``state -> float``, what the gradients are to be multiplied by, or None.
    """

    def __init__(self, forward: Step, scale: Callable[[TrainState], float] | None = None) -> None:
        self.forward, self.scale = forward, scale

    def __call__(
        self, state: TrainState, batch: Batch, share: Callable[[Output], Any] | None = None
    ) -> tuple[TrainState, Output]:
        """Run forward and backward.

        Args:
            state, batch: as in every step.
            share: ``output -> number``, what this batch counts for in a window; None, or a reply of None, is 1.
        """
        __tracebackhide__ = True
        state, out = self.forward(state, batch)
        loss = out.loss
        if out.skip is not None:
            return state, attrs.evolve(out, loss=loss.detach())
        if not loss.requires_grad:
            _fail_without_gradient(state)
        start = loss
        if share is not None and (part := share(out)) is not None:
            start = start * part
        if self.scale is not None:
            start = at_least_float32(start) * self.scale(state)
        start.backward()
        return state, Output(loss.detach(), out.weight, out.aux, out.metrics)

    def within(self, wrap: Wrap) -> Step:
        """Put a gradient step directly around this one."""
        return wrap(self)


def at_least_float32(loss: Tensor) -> Tensor:
    return loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss


def linear(wrap: Wrap) -> Wrap:
    """Mark a gradient ring's wrap as one that at most multiplies gradients by a number that is the same for a whole
    window.

    Such steps commute, so a later one may still be put directly around backward: ``step.within(wrap)``. That is how
    ``accumulate`` adds gradients up in place, and fp16 gradients are unscaled once per window, in whichever order the
    two are listed.
    """

    def wrapped(step: Any) -> Step:
        made: Any = wrap(step)
        if hasattr(step, "within"):
            made.within = lambda inner: wrapped(step.within(inner))
        return made

    return wrapped


def update(step: Step) -> Step:
    """Return the step that applies the gradients, and leaves none behind."""

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        check_fresh(state)
        params = all_parameters(state)
        for p in params:
            p.grad = None  # whatever was there is not of this batch
        try:
            if wants_closure(type(state.optimizer)):
                return _by_closure(step, state, batch)
            new, out = step(state, batch)
            applied = out.skip is None
            if applied:
                _apply(new.optimizer)
        finally:
            for p in params:
                p.grad = None
        return advance(new, applied), out

    return update


@functools.cache
def wants_closure(optimizer: type[Optimizer]) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _by_closure(step: Step, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
    """Update with an optimizer that evaluates the loss as often as it wants to (LBFGS); what is reported is the first."""
    replies: list[tuple[TrainState, Output]] = []

    def closure() -> Tensor:
        for p in parameters(state):
            p.grad = None
        replies.append(step(state, batch))
        if replies[-1][1].skip is not None:
            raise ValueError(f"{type(state.optimizer).__name__} can't leave an update out ({replies[-1][1].skip})")
        return replies[-1][1].loss

    state.optimizer.step(closure)  # type: ignore[arg-type]
    new, out = replies[0]
    return advance(new, applied=True), out


_TORCHS_WRAPPER = Optimizer.profile_hook_step(lambda: None).__code__  # type: ignore[attr-defined]


def _apply(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``, past torch's wrapper around it where that would do nothing.

    The wrapper marks the step for a profiler and calls hooks: 5 µs, with neither a profiler nor a hook.
    """
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    if (
        bare is None
        or getattr(step, "__code__", None) is not _TORCHS_WRAPPER
        or "step" in vars(optimizer)  # patched, as torch's schedulers do
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()
    ):
        optimizer.step()
    else:
        bare(optimizer)


def report(out: Output, metrics: Mapping[str, Any], by: str) -> Output:
    """Return an output with more metrics.

    Raises:
        ValueError: there is one of that name already.
    """
    if clash := out.metrics.keys() & metrics.keys():
        name = min(clash)
        raise ValueError(f"{by} reports the metric {name!r}, which another middleware inside it reports already: rename one")
    return Output(out.loss, out.weight, out.aux, {**out.metrics, **metrics}, out.skip)


def consume(state: TrainState, out: Output, batches: int, samples: int = 0) -> TrainState:
    """Return the state with a step's batches counted and its metrics reduced into those of the epoch.

    An update that was left out has no part in them.
    """
    running = state.metrics
    if out.skip is not None:
        return consumed(state, batches, samples, running)
    metrics = absorb(running, out.metrics) if out.metrics else {**running}
    metrics["loss"] = absorb_loss(running.get("loss"), out.loss, out.weight)  # type: ignore[arg-type]
    return consumed(state, batches, samples, metrics)


# --- the reply of a loss function


def _leading(batch: Batch) -> int:
    """Return the leading dimension of a batch: that of its first tensor that has one."""
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0].size(0)  # (x, y): the usual case
    return next((t.size(0) for t in _tensors(batch) if t.ndim), 1)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)


def _check_reply(reply: Any, loss: Any, aux: Any, batch: Batch, name: str) -> None:
    """Check once what a loss function returns."""
    if isinstance(reply, tuple) and len(reply) != 2:
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a tuple of {len(reply)}. Put the rest in aux, a dict"
        )
    if isinstance(reply, Mapping):
        raise TypeError(
            f"{name} must return a loss or (loss, aux); it returned a {type(reply).__name__}. Write: return "
            "reply['loss'], reply"
        )
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss that {name} returns must be a scalar tensor; got {loss!r:.60} ({type(loss).__name__})")
    if loss.ndim:
        raise ValueError(
            f"the loss that {name} returns must be a scalar; got shape {tuple(loss.shape)}. Return its mean over the "
            f"batch: loss.mean()"
        )
    if not loss.is_floating_point():
        raise ValueError(f"the loss that {name} returns must have a floating dtype; got {loss.dtype}")
    if not isinstance(aux, Mapping):
        raise TypeError(
            f'the aux that {name} returns beside the loss must be a mapping, such as {{"output": output}}; got '
            f"{type(aux).__name__}"
        )
    if "weight" in aux:
        weight = aux["weight"]
        if isinstance(weight, bool) or not isinstance(weight, int | Tensor) or (isinstance(weight, Tensor) and weight.ndim):
            shape = f"shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
            raise TypeError(
                'aux["weight"] must be the number of items that the loss is the mean of, an int or a scalar '
                f"tensor; got {shape}"
            )
        return
    sizes = {t.size(0) for t in _tensors(batch) if t.ndim} or {1 for t in _tensors(batch)}
    if len(sizes) != 1:
        found = (
            f"its tensors have leading dimensions {sorted(sizes)}"
            if sizes
            else f"there is no tensor in a {type(batch).__name__}"
        )
        raise ValueError(
            f'how many items is the loss of {name} the mean of? {found}. Say it: return loss, {{"weight": number_of_items}}'
        )


def _fail_without_gradient(state: TrainState) -> None:
    trainable = any(p.requires_grad for p in state.model.parameters())
    hint = (
        "it was computed without the model's parameters, or detached (.item(), .detach(), torch.no_grad)"
        if trainable
        else "every parameter of the model has requires_grad=False"
    )
    raise ValueError(f"the loss has no gradient: {hint}")


# --- composition


@attrs.frozen(repr=False)
class Pipeline:
    """Middleware in the order in which data flows through them. Call it with a loss function to get a step."""

    middleware: tuple[Middleware, ...]

    def __repr__(self) -> str:
        return f"pipeline({', '.join(map(repr, self.middleware))})"

    def __call__(self, loss_fn: LossFn, *batch: Any) -> PipelineStep:
        """Return the step of a loss function.

        Args:
            loss_fn: ``(model, batch) -> loss`` or ``-> (loss, aux)``.

        Raises:
            TypeError: it is no such function.
        """
        if isinstance(loss_fn, TrainState) or batch:
            raise TypeError(f"a pipeline takes a loss function first: write {self!r}(loss_fn)(state, batch)")
        _check_loss_fn(loss_fn)
        return PipelineStep(self, loss_fn)


def pipeline(*middleware: Middleware) -> Pipeline:
    """Compose middleware, innermost first.

    Each acts in its rings (see ``fnloop._types``); within a ring the listed order is kept. So
    ``pipeline(accumulate(4), clip(1.0))`` clips once per update, and ``pipeline(clip(1.0), accumulate(4))`` clips every
    micro-batch, then averages.

    Args:
        *middleware: what ``accumulate(4)``, ``clip(1.0)``, ... return.

    Returns:
        A function from a loss function to a step.

    Raises:
        TypeError: something is no middleware.
        ValueError: two have one name, or their order makes no sense.

    Example:
        >>> import fnloop as fl
        >>> from fnloop.testing import toy, toy_loss
        >>> step = pipeline(fl.accumulate(2), fl.clip(1.0))(toy_loss)
        >>> step
        pipeline(accumulate(2), clip(1.0))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([3.0]), torch.tensor([5.0])])    # the mean, 4, is clipped to 1
        >>> round(state.model.w.item(), 4), out.metrics["grad_norm"].compute()
        (-1.0, 4.0)
    """
    for member in middleware:
        _check_member(member)
    names = [member.name for member in middleware]
    for name in names:
        if names.count(name) > 1:
            twice = " and ".join(repr(m) for m in middleware if m.name == name)
            raise ValueError(f"{twice} have one name, {name!r}, and would share what they keep in state.slots. Leave one out.")
    takes = [m for m in middleware if m.window > 1]
    if len(takes) > 1:
        raise ValueError(f"{' and '.join(map(repr, takes))} both take several batches at once. Leave one out.")
    for member in middleware:
        if member.check is not None:
            member.check(middleware)
    return Pipeline(tuple(middleware))


def _check_member(member: Any) -> None:
    if isinstance(member, Middleware):
        return
    name = getattr(member, "__name__", type(member).__name__)
    if getattr(member, "is_middleware_factory", False):
        raise TypeError(f"pipeline expects middleware; {name} is a function that makes one. Call it: {name}(...)")
    if isinstance(member, Pipeline):
        raise TypeError(f"pipeline expects middleware, got {member!r}. To join two, write pipeline(*p.middleware, ...)")
    hint = f" A loss function goes into the second call: pipeline(...)({name})." if callable(member) else ""
    raise TypeError(f"pipeline expects middleware, such as clip(1.0); got {name_of(member)} ({type(member).__name__}).{hint}")


def _check_loss_fn(loss_fn: Any) -> None:
    if isinstance(loss_fn, Middleware):
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a loss function; got the middleware {loss_fn!r}. List it in the "
            f"first call: pipeline({loss_fn!r}, ...)"
        )
    if isinstance(loss_fn, nn.Module) or (isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module)):
        name = loss_fn.__name__ if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got the module {name}. For "
            "batches (x, y) and a "
            f"criterion, write supervised({name}(...)); else write def loss_fn(model, batch): ..."
        )
    if not callable(loss_fn):
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got {loss_fn!r:.60} ({type(loss_fn).__name__})"
        )
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(f"a loss function takes (model, batch), but {name_of(loss_fn)} takes {signature}") from error


class PipelineStep:
    """A step: ``step(state, batch) -> (state, Output)``. One call is one update.

    With ``accumulate(n)`` it takes a sequence of up to n batches instead of one. A bare call draws from the global
    generators as any PyTorch code does; ``fit`` positions them.

    Args:
        pipeline: the middleware.
        loss_fn: the loss function.
    """

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn) -> None:
        self.pipeline, self.loss_fn = pipeline, loss_fn
        self.window = max((m.window for m in pipeline.middleware), default=1)
        self.layers: dict[Any, str] = {}  # code object -> what runs there, to say where an exception came from
        called = functools.reduce(lambda fn, m: m.loss_fn(fn) if m.loss_fn else fn, pipeline.middleware, loss_fn)
        name = name_of(loss_fn)
        self.forward = self._ring("forward", self._layer(forward(called, name), f"the loss function {name}"))
        step = self._layer(Backward(self._ring("loss", self.forward)), "backward")
        step = self._layer(update(self._ring("gradient", step)), OPTIMIZER)
        for ring in ("update", "device", "step"):
            step = self._ring(ring, step)
        self.train = step  # without the checks of a bare call: what the fold calls

    def _ring(self, ring: str, step: Step) -> Step:
        for member in self.pipeline.middleware:
            wrap = getattr(member, ring)
            if wrap is not None:
                step = wrap(step)
                if not callable(step):
                    raise TypeError(f"{member!r} must wrap a step into a step, but its {ring} ring returned {step!r}")
                self._layer(step, repr(member))
        return step

    def layer_of(self, error: BaseException) -> str:
        """Say in which layer of the step an exception was raised."""
        layer, trace = "the step", error.__traceback__
        while trace is not None:
            layer = self.layers.get(trace.tb_frame.f_code, layer)  # the innermost one wins
            trace = trace.tb_next
        return layer

    def _layer(self, step: Step, name: str) -> Step:
        code = getattr(step, "__code__", None) or getattr(type(step).__call__, "__code__", None)
        if code is not None:  # two middleware of one factory share their code
            known = self.layers.get(code)
            self.layers[code] = name if known in (None, name) else f"{known} or {name}"
        return step

    def __repr__(self) -> str:
        return f"{self.pipeline!r}({name_of(self.loss_fn)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pipeline, (self.loss_fn,)

    def meet(self, state: TrainState, ring: str | None = None) -> TrainState:
        """Make the slots that the middleware (of a ring) need and the state has not yet, or has from a checkpoint only."""
        for member in self.pipeline.middleware:
            if member.init is None or (ring is not None and getattr(member, ring) is None):
                continue
            if member.name not in state.slots:
                state = put(state, member.name, member.init(state))
            elif waits(saved := state.slots[member.name]):  # of a checkpoint: read into a new one
                groups = state.optimizer.param_groups  # a torch scheduler sets their numbers anew, tensors in place
                before = [{k: (v, v.clone() if isinstance(v, Tensor) else v) for k, v in group.items()} for group in groups]
                state = put(state, member.name, like(member.init(state), saved))
                for group, settings in zip(groups, before, strict=True):
                    for key, (held, value) in settings.items():
                        group[key] = held.copy_(value) if isinstance(held, Tensor) else value
        return state

    def __call__(self, state: TrainState, batch: Batch | Sequence[Batch]) -> tuple[TrainState, Output]:
        """Make one update.

        Args:
            state: the newest state.
            batch: a batch, or a sequence of up to ``window`` batches with ``accumulate(window)``.

        Returns:
            The new state, and what was found out about the batch.

        Raises:
            StaleStateError: the state has been advanced already.
        """
        __tracebackhide__ = True
        check_fresh(state)
        state, out = self.train(self.meet(state), place(batch, state.backend.device))
        return consume(state, out, 1 if self.window == 1 else len(batch)), out

    def evaluate(self, state: TrainState, batch: Batch) -> Output:
        """Evaluate one batch: the pipeline cut after its forward ring, without gradients, in evaluation mode.

        Args:
            state: the newest state. Nothing of it is changed, and nothing is drawn from the global generators.
            batch: one batch, whatever the window.

        Returns:
            Loss, weight, aux and metrics of the batch.
        """
        __tracebackhide__ = True
        check_fresh(state)
        with isolated(state.backend.device), evaluating(state.model):
            return self.forward(self.meet(state, "forward"), place(batch, state.backend.device))[1]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule has the flag that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # for modules that do something there
        for module, training in modes:
            module.training = training


def supervised(criterion: Callable[[Tensor, Tensor], Tensor]) -> LossFn:
    """Make a loss function for batches ``(x, y)``.

    Args:
        criterion: ``(model(x), y) -> mean loss``, such as ``nn.CrossEntropyLoss()``.

    Returns:
        A loss function with ``aux = {"output": model(x)}``.

    Raises:
        TypeError: the criterion can't be called, or is a class.

    Example:
        >>> import fnloop as fl
        >>> model = nn.Linear(2, 1)
        >>> loss, aux = supervised(nn.MSELoss())(model, (torch.ones(3, 2), torch.ones(3, 1)))
        >>> aux["output"].shape
        torch.Size([3, 1])
    """
    if isinstance(criterion, type) or not callable(criterion):
        called = f"{criterion.__name__}()" if isinstance(criterion, type) else "nn.CrossEntropyLoss()"
        raise TypeError(
            f"supervised expects a criterion (output, target) -> loss; got {criterion!r}. Write supervised({called})"
        )
    return _Supervised(criterion)


@attrs.frozen(repr=False)
class _Supervised:
    criterion: Callable[[Tensor, Tensor], Tensor]

    def __repr__(self) -> str:
        return f"supervised({name_of(self.criterion)})"

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch
        output = model(x)
        return self.criterion(output, y), {"output": output}
