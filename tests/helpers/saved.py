"""Runs that save checkpoints, and what is asserted of their folders."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved_steps(folder):
    """Return the steps of the checkpoints in a folder. There has to be nothing else."""
    return [int(name.removeprefix("step-")) for name in names(folder)]


def contents_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def train(folder, state, steps, every=1, **settings):
    """Train with a checkpoint after each update."""
    hook = fl.every(steps=every)(fl.checkpoint(folder, **settings))
    return fl.fit(step, state, [ONE] * 100, steps=steps, hooks=(hook,))


def stop_at(n):
    """Return a hook that stops a run after n updates, applied or not."""
    return fl.when(lambda state: state.step + state.skipped == n)(
        lambda state: attrs.evolve(state, stop="here")
    )


def sgd(model, lr=1.0, **settings):
    """Return the state of a model with plain descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, **settings)
    return fl.TrainState.create(model, optimizer, seed=0)


def check_refused(path, state, message, **settings):
    """Assert that a restore is refused and leaves the state unchanged."""
    before = fl.snapshot(state)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.restore(path, state, **settings)
    assert_same(state, before)


def check_continues(folder, new, step, data, splits=(1, 3, 5), epochs=2, **restored):
    """Assert that a run that is stopped after n updates, saved and restored, ends as the whole."""
    whole = fl.fit(step, new(), data, epochs=epochs, hooks=())
    for split in splits:
        half = fl.fit(step, new(), data, epochs=epochs, hooks=(stop_at(split),))
        path = fl.save(attrs.evolve(half, stop=None), folder / "half")
        half = fl.restore(path, new(), **restored)
        path = fl.save(half, folder / "half")  # again, before any middleware has met it
        half = fl.restore(path, new(), **restored)
        assert_same(fl.fit(step, half, data, epochs=epochs, hooks=()), whole)
    return whole
