"""Forward and backward of a batch in pieces: cut it along the leading dimension of its tensors.

Each piece counts by its weight, as the batches of a window do. So the gradient is that of the mean
over all items of the window, however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fnloop._backend.containers import IN_BATCHES, parts_of, with_parts
from fnloop._backend.transfer import tensors_in
from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output
from fnloop._step.backward import Backward
from fnloop._step.engine import engine_of
from fnloop._step.gradients import LossRoot

__all__ = ["RETRY", "InPieces", "make_gradients", "pieces_of", "samples_in"]

RETRY = "retry_on_oom"  # the name of the middleware
_VALUES = (str, bytes, bool, int, float, type(None))


class InPieces(Backward):
    """Backward that takes each batch in pieces.

    Args:
        loss: the loss, and what backward starts from.
        size: the most samples in a piece.
    """

    def __init__(self, loss: LossRoot, size: int) -> None:
        super().__init__(loss)
        self.size = size

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return make_gradients(self.loss, state, (batch,), self.size, alone=True)

    def accumulate(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        return make_gradients(self.loss, state, window, self.size, alone=False)


def make_gradients(
    loss: LossRoot,
    state: TrainState,
    window: Sequence[Batch],
    size: int | None,
    *,
    alone: bool,
    guarded: bool = False,
) -> tuple[TrainState, Output]:
    """Run forward and backward of a window in pieces.

    Args:
        loss: the loss, and what backward starts from.
        state: the state that is trained.
        window: the batches.
        size: the most samples in a piece; None: whole batches.
        alone: whether the window is a single batch, which is not weighed if it is one piece.
        guarded: see :meth:`fnloop._step.engine.GradientEngine.start_window`.
    """
    __tracebackhide__ = True
    engine = engine_of(state)
    pieces = [[batch] if size is None else pieces_of(batch, size) for batch in window]
    if size is not None:
        pieces = engine.equalize(state, pieces)
    if alone and len(pieces[0]) == 1:
        single = engine.start_batch(loss, state, guarded)
        state, out = single.forward(state, pieces[0][0])
        return state, single.backward(state, out)
    training = engine.start_window(loss, state, [*map(len, pieces)], guarded)
    for part in pieces:
        for piece in part:
            state, out = training.forward(state, piece)
            training.add(state, out)
    return state, training.finish(state)


# --- cutting a batch


def samples_in(batch: Batch) -> int:
    """Return the number of samples in a batch: the leading dimension of its tensors.

    Raises:
        ValueError: there is not one.
    """
    sizes = {t.size(0) for t in tensors_in(batch) if t.ndim}
    if len(sizes) == 1:
        return sizes.pop()
    if sizes:
        raise ValueError(
            "a batch is cut into pieces along the first dimension of its tensors, but there they "
            f"have the lengths {sorted(sizes)}. To give a tensor x to each piece whole, put "
            "x.unbind() into the batch"
        )
    raise ValueError(
        "a batch is cut into pieces along the first dimension of its tensors, but there is no "
        f"tensor with a dimension in a {type(batch).__name__}. Put its tensors into a tuple, a "
        "list or a mapping"
    )


def pieces_of(batch: Batch, size: int) -> list[Batch]:
    """Return the pieces of a batch, which share its memory; the last one may be smaller.

    Raises:
        ValueError: its tensors do not have one length.

    Example:
        >>> import torch
        >>> pieces_of((torch.tensor([1, 2, 3]), ["a", "b", "c"], "train"), 2)
        [(tensor([1, 2]), ['a', 'b'], 'train'), (tensor([3]), ['c'], 'train')]
    """
    samples = samples_in(batch)
    if samples <= size:
        return [batch]
    return [_cut(batch, samples, start, size) for start in range(0, samples, size)]


def _cut(value: object, samples: int, start: int, size: int) -> object:
    if isinstance(value, Tensor):
        return value.narrow(0, start, min(size, samples - start)) if value.ndim else value
    if isinstance(value, np.ndarray) and value.shape[:1] == (samples,):
        return value[start : start + size]
    parts = parts_of(value, IN_BATCHES)
    if parts is None:
        return value
    if isinstance(value, IN_BATCHES) and len(value) == samples and _are_values(value):
        return value[start : start + size]
    return with_parts(value, [_cut(part, samples, start, size) for _, part in parts])


def _are_values(values: Sequence[object]) -> bool:
    """Return whether these are plain values of one kind, as collated for each sample."""
    return isinstance(values[0], _VALUES) and len({type(value) for value in values}) == 1
