"""A sampler of batches whose samples have similar lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from fnloop.extend import checks, rng

_MIXED = 10  # batches of similar length whose samples are mixed


def bucketed(
    lengths: Sequence[float],
    *,
    batch_size: int | None = None,
    max_items: float | None = None,
    shuffle: bool = True,
) -> Sampler[list[int]]:
    """Return a batch sampler that puts samples of similar length together, to pad less.

    The samples are sorted by length, and cut into batches from the longest on. To shuffle, samples
    are mixed with those of the neighbouring batches, as far as the limits allow, and the batches
    are shuffled. Under fnloop the order is a function of (seed, epoch). Elsewhere torch's generator
    decides it.

    Args:
        lengths: the length of each sample of the dataset, in its order.
        batch_size: the most samples in a batch.
        max_items: the most items in a batch, padding included: samples times the longest of them. A
            sample that is longer is a batch of its own.
        shuffle: whether the order is drawn. If not, the longest samples come first.

    Returns:
        A batch sampler with a length, for ``DataLoader(dataset, batch_sampler=...)``.

    Raises:
        TypeError: an argument has another type.
        ValueError: there is no limit, a limit is too small, or the lengths are not a sequence of
            numbers that are at least 0.

    Example:
        >>> list(bucketed([1, 9, 2, 8, 1], max_items=16, shuffle=False))
        [[1], [3, 2], [0, 4]]

    Replaces: fastnlp.BucketedBatchSampler, transformers.group_by_length
    """
    return Bucketed(lengths, batch_size, max_items, shuffle)


class Bucketed(Sampler[list[int]]):
    """What :func:`bucketed` returns. It draws from its own ``generator`` only, as torch's do."""

    def __init__(
        self,
        lengths: Sequence[float],
        batch_size: int | None,
        max_items: float | None,
        shuffle: bool,
    ) -> None:
        self.lengths = _check_lengths(lengths)
        if batch_size is None and max_items is None:
            raise ValueError(
                "bucketed expects a limit: batch_size=32, the samples in a batch, or "
                "max_items=4096, its items with padding"
            )
        if batch_size is not None:
            batch_size = checks.integer(
                "bucketed", "batch_size", batch_size, "the most samples in a batch"
            )
        if max_items is not None:
            meaning = "the most items in a batch, with padding"
            max_items = checks.number("bucketed", "max_items", max_items, meaning, above=0)
        self.batch_size, self.max_items = batch_size, max_items
        self.shuffle = checks.flag("bucketed", "shuffle", shuffle, "whether the order is drawn")
        self.generator: torch.Generator | None = None
        longest_first = np.sort(self.lengths)[::-1]
        self._ends = _cut(longest_first, batch_size, max_items)
        self._groups = _group(longest_first, self._ends, max_items)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        starts = [0, *self._ends[:-1]]
        if not self.shuffle:
            order = np.argsort(-self.lengths, kind="stable").tolist()
            yield from (order[a:b] for a, b in zip(starts, self._ends, strict=True))
            return
        generator = self.generator or torch.Generator().manual_seed(rng.new_seed())
        draws = torch.rand(2, len(self.lengths), dtype=torch.float64, generator=generator).numpy()
        sorted_ = np.lexsort((draws[0], -self.lengths))
        order = sorted_[np.lexsort((draws[1], self._groups))].tolist()
        for i in torch.randperm(len(self._ends), generator=generator).tolist():
            yield order[starts[i] : self._ends[i]]

    def __repr__(self) -> str:
        limits = {"batch_size": self.batch_size, "max_items": self.max_items}
        given = [f"{name}={limit}" for name, limit in limits.items() if limit is not None]
        given += [] if self.shuffle else ["shuffle=False"]
        return f"bucketed(<{len(self.lengths)} lengths>, {', '.join(given)})"


def _check_lengths(lengths: Sequence[float]) -> np.ndarray:
    expected = "bucketed expects lengths as a sequence of numbers >= 0, one for each sample"
    if not isinstance(lengths, Sequence | np.ndarray | torch.Tensor) or isinstance(
        lengths, str | bytes
    ):
        raise TypeError(f"{expected}; got {checks.describe(lengths)}")
    try:
        found = np.asarray(lengths)
    except ValueError:  # of different depths
        found = np.empty((0, 0))
    if found.ndim != 1 or found.dtype.kind not in "iuf" or not found.size:
        raise ValueError(f"{expected}; got {checks.describe(lengths)}")
    found = found.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise ValueError(f"{expected}; got {found[wrong[0]]:g} for sample {wrong[0]}")
    return found


def _cut(longest_first: np.ndarray, batch_size: int | None, max_items: float | None) -> list[int]:
    """Return where each batch ends."""
    ends, end = [], 0
    while end < len(longest_first):
        size = batch_size or len(longest_first)
        if max_items is not None and longest_first[end] * size > max_items:
            size = max(int(max_items // longest_first[end]), 1)
        end = min(end + size, len(longest_first))
        ends.append(end)
    return ends


def _group(longest_first: np.ndarray, ends: list[int], max_items: float | None) -> np.ndarray:
    """Return a number for each position: samples may be exchanged where it is the same."""
    groups = np.empty(len(longest_first), dtype=np.int64)
    first = batches = start = 0  # where the group begins, its batches, and where the batch begins
    for end in ends:
        fits = max_items is None or (end - start) * longest_first[first] <= max_items
        if batches == _MIXED or not fits:
            first, batches = start, 0
        groups[start:end] = first
        start, batches = end, batches + 1
    return groups
