"""Batches that no update has used yet: a loader may not fill their memory again."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

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
# batch: what changes while the step has the floor is not the loader's fault.
#
# To compute a checksum of every batch would take too long. New memory cannot be that of a held
# batch. So only the first batches of each kind are compared, as many as are held at once. If any
# two batches that are held begin at one address, all that follow are compared. Beyond that, torch
# counts the changes of a tensor.

Item = TypeVar("Item")
_REUSED = (
    "the loader reuses a tensor for its next batch, but several batches are needed at once, by "
    "accumulate, by prefetch, by several processes or by a loader of loaders: let it make a new "
    "one for each (yield x.clone(), or array.copy())"
)


Memory = Tensor | np.ndarray


class _Batch:
    """A batch that is held.

    Args:
        round: its round.
        memory: its tensors and arrays.
    """

    __slots__ = ("addresses", "marks", "memory", "round", "versions")

    def __init__(self, round: int, memory: list[Memory]) -> None:
        self.round, self.memory = round, memory
        self.addresses = _addresses_of(memory)
        self.note(contents=False)

    def note(self, contents: bool) -> None:
        """Note what it is now. Without ``contents``, only torch's count of its changes."""
        self.marks = [*map(_checksum, self.memory)] if contents else None
        self.versions = torch_compat.versions_of(self.memory)

    def has_changed(self) -> bool:
        """Return whether it is not what was noted."""
        if self.marks is None:
            return self.versions != torch_compat.versions_of(self.memory)
        now = torch_compat.versions_of(self.memory)
        known = zip(self.memory, self.marks, self.versions, now, strict=True)
        return any(
            version != later if mark is None else mark != _checksum(one)
            for one, mark, version, later in known
        )


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
        self._batches: deque[_Batch] = deque()
        self._addresses: set[int] = set()
        self._given: dict[object, int] = {}  # how many batches so far, by their shapes
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
        memory = [*memory_in(batch)] if self._active else []
        if not memory:
            return
        kind = tuple([one.shape for one in memory])
        self._given[kind] = given = self._given.get(kind, 0) + 1
        noted = _Batch(self._rounds if round is None else round, memory)
        self._batches.append(noted)
        self._most = max(self._most, len(self._batches))
        self._shares = self._shares or not self._addresses.isdisjoint(noted.addresses)
        self._addresses.update(noted.addresses)
        if self._shares or given <= self._most:
            noted.note(contents=True)

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

    def _taken(self, windows: Iterator[Batch], grouped: bool) -> Iterator[Batch]:
        __tracebackhide__ = True
        for window in windows:
            self._compare()
            yield window
            self._release(len(window) if grouped else 1)
            for batch in self._batches:  # what the step has changed is not the loader's fault
                batch.note(self._shares)

    def _compare(self) -> None:
        __tracebackhide__ = True
        for batch in self._batches:
            if batch.has_changed():
                raise ValueError(_REUSED)

    def _release(self, rounds: int) -> None:
        """Forget the batches of rounds that were used."""
        self._used += rounds
        while self._batches and self._batches[0].round < self._used:
            self._batches.popleft()
        self._addresses = {each for batch in self._batches for each in batch.addresses}


def _addresses_of(memory: list[Memory]) -> list[int]:
    try:
        return [one.data_ptr() for one in memory]  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # an array; what has no memory of its own
        return [*map(_address_of, memory)]


def _address_of(one: Memory) -> int:
    try:
        return one.data_ptr() if isinstance(one, Tensor) else one.ctypes.data
    except RuntimeError:
        return id(one)


def _checksum(one: Memory) -> int | None:
    """Return a checksum of memory of the host; None of other memory: torch counts its changes."""
    if isinstance(one, Tensor):
        if type(one) is not Tensor or one.layout is not torch.strided or not one.is_cpu:
            return None
        plain = one.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return zlib.crc32(plain.view(torch.uint8).numpy().data)
    return zlib.crc32(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data)
