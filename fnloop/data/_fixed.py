"""The same samples in every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from toolz import partition_all
from torch.utils.data import BatchSampler

from fnloop._core.rng import ORDER, fold_in, new_seed
from fnloop._core.types import Batch
from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.map_style import batch_indices, set_epoch
from fnloop._data.parts import Item, MapStyle
from fnloop._data.round_robin import Index, SingleProcess
from fnloop._display import checks

__all__ = ["fixed"]


def fixed(loader: Loader, n: int) -> Composed:
    """Return a loader of the same samples in every epoch: those of the first n batches of epoch 0.

    A map-style ``DataLoader`` that shuffles has them shuffled in each epoch, and its dataset
    augments them again. If its batches are put together by a batch sampler of yours, they stay as
    they are, and only their order is shuffled. Any other loader gives the batches of epoch 0 in the
    same order. To overfit a model on purpose, train and evaluate with one such loader.

    Args:
        loader: any loader.
        n: the batches, of all processes together. If the loader has fewer, all are taken.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one.
        ValueError: ``n`` is not an int of at least 1.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(torch.arange(100.0), batch_size=2, shuffle=True)
        >>> samples = lambda model, batch: sorted(batch.tolist())
        >>> few = fixed(loader, 1)
        >>> list(fl.predict(samples, toy(), few)) == list(fl.predict(samples, toy(), few))
        True
    """
    return _Fixed(loader, n)


class _Fixed(Composed):
    def __init__(self, loader: Loader, n: int) -> None:
        checks.integer("fixed", "n", n, "the batches of an epoch")
        super().__init__("fixed", {"fixed": loader})
        self.n = n
        self._own: tuple[int, Iterator[int]] | None = None

    def length_in(self, epoch: int) -> int:
        __tracebackhide__ = True
        length = self.parts["fixed"].length_in(0)
        return self.n if length is None else min(self.n, length)

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        part = self.parts["fixed"]
        if isinstance(part, MapStyle):
            indices = self._indices(part, seed, epoch)
            set_epoch(epoch, part.loader.dataset)
            yield from part.items(seed, epoch, start, sharing, indices)
        else:
            items = part.items(seed, None if epoch is None else 0, start, sharing)
            yield from itertools.islice(items, max(self.n - start, 0))

    def _indices(self, part: MapStyle, seed: int, epoch: int | None) -> list[Index]:
        """Return the indices of each batch of an epoch."""
        first = self._ordered(part, seed, 0)
        if not epoch or first == self._ordered(part, seed, epoch):
            return first  # a loader that shuffles would give others
        generator = torch.Generator().manual_seed(fold_in(seed, ORDER, epoch))
        batched = part.loader.batch_sampler
        if type(batched) is not BatchSampler:
            return _shuffled(first, generator)
        samples = _shuffled(list(itertools.chain.from_iterable(first)), generator)
        return [list(batch) for batch in partition_all(batched.batch_size, samples)]

    def _ordered(self, part: MapStyle, seed: int, epoch: int) -> list[Index]:
        """Return the indices of the first batches that the loader has in an epoch."""
        loader = part.loader
        samplers = [loader.sampler, loader.batch_sampler]
        set_epoch(epoch, *samplers, getattr(loader.batch_sampler, "sampler", None))
        indices = batch_indices(loader, fold_in(seed, ORDER, epoch), None, 0, 1)
        return list(itertools.islice(indices, self.n))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of a pass of its own. All passes have the samples of the first."""
        if self._own is None:
            self._own = new_seed(), itertools.count()
        seed, epochs = self._own
        return self._one_pass(seed, next(epochs))

    def __repr__(self) -> str:
        return f"fixed({self.loaders['fixed']!r}, {self.n})"


def _shuffled(values: list[Index], generator: torch.Generator) -> list[Index]:
    return [values[i] for i in torch.randperm(len(values), generator=generator).tolist()]
