"""Loaders made of loaders: in turn, together, shortened, or fixed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import islice

import numpy as np
import torch
from toolz import partition_all
from torch.utils.data import BatchSampler

from fnloop._extensions.loaders.composed import Composed, Item, Together, items_of
from fnloop._extensions.loaders.map_style import MapStyle
from fnloop._extensions.loaders.sampled import Index
from fnloop.extend import Batch, Pass, checks, name_of, rng

# --------------------------------------------------------------------------------------------------
# One batch of each of several loaders at a time.


def zip_cycle(**loaders: object) -> Composed:
    """Return a loader of mappings with one batch of each loader. Shorter ones start over.

    An epoch ends with the longest. A loader that shuffles and begins again has another order. The
    loaders are shuffled independently. If the batches of a mapping have different sizes, the loss
    function says what the mapping weighs, in ``aux["weight"]``.

    Args:
        **loaders: the loaders, by the names that they have in the mappings.

    Returns:
        A loader, with a length if all of them have one.

    Raises:
        TypeError: one of them is not a loader.
        ValueError: no loader is given.

    Example:
        >>> import torch
        >>> long, short = [torch.ones(1)] * 3, [torch.zeros(1), torch.ones(1)]
        >>> [both["b"].item() for both in zip_cycle(a=long, b=short)]
        [0.0, 1.0, 0.0]

    Replaces: lightning.CombinedLoader, fastnlp.MixDataLoader
    """
    return _ZipCycle("zip_cycle", loaders)


def zip_shortest(**loaders: object) -> Composed:
    """Return a loader of mappings with one batch of each loader. The shortest ends an epoch.

    The loaders are shuffled independently. If the batches of a mapping have different sizes, the
    loss function says what the mapping weighs, in ``aux["weight"]``.

    Args:
        **loaders: the loaders, by the names that they have in the mappings.

    Returns:
        A loader, with a length if all of them have one.

    Raises:
        TypeError: one of them is not a loader.
        ValueError: no loader is given.

    Example:
        >>> import torch
        >>> len(zip_shortest(a=[torch.ones(1)] * 3, b=[torch.ones(1)] * 2))
        2
    """
    return _ZipShortest("zip_shortest", loaders, min)


def zip_longest(**loaders: object) -> Composed:
    """Return a loader of mappings with one batch of each loader that has not ended.

    An epoch ends with the longest. From where a shorter one has ended, its name is not in the
    mappings any more: ``if "b" in batch``. The loaders are shuffled independently. The loss
    function says what a mapping weighs, in ``aux["weight"]``.

    Args:
        **loaders: the loaders, by the names that they have in the mappings.

    Returns:
        A loader, with a length if all of them have one.

    Raises:
        TypeError: one of them is not a loader.
        ValueError: no loader is given.

    Example:
        >>> import torch
        >>> long, short = [torch.ones(1)] * 3, [torch.zeros(1)]
        >>> [sorted(found) for found in zip_longest(a=long, b=short)]
        [['a', 'b'], ['a'], ['a']]

    Replaces: lightning.CombinedLoader
    """
    return _ZipLongest("zip_longest", loaders)


class _Zip(Composed):
    def __init__(
        self, call: str, loaders: Mapping[str, object], choose: Callable[[list[int]], int] = max
    ) -> None:
        if not loaders:
            raise ValueError(f"{call} expects loaders by name, {call}(a=..., b=...); got none")
        super().__init__(call, loaders)
        self.choose = choose  # the length, of those of its parts

    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        lengths = [*self.lengths_in(epoch).values()]
        known = [length for length in lengths if length is not None]
        return self.choose(known) if len(known) == len(lengths) else None

    def passes(self, at: Pass) -> dict[str, Pass]:
        """Return a pass for each part, with a seed of its own."""
        return {name: at.part(i) for i, name in enumerate(self.parts)}

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
    def items(self, at: Pass) -> Iterator[Item]:
        return _together({n: items_of(self.parts[n], own) for n, own in self.passes(at).items()})


class _ZipLongest(_Zip):
    def items(self, at: Pass) -> Iterator[Item]:
        __tracebackhide__ = True
        left = {n: items_of(self.parts[n], own) for n, own in self.passes(at).items()}
        while left:
            found = {name: next(items, None) for name, items in left.items()}
            left = {name: items for name, items in left.items() if found[name] is not None}
            if left:
                yield Together({name: item for name, item in found.items() if item is not None})


class _ZipCycle(_Zip):
    def items(self, at: Pass) -> Iterator[Item]:
        lengths = self.lengths_in(at.epoch or 0)
        # The names of the parts whose first pass has ended.
        ended = {name for name, length in lengths.items() if length and at.start >= length}
        cycles = {name: self._cycle(name, own, ended) for name, own in self.passes(at).items()}
        length = self.length_in(at.epoch or 0)
        return islice(_together(cycles), None if length is None else max(length - at.start, 0))

    def _cycle(self, name: str, at: Pass, ended: set[str]) -> Iterator[Item]:
        """Yield the items of a part from a position on, again and again until all have ended.

        Args:
            name: the part.
            at: its position.
            ended: the names of the parts whose first pass has ended. This one is added.
        """
        __tracebackhide__ = True
        length = self.parts[name].length_in(at.epoch or 0)
        again, first = divmod(at.start, length) if length else (0, 0)
        left = 0 if length else at.start  # to be passed over: passes have no known length
        while True:
            own, empty = at.part(again) if again else at, not first
            for item in items_of(self.parts[name], own._replace(start=first)):
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


# --------------------------------------------------------------------------------------------------
# The batches of several loaders, one loader at a time.

_DRAWN_AT_ONCE = 4096  # positions


def interleave(loaders: Mapping[str, object], ratios: Mapping[str, int] | None = None) -> Composed:
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
        TypeError: an argument has the wrong type.
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
    def __init__(self, loaders: Mapping[str, object], ratios: Mapping[str, int] | None) -> None:
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

    def _order(self, at: Pass) -> Iterator[int]:
        """Yield the number of the loader at each position."""
        shares, blocks = self._shares(at.epoch or 0)
        generator = torch.Generator().manual_seed(at.order)
        if blocks is None:
            return _drawn(shares, None, generator)
        whole = int(blocks)
        rest = [int(share * blocks) - share * whole for share in shares]
        return itertools.chain(_drawn(shares, whole, generator), _drawn(rest, 1, generator))

    def items(self, at: Pass) -> Iterator[Item]:
        __tracebackhide__ = True
        order = self._order(at)
        taken = Counter(itertools.islice(order, at.start))
        parts = [
            items_of(part, at.part(i)._replace(start=taken[i]))
            for i, part in enumerate(self.parts.values())
        ]
        for i in order:
            item = next(parts[i], None)
            if item is None:
                self._check_ended(list(self.parts)[i], at.epoch or 0)
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


def _check_ratios(loaders: Mapping[str, object], ratios: Mapping[str, int]) -> dict[str, int]:
    checks.mapping("interleave", "ratios", ratios, 'such as {"a": 3, "b": 1}')
    if set(ratios) != set(loaders):
        raise ValueError(
            "interleave expects ratios for each loader, "
            f"{checks.join_names(list(map(repr, loaders)))}; got {checks.describe(dict(ratios))}"
        )
    meaning = "the batches of it in a block (for 0.7 and 0.3, write 7 and 3)"
    return {
        name: checks.integer("interleave", f"ratios[{name!r}]", ratio, meaning)
        for name, ratio in ratios.items()
    }


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


# --------------------------------------------------------------------------------------------------
# The first batches of a loader.


def take(loader: object, n: int) -> Composed:
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

    Replaces: lightning.limit_train_batches, keras.steps_per_epoch
    """
    return _Take(loader, n)


