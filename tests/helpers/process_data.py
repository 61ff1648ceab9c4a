"""Data of the jobs that run on several processes, metrics, and how often each sample is used."""

import torch
from joined import world
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnloop as fl

SIZE, BATCH = 41, 6  # samples; and samples per update of all processes. 41 is prime


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


def samples():
    """Return SIZE of (x, y, a number of tokens, its index)."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE, 6, generator=draw), torch.randint(0, 3, (SIZE,), generator=draw)
    return TensorDataset(x, y, torch.randint(1, 9, (SIZE,), generator=draw), torch.arange(SIZE))


def batches(size):
    return [samples()[i : i + size] for i in range(0, SIZE, size)]


def loader(data=None, size=None, **settings):
    return DataLoader(
        samples() if data is None else data, batch_size=size or BATCH // world(), **settings
    )


class Tally(nn.Module):
    """A weight for each sample. SGD at lr 1 subtracts 1 / the items of the sample's update."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, indices):
        return self.w[indices]


def count(model, batch):
    return model(batch[-1]).mean()


def tally():
    model = Tally()
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=5)
