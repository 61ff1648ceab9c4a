"""The gradient engine: what depends on the number of processes in training and evaluation.

There are two, :class:`LocalEngine` for one process and :class:`DistributedEngine` for several.
:func:`engine_of` chooses. Nothing else in the steps and the middleware branches on the number
of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from fnloop._core.ownership import Ownership
from fnloop._core.state import TrainState, ownership_of
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._step.distributed import DistributedEngine
from fnloop._step.gradients import LossRoot
from fnloop._step.local import LocalEngine
from fnloop._step.weighted_sum import WeightedSum

__all__ = ["EvaluationPass", "GradientEngine", "TrainingPass", "engine_of"]

Subject = TypeVar("Subject")
Result = TypeVar("Result")

_LOCAL = LocalEngine()
_engines: WeakKeyDictionary[Ownership, DistributedEngine] = WeakKeyDictionary()


def engine_of(state: TrainState) -> GradientEngine:
    """Return the engine that makes the gradients of a state's model.

    A distributed engine lives as long as the states of its model. It holds the model, but not what
    they own it by, which is its key.
    """
    if state.backend.world_size == 1:
        return _LOCAL
    owner = ownership_of(state)
    engine = _engines.get(owner)
    if engine is None or engine.model is not state.model:
        engine = _engines[owner] = DistributedEngine(state)
    return engine


class TrainingPass(Protocol):
    """Forward and backward of one window.

    For each batch call ``forward``, then ``backward`` with its output; after the last one
    ``finish``. In one process ``forward`` is the step inside itself, so that no frame is added to
    a traceback.
    """

    @property
    def forward(self) -> Step:
        """``(state, batch) -> (state, out)``."""
        ...

    def backward(self, state: TrainState, out: Output, /) -> None:
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

    def own_metrics(self, metrics: dict[str, Metric], /) -> dict[str, Metric]:
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

    def take(self, state: TrainState, batch: Batch, source: Source, window: int, /) -> Batch:
        """Return what the step takes, and note which of its batches are padding.

        Args:
            state: the state that the step will be called with.
            batch: what the source gave: a batch, or a tuple of them.
            source: the source. Call this once for each window that it gives.
            window: the window of the step.
        """
        ...

    def start_batch(self, loss: LossRoot, state: TrainState, /) -> TrainingPass:
        """Start forward and backward of one batch."""
        ...

    def start_window(self, loss: LossRoot, state: TrainState, batches: int, /) -> TrainingPass:
        """Start forward and backward of a window."""
        ...

    def start_sum(self) -> WeightedSum:
        """Start a sum of gradients that are means over all processes."""
        ...

    def gradients(self, params: Sequence[Tensor], /) -> list[Tensor | None]:
        """Return the gradients, to keep."""
        ...

    def any(self, flag: bool, /) -> bool:
        """Return whether a flag is set in any process."""
        ...

    def mean_loss(self, out: Output, /) -> Tensor:
        """Return the mean loss over the items of all processes."""
        ...

    def start_evaluation(self, state: TrainState, /) -> EvaluationPass:
        """Start an evaluation or a prediction: every process gets the main one's buffers."""
        ...

    def merge_metrics(self, metrics: Mapping[str, Metric], /) -> dict[str, Metric]:
        """Combine metrics over all processes, each of which has seen a part of the data."""
        ...

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "", /) -> dict[str, Metric]:
        """Combine the metrics of a report over all processes.

        Args:
            report: name to metric.
            prefix: what the names of training metrics begin with. Those that are made after the
                gradients were averaged are the same in every process, and count once.
        """
        ...
