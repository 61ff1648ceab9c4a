"""A position is a number of samples, where batches have one size; and samples have indices."""

import math
import random

import numpy as np
import pytest
import torch
from saved import sgd
from torch import nn
from torch.utils.data import DataLoader, Dataset
from toy_runs import fit, fitted

import fnloop as fl
from fnloop.testing import toy, toy_loss


class Augmented(Dataset):
    """Twenty samples, with noise from every global generator."""

    def __init__(self):
        self.x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        noise = torch.rand(6) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1
        return self.x[i] + noise, self.x[i].sum(0, keepdim=True).sin()


def loader(**kwargs):
    """Return one of seven batches, the last of two samples."""
    return DataLoader(Augmented(), **{"batch_size": 3, "shuffle": True, **kwargs})


@pytest.mark.parametrize(
    ("size", "workers"), [(2, 0), (20, 0), pytest.param(5, 2, marks=pytest.mark.slow)]
)
def test_another_batch_size_or_number_of_workers_trains_the_rest(tmp_path, size, workers):
    seen = []

    def watch(model, batch):
        x, y = batch
        seen.extend(y.flatten().tolist())
        return model(x).mean()

    def new():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        return sgd(nn.Sequential(*layers).double(), lr=0.01)

    make = fl.pipeline()(watch)
    fl.fit(make, new(), loader(), epochs=2, hooks=())
    order, seen = seen, []
    state = fl.fit(make, new(), loader(), steps=2, hooks=())
    assert (state.batch, state.samples) == (2, 6)
    state = fl.restore(fl.save(state, tmp_path / "a"), new())
    other = loader(batch_size=size, num_workers=workers)
    state = fl.fit(make, state, other, steps=3, hooks=())
    state = fl.restore(fl.save(state, tmp_path / "a"), new())
    fl.fit(make, state, loader(), epochs=2, hooks=())
    assert seen == order
    assert sorted(seen[:20]) == sorted(y.item() for _, y in Augmented())


def test_an_epoch_ends_if_a_larger_batch_size_leaves_no_batch(tmp_path):
    make = fl.pipeline()(lambda model, batch: model.w * batch[1].mean())
    state = fl.fit(make, toy(), loader(), steps=6, hooks=())
    assert (state.batch, state.samples) == (6, 18)
    state = fl.restore(fl.save(state, tmp_path / "a"), toy())
    # 2 of 20 samples are left
    state = fl.fit(make, state, loader(batch_size=4, drop_last=True), epochs=2, hooks=())
    assert (state.step, state.epoch, state.batch) == (6 + 5, 2, 0)
    assert [r.closing for r in state.history] == [True, False, False]


def test_a_position_continues_with_batches_of_another_size():
    samples, of_four = torch.arange(10.0)[:, None], fl.accumulate(total=4)
    half = fitted(DataLoader(samples, 2), of_four, epochs=1, steps=1)
    state = fitted(DataLoader(samples, 1), of_four, epochs=1, state=half)
    assert state.step == 3 and state.model.w.item() == -(1.5 + 5.5 + 8.5)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_halt_names_the_samples_of_the_update(batches):
    x = torch.arange(1.0, 13.0)
    x[7] = math.nan
    loader = DataLoader(x, batch_size=3, shuffle=True)
    step = fl.pipeline(fl.accumulate(batches))(toy_loss)
    state = fit(fl.halt_on_nonfinite(keep=True), loaders=loader, step=step, epochs=3)
    indices = state.extra["nonfinite"]["indices"]
    samples = [i for index in indices for i in index]
    assert len(indices) == batches and 7 in samples and len(samples) == 3 * batches
    assert f"samples {', '.join(map(str, samples))})" in state.stop
