"""What comes after a resume: put back where it can be, compared, and said where it differs."""

import time

import attrs
import numpy as np
import pytest
import torch
from resumed import (
    DRAWN,
    SEEN,
    InTurn,
    Own,
    X,
    loss,
    on_disk,
    permuted,
    trained,
    warning_of_a_resume,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

import fnloop as fl
from fnloop.testing import toy

# --- generators of a loader's own


class Named(Own):
    """Its generator has the name that torch's have."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return iter(permuted(self.generator))


class Batched(Sampler):
    """A sampler of batches around another sampler."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return 6

    def __iter__(self):
        order = [*self.inner]
        return iter([order[i : i + 2] for i in range(0, 12, 2)])


class Stream(IterableDataset):
    def __init__(self):
        self.own = np.random.default_rng(0)

    def __iter__(self):
        return iter([X[i] for i in self.own.permutation(12)])


class Loader:
    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(X[self.own.permutation(12)].split(2))


sampled = lambda sampler: DataLoader(X, 2, sampler=sampler)
PUT_BACK = {
    **{name: lambda make=make: sampled(make()) for name, make in DRAWN.items()},
    "generator": lambda: sampled(Named()),
    "within torch's sampler of batches": lambda: DataLoader(
        X, batch_sampler=BatchSampler(DRAWN["numpy"](), 2, drop_last=False)
    ),
    "sampler of batches": lambda: DataLoader(X, batch_sampler=Batched(DRAWN["numpy"]())),
    "stream": lambda: DataLoader(Stream(), 2),
    "loader": Loader,
    "take": lambda: fl.data.take(sampled(DRAWN["numpy"]()), 6),
    "interleave": lambda: fl.data.interleave({"a": sampled(DRAWN["random"]()), "b": Loader()}),
}


@pytest.mark.parametrize("make", PUT_BACK.values(), ids=PUT_BACK)
def test_generators_of_its_own_are_put_back(make, tmp_path, caplog):
    """As a new process does, and as a cell that is run again."""
    whole, _ = trained(make(), epochs=3)
    assert whole[:12] != whole[12:24]
    each = len(whole) // 6  # batches of an epoch
    for steps in (each // 2, each, each + 1, 2 * each, 3 * each - 1):
        first, state = trained(make(), steps=steps)
        rest, _ = trained(make(), on_disk(state, tmp_path), epochs=3)
        assert first + rest == whole
        loader = make()
        first, state = trained(loader, steps=steps)
        again, _ = trained(loader, fl.snapshot(state), epochs=3)
        assert first + again == whole
        if steps % each:
            rest, _ = trained(loader, state, epochs=3)  # which the run in between has moved
            assert first + rest == whole
    assert not caplog.messages


@pytest.mark.parametrize("make", PUT_BACK.values(), ids=PUT_BACK)
def test_an_evaluation_puts_them_back(make):
    def noted(model, batch):
        (read if torch.is_grad_enabled() else evaluated).append(len(SEEN))
        return loss(model, batch)

    def run(loader, **others):
        SEEN.clear()
        for each in (read, evaluated):
            each.clear()
        loaders = {"train": loader, **others}
        fl.fit(fl.pipeline()(noted), toy(lr=0.0), loaders, epochs=3, hooks=())
        size = len(SEEN) // len([*read, *evaluated])
        return [[SEEN[at : at + size] for at in each] for each in (read, evaluated)]

    read, evaluated = [], []
    alone, _ = run(make())
    same = make()
    assert run(same, same=same)[0] == alone
    _, found = run([X[:2]], other=make())
    a, b, c = np.array_split(found, 3)
    assert (a == b).all() and (b == c).all()


class Four(Own):
    def __len__(self):
        return 4


@pytest.mark.parametrize("seed", range(4))  # of the order of the loaders
def test_a_loader_of_loaders_continues_twice_where_one_of_them_has_nothing_left(seed, tmp_path):
    """Then that one is not read again. An epoch has 2 batches of it and 6 others."""
    four = lambda generator: generator.permutation(4).tolist()
    drawn = lambda: DataLoader(X, 2, sampler=Four(np.random.default_rng(0), four))
    make = lambda: fl.data.interleave({"a": [X[:1]] * 6, "b": drawn()})
    begin = lambda: attrs.evolve(toy(lr=0.0), seed=seed)
    whole, _ = trained(make(), begin(), epochs=3)
    for at in range(1, 7):
        loader = make()
        first, state = trained(loader, begin(), steps=at)
        then, state = trained(loader, state, steps=at + 1)
        last, _ = trained(make(), on_disk(state, tmp_path), epochs=3)
        assert first + then + last == whole


def test_an_epoch_that_a_function_makes_a_loader_for_begins_as_it_did(tmp_path):
    make = lambda: Loader()
    whole, _ = trained(make, epochs=2)
    assert whole[:12] == whole[12:]
    for steps in (3, 6, 8):
        first, state = trained(make, steps=steps)
        assert first + trained(make, on_disk(state, tmp_path), epochs=2)[0] == whole


# --- what cannot be put back


class Turns(IterableDataset):
    def __init__(self):
        self.order = InTurn()

    def __iter__(self):
        return iter([X[i] for i in self.order])


class Passes(DataLoader):
    """Keeps one iterator over all epochs, as loaders do whose workers live on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.endless = self.all_of()

    def all_of(self):
        while True:
            yield from super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.endless)


def a_function():
    return iter([X[i] for i in next(a_function.orders)])


def with_a_generator():
    generator = np.random.default_rng()

    def make():
        return iter(X[generator.permutation(4)].split(2))

    return make


ELSEWHERE = {
    "stream": (lambda: DataLoader(Turns(), 2), "Turns"),
    "kept iterator": (lambda: Passes(X[:4], 2, sampler=InTurn()), "Passes"),
    "take": (lambda: fl.data.take(DataLoader(X, 2, sampler=InTurn()), 2), r"take(...)"),
    "zip": (lambda: fl.data.zip_shortest(a=DataLoader(Turns(), 2), b=[X[:2]] * 2), "zip_"),
}


@pytest.mark.parametrize(("make", "name"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_another_order_after_a_resume_has_one_warning(make, name, tmp_path, caplog):
    line = warning_of_a_resume(make, 3, tmp_path, caplog)
    assert f"fit: the training loader ({name}" in line
    assert "Samples may be trained twice in this epoch, and others not at all." in line


def test_what_a_function_draws_by_itself_is_told(tmp_path, caplog):
    for attempt in range(20):  # of 24 orders, one is the same
        _, state = trained(with_a_generator(), steps=1)
        trained(with_a_generator(), on_disk(state, tmp_path / str(attempt)), epochs=1)
    told = [line for line in caplog.messages if "does not resume where it was" in line]
    assert 5 < len(told) <= 20


def test_batches_that_are_objects_are_compared(tmp_path, caplog):
    @attrs.define
    class Sample:
        x: torch.Tensor

    def stream(values):
        return lambda: (Sample(torch.tensor([v])) for v in values)

    _, state = trained(stream([0.0, 1.0, 2.0]), steps=1)
    trained(stream([0.0, 1.0, 2.0]), fl.snapshot(state), epochs=1)
    assert not caplog.messages
    trained(stream([0.0, 2.0, 1.0]), state, epochs=1)
    assert "it gives other batches than before" in caplog.text


# --- what never warns


OWNED = {
    "list": lambda: [*X.split(2)],
    "shuffled": lambda: DataLoader(X, 2, shuffle=True),
    "drop_last": lambda: DataLoader(X, 5, shuffle=True, drop_last=True),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0] * 12, 12)),
    "bucketed": lambda: DataLoader(X, batch_sampler=fl.data.bucketed([1] * 12, batch_size=2)),
    "stream": lambda: (lambda: iter(X.split(2))),
    "drawn": lambda: (lambda: iter(X[torch.randperm(12)].split(2))),
    "take": lambda: fl.data.take(DataLoader(X, 2, shuffle=True), 5),
    "interleave": lambda: fl.data.interleave({
        "a": DataLoader(X, 2, shuffle=True), "b": [X[:1]] * 3,
    }),
    "zip_cycle": lambda: fl.data.zip_cycle(
        a=DataLoader(X, 2, shuffle=True), b=DataLoader(X, 5, shuffle=True)
    ),
    "fixed": lambda: fl.data.fixed(DataLoader(X, 2, shuffle=True), 3),
}  # fmt: skip


@pytest.mark.parametrize("make", OWNED.values(), ids=OWNED)
def test_a_loader_whose_order_is_known_never_warns(make, tmp_path, caplog):
    whole, _ = trained(make(), epochs=5)
    for steps in (1, 2, 4, 7):
        first, state = trained(make(), steps=steps)
        again, state = trained(make(), on_disk(state, tmp_path), steps=steps + 1)
        rest, _ = trained(make(), on_disk(state, tmp_path), epochs=5)
        assert first + again + rest == whole
    assert not caplog.messages


def test_a_position_of_an_older_version_has_no_warning(tmp_path, caplog):
    older = ("epoch", "batch", "shards", "keeper", "state", "next")
    for make in (lambda: DataLoader(X, 2, sampler=InTurn()), lambda: DataLoader(Turns(), 2)):
        _, state = trained(make(), steps=3)
        for position in (None, {name: state.position[name] for name in older}):
            old = attrs.evolve(fl.snapshot(state), position=position)
            trained(make(), on_disk(old, tmp_path), epochs=2)
    trained(DataLoader(X[:8], 2), attrs.evolve(trained([X] * 9, steps=3)[1], position=None))
    assert not caplog.messages


# --- the length of the data


def test_data_of_another_length_are_told_with_both_lengths(tmp_path, caplog):
    """Of 6 batches 4 were trained. Where nothing is left, the epoch ends with these."""
    batches = lambda n: [torch.ones(2)] * n
    _, state = trained(batches(6), steps=4)
    lengths = (2, "2 batches", True), (1, "1 batch", True), (8, "8 batches", False)
    for n, now, ends in lengths:
        caplog.clear()
        seen, reached = trained(batches(n), on_disk(state, tmp_path), epochs=1)
        (line,) = caplog.messages
        assert f"had 6 batches when epoch 1 began, and has {now} now" in line
        assert ("so it ends here, having been trained on 4 batches" in line) is ends
        assert bool(seen) is not ends
        assert reached.epoch == reached.history[-1].epoch == 1
    for steps, n in ((2, 3), (2, 8)):
        caplog.clear()
        _, begun = trained(batches(6), steps=steps)
        trained(batches(n), begun, epochs=1)
        (line,) = caplog.messages
        assert f"had 6 batches when epoch 1 began, and has {n} batches now" in line


def test_a_stream_that_is_shorter_now_is_told(tmp_path, caplog):
    make = lambda n: lambda: iter([torch.ones(1)] * n)
    _, state = trained(make(6), steps=4)
    for n, told in ((6, False), (5, False), (4, True), (2, True)):
        caplog.clear()
        trained(make(n), on_disk(state, tmp_path), epochs=1)
        assert ["It has no batch there." in line for line in caplog.messages] == [True] * told


class Slow(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        time.sleep(1.0 if i == 0 else 0.0)
        return torch.tensor([float(i)])


class SlowStream(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        time.sleep(1.0 if worker == 0 else 0.0)
        return iter(torch.arange(float(worker), 12.0, 2.0)[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("compose", [lambda loader: loader, lambda loader: fl.data.take(loader, 6)])
def test_results_of_workers_are_read_in_order(compose):
    options = {"num_workers": 2, "in_order": False}
    seen, state = trained(compose(DataLoader(Slow(), 2, **options)), steps=3)
    assert seen == [0, 1, 2, 3, 4, 5]
    loader = DataLoader(Slow(), 2, **options)
    assert trained(compose(loader), state, epochs=1)[0] == [6, 7, 8, 9, 10, 11]
    assert loader.in_order is False
    seen, _ = trained(compose(DataLoader(SlowStream(), 2, **options)), epochs=1)
    assert seen == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
