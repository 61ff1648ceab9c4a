"""The gradient engine of a run that has the same bits on any number of processes.

It is chosen by ``TrainState.create(..., exact=True)``, for one process and for several alike. The
gradients of a window are the mean over its batches, made in a tree that follows from how many there
are: see :mod:`fnloop._step.exact_window`. Losses, weights and metrics are summed in the same tree,
so every process has those of all. Random draws of the loss function are a function of the seed, the
epoch and the position of the batch in it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fnloop._backend.collectives import (
    all_gather_tensor,
    all_reduce_max,
    any_rank,
    gather_objects,
    sync_buffers,
)
from fnloop._backend.torch_compat import batch_norms
from fnloop._core.merge import check_alike, merge_metrics, moved
from fnloop._core.metrics import Max, Min
from fnloop._core.rng import COMPUTE, fold_in, seed_host, torch_seeder
from fnloop._core.state import TrainState, generation_of
from fnloop._core.types import Batch, Metric, Output, Step
from fnloop._data.source import Source
from fnloop._step.distributed import agree_on_skip
from fnloop._step.evaluation import CollectiveProbe, ExactEvaluation
from fnloop._step.exact_window import ExactBatch, ExactSum, ExactWindow, Gradients, Leaf, Others
from fnloop._step.gradient_sum import GradientSum
from fnloop._step.gradients import LossRoot
from fnloop._step.parts import Flat, Part, sum_over_processes
from fnloop._step.rows import Layout
from fnloop._step.tree import TreeSum, classes_of, depth_first

__all__ = ["ExactDistributedEngine", "ExactEngine", "check_not_exact"]

_BATCH, _SHARED = 1, 0  # streams of random numbers: of one batch, and of what all processes draw
_BATCH_NORM = (
    "exact=True: {} keeps running statistics, which each process would update with the batches "
    "that it has. Use a layer without them (GroupNorm, LayerNorm, or track_running_stats=False), "
    'or freeze it: freeze(state, "{}", statistics="kept")'
)
_LAYOUTS = (
    "exact=True: every batch has to report the same metrics, and one of this update reports others "
    "than the rest; this process has: {}"
)
_EXCHANGES = (
    "exact=True: the loss function exchanges something with the other processes, so its result "
    "depends on their number. Leave the exchange or exact=True out"
)
_SHARDED = (
    "exact=True needs one order of all batches, and with sharded(loader) each process has its own: "
    "pass the loader itself"
)


def check_not_exact(state: TrainState, what: str, instead: str) -> None:
    """Raise if a state was made with ``exact=True``, which something cannot keep.

    Args:
        state: the state.
        what: the name of what cannot.
        instead: why, and what to write instead.

    Raises:
        NotImplementedError: it was.
    """
    if state.backend.exact:
        raise NotImplementedError(
            f"{what} does not work with TrainState.create(..., exact=True): {instead}"
        )


class ExactEngine:
    """Makes the gradients of one model in one process, with the bits that several would get.

    The methods are those of :class:`fnloop._step.engine.GradientEngine`.

    Args:
        state: a state of the model.
    """

    calls_every_batch = True

    def __init__(self, state: TrainState) -> None:
        self.rank, self.processes = state.backend.rank, state.backend.world_size
        self._position = torch_seeder(state.backend.device)
        # What is known of the window: the generation of its state, and for each batch which of this
        # process's it is, and whether it is padding.
        self._window: tuple[int, Sequence[int], Sequence[bool]] = (-1, (), ())
        self._sum: _Sum | None = None  # the one in which a step takes its batches one by one
        self._calls, self._pass = 0, (-1, 0)  # of backward, for one batch or window in one update

    # --- a run

    def begin_run(self, state: TrainState) -> None:
        self._sum = None
        norms = {id(norm) for norm in batch_norms(state.model) if norm.training}
        for name, module in state.model.named_modules():
            if id(module) in norms:
                raise NotImplementedError(_BATCH_NORM.format(name or "the model", name or "*"))

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        if source.positions.shards > 1:
            raise NotImplementedError(_SHARDED)

        def step_on_share(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            batch, taken = source.take(batch, window)
            n = 1 if window == 1 else len(batch)
            padding = taken.padding or (False,) * n
            order = depth_first(n, self.rank, self.processes)
            if window > 1:
                batch, padding = tuple(batch[i] for i in order), tuple(padding[i] for i in order)
            self._window = generation_of(state), order, padding
            return step(state, batch)

        return step_on_share

    def _taken(self, state: TrainState, n: int) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the order and the padding of the n batches that a step was given."""
        generation, order, padding = self._window
        if generation == generation_of(state) and len(order) == n:
            return order, padding
        return range(n), (False,) * n  # a bare step: in the order given

    def start_turn(
        self, name: str, engine: object, turn: TrainState, state: TrainState, batches: slice
    ) -> None: ...

    # --- random draws

    def begin_pass(self, state: TrainState, offset: int) -> None:
        """Note that a window, or a batch of one, begins. It may not be the first in its update."""
        now = generation_of(state), offset
        self._calls, self._pass = self._calls + 1 if self._pass == now else 0, now

    def seed_batch(self, state: TrainState, offset: int) -> None:
        """Position all generators before the forward of a batch."""
        if state.run is None:
            return  # a bare step draws from where the generators are
        seed = fold_in(state.seed, COMPUTE, state.epoch, state.batch + offset, self._calls)
        self._position(fold_in(seed, _BATCH))
        seed_host(fold_in(seed, _BATCH))

    def seed_shared(self, state: TrainState) -> None:
        """Position all generators after a window: all processes draw the same."""
        if state.run is None:
            return
        seed = fold_in(state.seed, COMPUTE, state.epoch, state.batch, self._calls)
        self._position(fold_in(seed, _SHARED))
        seed_host(fold_in(seed, _SHARED))

    def mark_draws(self) -> Callable[[], None]:
        before = self._calls, self._pass

        def repeat() -> None:
            self._calls, self._pass = before

        return repeat

    # --- gradients

    def start_batch(
        self, loss: LossRoot, state: TrainState, guarded: bool = False
    ) -> Leaf | ExactBatch:
        if self._sum is not None:
            return self._start_leaf(self._sum, loss, state, 1)
        return ExactBatch(self, loss, state, (1,), *self._taken(state, 1))

    def start_window(
        self, loss: LossRoot, state: TrainState, pieces: Sequence[int], guarded: bool = False
    ) -> Leaf | ExactWindow:
        if self._sum is not None:
            return self._start_leaf(self._sum, loss, state, pieces[0])
        return ExactWindow(self, loss, state, pieces, *self._taken(state, len(pieces)))

    def _start_leaf(self, total: _Sum, loss: LossRoot, state: TrainState, pieces: int) -> Leaf:
        self.begin_pass(state, total.offset)
        return Leaf(self, loss, state, total.offset, total.is_padding, pieces)

    def start_sum(self, state: TrainState, batches: int) -> GradientSum:
        self._sum = _Sum(self, state, *self._taken(state, batches))
        return self._sum

    def end_sum(self) -> None:
        """End the sum that was started last."""
        self._sum = None

    def equalize(self, state: TrainState, pieces: list[list[Batch]]) -> list[list[Batch]]:
        return pieces

    def largest(self, number: int) -> int:
        return number

    def any(self, flag: bool) -> bool:
        return flag

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return flag, out

    def mean_loss(self, out: Output) -> Tensor:
        return out.loss

    # --- evaluation and reports

    def start_evaluation(self, state: TrainState, name: str) -> ExactEvaluation:
        self.share_buffers(state.model)
        return ExactEvaluation(state, name, fold_in(state.seed, COMPUTE))

    def share_buffers(self, model: nn.Module) -> None: ...

    def check_alike(self, state: TrainState, what: str) -> None: ...

    def merge_metrics(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        return dict(metrics)  # every process has those of all

    def own_names(self, names: Iterable[str]) -> list[str]:
        return []

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
        return dict(report)

    # --- what windows exchange

    def call(self, loss: LossRoot, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Call the loss function."""
        __tracebackhide__ = True
        return loss.forward(state, batch)

    def agree_on_layout(
        self, layout: Layout | None, differ: bool, used: list[bool]
    ) -> tuple[Layout | None, list[bool]]:
        """Return what all batches report, and which parameters have gradients in any process.

        Args:
            layout: what those of this process report; None if it has none.
            differ: whether they report different things.
            used: which parameters have gradients here.
        """
        if differ:
            raise ValueError(_LAYOUTS.format(layout))
        return layout, used

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes, by position, given those of this one."""
        return rows

    def gather_others(self, own: Others, state: TrainState) -> Others:
        """Return the metrics of all processes, by position, given those of this one."""
        return own

    def join(self, tree: TreeSum[Part], flat: Flat, like: Tensor) -> Gradients:
        """Return the mean gradients over all processes.

        Args:
            tree: the parts of this process.
            flat: how gradients become vectors.
            like: a scalar tensor of the kind of a weight.
        """
        (part,) = tree.parts.values()
        assert part is not None
        return part.gradients


class ExactDistributedEngine(ExactEngine):
    """Makes the gradients of one model in several processes, with the bits of a single one.

    Args:
        state: a state of the model.
    """

    calls_every_batch = False

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self._probe = CollectiveProbe(state)

    def largest(self, number: int) -> int:
        return int(all_reduce_max([number], "the number of pieces")[0])

    def any(self, flag: bool) -> bool:
        return flag if self._sum is not None else any_rank(flag, "a decision of a middleware")

    def agree(self, flag: Tensor, out: Output) -> tuple[Tensor, Output]:
        return (flag, out) if self._sum is not None else agree_on_skip(flag, out)

    def share_buffers(self, model: nn.Module) -> None:
        sync_buffers(model)

    def check_alike(self, state: TrainState, what: str) -> None:
        check_alike(state, what)

    def reduce_report(self, report: Mapping[str, Metric], prefix: str = "") -> dict[str, Metric]:
        # Those of the host differ between processes, such as times; of equal ones nothing changes.
        own = {
            name
            for name, metric in report.items()
            if isinstance(metric, Min | Max) or getattr(metric, "per_process", False)
        }
        return merge_metrics(report, own)

    def call(self, loss: LossRoot, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        reply = self._probe.call(loss.forward, state, batch)
        if self._probe.uses_collectives:
            raise NotImplementedError(_EXCHANGES)
        return reply

    def agree_on_layout(
        self, layout: Layout | None, differ: bool, used: list[bool]
    ) -> tuple[Layout | None, list[bool]]:
        # A small exchange on the host. The largest of -x is the smallest of x.
        mark, lacking = float(zlib.crc32(repr(layout).encode())), layout is None
        marks = [-1.0, -(2.0**32)] if lacking else [mark, -mark]
        users = float(zlib.crc32(bytes(used)))
        what = "what the batches of an update report"
        most, least, any_differ, any_lacks, *same = all_reduce_max(
            [*marks, differ, lacking, users, -users], what
        )
        if any_differ or (most >= 0 and most != -least):
            raise ValueError(_LAYOUTS.format(layout or "none"))
        if any_lacks and most >= 0:
            layout = next(found for found in gather_objects(layout) if found is not None)
        if same[0] != -same[1]:
            used = [value > 0 for value in all_reduce_max(used, "which parameters the loss uses")]
        return layout, used

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.stack(all_gather_tensor(rows), dim=1).flatten(0, 1)

    def gather_others(self, own: Others, state: TrainState) -> Others:
        host, device = torch.device("cpu"), state.backend.device
        sent = [part and moved(part, host) for part in own]
        rounds = zip(*gather_objects(sent, "an exchange of metrics"), strict=True)
        return [part and moved(part, device) for round_ in rounds for part in round_]

    def join(self, tree: TreeSum[Part], flat: Flat, like: Tensor) -> Gradients:
        ranks, leaves = range(self.processes), tree.leaves
        classes = [classes_of(rank, leaves, self.processes) for rank in ranks]
        own = [tree.parts.pop(members) for members in classes[self.rank]]
        return sum_over_processes(own, classes, leaves, flat, like)


class _Sum(ExactSum, GradientSum):
    """The sum of a window whose batches a step takes one by one."""

    def __init__(
        self,
        engine: ExactEngine,
        state: TrainState,
        order: Sequence[int],
        padding: Sequence[bool],
    ) -> None:
        super().__init__(engine, state, order)
        self._ending, self._padding = engine, padding

    @property
    def is_padding(self) -> bool:
        """Whether the next batch is padding."""
        return self._padding[self._n]

    def close(self) -> None:
        self._ending.end_sum()
