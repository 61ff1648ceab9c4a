"""Steps of functions that do their own backward, and those that make updates themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fnloop._core.state import StaleStateError, TrainState
from fnloop._core.types import LossFn, Middleware, Output, Step, skip
from fnloop._step.pipeline import pipeline
from fnloop.extend import (
    Batch,
    Call,
    Ownership,
    PipelineStep,
    all_parameters,
    check_not_stale,
    checks,
    name_of,
    optimizers,
    refuse,
    torch_compat,
)

RawFn = Callable[[TrainState, Batch], Output]

# --------------------------------------------------------------------------------------------------
# A step of one's own: a function that does its own backward and updates, within fnloop's runs.

# What a function does by itself: the parts of a middleware that it would ignore.
_IGNORED = ("loss_fn", "forward", "loss", "gradient", "update", "device")
_OF_OTHERS = ("gradient", "update")  # the rings of every other step


def raw(
    fn: Callable[[TrainState, Batch], Output],
    evaluate: LossFn | None = None,
    updates: bool = True,
) -> PipelineStep:
    """Make a step from a function that does its own backward and updates, as some GANs need.

    A run counts, records, saves and resumes it like any other step: one call is one update, however
    many optimizers ``fn`` calls. Gradients are cleared before and after each call, because they are
    not saved. An optimizer that ``fn`` only closes over is not saved either: a resumed run begins
    with a new one. If ``fn`` raises, the weights may be between two updates, so the state can no
    longer be used.

    With ``updates=False``, ``fn`` makes only the gradients: it leaves them in ``.grad``, by calling
    ``loss.backward()`` or by setting them. They are gradients of the mean over the items of its
    batch. Everything else is as for a loss function: middleware of all rings but "device", and
    several processes, whose gradients are averaged by weight.

    Args:
        fn: ``(state, batch) -> Output``. It trains ``state.model`` with ``state.optimizer``, in
            place, and returns the loss to report, its number of items, and any metrics. It makes no
            update if the output says ``skip="why"``.
        evaluate: the loss function for the loaders that are evaluated; None: there are none.
        updates: whether ``fn`` updates the weights too. False is for gradients that one backward
            from one loss does not make: GradCache, evolution strategies, forward-mode gradients.

    Returns:
        A step.

    Raises:
        TypeError: ``fn`` or ``evaluate`` is not such a function. In a run: ``fn`` did not return an
            Output.
        ValueError: when composing: a middleware would be ignored. When a run starts: a loader is
            to be evaluated, and there is no ``evaluate``. With ``updates=False``, in a run: ``fn``
            made no gradient, or called the optimizer.
        NotImplementedError: when a run starts: there are several processes, whose gradients would
            not be averaged. With ``updates=False``: the model is under ``fully_shard``.

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
        >>> def difference(state, batch):                    # a gradient without a backward
        ...     loss, nearby = ((w * batch).mean() for w in (state.model.w, state.model.w + 0.5))
        ...     state.model.w.grad = (nearby - loss).detach() / 0.5
        ...     return fl.Output(loss, weight=len(batch))
        >>> step = fl.pipeline(fl.clip(2.0))(raw(difference, updates=False))
        >>> state, out = step(toy(), torch.tensor([1.0, 5.0]))
        >>> round(state.model.w.item(), 4), out.metrics["grad_norm"].compute()
        (-2.0, 3.0)

    Notes:
        Middleware of the step ring and the ring "evaluation", and ``derive``, can be put around it:
        ``pipeline(schedule(cosine()))(raw(fn))``. All others act on what ``fn`` does by itself, and
        are refused.

        With ``updates=False``, all but these can: what replaces the loss function (``compiled``,
        ``scheduled``, ``tbptt``), ``cuda_graph``, ``retry_on_oom``, ``amp("fp16")``, whose loss
        scale does not reach a backward inside ``fn``, and ``closure(create_graph=True)``. Under
        ``amp("bf16")`` all of ``fn`` runs under autocast. With ``accumulate(n)`` it is called for
        each batch of a window, and with ``microbatch(size)`` for each piece of a batch. A skipped
        batch is out of the window, as with :func:`skip`.
    """
    if isinstance(fn, type | nn.Module | TrainState | type(pipeline()) | PipelineStep):
        raise TypeError(f"raw expects a function (state, batch) -> Output; got {name_of(fn)}")
    checks.function("raw", "fn", fn, "a function (state, batch) -> Output", 2)
    if evaluate is not None:
        checks.function("raw", "evaluate", evaluate, "a loss function (model, batch), or None", 2)
    checks.flag("raw", "updates", updates, "whether fn updates the weights")
    return (RawStep if updates else GradientStep)((), fn, evaluate)


class _StepOfFunction(PipelineStep):
    """The step of a function that does its own backward.

    Args:
        listed: the middleware around it.
        fn: the function.
        evaluate: the loss function of an evaluation, or None.
    """

    has_all_rings = False
    settings: Mapping[str, object] = MappingProxyType({})  # of the call of raw

    def __init__(self, listed: Sequence[Middleware], fn: RawFn, evaluate: LossFn | None) -> None:
        self.fn, self.name, self.evaluated_by = fn, name_of(fn), evaluate
        super().__init__(listed, self._refuse_to_evaluate if evaluate is None else evaluate)

    def inside(self, listed: tuple[Middleware, ...]) -> PipelineStep:
        """Return the same step with middleware around it.

        Raises:
            ValueError: it would ignore one of them.
        """
        self._check_listed(listed)
        return self.listing((*self.pipeline.middleware, *listed))

    def _check_listed(self, listed: Sequence[Middleware]) -> None:
        raise NotImplementedError

    def listing(self, listed: Sequence[Middleware]) -> PipelineStep:
        return type(self)(listed, *self.functions)

    @property
    def functions(self) -> tuple[RawFn, LossFn | None]:
        return self.fn, self.evaluated_by

    @contextlib.contextmanager
    def _calls_noted(self) -> Iterator[list[int]]:
        yield [1]  # what calls the function need not call the loss function

    def check_evaluation(self, loaders: Sequence[str]) -> None:
        if loaders and self.evaluated_by is None:
            raise ValueError(f"{self!r} {self._no_evaluation()}: {checks.join_names(loaders)}")

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        __tracebackhide__ = True
        self._refuse_stack(state)
        if not evaluation:
            refuse(state, repr(self), **self._cannot())
        return super().init_slots(state, evaluation=evaluation)

    def _cannot(self) -> dict[str, str]:
        """Return with what it cannot train, and why: arguments of :func:`refuse`."""
        raise NotImplementedError

    def _refuse_to_evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        raise ValueError(f"{self!r} {self._no_evaluation()}")

    def _no_evaluation(self) -> str:
        return f"cannot evaluate a loader: write raw({self.name}, evaluate=loss_fn)"

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        core = f"{self.name}(state, batch)"
        if self.evaluated_by is not None:
            core += f"; in evaluation: {name_of(self.evaluated_by)}(model, batch)"
        return core, super()._shown()[1]

    def __repr__(self) -> str:
        evaluate = {} if self.evaluated_by is None else {"evaluate": self.evaluated_by}
        shown = repr(Call(raw, (self.fn,), {**evaluate, **self.settings}))
        return f"{self.pipeline!r}({shown})" if self.pipeline.middleware else shown


class RawStep(_StepOfFunction):
    """The step of a function that makes updates itself. See :func:`raw`."""

    def _check_listed(self, listed: Sequence[Middleware]) -> None:
        self._check_around(listed, _IGNORED)

    def _explain(self, member: Middleware, acts: str, ignored: Sequence[str]) -> str:
        hint = ""
        if [*ignored] == ["forward"] and member.call and member.call.takes("on"):
            hint = f', or write {name_of(member.call.factory)}(..., on="evaluation")'
        return (
            f"{member!r} {acts}, but {self.name} does its own forward, backward and updates, and "
            f"would ignore it: leave it out, and do its work in {self.name}{hint}"
        )

    def _compose_training(self) -> Step:
        self._layers.add(self.fn, self.name)
        return self._chain(self._call, "step")

    def _call(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Call the function, and count its update."""
        __tracebackhide__ = True
        check_not_stale(state)
        params = all_parameters(state)
        for p in params:
            p.grad = None
        Ownership.give_up(state)  # the function may change the parameters at any time
        try:
            out = self.fn(state, batch)
        except StaleStateError as error:
            error.add_note(
                f"{self.name} makes the update itself: it calls the loss function, backward and "
                "the optimizer, and no step"
            )
            raise
        finally:
            for p in params:
                p.grad = None
        check_output(out, self.name)
        out = attrs.evolve(out, loss=out.loss.detach())
        return self._passed(state, out.skip is None), out

    def _check_optimizers(self, state: TrainState) -> None:
        """Do nothing: the function says which optimizers update."""

    def _cannot(self) -> dict[str, str]:
        its = "it runs its own backward, so no other step can sum its gradients in a tree"
        own = (
            f"{self.name} runs its own backward, so the gradients of several would not be averaged"
        )
        return {"exact": f"{its}. Leave exact=True out", "several": own}

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        core, rings = super()._shown()
        return core, [(ring, acting) for ring, acting in rings if ring not in _OF_OTHERS]


