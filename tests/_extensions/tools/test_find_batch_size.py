"""find_batch_size: an allocator that fails on purpose, and nothing else changes."""

import pytest
import sample_steps
import torch
from sample_steps import in_turns
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.testing import toy, toy_loss

MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def limited(most, error=MEMORY):
    """Return a loss function that has memory for batches of a size, and the sizes it was given."""
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch))
        if len(batch) > most:
            raise error
        return toy_loss(model, batch)

    return loss_fn, sizes


def make_loader(samples=1000, **settings):
    return lambda size: DataLoader(torch.ones(samples), batch_size=size, **settings)


def found_by(*members, loss=toy_loss, loader=make_loader(), **settings):  # noqa: B008
    return fl.find_batch_size(fl.pipeline(*members)(loss), toy(), loader, **settings)


@pytest.mark.parametrize("most", [1, 2, 3, 63, 64, 65])
def test_it_is_the_largest_that_fits(most):
    loss_fn, sizes = limited(most)
    assert found_by(loss=loss_fn) == most
    assert len(sizes) <= 3 * (2 * 7 + 1)
    assert max(sizes) <= 2 * most + 2


def test_every_update_counts():
    """The state of an optimizer, and with accumulate every batch of the window."""
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch))
        if len(batch) > 10 and len(calls) > 2:
            raise MemoryError
        return toy_loss(model, batch)

    assert found_by(fl.accumulate(2), loss=loss_fn) == 10
    assert calls[:6] == [2] * 6


@pytest.mark.parametrize(("loader", "most", "size"), [
    *((make_loader(), 100, 100), (make_loader(), 1, 1), (make_loader(37), None, 37)),
    (make_loader(37, drop_last=True), None, 37), (lambda size: [torch.ones(size)] * 2, 9, 9),
])  # fmt: skip
def test_the_data_or_most_may_be_the_limit(loader, most, size):
    settings = {} if most is None else {"most": most}
    assert found_by(fl.schedule(lambda i, total: 1.0), loader=loader, **settings) == size


def test_one_sample_that_does_not_fit_and_other_errors():
    loss_fn, sizes = limited(0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        found_by(loss=loss_fn)
    assert "not even a batch of one sample fits" in caught.value.__notes__[-1]
    assert set(sizes) == {1, 2}
    loss_fn, _ = limited(3, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        found_by(loss=loss_fn)
    with pytest.raises(ValueError, match=r"make_loader\(4\) gave batches of 8 samples, as many"):
        found_by(loader=lambda size: [torch.ones(8)] * 9)  # it ignores the size


def test_updates_that_are_all_skipped_end_too():
    infinite = lambda model, batch: toy_loss(model, batch)[0] * torch.inf
    assert found_by(fl.amp("fp16"), loss=infinite, most=4) == 4


def test_with_alternate_and_raw(monkeypatch):
    loss_fn, _ = limited(6)
    assert fl.find_batch_size(*in_turns(loss_fn), make_loader()) == 6
    monkeypatch.setattr(sample_steps, "toy_loss", loss_fn)
    assert fl.find_batch_size(fl.raw(sample_steps.by_hand), toy(), make_loader()) == 6
