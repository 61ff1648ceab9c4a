"""The batches of several loaders, one loader at a time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction

import torch

from fnloop._core.rng import ORDER, PART, fold_in
from fnloop._data.composed import Composed
from fnloop._data.loaders import Loader
from fnloop._data.parts import Item
from fnloop._data.round_robin import SingleProcess
from fnloop._display import checks

__all__ = ["interleave"]

_DRAWN_AT_ONCE = 4096  # positions


def interleave(loaders: Mapping[str, Loader], ratios: Mapping[str, int] | None = None) -> Composed:
    """Return a loader of the batches of several loaders, mixed.

    Their order is drawn for each epoch. A batch is as its loader gives it; the loaders are shuffled
    independently.

    Args:
        loaders: the loaders, by name.
        ratios: how many batches of each follow each other, such as ``{"a": 3, "b": 1}``: of four
            batches, three are of "a", in any order. The epoch ends when a loader has no more; of
            the others it has taken their share. None takes each batch of each loader once.

    Returns:
        A loader, with a length if all of them have one. If not, ``take(interleave(...), n)`` has.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: there is no loader; a ratio is missing, or is not an int of at least 1; or
            without ratios, a loader has no length.

    Example:
        >>> import torch
        >>> a, b = [torch.zeros(1)] * 6, [torch.ones(1)] * 6
        >>> mixed = interleave({"a": a, "b": b}, ratios={"a": 3, "b": 1})
        >>> sorted(batch.item() for batch in mixed)
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    """
    return _Interleave(loaders, ratios)


class _Interleave(Composed):
    def __init__(self, loaders: Mapping[str, Loader], ratios: Mapping[str, int] | None) -> None:
        example = 'such as {"a": loader, "b": other}'
        if not checks.mapping("interleave", "loaders", loaders, example):
            raise ValueError(f"interleave expects loaders as a mapping, {example}; got none")
        super().__init__("interleave", loaders)
        self.ratios = None if ratios is None else _check_ratios(self.loaders, ratios)
        if self.ratios is None:
            for name, length in self.lengths_in(0).items():
                if length is None:
                    raise ValueError(
                        "interleave takes each batch of each loader once, in an order that it "
                        f'draws from their lengths, and that of "{name}" is not known. Give '
                        "ratios={...}, or say its length, take(loader, n)"
                    )

    def _shares(self, epoch: int) -> tuple[list[int], Fraction | None]:
        """Return the batches of each loader in a block, and how many blocks make an epoch."""
        lengths = self.lengths_in(epoch)
        if self.ratios is None:
            return [length or 0 for length in lengths.values()], Fraction(1)
        shares = [self.ratios[name] for name in lengths]
        known = [
            Fraction(length, share)
            for length, share in zip(lengths.values(), shares, strict=True)
            if length is not None
        ]
        return shares, min(known, default=None)

    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        shares, blocks = self._shares(epoch)
        if blocks is None or None in self.lengths_in(epoch).values():
            return None
        return sum(int(share * blocks) for share in shares)

    def _order(self, seed: int, epoch: int) -> Iterator[int]:
        """Yield the number of the loader at each position."""
        shares, blocks = self._shares(epoch)
        generator = torch.Generator().manual_seed(fold_in(seed, ORDER, epoch))
        if blocks is None:
            return _drawn(shares, None, generator)
        whole = int(blocks)
        rest = [int(share * blocks) - share * whole for share in shares]
        return itertools.chain(_drawn(shares, whole, generator), _drawn(rest, 1, generator))

    def items(
        self, seed: int, epoch: int | None, start: int, sharing: SingleProcess
    ) -> Iterator[Item]:
        __tracebackhide__ = True
        order = self._order(seed, epoch or 0)
        taken = Counter(itertools.islice(order, start))
        parts = [
            part.items(fold_in(seed, PART, i), epoch, taken[i], sharing)
            for i, part in enumerate(self.parts.values())
        ]
        for i in order:
            item = next(parts[i], None)
            if item is None:
                self._check_ended(list(self.parts)[i], epoch or 0)
                return
            yield item

    def _check_ended(self, name: str, epoch: int) -> None:
        """Raise if a loader had to have more batches."""
        if self.ratios is None:
            raise ValueError(
                f'interleave takes each batch of each loader once, but "{name}" has ended before '
                f"its length, {self.lengths_in(epoch)[name]} batches: correct its length, or give "
                "ratios={...}"
            )

    def __repr__(self) -> str:
        ratios = "" if self.ratios is None else f", ratios={self.ratios}"
        return f"interleave({self.loaders}{ratios})"


def _check_ratios(loaders: Mapping[str, Loader], ratios: Mapping[str, int]) -> dict[str, int]:
    checks.mapping("interleave", "ratios", ratios, 'such as {"a": 3, "b": 1}')
    if set(ratios) != set(loaders):
        raise ValueError(
            "interleave expects ratios for each loader, "
            f"{checks.join_names(list(map(repr, loaders)))}; got {checks.describe(dict(ratios))}"
        )
    for name, ratio in ratios.items():
        meaning = "the batches of it in a block (for 0.7 and 0.3, write 7 and 3)"
        checks.integer("interleave", f"ratios[{name!r}]", ratio, meaning)
    return dict(ratios)


def _drawn(shares: list[int], blocks: int | None, generator: torch.Generator) -> Iterator[int]:
    """Yield numbers in blocks, each drawn in an order of its own; ``shares`` of each number.

    None blocks are endlessly many.
    """
    block = torch.tensor(
        [i for i, share in enumerate(shares) for _ in range(share)], dtype=torch.int64
    )
    at_once = max(_DRAWN_AT_ONCE // max(len(block), 1), 1)
    for done in itertools.count(0, at_once):
        n = at_once if blocks is None else min(blocks - done, at_once)
        if n <= 0:
            return
        keys = torch.rand(n, len(block), dtype=torch.float64, generator=generator)
        yield from block[keys.argsort(dim=1, stable=True)].flatten().tolist()
