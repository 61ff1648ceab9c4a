"""Prefetching changes no number."""

import random

import attrs
import numpy as np
import pytest
import torch
from numbered import Numbers, loader
from sample_hooks import stop_at
from torch.utils.data import DataLoader, IterableDataset
from toy_runs import fit

import fnloop as fl
from fnloop._core import rng
from fnloop.testing import assert_same, toy, toy_loss


def test_prefetch_fetches_that_number_of_windows_ahead():
    fetched, seen = [], []

    def batches():
        for i in range(5):
            fetched.append(i)
            yield torch.tensor([float(i)])

    def loss(model, batch):
        seen.append((int(batch), max(fetched)))
        return toy_loss(model, batch)

    fit(step=fl.pipeline()(loss), loaders=batches, prefetch=3)
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4), (4, 4)]


def test_an_error_in_a_fetch_ahead_costs_no_update():
    def batches():
        yield from (torch.ones(1), torch.ones(1), torch.ones(1))
        raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        fit(loaders=batches, prefetch=3)
    assert caught.value.state.step == 3


class Halves(IterableDataset):
    """Nine numbers, each with what the generators draw."""

    def __iter__(self):
        for i in range(9):
            yield torch.tensor([i + random.random() + np.random.rand()]) + torch.rand(1)


class Backwards(torch.utils.data.Sampler):
    """A sampler that draws from a global generator."""

    def __iter__(self):
        yield from sorted(range(9), key=lambda i: random.random())

    def __len__(self):
        return 9


class Lazily(Backwards):
    def __iter__(self):
        left = list(range(9))
        while left:
            yield left.pop(random.randrange(len(left)))


def streamed():
    for i in range(9):
        yield torch.tensor([i + random.random()])


SOURCES = {
    "list": lambda: [torch.tensor([float(i)]) for i in range(9)],
    "map-style": lambda: loader(noisy=True, batch_size=2),
    "map-style, dropping": lambda: loader(noisy=True, batch_size=2, drop_last=True),
    "map-style, one by one": lambda: loader(noisy=True, batch_size=None, shuffle=False),
    "map-style, a sampler": lambda: DataLoader(Numbers(9, noisy=True), 2, sampler=Backwards()),
    "map-style, a sampler that draws lazily": lambda: DataLoader(
        Numbers(9, noisy=True), 2, sampler=Lazily()
    ),
    "workers": lambda: loader(noisy=True, batch_size=2, num_workers=1),
    "workers, a sampler that draws lazily": lambda: DataLoader(
        Numbers(9, noisy=True), 2, sampler=Lazily(), num_workers=2
    ),
    "generator function": lambda: streamed,
    "IterableDataset": lambda: DataLoader(Halves(), 2),
    "IterableDataset, workers": lambda: DataLoader(Halves(), 2, num_workers=1),
}


def drawing(drawn):
    """Return a loss function, and a hook, that draw from every generator.

    What training and hooks draw goes into a list; the parts have more evaluations: closing ones.
    """

    def draw(noted=True):
        numbers = (random.random(), float(np.random.rand()), float(torch.rand(1)))
        drawn.extend([numbers] * noted)
        return sum(numbers)

    loss_fn = lambda model, batch: toy_loss(model, batch.float() * draw(model.training))

    def hook(state):
        if state.step % 3 == 1 or "epoch" in state.events:
            draw()
        return state

    return loss_fn, hook


@pytest.mark.parametrize(("name", "case"), [
    *((name, case) for name in SOURCES if "workers" not in name for case in range(4)),
    *(pytest.param(n, 0, marks=pytest.mark.slow) for n in SOURCES if "workers" in n),
])  # fmt: skip
def test_prefetch_changes_no_number(name, case, tmp_path):
    chance = random.Random(f"{name} {case}")
    window, split = chance.choice([1, 1, 2]), chance.randrange(1, 7)
    valid = {"valid": [torch.ones(1)] * 2} if chance.random() < 0.5 else {}

    def trained(*parts):
        """Train two epochs in parts, each with its prefetch, with a checkpoint between them."""
        drawn, state = [], None
        loss_fn, hook = drawing(drawn)
        step = fl.pipeline(*([fl.accumulate(window)] if window > 1 else []))(loss_fn)
        run = {"step": step, "epochs": 2, "evaluate_every": fl.every(steps=2)}
        for part, prefetch in enumerate(parts, 1):
            loaders = {"train": SOURCES[name](), **valid}
            last = part == len(parts)
            hooks = (hook,) if last else (hook, stop_at(part * split))
            state = fit(*hooks, **run, loaders=loaders, state=state, prefetch=prefetch)
            if not last:
                state = attrs.evolve(fl.restore(fl.save(state, tmp_path / "a"), toy()), stop=None)
        return state, drawn

    whole, drawn = trained(1)
    for parts in ((2,), (3,), (1, 1), (2, 2), (1, 3), (3, 2, 1)):
        if len(parts) == 1 or split * len(parts) < 9:
            state, again = trained(*parts)
            assert again == drawn, parts
            assert_same(state, whole)


@pytest.mark.parametrize(("make", "prefetch"), [
    (loader, 1), (lambda: [torch.ones(1)] * 4, 3),
], ids=["one", "a list"])  # fmt: skip
def test_generators_that_no_fetch_sets_are_not_captured(make, prefetch, monkeypatch):
    looks, capture = [], rng.Generators.capture
    monkeypatch.setattr(rng.Generators, "capture", lambda: looks.append(1) or capture())
    for fetched in (1, prefetch):
        looks.clear()
        assert fit(loaders=make(), epochs=1, prefetch=fetched).step == 4
        assert not looks
