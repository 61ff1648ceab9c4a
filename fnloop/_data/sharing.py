"""How a process gets its share of the batches: here, the only one gets all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fnloop._core.types import Batch
from fnloop._data.held import Held

Index = Batch  # what a sampler yields: the index of a sample, or a list of them
Place = tuple[int | None, int, int]  # the epoch, and the batches and samples of it before a place
Item = TypeVar("Item")


class Sharing:
    """Gives everything to the only process. An extension overrides it for several.

    Attributes:
        processes: how many processes the batches are distributed to.
        complete: the batches of a complete round; a loader that drops incomplete batches drops an
            incomplete round with them.
        order: a checksum of the order of an epoch's samples, where their indices are known.
        reads_ahead: whether batches are read before the one that this process takes next.
        held: what was read, and is not used yet.
    """

    processes = complete = 1
    order = 0

    def __init__(self, reads_ahead: bool) -> None:
        self.reads_ahead, self.held = reads_ahead, Held()

    def split(
        self, items: Iterable[Item], size_of: Callable[[Item], int], counts: bool = False
    ) -> Iterator[Item]:
        """Return this process's items.

        Args:
            items: what is distributed.
            size_of: how many samples an item has, or 0 if that is not known.
            counts: whether items are batches that were given; else they are still to be made.
        """
        return self.held.counted(iter(items)) if counts else iter(items)

    def kept(self, batches: int) -> int:
        """Return how many of the batches that follow are distributed; others are left out."""
        return batches

    def noting_first(self, batches: Iterator[Batch], at: Place) -> Iterator[Batch]:
        """Return this process's batches. Note the pass's first one, which every process has read.

        Args:
            batches: what :meth:`split` gives.
            at: where the pass begins.
        """
        return batches

    def sampling_first(
        self,
        items: Iterator[Item],
        at: Place,
        see: Callable[[Item, Callable[[object], object]], Item],
        make: Callable[[Iterator[Item]], Iterator[Batch]],
    ) -> Iterator[Batch]:
        """Return this process's batches. Note a sample of the pass's first one, which another has.

        Args:
            items: what :meth:`split` gives: what this process's batches are made from.
            at: where the pass begins.
            see: ``(item, look) -> item``: the item in the place of whose batch comes what ``look``
                returns of a sample of another item's: a list of two, of reading it twice, or None.
            make: makes batches of items, in their order.
        """
        return make(items)

    def note_order(self, indices: Iterator[Index], batched: bool) -> Iterator[Index]:
        """Return the indices of samples, noting their order as they pass.

        Args:
            indices: what a sampler yields.
            batched: whether that is the indices of a batch each time.
        """
        return indices

    def marked(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Return this process's batches, those marked that are padding.

        Padding is a batch again, for a process that has none left. It does not count.
        """
        return batches

    def unpadded(self, batch: Batch) -> tuple[Batch, bool]:
        """Return a batch without the mark of padding, and whether it had one."""
        return batch, False

    def check_order(self, whole: bool = True) -> None:
        """Raise if the processes have read different data, or in different orders. A collective.

        Args:
            whole: whether all of a pass was read.
        """
