"""Composition: the rings of middleware around forward, backward and update."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakKeyDictionary

import attrs
import toolz
import torch
from torch import Tensor, nn

from fnloop._backend.containers import to_device, vars_of
from fnloop._core.history import check_loaders
from fnloop._core.metrics import Metrics
from fnloop._core.optimizers import check_used, groups_in, to_training
from fnloop._core.rng import fold_in, isolated, seed_all, torch_seeder
from fnloop._core.runs import Windows
from fnloop._core.saved import Pending
from fnloop._core.several import Several
from fnloop._core.state import (
    Ownership,
    TrainState,
    advance_used,
    all_parameters,
    bring,
    check_not_stale,
    consume,
    using_only,
    with_slot,
    with_slots,
    with_used,
)
from fnloop._core.types import (
    EVALUATION,
    RINGS,
    Batch,
    LossFn,
    Middleware,
    Output,
    Step,
    View,
    Wrap,
    name_of,
)
from fnloop._core.view import shown, view
from fnloop._display import checks, reprs
from fnloop._display.checks import describe, join_names
from fnloop._display.frames import leave_out_frames
from fnloop._step.engine import Backward, engine_of
from fnloop._step.forward import forward
from fnloop._step.layers import Layers, Replaceable, calls_noted, checked_once
from fnloop._step.reported import add_reported, report
from fnloop._step.transaction import OPTIMIZER, around, may_skip, may_skip_in, transaction, update

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
        return reprs.diagram("loss_fn(model, batch)", rings_of(self.middleware))

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
            return loss_fn.inside(self.middleware)
        check_loss_fn(loss_fn, self.middleware)
        return PipelineStep(self.middleware, loss_fn)


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


class PipelineStep:
    """A step: ``step(state, batch) -> (state, Output)``. One call is one update.

    With ``accumulate(n)`` it takes a sequence of up to n batches instead of one. A bare call draws
    from the global generators as any PyTorch code does; ``fit`` positions them.

    A function that is given a step checks it with ``PipelineStep.checked(step, "its name")``, which
    says what to write for something else.

    It is the step of a loss function. A kind of step that does more by itself replaces how it is
    composed, ``_compose_innermost`` and ``_compose_training``, and what may be around it.

    Args:
        listed: the middleware around what it does by itself.
        loss_fn: the loss function; None: a kind of step that has several, or none.

    Attributes:
        window: the most batches of an update.
        turns: the steps that it calls in turn, by the names of their optimizers.
        evaluation: evaluates a batch.
        train: makes an update, without the checks of a bare call.

    Example:
        >>> import fnloop as fl
        >>> from fnloop.testing import toy_loss
        >>> step = PipelineStep.checked(fl.pipeline(fl.accumulate(2))(toy_loss), "my_tool")
        >>> step.window, step.listing([fl.clip(1.0)])
        (2, pipeline(clip(1.0))(toy_loss))
    """

    has_all_rings = True  # whether it is a loss function with all rings of middleware around it

    def __init__(self, listed: Sequence[Middleware], loss_fn: LossFn | None = None) -> None:
        self.pipeline, self.loss_fn = Pipeline(tuple(listed)), loss_fn
        self.window = max((m.window for m in listed), default=1)
        self._layers = Layers()
        self.fetches_late = False
        self.is_timed = bool(self._names_with("timed"))
        self.carries = bool(self._names_with("carries"))
        self._used = next((m.uses for m in listed if m.uses), None)
        innermost = self._compose_innermost()
        self._innermost: Replaceable | None = (
            None if all(m.is_ours for m in listed) else functools.partial(innermost)
        )
        self.forward = self._chain(self._innermost or innermost, "forward")
        # Of a loader that is evaluated, without the checks of a bare call.
        self.evaluation = self._chain(self.forward, EVALUATION)
        if beside := [m for m in listed if m.view is not None and m.view.beside]:
            carrying = self._names_with("carries")
            self.evaluation = evaluate_beside(self.evaluation, *carrying)
            self._layers.add(self.evaluation, join_names([*map(repr, beside)]), in_training=False)
        self._reporting = tuple(m for m in listed if m.report is not None)
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

    # --- how it is composed

    @property
    def functions(self) -> tuple[object, ...]:
        """The functions that it was made with, besides its middleware; that of an update first."""
        return (self.loss_fn,)

    @property
    def evaluates(self) -> str:
        """The name of the loss function of an evaluation."""
        return name_of(self.loss_fn)

    @property
    def _leaves_out(self) -> bool:
        """Whether that function may skip a batch."""
        return may_skip(self.loss_fn)

    def inside(self, listed: tuple[Middleware, ...]) -> PipelineStep:
        """Return the same step with more middleware around it, if it can have any.

        Raises:
            TypeError: it has its middleware already.
        """
        raise TypeError(
            f"a pipeline takes a loss function, but {self!r} is a step already: list all "
            f"middleware in one pipeline(...)({name_of(self.loss_fn)})"
        )

    def listing(self, listed: Sequence[Middleware]) -> PipelineStep:
        """Return the same step with other middleware around it, if it is one of a function."""
        assert self.loss_fn is not None
        return Pipeline(tuple(listed))(self.loss_fn)

    def _compose_innermost(self) -> Step:
        """Return what the forward ring is around: what evaluates a batch."""
        assert self.loss_fn is not None
        members = in_order(self.pipeline.middleware, "step")
        # What passes values to the loss function is next to it: the others know none.
        members.sort(key=lambda member: not member.passes)
        wraps = [m.loss_fn for m in members if m.loss_fn is not None]
        name, own_precision = name_of(self.loss_fn), self._own_precision is not None
        innermost = forward(toolz.pipe(self.loss_fn, *wraps), name, own_precision)
        self._layers.add(innermost, f"the loss function {name}")
        return innermost

    def _compose_training(self) -> Step:
        """Return what makes an update, with all rings around it."""
        return self._compose_update(self.forward)

    def _compose_update(self, forward: Step) -> Step:
        """Return what makes an update of what a forward ring returns."""
        inner = forward, "loss", self._backward, "gradient"
        return self._chain(*inner, self._update, "update", "device", "step", self._using)

    def _backward(self, step: Step) -> Step:
        again = bool(self._names_with("create_graph"))
        skips = may_skip_in(self.pipeline.middleware, "forward", "loss")
        drops = self._used is not None
        backward = Backward(step, name_of(self.functions[0]), skips, again, drops)
        self._layers.add(backward, "backward")
        return backward

    def _update(self, step: Step) -> Step:
        members = self.pipeline.middleware
        by_closure = bool(self._names_with("by_closure"))
        transacted = transaction(step, members, self._leaves_out)
        updating = update(transacted, name_of(self.functions[0]), by_closure, self._used)
        self._layers.add(updating, OPTIMIZER)
        return updating

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

    def _chain(self, step: Step, *around: str | Wrap) -> Step:
        """Return a step with others around it, the innermost first: wraps, or rings by name."""
        for part in around:
            if isinstance(part, str):
                for member in acting_in(self.pipeline.middleware, part):
                    step = self._layer(member, part, step)
            else:
                step = part(step)
        return step

    def _layer(self, member: Middleware, ring: str, inside: Step) -> Step:
        """Return a step with one middleware around it, which errors know as a layer."""
        step = member.wraps[ring](inside)
        check_wrapped(step, member, ring)
        if step is inside:
            return step
        is_users = not member.is_ours
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
        return calls_noted(innermost)

    # --- what a run asks

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

    @property
    def members(self) -> list[Middleware]:
        """All middleware that it is made of, those of its turns too."""
        return [m for one in (self, *self.turns.values()) for m in one.pipeline.middleware]

    def with_turns(self, steps: Mapping[str, PipelineStep]) -> PipelineStep:
        """Return the same step with other steps in turn, without middleware around them."""
        return self

    @staticmethod
    def prefixed(turn: str, metric: str) -> str:
        """Return the name under which a round reports a metric of a turn.

        A learning rate has the name that it has in every run with several optimizers.

        Example:
            >>> [PipelineStep.prefixed("d", name) for name in ("grad_norm", "lr", "lr/1")]
            ['d/grad_norm', 'lr/d', 'lr/d/1']
        """
        if metric == "lr" or metric.startswith("lr/"):
            return f"lr/{turn}{metric.removeprefix('lr')}"
        return f"{turn}/{metric}"

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

    def check_evaluation(self, loaders: Sequence[str]) -> None:
        """Raise ValueError if it cannot evaluate these loaders."""

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

    def layer_of(self, error: BaseException, otherwise: str = "the step") -> str:
        """Return the name of the layer in which an exception was raised, if it was in one."""
        return self._layers.layer_of(error, otherwise)

    def explain(self, error: BaseException, of_gradient: str = "") -> None:
        """Add to an exception what the layers know about it: which middleware is to blame.

        Args:
            error: the exception.
            of_gradient: a note to add if the loss has no gradient for the parameters.
        """
        self._layers.explain(error, of_gradient)

    def without_batch(self, state: TrainState, counts: bool) -> tuple[TrainState, Output]:
        """Return what an update of no batch gives: nothing is changed but the counters.

        Args:
            state: the newest state.
            counts: whether it counts as applied, or as skipped.
        """
        several = Several.names_of(state.model)
        loss = torch.zeros(len(several) if several else (), device=state.backend.device)
        return self._passed(state, counts), Output(loss, 0, skip=None if counts else "no batch")

    def _passed(self, state: TrainState, counts: bool) -> TrainState:
        """Return the state after an update of which only the counters are left to change."""
        if self._used is None:
            return Ownership.advance(state, counts)
        return advance_used(state, with_used(state, self._used), counts)

    def begin_run(self, state: TrainState) -> None:
        """Forget what was found out in an earlier run, and prepare the optimizers for training."""
        Ownership.of(state).parameters.clear()
        engine_of(state).begin(state)
        to_training(state.optimizer)
        self._check_optimizers(state)

    def _check_optimizers(self, state: TrainState) -> None:
        """Raise ValueError unless one update can be made with the optimizers together."""
        check_used(state.model, state.optimizer, self._used)

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
                    engine_of(state).share_buffers(model)
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
        check_not_stale(state, "step", trains=True)
        to_training(state.optimizer)
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

    # --- how it shows

    def __repr__(self) -> str:
        return f"{self.pipeline!r}({name_of(self.loss_fn)})"

    def _shown(self) -> tuple[str, list[tuple[str, list[str]]]]:
        return f"{name_of(self.loss_fn)}(model, batch)", rings_of(self.pipeline.middleware)

    def __str__(self) -> str:
        return reprs.diagram_text(*self._shown())

    def _repr_html_(self) -> str:
        return reprs.diagram(*self._shown())

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return type(self), (self.pipeline.middleware, *self.functions)


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
            seen = {f"{name}/{key}": metric for key, metric in Metrics.of(of).items()}
            out = report(out, seen, name)
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
    named = member.call is not None and member.call.takes("name")
    return ', or give one another name: name="..."' if named else ""


def _fail_as_member(member: object) -> None:
    name = checks.known_as(member)
    if "is_middleware_factory" in vars_of(member):
        raise TypeError(
            f"pipeline expects middleware; {name} is a function that makes one. "
            f"Call it: {name}(...)"
        )
    if isinstance(member, Pipeline):
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


def in_order(members: Sequence[Middleware], ring: str) -> list[Middleware]:
    """Return middleware in their order in a ring: as listed, but some come first or last."""
    ordered = sorted(members, key=lambda member: member.order.get(ring, 0))
    if ring == "gradient":
        for at, member in enumerate(ordered):
            if "sums" in member.traits and all(map(commutes, ordered[:at])):
                inside = sum(other.order.get(ring, 0) < -1 for other in ordered[:at])
                ordered.insert(inside, ordered.pop(at))
    return ordered


def commutes(member: Middleware) -> bool:
    """Return whether gradients may be added up inside of a middleware as well as around it."""
    return member.gradient is None or "commutes" in member.traits


def acting_in(members: Sequence[Middleware], ring: str) -> list[Middleware]:
    """Return the middleware that act in a ring, in their order, the innermost first."""
    return [m for m in in_order(members, ring) if ring in m.wraps]


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
        if name in state.slots and not Pending.is_in(state.slots[name]):
            continue
        state = bring(state, member.brings)
        if name not in state.slots:
            state = with_slot(state, name, _make(member.init, name, state))
        elif Pending.is_in(saved := state.slots[name]):
            with _kept_group_settings(state):
                slot = Pending.fill(_make(member.init, name, state), saved)
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
