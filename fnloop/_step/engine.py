"""From the loss to the gradients: backward, the engine that it asks, and that of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, Protocol, cast
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.containers import pieces_of
from fnloop._backend.fsdp import is_sharded
from fnloop._core.parts import Part
from fnloop._core.several import Several
from fnloop._core.state import Ownership, TrainState, current_parameters, parameters
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._core.view import trained_model
from fnloop._data.source import Source
from fnloop._extensions import extensions
from fnloop._step.forward import EvaluationPass, LocalEvaluation
from fnloop._step.gradients import (
    SumInOrder,
    WeightedSum,
    fail_to_train,
    fail_without_gradient,
    in_wide_dtype,
    set_aside,
)

# --------------------------------------------------------------------------------------------------
# The gradient engine: what depends on the number of processes in training and evaluation.
#
# There are three: `LocalEngine` for one process, `DistributedEngine` for several, and `ExactEngine`
# for any number, with the same bits. `engine_of` chooses. Nothing else in the steps and the
# middleware branches on the number of processes.


# For each process: the names of the metrics of its own share of the data, and what it has of all.
Shares = Sequence[tuple[Sequence[str], Mapping[str, Metric]]]


class WindowPass(Protocol):
    """Forward and backward of a window, whose batches may come in pieces.

    The method ``start`` of an engine returns one. In one process ``forward`` is the step inside
    itself.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def watched(backward):
        ...     def step(state, batch):
        ...         making, pieces = engine_of(state).start(backward, state, [batch], 1)
        ...         for piece in pieces:
        ...             state, out = making.forward(state, piece)
        ...             print(out.loss.item())
        ...             making.add(state, out)
        ...         return state, making.finish(state)
        ...     return step
        >>> state = toy(w=1.0)
        >>> step = fl.pipeline(fl.Middleware("watched", gradient=watched))(toy_loss)
        >>> state, out = step(state, torch.tensor([1.0, 3.0]))
        1.0
        3.0
        >>> out.loss.item()
        2.0
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def add(self, state: TrainState, out: Output, /) -> None:
        """Add the gradient of a piece, by its weight, given the output of ``forward``."""
        ...

    def finish(self, state: TrainState, /) -> Output:
        """Turn the sum of the gradients into the mean. Return what to report of the window."""
        ...


class GradientSum(Protocol):
    """The weighted sum of gradients that a step leaves in ``.grad``, batch by batch.

    ``engine_of(state).start_sum(...)`` gives one within a ``with`` block.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> with engine_of(state).start_sum(state, 2, None) as total:
        ...     for gradient in (1.0, 3.0):
        ...         state.model.w.grad = torch.tensor(gradient)
        ...         total.add(state, fl.Output(torch.tensor(0.5), weight=1))
        ...     out = total.finish(state)
        >>> state.model.w.grad, out.weight
        (tensor(2.), 2)
    """

    def add(self, state: TrainState, out: Output, /) -> None:
        """Take the gradient of a batch out of ``.grad``, unless it is skipped."""
        ...

    def finish(self, state: TrainState, /) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""
        ...


