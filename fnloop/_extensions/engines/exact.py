"""The gradient engine of a run that has the same bits on any number of processes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import attrs
import toolz
import torch
from torch import Tensor

from fnloop._core.metrics import (
    Max,
    Mean,
    Min,
)
from fnloop._core.parts import Part as CheckpointPart
from fnloop._core.parts import Restoring
from fnloop._core.state import TrainState
from fnloop._core.types import Output, Step
from fnloop._extensions.engines import exchanges
from fnloop._extensions.engines.distributed import (
    LOCAL,
    OTHERS,
    CollectiveProbe,
    DistributedEvaluation,
    Result,
    SeededEngine,
    Subject,
    Together,
    is_per_process,
    merge_metrics,
    weight_on_device,
)
from fnloop._extensions.engines.shares import take
from fnloop.extend import (
    Backward,
    Batch,
    Metric,
    Metrics,
    Ownership,
    Running,
    Source,
    WeightedSum,
    checks,
    collectives,
    fold_in,
    parameters,
    rng,
    torch_compat,
)

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# Forward and backward of one window with the same bits on any number of processes.
#
# Each batch has a backward of its own. Its gradient is taken out, and the weighted mean over the
# window is made in a tree: see `tree`. What goes into the tree are means and their numbers of
# items, so that no product leaves the range of a dtype.

PADDING = "there is no batch left for this process"
_BUFFER = (
    "exact=True: the loss function changes the buffer {!r} in training, as BatchNorm does with its "
    "running statistics. Each process would change its own, with the batches that it has. Use a "
    "layer without them (GroupNorm, LayerNorm, or track_running_stats=False), or freeze it: "
    'freeze(state, "<name>", statistics="kept")'
)
_SPARSE = (
    "exact=True cannot sum sparse gradients: make the embedding without sparse=True, or leave "
    "exact=True out"
)


def _warn_of_other(saved: Restoring) -> Callable[[TrainState], TrainState]:
    """Warn if a run continues with another setting of ``exact`` than it had."""
    was, backend = saved.facts.get("exact", False) is True, saved.state.backend
    if was and not backend.exact and backend.main:
        log.warning(
            "restore: this run had exact=True, and continues without: from here on, its bits "
            "depend on the number of processes. Write TrainState.create(..., exact=True)"
        )
    if backend.exact and not was and backend.main:
        log.warning(
            "restore: this run had no exact=True until here, so what it has come to depends on the "
            "number of processes that it had"
        )
    return lambda state: state


EXACT = CheckpointPart("exact", lambda saving: {"exact": True}, _warn_of_other, of="counters")
Others = list[dict[str, Metric] | None]
Gradients = list[Tensor | None]


class Leaf:
    """Forward and backward of one batch in this process, maybe in pieces. Nothing is exchanged.

    Args:
        total: the sum that it is the next batch of.
        backward: what starts from the loss.
        state: the state that is trained.
        pieces: its pieces.
    """

    def __init__(
        self, total: ExactSum, backward: Backward, state: TrainState, pieces: Sequence[Batch]
    ) -> None:
        self._engine, self._backward, self._is_padding = total.engine, backward, total.is_padding
        making, _ = LOCAL.start(backward, state, pieces, alone=True)
        self.add, self.finish = making.add, making.finish
        if not self._is_padding:
            self._engine.seed_batch(state, total.offset)

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if self._is_padding:
            loss = torch.zeros((), device=state.backend.device)
            return state, Output(loss, 0, {}, {}, PADDING)
        return self._engine.call(self._backward, state, batch)


class ExactSum:
    """The mean of the gradients of a window, over all processes.

    Args:
        engine: the engine.
        state: the state that is trained.
        order: for each call of :meth:`add`, which of this process's batches it is.
        padding: for each, whether it stands for a batch that is not there.
    """

    def __init__(
        self,
        engine: ExactEngine,
        state: TrainState,
        order: Sequence[int],
        padding: Sequence[bool],
    ) -> None:
        self.engine, self._order, self._padding = engine, order, padding
        self._params = parameters(state)
        leaves = len(order) * engine.processes
        self._tree: TreeSum[Part] = TreeSum(combine_parts, leaves, engine.processes)
        self._outs: list[Output | None] = [None] * len(order)
        self._n = 0  # batches so far
        self._skipped: Output | None = None
        self._used = [False] * len(self._params)
        self._buffers = _versions(state)

    @property
    def offset(self) -> int:
        """The position of the next batch in the window, over all processes."""
        return self._order[self._n] * self.engine.processes + self.engine.rank

    @property
    def is_padding(self) -> bool:
        """Whether the next batch is padding."""
        return self._padding[self._n]

    def add(self, state: TrainState, out: Output) -> None:
        """Take the gradients of a batch out of ``.grad``, unless it is skipped."""
        offset, place = self.offset, self._order[self._n]
        self._n += 1
        part = None
        if out.skip is not None:
            self._skipped = out
        else:
            self._outs[place] = out
            part = self._take(out)
        for p in self._params:
            p.grad = None
        self._tree.add(offset, part)

    def _take(self, out: Output) -> Part:
        grads = [p.grad for p in self._params]
        for i, gradient in enumerate(grads):
            if gradient is not None:
                self._used[i] = True
                if gradient.layout is not torch.strided:
                    raise NotImplementedError(_SPARSE)
        gradients = [g if g is None else g.to(wide_dtype(g)) for g in grads]
        return Part(gradients, weight_on_device(out))

    def finish(self, state: TrainState) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""
        _check_buffers(state, self._buffers)
        engine, device = self.engine, state.backend.device
        layouts = {layout_of(out.metrics) for out in self._outs if out is not None}
        own = next(iter(layouts), None)
        layout, used = engine.agree_on_layout(own, len(layouts) > 1, self._used)
        engine.seed_shared(state)
        if layout is None:  # no process has a batch that counts
            assert self._skipped is not None
            reason = self._skipped.skip
            reason = OTHERS if reason == PADDING else reason
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach(), skip=reason)
        rows = engine.gather_rows(rows_of(self._outs, layout, device))
        total, weight, reported, metrics = sum_rows(rows, layout)
        if layout.others:
            metrics |= combine_others(engine.gather_others(others_of(self._outs, layout), state))
        flat = Flat(self._params, used, engine.processes)
        for p, gradient in zip(self._params, engine.join(self._tree, flat, weight), strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        aux = next((out.aux for out in reversed(self._outs) if out is not None), {})
        return Output(total / torch.where(weight == 0, 1, weight), reported, aux, metrics)


class ExactWindow:
    """Forward and backward of a window, over all processes.

    Args:
        total: the sum of its batches.
        backward: what starts from the loss.
        pieces: the pieces of each of them.
    """

    def __init__(
        self, total: ExactSum, backward: Backward, pieces: Sequence[Sequence[Batch]]
    ) -> None:
        self._sum, self._backward, self._pieces = total, backward, iter(pieces)
        self._leaf: Leaf | None = None
        self._left = 0  # pieces of the batch that are still to come

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if self._leaf is None:
            pieces = next(self._pieces)
            self._left = len(pieces)
            self._leaf = Leaf(self._sum, self._backward, state, pieces)
        return self._leaf.forward(state, batch)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        assert self._leaf is not None
        self._leaf.add(state, out)
        self._left -= 1
        if self._left == 0:
            self._sum.add(state, self._leaf.finish(state))
            self._leaf = None

    def finish(self, state: TrainState) -> Output:
        return self._sum.finish(state)


def _versions(state: TrainState) -> list[tuple[Tensor, int]]:
    """Return the buffers of a model, with numbers that change when they do."""
    return [(buffer, torch_compat.version_of(buffer)) for buffer in state.model.buffers()]


def _check_buffers(state: TrainState, before: Sequence[tuple[Tensor, int]]) -> None:
    """Raise if the loss function has changed a buffer."""
    for buffer, version in before:
        if torch_compat.version_of(buffer) != version:
            named = state.model.named_buffers()
            name = next((name for name, found in named if found is buffer), "?")
            raise NotImplementedError(_BUFFER.format(name))


# --------------------------------------------------------------------------------------------------
# The gradient engine of a run that has the same bits on any number of processes.
#
# It is chosen by `TrainState.create(..., exact=True)`, for one process and for several alike. The
# gradients of a window are the mean over its batches, made in a tree that follows from how many
# there are: see `exact_window`. Losses, weights and metrics are summed in the same tree, so every
# process has those of all. Random draws of the loss function are a function of the seed, the epoch
# and the position of the batch in it.

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
_DTYPE = (
    "accumulate(dtype={}) does not work with TrainState.create(..., exact=True): its sums have the "
    "dtype of the gradients. Leave the argument out"
)
_SHARDED = (
    "exact=True needs one order of all batches, and with sharded(loader) each process has its own: "
    "pass the loader itself"
)


class ExactEngine(SeededEngine):
    """Makes the gradients of one model in one process, with the bits that several would get.

    Args:
        state: a state of the model.
    """

    brings = (EXACT,)

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self.rank, self.processes = state.backend.rank, state.backend.world_size
        # What is known of the window: the generation of its state, and for each batch which of this
        # process's it is, and whether it is padding.
        self._window: tuple[int, Sequence[int], Sequence[bool]] = (-1, (), ())
        self._sum: ExactSum | None = None  # the one in which a step takes its batches one by one

    # --- a run

    def begin(self, state: TrainState) -> None:
        self._sum = None
        norms = {id(norm) for norm in torch_compat.batch_norms(state.model) if norm.training}
        for name, module in state.model.named_modules():
            if id(module) in norms:
                raise NotImplementedError(_BATCH_NORM.format(name or "the model", name or "*"))

    def read_from(self, source: Source, step: Step, window: int) -> Step:
        if source.positions.shards > 1:
            raise NotImplementedError(_SHARDED)

        def step_on_share(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            batch, taken = take(source, batch, window)
            n = 1 if window == 1 else len(batch)
            padding = taken.padding or (False,) * n
            order = depth_first(n, self.rank, self.processes)
            if window > 1:
                batch, padding = tuple(batch[i] for i in order), tuple(padding[i] for i in order)
            self._window = Ownership.generation_of(state), order, padding
            return step(state, batch)

        return step_on_share

    def _taken(self, state: TrainState, n: int) -> tuple[Sequence[int], Sequence[bool]]:
        """Return the order and the padding of the n batches that a step was given."""
        generation, order, padding = self._window
        if generation == Ownership.generation_of(state) and len(order) == n:
            return order, padding
        return range(n), (False,) * n  # a bare step: in the order given

    # --- random draws

    def seed_batch(self, state: TrainState, offset: int) -> None:
        """Position all generators before the forward of a batch."""
        self._seed(state, offset, _BATCH)

    def seed_shared(self, state: TrainState) -> None:
        """Position all generators after a window: all processes draw the same."""
        self._seed(state, 0, _SHARED)

    def _seed(self, state: TrainState, offset: int, stream: int) -> None:
        if state.run is not None:  # a bare step draws from where the generators are
            seed = fold_in(self.seed_of(state, offset), stream)
            self.position(seed)
            rng.seed_host(seed)

    # --- gradients

    def start_pieces(
        self, backward: Backward, state: TrainState, pieces: list[list[Batch]], guarded: bool
    ) -> ExactWindow | Leaf:
        total = self._sum
        self.begin_pass((Ownership.generation_of(state), 0 if total is None else total.offset))
        if total is not None:
            return Leaf(total, backward, state, pieces[0])
        return ExactWindow(self._sum_of(state, len(pieces)), backward, pieces)

    def _sum_of(self, state: TrainState, batches: int) -> ExactSum:
        return ExactSum(self, state, *self._taken(state, batches))

    @contextlib.contextmanager
    def start_sum(
        self, state: TrainState, batches: int, dtype: torch.dtype | None
    ) -> Iterator[ExactSum]:
        if dtype is not None:
            raise NotImplementedError(_DTYPE.format(dtype))
        self._sum = self._sum_of(state, batches)
        try:
            yield self._sum
        finally:
            self._sum = None

    # --- evaluation and reports

    def start_evaluation(self, state: TrainState, name: str) -> ExactEvaluation:
        self.share_buffers(state.model)
        return ExactEvaluation(state, name, fold_in(state.seed, rng.COMPUTE))

    # --- what windows exchange

    def call(
        self, backward: Backward, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Output]:
        """Call the loss function."""
        __tracebackhide__ = True
        return backward.forward(state, batch)

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


class ExactDistributedEngine(Together, ExactEngine):
    """Makes the gradients of one model in several processes, with the bits of a single one.

    Args:
        state: a state of the model.
    """

    def __init__(self, state: TrainState) -> None:
        super().__init__(state)
        self._probe = CollectiveProbe(state)

    def largest(self, number: int) -> int:
        return number if self._sum is not None else super().largest(number)

    def agree(self, out: Output, flag: Tensor | None = None) -> tuple[Output, Tensor | None]:
        return (out, flag) if self._sum is not None else super().agree(out, flag)

    def reduce(
        self, metrics: Mapping[str, Metric], training: str | None = None
    ) -> dict[str, Metric]:
        if training is None:
            return dict(metrics)
        # Those of the host differ between processes, such as times; of equal ones nothing changes.
        own = {
            name
            for name, metric in metrics.items()
            if isinstance(metric, Min | Max) or is_per_process(metric)
        }
        return merge_metrics(metrics, own)

    def call(
        self, backward: Backward, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        reply = self._probe.call(backward.forward, state, batch)
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
        most, least, any_differ, any_lacks, *same = collectives.all_reduce_max(
            [*marks, differ, lacking, users, -users], what
        )
        if any_differ or (most >= 0 and most != -least):
            raise ValueError(_LAYOUTS.format(layout or "none"))
        if any_lacks and most >= 0:
            layout = next(
                found for found in collectives.gather_objects(layout) if found is not None
            )
        if same[0] != -same[1]:
            used = [
                value > 0
                for value in collectives.all_reduce_max(used, "which parameters the loss uses")
            ]
        return layout, used

    def gather_rows(self, rows: Tensor) -> Tensor:
        return torch.stack(exchanges.all_gather_tensor(rows), dim=1).flatten(0, 1)

    def gather_others(self, own: Others, state: TrainState) -> Others:
        host, device = torch.device("cpu"), state.backend.device
        sent = [part and Metrics(part).moved(host) for part in own]
        rounds = zip(*collectives.gather_objects(sent, "an exchange of metrics"), strict=True)
        return [part and part.moved(device) for round_ in rounds for part in round_]

    def join(self, tree: TreeSum[Part], flat: Flat, like: Tensor) -> Gradients:
        ranks, leaves = range(self.processes), tree.leaves
        classes = [classes_of(rank, leaves, self.processes) for rank in ranks]
        own = [tree.parts.pop(members) for members in classes[self.rank]]
        return sum_over_processes(own, classes, leaves, flat, like)


# --------------------------------------------------------------------------------------------------
# Evaluation and prediction with the same bits on any number of processes.

ROUNDS = 16  # batches of each process that are exchanged at once


def exact_engine(state: TrainState) -> ExactEngine:
    """Return a new engine for the model of a state, for as many processes as there are."""
    return ExactEngine(state) if state.backend.world_size == 1 else ExactDistributedEngine(state)


class ExactEvaluation(DistributedEvaluation):
    """An evaluation whose metrics are combined in the order of the batches, in every process.

    What some batches come to is exchanged at once, on the host. What a function draws from Python's
    and NumPy's generators is a function of the batch too.

    Args:
        state: a state of the model that is evaluated.
        name: the name of the function that evaluates a batch.
        seed: of the draws.
    """

    def __init__(self, state: TrainState, name: str, seed: int) -> None:
        super().__init__(state, name)
        self._backend, self._seed, self._n = state.backend, seed, 0
        self._rounds: list[list[Output]] = []  # of this process: for each round, none or one
        self._in_order = Metrics()

    def call(
        self, fn: Callable[[Subject, Batch], Result], subject: Subject, batch: Batch
    ) -> list[Result]:
        __tracebackhide__ = True
        if len(self._rounds) == ROUNDS:
            self._exchange()
        self._rounds.append([])
        position = self._n * self._backend.world_size + self._backend.rank
        rng.seed_host(fold_in(self._seed, position))
        self._n += 1
        return super().call(fn, subject, batch)

    def add(self, out: Output) -> None:
        if out.weight.__class__ is not int or out.weight:
            self._rounds[-1].append(out)

    def _exchange(self) -> None:
        """Combine the metrics of the rounds since the last time, of all processes."""
        __tracebackhide__ = True
        own = [[_on_host(out) for out in round_] for round_ in self._rounds]
        self._rounds = []
        for round_ in zip(
            *collectives.gather_objects(own, "the results of an evaluation"), strict=True
        ):
            for metrics in itertools.chain.from_iterable(round_):
                self._in_order.update_(metrics.moved(self._backend.device))

    def own_metrics(self) -> dict[str, Metric]:
        __tracebackhide__ = True
        self._exchange()
        return {"loss": self._in_order.pop("loss", Mean(0.0, 0)), **self._in_order}


def _on_host(out: Output) -> Metrics:
    """Return the loss and the metrics of a batch, which can be sent."""
    return Metrics.of(out).on_host().moved(torch.device("cpu"))


# --------------------------------------------------------------------------------------------------
# A sum whose bits do not depend on which process has which part of it.
#
# The batches of an update have positions, 0 to n - 1. Their gradients are combined in a binary tree
# over the positions: the root is made of the even and of the odd ones, each of them again of every
# second one of its own, and so on. So the tree follows from n alone. Batches are distributed
# round-robin. With 1, 2, 4, 8, ... processes, those of a process are a whole subtree: it exchanges
# one sum. With another number it exchanges each of its batches by itself.
#
# A class of the tree is a `range` of positions, and `members[::2]` and `members[1::2]` are the two
# that it is made of. Positions after the last batch change nothing, as their part is None.

Node = TypeVar("Node")
Combine = Callable[[Node | None, Node | None], Node | None]


class TreeSum(Generic[Node]):
    """The part of a sum in a tree that one process can make alone.

    Parts are combined as soon as both halves of a class are there. If they come in the order of
    :func:`depth_first`, and the number of processes is a power of two, no more are held than the
    tree is deep, and one.

    Args:
        combine: combines the parts of two classes, the even half first. It may change both.
        leaves: how many positions there are. Process r has those where position % processes is r.
        processes: how many there are.
    """

    def __init__(self, combine: Combine[Node], leaves: int, processes: int = 1) -> None:
        self._combine, self.leaves, self._processes = combine, leaves, processes
        self.parts: dict[range, Node | None] = {}

    def add(self, position: int, part: Node | None) -> None:
        """Add the part of a position of this process; None if it adds nothing."""
        leaf, *above = reversed([*_path(range(self.leaves), position)])
        self.parts[leaf] = part
        for members in above:
            even, odd = members[::2], members[1::2]
            both = even in self.parts and odd in self.parts
            if not (both and _has_one_owner(members, self._processes)):
                return
            self.parts[members] = self._combine(self.parts.pop(even), self.parts.pop(odd))


def _has_one_owner(members: range, processes: int) -> bool:
    return len(members) == 1 or not members.step % processes


def _path(members: range, position: int) -> Iterator[range]:
    """Yield the classes that a position is in, from the root to the leaf."""
    yield members
    while len(members) > 1:
        even, odd = members[::2], members[1::2]
        members = even if position in even else odd
        yield members


@functools.lru_cache(maxsize=64)
def classes_of(rank: int, leaves: int, processes: int) -> tuple[range, ...]:
    """Return the classes of which a process has all positions, the largest ones.

    Every process has as many, if all have as many positions.

    Example:
        >>> [[*members] for members in classes_of(0, 8, 2)]
        [[0, 2, 4, 6]]
        >>> [[*members] for members in classes_of(0, 6, 3)]
        [[0], [3]]
    """
    found = _classes(range(leaves), processes)
    return tuple(members for members in found if rank == members[0] % processes)


def _classes(members: range, processes: int) -> Iterator[range]:
    if _has_one_owner(members, processes):
        yield members
        return
    yield from _classes(members[::2], processes)
    yield from _classes(members[1::2], processes)


def join(members: range, parts: Mapping[range, Node | None], combine: Combine[Node]) -> Node | None:
    """Return the part of a class, given those of all processes."""
    if members in parts:
        return parts[members]
    even, odd = members[::2], members[1::2]
    return combine(join(even, parts, combine), join(odd, parts, combine))


@functools.lru_cache(maxsize=64)
def depth_first(own: int, rank: int = 0, processes: int = 1) -> tuple[int, ...]:
    """Return the order in which a process computes its batches so that it holds the fewest parts.

    Example:
        >>> depth_first(8)
        (0, 4, 2, 6, 1, 5, 3, 7)
    """
    leaves = _classes(range(own * processes), own * processes)
    return tuple(p // processes for (p,) in leaves if rank == p % processes)


# --------------------------------------------------------------------------------------------------
# The losses, weights and metrics of the batches of an update, as rows of numbers.
#
# A row has the numbers of one batch, in float64, so that all processes can exchange them with one
# collective on the device, without a host read. They are summed in the tree of `tree`. Metrics that
# are not of fnloop's own kinds are exchanged on the host.

_OWN_COLUMNS = 4  # whether there is a batch; loss × weight; the weight; the weight to report


@attrs.frozen
class Layout:
    """What the metrics of a batch are.

    Args:
        columns: the name, the kind, and the shape of each field, of metrics whose fields are
            numbers.
        others: the names of those of other kinds.
        width: how many columns a row has.
    """

    columns: tuple[tuple[str, type[Running], tuple[torch.Size, ...]], ...] = ()
    others: tuple[str, ...] = ()
    width: int = _OWN_COLUMNS

    def __str__(self) -> str:
        kinds = [f"{name} ({kind.__name__})" for name, kind, _ in self.columns]
        return ", ".join((*kinds, *self.others)) or "none"


def layout_of(metrics: Mapping[str, Metric]) -> Layout:
    """Return what the metrics of a batch are."""
    columns, others, width = [], [], _OWN_COLUMNS
    for name, metric in metrics.items():
        if isinstance(metric, Running) and metric.is_reduced:
            values = checks.fields_of(metric, metric.reductions).values()
            shapes = [v.shape if isinstance(v, Tensor) else torch.Size() for v in values]
            columns.append((name, type(metric), tuple(shapes)))
            width += sum(shape.numel() for shape in shapes)
        else:
            others.append(name)
    return Layout(tuple(columns), tuple(others), width)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _cell(value: object, device: torch.device) -> Tensor:
    """Return numbers as a vector on a device, without a host read."""
    if isinstance(value, Tensor):
        return value.detach().reshape(-1).to(device, _dtype(device))
    return torch.full((1,), float(value), dtype=_dtype(device), device=device)  # type: ignore[arg-type]


def _row(out: Output, layout: Layout) -> Tensor:
    device = out.loss.device
    weight, loss = _cell(out.weight, device), _cell(out.loss, device)
    valid = WeightedSum.valid(weight)
    reported = torch.where(weight == valid, valid, math.nan)
    cells = [_cell(1, device), loss * valid, valid, reported]
    for name, kind, _ in layout.columns:
        values = checks.fields_of(out.metrics[name], kind.reductions).values()
        cells += [_cell(value, device) for value in values]
    return torch.cat(cells)


def rows_of(own: Sequence[Output | None], layout: Layout, device: torch.device) -> Tensor:
    """Return the rows of this process, shape (positions, columns).

    Args:
        own: its outputs by position, None where it has no batch.
        layout: what their metrics are.
        device: where they are.
    """
    absent = torch.zeros(layout.width, dtype=_dtype(device), device=device)
    return torch.stack([absent if out is None else _row(out, layout) for out in own])


def sum_rows(rows: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, dict[str, Metric]]:
    """Return the loss × weight, the weight, the weight to report and the metrics of all rows."""
    present = rows[:, :1] != 0
    summed = torch.where(present, rows, -0.0)  # x + -0.0 is x, for every x
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows)
    summed = torch.cat([summed, summed.new_full((missing, layout.width), -0.0)])
    while len(summed) > 1:
        half = len(summed) // 2
        summed = summed[:half] + summed[half:]
    total = summed[0]
    metrics: dict[str, Metric] = {}
    first = _OWN_COLUMNS
    for name, kind, shapes in layout.columns:
        values = []
        for how, shape in zip(kind.reductions.values(), shapes, strict=True):
            columns = slice(first, first + shape.numel())
            if how == "sum":
                found = total[columns]
            elif how == "last":
                order = torch.arange(1, len(rows) + 1, device=rows.device)
                newest = (order * present[:, 0]).argmax(0, keepdim=True)
                found = rows[:, columns].index_select(0, newest)[0]
            else:
                sign = {"min": 1, "max": -1}[how]
                found = torch.where(present, rows[:, columns] * sign, math.inf).amin(0) * sign
            values.append(found.reshape(shape))
            first = columns.stop
        metrics[name] = kind.of_fields(values)
    return total[1], total[2], total[3], metrics


def others_of(own: Sequence[Output | None], layout: Layout) -> list[dict[str, Metric] | None]:
    """Return the metrics of other kinds by position, None where there is no batch."""
    return [out and {name: out.metrics[name] for name in layout.others} for out in own]


def combine_others(parts: Sequence[Mapping[str, Metric] | None]) -> dict[str, Metric]:
    """Combine metrics in the order of the positions."""
    found = Metrics()
    for part in parts:
        found = found.combined(part or {})
    return found


# --------------------------------------------------------------------------------------------------
# Mean gradients of some of the batches of a window, and how they move between processes.


def wide_dtype(gradient: Tensor) -> torch.dtype:
    """Return the dtype in which gradients are summed: at least float32."""
    return torch.promote_types(gradient.dtype, torch.float32)


@attrs.define
class Part:
    """The mean gradient of some batches.

    Args:
        gradients: for each parameter, or None.
        weight: their number of items, a scalar tensor.
    """

    gradients: list[Tensor | None]
    weight: Tensor


def _scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    for dtype, group in toolz.groupby(lambda g: g.dtype, gradients).items():
        torch_compat.foreach_mul_(group, factor if dtype.is_complex else factor.to(dtype))


def combine_parts(even: Part | None, odd: Part | None) -> Part | None:
    """Return the mean over the items of two parts, which are changed.

    Each product and each sum is rounded by itself, so the bits do not depend on how a kernel is
    vectorized.
    """
    if even is None or odd is None:
        return even or odd
    weight = even.weight + odd.weight
    items = torch.where(weight == 0, 1, weight)
    for part in (even, odd):
        _scale_([g for g in part.gradients if g is not None], part.weight / items)
    pairs = list(zip(even.gradients, odd.gradients, strict=True))
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if both:
        torch_compat.foreach_add_([a for a, _ in both], [b for _, b in both])
    return Part([b if a is None else a for a, b in pairs], weight)


Kind = tuple[torch.device, torch.dtype]


class Flat:
    """The gradients of all parameters as vectors, one for each device and dtype.

    Args:
        params: the parameters.
        used: for each of them, whether it has a gradient in any process.
        slices: how many slices of one size a vector has.
    """

    def __init__(self, params: Sequence[Tensor], used: Sequence[bool], slices: int) -> None:
        self._params, self._slices = params, slices
        where = [i for i, is_used in enumerate(used) if is_used]
        self._places: dict[Kind, list[int]] = toolz.groupby(self._kind_of, where)
        self.kinds = [*self._places]

    def _kind_of(self, place: int) -> Kind:
        p = self._params[place]
        return p.device, wide_dtype(p)

    def vector(self, part: Part | None, kind: Kind) -> Tensor:
        """Return the gradients of a kind, shape (slices, ...). What is not there becomes -0.0."""
        places = self._places[kind]
        sizes = [self._params[i].numel() for i in places]
        padding = -sum(sizes) % self._slices
        vector = torch.full((sum(sizes) + padding,), -0.0, dtype=kind[1], device=kind[0])
        if part is not None:
            for i, target in zip(places, vector.split([*sizes, padding]), strict=False):
                if (gradient := part.gradients[i]) is not None:
                    target.copy_(gradient.reshape(-1))
        return vector.view(self._slices, -1)

    def gradients(self, vectors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients for each parameter, given the vector of each kind."""
        found: list[Tensor | None] = [None] * len(self._params)
        for (_, dtype), places, vector in zip(
            self.kinds, self._places.values(), vectors, strict=True
        ):
            flat, begin = vector.view(-1), 0
            for i in places:
                p = self._params[i]
                part = flat[begin : begin + p.numel()].view(p.shape)
                # In the layout of the parameter, as autograd makes it: a norm depends on it.
                found[i] = torch.empty_like(p, dtype=dtype).copy_(part)
                begin += p.numel()
        return found


