"""The gradient engine: what a step asks of it, and which one a state has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded
from fnloop._core.metrics import Shares
from fnloop._core.parts import Part
from fnloop._core.state import Ownership, TrainState, ownership_of
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._core.view import trained_model
from fnloop._data.source import Source
from fnloop._extensions import extensions
from fnloop._step.engine_local import LOCAL
from fnloop._step.forward import EvaluationPass
from fnloop._step.gradients import GradientSum, LossRoot, Pass

# --------------------------------------------------------------------------------------------------
# The gradient engine: what depends on the number of processes in training and evaluation.
#
# There are three: `LocalEngine` for one process, `DistributedEngine` for several, and `ExactEngine`
# for any number, with the same bits. `engine_of` chooses. Nothing else in the steps and the
# middleware branches on the number of processes.


class Engine(Protocol):
    """What depends on the number of processes: gradients, decisions, and what is reported.

    Unless a method says otherwise, it may be a collective: every process calls it.

    Another engine is made of one of those here, whose methods it replaces or calls. ``state ->
    engine`` is in the backend of its states: ``attrs.evolve(state.backend, engine=...)``.

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

    @property
    def calls_every_batch(self) -> bool:
        """Whether every batch passes through the loss function; padding may not."""
        ...

    @property
    def brings(self) -> tuple[Part, ...]:
        """The parts of checkpoints that are this engine's."""
        ...

    # --- a step

    def begin(self, state: TrainState, /) -> None:
        """Begin a run: forget what was found out about the data of an earlier one."""
        ...

    def read_from(self, source: Source, step: Step, window: int, /) -> Step:
        """Return the step for what a source gives; it notes which of the batches are padding.

        Args:
            source: the source.
            step: the step. It is called once for each window that the source gives, in order.
            window: the window of the step: it takes a tuple of batches unless this is 1.
        """
        ...

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
        ...

    def start(
        self,
        loss: LossRoot,
        state: TrainState,
        window: Sequence[Batch],
        size: int | None = None,
        /,
        *,
        alone: bool = False,
        guarded: bool = False,
    ) -> tuple[Pass, Iterable[Batch]]:
        """Start forward and backward of a window: ``.grad`` gets the gradient of its mean.

        Args:
            loss: the loss, and what backward starts from.
            state: the state that is trained.
            window: the batches.
            size: the most samples in one forward and backward; None: those of a batch.
            alone: whether the window is a single batch, which is not weighed if it is one piece.
            guarded: whether all processes raise if one runs out of memory. Then gradients are
                exchanged after the last backward only.

        Returns:
            What makes the gradient, and the pieces to call it with.
        """
        ...

    def start_sum(
        self, state: TrainState, batches: int, dtype: torch.dtype | None, /
    ) -> GradientSum:
        """Start the sum of a window, whose batches a step takes one by one.

        Args:
            state: the state that is trained.
            batches: how many batches the window has.
            dtype: in which gradients are added up; None: in their own.
        """
        ...

    def mark_draws(self) -> Callable[[], None]:
        """Return what makes the next passes of an update draw again what those from here on do."""
        ...

    def agree(self, flag: Tensor, out: Output, /) -> tuple[Tensor, Output]:
        """Return a flag as it is in any process, and an output that is skipped if it is in any."""
        ...

    def largest(self, number: int, /) -> int:
        """Return the largest of a number over all processes; of a flag, whether any has set it."""
        ...

    def mean_loss(self, out: Output, /) -> Tensor:
        """Return the mean loss over the items of all processes."""
        ...

    # --- evaluations, records and checkpoints

    def start_evaluation(self, state: TrainState, name: str, /) -> EvaluationPass:
        """Start an evaluation or a prediction: every process gets the main one's buffers.

        Args:
            state: the state.
            name: the name of the function that is called with each batch.
        """
        ...

    def check_alike(self, state: TrainState, what: str, /) -> None:
        """Raise in every process if the weights or the counters of the processes differ.

        Args:
            state: the newest state.
            what: what it is for, as errors name it.
        """
        ...

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
        ...

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
        ...

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
        ...


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
    owner, model = ownership_of(state), trained_model(state.model) or state.model
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
