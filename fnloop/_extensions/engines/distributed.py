"""The gradient engine of several processes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import operator
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointFunction

from fnloop._core.metrics import Last, Sum
from fnloop._core.state import TrainState
from fnloop._core.types import Output, Step
from fnloop._core.view import is_apart
from fnloop._extensions.engines import exchanges
from fnloop._extensions.engines.alike import check_alike
from fnloop._extensions.engines.apart import apart_of, trains_apart
from fnloop._extensions.engines.join import parameters_beside
from fnloop._extensions.engines.meshes import around_sharded, roots
from fnloop._extensions.engines.one_message import OneMessage, fits
from fnloop._extensions.engines.shares import Padding, Window, take
from fnloop._extensions.engines.torch_compat import leaf_of, reduce_in_backward
from fnloop.extend import (
    Backward,
    Batch,
    GradientSum,
    LocalEngine,
    Metric,
    Metrics,
    Ownership,
    Pending,
    Running,
    Source,
    WeightedSum,
    WindowPass,
    all_parameters,
    collectives,
    containers,
    fold_in,
    is_sharded,
    optimizers,
    parameters,
    rng,
    torch_compat,
)

log = logging.getLogger("fnloop")

# Each process runs the loss function on its share of a window, with the plain module. Gradients are
# averaged in the last backward of a window only: by torch's DistributedDataParallel, or by the
# module itself if it is under `fully_shard`. That is the mean over processes. The mean over items
# is it times `processes × reference / items`. The number of items is summed over the processes,
# unless all batches are known to weigh the same.
#
# Of n processes, one whose loss weighs w starts its backward from loss × w / reference. The mean
# over them is Σ w g / (n × reference), and divided by Σ w / (n × reference) it is Σ w g / Σ w.

_UNKNOWN = Window()
OTHERS = "left out by another process"  # why an update is skipped that another process skips
_DECISION = "a decision of a middleware"
LOCAL = LocalEngine()
Subject = TypeVar("Subject")
Result = TypeVar("Result")


class SeededEngine(LocalEngine):
    """An engine whose passes draw what follows from the seed and the position of their batches.

    Args:
        state: a state of the model.
    """

    def __init__(self, state: TrainState) -> None:
        self.position = rng.torch_seeder(state.backend.device)
        self.calls = 0  # of backward, for the same batches in one update
        self._pass: object = None  # what is called

    def start(
        self,
        backward: Backward,
        state: TrainState,
        window: Sequence[Batch],
        size: int | None = None,
        *,
        alone: bool = False,
        guarded: bool = False,
    ) -> tuple[WindowPass, Iterable[Batch]]:
        cut = containers.pieces_of
        pieces = [[batch] if size is None else cut(batch, size) for batch in window]
        pieces = pieces if size is None else self.equalized(state, pieces)
        making = self.start_pieces(backward, state, pieces, guarded)
        return making, itertools.chain.from_iterable(pieces)

    def equalized(self, state: TrainState, pieces: list[list[Batch]]) -> list[list[Batch]]:
        """Return as many pieces in all processes, where that has to be so."""
        return pieces

    def start_pieces(
        self, backward: Backward, state: TrainState, pieces: list[list[Batch]], guarded: bool
    ) -> WindowPass:
        """Start forward and backward of a window, given the pieces of each of its batches."""
        raise NotImplementedError

    def begin_pass(self, what: object) -> None:
        """Note that a pass over some batches begins. It may not be the first in its update."""
        self.calls, self._pass = self.calls + 1 if self._pass == what else 0, what

    def seed_of(self, state: TrainState, offset: int = 0) -> int:
        """Return the seed of this pass over a batch."""
        return fold_in(state.seed, rng.COMPUTE, state.epoch, state.batch + offset, self.calls)

    def mark_draws(self) -> Callable[[], None]:
        before = self.calls, self._pass

        def repeat() -> None:
            self.calls, self._pass = before

        return repeat


class Together(LocalEngine):
    """What an engine of several processes asks all of them."""

    calls_every_batch = False

    def agree(self, out: Output, flag: Tensor | None = None) -> tuple[Output, Tensor | None]:
        if flag is None:
            skipped = self.largest(out.skip is not None)
        else:
            given = flag.reshape(()).float(), flag.new_tensor(out.skip is not None).float()
            agreed = exchanges.all_reduce_max_tensor(torch.stack(given), _DECISION)
            flagged, skipped = agreed.tolist()  # the host read of ``decide``
            flag = torch.tensor(flagged)
        return attrs.evolve(out, skip=OTHERS) if skipped and out.skip is None else out, flag

    def largest(self, number: int) -> int:
        return int(collectives.all_reduce_max([number], _DECISION)[0])

    def share_buffers(self, model: nn.Module) -> None:
        collectives.sync_buffers(model)

    def check_alike(self, state: TrainState, what: str) -> None:
        check_alike(state, what)


class DistributedEngine(Together, SeededEngine):
    """Makes the gradients of one model in several processes.

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

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.processes = state.backend.contributors
        kind = ShardReducer if is_sharded(state.model) else BucketReducer
        self.reducer = kind(state.model, self.processes)
        self.weights = WeightAgreement()
        self.probe = CollectiveProbe(state)
        self.items: float | Tensor = 0
        self.own_parts = Ownership.of(state).own_metrics
        self.own_parts.add("loss")
        self.ended_on_padding = False
        self.empty_output: Output | None = None
        self._window: tuple[int, Window] = (-1, _UNKNOWN)  # by the version of its state
        self._turns: dict[str, DistributedEngine] = {}  # of an alternating step
        exchanges.shutdown_callbacks.add(self)

    def close(self) -> None:
        """Release the process group, at the end of the script."""
        self.reducer.close()

    # --- a run

    def begin(self, state: TrainState) -> None:
        self.weights = WeightAgreement()

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        def step_on_share(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            batch, taken = take(source, batch, window)
            self._window = Ownership.generation_of(state), taken
            return step(state, batch)

        return step_on_share

    def window_of(self, state: TrainState) -> Window:
        """Return what is known of the window that a step was given."""
        version, window = self._window
        return window if version == Ownership.generation_of(state) else _UNKNOWN

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
        engine._window = Ownership.generation_of(turn), part

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
        return window.padding[min(self.calls, len(window.padding) - 1) if one_by_one else n]

    def seed_own(self, state: TrainState) -> None:
        """Position torch's generators before a forward and backward: each process draws its own."""
        if state.run is not None:  # a bare step draws from where the generators are
            self.begin_pass(Ownership.generation_of(state))
            self.position(fold_in(self.seed_of(state), 1 + state.backend.data_rank))

    def seed_shared(self, state: TrainState) -> None:
        """Position torch's generators after a backward: all processes draw the same."""
        if state.run is not None:
            self.position(fold_in(self.seed_of(state), 0))

    # --- gradients

    def equalized(self, state: TrainState, pieces: list[list[Batch]]) -> list[list[Batch]]:
        if (
            trains_apart(state)
            or self.window_of(state).batch_size > 0  # of one size, all have as many pieces
            or self.probe.uses_collectives is False
        ):
            return pieces
        most = collectives.all_reduce_max(map(len, pieces), "the number of pieces")
        pairs = zip(pieces, most, strict=True)
        return [part + [Padding(part[-1])] * (int(n) - len(part)) for part, n in pairs]

    def start_pieces(
        self, backward: Backward, state: TrainState, pieces: list[list[Batch]], guarded: bool
    ) -> OwnWindow | DistributedWindow:
        if trains_apart(state):
            return OwnWindow(self, backward, state, pieces)
        return DistributedWindow(self, backward, state, pieces, guarded)

    @contextlib.contextmanager
    def start_sum(
        self, state: TrainState, batches: int, dtype: torch.dtype | None
    ) -> Iterator[_SumTogether | GradientSum]:
        with LOCAL.start_sum(state, batches, dtype) as total:
            yield total if trains_apart(state) else _SumTogether(self, total)

    def mean_loss(self, out: Output) -> Tensor:
        loss = out.loss.double()
        weight = torch.as_tensor(out.weight, dtype=torch.float64, device=loss.device)
        what = "the mean loss of a batch"
        total = exchanges.start_all_reduce_sum(loss * weight, what)
        items = exchanges.start_all_reduce_sum(weight, what)
        return (total() / items()).to(out.loss.dtype)

    # --- evaluation and reports

    def start_evaluation(self, state: TrainState, name: str) -> DistributedEvaluation:
        if not is_apart(state):  # otherwise they come with the average
            collectives.sync_buffers(state.model)
        return DistributedEvaluation(state, name)

    def reduce(
        self, metrics: Mapping[str, Metric], training: str | None = None
    ) -> dict[str, Metric]:
        if training is None:
            return merge_metrics(metrics)
        trained = {
            name: name.removeprefix(training).removeprefix(Metrics.RECENT)
            for name in metrics
            if name.startswith((training, Metrics.RECENT))
        }
        own = {
            name
            for name, metric in metrics.items()
            if name not in trained or self._is_own(trained[name]) or is_per_process(metric)
        }
        padded = {name for name in own if name in trained and self._had_padding(trained[name])}
        return merge_metrics(without_last(metrics, padded), own)

    def gather(
        self, state: TrainState, what: str
    ) -> tuple[dict[str, Metric], Sequence[tuple[list[str], dict[str, Metric]]]]:
        merged = {**state.metrics, **self.reduce(state.metrics, "")}
        bases = {name.removeprefix(Metrics.RECENT) for name in state.metrics}
        own = [name for name in bases if self._is_own(name)]
        every = collectives.gather_objects((own, Metrics(state.metrics).sent()), what)
        return merged, every if len(every) > 1 else ()

    def continued(
        self,
        state: TrainState,
        merged: Mapping[str, object],
        shares: Sequence[Mapping[str, object]],
    ) -> Mapping[str, object]:
        backend = state.backend
        # As `gather_objects` orders them.
        rank = backend.data_rank if backend.parts == 1 else backend.rank
        if len(shares) == self.processes:
            return shares[rank]
        # Of another number of processes, one continues with all.
        return merged if rank == 0 else {k: Sum(0) for k in merged if k == Metrics.ITEMS}


class _SumTogether:
    """A sum of gradients that are means over all processes, each of a batch that all count.

    The gradients count by the items of all processes; losses and metrics are of this one.

    Args:
        engine: the engine.
        total: the sum of the gradients.
    """

    def __init__(self, engine: DistributedEngine, total: GradientSum) -> None:
        self._engine, self._total, self._own = engine, total, WeightedSum()

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        out, _ = self._engine.agree(out)
        if self._own.add(out):
            for p in parameters(state):  # copies, because gradients are views of DDP's buckets
                p.grad = None if p.grad is None else p.grad.clone()
        self._total.add(state, Output(out.loss, self._engine.items, skip=out.skip))

    def finish(self, state: TrainState) -> Output:
        self._total.finish(state)
        return self._own.output()


# --------------------------------------------------------------------------------------------------
# Forward and backward of one window when there are several processes.

_MEMORY = "an exchange about memory"
_TOO_LATE = (
    "there was no memory left to average the gradients, which all processes have begun: that "
    "cannot be repeated with smaller pieces. List microbatch(size) with a size that fits"
)


class Share:
    """Forward and backward of this process's batches of a window.

    Args:
        engine: the engine.
        backward: what starts from the loss.
        state: the state that is trained.
        pieces: the pieces of each batch of the window.
    """

    def __init__(
        self,
        engine: DistributedEngine,
        backward: Backward,
        state: TrainState,
        pieces: Sequence[Sequence[Batch]],
    ) -> None:
        self.engine, self.backward = engine, backward
        self._batch_of = [n for n, part in enumerate(pieces) for _ in part]
        self.pieces, self._batches = len(self._batch_of), len(pieces)
        self.taken = engine.window_of(state)
        self.n = 0  # pieces so far
        engine.seed_own(state)

    def next_is_padding(self) -> bool:
        """Return whether the next piece is of a batch that is padding."""
        self.n += 1
        return self.engine.is_padding(self.taken, self._batch_of[self.n - 1], self._batches)


class DistributedWindow(Share):
    """Forward and backward of a window, averaged over processes in its last backward.

    Args:
        engine, backward, state, pieces: as for :class:`Share`.
        guarded: whether all processes raise if one runs out of memory, so that all can begin the
            window again. Then no collective is in a backward that computes gradients.
    """

    def __init__(
        self,
        engine: DistributedEngine,
        backward: Backward,
        state: TrainState,
        pieces: Sequence[Sequence[Batch]],
        guarded: bool,
    ) -> None:
        super().__init__(engine, backward, state, pieces)
        self._guarded = guarded
        # What every piece weighs by its samples, in every process; 0 if that may differ.
        size = self.taken.batch_size if self.pieces == len(pieces) else 0
        self._size = state.backend.own_part(size)
        self._total = WeightedSum()
        self._out: Output | None = None  # the latest
        self._kept = 0  # of them, those that are neither padding nor skipped
        self._has_no_batch = self._is_padding = False
        self._is_uniform = False  # whether all batches are known to weigh the same
        self._items: Callable[[], Tensor] | None = None
        engine.reducer.start_window()

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        engine = self.engine
        self._has_no_batch = self.next_is_padding()
        self._is_padding = self._has_no_batch or type(batch) is Padding
        engine.reducer.start_microbatch(self.n == self.pieces)
        if engine.empty_output is not None and engine.probe.can_skip(self._is_padding):
            return state, engine.empty_output
        known = engine.probe.uses_collectives
        own, backward = batch.batch if type(batch) is Padding else batch, self.backward
        try:
            if self._has_no_batch:
                where = f"update {state.step + 1}"
                given = backward.name, where, backward.forward, state, own
                state, out = engine.probe.call_again(*given)
            else:
                state, out = engine.probe.call(backward.forward, state, own)
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
        engine = self.engine
        self._out = out
        if engine.empty_output is None:
            engine.empty_output = Output(torch.zeros_like(out.loss), weight_on_device(out) * 0)
        if self.n == 1:
            if self._guarded and not engine.weights.is_settled(self._size):
                self._check_memory()
            self._agree_on_weights(state, out)
        if self._is_uniform:
            engine.weights.check(out, self._size)
        averages = self.n == self.pieces and not self._guarded
        root = self._root(state, out, averages)
        if root is None:
            return
        if averages:
            root = self._start_averaging(state, out, root)
        try:
            root.backward()
        except Exception as error:
            self._tell_others(error)
            raise

    def _tell_others(self, error: Exception) -> None:
        """Tell the other processes, which wait in _check_memory, if there is no memory left."""
        if self._guarded and containers.is_out_of_memory(error):
            collectives.any_rank(True, _MEMORY)

    def _check_memory(self) -> None:
        """Raise if another process has run out of memory."""
        if collectives.any_rank(False, _MEMORY):
            raise torch.OutOfMemoryError("another process has run out of memory")

    def _agree_on_weights(self, state: TrainState, out: Output) -> None:
        weights = self.engine.weights
        self._is_uniform = not self.backward.may_skip and weights.is_uniform(out, self._size)
        if not self._is_uniform:
            self._total.reference = weights.reference(weight_on_device(out))

    def _root(self, state: TrainState, out: Output, averages: bool) -> Tensor | None:
        """Return the root of this process's backward. Padding and skipped batches add zero."""
        engine = self.engine
        if self._is_padding and out is not engine.empty_output:
            return out.loss * 0  # it was run, for its collectives: backward may have some too
        if self._is_padding or out.skip is not None:
            return engine.reducer.zero_loss(state, out.loss, averages)
        relative = None if self._is_uniform else self._total.relative_weight(out)
        root = self.backward.root(state, out, relative)
        engine.own_parts.update(out.metrics)
        self._kept += 1
        if self.pieces > 1 or not self._is_uniform:
            self._total.add(out)
        return root

    def _start_averaging(self, state: TrainState, out: Output, root: Tensor) -> Tensor:
        """Start to exchange what the mean depends on. Return the root of the last backward."""
        if not self._is_uniform:
            weight = 0 if self._total.weight is None else self._total.weight
            weight = weight_on_device(out, weight)
            self._items = exchanges.start_all_reduce_sum(
                weight, "the sum of the items of an update"
            )
        return self.engine.reducer.attach(state, root, self._kept, self.backward)

    def finish(self, state: TrainState) -> Output:
        engine, total, out = self.engine, self._total, self._out
        assert out is not None
        if self._guarded:
            self._check_memory()
            self._average_all(state, out)
        engine.reducer.finish_window(state)
        engine.ended_on_padding = self._has_no_batch
        engine.seed_shared(state)
        counted = engine.reducer.counted()
        # A host read, only where this process has no batch that counts: whether others have.
        if not self._kept and not counted:
            skip = out.skip or "left out by every process"
            return Output(out.loss.detach(), 0, out.aux, {}, skip)
        self._divide(state, counted)
        if self._is_uniform and self.pieces == 1 and self._kept:
            return Output(out.loss.detach(), out.weight, out.aux, out.metrics)
        if total.is_empty:
            return Output(torch.zeros_like(out.loss), 0, out.aux)
        return total.output()

    def _average_all(self, state: TrainState, out: Output) -> None:
        """Average gradients that are complete in every process, by a backward that adds zero."""
        try:
            zero = self.engine.reducer.zero_loss(state, out.loss, True)
            assert zero is not None
            self._start_averaging(state, out, zero).backward()
        except Exception as error:
            if containers.is_out_of_memory(error):
                raise RuntimeError(_TOO_LATE) from error
            raise

    def _divide(self, state: TrainState, counted: float | Tensor) -> None:
        """Turn the mean over processes of the sum over batches into the mean over items.

        With P processes, N items in all, and batches that counted relative to the reference R, a
        gradient is the sum of weight × gradient / (P·R). It is divided by N / (P·R).
        """
        engine, grads = self.engine, [p.grad for p in parameters(state)]
        if self._is_uniform:
            engine.items = counted * self._size
            self._total.divide(grads, counted, engine.processes)
            return
        assert self._items is not None and self._total.reference is not None
        engine.items = self._items()
        reference = self._total.reference * engine.processes
        self._total.divide(grads, engine.items, reference)


class OwnWindow(Share):
    """Forward and backward of a window where processes update by themselves: no exchange.

    A process without a batch that counts has no gradient, and reports nothing.
    """

    def __init__(
        self,
        engine: DistributedEngine,
        backward: Backward,
        state: TrainState,
        pieces: Sequence[Sequence[Batch]],
    ) -> None:
        super().__init__(engine, backward, state, pieces)
        self._making, _ = LOCAL.start(backward, state, ())
        self._counts = False

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        engine = self.engine
        engine.ended_on_padding = self.next_is_padding()
        if engine.ended_on_padding:
            return state, Output(torch.zeros((), device=state.backend.device), 0, skip="padding")
        known = engine.probe.uses_collectives
        state, out = engine.probe.call(self.backward.forward, state, batch)
        if is_left_out(out):
            engine.probe.uses_collectives = known  # it does not show
        if engine.probe.uses_collectives and exchanges.counted_collectives() is not None:
            raise NotImplementedError(
                f"local_sgd: {self.backward.name} exchanges something with the other processes in "
                "each update, as SyncBatchNorm does. Leave that out, or leave local_sgd out"
            )
        return state, out

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        self._making.add(state, out)
        self._counts |= out.skip is None

    def finish(self, state: TrainState) -> Output:
        slot = apart_of(state)
        assert slot is not None
        slot.counted |= self._counts
        self.engine.seed_shared(state)
        out = self._making.finish(state)
        # The other processes count this update, whatever this one had.
        return out if self._counts else Output(out.loss, 0, out.aux)


# --------------------------------------------------------------------------------------------------
# The average of gradients over processes, by torch's DistributedDataParallel. A small model on the
# host does without: one message has all of its gradients.


class Reducer:
    """What averages the gradients of a window over processes.

    Args:
        model: the model that is trained.
        processes: the number of processes.
    """

    def __init__(self, model: nn.Module, processes: int) -> None:
        self._model, self._processes = model, processes
        # What waits for the number of batches that count, where that is summed by itself.
        self._counted: Callable[[], Tensor] | None = None

    def close(self) -> None:
        """Release the process group, at the end of the script."""

    def start_window(self) -> None:
        """Start a window: every process gets the main one's buffers."""

    def start_microbatch(self, last: bool) -> None:
        """Start a forward and backward; ``last``: it is the last one of the window."""

    def _start_count(self, root: Tensor, kept: int) -> None:
        """Start to sum how many batches of an update count."""
        here = torch.tensor(float(kept), device=root.device)
        self._counted = exchanges.start_all_reduce_sum(here, "the sum of the batches of an update")

    def counted(self) -> float | Tensor:
        """Return how many batches of the window count, in all processes: on a GPU, as a tensor."""
        assert self._counted is not None
        return _wide(self._counted())


class BucketReducer(Reducer):
    """Averages gradients in DDP's buckets, while backward computes the next ones.

    Those that fit into one bucket are sent after backward anyway: :class:`OneMessage` does it.
    """

    def __init__(self, model: nn.Module, processes: int) -> None:
        super().__init__(model, processes)
        # Its gradient is the mean, over the processes, of how many of their batches count. DDP
        # averages it with those of the parameters.
        self._count: Tensor | None = None
        self._has_buffers = any(True for _ in model.buffers())
        self._ddp: _FixedBucketDDP | None = None
        self._small: OneMessage | None = None  # instead of it
        self._kept, self._mean = 0, 0.0  # batches here that count, and their mean over processes
        self._zero: Tensor | None = None  # the root that was made for a batch that does not count
        self._params: list[Tensor] = []
        self._flags: list[object] = []
        self._trainable: list[Tensor] = []
        self._kinds: list[tuple[int, torch.Size, torch.dtype]] = []
        self._used: list[Tensor] = []  # the parameters that the loss used when DDP was made
        self._hides_parameters = False  # whether the graph of the loss has graphs inside its nodes
        self._waits_for_all = False  # whether DDP waits for every parameter, used or not
        self._warned = False

    def close(self) -> None:
        self._ddp = None

    def start_window(self) -> None:
        if self._has_buffers:
            collectives.sync_buffers(self._model)

    def zero_loss(self, state: TrainState, loss: Tensor, averages: bool) -> Tensor | None:
        """Return a root for backward that adds zero to the gradients.

        Args:
            state: the state.
            loss: the loss of what counts nothing.
            averages: whether it is the last backward of a window, for :meth:`attach`. Others are
                not needed: None.
        """
        if not averages:
            return None
        params = all_parameters(state)
        known = self._used and params is self._params
        known = known and _flags_of(params) == self._flags  # none was frozen or replaced
        # The window so far tells which are used.
        used = [p for p in params if p.grad is not None] or (self._used if known else params)
        self._zero = torch.stack([p.flatten()[:1].sum() * 0 for p in used if p.requires_grad]).sum()
        return self._zero

    def attach(self, state: TrainState, root: Tensor, kept: int, backward: Backward) -> Tensor:
        """Return the root for the last backward of a window, which averages the gradients.

        What the window has used before is reachable from it. :meth:`finish_window` gives DDP the
        gradients that it still expects.

        Args:
            state: the state.
            root: what backward would start from without DDP.
            kept: how many of this process's batches count.
            backward: what starts from the loss.

        Raises:
            ValueError: the loss uses no parameter that is trained, in any process.
            RuntimeError: the processes have replaced or added other parameters than each other.
        """
        self._kept = kept
        params = all_parameters(state)
        flags = _flags_of(params)
        if params is not self._params or flags != self._flags:
            trainable = [p for p in params if p.requires_grad]
            kinds = [(id(p), p.shape, p.dtype) for p in trainable]  # there are buckets for them
            if kinds != self._kinds:
                self._prepare(state, root, trainable, backward)
            self._params, self._flags, self._trainable = params, flags, trainable
            self._kinds = kinds
        ddp, zero, self._zero = self._ddp, self._zero, None
        self._waits_for_all = ddp is not None and not ddp.find_unused_parameters
        if root is zero and not self._waits_for_all and (ddp is None or self._count is not None):
            root = torch.zeros_like(root, requires_grad=True)  # what it reaches is not used by it
        if ddp is None:
            return root
        if self._count is None:  # a communication hook may do anything to a gradient
            self._start_count(root, kept)
        else:
            self._count.grad = None
            root = torch.add(root, self._count.to(root.dtype), alpha=kept)  # adds 0
        used = [p for p in self._trainable if p.grad is not None]
        if used and not self._hides_parameters:
            root = _TouchParameters.apply(root, *used)
        return ddp.forward(root)

    def counted(self) -> float | Tensor:
        if self._small is not None:
            return round(self._mean * self._processes)
        if self._counted is not None:
            return super().counted()
        assert self._count is not None and self._count.grad is not None
        mean = self._count.grad
        if mean.device.type == "cpu":  # reading it waits for nothing
            return round(mean.item() * self._processes)
        return (_wide(mean) * self._processes).round()

    def _prepare(
        self, state: TrainState, root: Tensor, trainable: list[Tensor], backward: Backward
    ) -> None:
        nodes = list(_graph_nodes(root))
        reached = {id(leaf_of(node)) for node in nodes}
        self._hides_parameters = any(CheckpointFunction.__name__ in node.name() for node in nodes)
        self._used = [p for p in trainable if self._hides_parameters or id(p) in reached]
        trained = {id(p) for p in parameters(state)}
        used = any(id(p) in trained for p in self._used)
        used = used or any(p.grad is not None for p in trainable)  # by a batch before this one
        mark = zlib.crc32(repr([tuple(p.shape) for p in trainable]).encode())
        unused, any_used, most, least = collectives.all_reduce_max(
            [len(self._used) < len(trainable), used, mark, -mark], "which parameters the loss uses"
        )
        if most != -least:
            raise RuntimeError(
                f"{exchanges.DIVERGED}: they have parameters of different shapes. "
                f"{exchanges.ADVICE}"
            )
        if not any_used:
            backward.fail_to_train(state, bool(self._used))
        backend = state.backend
        plain = backend.prepare is None and not {*backend.settings} - {"broadcast_buffers"}
        if plain and fits(state.model, trainable):
            self._small, self._ddp = OneMessage(trainable), None
            return
        self._small = self._count = None
        if backend.prepare is None:
            self._count = torch.zeros((), device=root.device, requires_grad=True)
        counts = [] if self._count is None else [self._count]
        self._ddp = _ddp_of(state, [*trainable, *counts], unused > 0)

    def finish_window(self, state: TrainState) -> None:
        """Average what is not yet: all, or what DDP still expects after the last backward."""
        if self._small is not None:
            self._mean = self._small.average_(self._kept)
            return
        unused = [p for p in self._trainable if p.grad is None] if self._waits_for_all else []
        if unused:
            self._warn_of(unused)
            torch.stack([p.flatten()[:1].sum() * 0 for p in unused]).sum().backward()

    def _warn_of(self, unused: list[Tensor]) -> None:
        if self._warned:
            return
        self._warned = True
        is_unused = {id(p) for p in unused}
        names = [name for name, p in self._model.named_parameters() if id(p) in is_unused]
        names += ["those beside the model"] * (len(names) < len(unused))
        log.warning(
            "the loss uses some parameters in some updates but not in others (%s). With several "
            "processes they get a zero gradient when unused, so weight decay and momentum still "
            "apply; a single process would leave them untouched. For that, pass "
            "backend=Accelerator(kwargs_handlers="
            "[DistributedDataParallelKwargs(find_unused_parameters=True)])",
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
        )


def _flags_of(params: Iterable[Tensor]) -> list[object]:
    """Return what is compared before each update: whether each is trained, and in which dtype."""
    return [p.requires_grad and p.dtype for p in params]


class _TouchParameters(torch.autograd.Function):
    """Identity on the loss that makes parameters reachable in backward.

    DDP waits for parameters that it sees in the last backward, and averages no others.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *trainable: Tensor) -> Tensor:
        ctx.count = len(trainable)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (grad, *(None,) * ctx.count)


class _FixedBucketDDP(DistributedDataParallel):
    """DDP without bucket rebuilding after the first backward.

    A sum over three processes or more depends, in its last bit, on the position of a gradient in
    its bucket. With rebuilt buckets a run resumed from a checkpoint would differ from one that
    never stopped.
    """

    def forward(self, loss: Tensor) -> Tensor:
        return reduce_in_backward(self, loss)


class _Trainable(nn.Module):
    """What DDP averages: the model's parameters, and others that the optimizer trains.

    Args:
        model: the model.
        others: the other parameters. A leaf tensor need not be an ``nn.Parameter``, which is why
            they do not pass through ``register_parameter``.
    """

    def __init__(self, model: nn.Module, others: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        self.others = others

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        # Not registered: a leaf of an optimizer need not be an nn.Parameter.
        yield from ((f"other{i}", p) for i, p in enumerate(self.others))
        yield from super().named_parameters(*args, **kwargs)

    def forward(self, loss: Tensor) -> Tensor:
        return loss


@functools.cache
def _check_ddp(device: torch.device) -> None:
    """Raise unless DDP averages gradients when it is called as here, which torch does not document.

    Every process must call it. It runs once, before the first update.
    """
    probe = torch.zeros(1, device=device, requires_grad=True)
    ddp = _FixedBucketDDP(_Trainable(nn.Module(), [probe]), init_sync=False)
    ddp.forward((probe * dist.get_rank()).sum()).backward()
    mean = (dist.get_world_size() - 1) / 2
    # A host read, once per process and device: before the first update.
    if probe.grad is None or probe.grad.item() != mean:
        raise RuntimeError(
            f"DistributedDataParallel of torch {torch.__version__} does not average gradients in "
            f"the way that fnloop calls it. Install torch {torch_compat.CHECKED}, on which it was "
            "checked, or a newer fnloop"
        )


def _ddp_of(state: TrainState, trainable: list[Tensor], unused: bool) -> _FixedBucketDDP:
    _check_ddp(state.backend.device)
    own = {id(p) for p in state.model.parameters()}
    settings = dict(state.backend.settings)
    settings.pop("broadcast_buffers", None)  # done once per window, before forward
    settings.setdefault("find_unused_parameters", unused)
    ddp = _FixedBucketDDP(
        _Trainable(state.model, [p for p in trainable if id(p) not in own]),
        init_sync=False,  # the graph exists already: the weights in it must not change
        **{**_without_buffers(), **settings},
    )
    if state.backend.prepare is not None:
        state.backend.prepare(ddp)
    return ddp


@functools.cache
def _without_buffers() -> dict[str, bool]:
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return {name: False}


def _graph_nodes(loss: Tensor) -> Iterator[Node]:
    """Yield the nodes of the autograd graph of a loss."""
    seen, todo = set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(n for n, _ in node.next_functions)


# --------------------------------------------------------------------------------------------------
# The average of gradients of a model under `fully_shard`, which does most of it by itself.


class ShardReducer(Reducer):
    """Lets ``fully_shard`` average its gradients, and averages those of all other parameters."""

    def __init__(self, model: nn.Module, processes: int) -> None:
        super().__init__(model, processes)
        self._roots = roots(model)

    def start_microbatch(self, last: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(last)

    def zero_loss(self, state: TrainState, loss: Tensor, averages: bool) -> Tensor:
        return loss * 0

    def attach(self, state: TrainState, root: Tensor, kept: int, backward: Backward) -> Tensor:
        self._start_count(root, kept)
        return root

    def finish_window(self, state: TrainState) -> None:
        for p in parameters_beside(state.model, optimizers(state).values()):
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                total = exchanges.start_all_reduce_sum(p.grad, "a sum of gradients")()
                p.grad.copy_(total / self._processes)


# --------------------------------------------------------------------------------------------------
# What the processes of a run agree on about the weights of its batches.


def is_left_out(out: Output) -> bool:
    """Return whether the loss function has left a batch out by ``skip``: it has no loss."""
    return out.skip is not None and not out.loss.requires_grad


class WeightAgreement:
    """Facts about weights that are the same in every process, each exchanged once in a run."""

    def __init__(self) -> None:
        self._are_batch_sizes: bool | None = None
        self._reference: Tensor | None = None

    def is_settled(self, batch_size: float) -> bool:
        """Return whether a window can be weighed without an exchange."""
        if batch_size and self._are_batch_sizes is not False:
            return self._are_batch_sizes is True
        return self._reference is not None

    def is_uniform(self, out: Output, batch_size: float) -> bool:
        """Return whether all batches of a window weigh the same, in every process.

        Args:
            out: the output of its first batch.
            batch_size: what every batch of it weighs by its samples, or 0 if that may differ.
        """
        if not batch_size:
            return False
        if self._are_batch_sizes is None:
            known = not is_left_out(out)  # else it says nothing of the weights of others
            # No host read: a weight that may be on the device is one in aux.
            differs = known and ("weight" in out.aux or bool(out.weight != batch_size))
            any_differs, any_known = collectives.all_reduce_max(
                [differs, known], "how batches weigh"
            )
            if not any_known:
                return False
            self._are_batch_sizes = not any_differs
        return self._are_batch_sizes

    def check(self, out: Output, batch_size: float) -> None:
        """Raise if a batch does not weigh what the processes have agreed on."""
        if is_left_out(out):
            return
        if "weight" in out.aux or out.weight != batch_size:
            given = "what aux says" if "weight" in out.aux else out.weight
            raise ValueError(
                f"so far each batch weighed {batch_size}, by its samples, and now one weighs "
                f"{given}: return aux['weight'], the number of items, for every batch"
            )

    def reference(self, weight: Tensor) -> Tensor:
        """Return the weight that others count relative to, the same in every process.

        It is a power of two, so that it changes no bit of the mean.
        """
        if self._reference is None:
            largest = exchanges.all_reduce_max_tensor(weight, "the weight of a batch").clamp(min=1)
            self._reference = torch.exp2(torch.floor(torch.log2(largest)))
        return self._reference


# --------------------------------------------------------------------------------------------------
# Evaluation and prediction when there are several processes.

_GIVEN_AGAIN = (
    "%s exchanges data with the other processes, and process %d has no batch left in %s. It was "
    "given a batch again, so that the others need not wait for it, and what it exchanged counts "
    "twice. To leave out the rounds in which a process has no batch, write fl.data.even(loader), "
    "for training and for evaluation (logged once)"
)
_said: set[str] = set()  # the names of loss functions of which the warning was logged


class CollectiveProbe:
    """Finds out in its first call whether a function performs collectives.

    A module under ``fully_shard`` does, ``SyncBatchNorm`` in training, a contrastive loss that
    gathers. Such a function has to be called for a padding batch too: the other processes would
    wait for this one.

    What it exchanges there counts twice, which a warning says once. What a sharded model gathers
    does not count.

    Args:
        state: a state of the model that the function is called with.
    """

    def __init__(self, state: TrainState) -> None:
        self._model, self._rank = state.model, state.backend.rank
        self.uses_collectives: bool | None = True if is_sharded(state.model) else None

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> Result:
        """Call the function."""
        __tracebackhide__ = True
        if self.uses_collectives is not None:
            return fn(subject, batch)
        before = collectives.collective_count()
        result = fn(subject, batch)
        self.uses_collectives = collectives.collective_count() != before
        return result

    def call_again(
        self,
        name: str,
        where: str,
        fn: Callable[[Subject, Batch], Result],
        subject: Subject,
        batch: Batch,
    ) -> Result:
        """Call the function for a process that has no batch, with one that was taken already.

        Args:
            name: the name of the loss function.
            where: which update it is, or which round of an evaluation.
            fn: the function.
            subject: its first argument.
            batch: its second one.
        """
        __tracebackhide__ = True
        # Processes of one row have no batch all together: what they exchange counts nothing twice.
        spans: list[int | None] = []
        note = lambda: spans.append(exchanges.counted_collectives(between_shares=True))
        note()
        with around_sharded(self._model, note, note):
            result = self.call(fn, subject, batch)
        note()
        if any(map(operator.ne, spans[::2], spans[1::2])) and name not in _said:
            _said.add(name)
            log.warning(_GIVEN_AGAIN, name, self._rank, where)
        return result

    def can_skip(self, is_padding: bool) -> bool:
        """Return whether the function need not be called for a batch."""
        return is_padding and self.uses_collectives is False


class DistributedEvaluation:
    """An evaluation or a prediction of which each process computes its share.

    The methods are those of :class:`fnloop._step.engine.EvaluationPass`.

    Args:
        state: a state of the model that is evaluated.
        name: the name of the function that evaluates a batch.
    """

    def __init__(self, state: TrainState, name: str) -> None:
        self._sum = LOCAL.start_evaluation(state, name)
        self._probe, self._name, self._round = CollectiveProbe(state), name, 0
        self._on_padding = False  # whether the last batch was padding
        self._had_batch = False  # whether any batch was this process's own
        self._latest: object = None

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        self._on_padding = type(batch) is Padding
        self._latest = None
        self._round += 1
        if self._probe.can_skip(self._on_padding):
            return []
        if type(batch) is Padding:
            where = f"round {self._round} of an evaluation"
            given = (self._name, where, fn, subject, batch.batch)
            self._latest = self._probe.call_again(*given)
            return []
        self._latest = result = self._probe.call(fn, subject, batch)
        self._had_batch = True
        return [result]

    def add(self, out: Output) -> None:
        self._sum.add(out)

    def own_metrics(self) -> dict[str, Metric]:
        if not self._had_batch:
            return {}
        found = self._sum.own_metrics()
        return without_last(found, {*found}) if self._on_padding else found

    def gather(self, results: list[Result]) -> list[Result]:
        return [
            collectives.to_device_of(self._latest, result)
            for share in collectives.gather_shares(results, "the results of a prediction")
            for result in share
        ]


def without_last(metrics: Mapping[str, Metric], names: Set[str]) -> dict[str, Metric]:
    """Return metrics without those of some names that keep the last value.

    A process that had padding in the last round has not seen the last batch; other processes have.
    """
    return {k: m for k, m in metrics.items() if not (k in names and isinstance(m, Last))}


def merge_metrics(
    metrics: Mapping[str, Metric], own: Iterable[str] | None = None
) -> dict[str, Metric]:
    """Combine metrics over all processes, in the order of their ranks, with one exchange.

    Args:
        metrics: name to metric, as this process has seen them.
        own: the names of those that are of this process's share of the data; by default all. The
            others are the same in every process already.

    Returns:
        Name to metric, on the host; the same in every process.
    """
    mine = Metrics({k: m for k, m in metrics.items() if not isinstance(m, Pending)}).on_host()
    parts = collectives.gather_objects(
        (set(mine if own is None else own), mine.sent()), "an exchange of metrics"
    )
    shared = set().union(*(names for names, _ in parts))  # some may have had no batch
    merged = dict(parts[0][1])
    for _, part in parts[1:]:
        for name, metric in part.items():
            if name not in merged:
                merged[name] = metric
            elif name in shared:
                merged[name] = merged[name].combine(metric)
    return merged


def weight_on_device(out: Output, weight: float | Tensor | None = None) -> Tensor:
    """Return a weight, by default that of the output, as a float64 tensor on the loss's device."""
    given = torch.as_tensor(out.weight if weight is None else weight, device=out.loss.device)
    return WeightedSum.valid(_wide(given))


def _wide(number: Tensor) -> Tensor:
    """Return a number in a dtype wide enough to sum in."""
    return number.detach().to(torch.float32 if number.device.type == "mps" else torch.float64)


def is_per_process(metric: Metric) -> bool:
    """Return whether a metric is of this process alone, and not of its share of the data."""
    # Also if a step is outside of backward.
    return isinstance(metric, Running) and metric.per_process
