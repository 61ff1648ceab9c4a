"""A loader that fills one buffer again is refused, wherever two of its batches would be held."""

import dataclasses
import itertools
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fnloop as fl
from fnloop._data import held
from fnloop.data import interleave, leave_out, take, zip_shortest
from fnloop.extend import Source
from fnloop.testing import toy

CPU = torch.device("cpu")
REUSED = r"the loader reuses a tensor for its next batch, but .* make a new one for each \("
VALUES = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def by_numpy(values=VALUES, wrap=torch.from_numpy):
    buffer = np.empty((2, 1), np.float32)
    for v in values:
        buffer[:] = v
        yield wrap(buffer)


def by_torch(values=VALUES, wrap=lambda t: t):
    buffer = torch.empty(2, 1)
    for v in values:
        yield wrap(buffer.fill_(v))


def beside_the_count(values=VALUES):
    """What torch does not count: written through another view of the memory."""
    buffer = torch.empty(2, 1)
    for v in values:
        buffer.data.fill_(v)
        yield buffer


@dataclasses.dataclass
class Record:
    name: str
    x: object


@attrs.define  # with slots
class Slots:
    x: object


CONTAINERS = {
    "tuple": lambda x: (x, 1), "mapping": lambda x: {"id": [1], "x": x},
    "nested": lambda x: [{"a": ({"b": [x]},)}], "dataclass": lambda x: Record("a", x),
    "slots": Slots, "object": lambda x: SimpleNamespace(parts={"x": [x]}),
    "array": lambda x: x.numpy(), "the second of two": lambda x: (torch.zeros(3), x),
}  # fmt: skip


def first_of(batch):
    found = [leaf for leaf in held.memory_in(batch) if len(leaf) == 2]
    return torch.as_tensor(found[0])


def trained(loader, *members, prefetch=1):
    """Return what the loss function sees of each batch."""
    seen = []

    def loss(model, batch):
        seen.append(float(first_of(batch)[0, 0]))
        return model.w * first_of(batch).mean(), {"weight": 1}

    fl.fit(fl.pipeline(*members)(loss), toy(), loader, epochs=1, hooks=(), prefetch=prefetch)
    return seen


def told(loader, rank=0, processes=1, **given):
    """Return what a process sees of its batches."""
    return [float(first_of(b)[0, 0]) for b in read(loader, rank, processes, **given)]


def read(loader, rank=0, processes=1, sizes=None, prefetch=1):
    source = Source.open(loader, 0, rank, processes)
    return source.windows(sizes and itertools.repeat(sizes), CPU, prefetch=prefetch)


FILLED = {"numpy": by_numpy, "torch": by_torch, "beside torch's count": beside_the_count}


@pytest.mark.parametrize("fill", FILLED.values(), ids=FILLED)
def test_a_buffer_that_is_filled_again_is_refused_where_two_batches_are_held(fill):
    assert trained(fill) == VALUES  # each is used before the next one is read
    for members, prefetch in [((fl.accumulate(2),), 1), ((), 2), ((fl.accumulate(3),), 4)]:
        seen = []
        with pytest.raises(ValueError, match=REUSED) as caught:
            seen += trained(fill, *members, prefetch=prefetch)
        assert caught.value.state.step == 0
        assert seen == []
    for rank in (0, 1):
        with pytest.raises(ValueError, match=REUSED):
            told(fill, rank, 2)


@pytest.mark.parametrize("wrap", CONTAINERS.values(), ids=CONTAINERS)
def test_in_any_container(wrap):
    for fill in (by_torch, lambda wrap: by_numpy(wrap=lambda x: wrap(torch.from_numpy(x)))):
        assert trained(lambda fill=fill: fill(wrap=wrap)) == VALUES
        with pytest.raises(ValueError, match=REUSED):
            trained(lambda fill=fill: fill(wrap=wrap), fl.accumulate(2))


class Stream(IterableDataset):
    def __iter__(self):
        return by_numpy()


class Own:
    def __len__(self):
        return 6

    def __iter__(self):
        return by_numpy()


class Rows(Dataset):
    """Every row is a batch, in one buffer."""

    def __init__(self):
        self.buffer = np.empty((2, 1), np.float32)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        self.buffer[:] = i + 1
        return self.buffer


class Collate:
    """Puts the samples of every batch into one buffer."""

    def __init__(self):
        self.buffer = torch.empty(2, 1)

    def __call__(self, samples):
        return torch.stack(samples, out=self.buffer)


def collated(collate=None, sign=1):
    samples = sign * torch.arange(1.0, 7.0).repeat_interleave(2)[:, None]
    return DataLoader(samples, 2, collate_fn=collate or Collate())