def sum_over_processes(
    own: Sequence[Part | None],
    classes: Sequence[Sequence[range]],
    leaves: int,
    flat: Flat,
    like: Tensor,
) -> list[Tensor | None]:
    """Return the mean gradients over the parts of all processes, in every one of them.

    Each process gets a slice of all parts, joins these in the tree, and sends the result to all. So
    it sends and receives as much as in an all-reduce, if there is one part in each process.

    Args:
        own: the parts of this process.
        classes: which classes the processes have the parts of, by rank.
        leaves: how many positions there are.
        flat: how gradients become vectors.
        like: a scalar tensor of the kind of a weight.
    """
    zero = torch.zeros_like(like)
    mine = torch.stack([zero if part is None else part.weight for part in own])
    weights = [weight for every in exchanges.all_gather_tensor(mine) for weight in every]
    slices: list[list[Tensor]] = [[] for _ in weights]
    for kind in flat.kinds:
        rows = torch.stack([flat.vector(part, kind) for part in own], dim=1)
        theirs = exchanges.all_to_all_tensor(_real(rows))
        theirs = torch.view_as_complex(theirs) if kind[1].is_complex else theirs
        for found, row in zip(slices, theirs.flatten(0, 1), strict=True):
            found.append(row)
    members = [one for every in classes for one in every]
    pairs = zip(slices, weights, strict=True)
    parts = [Part([*vectors], weight) for vectors, weight in pairs]
    joined = join(range(leaves), dict(zip(members, parts, strict=True)), combine_parts)
    assert joined is not None
    vectors: list[Tensor] = []
    for slice_ in joined.gradients:
        assert slice_ is not None
        whole = torch.stack(exchanges.all_gather_tensor(_real(slice_)))
        vectors.append(torch.view_as_complex(whole) if slice_.is_complex() else whole)
    return flat.gradients(vectors)


def _real(vector: Tensor) -> Tensor:
    return torch.view_as_real(vector) if vector.is_complex() else vector
