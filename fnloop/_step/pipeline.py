"""Composition: the rings of middleware around forward, backward and update.

    pipeline(a, b)(loss_fn) == pipe(loss_fn, forward, ...forward ring..., ...loss ring..., backward,
                                    ...gradient ring..., update, ...update ring..., ...device ring..., ...step ring...)

The three in the middle are all that a step does by itself (see ``_steps``). What is listed first is innermost, within a ring.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded, reshard
from fnloop._backend.transfer import to_device
from fnloop._core.call import name_of
from fnloop._core.middleware import Middleware
from fnloop._core.rng import fold_in, isolated, seed_all, torch_seeder
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.state import TrainState, check_not_stale, with_slot
from fnloop._core.types import RINGS, Batch, LossFn, Output, Step
from fnloop._display import html
from fnloop._display.checks import describe, function
from fnloop._step.backward import Backward
from fnloop._step.engine import engine_of
from fnloop._step.forward import forward
from fnloop._step.gradients import NoGradientError
from fnloop._step.update import OPTIMIZER, consume, update

__all__ = ["STEP", "Pipeline", "PipelineStep", "evaluating", "pipeline", "supervised"]

_NO_GRAD = torch.no_grad()(
    lambda: None
).__code__.co_filename  # where a decorated function is called from
STEP = "the step"  # where a run was, if it was in none of its layers


# --- composition


@attrs.frozen(repr=False)
class Pipeline:
    """Middleware in the order in which data flows through them. Call it with a loss function to get a step."""

    middleware: tuple[Middleware, ...]

    def __repr__(self) -> str:
        return f"pipeline({', '.join(map(repr, self.middleware))})"

    def _repr_html_(self) -> str:
        return html.diagram("loss_fn(model, batch)", _rings(self))

    def __call__(self, loss_fn: LossFn, *batch: Any) -> PipelineStep:
        """Return the step of a loss function.

        Args:
            loss_fn: ``(model, batch) -> loss`` or ``-> (loss, aux)``.

        Raises:
            TypeError: it is no such function.
        """
        if isinstance(loss_fn, TrainState) or batch:
            raise TypeError(
                f"a pipeline takes a loss function first: write {self!r}(loss_fn)(state, batch)"
            )
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
            raise ValueError(
                f"{twice} have one name, {name!r}, and would share what they keep in state.slots. Leave one out."
            )
    takes = [m for m in middleware if m.window > 1]
    if len(takes) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, takes))} both take several batches at once. Leave one out."
        )
    for member in middleware:
        if member.check is not None:
            member.check(middleware)
    return Pipeline(tuple(middleware))


def _check_member(member: Any) -> None:
    if isinstance(member, Middleware):
        return
    name = getattr(member, "__name__", type(member).__name__)
    if getattr(member, "is_middleware_factory", False):
        raise TypeError(
            f"pipeline expects middleware; {name} is a function that makes one. Call it: {name}(...)"
        )
    if isinstance(member, Pipeline):
        raise TypeError(
            f"pipeline expects middleware, got {member!r}. To join two, write pipeline(*p.middleware, ...)"
        )
    hint = (
        f" A loss function goes into the second call: pipeline(...)({name})."
        if callable(member)
        else ""
    )
    raise TypeError(
        f"pipeline expects middleware, such as clip(1.0); got {describe(member)}.{hint}"
    )


def _is_ours(member: Middleware) -> bool:
    return member.call is not None and (member.call.factory.__module__ or "").startswith("fnloop.")


def _check_loss_fn(loss_fn: Any) -> None:
    if isinstance(loss_fn, Middleware):
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a loss function; got the middleware {loss_fn!r}. List it in the "
            f"first call: pipeline({loss_fn!r}, ...)"
        )
    if isinstance(loss_fn, nn.Module) or (
        isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module)
    ):
        name = loss_fn.__name__ if isinstance(loss_fn, type) else type(loss_fn).__name__
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got the module {name}. For "
            "batches (x, y) and a "
            f"criterion, write supervised({name}(...)); else write def loss_fn(model, batch): ..."
        )
    if not callable(loss_fn):
        raise TypeError(
            f"pipeline(...)(loss_fn) expects a function (model, batch) -> loss; got {describe(loss_fn)}"
        )
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(None, None)
        except TypeError as error:
            raise TypeError(
                f"a loss function takes (model, batch), but {name_of(loss_fn)} takes {signature}"
            ) from error


def _check_reply(reply: Any, name: str) -> None:
    """Raise unless a step has returned ``(state, out)``."""
    if (
        reply.__class__ is tuple
        and len(reply) == 2
        and isinstance(reply[0], TrainState)
        and isinstance(reply[1], Output)
    ):
        return
    if isinstance(reply, tuple | list):
        given = f"a {type(reply).__name__} of ({', '.join(type(part).__name__ for part in reply)})"
    elif isinstance(reply, TrainState | Output):
        given = f"the {type(reply).__name__} alone"
    else:
        given = describe(reply)
    raise TypeError(
        f"{name} must return (state, out); it returned {given}. Write: return state, out"
    )


def _rings(pipeline: Pipeline) -> list[tuple[str, list[str]]]:
    """Return what acts in each ring, in its order, the innermost ring first."""
    own = {"gradient": ["backward"], "update": [OPTIMIZER]}
    acting = {
        ring: [repr(m) for m in pipeline.middleware if getattr(m, ring) is not None]
        for ring in RINGS
    }
    return [
        (ring, own.get(ring, []) + names) for ring, names in acting.items() if names or ring in own
    ]


def _made(member: Middleware, state: TrainState) -> Any:
    """Return a middleware's slot; what it draws is a function of the seed, the same in every process."""
    __tracebackhide__ = True
    seed, device = fold_in(state.seed, zlib.crc32(member.name.encode())), state.backend.device
    with isolated(device):
        seed_all(seed)
        torch_seeder(device)(seed)
        return member.init(state)  # type: ignore[misc]


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
        self.layers: dict[
            Any, str
        ] = {}  # code object -> what runs there, to say where an exception came from
        self._chain: list[
            tuple[Any, str, bool]
        ] = []  # code object, what runs there, whether it is the user's; innermost first
        listed = any(m.name == "amp" for m in pipeline.middleware)
        called = functools.reduce(
            lambda fn, m: m.loss_fn(fn) if m.loss_fn else fn, pipeline.middleware, loss_fn
        )
        name = name_of(loss_fn)
        innermost = self._layer(forward(called, name, listed), f"the loss function {name}")
        self._innermost: Any = (
            None if all(map(_is_ours, pipeline.middleware)) else functools.partial(innermost)
        )
        self.forward = self._ring("forward", self._innermost or innermost)
        backward = Backward(
            self._ring("loss", self.forward), may_skip=self._may_skip("forward", "loss")
        )
        step = self._ring("gradient", self._layer(backward, "backward"))
        step = self._layer(update(step, may_skip=self._may_skip("gradient")), OPTIMIZER)
        for ring in ("update", "device", "step"):
            step = self._ring(ring, step)
        self.train = step  # without the checks of a bare call: what the fold calls

    def _ring(self, ring: str, step: Step) -> Step:
        for member in self.pipeline.middleware:
            wrap = getattr(member, ring)
            if wrap is not None:
                inside, step = step, wrap(step)
                if not callable(step):
                    raise TypeError(
                        f"{member!r} must wrap a step into a step, but its {ring} ring returned {describe(step)}. "
                        "Did you forget to return the inner function?"
                    )
                if step is not inside:
                    self._layer(step, repr(member), theirs := not _is_ours(member))
                    step = self._checked_once(step, member, ring) if theirs else step
        return step

    def _checked_once(self, step: Step, member: Middleware, ring: str) -> Step:
        """Return a step of the user's whose first reply is checked. From then on the step is called without a frame between."""

        def first(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with self._calls_noted() as calls:
                reply = step(state, batch)
            _check_reply(reply, f"{member!r}, in its {ring} ring,")
            if not calls and reply[1].skip is None and engine_of(state).calls_every_batch:
                raise ValueError(
                    f"{member!r} did not call the step that it wraps, so nothing was trained: write state, out = "
                    'step(state, batch); or, to leave an update out, return an Output with skip="why"'
                )
            link.__setstate__((step, (), {}, vars(link)))  # type: ignore[attr-defined]
            return reply

        link = functools.partial(first)
        vars(link).update(getattr(step, "__dict__", {}))
        return link

    @contextlib.contextmanager
    def _calls_noted(self) -> Iterator[list[int]]:
        """Note whether the loss function is called."""
        calls: list[int] = []
        called = self._innermost.func

        def noting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            calls.append(1)
            return called(state, batch)

        self._innermost.__setstate__((noting, (), {}, None))
        try:
            yield calls
        finally:
            self._innermost.__setstate__((called, (), {}, None))

    def _may_skip(self, *rings: str) -> bool:
        """Say whether a middleware of these rings may leave a batch or an update out by what it sees: ours don't."""
        return any(
            getattr(m, ring) is not None
            for ring in rings
            for m in self.pipeline.middleware
            if not _is_ours(m)
        )

    def layer_of(self, error: BaseException) -> str:
        """Say in which layer of the step an exception was raised."""
        layer, trace = STEP, error.__traceback__
        while trace is not None:
            layer = self.layers.get(trace.tb_frame.f_code, layer)  # the innermost one wins
            trace = trace.tb_next
        return layer

    def _layer(self, step: Step, name: str, theirs: bool = False) -> Step:
        step_itself = inspect.unwrap(
            step
        )  # past torch.no_grad(), say, whose code is the same for all that it decorates
        code = getattr(step_itself, "__code__", None) or getattr(
            type(step_itself).__call__, "__code__", None
        )
        if code is not None:  # two middleware of one factory share their code
            known = self.layers.get(code)
            self.layers[code] = name if known in (None, name) else f"{known} or {name}"
            self._chain.append((code, name, theirs))
        return step

    def explain(self, error: BaseException) -> None:
        """Add to an exception what the layers of the step know about it: which middleware is to blame."""
        codes, trace = [], error.__traceback__
        while trace is not None:
            codes.append(trace.tb_frame.f_code)
            trace = trace.tb_next
        waiting, found = [*self._chain], []
        for code in codes:  # from the outermost to the innermost
            if any(code is layer[0] for layer in waiting):
                while waiting[-1][0] is not code:
                    waiting.pop()
                found.append(waiting.pop())
        theirs = [name for _, name, is_theirs in found if is_theirs]
        if isinstance(error, NoGradientError) and theirs:
            decorated = [
                name
                for outside, inside in itertools.pairwise(codes)
                if outside.co_filename == _NO_GRAD
                for code, name, is_theirs in found
                if is_theirs and code is inside
            ]
            error.args = (
                f"{error}. Is {' or '.join(decorated or theirs)} under torch.no_grad()? Only its own work may be",
            )
        inner = waiting[-1] if waiting else None
        unpacked = isinstance(error, TypeError | ValueError) and "unpack" in str(error)
        if (
            unpacked
            and inner
            and inner[2]
            and codes
            and codes[-1] is (found[-1][0] if found else codes[-1])
        ):
            error.add_note(
                f"{inner[1]} must return (state, out), and has returned something else: write return state, out"
            )

    def __repr__(self) -> str:
        return f"{self.pipeline!r}({name_of(self.loss_fn)})"

    def __str__(self) -> str:
        return html.diagram_text(f"{name_of(self.loss_fn)}(model, batch)", _rings(self.pipeline))

    def _repr_html_(self) -> str:
        return html.diagram(f"{name_of(self.loss_fn)}(model, batch)", _rings(self.pipeline))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.pipeline, (self.loss_fn,)

    def meet(self, state: TrainState, ring: str | None = None) -> TrainState:
        """Make the slots that the middleware (of a ring) need and the state has not yet, or has from a checkpoint only."""
        __tracebackhide__ = True
        for member in self.pipeline.middleware:
            if member.init is None or (ring is not None and getattr(member, ring) is None):
                continue
            if member.name not in state.slots:
                state = with_slot(state, member.name, _made(member, state))
            elif has_pending(
                saved := state.slots[member.name]
            ):  # of a checkpoint: read into a new one
                groups = (
                    state.optimizer.param_groups
                )  # a torch scheduler sets their numbers anew, tensors in place
                before = [
                    {k: (v, v.clone() if isinstance(v, Tensor) else v) for k, v in group.items()}
                    for group in groups
                ]
                state = with_slot(state, member.name, materialize(_made(member, state), saved))
                for group, settings in zip(groups, before, strict=True):
                    for key, (held, value) in settings.items():
                        group[key] = held.copy_(value) if isinstance(held, Tensor) else value
        return state

    def __call__(
        self, state: TrainState, batch: Batch | Sequence[Batch]
    ) -> tuple[TrainState, Output]:
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
        check_not_stale(state, "step")
        try:
            state, out = self.train(self.meet(state), to_device(batch, state.backend.device))
        except Exception as error:
            self.explain(error)
            raise
        return consume(
            state, out, (1 if self.window == 1 else len(batch)) * state.backend.world_size
        ), out

    def evaluate(self, state: TrainState, batch: Batch) -> Output:
        """Evaluate one batch: the pipeline cut after its forward ring, without gradients, in evaluation mode.

        Args:
            state: the newest state. Nothing of it is changed, and nothing is drawn from the global generators.
            batch: one batch, whatever the window.

        Returns:
            Loss, weight, aux and metrics of the batch.
        """
        __tracebackhide__ = True
        check_not_stale(state, "step.evaluate")
        with isolated(state.backend.device), evaluating(state.model):
            return self.forward(
                self.meet(state, "forward"), to_device(batch, state.backend.device)
            )[1]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule has the flag that it had."""
    modes = [(module, module.training) for module in model.modules()]
    sharded = is_sharded(model)
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # for modules that do something there
        for module, training in modes:
            module.training = training
        if sharded:
            reshard(model)


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
        called = (
            f"{criterion.__name__}()" if isinstance(criterion, type) else "nn.CrossEntropyLoss()"
        )
        raise TypeError(
            f"supervised expects a criterion (output, target) -> loss; got {describe(criterion)}. Write supervised({called})"
        )
    function(
        "supervised",
        "criterion",
        criterion,
        "a function (output, target) -> loss",
        2,
        also=nn.Module,
    )
    return _Supervised(criterion)


@attrs.frozen(repr=False)
class _Supervised:
    criterion: Callable[[Tensor, Tensor], Tensor]

    def __repr__(self) -> str:
        return f"supervised({name_of(self.criterion)})"

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        __tracebackhide__ = True
        x, y = batch
        output = model(x)
        return self.criterion(output, y), {"output": output}
