"""A loader without some of its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fnloop._core.call import name_of
from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.parts import Item
from fnloop._data.round_robin import SingleProcess
from fnloop._display import checks

__all__ = ["leave_out"]


def leave_out(loader: Loader, predicate: Callable[[int, int], bool]) -> Composed:
    """Return a loader without the batches at some positions.

    A run that diverged at a batch can be continued from a checkpoint without that batch.

    Args:
        loader: any loader.
        predicate: ``(epoch, batch) -> bool``: whether a batch is left out. It has to be a pure
            function. Epochs and batches are counted from 0, and batches as in the loader without
            this, over all processes. In an evaluation the epoch is 0.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one, or ``predicate`` is not such a function.

    Example:
        >>> import torch
        >>> batches = [torch.full((2,), float(i)) for i in range(4)]
        >>> [batch[0].item() for batch in leave_out(batches, lambda epoch, batch: batch == 2)]
        [0.0, 1.0, 3.0]
    """
    return _LeaveOut(loader, predicate)


class _LeaveOut(Composed):
    def __init__(self, loader: Loader, predicate: Callable[[int, int], bool]) -> None:
        meaning = "a function (epoch, batch) -> bool"
        self.predicate = checks.function("leave_out", "predicate", predicate, meaning, 2)
        super().__init__("leave_out", {"leave_out": loader})
        self._kept: dict[tuple[int, int], int] = {}  # (epoch, length) to the batches that are left

    def _keeps(self, epoch: int, batch: int) -> bool:
        __tracebackhide__ = True
        found: object = self.predicate(epoch, batch)
        if not isinstance(found, bool | np.bool_):
            raise TypeError(
                f"leave_out expects predicate to return True or False; {name_of(self.predicate)}"
                f"({epoch}, {batch}) returned {checks.describe(found)}"
            )
        return not found

    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        length = self.parts["leave_out"].length_in(epoch)
        if length is None:
            return None
        if (epoch, length) not in self._kept:
            kept = 0
            for batch in range(length):  # not a comprehension, which is a frame in the traceback
                kept += self._keeps(epoch, batch)
            self._kept[epoch, length] = kept
        return self._kept[epoch, length]

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        number, part = epoch or 0, self.parts["leave_out"]
        first, length = 0, part.length_in(number)
        while start and (length is None or first < length):
            start -= self._keeps(number, first)
            first += 1
        for batch, item in enumerate(part.items(seed, epoch, first, sharing), first):
            if self._keeps(number, batch):
                yield item

    def __repr__(self) -> str:
        return f"leave_out({self.loaders['leave_out']!r}, {name_of(self.predicate)})"
