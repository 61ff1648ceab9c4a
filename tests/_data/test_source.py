"""The order of batches, and resuming, for every kind of loader."""

import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from numbered import Numbers, batches, loader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler
from toy_runs import fit

import fnloop as fl
from fnloop.extend import Source
from fnloop.testing import assert_same, toy


def test_order_is_a_function_of_seed_and_epoch():
    first = batches(loader())
    torch.rand(7)
    assert batches(loader()) == first
    assert sorted(x for batch in first for x in batch) == list(range(10))
    assert [len(b) for b in first] == [3, 3, 3, 1]
    assert len({str(batches(loader(), seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_an_evaluation_begins_with_the_first_sample():
    found = Source.open(loader(shuffle=False), 0).windows(None, torch.device("cpu"), None)
    assert torch.cat([batch.flatten() for batch in found]).tolist() == [*range(10)]


class Noise(Dataset):
    """The same sample each time, but for what is drawn."""

    def __getitem__(self, index):
        return torch.rand(())

    def __len__(self):
        return 6


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_each_batch_of_an_epoch_draws_numbers_of_its_own(workers):
    source = Source.open(DataLoader(Noise(), 2, num_workers=workers), 0)
    drawn = [batch.tolist() for batch in source.batches(0, 0, 0)]
    assert len({number for batch in drawn for number in batch}) == 6
    assert [batch.tolist() for batch in source.batches(0, 2, 0)] == drawn[2:]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_random_augmentation_included(workers, persistent):
    many = loader(noisy=True, num_workers=workers, persistent_workers=persistent)
    for epoch in (0, 1, 5):
        next(Source.open(many, 0).batches(epoch, 0, 0))  # abandoned: the next one starts afresh
        assert batches(many, epoch=epoch) == batches(loader(noisy=True), epoch=epoch)


@pytest.mark.slow
def test_persistent_workers_can_be_read_twice_at_once_and_evaluated_within_an_epoch():
    many = loader(num_workers=1, persistent_workers=True)
    read = lambda: fl.predict(lambda model, batch: batch.flatten().tolist(), toy(), many)
    pairs = list(zip(read(), read(), strict=True))
    assert len(pairs) == 4 and all(one == two for one, two in pairs)
    often = {"epochs": 2, "evaluate_every": fl.every(steps=2)}
    states = [fit(loaders=(both, both), **often) for both in (loader(), many)]
    assert [r.step for r in states[1].history if "valid/loss" in r.metrics] == [2, 4, 6, 8]
    assert_same(*states)


SAMPLERS = {
    "shuffle": lambda d: {"shuffle": True},
    "sequential": lambda d: {"sampler": SequentialSampler(d)},
    "replacement": lambda d: {"sampler": RandomSampler(d, replacement=True, num_samples=50)},
    "weighted": lambda d: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * len(d), 20)},
    "own generator": lambda d: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "batch sampler": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 4, drop_last=True)},
    "own sampler": lambda d: {"sampler": Drawing(d)},
    "unbatched": lambda d: {"batch_size": None, "shuffle": True},
}


class Drawing:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 12

    def __iter__(self):
        for _ in range(12):
            drawn = random.randrange(10) + int(torch.randint(10, ())) + np.random.randint(10)
            yield drawn % len(self.data)


def sampled(make, **kwargs):
    data = Numbers(noisy=True)
    settings = make(data)
    size = {} if "batch_sampler" in settings else {"batch_size": 3}
    return DataLoader(data, **{**size, **settings}, **kwargs)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(4):
            yield torch.tensor([i + torch.rand(()).item()])


def drawing():
    for i in range(4):
        yield torch.tensor([i + random.random() + np.random.rand()])


STREAMS = {
    "dataset": lambda: DataLoader(Stream(), 2), "function": lambda: drawing,
    "workers": lambda: DataLoader(Stream(), 2, num_workers=2),
}  # fmt: skip


@pytest.mark.parametrize("make", [
    *(pytest.param(partial(sampled, make), id=name) for name, make in SAMPLERS.items()),
    *(pytest.param(make, id=name, marks=[pytest.mark.slow] * (name == "workers"))
      for name, make in STREAMS.items()),
])  # fmt: skip
def test_every_sampler_and_stream_is_reproducible_and_resumable(make):
    made = make()
    first = batches(made)
    assert batches(made) == first != batches(made, epoch=1)  # the samples are noisy
    for start in (1, 2):
        assert batches(made, start=start) == first[start:]


@pytest.mark.slow
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_workers_change_nothing_with_any_sampler(make):
    assert batches(sampled(make, num_workers=2)) == batches(sampled(make))


def test_a_loaders_own_generator_is_not_advanced():
    generator = torch.Generator().manual_seed(3)
    made = loader(generator=generator)
    before = generator.get_state()
    batches(made)
    assert torch.equal(generator.get_state(), before)
    assert made.generator is generator and made.sampler.generator is generator


def test_set_epoch_is_called_on_samplers_that_have_it():
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

    double = lambda items: torch.utils.data.default_collate(items) * 2
    assert batches(DataLoader(Together(4), 2, collate_fn=double)) == [[200, 202], [204, 206]]


@pytest.mark.slow
def test_a_worker_init_fn_sees_the_dataset():
    many = DataLoader(Numbers(4), batch_size=2, num_workers=1, worker_init_fn=look)
    assert batches(many) == [[5.0, 6.0], [7.0, 8.0]]


def look(worker):
    data = torch.utils.data.get_worker_info().dataset
    assert isinstance(data, Numbers) and data.n == 4
    data.first = 5


STUCK = """
import ctypes, torch, fnloop as fl
from fnloop.testing import toy, toy_loss

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i > 3:  # what a library may do after a fork: no signal gets through
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex), libc.pthread_mutex_lock(mutex)
        return torch.ones(())

loader = torch.utils.data.DataLoader(Stuck(), batch_size=1, num_workers=1, prefetch_factor=8)
print(fl.fit(fl.pipeline()(toy_loss), toy(), loader, steps=2, hooks=()).step)
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_stuck_worker_does_not_keep_python_from_exiting():
    command, streams = [sys.executable, "-c", STUCK], {"capture_output": True, "text": True}
    assert subprocess.run(command, **streams, timeout=60, check=True).stdout == "2\n"


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_without_samples_gives_no_batch(shuffle):
    sampler = [] if shuffle else None  # torch shuffles no empty dataset
    loader = DataLoader(TensorDataset(torch.empty(0, 2)), 4, sampler=sampler)
    assert list(Source.open(loader, 0).batches(0, 0, 0)) == []
