"""Short runs of small models, and what is seen in them.

Each update of a toy on ONE lowers its w, and so its loss, by 1.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
STEP = fl.pipeline()(toy_loss)


def xs(*values):
    """Return batches of one number each."""
    return [torch.tensor([float(value)]) for value in values]


def of(model, make=torch.optim.SGD, lr=1.0, **settings):
    """Return the state of a model with an optimizer of all its parameters."""
    return fl.TrainState.create(model, make(model.parameters(), lr=lr, **settings), seed=0)


def fitted(loaders, *members, loss_fn=toy_loss, state=None, **settings):
    """Train a toy, or another state, without hooks. A list of numbers becomes batches of one."""
    if isinstance(loaders, list) and not any(isinstance(x, torch.Tensor | tuple) for x in loaders):
        loaders = xs(*loaders)
    settings = {"hooks": (), **settings}
    return fl.fit(fl.pipeline(*members)(loss_fn), state or toy(), loaders, **settings)


def fit(*hooks, train=4, valid=0, loaders=None, state=None, step=STEP, **settings):
    """Train on a number of batches per epoch, and evaluate on others if there are any."""
    if loaders is None:
        loaders = {"train": [ONE] * train} | ({"valid": [ONE] * valid} if valid else {})
    return fl.fit(step, toy() if state is None else state, loaders, hooks=hooks, **settings)


def called_at(moment, *others, **run):
    """Return the steps at which a moment calls its hook; ``run`` is as of ``fit``."""
    steps = []
    fit(moment(lambda state: steps.append(state.step) or state), *others, **run)
    return steps


def timed(clock, train=0.0, valid=0.0, *members):
    """Return a step whose batches take some seconds of a fake clock."""
    return fl.pipeline(*members)(clock.timed(toy_loss, train, valid))


def noting(look):
    """Return a hook that notes what a function finds in each state, and the list of its notes."""
    found = []

    def note(state):
        found.append(look(state))
        return state

    return note, found


def stop_when(condition):
    """Return a hook that stops a run."""
    return fl.when(condition)(lambda state: attrs.evolve(state, stop="enough"))


def kept(how, state, new, folder):
    """Return a state as it is, its snapshot, or what a new one restores of its checkpoint."""
    state = attrs.evolve(state, stop=None)
    if how == "snapshot":
        return fl.snapshot(state)
    return fl.restore(fl.save(state, folder / "kept"), new) if how == "checkpoint" else state


def assert_same_weights(one, two):
    """Assert that the parameters and buffers of two models or states are equal bit for bit."""
    one, two = (getattr(each, "model", each).state_dict() for each in (one, two))
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def of_timm(path, name):
    """Return what a file of timm defines, without the package, which needs torchvision."""
    found = importlib.machinery.PathFinder.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed")
    file = Path(found.origin).parent / path
    spec = importlib.util.spec_from_file_location("timm_file", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
