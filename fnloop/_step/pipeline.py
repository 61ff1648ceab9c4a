"""Composition: the rings of middleware around forward, backward and update."""

from __future__ import annotations

import abc
import contextlib
import functools
import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import attrs
import toolz
import torch
from torch import Tensor, nn

from fnloop._backend.collectives import sync_buffers
from fnloop._backend.containers import to_device, vars_of
from fnloop._core.averages import check_not_averaged
from fnloop._core.code import code_of
from fnloop._core.history import check_loaders
from fnloop._core.metrics import update_evaluated_
from fnloop._core.optimizers import check_used, groups_in, to_training
from fnloop._core.rng import fold_in, isolated, seed_all, torch_seeder
from fnloop._core.runs import Windows
from fnloop._core.serialize import has_pending, materialize
from fnloop._core.several import Several, models_of
from fnloop._core.state import (
    StaleStateError,
    TrainState,
    advance,
    advance_used,
    all_parameters,
    bring,
    check_not_stale,
    clear_parameter_cache,
    consume,
    current_parameters,
    give_up_ownership,
    using_only,
    with_slot,
    with_slots,
    with_used,
)
from fnloop._core.types import (
    EVALUATION,
    RINGS,
    Batch,
    Call,
    LossFn,
    Middleware,
    Output,
    Step,
    View,
    is_ours,
    may_skip,
    name_of,
    wraps_of,
)
from fnloop._core.view import shown, view
from fnloop._display import checks, tables
from fnloop._display.checks import describe, join_names
from fnloop._display.frames import leave_out_frames
from fnloop._step.engine import engine_of, refuse
from fnloop._step.forward import (
    RawFn,
    check_output,
    forward,
    own_gradients,
)
from fnloop._step.gradients import LossRoot, NoGradientError, run
from fnloop._step.transaction import around, may_skip_in, transaction
from fnloop._step.update import (
    OPTIMIZER,
    Backward,
    add_reported,
    report,
    update,
)

#     pipeline(a, b)(loss_fn) == pipe(
#         loss_fn, forward, ...forward ring..., ...loss ring..., backward, ...gradient ring...,
#         update, ...update ring..., ...device ring..., ...step ring...
#     )
#
# A step by itself is the three in the middle: forward, backward and update. Within a ring, what is
# listed first is innermost.


@attrs.frozen(repr=False)
class Pipeline:
    """Middleware in the order in which data flows through them.

    Call it with a loss function to get a step.
    """

    middleware: tuple[Middleware, ...]

    def __repr__(self) -> str:
        return f"pipeline({', '.join(map(repr, self.middleware))})"

    def _repr_html_(self) -> str:
        return tables.diagram("loss_fn(model, batch)", rings_of(self.middleware))

    def __call__(self, loss_fn: LossFn | PipelineStep, *batch: Batch) -> PipelineStep:
        """Return the step of a loss function, or that of ``raw`` with middleware around it.

        Args:
            loss_fn: ``(model, batch) -> loss`` or ``-> (loss, aux)``; with ``tbptt``,
                ``(model, batch, carry) -> (loss, aux, carry)``; with ``scheduled(beta=...)``, a
                keyword ``beta`` too. Or what ``raw(fn)`` returns.

        Raises:
            TypeError: it is not such a function.
        """
        if isinstance(loss_fn, TrainState) or batch:
            raise TypeError(
                f"a pipeline takes a loss function first: write {self!r}(loss_fn)(state, batch)"
            )
        if isinstance(loss_fn, PipelineStep):
            return loss_fn.inside(self)
        check_loss_fn(loss_fn, self.middleware)
        return LossStep(self, loss_fn)