class GradientStep(_StepOfFunction):
    """The step of a function that makes gradients, and no update. See :func:`raw`.

    It is that of a loss function, whose backward leaves the gradients that the function has made.
    """

    settings = MappingProxyType({"updates": False})

    def __init__(self, listed: Sequence[Middleware], fn: RawFn, evaluate: LossFn | None) -> None:
        self._said: set[str] = set()  # reasons to leave a batch out that were logged
        super().__init__(listed, fn, evaluate)

    def _check_listed(self, listed: Sequence[Middleware]) -> None:
        for member in listed:
            if member.loss_fn is not None:
                why = f"replaces the loss function, and {self.name} takes its place"
            elif member.device is not None:
                why = f"would capture what {self.name} does, and not call it again"
            elif member.precision == "fp16":
                why = "scales the loss, which does not reach a backward inside "
                why += f'{self.name}: write amp("bf16")'
            elif "repeats" in member.traits:
                why = f"would repeat {self.name}: list microbatch(size) instead"
            elif "create_graph" in member.traits:
                why = f"differentiates gradients, and those of {self.name} have no graph"
            else:
                continue
            raise ValueError(f"raw({self.name}, updates=False): {member!r} {why}")

    @property
    def _leaves_out(self) -> bool:
        return True  # by its output

    def _compose_training(self) -> Step:
        self._layers.add(self.fn, self.name)
        return self._compose_update(self._chain(self._call, "forward"))

    def _call(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Call the function, and attach the gradients that it leaves in ``.grad`` to its loss."""
        __tracebackhide__ = True
        params = all_parameters(state)
        before = [p.grad for p in params]  # of the batches before it in a window
        versions = torch_compat.versions_of(params)
        for p in params:
            p.grad = None
        configured = self._own_precision is None and state.backend.precision is not None
        try:
            with (
                _no_update(state, self.name),
                state.backend.autocast() if configured else contextlib.nullcontext(),
            ):
                out = self.fn(state, batch)
            made = [(p, p.grad) for p in params if p.grad is not None]
        except BaseException:
            if versions != torch_compat.versions_of(params):
                Ownership.give_up(state)  # it raised between a change of the weights and the next
            raise
        finally:
            for p, gradient in zip(params, before, strict=True):
                p.grad = gradient
        check_output(out, self.name, whole=True)
        if out.skip is not None or (out.weight.__class__ is int and not out.weight):
            return state, skip(out.skip or _NO_ITEMS).output(state, self.name, self._said)
        if not made:
            raise ValueError(
                f"{self.name} made no gradient. With updates=False it leaves gradients in .grad: "
                "it calls loss.backward(), or sets p.grad of the parameters"
            )
        leaves, gradients = zip(*made, strict=True)
        loss = _WithGradients.apply(out.loss.detach(), gradients, *leaves)
        return state, attrs.evolve(out, loss=loss)

    def _cannot(self) -> dict[str, str]:
        averages = "averages gradients in a backward, before they can be weighed"
        why = f"does not work with fully_shard, which {averages}: leave fully_shard out"
        return {"sharded": why}


# --------------------------------------------------------------------------------------------------
# Gradients that a function has made by itself.
#
# They are taken out of `.grad`, and the loss that they report is attached to them: a
# backward from it leaves them there again. So what weighs, adds up and averages gradients over
# batches and processes does not know of them.

_NO_ITEMS = "the batch has no item: its weight is 0"
_EXPECTED = "Output(loss, weight=items), with the loss as a scalar tensor"
_Context = Any  # what backward needs of forward


class _WithGradients(torch.autograd.Function):
    """Identity on a loss whose gradients have been made already."""

    @staticmethod
    def forward(
        ctx: _Context, loss: Tensor, gradients: Sequence[Tensor], *leaves: Tensor
    ) -> Tensor:
        ctx.gradients = gradients
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, None, *(gradient * grad for gradient in ctx.gradients))


@contextlib.contextmanager
def _no_update(state: TrainState, name: str) -> Iterator[None]:
    """Raise if an optimizer of a state is stepped, within a ``with`` block."""
    own = {id(optimizer) for optimizer in optimizers(state).values()}

    def refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in own:
            raise ValueError(
                f"{name} called the step of {type(optimizer).__name__}, which with updates=False "
                f"the step itself does: leave it out of {name}, or write raw({name})"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


# --- the reply of a function that does its own backward


def check_output(out: object, name: str, whole: bool = False) -> None:
    """Raise TypeError unless a function has returned an Output.

    Args:
        out: what it returned.
        name: its name in messages.
        whole: whether its weight has to be a whole number, by which gradients are weighed.
    """
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
    kind = int if whole else Real
    counts = isinstance(weight, kind) and not isinstance(weight, bool) and weight >= 0
    if not scalar and not counts:
        of = ", an int or a scalar tensor" if whole else ""
        raise TypeError(f"{name} must return {_EXPECTED}{of}; got weight={checks.describe(weight)}")
    for key, metric in out.metrics.items():
        if not checks.has_methods(metric, "compute"):
            raise TypeError(
                f"{name} must return metrics such as {{{key!r}: Mean(value, items)}}; got "
                f"{checks.describe(metric)}"
            )
