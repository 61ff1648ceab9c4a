"""Sources: loaders as a function of (seed, epoch, position), fetched ahead of the step."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import attrs
import torch
from torch.utils.data import DistributedSampler

from fnloop._backend.collectives import all_reduce_max, any_rank
from fnloop._backend.containers import copy_on_side_stream, may_need_transfer, to_device
from fnloop._core.rng import Generators, fold_in, isolated, saved_before_seeding, seed_all_count
from fnloop._core.runs import Position
from fnloop._core.types import Batch
from fnloop._data.iterable import keeper_of, owners_of, sampler_in, samplers_of
from fnloop._data.loaders import (
    NONE_LEFT,
    First,
    Glimpse,
    Loader,
    Padding,
    SingleProcess,
    Window,
    is_iterable,
    read_loaders,
    sharded,
    sharing_among,
    unmarked,
)
from fnloop._data.position import Pass, Positions, kept_generators
from fnloop._data.reader import Reader, reader_of

# --------------------------------------------------------------------------------------------------
# Sources: loaders opened so that what they yield is a function of (seed, epoch, position).
#
# How a loader is read, its reader says. When there are several processes, the batches are
# distributed round-robin.


@attrs.frozen
class Source:
    """A loader opened for a run.

    Args:
        reader: how it is read.
        seed: the run's, or one that was derived from it.
        length: batches that the loader has in an epoch, for all processes together; None if unknown
            before its end. If epochs differ, that of epoch 0.
        sharing: how the batches are distributed to the processes.
        positions: where the loader is, if it says so.
        reopen: opens the same loader once more.
        what: whose data they are, as errors name them when the processes compare what they read.
    """

    reader: Reader
    seed: int
    length: int | None
    sharing: SingleProcess
    positions: Positions
    reopen: Callable[[], Source] | None = None
    what: str = "the data"

    def read(self, epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        """Return this process's batches of an epoch, from a position on.

        :meth:`batches` gives the same, and :func:`windows` what a step takes.
        """
        at = Pass(self.seed, epoch, batch, samples, self.sharing, self.positions)
        return self.reader.read(at)

    def indices(self, epoch: int, batch: int, samples: int) -> Iterator[object]:
        """Yield which samples the batches of this process have, from a position on.

        It gives a list of indices for each batch; a mapping by name, if a batch is made of several;
        None for a batch that is not taken by index; and nothing if no batch is. It fetches no
        sample, but it seeds the global generators, as a sampler may draw from them.
        """
        sharing = self.sharing.again()  # the run's own notes what it reads
        at = Pass(self.seed, epoch, batch, samples, sharing, self.positions)
        return self.reader.indices(at)

    @property
    def processes(self) -> int:
        """How many processes the batches are distributed to."""
        return self.sharing.processes

    def batches(self, epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        """Return this process's batches of an epoch, from a position on, each to be used at once.

        Raises:
            ValueError: while they are taken: the loader reuses the memory of one that is held.
        """
        held = self.sharing.held
        held.begin_pass(self.sharing.reads_ahead)
        return held.taken(self.read(epoch, batch, samples), grouped=False)

    @property
    def order(self) -> int:
        """A checksum of the order of an epoch's samples, where their indices are known."""
        return self.sharing.order

    def length_in(self, epoch: int) -> int | None:
        """Return the length of an epoch: how many batches are distributed in it."""
        __tracebackhide__ = True
        length = self._length_of_loader(epoch)
        return None if length is None else self.sharing.kept(length)

    def _length_of_loader(self, epoch: int) -> int | None:
        __tracebackhide__ = True
        return self.reader.length_in(epoch) if self.reader.varies else self.length

    def left(self, epoch: int, batch: int, samples: int) -> int | None:
        """Return how many batches of an epoch are left at a position."""
        if self.reader.batch_size and samples:
            left = max(self.reader.samples - samples, 0)
            return self.sharing.kept(_batches_of(left, self.reader, self.sharing))
        length = self._length_of_loader(epoch)
        return None if length is None else self.sharing.kept(max(length - batch, 0))

    def begin(self, position: Position | None, ahead: int, at: tuple[int, int, int]) -> None:
        """Begin an epoch, or continue it.

        Args:
            position: where it was, or None.
            ahead: the most batches that are read ahead of those consumed.
            at: the epoch, and the batches and samples of it that were consumed already.
        """
        self.positions.begin(position, ahead, self.left(*at))

    def batches_in_update(self, window: int) -> int:
        """Return how many batches an update takes, in all processes together.

        Args:
            window: those that the step takes in each process, unless the source knows better.
        """
        return self.sharing.window or window * self.processes

    def rounds_of(self, window: int) -> int:
        """Return how many batches of a window each process takes, with padding."""
        return math.ceil(window / self.sharing.processes)

    def padded(self, batches: int) -> int:
        """Return how many batches are counted when all processes have taken a number of them."""
        window = self.batches_in_update(1)
        whole, rest = divmod(batches, window)
        return whole * window + min(math.ceil(rest / self.processes) * self.processes, window)

    def take(self, batch: Batch, window: int) -> tuple[Batch, Window]:
        """Return what a step takes, without the marks of padding, and what is known of it.

        Args:
            batch: what the source gave: a batch, or a tuple of them. Call this once for each.
            window: the window of the step.
        """
        if type(batch) is LateWindow:
            return batch, Window(0, batch.padding)
        given = (batch,) if window == 1 else batch
        padding = tuple(type(b) is Padding for b in given)
        size = self.sharing.uniform_batch_size(len(given))
        if not any(padding):
            return batch, Window(size)
        batches = tuple(b.batch if type(b) is Padding else b for b in given)
        return (batches[0] if window == 1 else batches), Window(size, padding)

    def why_empty(self) -> str:
        """Return why an epoch has no batch, although the loader may have one; else nothing."""
        if self.sharing.kept(1) == 0:
            return (
                "With even(loader), an epoch has no batch unless each of "
                f"{self.processes} processes has one: make batches smaller."
            )
        size, complete = self.reader.batch_size, self.sharing.complete
        if not self.reader.drop_last or not size:
            return ""
        together = f"{size} on each of {complete} processes" if complete > 1 else f"{size}"
        return (
            f"It has {self.reader.samples} samples, and with drop_last an update takes {together}: "
            "make batches smaller."
        )

    def check_order(self, whole: bool = True) -> None:
        """Raise if the processes have read different data, or in different orders. A collective.

        Args:
            whole: whether all of a pass was read.
        """
        __tracebackhide__ = True
        self.sharing.check_order(self._first_again, whole, f"a comparison of {self.what}")

    def _first_again(self, first: First) -> Glimpse | None:
        """Return a glimpse of the first batch of a pass that is read once more."""
        if self.reopen is None:
            return None
        again = self.reopen()
        with isolated(torch.device("cpu")):
            if first.at[0] is None and self.positions.draws:
                # An evaluation has put the generators back, and would draw the same once more.
                next(self.reopen().batches(*first.at), None)
            next(again.batches(*first.at), None)
            found = again.sharing.first
        return None if found is None else found.glimpse


