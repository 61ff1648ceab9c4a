"""The step in the middle of a pipeline: backward, from the loss to the gradients.

Backward takes a window of batches where ``accumulate`` asks for one. Each batch counts by its
weight, the number of items that its loss is the mean of. So the gradient is that of the mean over
all items of the window, with a ragged last window, unequal token counts and any number of
processes. Gradients add up in ``.grad`` as autograd does: backward starts from loss × weight / (a
reference weight), and one division at the end makes the mean.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from fnloop._core.state import TrainState
from fnloop._core.types import Batch, Output, Step
from fnloop._step.engine import engine_of
from fnloop._step.gradients import LossRoot

__all__ = ["Backward", "Commuting", "Insertable"]


@runtime_checkable
class Insertable(Protocol):
    """A gradient step around backward that lets another one in between."""

    def insert_inside(self, wrap: Callable[[Backward], Step], /) -> Step:
        """Return this step with another one inserted directly around backward."""
        ...


class Backward:
    """The step that fills ``.grad``, starting from the loss. It reports the unscaled loss.

    Args:
        loss: the loss, and what backward starts from.

    Attributes:
        size: the most samples in one forward and backward; None: those of a batch.
    """

    size: int | None = None

    def __init__(self, loss: LossRoot) -> None:
        self.loss = loss

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
        """Run forward and backward of one batch."""
        __tracebackhide__ = True
        single = engine_of(state).start_batch(self.loss, state)
        state, out = single.forward(state, batch)
        return state, single.backward(state, out)

    def accumulate(self, state: TrainState, window: Sequence[Batch]) -> tuple[TrainState, Output]:
        """Run forward and backward of a window. The gradient is that of the mean over its items."""
        __tracebackhide__ = True
        training = engine_of(state).start_window(self.loss, state, [1] * len(window))
        for batch in window:
            state, out = training.forward(state, batch)
            training.add(state, out)
        return state, training.finish(state)

    def scaled_by(self, scale: Callable[[TrainState], Tensor]) -> Backward:
        """Return the same step with gradients multiplied by ``scale(state)``."""
        scaled, loss = copy.copy(self), self.loss
        scaled.loss = LossRoot(loss.forward, scale, loss.may_skip, loss.create_graph, loss.name)
        return scaled

    def insert_inside(self, wrap: Callable[[Backward], Step]) -> Step:
        """Insert a gradient step directly around this one."""
        return wrap(self)


class Commuting:
    """The wrap of a gradient step that at most multiplies a window's gradients by one number.

    Such steps commute, so a later one may still be inserted directly around backward:
    ``step.insert_inside(wrap)``. That is how ``accumulate`` adds gradients up in place, and how
    fp16 gradients are unscaled once per window, whichever of the two is listed first.

    Args:
        wrap: the wrap.
    """

    def __init__(self, wrap: Callable[[Any], Step]) -> None:
        self._wrap = wrap

    def __call__(self, step: Step) -> Step:
        made: Any = self._wrap(step)
        if isinstance(step, Insertable):
            made.insert_inside = lambda inner: self(step.insert_inside(inner))
        return made
