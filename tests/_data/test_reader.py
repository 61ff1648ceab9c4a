"""A loader of a user's own that is read from a position, and what no kind of loader does."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from toy_runs import fit

from fnloop.data import even
from fnloop.extend import Reader
from fnloop.testing import assert_same, toy


class Counting(Reader):
    """Six batches of their numbers, from a seed on; and which were read."""

    def __init__(self):
        super().__init__()
        self.read_so_far = []

    def length_in(self, epoch):
        return 6

    def items(self, at):
        for n in range(at.start, 6):
            self.read_so_far.append(n)
            yield torch.full((2,), float(n + at.order % 7))


def test_it_resumes_without_reading_again():
    whole, loader = fit(loaders=Counting(), epochs=2), Counting()
    half = fit(loaders=loader, steps=4)
    loader.read_so_far.clear()
    assert_same(fit(loaders=loader, state=half, epochs=2), whole)
    assert loader.read_so_far == [4, 5, *range(6)]


def test_a_mark_is_not_left_on_a_reader():
    loader = Counting()
    assert Reader.of(even(loader)).even and not loader.even
    assert Reader.of(loader) is loader


class AtItsEnd(Dataset):
    """One that reads a handle, which is used up at one sample."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return next(iter(())) if i == 3 else torch.ones(())


def test_a_dataset_that_raises_stop_iteration_does_not_end_an_epoch():
    with pytest.raises(RuntimeError, match="AtItsEnd raised StopIteration"):
        fit(loaders=DataLoader(AtItsEnd(), 2), state=toy())
