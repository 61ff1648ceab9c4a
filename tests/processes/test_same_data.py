"""Every process has to read the same batches at the same positions; what differs is found."""

import itertools
import random

import numpy as np
import pytest
import torch
from joined import logged, rank, said
from process_data import Stream, batches, samples
from torch.utils.data import DataLoader, Dataset

import fnloop as fl
from fnloop.testing import toy

pytestmark = pytest.mark.slow
read = lambda dataset, **settings: DataLoader(dataset, batch_size=2, **settings)
own_order = lambda items: [*items][::-1] if rank() else [*items]


def still():  # which a worker can be sent
    return 0.0


def by_numpy():
    return np.random.rand()


class Reading(Dataset):
    """Numbers, each with a path of this machine, and what a generator draws. It counts reads."""

    def __init__(self, numbers, noise=still):
        self.numbers, self.noise, self.read = list(numbers), noise, []

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        self.read.append(i)
        return torch.tensor([self.numbers[i], float(self.noise())]), f"/node{rank()}/{i}.png"


def by_rank(epoch, batch):
    yield from own_order(batches(4))[batch:]


def drawn():
    while True:
        yield [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]


own = {"noise": np.random.default_rng().random}
DIFFERENT = {
    "list": lambda: own_order(batches(4)),
    "generator": lambda: lambda: iter(own_order(batches(4))),
    "function": lambda: by_rank,
    "stream": lambda: read(Ordered()),
    "dataset": lambda: read(Reading(own_order(range(9)))),
    "dataset, shuffled": lambda: read(Reading(own_order(range(9))), shuffle=True),
    "dataset, workers": lambda: read(Reading(own_order(range(9))), num_workers=1),
    "dataset, own batches": lambda: DataLoader(Reading(own_order(range(9))), batch_size=None),
    "take": lambda: fl.data.take(read(Reading(own_order(range(9)))), 3),
    "zip": lambda: fl.data.zip_shortest(a=read(Reading(range(9))), b=own_order(batches(4))),
    "endless": lambda: own_endless,
}
SAME = {
    "list": lambda: batches(4),
    "generator": lambda: lambda: iter(batches(4)),
    "drawn from what is seeded": lambda: fl.data.take(drawn, 5),
    "stream": lambda: read(Stream()),
    "shares": lambda: fl.sharded(own_order(batches(4))),
    "dataset": lambda: read(Reading(range(9), lambda: torch.randn(()).item()), shuffle=True),
    "noise of its own": lambda: read(Reading(range(9), **own)),
    "noise of its own, zipped": lambda: fl.data.zip_cycle(a=read(Reading(range(9), **own)), b=[1]),
    "workers": lambda: read(Reading(range(9), by_numpy), num_workers=2),
    "nothing to compare": lambda: [["a", "b"], ["c"], ["d"]][:: -1 if rank() else 1],
    "rounded in another way": lambda: [torch.tensor([1.0, 2.0]) + 1e-7 * rank()] * 3,
}
RANDOM = {
    "an order of its own": lambda: Deck(np.random.default_rng(rank())),
    "read once": lambda: iter(own_order(batches(4)[:10])),
    "other numbers each time": lambda: lambda: iter([torch.randn(2, generator=MINE)] * 4),
}
MINE, WAYS = torch.Generator(), ("fit", "evaluate")


class Deck:
    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return iter([batches(4)[i] for i in self.draw.permutation(10)])


class Ordered(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(own_order(samples()))


def own_endless():
    while True:
        yield from own_order(batches(4))


def loss(model, batch):
    return model.w * 1.0, {"weight": 1}


def outcomes(folder):
    MINE.manual_seed(rank())
    step, found = fl.pipeline()(loss), {}
    tables = {"different": DIFFERENT, "same": SAME, "random": RANDOM}
    rows = ((kind, name, way) for kind in tables for name in tables[kind] for way in WAYS)
    for kind, name, way in rows:
        if (name, way) != ("endless", "evaluate"):
            found[f"{kind}, {name}, {way}"] = attempt(step, tables[kind][name](), way)
    loader = read(Reading(range(20)))
    fl.fit(step, toy(), {"train": loader, "valid": loader}, epochs=3, hooks=())
    return {**found, "read": loader.dataset.read}


def attempt(step, loader, way):
    with logged() as lines:
        fit = lambda: fl.fit(step, toy(), loader, epochs=1, steps=8, hooks=())
        found = said(fit if way == "fit" else lambda: fl.evaluate(step, toy(), loader))
    return found if isinstance(found, str) else [line for line in lines if "same position" in line]


@pytest.mark.parametrize("n", [2, 3])
def test_data_that_differ_fail_the_run(launched, n):
    for mine in launched(outcomes, n):
        for name, way in itertools.product(DIFFERENT, WAYS):
            if (name, way) != ("endless", "evaluate"):
                text = mine[f"different, {name}, {way}"]
                assert "each has the data in another order" in text, name
                assert "process 0 and process 1 have read different batches" in text, name


def test_data_that_are_the_same_do_not(launched):
    for mine in launched(outcomes, 2):
        for name, way in itertools.product(SAME, WAYS):
            assert mine[f"same, {name}, {way}"] == [], name


@pytest.mark.parametrize("name", RANDOM)
def test_an_order_that_no_process_repeats_is_only_said(launched, name):
    first, other = launched(outcomes, 2)
    for way in WAYS:
        (line,) = first[f"random, {name}, {way}"]
        assert line.startswith("process 0 and process 1 have read different batches")
        assert "draws from generators that fnloop does not seed" in line
        assert other[f"random, {name}, {way}"] == []


def test_one_sample_is_read_to_compare_for_each_loader_of_a_run(launched):
    """Twice, to see whether it is the same each time; the train and the valid loader are two."""
    for process, mine in enumerate(launched(outcomes, 2)):
        own = [i for i in range(20) if i // 2 % 2 == process] * 6  # three epochs of each loader
        assert sorted(mine["read"]) == sorted([*own, *[0] * 4])


def evaluated_alone(folder):
    """Process 0 evaluates by itself first; both loaders are DataLoaders."""
    step, state = fl.pipeline()(loss), toy()

    def both():
        if rank() == 0:
            fl.evaluate(step, state, read(torch.arange(8.0)))
        fl.fit(step, state, read(torch.arange(8.0), shuffle=True), epochs=1, hooks=())

    return said(both)


def test_an_evaluation_by_one_process_alone_is_named(launched):
    for text in launched(evaluated_alone, 2):
        assert "process 0 waits in a comparison of the data that evaluate reads" in text
        assert "process 1 waits in the comparison of the pipelines" in text
        assert "in another order" not in text
