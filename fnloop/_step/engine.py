"""The gradient engine: what depends on the number of processes in training and evaluation.

There are three: :class:`LocalEngine` for one process, :class:`DistributedEngine` for several, and
:class:`ExactEngine` for any number, with the same bits. :func:`engine_of` chooses. Nothing else in
the steps and the middleware branches on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fnloop._core.average import viewed_model
from fnloop._core.ownership import Ownership
from fnloop._core.state import TrainState, ownership_of
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._step.gradient_sum import GradientSum
from fnloop._step.gradients import LossRoot
from fnloop._step.local import LocalEngine

if TYPE_CHECKING:
    from fnloop._step.distributed import DistributedEngine
    from fnloop._step.exact import ExactEngine

__all__ = ["BatchPass", "EvaluationPass", "GradientEngine", "WindowPass", "engine_of"]

Subject = TypeVar("Subject")
Result = TypeVar("Result")

_LOCAL = LocalEngine()
_engines: WeakKeyDictionary[Ownership, DistributedEngine] = WeakKeyDictionary()
_exact: WeakKeyDictionary[Ownership, ExactEngine] = WeakKeyDictionary()


def engine_of(state: TrainState) -> GradientEngine:
    """Return the engine that makes the gradients of a state's model.

    A distributed engine lives as long as the states of its model. It holds the model, but not what
    they own it by, which is its key.
    """
    if state.backend.exact:
        return _exact_engine_of(state)
    if state.backend.world_size == 1:
        return _LOCAL
    owner = ownership_of(state)
    engine = _engines.get(owner)
    if engine is not None and engine.model is not state.model:
        engine = engine if viewed_model(state.model) is engine.model else None
    if engine is None:
        # Imported here, since a run in one process has no use for it.
        from fnloop._step.distributed import DistributedEngine

        engine = _engines[owner] = DistributedEngine(state)
    return engine


def _exact_engine_of(state: TrainState) -> ExactEngine:
    owner = ownership_of(state)
    if (engine := _exact.get(owner)) is None:
        from fnloop._step.exact import ExactDistributedEngine, ExactEngine

        alone = state.backend.world_size == 1
        engine = _exact[owner] = ExactEngine(state) if alone else ExactDistributedEngine(state)
    return engine


class BatchPass(Protocol):
    """Forward and backward of one batch.

    In one process ``forward`` is the step inside itself, so that no frame is added to a traceback.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def backward(self, state: TrainState, out: Output, /) -> Output:
        """Make the gradient, from the output of ``forward``. Return what to report."""
        ...


class WindowPass(Protocol):
    """Forward and backward of a window of batches.

    For each batch call ``forward``, then ``add`` with its output; after the last one ``finish``.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def add(self, state: TrainState, out: Output, /) -> None:
        """Add the gradient of a batch, by its weight."""
        ...

    def finish(self, state: TrainState, /) -> Output:
        """Turn the sum of the gradients into the mean. Return what to report of the window."""
        ...


class EvaluationPass(Protocol):
    """An evaluation of a loader, or a prediction for it."""

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch, /
    ) -> list[Result]:
        """Call ``fn(subject, batch)``. Return its result in a list, which is empty for padding."""
        ...

    def finish(self, source: Source, /) -> None:
        """Raise if the processes have read the data in different orders."""
        ...

    def add(self, out: Output, /) -> None:
        """Combine the loss and the metrics of a batch with those before it."""
        ...

    def own_metrics(self) -> dict[str, Metric]:
        """Return the metrics that this process contributes, the loss first."""
        ...

    def gather(self, results: list[Result], /) -> list[Result]:
        """Return the results of the last batch of every process, in the order of their ranks."""
        ...


class GradientEngine(Protocol):
    """What depends on the number of processes."""

    @property
    def calls_every_batch(self) -> bool:
        """Whether every batch passes through the loss function; padding may not."""
        ...

    def begin_run(self, state: TrainState, /) -> None:
        """Forget what was found out about the data of an earlier run."""
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

    def mark_draws(self) -> Callable[[], None]:
        """Return what makes the next passes of an update draw again what those from here on do."""
        ...

    def start_batch(self, loss: LossRoot, state: TrainState, /, guarded: bool = False) -> BatchPass:
        """Start forward and backward of one batch. For ``guarded`` see :meth:`start_window`."""
        ...

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], /, guarded: bool = False
    ) -> WindowPass:
        """Start forward and backward of a window.

        Args:
            loss: the loss, and what backward starts from.
            state: the state that is trained.
            pieces: for each batch of the window, how many times ``forward`` and ``add`` are called.
            guarded: whether all processes raise if one runs out of memory in ``forward`` or
                ``add``. Then gradients are exchanged in ``finish`` only, not during backward.
        """
        ...

    def equalize(
        self, state: TrainState, pieces: list[list[Batch]], /
    ) -> Sequence[Sequence[Batch]]:
        """Return the pieces of each batch of a window, as many in all processes where they must be.

        That is where the forward step performs collectives. Then a batch with fewer is padded.
        """
        ...

    def largest(self, number: int, /) -> int:
        """Return the largest of a number over all processes."""
        ...

    def start_sum(self, state: TrainState, batches: int, /) -> GradientSum:
        """Start the sum of a window, whose batches a step takes one by one."""
        ...

    def any(self, flag: bool, /) -> bool:
        """Return whether a flag is set in any process."""
        ...

    def agree(self, flag: Tensor, out: Output, /) -> tuple[Tensor, Output]:
        """Return a flag as it is in any process, and an output that is skipped if it is in any."""
        ...

    def mean_loss(self, out: Output, /) -> Tensor:
        """Return the mean loss over the items of all processes."""
        ...

    def start_evaluation(self, state: TrainState, name: str, /) -> EvaluationPass:
        """Start an evaluation or a prediction: every process gets the main one's buffers.

        Args:
            state: the state.
            name: the name of the function that is called with each batch.
        """
        ...

    def share_buffers(self, model: nn.Module, /) -> None:
        """Copy the buffers of the main process's model to that of every process."""
        ...

    def check_alike(self, state: TrainState, what: str, /) -> None:
        """Raise in every process if the weights or the counters of the processes differ.

        Args:
            state: the newest state.
            what: what it is for, as errors name it.
        """
        ...

    def merge_metrics(self, metrics: Mapping[str, Metric], /) -> dict[str, Metric]:
        """Combine metrics over all processes, each of which has seen a part of the data."""
        ...

    def own_names(self, names: Iterable[str], /) -> list[str]:
        """Return the running metrics that are of this process's own share of the data."""
        ...

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "", /) -> dict[str, Metric]:
        """Combine the metrics of a report over all processes.

        Args:
            report: name to metric.
            prefix: what the names of training metrics begin with, besides "recent/". Those that are
                made after the gradients were averaged are the same in every process, and count
                once.
        """
        ...