class Engine:
    """What depends on the number of processes: gradients, decisions, and what is reported.

    Unless a method says otherwise, it may be a collective: every process calls it. What is here is
    of one process, where most methods return their argument unchanged.

    Another engine is anything with these methods. It may take some of them from one of those here.
    The backend of its states has ``state -> engine``: ``attrs.evolve(state.backend, engine=...)``.

    Attributes:
        calls_every_batch: whether every batch passes through the loss function; padding may not.
        brings: the parts of checkpoints that are this engine's.

    Example:
        >>> import attrs, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Counting:
        ...     def __init__(self, state):
        ...         self.inner, self.windows = engine_of(state), 0
        ...     def __getattr__(self, name):
        ...         return getattr(self.inner, name)
        ...     def start(self, *given, **settings):
        ...         self.windows += 1
        ...         return self.inner.start(*given, **settings)
        >>> engine, state = Counting(toy()), toy()
        >>> backend = attrs.evolve(state.backend, engine=lambda state: engine)
        >>> state = attrs.evolve(state, backend=backend)
        >>> state = fl.fit(fl.pipeline()(toy_loss), state, [torch.ones(1)] * 3, hooks=())
        >>> engine.windows
        3
    """

    calls_every_batch: bool = True
    brings: tuple[Part, ...] = ()

    # --- a step

    def begin(self, state: TrainState, /) -> None:
        """Begin a run: forget what was found out about the data of an earlier one."""

    def read_from(self, source: Source, step: Step, window: int, /) -> Step:
        """Return the step for what a source gives; it notes which of the batches are padding.

        Args:
            source: the source.
            step: the step. It is called once for each window that the source gives, in order.
            window: the window of the step: it takes a tuple of batches unless this is 1.
        """
        return step

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice, /
    ) -> None:
        """Start a turn of an alternating step: its engine gets its part of the window.

        Args:
            name: the name of the optimizer.
            engine: the engine of this turn.
            turn: the state of this turn.
            state: the state of the whole step.
            batches: which batches of the window the turn takes.
        """

    def start(
        self,
        backward: Backward,
        state: TrainState,
        window: Sequence[Batch],
        size: int | None = None,
        /,
        *,
        alone: bool = False,
        guarded: bool = False,
    ) -> tuple[WindowPass, Iterable[Batch]]:
        """Start forward and backward of a window: ``.grad`` gets the gradient of its mean.

        There is none in ``.grad`` before.

        Args:
            backward: what starts from the loss.
            state: the state that is trained.
            window: the batches.
            size: the most samples in one forward and backward; None: those of a batch.
            alone: whether the window is a single batch, which is not weighed if it is one piece.
            guarded: whether all processes raise if one runs out of memory. Then gradients are
                exchanged after the last backward only.

        Returns:
            What makes the gradient, and the pieces to call it with.
        """
        if size is not None:
            window = [piece for batch in window for piece in pieces_of(batch, size)]
        return (_Batch if alone and len(window) == 1 else _Window)(backward), window

    def start_sum(
        self, state: TrainState, batches: int, dtype: torch.dtype | None, /
    ) -> AbstractContextManager[GradientSum]:
        """Sum the gradients of a window within a ``with`` block. A step takes batch by batch.

        There is none in ``.grad`` before.

        Args:
            state: the state that is trained.
            batches: how many batches the window has.
            dtype: in which gradients are added up; None: in their own.
        """
        return nullcontext(SumInOrder(state, dtype))

    def mark_draws(self) -> Callable[[], None]:
        """Return what makes the next passes of an update draw again what those from here on do."""
        return lambda: None

    def agree(self, out: Output, flag: Tensor | None = None, /) -> tuple[Output, Tensor | None]:
        """Return an output that is skipped if it is in any process.

        And with it a flag as it is in any process, if there is one.
        """
        return out, flag

    def largest(self, number: int, /) -> int:
        """Return the largest of a number over all processes; of a flag, whether any has set it."""
        return number

    def mean_loss(self, out: Output, /) -> Tensor:
        """Return the mean loss over the items of all processes."""
        return out.loss

    # --- evaluations, records and checkpoints

    def start_evaluation(self, state: TrainState, name: str, /) -> EvaluationPass:
        """Start an evaluation or a prediction: every process gets the main one's buffers.

        Args:
            state: the state.
            name: the name of the function that is called with each batch.
        """
        return LocalEvaluation(state.model.metric if isinstance(state.model, Several) else None)

    def share_buffers(self, model: nn.Module, /) -> None:
        """Copy the buffers of the main process's model to that of every process."""

    def check_alike(self, state: TrainState, what: str, /) -> None:
        """Raise in every process if the weights or the counters of the processes differ.

        Args:
            state: the newest state.
            what: what it is for, as errors name it.
        """

    def reduce(
        self, metrics: Mapping[str, Metric], training: str | None = None, /
    ) -> dict[str, Metric]:
        """Combine metrics over all processes, each of which has seen a part of the data.

        Args:
            metrics: name to metric.
            training: what the names of training metrics begin with, besides "recent/"; None: none
                are. Those that are made after the gradients were averaged are the same in every
                process, and count once.
        """
        return dict(metrics)

    def gather(self, state: TrainState, what: str, /) -> tuple[dict[str, Metric], Shares]:
        """Return the running metrics of a state, as a checkpoint has them.

        Args:
            state: the state.
            what: what it is for, as errors name it.

        Returns:
            Those over all processes; and for each process the names of those that are of its own
            share of the data, and what it has of all. The latter is empty where the former say
            everything.
        """
        return dict(state.metrics), ()

    def continued(
        self,
        state: TrainState,
        merged: Mapping[str, object],
        shares: Sequence[Mapping[str, object]],
        /,
    ) -> Mapping[str, object]:
        """Return the running metrics that this process continues with. It is not a collective.

        Args:
            state: the state that a checkpoint is restored into.
            merged: the metrics over all processes that saved it.
            shares: those of each of these processes, or none.
        """
        return merged


