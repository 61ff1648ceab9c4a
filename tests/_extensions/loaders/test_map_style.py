"""DataLoaders that are read by their parts: samples are skipped by index, and errors name them."""

import pytest
import torch
from numbered import batches, loader
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset
from toy_runs import fit

import fnloop as fl
from fnloop.data import bucketed, take, zip_cycle
from fnloop.extend import Source


def test_consumed_samples_are_skipped_by_index_without_loading_them():
    data = loader(noisy=True)
    whole = batches(data)
    data.dataset.loaded.clear()
    assert batches(data, start=2) == whole[2:]
    assert len(data.dataset.loaded) == 4


class Collate:
    """Puts the samples of every batch into one buffer."""

    def __init__(self):
        self.buffer = torch.empty(2, 1)

    def __call__(self, samples):
        return torch.stack(samples, out=self.buffer)


def test_processes_that_fetch_their_own_samples_hold_none_of_the_others():
    samples = torch.arange(1.0, 7.0).repeat_interleave(2)[:, None]
    sources = [Source.open(DataLoader(samples, 2, collate_fn=Collate()), 0, i, 2) for i in (0, 1)]
    told = [[b[0].item() for b in source.batches(0, 0, 0)] for source in sources]
    assert told == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]


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


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("make", "message"), [
    (lambda w: DataLoader(AtItsEnd(), 2, num_workers=w),
        "AtItsEnd raised StopIteration for sample 3"),
    (lambda w: DataLoader(AtItsEnd(), None, num_workers=w),
        "AtItsEnd raised StopIteration for sample 3"),
    (lambda w: DataLoader(AllAtOnce(), 2, num_workers=w),
        r"AllAtOnce raised StopIteration for samples \[2, 3\]"),
    (lambda w: DataLoader(AtItsEnd(3), 3, collate_fn=collate_none, num_workers=w),
        r"the collate_fn of AtItsEnd raised StopIteration for samples \[0, 1, 2\]"),
], ids=["dataset", "without batches", "__getitems__", "collate_fn"])  # fmt: skip
def test_a_stop_iteration_in_a_dataset_is_an_error_with_any_workers(make, message, workers):
    with pytest.raises(RuntimeError, match=message):
        fit(loaders=make(workers))


def test_bucketed_batches_that_a_loader_would_batch_again_are_refused():
    data, batches = TensorDataset(torch.ones(4, 1)), bucketed([1, 1, 2, 2], batch_size=2)
    twice = DataLoader(data, batch_sampler=BatchSampler(batches, 2, False))
    single = DataLoader(data, sampler=batches)
    made = (lambda: single, lambda: twice, lambda: take(single, 2), lambda: zip_cycle(a=single))
    for wrong in made:
        with pytest.raises(ValueError, match=r"write DataLoader\(dataset, batch_sampler=bucketed"):
            fit(loaders=wrong())
    step = fl.pipeline()(lambda model, batch: model(batch[0]).mean())
    for settings in ({"batch_sampler": batches}, {"batch_size": None, "sampler": batches}):
        assert fit(step=step, loaders=DataLoader(data, **settings)).step == 2
