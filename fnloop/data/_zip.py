"""One batch of each of several loaders at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from fnloop._core.rng import PART, fold_in
from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.parts import Item, Part, Together
from fnloop._data.round_robin import SingleProcess

__all__ = ["zip_cycle", "zip_shortest"]


def zip_cycle(**loaders: Loader) -> Composed:
    """Return a loader of mappings with one batch of each loader. Shorter ones begin again.

    An epoch ends with the longest. A loader that shuffles and begins again has another order. The
    loaders are shuffled independently. If the batches of a mapping have different sizes, the loss
    function says what the mapping weighs, in ``aux["weight"]``.

    Args:
        **loaders: the loaders, by the names that they have in the mappings.

    Returns:
        A loader, with a length if all of them have one.

    Raises:
        TypeError: one of them is not a loader.
        ValueError: there is none.

    Example:
        >>> import torch
        >>> long, short = [torch.ones(1)] * 3, [torch.zeros(1), torch.ones(1)]
        >>> [both["b"].item() for both in zip_cycle(a=long, b=short)]
        [0.0, 1.0, 0.0]
    """
    return _ZipCycle("zip_cycle", loaders)


def zip_shortest(**loaders: Loader) -> Composed:
    """Return a loader of mappings with one batch of each loader. The shortest ends an epoch.

    The loaders are shuffled independently. If the batches of a mapping have different sizes, the
    loss function says what the mapping weighs, in ``aux["weight"]``.

    Args:
        **loaders: the loaders, by the names that they have in the mappings.

    Returns:
        A loader, with a length if all of them have one.

    Raises:
        TypeError: one of them is not a loader.
        ValueError: there is none.

    Example:
        >>> import torch
        >>> len(zip_shortest(a=[torch.ones(1)] * 3, b=[torch.ones(1)] * 2))
        2
    """
    return _ZipShortest("zip_shortest", loaders)


class _Zip(Composed):
    def __init__(self, call: str, loaders: Mapping[str, Loader]) -> None:
        if not loaders:
            raise ValueError(f"{call} expects loaders by name, {call}(a=..., b=...); got none")
        super().__init__(call, loaders)

    def seeded_parts(self, seed: int) -> Iterator[tuple[str, Part, int]]:
        """Yield each part with its name and a seed of its own."""
        for i, (name, part) in enumerate(self.parts.items()):
            yield name, part, fold_in(seed, PART, i)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={loader!r}" for name, loader in self.loaders.items())
        return f"{self.call}({given})"


def _together(parts: Mapping[str, Iterator[Item]]) -> Iterator[Item]:
    """Yield one item of each, until one of them ends."""
    __tracebackhide__ = True
    while True:
        found: dict[str, Item] = {}
        for name, items in parts.items():
            item = next(items, None)
            if item is None:
                return
            found[name] = item
        yield Together(found)


class _ZipShortest(_Zip):
    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        lengths = [part.length_in(epoch) for part in self.parts.values()]
        known = [length for length in lengths if length is not None]
        return min(known) if len(known) == len(lengths) else None

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        return _together(
            {
                name: part.items(own, epoch, start, sharing)
                for name, part, own in self.seeded_parts(seed)
            }
        )


class _ZipCycle(_Zip):
    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        lengths = [part.length_in(epoch) for part in self.parts.values()]
        known = [length for length in lengths if length is not None]
        return max(known) if len(known) == len(lengths) else None

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        lengths = self.lengths_in(epoch or 0)
        # The names of the parts whose first pass has ended.
        ended = {name for name, length in lengths.items() if length and start >= length}
        cycles = {
            name: self._cycle(name, part, own, epoch, start, sharing, ended)
            for name, part, own in self.seeded_parts(seed)
        }
        length = self.length_in(epoch or 0)
        return islice(_together(cycles), None if length is None else max(length - start, 0))

    def _cycle(
        self,
        name: str,
        part: Part,
        seed: int,
        epoch: int | None,
        start: int,
        sharing: SingleProcess,
        ended: set[str],
    ) -> Iterator[Item]:
        """Yield the items of a part from a position on, again and again until all have ended.

        Args:
            ended: the names of the parts whose first pass has ended. This one is added.
        """
        __tracebackhide__ = True
        length = part.length_in(epoch or 0)
        again, first = divmod(start, length) if length else (0, 0)
        left = 0 if length else start  # to be passed over, because passes have no known length
        while True:
            own, empty = fold_in(seed, PART, again) if again else seed, not first
            for item in part.items(own, epoch, first, sharing):
                empty = False
                if left:
                    left -= 1
                else:
                    yield item
            if empty:
                when = " when it began again: an iterator can be read only once" if again else ""
                raise ValueError(
                    f'zip_cycle: the loader "{name}" gave no batch{when}. Pass a list, or a '
                    "function that makes it"
                )
            ended.add(name)
            if len(ended) == len(self.parts):
                return
            again, first = again + 1, 0