# --------------------------------------------------------------------------------------------------
# Which engine a state has, and what cannot work with some.

_made: WeakKeyDictionary[Ownership, tuple[nn.Module, Engine]] = WeakKeyDictionary()


def engine_of(state: TrainState) -> Engine:
    """Return the engine that makes the gradients of a state's model.

    It lives as long as the states of its model. It may hold the model, but not what they own it
    by, which is its key.

    Args:
        state: the state.

    Returns:
        The engine: of one process, of several, or one of your own.

    Example:
        >>> from fnloop.testing import toy
        >>> engine_of(toy()).largest(3)  # over all processes
        3
    """
    backend = state.backend
    if backend.world_size == 1 and not backend.exact and backend.engine is None:
        return LOCAL
    owner, model = Ownership.of(state), trained_model(state.model) or state.model
    made_for, engine = _made.get(owner, (None, None))
    if engine is None or made_for is not model:
        engine = make_engine(state)
        _made[owner] = model, engine
    return engine


def make_engine(state: TrainState) -> Engine:
    """Return a new engine for the model of a state: the one that its backend asks for."""
    backend = state.backend
    if backend.engine is not None:
        return cast(Engine, backend.engine(state))
    task = "engine that is exact" if backend.exact else "engine of several processes"
    (make,) = extensions(task)
    return make(state)


def refuse(
    state: TrainState,
    what: str,
    *,
    exact: str | None = None,
    several: str | None = None,
    sharded: str | None = None,
) -> None:
    """Raise if something cannot work with the processes of a state.

    Call it when a run starts, such as in the ``check_state`` of a middleware.

    Args:
        state: the state.
        what: the name of what cannot.
        exact: why it cannot with ``exact=True``, and what to write instead; None if it can.
        several: why it cannot with several processes; None if it can.
        sharded: what it does that it cannot to a model under ``fully_shard``; None if it can.

    Raises:
        NotImplementedError: it cannot.

    Example:
        >>> from fnloop.testing import toy
        >>> state = toy()
        >>> refuse(state, "mine", several="it looks at one loss. Leave it out")  # there is one
    """
    if exact is not None and state.backend.exact:
        raise NotImplementedError(
            f"{what} does not work with TrainState.create(..., exact=True): {exact}"
        )
    if several is not None and not engine_of(state).calls_every_batch:
        raise NotImplementedError(f"{what} works in one process only: {several}")
    if sharded is not None and is_sharded(state.model):
        raise NotImplementedError(f"{what} {sharded}")


# --------------------------------------------------------------------------------------------------
# The step in the middle of a pipeline: backward, from the loss to the gradients.
#
# Backward takes a window of batches where `accumulate` asks for one. Each batch counts by its
# weight, the number of items that its loss is the mean of. So the gradient is that of the mean over
# all items of the window, with a ragged last window, unequal token counts and any number of
# processes. Gradients add up in `.grad` as autograd does: backward starts from loss × weight / (a
# reference weight), and one division at the end makes the mean.


