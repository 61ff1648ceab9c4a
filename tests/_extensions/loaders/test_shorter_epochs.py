"""take, fraction, fixed and leave_out."""

import itertools

import numpy as np
import pytest
import torch
from composed_cases import Numbers, Stream, listed, plain, read, samples, shuffled
from torch.utils.data import DataLoader, Sampler
from toy_runs import fit

import fnloop as fl
from fnloop.data import fixed, fraction, interleave, leave_out, take
from fnloop.testing import toy_loss

sorted_samples = lambda found: sorted(samples(found))


def test_take_gives_the_first_batches_as_they_are():
    assert read(take(shuffled(), 3), 1) == read(shuffled(), 1)[:3]
    assert samples(read(take(shuffled(), 3), 1)) != samples(read(take(shuffled(), 3), 2))
    assert [len(take(shuffled(), n)) for n in (1, 7, 8)] == [1, 7, 7]
    assert len(take(lambda: itertools.repeat(torch.ones(1)), 5)) == 5
    assert repr(take([], 5)) == "take([], 5)"


@pytest.mark.parametrize("make", [
    lambda data: take(data, 5), lambda data: fraction(data, 0.8), lambda data: fixed(data, 5),
    lambda data: leave_out(data, lambda epoch, batch: batch >= 5),
    lambda data: take(interleave({"a": data, "b": listed(0)}), 5),
])  # fmt: skip
@pytest.mark.parametrize("processes", [1, 2])
def test_no_sample_is_loaded_in_vain(make, processes):
    for start, rank in itertools.product(range(6), range(processes)):
        data = shuffled()
        found = read(make(data), 1, start, rank, processes)
        padding = [batch for batch in found if len(batch) == 1 and isinstance(batch[0], list)]
        assert len(found) - len(padding) == len(range(start + rank, 5, processes))
        # Several processes compare their data: each reads one sample twice, where a pass begins.
        loaded = 2 * len(found) + 2 * (processes > 1)
        assert (data.dataset.loaded and len(data.dataset.loaded) == loaded) or start == 5


def test_a_schedule_knows_the_length_of_what_was_taken():
    seen, endless = [], lambda: itertools.repeat(torch.ones(1))
    step = fl.pipeline(fl.schedule(lambda step, total: seen.append((step, total)) or 1.0))(toy_loss)
    fit(step=step, loaders=take(endless, 3), epochs=2)
    assert sorted(set(seen)) == [(step, 6) for step in range(6)]
    step = fl.pipeline(fl.accumulate(2))(toy_loss)
    assert fit(step=step, loaders=take([torch.ones(1)] * 5, 30)).step == 3


@pytest.mark.parametrize(("length", "f", "n"), [
    *[(100, 0.29, 29), (100, 0.57, 57), (1000, 0.001, 1), (7, 0.5, 3), (3, 1, 3)],
    *[(10, np.float64(0.3), 3), (10, np.float32(0.7), 7), (10**6, 1e-5, 10)],
])  # fmt: skip
def test_a_fraction_is_meant_as_typed(length, f, n):
    assert len(fraction([0] * length, f)) == n


def test_a_fraction_of_nothing_known_is_refused():
    with pytest.raises(ValueError, match=r"fraction\(0.1\) of 9 batches is none: say how many"):
        fraction([0] * 9, 0.1)
    with pytest.raises(ValueError, match="whose length is not known: say how many batches, take"):
        fraction(plain(3), 0.1)


def test_fixed_has_the_samples_of_the_first_batches_in_every_epoch():
    loader = fixed(shuffled(), 3)
    first = read(loader, 0)
    assert first == read(shuffled(), 0)[:3] and len(loader) == 3
    assert len({str(samples(read(loader, epoch))) for epoch in range(4)}) == 4
    for epoch in (1, 2):
        found = read(loader, epoch)
        assert sorted_samples(found) == sorted_samples(first)
        assert [samples(batch) for batch in found] != [samples(batch) for batch in first]
        assert not set(map(str, found)) & set(map(str, first))  # augmented again
    assert sorted_samples(read(loader, None)) == sorted_samples(first)
    assert sorted_samples(read(loader, 0, seed=1)) != sorted_samples(first)