def pipeline(*middleware: Middleware) -> Pipeline:
    """Make a step from a loss function, with middleware in the order listed.

    ``pipeline(...)(loss_fn)`` is the step. Each middleware wraps a part of an update, its ring (see
    ``Middleware``). What is listed first is innermost. So
    ``pipeline(accumulate(4), clip(1.0))`` clips once per update, and ``pipeline(clip(1.0),
    accumulate(4))`` clips every micro-batch, then averages.

    The loss function takes the module and a batch, and returns the mean loss, or ``(loss, aux)``,
    where the mapping ``aux`` has what else metrics need. If the loss is not the mean over
    the leading dimension of the batch, ``aux["weight"]`` is the number of items that it is the mean
    of, such as a token count on the device. Losses, gradients and metrics are averaged by this
    weight. To skip a batch, the loss function returns ``skip(reason)``.

    Args:
        *middleware: what ``accumulate(4)``, ``clip(1.0)``, ... return.

    Returns:
        A function that takes a loss function and returns a step. Its repr is the code that made it.
        It can be compared and pickled.

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

    loss_fn: LossFn | None = None  # of a step that has one
    has_all_rings = False  # whether it is a loss function with all rings of middleware around it

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.window = max((m.window for m in pipeline.middleware), default=1)
        self._layers = Layers()
        self.fetches_late = False
        self.is_timed = bool(self._names_with("timed"))
        self.carries = bool(self._names_with("carries"))
        self._used = next((m.uses for m in pipeline.middleware if m.uses), None)
        innermost = self._compose_innermost()
        self._innermost: Replaceable | None = (
            None if all(map(is_ours, pipeline.middleware)) else functools.partial(innermost)
        )
        self.forward = self._ring("forward", self._innermost or innermost)
        # Of a loader that is evaluated, without the checks of a bare call.
        self.evaluation = self._ring(EVALUATION, self.forward)
        if beside := [m for m in pipeline.middleware if m.view is not None and m.view.beside]:
            carrying = self._names_with("carries")
            self.evaluation = evaluate_beside(self.evaluation, *carrying)
            self._layers.add(self.evaluation, join_names([*map(repr, beside)]), in_training=False)
        self._reporting = tuple(m for m in pipeline.middleware if m.report is not None)
        # Without the checks of a bare call: what the loop calls.
        self.train = self._compose_training()

    @staticmethod
    def checked(step: object, caller: str, before: str = "") -> PipelineStep:
        """Return what was given if it is a step, as a pipeline makes it.

        Args:
            step: what was given.
            caller: the function that it was given to.
            before: the arguments of that function before the step, as in "folder, ".

        Raises:
            TypeError: it is something else; the message says what to write.
        """
        if isinstance(step, PipelineStep):
            return step
        name = name_of(step)
        if isinstance(step, TrainState):
            hint = f"The step comes before the state: {caller}({before}step, state, ...)"
        elif isinstance(step, Pipeline):
            hint = f"It lacks its loss function: write {name}(loss_fn)"
        elif isinstance(step, Middleware):
            hint = f"Write pipeline({name})(loss_fn)"
        elif callable(step) and not isinstance(step, nn.Module):
            hint = f"If {name} is a loss function, write {caller}({before}pipeline()({name}), ...)"
        else:
            hint = "Write pipeline()(loss_fn)"
        raise TypeError(
            f"{caller} expects a step, as pipeline(...)(loss_fn) returns it; got {name:.60} "
            f"({type(step).__name__}). {hint}"
        )

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

    def listing(self, listed: Sequence[Middleware]) -> PipelineStep:
        """Return the same step with other middleware around it, if it is one of a function."""
        raise NotImplementedError

    @abc.abstractmethod
    def _repr_html_(self) -> str: ...

    @property
    def total(self) -> int | None:
        """The samples of an update in all processes together, if a middleware says so."""
        return next((m.total for m in self.pipeline.middleware if m.total is not None), None)

    def precision_in(self, state: TrainState) -> str | None:
        """Return what it computes in, "bf16" or "fp16"; None: in the precision of the model."""
        own = self._own_precision
        return state.backend.precision if own is None else own or None

    @property
    def _own_precision(self) -> str | None:
        """What a middleware computes in, whatever the run is configured for; None: none says so."""
        return next(
            (m.precision for m in self.pipeline.middleware if m.precision is not None), None
        )

    @property
    def turns(self) -> Mapping[str, PipelineStep]:
        """The steps that it calls in turn, by the names of their optimizers."""
        return {}

    def with_turns(self, steps: Mapping[str, PipelineStep]) -> PipelineStep:
        """Return the same step with other steps in turn, without middleware around them."""
        return self

    @property
    def watched(self) -> list[tuple[str, str]]:
        """Which metrics its middleware look at: (the middleware, the metric)."""
        return [(m.name, m.monitors) for m in self.pipeline.middleware if m.monitors is not None]

    def _names_with(self, trait: str) -> list[str]:
        """Return the names of the middleware that have a trait."""
        return [m.name for m in self.pipeline.middleware if trait in m.traits]

    def check_loaders(self, loaders: Sequence[str]) -> None:
        """Raise KeyError if a middleware is for a loader that a run does not have."""
        for member in self.pipeline.middleware:
            check_loaders(repr(member), member.loaders, loaders)

    def check_evaluation(self, loaders: Sequence[str]) -> None:  # noqa: B027
        """Raise ValueError if it cannot evaluate these loaders."""

    def _ring(self, ring: str, step: Step) -> Step:
        """Return a step with a ring of middleware around it."""
        for member in acting_in(self.pipeline.middleware, ring):
            step = self._layer(member, ring, step)
        return step

    def _layer(self, member: Middleware, ring: str, inside: Step) -> Step:
        """Return a step with one middleware around it, which errors know as a layer."""
        step = wraps_of(member)[ring](inside)
        check_wrapped(step, member, ring)
        if step is inside:
            return step
        is_users = not is_ours(member)
        self._layers.add(step, repr(member), is_users, ring != EVALUATION)
        if is_users:
            step = checked_once(step, member, ring, self._calls_noted)
        return around(step, member.keep) if ring == "step" and member.keep else step

    def _calls_noted(self) -> AbstractContextManager[list[int]]:
        """Note the calls of the loss function, within a ``with`` block."""
        assert self._innermost is not None
        return self._noting(self._innermost)

    @staticmethod
    def _noting(innermost: Replaceable) -> AbstractContextManager[list[int]]:
        return _calls_noted(innermost)

    def _check_around(self, listed: Sequence[Middleware], ignored: Sequence[str]) -> None:
        """Raise if a step that makes its updates by itself would ignore a middleware around it.

        Args:
            listed: the middleware.
            ignored: the rings, and other parts of a middleware, that it would ignore.

        Raises:
            ValueError: it would. The message is that of :meth:`_explain`.
        """
        for member in listed:
            parts = attrs.asdict(member, recurse=False)
            found = [part for part in ignored if parts[part] is not None]
            acts = None
            if "loss_fn" in found:
                acts = "replaces the loss function"
            elif found:
                acts = f"acts in the {found[0]} ring"
            elif member.window > 1:
                acts = "takes windows"
            elif "by_closure" in member.traits:
                acts = "says how the optimizer is called"
            elif member.uses:
                acts = "says which optimizers update"
            if acts is not None:
                raise ValueError(self._explain(member, acts, found))

    def _explain(self, member: Middleware, acts: str, ignored: Sequence[str]) -> str:
        """Return why the step would ignore a middleware that acts in these parts."""
        raise NotImplementedError

    def _refuse_stack(self, state: TrainState) -> None:
        """Raise NotImplementedError for several models, in a step that is not of one function."""
        if isinstance(state.model, Several):
            state.model.refuse(repr(self))

    def layer_of(self, error: BaseException) -> str:
        """Return the name of the layer in which an exception was raised."""
        return self._layers.layer_of(error)

    def explain(self, error: BaseException) -> None:
        """Add to an exception what the layers know about it: which middleware is to blame."""
        self._layers.explain(error)

    def without_batch(self, state: TrainState, counts: bool) -> tuple[TrainState, Output]:
        """Return what an update of no batch gives: nothing is changed but the counters.

        Args:
            state: the newest state.
            counts: whether it counts as applied, or as skipped.
        """
        several = models_of(state.model)
        loss = torch.zeros(len(several) if several else (), device=state.backend.device)
        return self._passed(state, counts), Output(loss, 0, skip=None if counts else "no batch")

    def _passed(self, state: TrainState, counts: bool) -> TrainState:
        """Return the state after an update that changes counters only."""
        if self._used is None:
            return advance(state, counts)
        return advance_used(state, with_used(state, self._used), counts)

    def begin_run(self, state: TrainState) -> None:
        """Forget what was found out in an earlier run, and prepare the optimizers for training."""
        clear_parameter_cache(state)
        engine_of(state).begin(state)
        to_training(state.optimizer)

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        """Return the state with the slots that the middleware need, for an evaluation or at all."""
        __tracebackhide__ = True
        members = self.pipeline.middleware
        if evaluation:
            members = tuple(
                m
                for m in members
                if m.forward or m.evaluation or m.view or View.is_pending(state.slots.get(m.name))
            )
        elif self._used is not None:
            check_used(state.model, state.optimizer, self._used)
            with using_only(state, self._used):
                return init_slots(state, members)
        return init_slots(state, members)

    def windows(self, epoch: int, update: int, batch: int, in_all: Callable[[int], int]) -> Windows:
        """Return how the batches of an epoch are grouped into updates.

        Args:
            epoch: the epoch, counted from that of the phase.
            update: the updates before, also skipped ones, counted from those of the phase.
            batch: where the epoch is.
            in_all: returns the batches of an update in all processes, given those in one.
        """
        sizes, by = self._varying
        if by == "step":
            every_process = {first: in_all(size) for first, size in sizes.items()}
            return Windows.by_update(every_process, batch, update)
        size = sizes[max(first for first in sizes if first <= epoch)]
        return Windows.always(in_all(size))

    def settles(self, epoch: int, update: int) -> bool:
        """Return whether windows never vary from there on, counted from those of the phase."""
        sizes, by = self._varying
        return max(sizes) <= (update if by == "step" else epoch)

    @property
    def _varying(self) -> tuple[Mapping[int, int], str]:
        """The windows by the first epoch or update that has them, from 0 on; and by which."""
        for member in self.pipeline.middleware:
            if member.windows:
                return {0: 1, **member.windows}, member.windows_by
        return {0: self.window}, "epoch"

    def renew_slots(self, state: TrainState, prefix: str = "") -> TrainState:
        """Return the state without the slots that are made again when a phase begins.

        Args:
            state: the state.
            prefix: what the names of its slots begin with.
        """
        old = {prefix + name for name in self._names_with("per_phase")}
        kept = {name: slot for name, slot in state.slots.items() if name not in old}
        return attrs.evolve(state, slots=kept)

    @contextlib.contextmanager
    def evaluating(self, state: TrainState, *, together: bool) -> Iterator[TrainState]:
        """View the model as in an evaluation, and the views of middleware, in a ``with`` block.

        It gives the state with which a pass over a loader begins: nothing is carried into it.

        Args:
            state: the state, with its slots.
            together: whether every process is here. Then all evaluate the main one's buffers.
        """
        with contextlib.ExitStack() as stack:
            seen = stack.enter_context(view(state, "evaluation", together=together))
            beside: dict[str, nn.Module] = {}
            for member in self.pipeline.middleware:
                if member.view is None:
                    continue
                model = stack.enter_context(shown(member.view, state))
                if together and model is not state.model:
                    sync_buffers(model)
                if not member.view.beside:
                    seen = model
                elif model is not state.model:
                    beside[member.name] = model
            evaluated = attrs.evolve(state, model=seen)
            evaluated = with_slot(evaluated, BESIDE, beside) if beside else evaluated
            for name in self._names_with("carries"):
                evaluated = with_slot(evaluated, name, None)
            yield evaluated

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
        to_training(state.optimizer)
        check_not_averaged("step", state)
        try:
            state, out = self.train(self.init_slots(state), to_device(batch, state.backend.device))
        except Exception as error:
            self.explain(error)
            leave_out_frames(error)
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
        try:
            with isolated(device):
                ready = self.init_slots(state, evaluation=True)
                with self.evaluating(ready, together=False) as ready:
                    out = self.evaluation(ready, to_device(batch, device))[1]
        except Exception as error:
            leave_out_frames(error)
            raise
        return out if out.loss is None else attrs.evolve(out, loss=out.loss.detach())


class LossStep(PipelineStep):
    """The step of a loss function.

    Args:
        pipeline: the middleware.
        loss_fn: the loss function.
    """

    has_all_rings = True

    def __init__(self, pipeline: Pipeline, loss_fn: LossFn) -> None:
        self.loss_fn: LossFn = loss_fn  # pyright: ignore[reportIncompatibleVariableOverride]
        super().__init__(pipeline)

    def listing(self, listed: Sequence[Middleware]) -> PipelineStep:
        """Return the same step with other middleware around it."""
        return Pipeline(tuple(listed))(self.loss_fn)

    @property
    def evaluates(self) -> str:
        return name_of(self.loss_fn)

    def _compose_innermost(self) -> Step:
        members = in_order(self.pipeline.middleware, "step")
        # What passes values to the loss function is next to it: the others know none.
        members.sort(key=lambda member: not member.passes)
        wraps = [m.loss_fn for m in members if m.loss_fn is not None]
        name, own_precision = name_of(self.loss_fn), self._own_precision is not None
        innermost = forward(toolz.pipe(self.loss_fn, *wraps), name, own_precision)
        self._layers.add(innermost, f"the loss function {name}")
        return innermost

    @property
    def _trains_by(self) -> LossFn | RawFn:
        """The function that an update calls."""
        return self.loss_fn

    @property
    def _leaves_out(self) -> bool:
        """Whether that function may skip a batch."""
        return may_skip(self.loss_fn)

    def _training_forward(self) -> Step:
        """Return the forward ring of an update."""
        return self.forward

    def _compose_training(self) -> Step:
        return toolz.pipe(
            self._training_forward(),
            functools.partial(self._ring, "loss"),
            self._backward,
            functools.partial(self._ring, "gradient"),
            self._update,
            functools.partial(self._ring, "update"),
            functools.partial(self._ring, "device"),
            functools.partial(self._ring, "step"),
            self._using,
        )

    def _using(self, step: Step) -> Step:
        """Return a step within which every middleware knows which optimizers update."""
        names = self._used
        if names is None:
            return step

        def using(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            with using_only(state, names):
                return step(state, batch)

        return using

    def begin_run(self, state: TrainState) -> None:
        super().begin_run(state)
        self._check_optimizers(state)

    def _check_optimizers(self, state: TrainState) -> None:
        """Raise ValueError unless one update can be made with the optimizers together."""
        check_used(state.model, state.optimizer, self._used)

    def _backward(self, step: Step) -> Step:
        again = bool(self._names_with("create_graph"))
        skips = may_skip_in(self.pipeline.middleware, "forward", "loss")
        root = LossRoot(step, None, skips, again, name_of(self._trains_by))
        backward = Backward(root, drops=self._used is not None)
        self._layers.add(backward, "backward")
        return backward

    def _update(self, step: Step) -> Step:
        members = self.pipeline.middleware
        by_closure = bool(self._names_with("by_closure"))
        transacted = transaction(step, members, self._leaves_out)
        updating = update(transacted, name_of(self._trains_by), by_closure, self._used)
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
        return tables.diagram_text(*self._shown())

    def _repr_html_(self) -> str:
        return tables.diagram(*self._shown())

    def __reduce__(self) -> tuple[Pipeline, tuple[LossFn]]:
        return self.pipeline, (self.loss_fn,)


# --------------------------------------------------------------------------------------------------
# A step of one's own: a function that does its own backward and updates, within fnloop's runs.

# What a function does by itself: the parts of a middleware that it would ignore.
_IGNORED = ("loss_fn", "forward", "loss", "gradient", "update", "device")
_MADE_BY_IT = ("gradient", "update")  # the rings of every other step


def raw(
    fn: Callable[[TrainState, Batch], Output],
    evaluate: LossFn | None = None,
    updates: bool = True,
) -> RawStep:
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
    if isinstance(fn, type | nn.Module | TrainState | Pipeline | PipelineStep):
        raise TypeError(f"raw expects a function (state, batch) -> Output; got {name_of(fn)}")
    checks.function("raw", "fn", fn, "a function (state, batch) -> Output", 2)
    if evaluate is not None:
        checks.function("raw", "evaluate", evaluate, "a loss function (model, batch), or None", 2)
    checks.flag("raw", "updates", updates, "whether fn updates the weights")
    return (RawStep if updates else GradientStep)(Pipeline(()), fn, evaluate)


class RawStep(LossStep):
    """The step of a function that does its own backward and updates. See :func:`raw`.

    Args:
        pipeline: the middleware around it.
        fn: the function.
        evaluate: the loss function of an evaluation, or None.
    """

    has_all_rings = False
    _settings: Mapping[str, object] = MappingProxyType(
        {}
    )  # of the call of raw, besides its functions

    def __init__(self, pipeline: Pipeline, fn: RawFn, evaluate: LossFn | None) -> None:
        self.fn, self.evaluated_by = fn, evaluate
        super().__init__(pipeline, self._refuse_to_evaluate if evaluate is None else evaluate)

    def inside(self, pipeline: Pipeline) -> RawStep:
        """Return the same step with middleware around it.

        Raises:
            ValueError: it would ignore one of them.
        """
        self._check_listed(pipeline.middleware)
        return self.listing((*self.pipeline.middleware, *pipeline.middleware))

    def listing(self, listed: Sequence[Middleware]) -> RawStep:
        """Return the same step with other middleware around it."""
        return type(self)(Pipeline(tuple(listed)), *self._given())

    def _check_listed(self, listed: Sequence[Middleware]) -> None:
        self._check_around(listed, _IGNORED)

    def _explain(self, member: Middleware, acts: str, ignored: Sequence[str]) -> str:
        name, hint = name_of(self.fn), ""
        if [*ignored] == ["forward"] and member.call and _takes(member.call, "on"):
            hint = f', or write {name_of(member.call.factory)}(..., on="evaluation")'
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

    def _check_optimizers(self, state: TrainState) -> None:
        """Do nothing: the function says which optimizers update."""

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
        self._refuse_stack(state)
        if not evaluation:
            its = "it runs its own backward, so no other step can sum its gradients in a tree"
            refuse(
                state,
                repr(self),
                exact=f"{its}. Leave exact=True out",
                several=f"{name_of(self.fn)} runs its own backward, so the gradients of several "
                "would not be averaged",
            )
        return super().init_slots(state, evaluation=evaluation)

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        core, rings = f"{name_of(self.fn)}(state, batch)", super()._shown()[1]
        if self.evaluated_by is not None:
            core += f"; in evaluation: {name_of(self.evaluated_by)}(model, batch)"
        return core, [(ring, acting) for ring, acting in rings if ring not in _MADE_BY_IT]

    def __repr__(self) -> str:
        fn, loss_fn = self._given()
        given = {**({} if loss_fn is None else {"evaluate": loss_fn}), **self._settings}
        shown = repr(Call(raw, (fn,), given))
        return f"{self.pipeline!r}({shown})" if self.pipeline.middleware else shown

    def __reduce__(self) -> tuple[type[RawStep], tuple[Pipeline, RawFn, LossFn | None]]:  # type: ignore[override]
        return type(self), (self.pipeline, *self._given())


class GradientStep(RawStep):
    """The step of a function that makes gradients, and no update. See :func:`raw`.

    It is that of a loss function, whose backward leaves the gradients that the function has made.
    """

    _settings = MappingProxyType({"updates": False})

    def _check_listed(self, listed: Sequence[Middleware]) -> None:
        for member in listed:
            if member.loss_fn is not None:
                why = f"replaces the loss function, and {name_of(self.fn)} takes its place"
            elif member.device is not None:
                why = f"would capture what {name_of(self.fn)} does, and not call it again"
            elif member.precision == "fp16":
                why = "scales the loss, which does not reach a backward inside "
                why += f'{name_of(self.fn)}: write amp("bf16")'
            elif "repeats" in member.traits:
                why = f"would repeat {name_of(self.fn)}: list microbatch(size) instead"
            elif "create_graph" in member.traits:
                why = f"differentiates gradients, and those of {name_of(self.fn)} have no graph"
            else:
                continue
            raise ValueError(f"raw({name_of(self.fn)}, updates=False): {member!r} {why}")

    @property
    def _trains_by(self) -> RawFn:
        return self.fn

    @property
    def _leaves_out(self) -> bool:
        return True  # by its output

    def _training_forward(self) -> Step:
        making = own_gradients(self.fn, name_of(self.fn), self._own_precision is not None)
        self._layers.add(self.fn, name_of(self.fn))
        return self._ring("forward", making)

    def _compose_training(self) -> Step:
        return LossStep._compose_training(self)

    def _check_optimizers(self, state: TrainState) -> None:
        LossStep._check_optimizers(self, state)

    def init_slots(self, state: TrainState, *, evaluation: bool = False) -> TrainState:
        __tracebackhide__ = True
        self._refuse_stack(state)
        if not evaluation:
            averages = "averages gradients in a backward, before they can be weighed"
            why = f"does not work with fully_shard, which {averages}: leave fully_shard out"
            refuse(state, repr(self), sharded=why)
        return LossStep.init_slots(self, state, evaluation=evaluation)

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        return super()._shown()[0], rings_of(self.pipeline.middleware)


def _counted(fn: RawFn) -> Step:
    """Return the step that calls a function, and counts its update."""

    def counted(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        params = current_parameters(state, beginning=True).found
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
        check_output(out, name_of(fn))
        out = attrs.evolve(out, loss=out.loss.detach())
        return advance(state, out.skip is None), out

    return counted


# --------------------------------------------------------------------------------------------------
# Views that an evaluation evaluates beside the model, such as an average of its weights.

BESIDE = "beside"  # the slot of the models that show them, in an evaluation: by name of middleware


def evaluate_beside(step: Step, carried: str | None = None) -> Step:
    """Return the step that evaluates a batch with the model, and with each view beside it.

    Args:
        step: the step that evaluates a batch.
        carried: the slot of what it carries from window to window, if it does.
    """

    def evaluated(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        found, kept = {}, {}
        for name, model in state.slots.get(BESIDE, {}).items():
            seen, carry = attrs.evolve(state, model=model), f"{name}/carry"
            seen = with_slot(seen, carried, state.slots.get(carry)) if carried else seen
            with isolated(state.backend.device):  # all draw the same
                made, found[name] = step(seen, batch)
            kept |= {carry: made.slots.get(carried)} if carried else {}
        state, out = step(state, batch)
        for name, of in found.items():
            metrics = {"loss": update_evaluated_(None, of.loss, of.weight), **of.metrics}
            out = report(out, {f"{name}/{key}": value for key, value in metrics.items()}, name)
        return with_slots(state, {**state.slots, **kept}) if kept else state, out

    return evaluated


# --------------------------------------------------------------------------------------------------
# What can be known to be wrong when a step is composed, or from the first reply of a step.


def rings_of(listed: Sequence[Middleware]) -> list[tuple[str, list[str]]]:
    """Return what acts in each ring of a pipeline, in its order, the innermost ring first."""
    using = [repr(m) for m in listed if m.uses]
    own = {"gradient": ["backward"], "update": [", ".join((OPTIMIZER, *using))]}
    acting = {ring: [*map(repr, acting_in(listed, ring))] for ring in RINGS}
    acting["forward"] += [f"{m!r} in evaluation" for m in listed if m.evaluation or m.view]
    return [
        (ring, own.get(ring, []) + names) for ring, names in acting.items() if names or ring in own
    ]


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
    alone = [m for m in listed if m.view is not None and not m.view.beside]
    if len(alone) > 1:
        raise ValueError(
            f"{' and '.join(map(repr, alone))} would both be evaluated alone, under the same "
            'names: leave out evaluate="only" in one of them'
        )
    for member in listed:
        if member.check is not None:
            member.check(listed)


def _other_name(member: Middleware) -> str:
    """Return what else to do about a name, if the factory of the middleware takes one."""
    named = member.call is not None and _takes(member.call, "name")
    return ', or give one another name: name="..."' if named else ""


def _takes(call: Call, argument: str) -> bool:
    """Return whether the function of a call has an argument of this name."""
    return argument in inspect.signature(call.factory).parameters


def _fail_as_member(member: object) -> None:
    name = checks.known_as(member)
    if "is_middleware_factory" in vars_of(member):
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
    if re.match(r"fnloop\..*hooks\.", kind.__module__):
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


def check_loss_fn(loss_fn: object, listed: Sequence[Middleware] = ()) -> None:
    """Raise TypeError unless this is a function of a model and a batch.

    Args:
        loss_fn: the loss function.
        listed: the middleware, with which it may take a carry or keyword arguments too.
    """
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
    carrying = [m for m in listed if "carries" in m.traits]
    passing = [m for m in listed if m.passes]
    passed = [name for m in passing for name in m.passes]
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(loss_fn)
        try:
            signature.bind(*(None,) * (2 + len(carrying)), **dict.fromkeys(passed))
        except TypeError as error:
            given = ["model", "batch", *["carry"] * len(carrying), *["*"] * bool(passed), *passed]
            by = dict.fromkeys(m.name.partition("(")[0] for m in (*carrying, *passing))
            taken = f"a loss function takes ({', '.join(given)})"
            taken = f"with {' and '.join(by)} {taken}" if by else taken
            name = name_of(loss_fn)
            raise TypeError(f"{taken}, but {name} takes {signature}") from error
        first, second = [*signature.parameters, "", ""][:2]
        if first in _BATCHES and second in _MODELS:
            raise TypeError(
                f"a loss function takes (model, batch), but {name_of(loss_fn)} takes {signature}: "
                f"write ({second}, {first})"
            )


def check_wrapped(step: object, member: Middleware, ring: str) -> None:
    """Raise TypeError unless a middleware has made a step in a ring."""
    if not callable(step):
        raise TypeError(
            f"{member!r} must take a step and return a step, but its {ring} ring returned "
            f"{describe(step)}. Did you forget to return the inner function?"
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


def in_order(members: Sequence[Middleware], ring: str) -> list[Middleware]:
    """Return middleware in their order in a ring: as listed, but some come first or last."""
    return sorted(members, key=lambda member: member.order.get(ring, 0))


def acting_in(members: Sequence[Middleware], ring: str) -> list[Middleware]:
    """Return the middleware that act in a ring, in their order, the innermost first."""
    return [m for m in in_order(members, ring) if ring in wraps_of(m)]


# --------------------------------------------------------------------------------------------------
# The layers of a step, by the code that runs in them: which one an exception came from.

STEP = "the step"  # the name of the place, if an exception was raised in none of the layers
# The file from which torch calls a function decorated with no_grad.
_NO_GRAD = torch.no_grad()(lambda: None).__code__.co_filename


class _Layer(NamedTuple):
    """A layer.

    Args:
        code: what runs in it.
        name: its name in messages.
        is_users: whether the user wrote it.
    """

    code: CodeType
    name: str
    is_users: bool


class Layers:
    """The layers of a step, innermost first."""

    def __init__(self) -> None:
        self._layers: list[_Layer] = []
        self._names: dict[CodeType, str] = {}

    def add(
        self,
        step: Callable[..., object],
        name: str,
        is_users: bool = False,
        in_training: bool = True,
    ) -> None:
        """Add a layer around those that are there; or give it a name, if it is not in training.

        A function decorated with ``torch.no_grad()`` is looked into, because all decorated
        functions have the same code.
        """
        function = inspect.unwrap(step)
        code = code_of(function) or code_of(type(function).__call__)
        if code is None:
            return
        known = self._names.get(code)  # two middleware of one factory share their code
        self._names[code] = name if known in (None, name) else f"{known} or {name}"
        if in_training:
            self._layers.append(_Layer(code, name, is_users))

    def layer_of(self, error: BaseException) -> str:
        """Return the name of the innermost layer in which an exception was raised."""
        name = STEP
        for code in _codes(error):
            name = self._names.get(code, name)
        return name

    def explain(self, error: BaseException) -> None:
        """Add to an exception what the layers know about it: which middleware is to blame."""
        codes = [*_codes(error)]
        inside, passed = [*self._layers], []
        for code in codes:  # from the outermost to the innermost
            if any(code is layer.code for layer in inside):
                while inside[-1].code is not code:
                    inside.pop()
                passed.append(inside.pop())
        users = [layer for layer in passed if layer.is_users]
        if isinstance(error, NoGradientError) and users:
            names = _decorated_with_no_grad(codes, users) or [layer.name for layer in users]
            error.args = (
                f"{error}. Is {' or '.join(names)} under torch.no_grad()? Only its own work may be",
            )
        # Backward unpacks what the layer inside it returns.
        loops = {Backward.accumulate.__code__, run.__code__}
        unpacking = {*loops, passed[-1].code if passed else None}
        if (
            isinstance(error, TypeError | ValueError)
            and "unpack" in str(error)
            and inside
            and inside[-1].is_users
            and codes
            and (not passed or codes[-1] in unpacking)
        ):
            error.add_note(
                f"{inside[-1].name} must return (state, out), and has returned something else: "
                "write return state, out"
            )


def _codes(error: BaseException) -> Iterator[CodeType]:
    """Yield the code of each frame of a traceback, from the outermost to the innermost."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _decorated_with_no_grad(codes: list[CodeType], layers: list[_Layer]) -> list[str]:
    """Return the names of the layers that ``torch.no_grad()`` decorates."""
    return [
        layer.name
        for outside, inside in itertools.pairwise(codes)
        if outside.co_filename == _NO_GRAD
        for layer in layers
        if layer.code is inside
    ]


