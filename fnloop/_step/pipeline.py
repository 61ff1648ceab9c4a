"""Composition: the rings of middleware around forward, backward and update.

    pipeline(a, b)(loss_fn) == pipe(
        loss_fn, forward, ...forward ring..., ...loss ring..., backward, ...gradient ring...,
        update, ...update ring..., ...device ring..., ...step ring...
    )

A step by itself is the three in the middle: forward, backward and update. Within a ring, what is
listed first is innermost.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import attrs
import toolz

from fnloop._backend.transfer import to_device
from fnloop._core.average import check_not_averaged
from fnloop._core.call import name_of
from fnloop._core.carry import TBPTT, with_carry
from fnloop._core.middleware import Middleware
from fnloop._core.monitor import check_loaders
from fnloop._core.rng import isolated
from fnloop._core.skip import may_skip
from fnloop._core.state import TrainState, check_not_stale, clear_parameter_cache, consume
from fnloop._core.types import EVALUATION, Batch, LossFn, Output, Step
from fnloop._display import html
from fnloop._display.checks import describe
from fnloop._step.backward import Backward
from fnloop._step.carry import carrying
from fnloop._step.composition import (
    check_loss_fn,
    check_middleware,
    in_order,
    is_guard,
    is_ours,
    rings_of,
    window_in,
)
from fnloop._step.engine import engine_of
from fnloop._step.evaluation import evaluating
from fnloop._step.first_reply import Replaceable, calls_noted, checked_once
from fnloop._step.forward import forward
from fnloop._step.gradients import LossRoot
from fnloop._step.layers import Layers
from fnloop._step.optimizer_modes import evaluation_weights, to_training
from fnloop._step.reports import add_reported
from fnloop._step.slots import init_slots, renew_slots
from fnloop._step.update import CLOSURE, CREATE_GRAPH, OPTIMIZER, update

__all__ = ["LossStep", "Pipeline", "PipelineStep", "pipeline"]


@attrs.frozen(repr=False)
class Pipeline:
    """Middleware in the order in which data flows through them.

    Call it with a loss function to get a step.
    """

    middleware: tuple[Middleware, ...]

    def __repr__(self) -> str:
        return f"pipeline({', '.join(map(repr, self.middleware))})"

    def _repr_html_(self) -> str:
        return html.diagram("loss_fn(model, batch)", rings_of(self.middleware))

    def __call__(self, loss_fn: LossFn | PipelineStep, *batch: Batch) -> PipelineStep:
        """Return the step of a loss function, or that of ``raw`` with middleware around it.

        Args:
            loss_fn: ``(model, batch) -> loss`` or ``-> (loss, aux)``; with ``tbptt``,
                ``(model, batch, carry) -> (loss, aux, carry)``. Or what ``raw(fn)`` returns.

        Raises:
            TypeError: it is not such a function.
        """
        if isinstance(loss_fn, TrainState) or batch:
            raise TypeError(
                f"a pipeline takes a loss function first: write {self!r}(loss_fn)(state, batch)"
            )
        if isinstance(loss_fn, PipelineStep):
            return loss_fn.inside(self)
        check_loss_fn(loss_fn, any(m.name == TBPTT for m in self.middleware))
        return LossStep(self, loss_fn)


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


class PipelineStep(abc.ABC):
    """A step: ``step(state, batch) -> (state, Output)``. One call is one update.

    With ``accumulate(n)`` it takes a sequence of up to n batches instead of one. A bare call draws
    from the global generators as any PyTorch code does; ``fit`` positions them.

    Args:
        pipeline: the middleware around what a kind of step does by itself.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.window = max((m.window for m in pipeline.middleware), default=1)
        self._layers = Layers()
        self.is_timed = any(m.name == "timings" for m in pipeline.middleware)
        self.carries = any(m.name == TBPTT for m in pipeline.middleware)
        innermost = self._compose_innermost()
        self._innermost: Replaceable | None = (
            None if all(map(is_ours, pipeline.middleware)) else functools.partial(innermost)
        )
        self.forward = self._ring("forward", self._innermost or innermost)
        self._passes: list[Callable[[TrainState, bool], AbstractContextManager[object]]] = []
        # Of a loader that is evaluated, without the checks of a bare call.
        self.evaluation = self._ring(EVALUATION, self.forward)
        self._reporting = tuple(m for m in pipeline.middleware if m.report is not None)
        # Without the checks of a bare call: what the loop calls.
        self.train = self._compose_training()

    @property
    @abc.abstractmethod
    def evaluates(self) -> str:
        """The name of the loss function of an evaluation."""

    @abc.abstractmethod
    def _compose_innermost(self) -> Step:
        """Return what the forward ring is around: what evaluates a batch."""

    @abc.abstractmethod
    def _compose_training(self) -> Step:
        """Return what makes an update, with all rings around it."""

    @abc.abstractmethod
    def inside(self, pipeline: Pipeline) -> PipelineStep:
        """Return the same step with more middleware around it, if it can have any."""

    @abc.abstractmethod
    def _repr_html_(self) -> str: ...

    def precision_in(self, state: TrainState) -> str | None:
        """Return what ``amp`` computes in, or else accelerate: "bf16" or "fp16"; None: neither."""
        for m in self.pipeline.middleware:
            if m.name == "amp" and m.call is not None:
                return str((*m.call.args, m.call.kwargs.get("precision"))[0] or "") or None
        return state.backend.precision

    def check_loaders(self, loaders: Sequence[str]) -> None:
        """Raise KeyError if a middleware is for a loader that a run does not have."""
        for member in self.pipeline.middleware:
            check_loaders(repr(member), member.loaders, loaders)

    def check_evaluation(self, loaders: Sequence[str]) -> None:  # noqa: B027
        """Raise ValueError if it cannot evaluate these loaders."""

    def _ring(self, ring: str, step: Step) -> Step:
        members = self.pipeline.middleware
        if ring == EVALUATION:  # what evaluates more than once is around all others
            members = sorted(members, key=lambda m: getattr(m.evaluation, "around", 0))
        for member in in_order(members, ring):
            wrap = getattr(member, ring)
            if wrap is not None:
                inside, step = step, wrap(step)
                if (evaluation_pass := getattr(wrap, "evaluation_pass", None)) is not None:
                    self._passes.append(evaluation_pass)
                if not callable(step):
                    raise TypeError(
                        f"{member!r} must wrap a step into a step, but its {ring} ring returned "
                        f"{describe(step)}. Did you forget to return the inner function?"
                    )
                if step is not inside:
                    is_users = not is_ours(member)
                    self._layers.add(step, repr(member), is_users, ring != EVALUATION)
                    if is_users:
                        step = checked_once(step, member, ring, self._calls_noted)
        return step

    def _calls_noted(self) -> AbstractContextManager[list[int]]:
        """Note the calls of the loss function, within a ``with`` block."""
        assert self._innermost is not None
        return calls_noted(self._innermost)

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

    def begin_run(self, state: TrainState) -> None:
        """Forget what was found out in an earlier run, and prepare the optimizers for training."""
        clear_parameter_cache(state)
        engine_of(state).begin_run(state)
        to_training(state)

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        """Return the state with the slots that the middleware need, for an evaluation or at all."""
        __tracebackhide__ = True
        members = self.pipeline.middleware
        if evaluation:
            members = tuple(m for m in members if m.forward is not None or m.evaluation is not None)
        return init_slots(state, members)

    def window_in(self, epoch: int) -> int:
        """Return how many batches one call takes in an epoch, counted from that of the phase."""
        return window_in(epoch, self.pipeline.middleware, self.window)

    def renew_slots(self, state: TrainState) -> TrainState:
        """Return the state without the slots that are made again when a phase begins."""
        return renew_slots(state, self.pipeline.middleware)

    @contextlib.contextmanager
    def evaluating(self, state: TrainState, *, together: bool) -> Iterator[TrainState]:
        """Evaluation mode, within a ``with`` block; middleware prepare what they evaluate.

        It gives the state with which a pass over a loader begins: nothing is carried into it.

        Args:
            state: the state, with its slots.
            together: whether every process is here.
        """
        with evaluating(state.model), evaluation_weights(state), contextlib.ExitStack() as stack:
            for evaluation_pass in self._passes:
                stack.enter_context(evaluation_pass(state, together))
            yield with_carry(state, None) if self.carries else state

    def derive(
        self,
        values: Mapping[str, float],
        loaders: Iterable[str] | None = None,
        known: Container[str] = (),
    ) -> dict[str, float]:
        """Return the numbers of a report with those that middleware add to them.

        Args:
            values: name to number; the names begin with that of a loader.
            loaders: the names of the loaders that the run evaluates; None: names have no prefix.
            known: the names of the numbers of earlier reports.

        Raises:
            KeyError: no loader has a number that a middleware needs.
            ValueError, TypeError: a middleware adds what is there already, or not a number.
        """
        __tracebackhide__ = True
        if not self._reporting:
            return dict(values)
        return add_reported(self._reporting, values, loaders, known)

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
        to_training(state)
        check_not_averaged("step", state)
        try:
            state, out = self.train(self.init_slots(state), to_device(batch, state.backend.device))
        except Exception as error:
            self.explain(error)
            raise
        batches = 1 if self.window == 1 else len(batch)
        return consume(state, out, batches * state.backend.data_size), out

    def evaluate(self, state: TrainState, batch: Batch) -> Output:
        """Evaluate one batch: in evaluation mode, without gradients, only up to the forward ring.

        Args:
            state: the newest state. Nothing of it is changed, buffers included, and the global
                generators are not either.
            batch: one batch, whatever the window.

        Returns:
            Loss, weight, aux and metrics of the batch.
        """
        __tracebackhide__ = True
        check_not_stale(state, "step.evaluate")
        device = state.backend.device
        with isolated(device):
            ready = self.init_slots(state, evaluation=True)
            with self.evaluating(ready, together=False) as ready:
                out = self.evaluation(ready, to_device(batch, device))[1]
        return attrs.evolve(out, loss=out.loss.detach())