class _OfOne(Composed):
    """The base of loaders that are made of one, with one setting."""

    def __init__(self, call: str, loader: object, setting: Batch) -> None:
        super().__init__(call, {call: loader})
        self.setting = setting
        (self.part,) = self.parts.values()

    def __repr__(self) -> str:
        return f"{self.call}({self.loaders[self.call]!r}, {name_of(self.setting)})"


class _Take(_OfOne):
    def __init__(self, loader: object, n: int) -> None:
        n = checks.integer("take", "n", n, "the batches of an epoch")
        super().__init__("take", loader, n)

    def length_in(self, epoch: int) -> int:
        __tracebackhide__ = True
        length = self.part.length_in(epoch)
        return self.setting if length is None else min(self.setting, length)

    def items(self, at: Pass) -> Iterator[Item]:
        return itertools.islice(items_of(self.part, at), max(self.setting - at.start, 0))


def fraction(loader: object, f: float) -> Composed:
    """Return a loader of the first part of each epoch, given as a fraction.

    Args:
        loader: a loader with a length.
        f: how much of it, in batches, above 0 and at most 1. It is meant as it is typed: 0.29 of
            100 batches are 29. What is not a whole batch is skipped.

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


class _Fraction(_OfOne):
    def __init__(self, loader: object, f: float) -> None:
        f = checks.number("fraction", "f", f, "the part of an epoch", above=0, most=1)
        super().__init__("fraction", loader, f)
        length = self.part.length_in(0)
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
        length = self.part.length_in(epoch) or 0
        return math.floor(Fraction(str(self.setting)) * length)

    def items(self, at: Pass) -> Iterator[Item]:
        left = self.length_in(at.epoch or 0) - at.start
        return itertools.islice(items_of(self.part, at), max(left, 0))


# --------------------------------------------------------------------------------------------------
# A loader without some of its batches.


def leave_out(loader: object, predicate: Callable[[int, int], bool]) -> Composed:
    """Return a loader without the batches at some positions.

    A run that diverged at a batch can be continued from a checkpoint without that batch.

    Args:
        loader: any loader.
        predicate: ``(epoch, batch) -> bool``: whether a batch is skipped. It has to be a pure
            function. Epochs and batches are counted from 0, and batches as in the loader without
            this, over all processes. In an evaluation the epoch is 0.

    Returns:
        A loader.

    Raises:
        TypeError: ``loader`` is not one, or ``predicate`` is not such a function.

    Example:
        >>> import torch
        >>> batches = [torch.full((2,), float(i)) for i in range(4)]
        >>> [batch[0].item() for batch in leave_out(batches, lambda epoch, batch: batch == 2)]
        [0.0, 1.0, 3.0]
    """
    return _LeaveOut(loader, predicate)


class _LeaveOut(_OfOne):
    def __init__(self, loader: object, predicate: Callable[[int, int], bool]) -> None:
        meaning = "a function (epoch, batch) -> bool"
        self.predicate = checks.function("leave_out", "predicate", predicate, meaning, 2)
        super().__init__("leave_out", loader, predicate)
        self._kept: dict[tuple[int, int], int] = {}  # (epoch, length) to the batches that are left

    def _keeps(self, epoch: int, batch: int) -> bool:
        __tracebackhide__ = True
        found: object = self.predicate(epoch, batch)
        if not isinstance(found, bool | np.bool_):
            raise TypeError(
                f"leave_out expects predicate to return True or False; {name_of(self.predicate)}"
                f"({epoch}, {batch}) returned {checks.describe(found)}"
            )
        return not found

    def length_in(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        length = self.part.length_in(epoch)
        if length is None:
            return None
        if (epoch, length) not in self._kept:
            kept = 0
            for batch in range(length):  # not a comprehension, which is a frame in the traceback
                kept += self._keeps(epoch, batch)
            self._kept[epoch, length] = kept
        return self._kept[epoch, length]

    def items(self, at: Pass) -> Iterator[Item]:
        __tracebackhide__ = True
        number, start = at.epoch or 0, at.start
        first, length = 0, self.part.length_in(number)
        while start and (length is None or first < length):
            start -= self._keeps(number, first)
            first += 1
        for batch, item in enumerate(items_of(self.part, at._replace(start=first)), first):
            if self._keeps(number, batch):
                yield item


# --------------------------------------------------------------------------------------------------
# The same samples in every epoch.


def fixed(loader: object, n: int) -> Composed:
    """Return a loader that repeats the samples of the first n batches in every epoch.

    A map-style ``DataLoader`` that shuffles has them shuffled in each epoch, and its dataset
    augments them again. If your own batch sampler puts its batches together, they stay as
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

    Replaces: lightning.overfit_batches
    """
    return _Fixed(loader, n)


class _Fixed(_OfOne):
    def __init__(self, loader: object, n: int) -> None:
        n = checks.integer("fixed", "n", n, "the batches of an epoch")
        super().__init__("fixed", loader, n)
        self._own: tuple[int, Iterator[int]] | None = None

    def length_in(self, epoch: int) -> int:
        __tracebackhide__ = True
        length = self.part.length_in(0)
        return self.setting if length is None else min(self.setting, length)

    def items(self, at: Pass) -> Iterator[Item]:
        __tracebackhide__ = True
        if isinstance(self.part, MapStyle):
            indices = self._indices(self.part, at)
            at.set_epoch(self.part.loader.dataset)
            yield from items_of(self.part, at, indices)
        else:
            items = items_of(self.part, at._replace(epoch=None if at.epoch is None else 0))
            yield from itertools.islice(items, max(self.setting - at.start, 0))

    def _indices(self, part: MapStyle, at: Pass) -> list[Index]:
        """Return the indices of each batch of an epoch."""
        first = self._ordered(part, at._replace(epoch=0))
        if not at.epoch or first == self._ordered(part, at):
            return first  # a loader that shuffles would give others
        generator = torch.Generator().manual_seed(at.order)
        batched = part.loader.batch_sampler
        if type(batched) is not BatchSampler:
            return _shuffled(first, generator)
        samples = _shuffled(list(itertools.chain.from_iterable(first)), generator)
        return [list(batch) for batch in partition_all(batched.batch_size, samples)]

    def _ordered(self, part: MapStyle, at: Pass) -> list[Index]:
        """Return the indices of the first batches that the loader has in an epoch."""
        at.set_epoch(*part.samplers)
        return list(itertools.islice(part.indices_from(at.order, 0), self.setting))

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of a pass of its own. All passes have the samples of the first."""
        if self._own is None:
            self._own = rng.new_seed(), itertools.count()
        seed, epochs = self._own
        return self._one_pass(seed, next(epochs))


def _shuffled(values: list[Index], generator: torch.Generator) -> list[Index]:
    return [values[i] for i in torch.randperm(len(values), generator=generator).tolist()]
