"""A dataset of numbers that shows which samples were loaded and what was drawn."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from fnloop.extend import Source


class Numbers(Dataset):
    """first, first + 1, ..., and with ``noisy`` what each generator draws; what is loaded."""

    def __init__(self, n=10, first=0, noisy=False):
        self.n, self.first, self.noisy, self.loaded = n, first, noisy, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.loaded.append(int(i))
        noise = torch.rand(1).item() + np.random.rand() + random.random() if self.noisy else 0.0
        return torch.tensor([self.first + i + noise / 4], dtype=torch.float64)


def batches(loader, seed=0, epoch=0, start=0):
    return [b.flatten().tolist() for b in Source.open(loader, seed).batches(epoch, start, 0)]


def loader(noisy=False, **kwargs):
    return DataLoader(Numbers(noisy=noisy), **{"batch_size": 3, "shuffle": True, **kwargs})
