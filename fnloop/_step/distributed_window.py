"""Forward and backward of one window when there are several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fnloop._backend.collectives import any_rank, start_all_reduce_sum
from fnloop._backend.memory import is_out_of_memory
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Output
from fnloop._data.window import Padding, Window
from fnloop._step.evaluation import CollectiveProbe
from fnloop._step.gradients import LossRoot, restore_gradients, stash_gradients
from fnloop._step.weight_agreement import WeightAgreement, is_left_out
from fnloop._step.weighted_sum import Weight, WeightedSum, divide, weight_on_device

__all__ = ["DistributedBatch", "DistributedWindow"]

_MEMORY = "an exchange about memory"
_TOO_LATE = (
    "there was no memory left to average the gradients, which all processes have begun: that "
    "cannot be repeated with smaller pieces. List microbatch(size) with a size that fits"
)


class Reducer(Protocol):
    """What averages the gradients of a window over processes."""

    def start_window(self) -> None: ...
    def start_microbatch(self, last: bool, /) -> None: ...
    def zero_loss(self, state: TrainState, loss: Tensor, /) -> Tensor: ...
    def attach(self, state: TrainState, root: Tensor, kept: int, touch: bool) -> Tensor: ...
    def counted(self) -> Weight: ...
    def finish_window(self, state: TrainState, touched: bool) -> None: ...


class Engine(Protocol):
    """What a window needs of the engine, which outlives it."""

    processes: int
    items: Weight
    own_parts: set[str]
    ended_on_padding: bool
    empty_output: Output | None
    weights: WeightAgreement
    probe: CollectiveProbe

    @property
    def reducer(self) -> Reducer: ...
    def window_of(self, state: TrainState, /) -> Window: ...
    def is_padding(self, window: Window, n: int, batches: int, /) -> bool: ...
    def seed_own(self, state: TrainState, /) -> None: ...
    def seed_shared(self, state: TrainState, /) -> None: ...


class DistributedWindow:
    """Forward and backward of a window, averaged over processes in its last backward.

    Args:
        engine: the engine.
        loss: the loss, and the root of backward.
        state: the state that is trained.
        pieces: for each batch of the window, in how many pieces it comes.
        guarded: whether all processes raise if one runs out of memory, so that all can begin the
            window again. Then no collective is in a backward that computes gradients.
    """

    def __init__(
        self,
        engine: Engine,
        loss: LossRoot,
        state: TrainState,
        pieces: Sequence[int],
        guarded: bool,
    ) -> None:
        self._engine, self._loss, self._guarded = engine, loss, guarded
        self._batch_of = [batch for batch, n in enumerate(pieces) for _ in range(n)]
        self._pieces, self._batches = len(self._batch_of), len(pieces)
        self._taken = engine.window_of(state)
        # Samples in every piece, in every process; 0 if that may differ.
        self._size = self._taken.batch_size if self._pieces == self._batches else 0
        self._total = WeightedSum()
        self._out: Output | None = None  # the latest
        self._n = 0  # pieces so far
        self._kept = 0  # of them, those that are neither padding nor skipped
        self._has_no_batch = self._is_padding = False
        self._is_uniform = False  # whether all batches are known to weigh the same
        self._stashed: list[Tensor | None] | None = None
        self._items: Callable[[], Tensor] | None = None
        engine.seed_own(state)
        engine.reducer.start_window()

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        engine = self._engine
        self._has_no_batch = engine.is_padding(self._taken, self._batch_of[self._n], self._batches)
        self._is_padding = self._has_no_batch or type(batch) is Padding
        self._n += 1
        engine.reducer.start_microbatch(self._n == self._pieces)
        if engine.empty_output is not None and engine.probe.can_skip(self._is_padding):
            return state, engine.empty_output
        known = engine.probe.uses_collectives
        own, loss = batch.batch if type(batch) is Padding else batch, self._loss
        try:
            if self._has_no_batch:
                where = f"update {state.step + 1}"
                state, out = engine.probe.call_again(loss.name, where, loss.forward, state, own)
            else:
                state, out = engine.probe.call(loss.forward, state, own)
        except Exception as error:
            self._tell_others(error)
            raise
        if is_left_out(out):
            engine.probe.uses_collectives = known  # it does not show
            if known:
                raise RuntimeError(
                    f"the loss function leaves a batch out ({out.skip}) in one process, but it "
                    "exchanges something with the others, which wait for this one: compute the "
                    'loss, and return loss, {"weight": 0}'
                )
        return state, out

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        engine = self._engine
        self._out = out
        if engine.empty_output is None:
            engine.empty_output = Output(torch.zeros_like(out.loss), weight_on_device(out) * 0)
        if self._n == 1:
            if self._guarded and not engine.weights.is_settled(self._size):
                self._check_memory()
            self._agree_on_weights(state, out)
        if self._is_uniform:
            engine.weights.check(out, self._size)
        root = self._root(state, out)
        if self._n == self._pieces and not self._guarded:
            root = self._start_averaging(state, out, root)
        try:
            root.backward()
        except Exception as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: Exception) -> None:
        """Tell the other processes, which wait in _check_memory, if there is no memory left."""
        if self._guarded and is_out_of_memory(error):
            any_rank(True, _MEMORY)

    def _check_memory(self) -> None:
        """Raise if another process has run out of memory."""
        if any_rank(False, _MEMORY):
            raise torch.OutOfMemoryError("another process has run out of memory")

    def _agree_on_weights(self, state: TrainState, out: Output) -> None:
        weights = self._engine.weights
        self._is_uniform = not self._loss.may_skip and weights.is_uniform(out, self._size)
        self._stashed = stash_gradients(state)
        if not self._is_uniform:
            self._total.reference = weights.reference(weight_on_device(out))

    def _root(self, state: TrainState, out: Output) -> Tensor:
        """Return the root of this process's backward. Padding and skipped batches add zero."""
        engine = self._engine
        if self._is_padding and out is not engine.empty_output:
            return out.loss * 0  # it was run, for its collectives: backward may have some too
        if self._is_padding or out.skip is not None:
            return engine.reducer.zero_loss(state, out.loss)
        relative = None if self._is_uniform else self._total.relative_weight(out)
        root = self._loss.root(state, out, relative)
        engine.own_parts.update(out.metrics)
        self._kept += 1
        if self._pieces > 1 or not self._is_uniform:
            self._total.add(out)
        return root

    def _start_averaging(self, state: TrainState, out: Output, root: Tensor) -> Tensor:
        """Start to exchange what the mean depends on. Return the root of the last backward."""
        if not self._is_uniform:
            weight = 0 if self._total.weight is None else self._total.weight
            weight = weight_on_device(out, weight)
            self._items = start_all_reduce_sum(weight, "the sum of the items of an update")
        return self._engine.reducer.attach(state, root, self._kept, touch=self._touches)

    def finish(self, state: TrainState) -> Output:
        engine, total, out = self._engine, self._total, self._out
        assert out is not None
        if self._guarded:
            self._check_memory()
            self._average_all(state, out)
        engine.reducer.finish_window(state, self._touches)
        engine.ended_on_padding = self._has_no_batch
        engine.seed_shared(state)
        counted = engine.reducer.counted()
        # A host read, only where this process has no batch that counts: whether others have.
        if not self._kept and not counted:
            restore_gradients(state, self._stashed)
            skip = out.skip or "left out by every process"
            return Output(out.loss.detach(), 0, out.aux, {}, skip)
        self._divide(state, counted)
        if self._is_uniform and self._pieces == 1 and self._kept:
            restore_gradients(state, self._stashed)
            return Output(out.loss.detach(), out.weight, out.aux, out.metrics)
        restore_gradients(state, self._stashed)
        if total.is_empty:
            return Output(torch.zeros_like(out.loss), 0, out.aux)
        return total.output()

    @property
    def _touches(self) -> bool:
        """Whether the last backward may compute the gradients of some parameters only."""
        return self._guarded or self._pieces > 1

    def _average_all(self, state: TrainState, out: Output) -> None:
        """Average gradients that are complete in every process, by a backward that adds zero."""
        try:
            zero = self._engine.reducer.zero_loss(state, out.loss)
            self._start_averaging(state, out, zero).backward()
        except Exception as error:
            if is_out_of_memory(error):
                raise RuntimeError(_TOO_LATE) from error
            raise

    def _divide(self, state: TrainState, counted: Weight) -> None:
        """Turn the mean over processes of the sum over batches into the mean over items."""
        engine = self._engine
        if self._is_uniform:
            engine.items = counted * self._size
            divide((p.grad for p in parameters(state)), counted, engine.processes)
            return
        assert self._items is not None and self._total.reference is not None
        engine.items = self._items()
        reference = self._total.reference * engine.processes
        divide((p.grad for p in parameters(state)), engine.items, reference)


class DistributedBatch(DistributedWindow):
    """Forward and backward of a single batch."""

    def backward(self, state: TrainState, out: Output) -> Output:
        __tracebackhide__ = True
        self.add(state, out)
        return self.finish(state)
