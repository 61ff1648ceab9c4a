"""The order that a sampler of the user's has given: noted, and compared after a resume."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fnloop._data.position import Positions

Index = Any  # what a sampler yields: the index of a sample, or a list of them
_KEPT = 10_000  # indices, to name the samples that are affected
_NAMED = 8  # samples in a message


class SampledPositions(Positions):
    """Where a loader is, and which samples its sampler has given, if it is one of the user's."""

    def forget(self, epoch: int | None, start: int) -> None:
        super().forget(epoch, start)
        self._indices: _Indices | None = None
        self._opened = epoch, start

    def skipped(self, indices: list[Index]) -> None:
        """Note the indices that a sampler gives before the position. Compare them with those then.

        A sampler of the user's is meant, so that those which follow are noted too.
        """
        given = self.given(*self._opened)
        known = None if given is None else given.get("indices")
        self._indices = _Indices(indices if known is None else known.tolist())
        if given is None or "order" not in given:
            return
        now = _Indices(indices)
        if given["order"] != now.up_to(0)["order"]:
            known = given.get("indices")
            self.tell(given, "samples", "" if known is None else _affected(known.tolist(), now))

    def indices_from(self, epoch: int | None, batch: int) -> Iterator[Index] | None:
        """Return what a sampler of the user's has given from a position on, if it was noted."""
        if self._indices is None or epoch != self._opened[0] or batch < self._opened[1]:
            return None
        return itertools.islice(self._indices.batches, batch - self._opened[1], None)

    def noted_indices(self, batches: Iterator[Index]) -> Iterator[Index]:
        """Return the indices of batches, noting them."""
        __tracebackhide__ = True
        assert self._indices is not None
        for index in batches:
            self._indices.batches.append(index)
            yield index

    def more(self, n: int) -> Mapping[str, object]:
        return {} if self._indices is None else self._indices.up_to(n)


class _Indices:
    """The indices that a sampler has given in an epoch.

    Args:
        before: those before the position where it is read: of samples, or lists of them.
    """

    def __init__(self, before: list[Index]) -> None:
        self.before = [*_flat(before)]
        self.batches: list[Index] = []  # those after it
        self._summed, self._order = 0, _sum_of(self.before, 0)

    def up_to(self, n: int) -> dict[str, object]:
        """Return what a position has of the indices up to a batch, from where they are read on."""
        if n < self._summed:
            self._summed, self._order = 0, _sum_of(self.before, 0)
        for index in self.batches[self._summed : n]:
            self._order = _sum_of(index, self._order)
        self._summed = n
        found: dict[str, object] = {"order": self._order}
        every = itertools.chain(self.before, _flat(self.batches[:n]))
        few = [*itertools.islice(every, _KEPT + 1)]
        with contextlib.suppress(TypeError, OverflowError):  # they are not numbers
            if len(few) <= _KEPT:
                found["indices"] = torch.tensor(array("q", few), dtype=torch.int64)
        return found


def _flat(indices: Iterable[Index]) -> Iterator[Index]:
    for index in indices:
        if isinstance(index, list | tuple):
            yield from _flat(index)
        else:
            yield index


def _sum_of(index: Index, crc: int) -> int:
    """Return a checksum of indices that does not depend on how they are cut into batches."""
    flat = index if isinstance(index, list) else [index]
    try:
        return zlib.crc32(array("q", flat), crc)
    except (TypeError, OverflowError):  # they are not numbers
        for each in _flat(flat):
            crc = zlib.crc32(repr(each).encode(errors="replace"), crc)
        return crc


def _affected(before: list[int], now: _Indices) -> str:
    """Return which samples are trained twice and not at all, in words."""
    then, here = Counter(before), Counter(now.before)
    parts = (then - here, "trained twice"), (here - then, "not trained")
    said = [f"{_numbers(sorted(found))} {what}" for found, what in parts if found]
    return f"In this epoch, {', and '.join(said)}." if said else ""


def _numbers(samples: list[int]) -> str:
    named = [str(sample) for sample in samples[:_NAMED]]
    named += [f"{len(samples) - _NAMED} more"] if len(samples) > _NAMED else []
    return f"sample {named[0]} is" if len(named) == 1 else f"samples {', '.join(named)} are"
