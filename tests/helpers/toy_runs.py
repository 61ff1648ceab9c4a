"""Runs of the toy in one line. Each update on ONE lowers its w, and so its loss, by 1."""

import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
STEP = fl.pipeline()(toy_loss)


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