# --------------------------------------------------------------------------------------------------
# The first reply of a user's middleware is checked; from then on, its step is called directly.

Replaceable = (
    Any  # a functools.partial, whose function can be replaced; its __setstate__ is untyped
)


def checked_once(
    step: Step,
    member: Middleware,
    ring: str,
    noted: Callable[[], AbstractContextManager[list[int]]],
) -> Step:
    """Return a user's step whose first reply is checked.

    From then on it is called without a frame in between.

    Args:
        step: the step that the middleware has made.
        member: the middleware.
        ring: the ring in which it acts.
        noted: notes the calls of the loss function, within a ``with`` block.
    """

    def first(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        with noted() as calls:
            reply = step(state, batch)
        check_step_reply(reply, f"{member!r}, in its {ring} ring,")
        if not calls and reply[1].skip is None and engine_of(state).calls_every_batch:
            done = "evaluated" if ring == EVALUATION else "trained"
            raise ValueError(
                f"{member!r} did not call the step that it wraps, so nothing was {done}: "
                "write state, out = step(state, batch); or, to skip an update, return an "
                'Output with skip="why"'
            )
        checked.__setstate__((step, (), {}, vars(checked)))
        return reply

    checked: Replaceable = functools.partial(first)
    vars(checked).update(vars_of(step))
    return checked


@contextlib.contextmanager
def _calls_noted(innermost: Replaceable) -> Iterator[list[int]]:
    """Note the calls of a step, which is a ``functools.partial``, within a ``with`` block."""
    calls: list[int] = []
    called = innermost.func

    def noting(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        calls.append(1)
        return called(state, batch)

    innermost.__setstate__((noting, (), {}, None))
    try:
        yield calls
    finally:
        innermost.__setstate__((called, (), {}, None))


# --------------------------------------------------------------------------------------------------
# What middleware keep in `state.slots`: made when a step first sees a state.

# By model: its parameters and the middleware when they were last found to fit.
_checked: WeakKeyDictionary[nn.Module, tuple[list[Tensor], Sequence[Middleware]]] = (
    WeakKeyDictionary()
)


def init_slots(state: TrainState, members: Sequence[Middleware]) -> TrainState:
    """Return the state with missing slots made, and those from a checkpoint materialized.

    Raises:
        Exception: a middleware is not for this state, or its slot cannot be made.
    """
    __tracebackhide__ = True
    _check(state, members)
    for member in members:
        if member.init is None:
            continue
        name = member.name
        if name in state.slots and not has_pending(state.slots[name]):
            continue
        state = bring(state, member.brings)
        if name not in state.slots:
            state = with_slot(state, name, _make(member.init, name, state))
        elif has_pending(saved := state.slots[name]):
            with _kept_group_settings(state):
                slot = materialize(_make(member.init, name, state), saved)
            state = with_slot(state, name, slot)
    return state


def _check(state: TrainState, members: Sequence[Middleware]) -> None:
    """Let middleware look at a state whose model or parameters they have not seen yet."""
    __tracebackhide__ = True
    if isinstance(state.model, Several):
        state.model.check(members)
    if not (checking := [m.check_state for m in members if m.check_state is not None]):
        return
    known, listed = _checked.get(state.model, (None, None))
    if known is not all_parameters(state) or listed is not members:
        for check in checking:
            check(state, members)
        _checked[state.model] = all_parameters(state), members


def _make(init: Callable[[TrainState], object], name: str, state: TrainState) -> object:
    """Make a middleware's slot. Its draws are a function of the seed, the same in every process."""
    __tracebackhide__ = True
    seed, device = fold_in(state.seed, zlib.crc32(name.encode())), state.backend.device
    with isolated(device):
        seed_all(seed)
        torch_seeder(device)(seed)
        return init(state)


@contextmanager
def _kept_group_settings(state: TrainState) -> Iterator[None]:
    """Restore the settings of all parameter groups afterwards.

    A new torch scheduler changes them, those that are tensors in place.
    """
    groups = groups_in(state.optimizer)
    before = [
        {key: (v, v.clone() if isinstance(v, Tensor) else v) for key, v in group.items()}
        for group in groups
    ]
    yield
    for group, settings in zip(groups, before, strict=True):
        for key, (held, value) in settings.items():
            group[key] = held.copy_(value) if isinstance(held, Tensor) else value
