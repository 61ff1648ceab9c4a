"""Batches that no update has used yet: a loader may not fill their memory again."""

from __future__ import annotations

import copy
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fnloop._backend import torch_compat
from fnloop._backend.containers import memory_in
from fnloop._core.types import Batch

# --------------------------------------------------------------------------------------------------
# A batch is what the loader gave when it gave it.
#
# Where an update takes several batches, or batches are fetched ahead, or every process reads those
# of all, some are held while the loader is asked for the next one. A loader that fills one buffer
# again and again would change them. That is told by their contents: what a held batch was when it
# was given, or when the loader was asked again, and what it is before the step gets the next one.
#
# A loader may give one array again, or slices that overlap, and a loss function may write into its
# batch: what changes while the step has the floor is no fault of the loader's.
#
# To compute a checksum of every batch would take too long. New memory cannot be that of a held
# batch. So only the first batches of each kind are compared, as many as are held at once. If any
# two batches that are held begin at one address, all that follow are compared. Beyond that, torch
# counts the changes of a tensor.

Item = TypeVar("Item")
_REUSED = (
    "the loader reuses the memory of a batch for the next one, but several batches are needed at "
    "once, by accumulate, by prefetch, by several processes, or by a loader of loaders: let it "
    "make a new one for each (yield x.clone(), or x.copy() of a NumPy array)"
)


class _Leaf:
    """A tensor or an array of a batch that is held.

    Args:
        value: the tensor or the array.
    """

    __slots__ = ("address", "mark", "value", "version")

    def __init__(self, value: Tensor | np.ndarray) -> None:
        self.value, self.address = value, _address_of(value)
        self.mark: int | None = None
        self.version = _version_of(value)

    def note(self, contents: bool) -> None:
        """Note what it is now. Without ``contents``, only torch's count of its changes."""
        self.mark = _checksum(self.value) if contents else None
        self.version = _version_of(self.value)

    def has_changed(self) -> bool:
        """Return whether it is not what was noted."""
        if self.mark is None:
            return self.version != _version_of(self.value)
        return self.mark != _checksum(self.value)


class Held:
    """The batches that a loader has given, and that no step has used yet.

    They are counted in rounds. The batches of a round are used at once, one by each process.
    """

    def __init__(self) -> None:
        self.begin_pass(active=False)

    def begin_pass(self, active: bool) -> None:
        """Forget all batches: the loader is read from another position.

        Args:
            active: whether any batch is held while the next one is read.
        """
        self._active = active
        self._rounds = self._used = 0
        self._batches: deque[tuple[int, list[_Leaf]]] = deque()  # each with its round
        self._addresses: Counter[int] = Counter()
        self._given: Counter[object] = Counter()  # batches so far, by their shapes
        self._most, self._shares = 0, False

    # --- what the loader gives

    def watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of a loader, noting each."""
        return self._watched(batches) if self._active else batches

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        __tracebackhide__ = True
        for batch in batches:
            self.note(batch)
            yield batch

    def counted(self, rounds: Iterator[Item]) -> Iterator[Item]:
        """Return what is given in each round, counting them."""
        return self._counted(rounds) if self._active else rounds

    def _counted(self, rounds: Iterator[Item]) -> Iterator[Item]:
        __tracebackhide__ = True
        for given in rounds:
            self._rounds += 1
            yield given

    def note(self, batch: Batch, round: int | None = None) -> None:
        """Note a batch that the loader has just given, in a round; by default in the next one."""
        leaves = [*map(_Leaf, memory_in(batch))] if self._active else []
        if not leaves:
            return
        kind = tuple(leaf.value.shape for leaf in leaves)
        self._given[kind] += 1
        self._most = max(self._most, len(self._batches) + 1)
        self._shares = self._shares or any(leaf.address in self._addresses for leaf in leaves)
        contents = self._shares or self._given[kind] <= self._most
        for leaf in leaves:
            leaf.mark = _checksum(leaf.value) if contents else None
            self._addresses[leaf.address] += 1
        self._batches.append((self._rounds if round is None else round, leaves))

    # --- what the step takes

    def taken(self, windows: Iterable[Item], grouped: bool) -> Iterator[Item]:
        """Return what the step takes, having compared what is held each time.

        Args:
            windows: batches, one of each round; or tuples of them.
            grouped: whether they are tuples.

        Raises:
            ValueError: the loader has changed a batch that it gave before.
        """
        return self._taken(iter(windows), grouped) if self._active else iter(windows)

    def _taken(self, windows: Iterator[Any], grouped: bool) -> Iterator[Any]:
        __tracebackhide__ = True
        for window in windows:
            self._compare()
            yield window
            self._release(len(window) if grouped else 1)
            for _, leaves in self._batches:
                for leaf in leaves:  # what the step has changed is no fault of the loader's
                    leaf.note(self._shares)

    def _compare(self) -> None:
        __tracebackhide__ = True
        if any(leaf.has_changed() for _, leaves in self._batches for leaf in leaves):
            raise ValueError(_REUSED)

    def _release(self, rounds: int) -> None:
        """Forget the batches of rounds that were used."""
        self._used += rounds
        while self._batches and self._batches[0][0] < self._used:
            _, leaves = self._batches.popleft()
            self._addresses.subtract(leaf.address for leaf in leaves)
        self._addresses = +self._addresses  # without those that are not held any more


def own_copy(batch: Batch) -> Batch:
    """Return a copy of a batch, which stays as it is; the same batch if it cannot be copied."""
    try:
        return copy.deepcopy(batch)
    except Exception:
        return batch


def _address_of(value: Tensor | np.ndarray) -> int:
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0]
    try:
        return value.data_ptr()
    except RuntimeError:  # it has no memory of its own: a sparse tensor, a subclass
        return id(value)


def _version_of(value: Tensor | np.ndarray) -> int | None:
    if isinstance(value, np.ndarray) or value.is_inference():
        return None
    return torch_compat.version_of(value)


def _checksum(value: Tensor | np.ndarray) -> int | None:
    """Return a checksum of memory of the host; None of other memory: torch counts its changes."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided or not value.is_cpu:
            return None
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(plain.view(torch.uint8).numpy().data)
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
