import contextlib
import random
import subprocess
import sys
import types
from collections import namedtuple

import attrs
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import fnloop as fl
from fnloop._backend import transfer
from fnloop._backend.transfer import to_device
from fnloop._core import rng
from fnloop._data.source import open_source
from fnloop.testing import assert_same, toy, toy_loss


class Numbers(Dataset):
    """0, 1, 2, ...; with ``noisy``, plus what each generator draws. It counts what is loaded."""

    def __init__(self, n=10, noisy=False):
        self.n, self.noisy, self.loaded = n, noisy, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.loaded.append(int(i))
        noise = torch.rand(1).item() + np.random.rand() + random.random() if self.noisy else 0.0
        return torch.tensor([float(i) + noise + getattr(self, "offset", 0.0)], dtype=torch.float64)


def batches(loader, seed=0, epoch=0, start=0):
    return [b.flatten().tolist() for b in open_source(loader, seed).batches(epoch, start, 0)]


def loader(noisy=False, **kwargs):
    return DataLoader(Numbers(noisy=noisy), **{"batch_size": 3, "shuffle": True, **kwargs})


def test_order_is_a_function_of_seed_and_epoch():
    first = batches(loader())
    torch.rand(7)
    assert batches(loader()) == first
    assert sorted(x for batch in first for x in batch) == list(range(10))
    assert [len(b) for b in first] == [3, 3, 3, 1]
    assert len({str(batches(loader(), seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_random_augmentation_included(noisy, workers, persistent):
    plain = loader(noisy)
    many = loader(noisy, num_workers=workers, persistent_workers=persistent)
    for epoch in (0, 1, 5):
        assert batches(many, epoch=epoch) == batches(plain, epoch=epoch)


def test_persistent_workers_that_were_left_in_the_middle_start_afresh():
    many = loader(num_workers=2, persistent_workers=True)
    abandoned = open_source(many, 0).batches(0, 0, 0)
    next(abandoned)
    assert batches(many, epoch=1) == batches(loader(), epoch=1)


def test_persistent_workers_can_be_evaluated_in_the_middle_of_their_epoch():
    step = fl.pipeline()(toy_loss)
    states = []
    for many in (loader(), loader(num_workers=1, persistent_workers=True)):
        state = fl.fit(
            step, toy(), (many, many), epochs=2, evaluate_every=fl.every(steps=2), hooks=()
        )
        assert [r.step for r in state.history if "valid/loss" in r.metrics] == [2, 4, 6, 8]
        states.append(state)
    assert_same(*states)


def test_persistent_workers_can_be_read_twice_at_once():
    many = loader(num_workers=1, persistent_workers=True)
    read = lambda: fl.predict(lambda model, batch: batch.flatten().tolist(), toy(), many)
    pairs = list(zip(read(), read(), strict=True))
    assert len(pairs) == 4 and all(one == two for one, two in pairs)


def test_what_was_consumed_is_skipped_by_index_not_by_loading_it():
    data = loader(noisy=True)
    whole = batches(data)
    data.dataset.loaded.clear()
    assert batches(data, start=2) == whole[2:]
    assert len(data.dataset.loaded) == 4


SAMPLERS = {
    "shuffle": lambda d: {"shuffle": True},
    "sequential": lambda d: {"sampler": SequentialSampler(d)},
    "replacement": lambda d: {"sampler": RandomSampler(d, replacement=True, num_samples=50)},
    "weighted": lambda d: {"sampler": WeightedRandomSampler([1.0] * len(d), 20)},
    "own generator": lambda d: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "batch sampler": lambda d: {
        "batch_sampler": BatchSampler(RandomSampler(d), 4, drop_last=True),
        "batch_size": 1,
        "shuffle": None,
    },
    "own sampler": lambda d: {"sampler": Drawing(d)},
    "unbatched": lambda d: {"batch_size": None, "shuffle": True},
}


class Drawing:
    """A sampler of somebody's own, which draws from every global generator as it goes."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 12

    def __iter__(self):
        for _ in range(12):
            yield (random.randrange(10) + int(torch.randint(10, ())) + np.random.randint(10)) % len(
                self.data
            )


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_every_sampler_is_reproducible_resumable_and_draws_nothing_of_the_callers(make):
    data = Numbers(noisy=True)
    kwargs = {"batch_size": 3, **make(data)}
    if kwargs.get("batch_sampler"):
        kwargs.pop("batch_size"), kwargs.pop("shuffle")
    made = DataLoader(data, **kwargs)
    first = batches(made)
    assert batches(made) == first
    assert batches(made, start=2) == first[2:]
    if not isinstance(made.sampler, SequentialSampler) or made.batch_sampler is not None:
        assert batches(made, epoch=1) != first
    with_workers = DataLoader(data, num_workers=2, **kwargs)
    assert batches(with_workers) == first


def test_a_loaders_own_generator_is_not_advanced():
    generator = torch.Generator().manual_seed(3)
    made = loader(generator=generator)
    before = generator.get_state()
    batches(made)
    assert torch.equal(generator.get_state(), before)
    assert made.generator is generator and made.sampler.generator is generator


def test_epochs_are_told_to_samplers_that_want_to_know():
    class Told(SequentialSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    told: list[int] = []
    data = Numbers()
    batches(DataLoader(data, batch_size=3, sampler=Told(data)), epoch=4)
    assert told == [4]


def test_datasets_that_fetch_batches_at_once_and_collates_are_respected():
    class Together(Numbers):
        def __getitems__(self, indices):
            return [torch.tensor([100.0 + i]) for i in indices]

    made = DataLoader(
        Together(4), batch_size=2, collate_fn=lambda items: default_collate(items) * 2
    )
    assert batches(made) == [[200.0, 202.0], [204.0, 206.0]]


def test_a_worker_init_fn_sees_the_dataset():
    many = DataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=look)
    assert batches(many) == [[5.0, 6.0], [7.0, 8.0]]


def look(worker):
    data = torch.utils.data.get_worker_info().dataset
    assert isinstance(data, Numbers) and data.n == 4
    data.offset = 5.0


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(4):
            yield torch.tensor([i + torch.rand(()).item()])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_is_reproducible(workers):
    made = DataLoader(Stream(), batch_size=2, num_workers=workers)
    first = batches(made)
    assert batches(made) == first != batches(made, epoch=1)
    assert batches(made, start=1) == first[1:]


def test_a_generator_function_that_draws_is_reproducible_and_resumable():
    def make():
        for i in range(4):
            yield torch.tensor([i + random.random() + np.random.rand()])

    first = batches(make)
    assert batches(make) == first != batches(make, epoch=1)
    assert batches(make, start=3) == first[3:]


def test_a_resumed_run_with_workers_equals_one_that_was_not_stopped():
    data = TensorDataset(torch.arange(20.0))
    step = fl.pipeline(fl.accumulate(2))(lambda model, batch: toy_loss(model, batch[0]))
    runs = []
    for workers, split in ((0, None), (2, 3), (1, 7)):
        many = DataLoader(data, batch_size=3, shuffle=True, num_workers=workers)
        state = toy(lr=0.01)
        if split:
            state = fl.fit(step, state, many, steps=split, hooks=())
        runs.append(fl.fit(step, state, many, epochs=3, hooks=()))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


# --- placement


Pair = namedtuple("Pair", ["x", "y"])


def test_nested_batches_are_moved_and_keep_their_structure():
    x = torch.ones(2)
    batch = {"pair": Pair(x, [x, (x, "text")]), "n": 3}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair) and moved["n"] == 3 and moved["pair"].y[1][1] == "text"
    assert {
        t.device.type for t in (moved["pair"].x, moved["pair"].y[0], moved["pair"].y[1][0])
    } == {"meta"}


def test_what_is_on_the_cpu_stays_the_same_object():
    batch = [torch.ones(2)]
    assert to_device(batch, torch.device("cpu")) is batch or torch.accelerator.is_available()


def test_prefetch_fetches_so_many_windows_ahead():
    fetched, seen = [], []

    def batches():
        for i in range(5):
            fetched.append(i)
            yield torch.tensor([float(i)])

    def loss(model, batch):
        seen.append((int(batch), max(fetched)))
        return toy_loss(model, batch)

    fl.fit(fl.pipeline()(loss), toy(), batches, hooks=(), prefetch=3)
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4), (4, 4)]


def test_what_goes_wrong_ahead_costs_no_update():
    def batches():
        yield from (torch.ones(1), torch.ones(1), torch.ones(1))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        fl.fit(fl.pipeline()(toy_loss), toy(), batches, hooks=(), prefetch=3)
    assert caught.value.state.step == 3
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="prefetch as an int >= 1"):
            fl.fit(fl.pipeline()(toy_loss), toy(), batches, prefetch=wrong)


# --- copies beside the step


class Opaque:
    """Like a batch of torch_geometric: it moves its tensors by itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        return Opaque(self.x.clone())


class Pairs(list):
    """A list that checks what is in it."""

    def __init__(self, parts):
        super().__init__(parts)
        assert all(isinstance(part, torch.Tensor) for part in self)


def test_the_memory_of_a_batch_that_was_copied_beside_is_followed_or_not_copied_beside(monkeypatch):
    """A tensor made on one stream and used on another has to be recorded there; stand-ins for streams show what is."""
    made, recorded = [], []
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda stream: made.append("beside") or contextlib.nullcontext()
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, stream: recorded.append(t.shape[0])
    )
    monkeypatch.setattr(transfer, "may_need_transfer", lambda device: True)
    copied = transfer.copy_on_side_stream(torch.device("cpu"))
    for batch in ({"x": torch.ones(1), "deep": [(torch.ones(2), "a")]}, Pairs([torch.ones(3)])):
        assert type(copied(batch)) is type(batch)
    assert (recorded, len(made)) == ([1, 2, 3], 2)
    copied((torch.ones(1), Opaque(torch.ones(1))))
    copied(torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]))
    assert (recorded, len(made)) == ([1, 2, 3], 2)


STUCK = """
import ctypes, torch, fnloop as fl
from fnloop.testing import toy, toy_loss

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i > 3:  # what a library may do behind a fork: no signal gets out of it
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)
        return torch.ones(())

loader = torch.utils.data.DataLoader(Stuck(), batch_size=1, num_workers=1, prefetch_factor=8)
print(fl.fit(fl.pipeline()(toy_loss), toy(), loader, steps=2, hooks=()).step)
"""


@pytest.mark.slow
def test_a_worker_that_is_stuck_does_not_keep_python_from_its_end():
    found = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "2\n"


# --- prefetch changes no number


class Halves(IterableDataset):
    """Nine numbers, each with what the generators draw."""

    def __iter__(self):
        for i in range(9):
            yield torch.tensor([i + random.random() + np.random.rand()]) + torch.rand(1)


class Backwards(torch.utils.data.Sampler):
    """A sampler that draws from a global generator."""

    def __iter__(self):
        yield from sorted(range(9), key=lambda i: random.random())

    def __len__(self):
        return 9


class Lazily(Backwards):
    """The same, and at every index."""

    def __iter__(self):
        left = list(range(9))
        while left:
            yield left.pop(random.randrange(len(left)))


def streamed():
    for i in range(9):
        yield torch.tensor([i + random.random()])


SOURCES = {
    "list": lambda: [torch.tensor([float(i)]) for i in range(9)],
    "map-style": lambda: loader(noisy=True, batch_size=2),
    "map-style, dropping": lambda: loader(noisy=True, batch_size=2, drop_last=True),
    "map-style, one by one": lambda: loader(noisy=True, batch_size=None, shuffle=False),
    "map-style, a sampler": lambda: DataLoader(Numbers(9, noisy=True), 2, sampler=Backwards()),
    "map-style, a sampler that draws lazily": lambda: DataLoader(
        Numbers(9, noisy=True), 2, sampler=Lazily()
    ),
    "workers": lambda: loader(noisy=True, batch_size=2, num_workers=1),
    "workers, a sampler that draws lazily": lambda: DataLoader(
        Numbers(9, noisy=True), 2, sampler=Lazily(), num_workers=2
    ),
    "generator function": lambda: streamed,
    "IterableDataset": lambda: DataLoader(Halves(), 2),
    "IterableDataset, workers": lambda: DataLoader(Halves(), 2, num_workers=1),
}


def drawing(drawn):
    """Return a loss function, and a hook, that draw from every generator; what training and hooks draw goes into a list."""

    def draw(noted=True):
        numbers = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        drawn.extend([numbers] * noted)
        return sum(numbers)

    def loss_fn(model, batch):
        return toy_loss(
            model, batch.float() * draw(model.training)
        )  # the parts have more evaluations: closing ones

    def hook(state):
        if state.step % 3 == 1 or "epoch" in state.events:
            draw()
        return state

    return loss_fn, hook


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in SOURCES for case in range(1 if "workers" in name else 4)],
)
def test_prefetch_changes_no_number(name, case, tmp_path):
    chance = random.Random(f"{name} {case}")
    window, split, evaluated = (
        chance.choice([1, 1, 2]),
        chance.randrange(1, 7),
        chance.random() < 0.5,
    )

    def trained(*parts):
        """Train two epochs in parts, each with its prefetch; all but the last end at some update, and are saved."""
        drawn = []
        loss_fn, hook = drawing(drawn)
        step = fl.pipeline(*([fl.accumulate(window)] if window > 1 else []))(loss_fn)
        state = toy()
        for part, prefetch in enumerate(parts, 1):
            end = [
                fl.when(lambda s, part=part: s.step == part * split)(
                    lambda s: attrs.evolve(s, stop="part")
                )
            ]
            loaders = (SOURCES[name](), [torch.ones(1)] * 2 if evaluated else None)
            hooks = (hook, *end) if part < len(parts) else (hook,)
            state = fl.fit(
                step,
                state,
                loaders,
                epochs=2,
                hooks=hooks,
                evaluate_every=fl.every(steps=2),
                prefetch=prefetch,
            )
            if part < len(parts):
                state = attrs.evolve(fl.restore(fl.save(state, tmp_path / "a"), toy()), stop=None)
        return state, drawn

    whole, drawn = trained(1)
    for prefetch in (2, 3):
        state, again = trained(prefetch)
        assert again == drawn
        assert_same(state, whole)
    for parts in ((1, 1), (2, 2), (1, 3), (3, 2, 1)):
        if split * len(parts) < 9:
            state, again = trained(*parts)
            assert again == drawn, parts
            assert_same(state, whole)