@attrs.define(eq=False, slots=False)
class Backward:
    """The step that fills ``.grad``, starting from the loss. It is innermost in the gradient ring.

    What repeats it, cuts its batches or adds their gradients up is a middleware of that ring, which
    is given it if the middleware has the trait "commutes" or "sums", and so have those before it.

    Args:
        forward: the step inside, which computes the loss.
        name: the name of the loss function.
        may_skip: whether the step inside may skip a batch on some processes only.
        create_graph: whether gradients have a graph of their own.
        drops: whether to drop the gradients of what the state's optimizers do not update.
        size: the most samples in one forward and backward; None: those of a batch.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def in_pieces(backward):
        ...     def step(state, batch):
        ...         return backward.over(state, [batch], 1, alone=True)
        ...     return step
        >>> singly = fl.Middleware("singly", gradient=in_pieces)
        >>> state, out = fl.pipeline(singly)(toy_loss)(toy(), torch.tensor([1.0, 3.0]))
        >>> state.model.w.item()
        -2.0
    """

    forward: Step
    name: str = "the loss function"
    may_skip: bool = False
    create_graph: bool = False
    drops: bool = False
    size: int | None = None

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Run forward and backward of one batch."""
        __tracebackhide__ = True
        if self.size is None and not self.drops and engine_of(state) is LOCAL:  # it needs no pass
            state, out = self.forward(state, batch)
            return state, self.from_loss(state, out)
        return self.over(state, (batch,), alone=True)

    def over(
        self,
        state: TrainState,
        batches: Sequence[Batch],
        size: int | None = None,
        *,
        alone: bool = False,
        guarded: bool = False,
    ) -> tuple[TrainState, Output]:
        """Run forward and backward of a window. The gradient is that of the mean over its items.

        Args:
            state: the state that is trained.
            batches: the window.
            size: the most samples in one forward and backward, in the place of that of this step.
            alone: as of ``Engine.start``; so is ``guarded``.
        """
        __tracebackhide__ = True
        put_back, given = set_aside(state), (self, state, batches, size or self.size)
        making, pieces = engine_of(state).start(*given, alone=alone, guarded=guarded)
        for piece in pieces:
            state, out = making.forward(state, piece)
            making.add(state, out)
        out = making.finish(state)
        put_back()
        if self.drops:
            for p in current_parameters(state).others:
                p.grad = None
        return state, out

    def fail_to_train(self, state: TrainState, uses_others: bool) -> NoReturn:
        """Raise ValueError: no parameter that is trained has a gradient.

        Args:
            state: the state.
            uses_others: whether other parameters of the model have one.
        """
        fail_to_train(state, self.name, uses_others)

    def root(self, state: TrainState, out: Output, relative: float | Tensor | None) -> Tensor:
        """Return the number that backward starts from: loss × relative weight."""
        root = out.loss
        if not root.requires_grad:
            fail_without_gradient(state)
        if root.ndim:  # one loss for each model of a stack, whose gradients are its own
            root = root.sum()
        return root if relative is None else root * relative

    def from_loss(self, state: TrainState, out: Output) -> Output:
        """Leave the gradient of one batch in ``.grad``, and return its output."""
        __tracebackhide__ = True
        if out.skip is not None:
            return attrs.evolve(out, loss=out.loss.detach())
        relative = None
        if isinstance(out.weight, Tensor):  # on the device: 1, or 0 for a batch without items
            relative = in_wide_dtype(WeightedSum.valid(out.weight) > 0, out.loss)
        root = self.root(state, out, relative)
        if self.create_graph:
            _backward_with_graph(root)
        else:
            root.backward()
        return Output(out.loss.detach(), out.weight, out.aux, out.metrics)


def _backward_with_graph(root: Tensor) -> None:
    with warnings.catch_warnings():
        # The warning is of a leak of memory. The gradients are removed after the update.
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        root.backward(create_graph=True)


# --------------------------------------------------------------------------------------------------
# The gradient engine of a single process: gradients add up in `.grad`, as autograd does.


class LocalEngine(Engine):
    """The engine of a single process: an :class:`Engine` as it is.

    An engine of your own may be one that replaces some of the methods.

    Example:
        >>> import attrs, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Halving(LocalEngine):
        ...     def start(self, backward, state, window, size=None, **settings):
        ...         return super().start(backward, state, [x / 2 for x in window], size, **settings)
        >>> backend = attrs.evolve(toy().backend, engine=lambda state: Halving())
        >>> state = attrs.evolve(toy(), backend=backend)
        >>> fl.pipeline()(toy_loss)(state, torch.ones(1))[0].model.w.item()
        -0.5
    """


class _Batch:
    """Forward and backward of one batch in one piece, which need not be weighed."""

    def __init__(self, backward: Backward) -> None:
        self._backward, self.forward = backward, backward.forward

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        self._out = self._backward.from_loss(state, out)

    def finish(self, state: TrainState) -> Output:
        return self._out


class _Window:
    """Forward and backward of a window, weighted by the items of its batches."""

    def __init__(self, backward: Backward) -> None:
        self._backward, self.forward, self._total = backward, backward.forward, WeightedSum()

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if self._total.add(out):
            self._backward.root(state, out, self._total.relative_weight(out)).backward()

    def finish(self, state: TrainState) -> Output:
        self._total.divide([p.grad for p in parameters(state)])
        return self._total.output()


LOCAL = LocalEngine()  # it keeps nothing, so all states share it
