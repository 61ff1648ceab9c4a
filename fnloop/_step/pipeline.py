"""Composition: the rings of middleware around forward, backward and update.

    pipeline(a, b)(loss_fn) == pipe(
        loss_fn, forward, ...forward ring..., ...loss ring..., backward, ...gradient ring...,
        update, ...update ring..., ...device ring..., ...step ring...
    )

A step by itself is the three in the middle: forward, backward and update. Within a ring, what is
listed first is innermost.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import toolz

from fnloop._backend.transfer import to_device
from fnloop._core.call import name_of
from fnloop._core.middleware import Middleware
from fnloop._core.rng import isolated
from fnloop._core.state import TrainState, check_not_stale
from fnloop._core.types import RINGS, Batch, LossFn, Output, Step
from fnloop._display import html
from fnloop._display.checks import describe
from fnloop._step.backward import Backward
from fnloop._step.composition import check_loss_fn, check_middleware, check_step_reply, is_ours
from fnloop._step.engine import engine_of
from fnloop._step.evaluation import evaluating
from fnloop._step.forward import forward
from fnloop._step.layers import Layers
from fnloop._step.slots import init_slots
from fnloop._step.update import OPTIMIZER, consume, update

__all__ = ["Pipeline", "PipelineStep", "pipeline"]


@attrs.frozen(repr=False)
class Pipeline:
    """Middleware in the order in which data flows through them.

    Call it with a loss function to get a step.
    """

    middleware: tuple[Middleware, ...]

    def __repr__(self) -> str:
        return f"pipeline({', '.join(map(repr, self.middleware))})"

    def _repr_html_(self) -> str:
        return html.diagram("loss_fn(model, batch)", _rings(self))

    def __call__(self, loss_fn: LossFn, *batch: Batch) -> PipelineStep:
        """Return the step of a loss function.

        Args:
            loss_fn: ``(model, batch) -> loss`` or ``-> (loss, aux)``.

        Raises:
            TypeError: it is not such a function.
        """
        if isinstance(loss_fn, TrainState) or batch:
            raise TypeError(
                f"a pipeline takes a loss function first: write {self!r}(loss_fn)(state, batch)"
            )
        check_loss_fn(loss_fn)
        return PipelineStep(self, loss_fn)


def pipeline(*middleware: Middleware) -> Pipeline:
    """Compose middleware, innermost first.

    Each acts in its rings (see ``fnloop._core.types``); within a ring the listed order is kept. So
    ``pipeline(accumulate(4), clip(1.0))`` clips once per update, and ``pipeline(clip(1.0),
    accumulate(4))`` clips every micro-batch, then averages.

    Args:
        *middleware: what ``accumulate(4)``, ``clip(1.0)``, ... return.

    Returns:
        A function from a loss function to a step.

    Raises:
        TypeError: something is not a middleware.
        ValueError: two have one name, or their order makes no sense.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = pipeline(fl.accumulate(2), fl.clip(1.0))(toy_loss)
        >>> step
        pipeline(accumulate(2), clip(1.0))(toy_loss)
        >>> state, out = step(toy(), [torch.tensor([3.0]), torch.tensor([5.0])])
        >>> round(state.model.w.item(), 4), out.metrics["grad_norm"].compute()
        (-1.0, 4.0)

        The mean of the gradients, 4, is clipped to 1.
    """
    check_middleware(middleware)
    return Pipeline(middleware)


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


class PipelineStep:
    """A step: ``step(state, batch) -> (state, Output)``. One call is one update.

    With ``accumulate(n)`` it takes a sequence of up to n batches instead of one. A bare call draws
    from the global generators as any PyTorch code does; ``fit`` positions them.

    Args:
        pipeline: the middleware.
        loss_fn: the loss function.
    """

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn) -> None:
        self.pipeline, self.loss_fn = pipeline, loss_fn
        self.window = max((m.window for m in pipeline.middleware), default=1)
        self._layers = Layers()
        listed = any(m.name == "amp" for m in pipeline.middleware)
        name = name_of(loss_fn)
        innermost = forward(self._wrapped_loss_fn(), name, amp_listed=listed)
        self._layers.add(innermost, f"the loss function {name}")
        self._innermost: Any = (
            None if all(map(is_ours, pipeline.middleware)) else functools.partial(innermost)
        )
        self.forward = self._ring("forward", self._innermost or innermost)
        # Without the checks of a bare call: what the loop calls.
        self.train = toolz.pipe(
            self.forward,
            functools.partial(self._ring, "loss"),
            self._backward,
            functools.partial(self._ring, "gradient"),
            self._update,
            functools.partial(self._ring, "update"),
            functools.partial(self._ring, "device"),
            functools.partial(self._ring, "step"),
        )

    def _wrapped_loss_fn(self) -> LossFn:
        wraps = [m.loss_fn for m in self.pipeline.middleware if m.loss_fn is not None]
        return toolz.pipe(self.loss_fn, *wraps)

    def _backward(self, step: Step) -> Step:
        backward = Backward(step, may_skip=self._may_skip("forward", "loss"))
        self._layers.add(backward, "backward")
        return backward

    def _update(self, step: Step) -> Step:
        updating = update(step, may_skip=self._may_skip("gradient"))
        self._layers.add(updating, OPTIMIZER)
        return updating

    def _ring(self, ring: str, step: Step) -> Step:
        for member in self.pipeline.middleware:
            wrap = getattr(member, ring)
            if wrap is not None:
                inside, step = step, wrap(step)
                if not callable(step):
                    raise TypeError(
                        f"{member!r} must wrap a step into a step, but its {ring} ring returned "
                        f"{describe(step)}. Did you forget to return the inner function?"
                    )
                if step is not inside:
                    is_users = not is_ours(member)
                    self._layers.add(step, repr(member), is_users)
                    step = self._checked_once(step, member, ring) if is_users else step
        return step

    def _checked_once(self, step: Step, member: Middleware, ring: str) -> Step:
        """Return a user's step whose first reply is checked.

        From then on it is called without a frame in between.
        """

        def first(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with self._calls_noted() as calls:
                reply = step(state, batch)
            check_step_reply(reply, f"{member!r}, in its {ring} ring,")
            if not calls and reply[1].skip is None and engine_of(state).calls_every_batch:
                raise ValueError(
                    f"{member!r} did not call the step that it wraps, so nothing was trained: "
                    "write state, out = step(state, batch); or, to skip an update, return an "
                    'Output with skip="why"'
                )
            checked.__setstate__((step, (), {}, vars(checked)))
            return reply

        checked: Any = functools.partial(first)
        vars(checked).update(getattr(step, "__dict__", {}))
        return checked

    @contextlib.contextmanager
    def _calls_noted(self) -> Iterator[list[int]]:
        """Note the calls of the loss function, within a ``with`` block."""
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
        """Return whether third-party middleware in these rings may skip a batch or an update."""
        return any(
            getattr(m, ring) is not None
            for ring in rings
            for m in self.pipeline.middleware
            if not is_ours(m)
        )

    def layer_of(self, error: BaseException) -> str:
        """Return the name of the layer in which an exception was raised."""
        return self._layers.layer_of(error)

    def explain(self, error: BaseException) -> None:
        """Add to an exception what the layers know about it: which middleware is to blame."""
        self._layers.explain(error)

    def __repr__(self) -> str:
        return f"{self.pipeline!r}({name_of(self.loss_fn)})"

    def __str__(self) -> str:
        return html.diagram_text(f"{name_of(self.loss_fn)}(model, batch)", _rings(self.pipeline))

    def _repr_html_(self) -> str:
        return html.diagram(f"{name_of(self.loss_fn)}(model, batch)", _rings(self.pipeline))

    def __reduce__(self) -> tuple[Pipeline, tuple[LossFn]]:
        return self.pipeline, (self.loss_fn,)

    def init_slots(self, state: TrainState, ring: str | None = None) -> TrainState:
        """Return the state with the slots that the middleware need, of a ring or of all."""
        __tracebackhide__ = True
        members = self.pipeline.middleware
        return init_slots(
            state, [m for m in members if ring is None or getattr(m, ring) is not None]
        )

    def __call__(
        self, state: TrainState, batch: Batch | Sequence[Batch]
    ) -> tuple[TrainState, Output]:
        """Make one update.

        Args:
            state: the newest state.
            batch: a batch, or a sequence of up to ``window`` batches with ``accumulate(window)``.

        Returns:
            The new state, and the output for the batch.

        Raises:
            StaleStateError: the state has been advanced already.
        """
        __tracebackhide__ = True
        check_not_stale(state, "step")
        try:
            state, out = self.train(self.init_slots(state), to_device(batch, state.backend.device))
        except Exception as error:
            self.explain(error)
            raise
        batches = 1 if self.window == 1 else len(batch)
        return consume(state, out, batches * state.backend.world_size), out

    def evaluate(self, state: TrainState, batch: Batch) -> Output:
        """Evaluate one batch: in evaluation mode, without gradients, only up to the forward ring.

        Args:
            state: the newest state. It is not changed, and the global generators are not either.
            batch: one batch, whatever the window.

        Returns:
            Loss, weight, aux and metrics of the batch.
        """
        __tracebackhide__ = True
        check_not_stale(state, "step.evaluate")
        device = state.backend.device
        with isolated(device), evaluating(state.model):
            ready = self.init_slots(state, "forward")
            return self.forward(ready, to_device(batch, device))[1]