def open_source(
    loader: object,
    seed: int,
    rank: int = 0,
    processes: int = 1,
    total: int | None = None,
    alike: bool = False,
) -> Source:
    """Open a loader, so that what it yields is a function of the seed, the epoch and the position.

    Args:
        loader: any iterable of batches, or a function that returns one.
        seed: the run's.
        rank: the number of this process.
        processes: how many processes share the batches.
        total: the samples of an update, of all processes together; None if the step says how many
            batches it takes.
        alike: whether other processes have the same share of the batches as this one.

    Raises:
        ValueError: the loader distributes its data to the processes already; or its batches cannot
            make an update of ``total`` samples.
    """
    __tracebackhide__ = True
    reopen = functools.partial(open_source, loader, seed, rank, processes, total, alike)
    loader, even = unmarked(loader)
    if isinstance(loader, sharded):
        return _open_sharded(loader.loader, seed, rank, processes, total, even, alike)
    reader = reader_of(_unprepared(loader))
    if processes > 1 or alike:
        for each in (loader, *reader.leaves()):
            _check_not_split(each)
    window = None if total is None else _window_of(reader, total)
    sharing = sharing_among(processes, rank, window, even or reader.even, alike)
    sharing.reads_ahead |= reader.ahead > 0
    positions = reader.positions()
    positions.ahead = processes * reader.ahead
    if reader.batch_size:
        length = _batches_of(reader.samples, reader, sharing)
    else:
        length = reader.length_in(0)
    return Source(reader, seed, length, sharing, positions, reopen)


def _batches_of(samples: int, reader: Reader, sharing: SingleProcess) -> int:
    """Return how many batches a number of samples makes, where batches have one size."""
    assert reader.batch_size is not None
    if reader.drop_last:
        return samples // (reader.batch_size * sharing.complete) * sharing.complete
    return math.ceil(samples / reader.batch_size)


