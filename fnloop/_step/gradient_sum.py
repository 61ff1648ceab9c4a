"""The sum over a window whose batches a step takes one by one, changing each gradient."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Protocol, Self

import attrs
from torch import Tensor

from fnloop._core.skip import BY_ANOTHER
from fnloop._core.state import TrainState, parameters
from fnloop._core.types import Output
from fnloop._step.gradients import restore_gradients, stash_gradients
from fnloop._step.weighted_sum import Weight, WeightedSum

__all__ = ["GradientSum", "SumInOrder"]


class GradientSum(abc.ABC):
    """The weighted sum of gradients, within a ``with`` block.

    For each batch let the step fill ``.grad``, then call ``add`` with its output; after the last
    one ``finish``.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """End the sum, also after an exception."""

    @abc.abstractmethod
    def add(self, state: TrainState, out: Output, /) -> None:
        """Take the gradient of a batch out of ``.grad``, unless it is skipped."""

    @abc.abstractmethod
    def finish(self, state: TrainState, /) -> Output:
        """Leave the mean in ``.grad``. Return what to report of the window."""


class Engine(Protocol):
    """What a sum needs of the engine."""

    def gradients(self, params: Sequence[Tensor], /) -> list[Tensor | None]: ...
    def any(self, flag: bool, /) -> bool: ...


class SumInOrder(GradientSum):
    """A sum that adds each gradient to those before it.

    Args:
        engine: the engine.
        state: the state that is trained.
        total: the sum of the weights.
    """

    def __init__(self, engine: Engine, state: TrainState, total: WeightedSum) -> None:
        self._engine, self._total, self._params = engine, total, parameters(state)
        self._sums: list[Tensor | None] = [None] * len(self._params)
        self._stashed = stash_gradients(state)

    def add(self, state: TrainState, out: Output) -> None:
        __tracebackhide__ = True
        if self._engine.any(out.skip is not None) and out.skip is None:
            out = attrs.evolve(out, skip=BY_ANOTHER)
        if out.skip is None:
            relative = self._total.relative_weight(out)
            pairs = zip(self._sums, self._engine.gradients(self._params), strict=True)
            self._sums = [_plus(so_far, gradient, relative) for so_far, gradient in pairs]
        for p in self._params:
            p.grad = None
        self._total.add(out)

    def finish(self, state: TrainState) -> Output:
        for p, gradient in zip(self._params, self._sums, strict=True):
            p.grad = gradient
        self._total.divide(self._sums)
        restore_gradients(state, self._stashed)
        return self._total.output()


def _plus(so_far: Tensor | None, gradient: Tensor | None, relative: Weight | None) -> Tensor | None:
    if gradient is None:
        return so_far
    part = gradient if relative is None else gradient * relative
    return part if so_far is None else so_far + part
