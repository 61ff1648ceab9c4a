"""The order that a sampler of the user's has given: noted, and compared after a resume."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from fnloop.extend import Batch, Pass

Index = Batch  # what a sampler yields: the index of a sample, or a list of them
_KEPT = 10_000  # indices, to name the samples that are affected
_NAMED = 8  # samples in a message


class Sampled:
    """The indices that a sampler of the user's has given in an epoch, noted in its positions.

    Args:
        at: where it is read from. Its positions are open.
    """

    def __init__(self, at: Pass) -> None:
        self._at = at
        self.before: list[Index] = []  # those before the position, of samples
        self.batches: list[Index] = []  # those after it: of samples, or lists of them
        self._summed = self._order = 0
        at.positions.noted = self

    def skipped(self, indices: list[Index]) -> None:
        """Note the indices before the position, and compare them with those that were given then.

        It may be another order than before. Those which were used are kept.
        """
        given = self._at.positions.given(self._at.epoch, self._at.start)
        known = None if given is None else given.get("indices")
        now = [*_flat(indices)]
        self.before = now if known is None else known.tolist()
        self._order = _sum_of(self.before, 0)
        if given is not None and given.get("order", now_order := _sum_of(now, 0)) != now_order:
            affected = "" if known is None else _affected(self.before, now)
            self._at.positions.tell(given, "samples", affected)

    def from_batch(self, at: Pass) -> Iterator[Index] | None:
        """Return what the sampler has given from a position on, if it was noted."""
        if at.epoch != self._at.epoch or at.start < self._at.start:
            return None
        return itertools.islice(self.batches, at.start - self._at.start, None)

    def noting(self, batches: Iterator[Index]) -> Iterator[Index]:
        """Return the indices of batches, noting them."""
        __tracebackhide__ = True
        for index in batches:
            self.batches.append(index)
            yield index

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


def _affected(before: list[int], now: list[int]) -> str:
    """Return which samples are trained twice and not at all, in words."""
    then, here = Counter(before), Counter(now)
    parts = (then - here, "trained twice"), (here - then, "not trained")
    said = [f"{_numbers(sorted(found))} {what}" for found, what in parts if found]
    return f"In this epoch, {', and '.join(said)}." if said else ""


def _numbers(samples: list[int]) -> str:
    named = [str(sample) for sample in samples[:_NAMED]]
    named += [f"{len(samples) - _NAMED} more"] if len(samples) > _NAMED else []
    return f"sample {named[0]} is" if len(named) == 1 else f"samples {', '.join(named)} are"