LOADERS = {
    "a loader of one's own": Own,
    "a stream": lambda: DataLoader(Stream(), batch_size=None),
    "rows": lambda: DataLoader(Rows(), batch_size=None, collate_fn=torch.from_numpy),
    "collate_fn": collated,
    "take": lambda: take(by_numpy, 6),
    "take of collate_fn": lambda: take(collated(), 6),
    "leave_out": lambda: leave_out(Own(), lambda epoch, batch: False),
    "sharded": lambda: fl.sharded(Own()),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_whatever_reads_it(make):
    assert trained(make()) == told(make()) == VALUES
    for members, prefetch in [((fl.accumulate(2),), 1), ((), 2)]:
        with pytest.raises(ValueError, match=REUSED):
            trained(make(), *members, prefetch=prefetch)


def test_two_loaders_that_share_a_buffer_are_refused_where_both_are_in_a_batch():
    collate = Collate()
    both = zip_shortest(a=collated(collate), b=collated(collate, -1))
    for readers in (lambda: list(both), lambda: list(read(both))):
        with pytest.raises(ValueError, match=REUSED):
            readers()
    assert len(list(read(zip_shortest(a=collated(), b=collated(sign=-1))))) == 6
    in_turn = interleave({"a": collated(collate), "b": collated(collate, -1)})
    assert sorted(map(abs, told(in_turn))) == sorted(2 * VALUES)


# --- not one buffer, and not from the beginning


def in_turn(n, ahead=0):
    """Fill n buffers in turn, some of them ahead of what is given."""
    buffers = np.empty((n, 2, 1), np.float32)
    for i in range(-ahead, 8):
        if i + ahead < 8:
            buffers[(i + ahead) % n] = i + ahead + 1
        if i >= 0:
            yield torch.from_numpy(buffers[i % n])


@pytest.mark.parametrize(("buffers", "ahead", "held"), [
    (2, 0, 2), (3, 0, 3), (4, 0, 4), (2, 1, 1), (3, 1, 2), (4, 1, 3),
])  # fmt: skip
def test_as_many_buffers_as_batches_are_held_are_enough(buffers, ahead, held):
    make, values = lambda: in_turn(buffers, ahead), [float(i) for i in range(1, 9)]
    assert trained(make, fl.accumulate(held)) == values
    assert trained(make, prefetch=held) == values
    with pytest.raises(ValueError, match=REUSED):
        trained(make, fl.accumulate(held + 1))
    with pytest.raises(ValueError, match=REUSED):
        trained(make, prefetch=held + 1)


def test_a_buffer_for_each_shape_is_found_later():
    def make(shapes):
        buffers = {shape: np.empty(shape, np.float32) for shape in ((2, 1), (2, 2))}
        for v, shape in enumerate(shapes, 1):
            buffers[shape][:] = v
            yield torch.from_numpy(buffers[shape])

    a, b = (2, 1), (2, 2)
    assert trained(lambda: make([a, b, a, b]), fl.accumulate(2)) == [1.0, 2.0, 3.0, 4.0]
    for shapes in ([a, b, a, a], [a, b, b, b]):
        with pytest.raises(ValueError, match=REUSED) as caught:
            trained(lambda shapes=shapes: make(shapes), fl.accumulate(2))
        assert caught.value.state.step == 1


def test_what_is_written_by_torch_is_found_whenever_it_begins():
    def make():
        for v in range(1, 9):
            yield torch.full((2, 1), float(v))
        yield from by_torch()

    with pytest.raises(ValueError, match=REUSED) as caught:
        trained(make, fl.accumulate(2))
    assert caught.value.state.step == 4


# --- what is allowed


def test_what_is_given_again_and_slices_that_overlap_stay_as_they_are():
    one = torch.full((2, 1), 3.0)
    many = torch.arange(8.0)[:, None]
    cases = {
        "one array again": (lambda: iter([one] * 6), [3.0] * 6),
        "a list": ([one] * 6, [3.0] * 6),
        "views": (lambda: (one.view(2, 1) for _ in range(6)), [3.0] * 6),
        "slices": (lambda: (many[i : i + 2] for i in range(6)), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        "filled with the same": (lambda: by_numpy([7.0] * 6), [7.0] * 6),
        "not a number": (lambda: iter([one * torch.nan] * 2), None),
    }
    for name, (make, expected) in cases.items():
        for members, prefetch in [((fl.accumulate(2),), 1), ((), 3)]:
            seen = trained(make, *members, prefetch=prefetch)
            assert expected is None or seen == expected, name


def test_a_loss_function_may_write_into_its_batch():
    """Also where the next batch, which is fetched already, overlaps with it: as in a plain loop."""

    def seen_by(read, write):
        many, found = torch.arange(6.0)[:, None], []

        def loss(model, batch):
            found.append(float(batch[0, 0]))
            batch += write
            return model.w * batch.detach().mean()

        read(loss, lambda: (many[i : i + 2] for i in range(5)))
        return found

    def plain(loss, make):
        for batch in [*make()]:
            loss(toy().model, batch)

    def fitted(loss, make, *members, **given):
        fl.fit(fl.pipeline(*members)(loss), toy(), make, epochs=1, hooks=(), **given)

    for write in (0.0, 10.0):
        expected = seen_by(plain, write)
        assert seen_by(fitted, write) == expected == [0.0, *(i + write for i in range(1, 5))]
        assert seen_by(lambda *a: fitted(*a, fl.accumulate(2)), write) == expected
        assert seen_by(lambda *a: fitted(*a, prefetch=3), write) == expected


# --- what it costs


def test_a_loader_of_new_batches_is_compared_only_at_the_beginning(monkeypatch):
    counted, checksum = [], held._checksum
    monkeypatch.setattr(held, "_checksum", lambda value: counted.append(1) or checksum(value))
    fresh = lambda: (torch.full((2, 1), float(i)) for i in range(64))
    kept = [torch.full((2, 1), float(i)) for i in range(64)]
    for loader, members, expected in (
        (fresh, (), 0),  # nothing is held
        (kept, (fl.accumulate(4),), 0),  # no code of the user's runs
        (DataLoader(torch.zeros(128, 1), 2), (fl.accumulate(4),), 0),  # stacked by torch
        (fresh, (fl.accumulate(4),), 8),  # four batches, twice
        (lambda: iter(kept), (fl.accumulate(4),), 8),
    ):
        counted.clear()
        trained(loader, *members)
        assert len(counted) == expected
