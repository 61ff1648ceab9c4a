"""Forward and backward of one window with the same bits on any number of processes.

Each batch has a backward of its own. Its gradient is taken out, and the weighted mean over the
window is made in a tree: see :mod:`fnloop._step.tree`. What goes into the tree are means and their
numbers of items, so that no product leaves the range of a dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._core.skip import BY_ANOTHER
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Batch, Metric, Output
from fnloop._step.gradients import LossRoot, restore_gradients, stash_gradients
from fnloop._step.local import LocalWindow
from fnloop._step.parts import Flat, Part, combine, wide_dtype
from fnloop._step.rows import Layout, combine_others, layout_of, others_of, rows_of, sum_rows
from fnloop._step.tree import TreeSum
from fnloop._step.weighted_sum import valid_weight

__all__ = ["ExactBatch", "ExactSum", "ExactWindow", "Gradients", "Leaf", "Others"]

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
Others = list[dict[str, Metric] | None]
Gradients = list[Tensor | None]


class Engine(Protocol):
    """What a window needs of the engine, which outlives it."""

    rank: int
    processes: int

    def agree_on_layout(
        self, layout: Layout | None, differ: bool, used: list[bool], /
    ) -> tuple[Layout | None, list[bool]]: ...
    def gather_rows(self, rows: Tensor, /) -> Tensor: ...
    def gather_others(self, own: Others, state: TrainState, /) -> Others: ...
    def join(self, tree: TreeSum[Part], gradients: Flat, like: Tensor, /) -> Gradients: ...
    def begin_pass(self, state: TrainState, offset: int, /) -> None: ...
    def seed_batch(self, state: TrainState, offset: int, /) -> None: ...
    def seed_shared(self, state: TrainState, /) -> None: ...
    def call(
        self, loss: LossRoot, state: TrainState, batch: Batch, /
    ) -> tuple[TrainState, Output]: ...


class Leaf:
    """Forward and backward of one batch in this process, maybe in pieces. Nothing is exchanged.

    Args:
        engine: the engine.
        loss: the loss, and the root of backward.
        state: the state that is trained.
        offset: the position of the batch in its window, over all processes.
        is_padding: whether it stands for a batch that is not there.
        pieces: in how many pieces it comes.
    """

    def __init__(
        self,
        engine: Engine,
        loss: LossRoot,
        state: TrainState,
        offset: int,
        is_padding: bool,
        pieces: int,
    ) -> None:
        self._engine, self._loss, self._is_padding = engine, loss, is_padding
        self._pieces = LocalWindow(loss, state) if pieces > 1 and not is_padding else None
        self._out: Output | None = None
        if not is_padding:
            engine.seed_batch(state, offset)

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if self._is_padding:
            loss = torch.zeros((), device=state.backend.device)
            return state, Output(loss, 0, {}, {}, PADDING)
        return self._engine.call(self._loss, state, batch)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if self._pieces is None:
            self._out = self._loss.backward(state, out)
        else:
            self._pieces.add(state, out)

    def finish(self, state: TrainState) -> Output:
        if self._pieces is not None:
            return self._pieces.finish(state)
        assert self._out is not None
        return self._out

    def backward(self, state: TrainState, out: Output) -> Output:
        __tracebackhide__ = True
        self.add(state, out)
        return self.finish(state)


class ExactSum:
    """The mean of the gradients of a window, over all processes.

    Args:
        engine: the engine.
        state: the state that is trained.
        order: for each call of :meth:`add`, which of this process's batches it is.
    """

    def __init__(self, engine: Engine, state: TrainState, order: Sequence[int]) -> None:
        self._engine, self._order, self._params = engine, order, parameters(state)
        leaves = len(order) * engine.processes
        self._tree: TreeSum[Part] = TreeSum(combine, leaves, engine.processes)
        self._outs: list[Output | None] = [None] * len(order)
        self._n = 0  # batches so far
        self._skipped: Output | None = None
        self._used = [False] * len(self._params)
        self._stashed = stash_gradients(state)
        self._buffers = _versions(state)

    @property
    def offset(self) -> int:
        """The position of the next batch in the window, over all processes."""
        return self._order[self._n] * self._engine.processes + self._engine.rank

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
        wide = torch.float32 if out.loss.device.type == "mps" else torch.float64
        if isinstance(out.weight, Tensor):
            weight = valid_weight(out.weight.detach().to(out.loss.device, wide))
        else:
            weight = torch.full((), out.weight, dtype=wide, device=out.loss.device)
        return Part(gradients, weight)

    def finish(self, state: TrainState) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""
        _check_buffers(state, self._buffers)
        engine, device = self._engine, state.backend.device
        layouts = {layout_of(out.metrics) for out in self._outs if out is not None}
        own = next(iter(layouts), None)
        layout, used = engine.agree_on_layout(own, len(layouts) > 1, self._used)
        engine.seed_shared(state)
        if layout is None:  # no process has a batch that counts
            restore_gradients(state, self._stashed)
            assert self._skipped is not None
            reason = self._skipped.skip
            reason = BY_ANOTHER if reason == PADDING else reason
            return attrs.evolve(self._skipped, loss=self._skipped.loss.detach(), skip=reason)
        rows = engine.gather_rows(rows_of(self._outs, layout, device))
        total, weight, reported, metrics = sum_rows(rows, layout)
        if layout.others:
            metrics |= combine_others(engine.gather_others(others_of(self._outs, layout), state))
        flat = Flat(self._params, used, engine.processes)
        for p, gradient in zip(self._params, engine.join(self._tree, flat, weight), strict=True):
            p.grad = None if gradient is None else gradient.to(p.dtype)
        restore_gradients(state, self._stashed)
        aux = next((out.aux for out in reversed(self._outs) if out is not None), {})
        return Output(total / torch.where(weight == 0, 1, weight), reported, aux, metrics)


class ExactWindow:
    """Forward and backward of a window: see :class:`fnloop._step.engine.WindowPass`.

    Args:
        engine: the engine.
        loss: the loss, and the root of backward.
        state: the state that is trained.
        pieces: for each batch of the window, in how many pieces it comes.
        order: for each batch, which of this process's batches it is.
        padding: for each batch, whether it is padding.
    """

    def __init__(
        self,
        engine: Engine,
        loss: LossRoot,
        state: TrainState,
        pieces: Sequence[int],
        order: Sequence[int],
        padding: Sequence[bool],
    ) -> None:
        engine.begin_pass(state, 0)
        self._engine, self._loss, self._sum = engine, loss, ExactSum(engine, state, order)
        self._pieces, self._padding = list(zip(pieces, padding, strict=True))[::-1], padding
        self._leaf: Leaf | None = None
        self._left = 0  # pieces of the batch that are still to come

    def forward(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        if self._leaf is None:
            self._left, is_padding = self._pieces.pop()
            given = (self._loss, state, self._sum.offset, is_padding, self._left)
            self._leaf = Leaf(self._engine, *given)
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


class ExactBatch(ExactWindow):
    """Forward and backward of a single batch in each process."""

    def backward(self, state: TrainState, out: Output) -> Output:
        __tracebackhide__ = True
        self.add(state, out)
        return self.finish(state)


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
