"""The first batches of a loader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.parts import Item
from fnloop._data.round_robin import SingleProcess
from fnloop._display import checks

__all__ = ["fraction", "take"]


def take(loader: Loader, n: int) -> Composed:
    """Return a loader of the first n batches of each epoch.

    A loader that shuffles gives other samples in each epoch; ``fixed`` keeps them.

    Args:
        loader: any loader. One without an end gets one.
        n: the batches, of all processes together. If the loader has fewer, all are taken. If its
            length is not known, n is taken for it.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one.
        ValueError: ``n`` is not an int of at least 1.

    Example:
        >>> import fnloop as fl, itertools, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> endless = lambda: itertools.repeat(torch.ones(2))
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), take(endless, 3), epochs=2, hooks=())
        >>> state.step, len(take(endless, 3)), len(take([torch.ones(2)], 3))
        (6, 3, 1)
    """
    return _Take(loader, n)


class _Take(Composed):
    def __init__(self, loader: Loader, n: int) -> None:
        checks.integer("take", "n", n, "the batches of an epoch")
        super().__init__("take", {"take": loader})
        self.n = n

    def length_in(self, epoch: int) -> int:
        __tracebackhide__ = True
        length = self.parts["take"].length_in(epoch)
        return self.n if length is None else min(self.n, length)

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        items = self.parts["take"].items(seed, epoch, start, sharing)
        return itertools.islice(items, max(self.n - start, 0))

    def __repr__(self) -> str:
        return f"take({self.loaders['take']!r}, {self.n})"


def fraction(loader: Loader, f: float) -> Composed:
    """Return a loader of the first part of each epoch.

    Args:
        loader: a loader with a length.
        f: how much of it, in batches, above 0 and at most 1. It is meant as it is typed: 0.29 of
            100 batches are 29. What is not a whole batch is left out.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one.
        ValueError: ``f`` is not in its range; the loader has no length; or no batch would be left.

    Example:
        >>> import torch
        >>> len(fraction([torch.ones(2)] * 100, 0.29))
        29
    """
    return _Fraction(loader, f)


class _Fraction(Composed):
    def __init__(self, loader: Loader, f: float) -> None:
        checks.number("fraction", "f", f, "the part of an epoch", above=0, most=1)
        super().__init__("fraction", {"fraction": loader})
        self.f = f
        length = self.parts["fraction"].length_in(0)
        if length is None:
            raise ValueError(
                f"fraction({f}) of a loader whose length is not known: say how many batches, "
                "take(loader, n)"
            )
        if not self.length_in(0):
            raise ValueError(
                f"fraction({f}) of {length} batches is none: say how many, take(loader, 1)"
            )

    def length_in(self, epoch: int) -> int:
        __tracebackhide__ = True
        length = self.parts["fraction"].length_in(epoch) or 0
        return math.floor(Fraction(str(self.f)) * length)

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        items = self.parts["fraction"].items(seed, epoch, start, sharing)
        return itertools.islice(items, max(self.length_in(epoch or 0) - start, 0))

    def __repr__(self) -> str:
        return f"fraction({self.loaders['fraction']!r}, {self.f})"