def test_an_interrupted_fetch_leaves_the_generators_of_the_next_window():
    """Ctrl-C comes while the third window is fetched ahead; the second is there, with what its own fetch has left."""

    def batches():
        for i in range(3):
            if i == 2 and interrupted:
                interrupted.clear()
                raise KeyboardInterrupt
            yield torch.tensor([random.random()])

    drawn, interrupted = [], []
    step = fl.pipeline()(drawing(drawn)[0])
    whole = fl.fit(step, toy(), batches, hooks=(), prefetch=2)
    straight, drawn[:], interrupted = [*drawn], [], [True]
    state = fl.fit(step, toy(), batches, hooks=(), prefetch=2)
    assert (state.stop, state.step) == ("interrupted", 1)
    state = fl.fit(step, state, batches, epochs=1, hooks=(), prefetch=2)
    assert drawn == straight
    assert_same(state, whole)


@pytest.mark.parametrize(
    ("make", "prefetch"), [(loader, 1), (lambda: [torch.ones(1)] * 4, 3)], ids=["one", "a list"]
)
def test_where_a_fetch_ahead_sets_no_generator_none_is_looked_at(make, prefetch, monkeypatch):
    def looking():
        looks.append(prefetch)
        return capture()

    looks, capture = [], rng.Generators.capture
    monkeypatch.setattr(rng.Generators, "capture", looking)
    assert fl.fit(fl.pipeline()(toy_loss), toy(), make(), epochs=1, hooks=()).step == 4
    usual = len(looks)  # what the run itself borrows and gives back
    looks.clear()
    assert (
        fl.fit(fl.pipeline()(toy_loss), toy(), make(), epochs=1, hooks=(), prefetch=prefetch).step
        == 4
    )
    assert len(looks) == usual == 1


