"""The gradient engine of several processes.

Each process runs the loss function on its share of a window, with the plain module. Gradients are
averaged in the last backward of a window only: by torch's DistributedDataParallel, or by the
module itself if it is under ``fully_shard``. That is the mean over processes. The mean over items
is it times ``processes × reference / items``. The number of items is summed over the processes,
unless all batches are known to weigh the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from fnloop._backend.collectives import (
    all_reduce_max,
    all_reduce_max_tensor,
    any_rank,
    shutdown_callbacks,
    start_all_reduce_sum,
    sync_buffers,
)
from fnloop._backend.fsdp import is_sharded
from fnloop._core.merge import check_alike, merge_metrics
from fnloop._core.rng import COMPUTE, fold_in, torch_seeder
from fnloop._core.running import RECENT
from fnloop._core.skip import BY_ANOTHER
from fnloop._core.state import TrainState, generation_of, ownership_of
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._data.window import Padding, Window
from fnloop._step.ddp import BucketReducer
from fnloop._step.distributed_window import DistributedBatch, DistributedWindow
from fnloop._step.evaluation import CollectiveProbe, DistributedEvaluation, drop_last_metrics
from fnloop._step.gradient_sum import GradientSum, SumInOrder
from fnloop._step.gradients import LossRoot
from fnloop._step.sharded import ShardReducer
from fnloop._step.weight_agreement import WeightAgreement
from fnloop._step.weighted_sum import Weight, WeightedSum

__all__ = ["DistributedEngine", "agree_on_skip"]

_UNKNOWN = Window()


class DistributedEngine:
    """Makes the gradients of one model in several processes.

    The methods are those of :class:`fnloop._step.engine.GradientEngine`.

    Args:
        state: a state of the model.

    Attributes:
        reducer: what averages gradients.
        weights: what the processes have agreed on about weights.
        probe: whether the forward step performs collectives.
        items: the items of the last window, over all processes.
        own_parts: the names of the metrics that are of a process's own share of the data.
        ended_on_padding: whether this process had padding in the last round.
        empty_output: the output for padding that is not run; None before the first batch.
    """

    calls_every_batch = False

    def __init__(self, state: TrainState) -> None:
        self.model, self.processes = state.model, state.backend.data_size
        kind = ShardReducer if is_sharded(state.model) else BucketReducer
        self.reducer = kind(state.model, self.processes)
        self.weights = WeightAgreement()
        self.probe = CollectiveProbe(state)
        self.items: Weight = 0
        self.own_parts = ownership_of(state).own_metrics
        self.own_parts.add("loss")
        self.ended_on_padding = False
        self.empty_output: Output | None = None
        self._window: tuple[int, Window] = (-1, _UNKNOWN)  # by the version of its state
        self._turns: dict[str, DistributedEngine] = {}  # of an alternating step
        self._calls, self._generation = 0, -1  # of backward, in one update
        self._seed = 0  # of the latest backward
        self._position = torch_seeder(state.backend.device)
        shutdown_callbacks.add(self)

    def close(self) -> None:
        """Release the process group, at the end of the script."""
        self.reducer.close()

    # --- a run

    def begin_run(self, state: TrainState) -> None:
        self.weights = WeightAgreement()

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        def step_on_share(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            batch, taken = source.take(batch, window)
            self._window = generation_of(state), taken
            return step(state, batch)

        return step_on_share

    def window_of(self, state: TrainState) -> Window:
        """Return what is known of the window that a step was given."""
        version, window = self._window
        return window if version == generation_of(state) else _UNKNOWN

    def start_turn(
        self,
        name: str,
        engine: object,
        turn: TrainState,
        state: TrainState,
        batches: slice,
    ) -> None:
        assert isinstance(engine, DistributedEngine)
        self._turns[name] = engine
        whole = self.window_of(state)
        part = Window(whole.batch_size, whole.padding[batches])
        engine._window = generation_of(turn), part

    def _is_own(self, name: str) -> bool:
        """Return whether a metric of training is of this process's own share of the data."""
        turn, _, part = name.partition("/")
        if (engine := self._turns.get(turn)) is None:
            return name in self.own_parts
        if engine.empty_output is not None:
            if own := engine._is_own(part):
                self.own_parts.add(name)  # for a copy of the state
            return own
        # It had no turn yet. If no checkpoint has told, all may be, which changes no mean.
        return name in self.own_parts or f"{turn}/loss" not in self.own_parts

    def _had_padding(self, name: str) -> bool:
        """Return whether this process had padding in the last round of a metric of training."""
        return self._turns.get(name.partition("/")[0], self).ended_on_padding

    def is_padding(self, window: Window, n: int, batches: int) -> bool:
        """Return whether the n-th of the batches that backward was given is padding.

        A step that takes them one by one has as many calls in an update.
        """
        if not window.padding:
            return False
        one_by_one = len(window.padding) != batches
        return window.padding[min(self._calls, len(window.padding) - 1) if one_by_one else n]

    def seed_own(self, state: TrainState) -> None:
        """Position torch's generators before a forward and backward: each process draws its own."""
        if state.run is None:
            return  # a bare step draws from where the generators are
        again = self._generation == generation_of(
            state
        )  # a step inside may be called more than once
        self._calls = self._calls + 1 if again else 0
        self._generation = generation_of(state)
        self._seed = fold_in(state.seed, COMPUTE, state.epoch, state.batch, self._calls)
        self._position(fold_in(self._seed, 1 + state.backend.data_rank))

    def seed_shared(self, state: TrainState) -> None:
        """Position torch's generators after a backward: all processes draw the same."""
        if state.run is not None:
            self._position(fold_in(self._seed, 0))

    def mark_draws(self) -> Callable[[], None]:
        before = self._calls, self._generation

        def repeat() -> None:
            self._calls, self._generation = before

        return repeat

    # --- gradients

    def start_batch(
        self, loss: LossRoot, state: TrainState, guarded: bool = False
    ) -> DistributedBatch:
        return DistributedBatch(self, loss, state, (1,), guarded)

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], guarded: bool = False
    ) -> DistributedWindow:
        return DistributedWindow(self, loss, state, pieces, guarded)

    def equalize(
        self, state: TrainState, pieces: list[list[Batch]]
    ) -> Sequence[Sequence[Batch | Padding]]:
        uniform = self.window_of(state).batch_size > 0  # then all have as many
        if uniform or self.probe.uses_collectives is False:
            return pieces
        most = all_reduce_max((len(part) for part in pieces), "the number of pieces")
        return [
            part + [Padding(part[-1])] * (int(n) - len(part))
            for part, n in zip(pieces, most, strict=True)
        ]

    def largest(self, number: int) -> int:
        return int(all_reduce_max([number], "the number of pieces")[0])

    def start_sum(self, state: TrainState, batches: int) -> GradientSum:
        return SumInOrder(self, state, _SumOfMeans(self))

    def gradients(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        # Copies, because the gradients are views of DDP's buckets.
        return [None if p.grad is None else p.grad.clone() for p in params]

    def any(self, flag: bool) -> bool:
        return any_rank(flag, "a decision of a middleware")

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return agree_on_skip(flag, out)

    def mean_loss(self, out: Output) -> Tensor:
        loss = out.loss.double()
        weight = torch.as_tensor(out.weight, dtype=torch.float64, device=loss.device)
        what = "the mean loss of a batch"
        total = start_all_reduce_sum(loss * weight, what)
        items = start_all_reduce_sum(weight, what)
        return (total() / items()).to(out.loss.dtype)

    # --- evaluation and reports

    def start_evaluation(self, state: TrainState, name: str) -> DistributedEvaluation:
        sync_buffers(state.model)
        return DistributedEvaluation(state, name)

    def share_buffers(self, model: nn.Module) -> None:
        sync_buffers(model)

    def check_alike(self, state: TrainState, what: str) -> None:
        check_alike(state, what)

    def merge_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return merge_metrics(metrics)

    def own_names(self, names: Iterable[str]) -> list[str]:
        bases = {name.removeprefix(RECENT) for name in names}
        return [name for name in bases if self._is_own(name)]

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
        trained = {
            name: name.removeprefix(prefix).removeprefix(RECENT)
            for name in report
            if name.startswith((prefix, RECENT))
        }
        own = {
            name
            for name, metric in report.items()
            if name not in trained
            or self._is_own(trained[name])
            or getattr(metric, "per_process", False)
        }
        padded = {name for name in own if name in trained and self._had_padding(trained[name])}
        report = drop_last_metrics(report, padded.__contains__)
        return merge_metrics(report, own)


def agree_on_skip(flag: Tensor, out: Output) -> tuple[Tensor, Output]:
    """Return a flag as it is in any process, and an output that is skipped if it is in any."""
    skipped = out.skip is not None
    both = torch.stack([flag.reshape(()).float(), flag.new_tensor(skipped).float()])
    agreed = all_reduce_max_tensor(both, "a decision of a middleware")
    flagged, any_skipped = agreed.tolist()  # the host read of ``decide``
    if any_skipped and not skipped:
        out = attrs.evolve(out, skip=BY_ANOTHER)
    return torch.tensor(flagged), out


class _SumOfMeans(WeightedSum):
    """The sum of a window whose gradients are means over all processes already.

    Its losses and metrics are of this process. Its gradients count by the items of all processes.
    """

    def __init__(self, engine: DistributedEngine) -> None:
        super().__init__()
        self._engine, self._whole = engine, WeightedSum()

    @property
    def is_empty(self) -> bool:
        return self._whole.is_empty

    def relative_weight(self, out: Output) -> Weight | None:
        return self._whole.relative_weight(self._over_processes(out))

    def add(self, out: Output) -> None:
        super().add(out)
        self._whole.add(self._over_processes(out))

    def divide(self, gradients: Sequence[Tensor | None]) -> None:
        self._whole.divide(gradients)

    def _over_processes(self, out: Output) -> Output:
        return attrs.evolve(out, weight=self._engine.items)
