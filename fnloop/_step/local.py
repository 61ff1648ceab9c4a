"""The gradient engine of a single process: gradients add up in ``.grad``, as autograd does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._step.evaluation import Fold
from fnloop._step.gradient_sum import GradientSum, SumInOrder
from fnloop._step.gradients import LossRoot, restore_gradients, stash_gradients
from fnloop._step.weighted_sum import WeightedSum

__all__ = ["LocalEngine"]

Subject = TypeVar("Subject")
Result = TypeVar("Result")


class LocalEngine:
    """A single process: most methods return their argument unchanged.

    The methods are those of :class:`fnloop._step.engine.GradientEngine`.
    """

    calls_every_batch = True

    def begin_run(self, state: TrainState) -> None: ...

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        return step

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice
    ) -> None: ...

    def mark_draws(self) -> Callable[[], None]:
        return lambda: None  # they draw from where the generators are

    def start_batch(self, loss: LossRoot, state: TrainState, guarded: bool = False) -> LossRoot:
        return loss

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], guarded: bool = False
    ) -> LocalWindow:
        return LocalWindow(loss, state)

    def equalize(self, state: TrainState, pieces: list[list[Batch]]) -> list[list[Batch]]:
        return pieces

    def largest(self, number: int) -> int:
        return number

    def start_sum(self, state: TrainState, batches: int) -> GradientSum:
        return SumInOrder(self, state, WeightedSum())

    def gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        return [p.grad for p in params]

    def any(self, flag: bool) -> bool:
        return flag

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return flag, out

    def mean_loss(self, out: Output) -> Tensor:
        return out.loss

    def start_evaluation(self, state: TrainState, name: str) -> LocalEvaluation:
        return LocalEvaluation()

    def share_buffers(self, model: nn.Module) -> None: ...

    def check_alike(self, state: TrainState, what: str) -> None: ...

    def merge_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return dict(metrics)

    def own_names(self, names: Iterable[str]) -> list[str]:
        return []

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
        return dict(report)


class LocalWindow:
    """Forward and backward of a window, weighted by the items of its batches."""

    __slots__ = ("_loss", "_stashed", "_total", "forward")

    def __init__(self, loss: LossRoot, state: TrainState) -> None:
        self._loss, self.forward = loss, loss.forward
        self._total, self._stashed = WeightedSum(), stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if out.skip is None:
            self._loss.root(state, out, self._total.relative_weight(out)).backward()
        self._total.add(out)

    def finish(self, state: TrainState) -> Output:
        self._total.divide([p.grad for p in parameters(state)])
        restore_gradients(state, self._stashed)
        return self._total.output()


class LocalEvaluation(Fold):
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