# --- a dataset that raises StopIteration


class AtItsEnd(Dataset):
    """One that reads a handle, which is used up at one sample."""

    def __init__(self, n=8):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return next(iter(())) if i == 3 else torch.ones(())


class AllAtOnce(AtItsEnd):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def collate_none(samples):
    return next(iter(()))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda w: DataLoader(AtItsEnd(), 2, num_workers=w),
            "AtItsEnd raised StopIteration for sample 3",
        ),
        (
            lambda w: DataLoader(AtItsEnd(), None, num_workers=w),
            "AtItsEnd raised StopIteration for sample 3",
        ),
        (
            lambda w: DataLoader(AllAtOnce(), 2, num_workers=w),
            r"AllAtOnce raised StopIteration for samples \[2, 3\]",
        ),
        (
            lambda w: DataLoader(AtItsEnd(3), 3, collate_fn=collate_none, num_workers=w),
            r"the collate_fn of AtItsEnd raised StopIteration for samples \[0, 1, 2\]",
        ),
    ],
    ids=["dataset", "without batches", "__getitems__", "collate_fn"],
)
def test_a_stop_iteration_in_a_dataset_is_an_error_with_any_number_of_workers(
    make, message, workers
):
    with pytest.raises(RuntimeError, match=message):
        fl.fit(fl.pipeline()(toy_loss), toy(), make(workers), hooks=())
