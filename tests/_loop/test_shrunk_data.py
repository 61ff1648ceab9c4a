"""Data that shrank before a resume.

An epoch whose position is beyond the new end is over. The next epoch uses the new data.
"""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import fnloop as fl
from fnloop.testing import toy, toy_loss


def batches(n):
    return [torch.ones(2)] * n


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(batches(self.n))


def generator(n):
    def made():
        yield from batches(n)

    return made


LOADERS = {  # n -> a loader of n batches
    "a list": batches,
    "a map-style loader": lambda n: DataLoader(torch.ones(2 * n), batch_size=2),
    "a shuffling loader": lambda n: DataLoader(torch.ones(2 * n), batch_size=2, shuffle=True),
    "a loader that drops the last": lambda n: DataLoader(torch.ones(2 * n + 1), 2, drop_last=True),
}
STREAMS = {  # without a length
    "an iterable loader": lambda n: DataLoader(Stream(n), batch_size=None),
    "a generator function": generator,
}


@pytest.fixture
def paused(tmp_path):
    """Return a function that restores a state after 3 of 4 batches of the first epoch."""

    def make(loader):
        step = fl.pipeline()(toy_loss)
        state = fl.fit(step, toy(), loader(4), steps=3, hooks=(), evaluate_every=None)
        return fl.restore(fl.save(state, tmp_path / "a"), toy())

    return make


@pytest.mark.parametrize("loader", [*LOADERS.values(), *STREAMS.values()], ids=[*LOADERS, *STREAMS])
@pytest.mark.parametrize("left", [3, 2, 1])
def test_an_epoch_whose_position_is_beyond_the_data_ends_without_an_update(paused, loader, left):
    """Three updates were made and none follows in this epoch. Its record is that of the three."""
    state = paused(loader)
    assert (state.step, state.epoch, state.batch) == (3, 0, 3)
    ended = fl.fit(fl.pipeline()(toy_loss), state, loader(left), epochs=1, hooks=())
    assert (ended.step, ended.epoch, ended.batch, ended.model.w.item()) == (3, 1, 0, -3.0)
    record = ended.history[-1]
    assert (record.epoch, record.step, record.metrics["train/loss"]) == (1, 3, -1.0)  # of 0, -1, -2
    more = fl.fit(fl.pipeline()(toy_loss), ended, loader(left), epochs=2, hooks=())
    assert (more.step, more.epoch, more.model.w.item()) == (3 + left, 2, -3.0 - left)


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_the_length_of_the_run_excludes_missing_updates_of_the_epoch_that_is_over(paused, loader):
    """Three updates were made and an epoch of two follows. Both subtract the total, 5."""
    step = fl.pipeline(fl.schedule(lambda i, total: total))(toy_loss)
    state = fl.fit(step, paused(loader), loader(2), epochs=2, hooks=())
    assert (state.step, state.epoch, state.model.w.item()) == (5, 2, -3.0 - 5.0 - 5.0)


def test_empty_data_end_the_epoch_and_are_an_error_in_the_next(paused):
    state = fl.fit(fl.pipeline()(toy_loss), paused(batches), [], epochs=1, hooks=())
    assert (state.step, state.epoch) == (3, 1)
    with pytest.raises(ValueError, match="gave no batch in epoch 2"):
        fl.fit(fl.pipeline()(toy_loss), state, [], epochs=2, hooks=())
