"""How a loader is read from a position. Extensions bring readers of more kinds of loaders."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence

from torch.utils.data import BatchSampler

from fnloop._backend.containers import batch_size_of, length_of
from fnloop._core.types import Batch, name_of
from fnloop._data.iterable import (
    as_torch_reads_it,
    iterate,
    keeper_of,
    makes_new,
    owners_of,
    samplers_of,
    takes_indices,
)
from fnloop._data.loaders import (
    NONE_LEFT,
    Loader,
    Mark,
    check_loader,
    even,
    is_iterable,
    read_loaders,
    sharded,
)
from fnloop._data.position import Pass, Positions, kept_generators
from fnloop._extensions import extensions


class Reader:
    """How a loader is read from a position. A subclass is a loader, which says so itself.

    Of a loader of your own, write :meth:`items` and :meth:`length_in`. When a run resumes in the
    middle of an epoch, it begins there, and reads nothing again. The batches that it gives are
    distributed to the processes. Draw from ``at.order`` and ``at.fetch``, which are seeds.

    The base reads any iterable, and a function that returns one. Before the position, it reads
    batches and leaves them out.

    Args:
        loader: what is read, if that is another object.

    Attributes:
        even: whether a loader in it is marked by ``even``: then the whole is.
        shared: whether it is marked by ``sharded``.
        varies: whether its epochs may have different lengths.
        batch_size: samples in a batch, if all batches but the last have one known size. Then a
            position may be given in samples.
        samples: samples in an epoch, if ``batch_size`` is known.
        drop_last: whether an incomplete last round is left out.
        reuses: whether the memory of a batch that it has given may become that of another.
        ahead: how many batches of each process it reads before they are taken.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> class Counting(Reader):
        ...     def length_in(self, epoch):
        ...         return 4
        ...     def items(self, at):
        ...         return (torch.full((2,), float(n)) for n in range(at.start, 4))
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), Counting(), steps=3, hooks=())
        >>> state = fl.fit(fl.pipeline()(toy_loss), state, Counting(), hooks=())
        >>> state.step, state.model.w.item()
        (4, -6.0)
    """

    even = shared = varies = drop_last = False
    reuses = True
    batch_size: int | None = None
    samples = ahead = 0
    loader: Loader = None

    def __init__(self, loader: Loader = None) -> None:
        self.loader, self.samplers = loader, samplers_of(loader)
        self.reuses = not makes_new(loader)

    @staticmethod
    def of(loader: Loader, name: str = "") -> Reader:
        """Return how a loader is read. A reader is one itself.

        Args:
            loader: any loader of ``fit``.
            name: its name in messages, if it is to be checked.

        Raises:
            TypeError: it is not a loader.
        """
        __tracebackhide__ = True
        if name:
            check_loader(loader, name, alone=True)
        if isinstance(loader, Mark):
            marked = copy.copy(Reader.of(loader.loader))
            marked.even |= isinstance(loader, even)
            marked.shared |= isinstance(loader, sharded)
            return marked
        if isinstance(loader, Reader):
            return loader
        if type(loader) in (list, tuple):
            return _Listed(loader)
        plain = Reader(loader)
        for kind in extensions("readers of loaders"):
            if (found := kind(plain)) is not None:
                return found
        return plain

    @staticmethod
    def each(loaders: object) -> dict[str, Reader]:
        """Return how each of the loaders that ``fit`` takes is read, by name; "train" is first.

        Raises:
            TypeError, ValueError: as ``fit`` does.
        """
        train, evaluated = read_loaders(loaders)
        return {name: Reader.of(one) for name, one in {"train": train, **evaluated}.items()}

    @staticmethod
    @contextlib.contextmanager
    def unmoved(loaders: object) -> Iterator[None]:
        """Put back what decides which batches loaders give next, at the end of a ``with`` block.

        That is their positions, and the generators of their own.

        Args:
            loaders: what ``fit`` takes.
        """
        leaves = [leaf for one in Reader.each(loaders).values() for leaf in one.leaves()]
        leaves = [*filter(is_iterable, leaves)]
        keepers = [keeper for keeper in map(keeper_of, leaves) if keeper is not None]
        positions = [copy.deepcopy(keeper.state_dict()) for keeper in keepers]
        with kept_generators([owner for leaf in leaves for owner in owners_of(leaf)]):
            try:
                yield
            finally:
                for keeper, position in zip(keepers, positions, strict=True):
                    keeper.load_state_dict(position)

    # --- what it has

    def length_in(self, epoch: int) -> int | None:
        """Return the number of batches in an epoch, or None if it is not known before its end."""
        return length_of(self.loader)

    def size(self) -> tuple[int, str] | None:
        """Return how many samples or batches it has, and of which of the two, if it is known."""
        length = length_of(self.loader)
        return None if length is None else (length, "batches")

    def batch_sizes(self) -> set[int] | None:
        """Return how many samples complete batches have; None if that is not known."""
        if as_torch_reads_it(self.loader) and type(self.loader.batch_sampler) is BatchSampler:
            return {self.loader.batch_sampler.batch_size}
        return None

    def window_of(self, total: int) -> int:
        """Return how many batches have ``total`` samples.

        An incomplete batch, such as the last one of an epoch, counts as a complete one.

        Raises:
            ValueError: that is not known, or not a whole number.
        """
        typed = f"accumulate(total={total})"
        sizes = self.batch_sizes()
        if sizes is None or len(sizes) != 1:
            known = "does not say" if sizes is None else f"says differently, {sorted(sizes)}"
            raise ValueError(
                f"{typed} needs to know how many samples a batch has, which this training loader "
                f"{known}: pass DataLoader(dataset, batch_size), or write accumulate(n), n batches "
                "on each process"
            )
        (size,) = sizes
        if total % size:
            near = max(total // size, 1) * size
            raise ValueError(
                f"{typed} takes whole batches, and those of the training loader have {size} "
                f"samples: write accumulate(total={near}), or make batches of a size that divides "
                f"{total}"
            )
        return total // size

    @property
    def takes_indices(self) -> bool:
        """Whether it is a DataLoader that takes samples by index."""
        return takes_indices(self.loader)

    def leaves(self) -> list[Loader]:
        """Return the loaders that it reads."""
        return [] if self.loader is None else [self.loader]

    def how_read(self) -> tuple[str, bool] | None:
        """Return the class of the data, and whether a batch of them is read at once.

        None where a loader makes its batches itself, or in workers.
        """
        return None

    # --- reading it

    def items(self, at: Pass) -> Iterator[Batch]:
        """Return what the batches of all processes are made of, from a position on.

        Unless :meth:`read` makes them, these are the batches.
        """
        batches = iterate(self.loader, at)
        return at.sharing.held.watched(batches) if self.reuses else batches

    def read(self, at: Pass) -> Iterator[Batch]:
        """Return this process's batches from a position on."""
        share = at.sharing.split(self.items(at), batch_size_of, counts=self.reuses)
        return at.sharing.noting_first(share, at.place)

    def indices(self, at: Pass) -> Iterator[object]:
        """Return which samples the batches of all processes have; nothing if that is not known."""
        return iter(())

    # --- where it is

    def name(self) -> str:
        """Return what messages about its position name."""
        if self.loader is None:
            return type(self).__name__
        read = self.loader.dataset if as_torch_reads_it(self.loader) else self.loader
        return type(read).__name__ if is_iterable(read) else name_of(read)

    def owners(self) -> Sequence[object]:
        """Return the objects whose generators decide the order of each epoch."""
        if self.loader is None:
            return [*filter(is_iterable, self.leaves())]
        return owners_of(self.loader) if is_iterable(self.loader) else ()

    def contents(self, item: Batch) -> object:
        """Return what is compared of an item, to know whether a resumed run gets the same."""
        return item

    def positions(self) -> Positions:
        """Return what is to know where the loader is."""
        return Positions(self.name(), self.size, self.contents, self.owners())


class _Listed(Reader):
    """How a list of batches is read. No code of the user's runs: there is nothing to position."""

    def batch_sizes(self) -> set[int]:
        return {max(map(batch_size_of, self.loader), default=1)}

    def items(self, at: Pass) -> Iterator[Batch]:
        at.positions.open(at.epoch, at.start)
        if at.start:
            following = self.loader[at.start] if at.start < len(self.loader) else NONE_LEFT
            at.positions.compare(at.epoch, at.start, following)
        return itertools.islice(self.loader, at.start, None)

    def positions(self) -> Positions:
        return Positions("a list", self.size, listed=self.loader)