def _window_of(reader: Reader, total: int) -> int:
    """Return how many batches of a loader have ``total`` samples.

    An incomplete batch, such as the last one of an epoch, counts as a complete one.

    Raises:
        ValueError: that is not known, or not a whole number.
    """
    typed = f"accumulate(total={total})"
    sizes = reader.batch_sizes()
    if sizes is None or len(sizes) != 1:
        known = "does not say" if sizes is None else f"says differently, {sorted(sizes)}"
        raise ValueError(
            f"{typed} needs to know how many samples a batch has, which this training loader "
            f"{known}: pass DataLoader(dataset, batch_size), or write accumulate(n), n batches on "
            "each process"
        )
    (size,) = sizes
    if total % size:
        near = max(total // size, 1) * size
        raise ValueError(
            f"{typed} takes whole batches, and those of the training loader have {size} samples: "
            f"write accumulate(total={near}), or make batches of a size that divides {total}"
        )
    return total // size


def _unprepared(loader: object) -> object:
    """Return the DataLoader inside one that accelerate has prepared for a single process.

    Accelerate's own reads a batch ahead, and moves batches to a device, which happens here anyway.
    """
    is_prepared = type(loader).__module__.startswith("accelerate.")
    skips = getattr(loader, "skip_batches", 0)
    return loader if skips or not is_prepared else getattr(loader, "base_dataloader", loader)


def _check_not_split(loader: object) -> None:
    """Raise if a loader gives each process a share already, in a way of its own."""
    samplers = samplers_of(loader)
    samplers += [sampler_in(sampler) for sampler in samplers]
    if any(isinstance(s, DistributedSampler) and s.num_replicas > 1 for s in samplers):
        raise ValueError(
            "the loader has a DistributedSampler, which repeats samples so that every process gets "
            "the same number. fnloop distributes the order itself, each sample once: leave the "
            "sampler out, DataLoader(dataset, batch_size, shuffle=True); or keep it and mark the "
            "loader, sharded(loader)"
        )
    if type(loader).__module__.startswith("accelerate."):
        raise ValueError(
            "the loader was prepared by accelerate, which distributes its batches already: pass "
            "the DataLoader as it was before"
        )


def _open_sharded(
    loader: object,
    seed: int,
    rank: int,
    processes: int,
    total: int | None,
    even: bool,
    alike: bool,
) -> Source:
    __tracebackhide__ = True
    if total is not None:
        raise ValueError(
            f"accumulate(total={total}) distributes the batches of each update to as many "
            "processes as there are, but sharded(...) gives each process its own: pass the loader "
            "without sharded, or write accumulate(n)"
        )
    if processes == 1 and not alike:
        return open_source(loader, seed)
    reopen = functools.partial(open_source, loader, fold_in(seed, rank) if processes > 1 else seed)
    source = reopen()
    reader = _Share(source, reopen, even or source.reader.even, alike)
    sharing = sharing_among(processes, rank, None, reader.even, alike, streams=True)
    sharing.held, sharing.reads_ahead = source.sharing.held, source.sharing.reads_ahead
    source.positions.shards = processes
    length = reader.length_among(processes)
    return Source(reader, seed, length, sharing, source.positions)


class _Share(Reader):
    """How a loader is read that gives each process its own share.

    Args:
        source: this process's share.
        reopen: opens it once more.
        even: whether an epoch ends with the shortest share.
        alike: whether other processes have the same share.
    """

    def __init__(
        self, source: Source, reopen: Callable[[], Source], even: bool, alike: bool
    ) -> None:
        self._source, self._reopen, self.even, self._alike = source, reopen, even, alike

    def length_in(self, epoch: int) -> int | None:
        return self._source.length_in(epoch)

    def length_among(self, processes: int) -> int | None:
        """Return the number of batches in an epoch, of all shares together. A collective."""
        own = self._source.length or 0
        longest, minus_shortest, some_unknown = all_reduce_max(
            [own, -own, self._source.length is None], "the length of a sharded loader"
        )
        return None if some_unknown else int(-minus_shortest if self.even else longest) * processes

    def positions(self) -> Positions:
        return self._source.positions

    def items(self, at: Pass) -> Iterator[Batch]:
        return self._source.read(at.epoch, at.start // at.sharing.processes, 0)

    def read(self, at: Pass) -> Iterator[Batch]:
        own = self.items(at)
        if self._alike:
            own = at.sharing.noting_first(own, at.place)
        if self.even:
            return _until_shortest(own)
        return _pad_to_longest(own, lambda: self._reopen().read(at.epoch, 0, 0))

    def indices(self, at: Pass) -> Iterator[object]:
        assert at.epoch is not None
        return self._source.indices(at.epoch, at.start // at.sharing.processes, 0)


def _until_shortest(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield until the shortest shard ends."""
    __tracebackhide__ = True
    while not any_rank((batch := next(batches, NONE_LEFT)) is NONE_LEFT):
        yield batch


def _pad_to_longest(
    batches: Iterator[Batch], whole: Callable[[], Iterator[Batch]]
) -> Iterator[Batch]:
    """Yield until the longest shard ends; shorter shards are padded with their last batch.

    A run may continue where a shard has ended already. Its last batch is read again then: ``whole``
    gives all of them.
    """
    __tracebackhide__ = True
    last = NONE_LEFT
    while any_rank(
        (batch := next(batches, NONE_LEFT)) is not NONE_LEFT, "the next batch of a sharded loader"
    ):
        if batch is NONE_LEFT and last is NONE_LEFT:
            for last in whole():  # noqa: B007
                pass
        if batch is NONE_LEFT and last is NONE_LEFT:
            raise ValueError(
                "this process's share of the data has no batch, and those of other processes have: "
                "give each process at least one"
            )
        yield Padding(last) if batch is NONE_LEFT else batch
        last = last if batch is NONE_LEFT else batch


# --------------------------------------------------------------------------------------------------
# Windows of batches, fetched and copied to the device ahead of the step.


def windows(
    source: Source,
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
        source: where the batches come from.
        sizes: the most batches of each call, in all processes together; None if the step takes a
            batch, not a tuple.
        device: where they are moved to.
        epoch: the epoch. Without one, for evaluation, the order is always the same and
            ``set_epoch`` is not called.
        batch: the batches of the epoch that were consumed already.
        samples: their samples, if known.
        prefetch: how many windows are fetched ahead. It changes no number.
        late: whether a call gets a :class:`LateWindow` in the place of a tuple, and uses up each
            batch before it asks for the next one. Then ``prefetch`` is 1.

    Raises:
        ValueError: while they are taken: the loader reuses the memory of one that is held.
    """
    held, copies = source.sharing.held, device.type != "cpu"
    holds = not copies and ((sizes is not None and not late) or prefetch > 1)
    held.begin_pass(holds or source.sharing.reads_ahead)
    batches = iter(source.read(epoch, batch, samples))
    if epoch is None:
        batches = source.positions.unmoved(batches)
    if copies or late:  # what the loader gave is used at once
        batches = held.taken(batches, grouped=False)
    if may_need_transfer(device):
        batches = map(_transfer_to(device), batches)
    if sizes is not None:
        numbers = map(source.rounds_of, sizes)
        if late:
            return _grouped_late(batches, numbers, source.sharing)
        batches = _grouped(batches, numbers)
    fed = batches if prefetch == 1 else _prefetched(batches, prefetch)
    return fed if copies else held.taken(fed, grouped=sizes is not None)


def _leaves_of(loader: Loader) -> list[Loader]:
    """Return the loaders that a loader is made of in the end; itself, if it is not composed."""
    loader, _ = unmarked(loader)
    return reader_of(_unprepared(loader.loader if isinstance(loader, sharded) else loader)).leaves()


@contextlib.contextmanager
def unmoved(loaders: object) -> Iterator[None]:
    """Put back what decides which batches loaders give next: positions, generators of their own.

    Args:
        loaders: what ``fit`` takes.
    """
    train, evaluated = read_loaders(loaders)
    every = itertools.chain.from_iterable(map(_leaves_of, (train, *evaluated.values())))
    leaves = [*filter(is_iterable, every)]
    keepers = [keeper for keeper in map(keeper_of, leaves) if keeper is not None]
    positions = [copy.deepcopy(keeper.state_dict()) for keeper in keepers]
    with kept_generators([owner for leaf in leaves for owner in owners_of(leaf)]):
        try:
            yield
        finally:
            for keeper, position in zip(keepers, positions, strict=True):
                keeper.load_state_dict(position)


def first_batches(source: Source, device: torch.device, n: int) -> Iterator[Batch]:
    """Yield the first batches of a pass on a device, and leave the others unread."""
    __tracebackhide__ = True
    reading = windows(source, None, device, None)
    yield from itertools.islice(reading, n)
    if isinstance(reading, Generator):
        reading.close()


def _grouped(batches: Iterator[Batch], sizes: Iterator[int]) -> Iterator[Batch]:
    """Return an iterator of tuples of batches, at most of these sizes.

    Not toolz.partition_all, which requests the next window before it yields one. A loader that
    draws would notice.
    """
    rest = itertools.repeat(batches)
    return itertools.takewhile(len, map(tuple, map(itertools.islice, rest, sizes)))


class LateWindow(Sequence[Batch]):
    """The batches of a window, each fetched when it is asked for; the first one is there already.

    Its length is the number of batches that were fetched, and iterating gives these. A slice has
    fewer where the epoch ends. The generators stay as they were if a fetch positions them.

    Args:
        first: the first batch.
        rest: gives the others, and those of later windows.
        size: how many batches the window has at most.
        sharing: how batches are distributed to processes.

    Attributes:
        padding: for each batch, whether it is padding.
    """

    def __init__(
        self, first: Batch, rest: Iterator[Batch], size: int, sharing: SingleProcess
    ) -> None:
        self._batches: list[Batch] = []
        self._rest, self._size, self._sharing = rest, size, sharing
        self.padding: list[bool] = []
        self._add(first)

    def _add(self, batch: Batch) -> None:
        self._sharing.uniform_batch_size(1)  # it is called once for each round
        self.padding.append(type(batch) is Padding)
        self._batches.append(batch.batch if type(batch) is Padding else batch)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __getitem__(self, index: int | slice) -> Batch:
        __tracebackhide__ = True
        wanted = index.stop if isinstance(index, slice) else index + 1
        while len(self) < min(wanted or 0, self._size):
            with saved_before_seeding() as found:
                try:
                    batch = next(self._rest, NONE_LEFT)
                finally:
                    if found:
                        found[0].install()
            if batch is NONE_LEFT:
                self._size = len(self)
            else:
                self._add(batch)
        return self._batches[index]


def _grouped_late(
    batches: Iterator[Batch], sizes: Iterator[int], sharing: SingleProcess
) -> Iterator[LateWindow]:
    """Return an iterator of windows of batches, of which the first one alone is fetched."""
    __tracebackhide__ = True
    for size in sizes:
        if (first := next(batches, NONE_LEFT)) is NONE_LEFT:
            return
        yield LateWindow(first, batches, size, sharing)


class _Fetched(NamedTuple):
    """The result of one fetch.

    Args:
        window: a window, or ``END``.
        generators: as the fetch left them, if it positioned them.
        error: the exception that it raised, or None.
    """

    window: Batch
    generators: Generators | None
    error: Exception | None = None


def _fetch(windows: Iterator[Batch]) -> _Fetched:
    __tracebackhide__ = True
    before, window, error = seed_all_count(), NONE_LEFT, None
    try:
        window = next(windows, NONE_LEFT)
    except Exception as raised:
        error = raised
    return _Fetched(window, Generators.capture() if seed_all_count() != before else None, error)


def _prefetched(windows: Iterator[Batch], n: int) -> Iterator[Batch]:
    """Yield windows with n of them fetched ahead.

    An error is raised after the windows fetched before it. The generators are with each window as
    if it had been fetched just now: as its own fetch left them, or as the caller left them if a
    fetch does not set them (in workers, from a list).
    """
    __tracebackhide__ = True
    queue: deque[_Fetched] = deque()
    while True:
        with saved_before_seeding() as found:
            try:
                while len(queue) < n and not (queue and queue[-1].window is NONE_LEFT):
                    queue.append(_fetch(windows))
            finally:  # after an interruption too, because the run continues from here
                own = queue[0].generators if queue else None
                if own or found:
                    (own or found[0]).install()
        if queue[0].error is not None:
            raise queue[0].error
        if queue[0].window is NONE_LEFT:
            return
        yield queue.popleft().window


def _transfer_to(device: torch.device) -> Callable[[Batch], Batch]:
    """Return the function that moves a batch to a device.

    On CUDA it copies on a stream of its own, while the device computes.
    """
    move: Callable[[Batch], Batch] = functools.partial(to_device, device=device)
    if device.type == "cuda":
        move = copy_on_side_stream(device)

    def transfer(batch: Batch) -> Batch:
        return Padding(move(batch.batch)) if type(batch) is Padding else move(batch)

    return transfer
