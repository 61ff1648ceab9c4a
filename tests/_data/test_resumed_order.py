"""What comes after a resume: put back where it can be, compared, and said where it differs."""

import random
import time

import attrs
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

import fnloop as fl
from fnloop._backend.containers import memory_in
from fnloop._data.source import open_source
from fnloop._loop.beginning import check_length
from fnloop.testing import toy

X = torch.arange(12.0)
SEEN = []


def loss(model, batch):
    found = torch.cat([part.flatten() for part in memory_in(batch)])
    SEEN.extend(found.int().tolist())
    return model.w * found.mean(), {"weight": 1}


def trained(loader, state=None, **target):
    """Return the samples that an epoch, or more, trains; and the state."""
    SEEN.clear()
    state = fl.fit(fl.pipeline()(loss), state or toy(lr=0.0), loader, hooks=(), **target)
    return [*SEEN], state


def on_disk(state, folder):
    return fl.restore(fl.save(state, folder / "a"), toy(w=9.0))


# --- generators of a loader's own


class Own(Sampler):
    def __init__(self, generator, draw):
        self.own, self.draw = generator, draw

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(self.draw(self.own))


def by_python(generator):
    order = [*range(12)]
    generator.shuffle(order)
    return order


permuted = lambda generator: generator.permutation(12).tolist()
DRAWN = {
    "numpy": lambda: Own(np.random.default_rng(0), permuted),
    "numpy, SFC64": lambda: Own(np.random.Generator(np.random.SFC64(0)), permuted),
    "numpy, MT19937": lambda: Own(np.random.Generator(np.random.MT19937(0)), permuted),
    "RandomState": lambda: Own(np.random.RandomState(0), permuted),
    "random": lambda: Own(random.Random(0), by_python),
    "torch": lambda: Own(
        torch.Generator().manual_seed(0), lambda g: torch.randperm(12, generator=g).tolist()
    ),
}


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


class InTurn(Sampler):
    """Each pass has the order that follows, whatever the epoch is."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.passes += 1
        return iter([0, 1, 2, 3] if self.passes % 2 else [3, 2, 1, 0])


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
    "sampler": (lambda: DataLoader(X, 2, sampler=InTurn()), "InTurn", True),
    "one sample in a batch": (lambda: DataLoader(X, None, sampler=InTurn()), "InTurn", True),
    "sampler of batches": (
        lambda: DataLoader(X, batch_sampler=BatchSampler(InTurn(), 2, False)), "InTurn", True,
    ),
    "stream": (lambda: DataLoader(Turns(), 2), "Turns", False),
    "kept iterator": (lambda: Passes(X[:4], 2, sampler=InTurn()), "Passes", False),
    "take": (lambda: fl.data.take(DataLoader(X, 2, sampler=InTurn()), 2), r"take(...)", False),
    "zip": (
        lambda: fl.data.zip_shortest(a=DataLoader(Turns(), 2), b=[X[:2]] * 2), "zip_", False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "name", "by_index"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_another_order_after_a_resume_has_one_warning(make, name, by_index, tmp_path, caplog):
    steps = 6 if name == "InTurn" and make().batch_sampler is None else 3
    _, state = trained(make(), steps=steps)
    state = on_disk(state, tmp_path)
    assert state.epoch == 1
    assert not caplog.messages
    trained(make(), state, epochs=3)
    (line,) = caplog.messages
    assert f"fit: the training loader ({name}" in line
    assert f"does not resume where it was: after batch {state.batch} of epoch 2 it gives" in line
    assert 'attrs.evolve(state, ends="epoch")' in line
    said = (
        "In this epoch, samples 2, 3 are trained twice, and samples 0, 1 are not trained." in line
    )
    assert said is by_index


def test_a_cell_that_is_run_again_has_the_warning_too(caplog):
    loader = DataLoader(X, 2, sampler=InTurn())
    first, state = trained(loader, steps=1)
    rest, _ = trained(loader, state, epochs=1)
    assert first == [0, 1] == rest[::-1]
    (line,) = caplog.messages
    assert "samples 0, 1 are trained twice, and samples 2, 3 are not trained" in line


def test_a_resume_of_a_resume_compares_with_what_was_trained(tmp_path, caplog):
    make = lambda: DataLoader(X, None, sampler=InTurn())
    _, state = trained(make(), steps=5)  # 3
    seen, state = trained(make(), on_disk(state, tmp_path), steps=6)
    assert seen == [1]
    caplog.clear()
    seen, _ = trained(make(), on_disk(state, tmp_path), epochs=2)
    assert seen == [2, 3]
    (line,) = caplog.messages
    assert "In this epoch, sample 3 is trained twice, and sample 0 is not trained." in line


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
    """Of 12 samples 8 were trained. Where nothing is left, the epoch ends with these."""
    make = lambda n, size=2: DataLoader(torch.arange(float(n)), size, shuffle=True)
    batches = lambda n: [torch.ones(2)] * n
    _, state = trained(make(12), steps=4)
    for loader, now, ends in (
        (make(4), "has 4 samples now", True), (make(1), "has 1 sample now", True),
        (make(10), "has 10 samples now", False), (make(20, 5), "has 20 samples now", False),
        (batches(2), "has 2 batches now", True), (batches(8), "has 8 batches now", False),
    ):  # fmt: skip
        caplog.clear()
        seen, reached = trained(loader, on_disk(state, tmp_path), epochs=1)
        (line,) = caplog.messages
        assert f"had 12 samples when epoch 1 began, and {now}" in line
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


def test_another_batch_size_has_no_warning_and_trains_what_is_left(tmp_path, caplog):
    make = lambda size: DataLoader(X, size, shuffle=True)
    whole, _ = trained(make(2), epochs=2)
    _, state = trained(make(2), steps=4)
    for size in (1, 3, 4, 5, 12):
        seen, _ = trained(make(size), on_disk(state, tmp_path), epochs=2)
        assert seen == whole[8:]
    assert not caplog.messages


def test_another_number_of_processes_has_no_warning(caplog):
    """Of 12 batches 4 are consumed; on 5 processes, 8 are left, and 2 are padding."""
    source = open_source(DataLoader(torch.zeros(24), 2), 0, rank=0, processes=5)
    check_length(source, 0, first=4, samples=8, batches=4 + 10)
    check_length(source, 0, first=0, samples=0, batches=15)
    assert not caplog.messages
    check_length(source, 0, first=4, samples=8, batches=4 + 5)
    (line,) = caplog.messages
    assert "is 12, but an epoch of it had 5 batches from batch 4 on, where 8 were left" in line


# --- which samples


def test_the_samples_of_a_batch_are_known_of_a_sampler_with_a_generator_of_its_own():
    """Sample 5 is not a number; asking which samples a batch had moves no generator."""
    data = X.clone()
    data[5] = torch.nan
    loader = DataLoader(data, 2, sampler=DRAWN["numpy"]())
    seen = []

    def noting(model, batch):
        seen.append(batch.tolist())
        return model.w * batch.mean()

    hook = fl.halt_on_nonfinite(keep=True)
    state = fl.fit(fl.pipeline()(noting), toy(), loader, epochs=1, hooks=(hook,))
    (named,) = state.extra["nonfinite"]["indices"]
    bad = next(batch for batch in seen if any(v != v for v in batch))
    assert [data[i].item() for i in named if i != 5] == [v for v in bad if v == v]
    assert 5 in named


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
