"""Sources: loaders as a function of (seed, epoch, position), read for a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator

import torch

from fnloop._backend.containers import may_need_transfer
from fnloop._core.rng import fold_in
from fnloop._core.runs import Position
from fnloop._core.types import Batch
from fnloop._data.loaders import Loader
from fnloop._data.position import Pass, Positions
from fnloop._data.reader import Reader
from fnloop._data.sharing import Sharing
from fnloop._data.windows import grouped, grouped_late, prefetched, transfer_to
from fnloop._extensions import extensions

_NO_LENGTH = " Its length is 0: was it filled, and were the files found that it is made of?"


class Source(Sharing):
    """A loader opened for a run: its batches are a function of (seed, epoch, position).

    How a loader is read, its reader says. When there are several processes, a subclass distributes
    the batches round-robin.

    Args:
        reader: how it is read.
        seed: the run's, or one that was derived from it.
        total: the samples of an update, of all processes together; None if the step says how many
            batches it takes.
        what: whose data they are, as errors name them when the processes compare what they read.

    Attributes:
        window: the batches of an update, of all processes together; None if each process takes a
            number of its own.
        positions: where the loader is, if it says so.
        length: batches that the loader has in an epoch, for all processes together; None if unknown
            before its end. If epochs differ, that of epoch 0.

    Raises:
        ValueError: the loader's batches cannot make an update of ``total`` samples.

    Example:
        >>> import torch
        >>> source = Source.open([torch.zeros(2), torch.ones(2)], seed=0)
        >>> source.length_in(0), [*source.batches(0, 1, 0)]
        (2, [tensor([1., 1.])])
    """

    def __init__(
        self, reader: Reader, seed: int, total: int | None = None, what: str = "the data"
    ) -> None:
        __tracebackhide__ = True
        super().__init__(reader.ahead > 0)
        self.reader, self.seed, self.total, self.what = reader, seed, total, what
        self.window = None if total is None else reader.window_of(total)
        self.positions: Positions = reader.positions()
        self.positions.ahead = self.processes * reader.ahead
        self.length = self._batches_of(reader.samples) if reader.batch_size else reader.length_in(0)

    @staticmethod
    def open(
        loader: Loader,
        seed: int,
        rank: int = 0,
        processes: int = 1,
        total: int | None = None,
        alike: bool = False,
        what: str = "the data",
    ) -> Source:
        """Open a loader.

        Args:
            loader: any loader of ``fit``.
            seed: the run's.
            rank: the number of this process.
            processes: how many processes share the batches.
            total: as for the class.
            alike: whether other processes have the same share of the batches as this one.
            what: as for the class.

        Raises:
            ValueError: as for the class; or the loader distributes its data to the processes
                already.
        """
        __tracebackhide__ = True
        reader = Reader.of(loader)
        if reader.shared and total is not None:
            raise ValueError(
                f"accumulate(total={total}) distributes the batches of each update to as many "
                "processes as there are, but sharded(...) gives each process its own: pass the "
                "loader without sharded, or write accumulate(n)"
            )
        if processes > 1 or alike:
            own_seed = fold_in(seed, rank) if reader.shared and processes > 1 else seed
            for share in extensions("shares of several processes"):
                return share(reader, own_seed, total, what, rank, processes, alike)
        return Source(_unprepared(reader), seed, total, what)

    def again(self) -> Source:
        """Return the source once more. What is read there is not noted here."""
        return Source(self.reader, self.seed, self.total, self.what)

    # --- what it has

    def length_in(self, epoch: int) -> int | None:
        """Return the length of an epoch: how many batches are distributed in it."""
        __tracebackhide__ = True
        length = self._length_of_loader(epoch)
        return None if length is None else self.kept(length)

    def _length_of_loader(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        return self.reader.length_in(epoch) if self.reader.varies else self.length

    def left(self, epoch: int, batch: int, samples: int) -> int | None:
        """Return how many batches of an epoch are left at a position."""
        if self.reader.batch_size and samples:
            return self.kept(self._batches_of(max(self.reader.samples - samples, 0)))
        length = self._length_of_loader(epoch)
        return None if length is None else self.kept(max(length - batch, 0))

    def _batches_of(self, samples: int) -> int:
        """Return how many batches a number of samples makes, where batches have one size."""
        size = self.reader.batch_size
        assert size is not None
        if self.reader.drop_last:
            return samples // (size * self.complete) * self.complete
        return math.ceil(samples / size)

    def batches_in_update(self, window: int) -> int:
        """Return how many batches an update takes, in all processes together.

        Args:
            window: those that the step takes in each process, unless the source knows better.
        """
        return self.window or window * self.processes

    def rounds_of(self, window: int) -> int:
        """Return how many batches of a window each process takes, with padding."""
        return math.ceil(window / self.processes)

    def padded(self, batches: int) -> int:
        """Return how many batches are counted when all processes have taken a number of them."""
        return batches

    def why_empty(self) -> str:
        """Return why an epoch has no batch, as the end of a message; "" if that is not known."""
        size, complete = self.reader.batch_size, self.complete
        if not self.reader.drop_last or not size:
            return _NO_LENGTH if self.length == 0 else ""
        together = f"{size} on each of {complete} processes" if complete > 1 else f"{size}"
        return (
            f" It has {self.reader.samples} samples, and with drop_last an update takes "
            f"{together}: make batches smaller."
        )

    # --- reading it

    def begin(self, position: Position | None, ahead: int, at: tuple[int, int, int]) -> None:
        """Begin an epoch, or continue it.

        Args:
            position: where it was, or None.
            ahead: the most batches that are read ahead of those consumed.
            at: the epoch, and the batches and samples of it that were consumed already.
        """
        self.positions.begin(position, ahead, self.left(*at))

    def read(self, epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        """Return this process's batches of an epoch, from a position on.

        :meth:`batches` gives the same, and :meth:`windows` what a step takes.
        """
        at = Pass(self.seed, epoch, batch, samples, self, self.positions)
        return self.marked(self.reader.read(at))

    def batches(self, epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        """Return this process's batches of an epoch, from a position on, each to be used at once.

        Raises:
            ValueError: while they are taken: the loader reuses the memory of one that is held.
        """
        self.held.begin_pass(self.reads_ahead)
        return self.held.taken(self.read(epoch, batch, samples), grouped=False)

    def indices(self, epoch: int, batch: int, samples: int) -> Iterator[object]:
        """Yield which samples the batches of this process have, from a position on.

        It gives a list of indices for each batch; a mapping by name, if a batch is made of several;
        None for a batch that is not taken by index; and nothing if no batch is. It fetches no
        sample, but it seeds the global generators, as a sampler may draw from them.
        """
        sharing = self.again()  # this one notes what it reads
        at = Pass(self.seed, epoch, batch, samples, sharing, self.positions)
        for index in sharing.marked(sharing.split(self.reader.indices(at), lambda index: 0)):
            own, is_padding = sharing.unpadded(index)
            yield [] if is_padding else own

    def first_batches(self, device: torch.device, n: int) -> Iterator[Batch]:
        """Yield the first batches of a pass on a device, and leave the others unread."""
        __tracebackhide__ = True
        reading = self.windows(None, device, None)
        for batch in itertools.islice(reading, n):
            yield self.unpadded(batch)[0]
        if isinstance(reading, Generator):
            reading.close()

    def windows(
        self,
        sizes: Iterator[int] | None,
        device: torch.device,
        epoch: int | None = 0,
        batch: int = 0,
        samples: int = 0,
        prefetch: int = 1,
        late: bool = False,
    ) -> Iterator[Batch]:
        """Return what a step takes, call by call: a batch, or a tuple of several.

        They are on the device. Requesting one while the previous one is still computing overlaps
        loading and copying with it.

        Args:
            sizes: the most batches of each call, in all processes together; None if the step takes
                a batch, not a tuple.
            device: where they are moved to.
            epoch: the epoch. Without one, for evaluation, the order is always the same and
                ``set_epoch`` is not called.
            batch: the batches of the epoch that were consumed already.
            samples: their samples, if known.
            prefetch: how many windows are fetched ahead. It changes no number.
            late: whether a call gets a :class:`LateWindow` in the place of a tuple, and uses up
                each batch before it asks for the next one. Then ``prefetch`` is 1.

        Raises:
            ValueError: while they are taken: the loader reuses the memory of one that is held.
        """
        held, copies = self.held, device.type != "cpu"
        holds = not copies and ((sizes is not None and not late) or prefetch > 1)
        held.begin_pass(holds or self.reads_ahead)
        batches = iter(self.read(epoch, batch, samples))
        if epoch is None:
            batches = self.positions.unmoved(batches)
        if copies or late:  # what the loader gave is used at once
            batches = held.taken(batches, grouped=False)
        if may_need_transfer(device):
            batches = map(transfer_to(device), batches)
        if sizes is not None:
            numbers = map(self.rounds_of, sizes)
            if late:
                return grouped_late(batches, numbers, self)
            batches = grouped(batches, numbers)
        fed = batches if prefetch == 1 else prefetched(batches, prefetch)
        return fed if copies else held.taken(fed, grouped=sizes is not None)


def _unprepared(reader: Reader) -> Reader:
    """Return how the DataLoader is read inside one that accelerate prepared for a single process.

    Accelerate's own reads a batch ahead, and moves batches to a device, which happens here anyway.
    """
    loader = reader.loader
    is_prepared = type(loader).__module__.startswith("accelerate.")
    if not is_prepared or getattr(loader, "skip_batches", 0):
        return reader
    return Reader.of(getattr(loader, "base_dataloader", loader))
