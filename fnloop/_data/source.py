"""Sources: loaders as a function of (seed, epoch, position), fetched ahead of the step."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, cast

import attrs
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from fnloop._backend.collectives import all_reduce_max, any_rank
from fnloop._backend.containers import copy_on_side_stream, may_need_transfer, to_device
from fnloop._core.rng import Generators, fold_in, isolated, saved_before_seeding, seed_all_count
from fnloop._core.runs import Position
from fnloop._core.types import Batch, name_of
from fnloop._data.composed import (
    Composed,
    Indices,
    Pass,
    contents_of,
    fetch,
    indices_of,
    is_map_style,
    no_indices,
    seen,
    size_of,
    unmarked,
    window_of,
)
from fnloop._data.iterable import as_torch_reads_it, iterate, owners_of
from fnloop._data.loaders import (
    NONE_LEFT,
    First,
    Glimpse,
    OwnStreams,
    Padding,
    RoundRobin,
    SingleProcess,
    Window,
    batch_size_of,
    glimpse,
    is_iterable,
    noting_first,
    sampling_first,
    sharded,
    sharing_among,
)
from fnloop._data.map_style import (
    Bucketed,
    batch_sampler_of,
    how_read,
    is_sized,
    length_of,
    makes_new,
    map_style,
    sampler_in,
    samplers_of,
    samplers_of_user,
)
from fnloop._data.position import Positions

# --------------------------------------------------------------------------------------------------
# Sources: loaders opened so that what they yield is a function of (seed, epoch, position).
#
# A map-style `DataLoader` is read by its parts, see `map_style`. Any other iterable is iterated,
# see `iterable`; to continue in the middle, it is given the position that it had there, or else
# consumed up to there. When there are several processes, the batches are distributed round-robin.


@attrs.frozen
class Source:
    """A loader opened for a run.

    Args:
        read: ``(epoch, batch, samples) -> this process's batches of that epoch``, from that
            position on. :meth:`batches` gives the same, and :func:`windows` what a step takes.
        length: batches that the loader has in an epoch, for all processes together; None if unknown
            before its end. If epochs differ, that of epoch 0.
        sharing: how the batches are distributed to the processes.
        batch_size: samples in a batch, if all batches but the last have one known size. Then a
            position may be given in samples.
        samples: samples in an epoch, if ``batch_size`` is known.
        drop_last: whether an incomplete last round is left out.
        lengths: the length of an epoch by its number, if epochs may differ.
        positions: where the loader is, if it says so.
        indices: which samples the batches of this process have, where they are taken by index.
        reopen: opens the same loader once more.
        what: whose data they are, as errors name them when the processes compare what they read.
        how_read: the class of the data, and whether a batch of them is read at once; None where a
            loader makes its batches itself, or in workers.
    """

    read: Callable[[int | None, int, int], Iterator[Batch]]
    length: int | None
    sharing: SingleProcess
    batch_size: int | None = None
    samples: int = 0
    drop_last: bool = False
    lengths: Callable[[int], int | None] | None = None
    positions: Positions = attrs.field(factory=Positions)
    indices: Indices = no_indices
    reopen: Callable[[], Source] | None = None
    what: str = "the data"
    how_read: Callable[[], tuple[str, bool] | None] = lambda: None

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
        return self.length if self.lengths is None else self.lengths(epoch)

    def left(self, epoch: int, batch: int, samples: int) -> int | None:
        """Return how many batches of an epoch are left at a position."""
        if self.batch_size and samples:
            return self.sharing.kept(self.batches_of(max(self.samples - samples, 0)))
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

    def batches_of(self, samples: int) -> int:
        """Return how many batches a number of samples makes."""
        assert self.batch_size is not None
        if self.drop_last:
            complete = self.sharing.complete
            return samples // (self.batch_size * complete) * complete
        return math.ceil(samples / self.batch_size)

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
        """Return why an epoch has no batch, although the loader may have one."""
        if self.sharing.kept(1) == 0:
            return (
                "With even(loader), an epoch has no batch unless each of "
                f"{self.processes} processes has one: make batches smaller."
            )
        per_process = f"{self.batch_size} on each of {self.sharing.complete} processes"
        together = per_process if self.sharing.complete > 1 else f"{self.batch_size}"
        return (
            f"It has {self.samples} samples, and with drop_last an update takes {together}: make "
            "batches smaller."
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
    given = loader
    loader, even = unmarked(loader)
    window = None if total is None else window_of(_unprepared(loader), total)
    if isinstance(loader, sharded):
        return _open_sharded(loader.loader, seed, rank, processes, even, alike)
    if processes > 1 or alike:
        _check_not_split(loader)
    _check_not_nested(loader)
    loader = _unprepared(loader)
    sharing = sharing_among(processes, rank, window, even, alike)
    sharings = (processes, rank, window, even)
    reopen = functools.partial(open_source, given, seed, rank, processes, total, alike)
    if isinstance(loader, Composed):
        source = _open_composed(loader, seed, sharing)
        indices = indices_of(loader, seed, sharings, source.positions)
        return attrs.evolve(source, indices=indices, reopen=reopen)
    if is_map_style(loader):

        def indexed(epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
            return map_style(loader, seed, epoch, batch, samples, sharing, positions)

        users = samplers_of_user(loader)
        name = type(users[0] if users else loader).__name__
        measure, owners = functools.partial(_size_of, loader), samplers_of(loader)
        positions = Positions(name, measure, contents=None, owners=owners)
        indices = indices_of(loader, seed, sharings, positions)
        how = functools.partial(how_read, loader)
        source = Source(
            indexed, length_of(loader), sharing, positions=positions, indices=indices,
            reopen=reopen, how_read=how,
        )  # fmt: skip
        if not is_sized(loader):
            return source
        batched = cast(BatchSampler, loader.batch_sampler)
        source = attrs.evolve(
            source, batch_size=batched.batch_size, samples=len(batched.sampler),  # type: ignore[arg-type]
            drop_last=batched.drop_last,
        )  # fmt: skip
        return attrs.evolve(source, length=source.batches_of(source.samples))
    if type(loader) in (list, tuple):  # no code of the user's runs: there is nothing to position
        listed = cast("list[Batch]", loader)

        def sliced(epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
            positions.open(epoch, batch)
            positions.compare(epoch, batch, listed[batch] if batch < len(listed) else NONE_LEFT)
            share = sharing.split(itertools.islice(listed, batch, None), batch_size_of)
            return noting_first(share, sharing, (epoch, batch, samples))

        positions = Positions("a list", functools.partial(_size_of, listed), listed=listed)
        return Source(sliced, len(listed), sharing, positions=positions, reopen=reopen)

    read = loader.dataset if as_torch_reads_it(loader) else loader
    name = type(read).__name__ if is_iterable(read) else name_of(read)
    owners = owners_of(loader) if is_iterable(loader) else ()
    positions = Positions(name, functools.partial(_size_of, loader), owners=owners)

    def iterated(epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        batches = iterate(loader, seed, epoch, batch, positions)
        if not makes_new(loader):
            batches = sharing.held.watched(batches)
        share = sharing.split(batches, batch_size_of, counts=True)
        return noting_first(share, sharing, (epoch, batch, samples))

    return Source(iterated, length_of(loader), sharing, positions=positions, reopen=reopen)


def _open_composed(loader: Composed, seed: int, sharing: SingleProcess) -> Source:
    __tracebackhide__ = True
    for leaf in loader.leaves():
        _check_not_nested(leaf)
        if isinstance(sharing, RoundRobin):
            _check_not_split(leaf)

    def composed(epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        items = lambda: loader.items(Pass(seed, epoch, batch, sharing))
        noted = positions.noting(items, epoch, batch)
        share = sharing.split(noted, size_of, counts=True)
        make = functools.partial(fetch, held=sharing.held)
        if not isinstance(sharing, RoundRobin):
            return make(share)
        return sampling_first(share, sharing, (epoch, batch, samples), seen, make)

    sharing.reads_ahead = True
    asked = [each for each in loader.leaves() if is_map_style(each) and each.num_workers]
    ahead = sum((each.prefetch_factor or 0) * each.num_workers + 1 for each in asked)
    name = f"{loader.call}(...)"
    ahead = sharing.processes * (ahead + 1)
    owners = [*filter(is_iterable, loader.leaves())]
    positions = Positions(name, contents=contents_of, ahead=ahead, owners=owners)
    length = loader.length_in(0)
    return Source(composed, length, sharing, lengths=loader.length_in, positions=positions)


def _size_of(loader: object) -> tuple[int, str] | None:
    """Return how many samples or batches a loader has, and of which of the two, if it is known."""
    if is_map_style(loader) and is_sized(loader):
        batched = cast(BatchSampler, loader.batch_sampler)
        return len(batched.sampler), "samples"  # type: ignore[arg-type]
    length = length_of(loader)
    return None if length is None else (length, "batches")


def _unprepared(loader: object) -> object:
    """Return the DataLoader inside one that accelerate has prepared for a single process.

    Accelerate's own reads a batch ahead, and moves batches to a device, which happens here anyway.
    """
    is_prepared = type(loader).__module__.startswith("accelerate.")
    skips = getattr(loader, "skip_batches", 0)
    return loader if skips or not is_prepared else getattr(loader, "base_dataloader", loader)


def _check_not_nested(loader: object) -> None:
    """Raise if a DataLoader makes batches of batches."""
    batches = batch_sampler_of(loader)
    others = [sampler for sampler in samplers_of(loader) if sampler is not batches]
    if batches is not None and any(isinstance(each, Bucketed) for each in others):
        raise ValueError(
            "bucketed makes batches, and this DataLoader would make batches of them: write "
            "DataLoader(dataset, batch_sampler=bucketed(...))"
        )


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
    loader: object, seed: int, rank: int, processes: int, even: bool, alike: bool
) -> Source:
    if processes == 1 and not alike:
        return open_source(loader, seed)
    reopen = functools.partial(open_source, loader, fold_in(seed, rank) if processes > 1 else seed)
    source = reopen()

    def batches(epoch: int | None, batch: int, samples: int) -> Iterator[Batch]:
        own = source.read(epoch, batch // processes, 0)
        if alike:
            own = _noting_head(own, sharing, (epoch, batch, samples))
        if even:
            return _until_shortest(own)
        return _pad_to_longest(own, lambda: reopen().read(epoch, 0, 0))

    own = 0 if source.length is None else source.length
    longest, minus_shortest, some_unknown = all_reduce_max(
        [own, -own, source.length is None], "the length of a sharded loader"
    )
    length = None if some_unknown else int(-minus_shortest if even else longest) * processes

    def indices(epoch: int, batch: int, samples: int) -> Iterator[object]:
        return source.indices(epoch, batch // processes, 0)

    source.positions.shards = processes
    sharing = (OwnStreams if alike else RoundRobin)(rank, processes, even=even)
    sharing.held, sharing.reads_ahead = source.sharing.held, source.sharing.reads_ahead
    return Source(batches, length, sharing, positions=source.positions, indices=indices)


def _noting_head(
    own: Iterator[Batch], sharing: RoundRobin, at: tuple[int | None, int, int]
) -> Iterator[Batch]:
    """Yield the batches of a process's own stream, and note what is seen of the first one."""
    __tracebackhide__ = True
    for batch in own:
        sharing.first = First(glimpse(batch), at)
        yield batch
        break
    yield from own


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


class LateWindow:
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