def test_fixed_keeps_the_draws_and_the_order_of_a_sampler():
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 3, 50)
    loader = fixed(DataLoader(Numbers(3), 4, sampler=sampler), 2)
    assert sorted_samples(read(loader, 0)) == sorted_samples(read(loader, 3))
    assert samples(read(loader, 0)) != samples(read(loader, 3))
    loader = fixed(DataLoader(Numbers(9), 2), 3)  # what is not shuffled stays so
    assert [samples(batch) for batch in read(loader, 4)] == [[0, 1], [2, 3], [4, 5]]
    assert read(loader, 4) != read(loader, 0)  # augmented again


def test_fixed_tells_a_sampler_and_a_dataset_their_epoch():
    class ByEpoch(Sampler):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch))
            return iter(order.tolist())

        def __len__(self):
            return 40

    told = []
    data = Numbers(40)
    data.set_epoch = told.append
    loader = fixed(DataLoader(data, 2, sampler=ByEpoch()), 3)
    orders = [samples(read(loader, epoch)) for epoch in (0, 7, None)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert told == [0, 7]


def test_leave_out_counts_positions_as_without_it():
    loader = leave_out(shuffled(), lambda epoch, batch: (epoch, batch) in {(0, 2), (1, 0), (1, 3)})
    for epoch, kept in ((0, [0, 1, 3, 4, 5, 6]), (1, [1, 2, 4, 5, 6]), (2, range(7))):
        whole = read(shuffled(), epoch)
        assert read(loader, epoch) == [whole[i] for i in kept]
    assert len(loader) == 6


def test_the_length_of_a_run_is_exact_where_epochs_differ():
    """A schedule that falls to 0 at the end shows it, and so do the updates of each epoch."""
    totals, lengths = set(), []
    schedule = fl.schedule(lambda step, total: totals.add(total) or 1.0)
    step = fl.pipeline(fl.accumulate(2), schedule)(toy_loss)
    loader = leave_out([torch.ones(1)] * 6, lambda epoch, batch: epoch == 1 and batch < 3)

    def look(state):
        lengths.append((state.run.steps_per_epoch, state.run.batches_per_epoch))
        return state

    state = fit(fl.every(epochs=1)(look), step=step, loaders=loader, epochs=3)
    assert (state.step, totals) == (3 + 2 + 3, {8})
    assert lengths == [(3, 6), (2, 3), (3, 6)]


def test_what_leave_out_cannot_do_is_refused():
    with pytest.raises(TypeError, match=r"True or False; .*\(0, 0\) returned None"):
        len(leave_out(listed(3), lambda epoch, batch: None))
    with pytest.raises(ValueError, match="the training loader gave no batch in epoch 1"):
        fit(loaders=leave_out(listed(3), lambda epoch, batch: True))
    without_length = leave_out(plain(3), lambda epoch, batch: False)
    with pytest.raises(TypeError, match=r"leave_out\(...\) has no length: that of its loaders"):
        len(without_length)
    assert sum(1 for _ in without_length) == 3


def test_one_can_be_iterated_by_itself():
    torch.manual_seed(3)
    loader = take(shuffled(100), 2)
    one, two = ([samples(b.tolist()) for b in loader] for _ in range(2))
    assert one != two and [len(b) for b in one] == [2, 2]
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    torch.rand(1), list(take(listed(1), 1))  # takes one number, as iter(DataLoader) does
    assert torch.rand(1) != expected[1]
    few = fixed(shuffled(100), 2)
    passes = [samples([b.tolist() for b in few]) for _ in range(3)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(passes[2]) and passes[0] != passes[1]


def test_the_generators_between_batches_are_the_callers():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append([torch.rand(()).item() for _ in take(shuffled(), 3)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_one_process_has_its_own_share_or_takes_part_in_the_whole():
    share = fl.sharded(DataLoader(Stream(9), 2))
    with pytest.raises(ValueError, match=r"sharded\(.*\) gives this process its own already: mark"):
        take(share, 2)
    step = fl.pipeline()(lambda model, batch: toy_loss(model, batch[:, 0]))
    assert fit(step=step, loaders=fl.sharded(take(DataLoader(Stream(9), 2), 2))).step == 2