class LossStep(PipelineStep):
    """The step of a loss function.

    Args:
        pipeline: the middleware.
        loss_fn: the loss function.
    """

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        super().__init__(pipeline)

    @property
    def evaluates(self) -> str:
        return name_of(self.loss_fn)

    def _compose_innermost(self) -> Step:
        members = in_order(self.pipeline.middleware, "step")
        wraps = [m.loss_fn for m in members if m.loss_fn is not None]
        name, amp_listed = name_of(self.loss_fn), any(m.name == "amp" for m in members)
        innermost = forward(toolz.pipe(self.loss_fn, *wraps), name, amp_listed)
        innermost = carrying(innermost) if self.carries else innermost
        self._layers.add(innermost, f"the loss function {name}")
        return innermost

    def _compose_training(self) -> Step:
        return toolz.pipe(
            self.forward,
            functools.partial(self._ring, "loss"),
            self._backward,
            functools.partial(self._ring, "gradient"),
            self._update,
            functools.partial(self._ring, "update"),
            functools.partial(self._ring, "device"),
            functools.partial(self._ring, "step"),
        )

    def _backward(self, step: Step) -> Step:
        again = any(m.name == CREATE_GRAPH for m in self.pipeline.middleware)
        skips = self._may_skip("forward", "loss")
        backward = Backward(LossRoot(step, None, skips, again, name_of(self.loss_fn)))
        self._layers.add(backward, "backward")
        return backward

    def _update(self, step: Step) -> Step:
        by_closure = any(m.name in (CLOSURE, CREATE_GRAPH) for m in self.pipeline.middleware)
        skips = self._may_skip("forward", "loss", "gradient")
        guarded = skips or any(map(is_guard, self.pipeline.middleware)) or may_skip(self.loss_fn)
        updating = update(step, self._may_skip("gradient"), by_closure, guarded)
        self._layers.add(updating, OPTIMIZER)
        return updating

    def inside(self, pipeline: Pipeline) -> PipelineStep:
        raise TypeError(
            f"a pipeline takes a loss function, but {self!r} is a step already: list all "
            f"middleware in one pipeline(...)({name_of(self.loss_fn)})"
        )

    def __repr__(self) -> str:
        return f"{self.pipeline!r}({name_of(self.loss_fn)})"

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        return f"{name_of(self.loss_fn)}(model, batch)", rings_of(self.pipeline.middleware)

    def __str__(self) -> str:
        return html.diagram_text(*self._shown())

    def _repr_html_(self) -> str:
        return html.diagram(*self._shown())

    def __reduce__(self) -> tuple[Pipeline, tuple[LossFn]]:
        return self.pipeline, (self.loss_fn,)
