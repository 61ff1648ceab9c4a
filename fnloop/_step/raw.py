"""A step of one's own: a function that does its own backward and updates, within fnloop's runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from numbers import Real

import attrs
import toolz
from torch import Tensor, nn

from fnloop._core.call import Call, name_of
from fnloop._core.middleware import Middleware
from fnloop._core.ownership import StaleStateError
from fnloop._core.state import TrainState, advance, begin_update, give_up_ownership
from fnloop._core.types import Batch, LossFn, Output, Step
from fnloop._display import checks
from fnloop._step.composition import check_around
from fnloop._step.engine import engine_of
from fnloop._step.exact import check_not_exact
from fnloop._step.pipeline import LossStep, Pipeline, PipelineStep

__all__ = ["RawStep", "raw"]

RawFn = Callable[[TrainState, Batch], Output]
# What a function does by itself: the parts of a middleware that it would ignore.
_IGNORED = ("loss_fn", "forward", "loss", "gradient", "update", "device")
_MADE_BY_IT = ("gradient", "update")  # the rings of every other step
_EXPECTED = "Output(loss, weight=items), with the loss as a scalar tensor"


def raw(fn: Callable[[TrainState, Batch], Output], evaluate: LossFn | None = None) -> RawStep:
    """Make a step of a function that does its own backward and updates, such as that of a GAN.

    A run counts, records, saves and restarts it as any other step: one call is one update, however
    many optimizers ``fn`` calls. Gradients are cleared before and after each call, because they are
    not saved. An optimizer that ``fn`` only closes over is not saved either: a run that is resumed
    begins with a new one. If ``fn`` raises, the weights may be between two updates, so the state
    cannot be used any more.

    Middleware of the step ring and the ring "evaluation", and ``derive``, can be put around it:
    ``pipeline(schedule(cosine()))(raw(fn))``. All others act on what ``fn`` does by itself, and are
    refused.

    Args:
        fn: ``(state, batch) -> Output``. It trains ``state.model`` with ``state.optimizer``, in
            place, and returns the loss to report, its number of items, and any metrics. It makes no
            update if the output says ``skip="why"``.
        evaluate: the loss function for the loaders that are evaluated; None: there are none.

    Returns:
        A step.

    Raises:
        TypeError: ``fn`` or ``evaluate`` is not such a function. In a run: ``fn`` did not return an
            Output.
        ValueError: when composing: a middleware would be ignored. When a run starts: a loader is
            to be evaluated, and there is no ``evaluate``.
        NotImplementedError: when a run starts: there are several processes. The gradients would not
            be averaged.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def twice(state, batch):
        ...     for _ in range(2):
        ...         state.optimizer.zero_grad()
        ...         loss, aux = toy_loss(state.model, batch)
        ...         loss.backward()
        ...         state.optimizer.step()
        ...     return fl.Output(loss, weight=len(batch), aux=aux)
        >>> state = fl.fit(raw(twice), toy(), [torch.tensor([1.0]), torch.tensor([2.0])], hooks=())
        >>> state.step, state.model.w.item()
        (2, -6.0)
    """
    if isinstance(fn, type | nn.Module | TrainState | Pipeline | PipelineStep):
        raise TypeError(f"raw expects a function (state, batch) -> Output; got {name_of(fn)}")
    checks.function("raw", "fn", fn, "a function (state, batch) -> Output", 2)
    if evaluate is not None:
        checks.function("raw", "evaluate", evaluate, "a loss function (model, batch), or None", 2)
    return RawStep(Pipeline(()), fn, evaluate)


class RawStep(LossStep):
    """The step of a function that does its own backward and updates. See :func:`raw`.

    Args:
        pipeline: the middleware around it.
        fn: the function.
        evaluate: the loss function of an evaluation, or None.
    """

    def __init__(self, pipeline: Pipeline, fn: RawFn, evaluate: LossFn | None) -> None:
        self.fn, self.evaluated_by = fn, evaluate
        super().__init__(pipeline, self._refuse_to_evaluate if evaluate is None else evaluate)

    def inside(self, pipeline: Pipeline) -> RawStep:
        """Return the same step with middleware around it.

        Raises:
            ValueError: it would ignore one of them.
        """
        check_around(pipeline.middleware, _IGNORED, self._explain)
        return RawStep(Pipeline((*self.pipeline.middleware, *pipeline.middleware)), *self._given())

    def _explain(self, member: Middleware, acts: str, ignored: Sequence[str]) -> str:
        name, hint = name_of(self.fn), ""
        if [*ignored] == ["forward"] and member.name.startswith("metric"):
            hint = ', or write metric(..., on="evaluation")'
        return (
            f"{member!r} {acts}, but {name} does its own forward, backward and updates, and would "
            f"ignore it: leave it out, and do its work in {name}{hint}"
        )

    def _given(self) -> tuple[RawFn, LossFn | None]:
        return self.fn, self.evaluated_by

    def _compose_training(self) -> Step:
        own = _counted(self.fn)
        self._layers.add(self.fn, name_of(self.fn))
        return toolz.pipe(own, functools.partial(self._ring, "step"))

    @contextlib.contextmanager
    def _calls_noted(self) -> Iterator[list[int]]:
        yield [1]  # what calls the function need not call the loss function

    def check_evaluation(self, loaders: Sequence[str]) -> None:
        if loaders and self.evaluated_by is None:
            raise ValueError(f"{self!r} {self._no_evaluation()}: {checks.join_names(loaders)}")

    def _refuse_to_evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        raise ValueError(f"{self!r} {self._no_evaluation()}")

    def _no_evaluation(self) -> str:
        name = name_of(self.fn)
        return f"cannot evaluate a loader: write raw({name}, evaluate=loss_fn)"

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        __tracebackhide__ = True
        if not evaluation:
            its = "it runs its own backward, so no other step can sum its gradients in a tree"
            check_not_exact(state, repr(self), f"{its}. Leave exact=True out")
        if not (evaluation or engine_of(state).calls_every_batch):
            raise NotImplementedError(
                f"{self!r} works in one process only: {name_of(self.fn)} runs its own backward, so "
                "the gradients of several would not be averaged"
            )
        return super().init_slots(state, evaluation=evaluation)

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        core, rings = f"{name_of(self.fn)}(state, batch)", super()._shown()[1]
        if self.evaluated_by is not None:
            core += f"; in evaluation: {name_of(self.evaluated_by)}(model, batch)"
        return core, [(ring, acting) for ring, acting in rings if ring not in _MADE_BY_IT]

    def __repr__(self) -> str:
        fn, loss_fn = self._given()
        shown = repr(Call(raw, (fn,), {} if loss_fn is None else {"evaluate": loss_fn}))
        return f"{self.pipeline!r}({shown})" if self.pipeline.middleware else shown

    def __reduce__(self) -> tuple[type[RawStep], tuple[Pipeline, RawFn, LossFn | None]]:  # type: ignore[override]
        return RawStep, (self.pipeline, *self._given())


def _counted(fn: RawFn) -> Step:
    """Return the step that calls a function, and counts its update."""

    def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        params = begin_update(state)
        for p in params:
            p.grad = None
        give_up_ownership(state)  # the function may change the parameters at any time
        try:
            out = fn(state, batch)
        except StaleStateError as error:
            error.add_note(
                f"{name_of(fn)} makes the update itself: it calls the loss function, backward and "
                "the optimizer, and no step"
            )
            raise
        finally:
            for p in params:
                p.grad = None
        _check_reply(out, name_of(fn))
        out = attrs.evolve(out, loss=out.loss.detach())
        return advance(state, out.skip is None), out

    return counted


def _check_reply(out: object, name: str) -> None:
    if not isinstance(out, Output):
        hint = ". Return the Output alone" if isinstance(out, tuple) else ""
        raise TypeError(f"{name} must return {_EXPECTED}; got {checks.describe(out)}{hint}")
    if not isinstance(out.loss, Tensor) or out.loss.ndim:
        raise TypeError(f"{name} must return {_EXPECTED}; got loss={checks.describe(out.loss)}")
    if out.skip is not None and not isinstance(out.skip, str):
        raise TypeError(
            f'{name} must return an Output with skip="why", or None for an update that was made; '
            f"got {checks.describe(out.skip)}"
        )
    weight: object = out.weight
    scalar = isinstance(weight, Tensor) and not weight.ndim
    counts = isinstance(weight, Real) and not isinstance(weight, bool) and weight >= 0
    if not scalar and not counts:
        raise TypeError(f"{name} must return {_EXPECTED}; got weight={checks.describe(weight)}")
    for key, metric in out.metrics.items():
        if not callable(getattr(metric, "compute", None)):
            raise TypeError(
                f"{name} must return metrics such as {{{key!r}: Mean(value, items)}}; got "
                f"{checks.describe(metric)}"
            )
