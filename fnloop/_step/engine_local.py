"""The gradient engine of a single process: gradients add up in ``.grad``, as autograd does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fnloop._core.metrics import Shares
from fnloop._core.parts import Part
from fnloop._core.several import Several
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._step.forward import EvaluationPass, Result, Subject, SumOfBatches
from fnloop._step.gradients import (
    GradientSum,
    LocalBatch,
    LocalWindow,
    LossRoot,
    Pass,
    SumInOrder,
    WeightedSum,
    pieces_of,
)


class LocalEngine:
    """A single process: most methods return their argument unchanged.

    The methods are those of :class:`fnloop._step.engine.Engine`.
    """

    calls_every_batch = True
    brings: tuple[Part, ...] = ()

    def begin(self, state: TrainState) -> None: ...

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        return step

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice
    ) -> None: ...

    def start(
        self,
        loss: LossRoot,
        state: TrainState,
        window: Sequence[Batch],
        size: int | None = None,
        *,
        alone: bool = False,
        guarded: bool = False,
    ) -> tuple[Pass, Iterable[Batch]]:
        if size is not None:
            window = [piece for batch in window for piece in pieces_of(batch, size)]
        making = LocalBatch(loss) if alone and len(window) == 1 else LocalWindow(loss, state)
        return making, window

    def start_sum(self, state: TrainState, batches: int, dtype: torch.dtype | None) -> GradientSum:
        return SumInOrder(state, WeightedSum(), dtype)

    def mark_draws(self) -> Callable[[], None]:
        return lambda: None  # they draw from where the generators are

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return flag, out

    def largest(self, number: int) -> int:
        return number

    def mean_loss(self, out: Output) -> Tensor:
        return out.loss

    def start_evaluation(self, state: TrainState, name: str) -> EvaluationPass:
        return LocalEvaluation(state.model.metric if isinstance(state.model, Several) else None)

    def check_alike(self, state: TrainState, what: str) -> None: ...

    def reduce(
        self, metrics: Mapping[str, Metric], training: str | None = None
    ) -> dict[str, Metric]:
        return dict(metrics)

    def gather(self, state: TrainState, what: str) -> tuple[dict[str, Metric], Shares]:
        return dict(state.metrics), ()

    def continued(
        self,
        state: TrainState,
        merged: Mapping[str, object],
        shares: Sequence[Mapping[str, object]],
    ) -> Mapping[str, object]:
        return merged


class LocalEvaluation(SumOfBatches):
    """An evaluation or a prediction in one process."""

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        return [fn(subject, batch)]

    def finish(self, source: Source) -> None: ...

    def own_metrics(self) -> dict[str, Metric]:
        return self.metrics()

    def gather(self, results: list[Result]) -> list[Result]:
        return results


LOCAL = LocalEngine()  # it keeps nothing, so all states share it
