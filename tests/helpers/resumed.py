"""Runs over twelve numbers that are resumed, and samplers whose order no seed decides."""

import random

import numpy as np
import torch
from torch.utils.data import Sampler

import fnloop as fl
from fnloop._backend.containers import memory_in
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


def warning_of_a_resume(make, steps, folder, caplog):
    """Train past an epoch, resume in the middle of the second one, and return the only warning."""
    _, state = trained(make(), steps=steps)
    state = on_disk(state, folder)
    assert state.epoch == 1
    assert not caplog.messages
    trained(make(), state, epochs=3)
    (line,) = caplog.messages
    assert f"does not resume where it was: after batch {state.batch} of epoch 2 it gives" in line
    assert 'attrs.evolve(state, ends="epoch")' in line
    return line


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


class InTurn(Sampler):
    """Each pass has the order that follows, whatever the epoch is."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.passes += 1
        return iter([0, 1, 2, 3] if self.passes % 2 else [3, 2, 1, 0])
