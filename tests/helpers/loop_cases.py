"""Shared by the tests of the loop."""

import os
import random
import signal

import numpy as np
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)

step = fl.pipeline()(toy_loss)


def fit(state=None, loaders=None, **kwargs):
    return fl.fit(
        step, state or toy(), [ONE] * 3 if loaders is None else loaders, **{"hooks": (), **kwargs}
    )


def generators():
    _, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), keys.tolist(), rest, random.getstate()


def interrupting(at, how):
    def loss_fn(model, batch):
        if batch[0] == at:
            how()
        return toy_loss(model, batch)

    return fl.pipeline()(loss_fn)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def raise_interrupt():
    raise KeyboardInterrupt


NUMBERS = [torch.tensor([float(x)]) for x in (1, 2, 3)]


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


class Boom(Exception):
    pass


def raising(error, at=2.0):
    def explode(model, batch):
        if batch[0] == at:
            raise error
        return toy_loss(model, batch)

    return explode


def failing_middleware(ring):
    @fl.middleware(ring)
    def fails(at):
        def wrap(step):
            def failing(state, batch):
                state, out = step(state, batch)
                if batch[0] == at:
                    raise Boom
                return state, out

            return failing

        return wrap

    return fails(2.0)


def two_weights(optimizer):
    """Two weights whose gradients are the batch: plain descent with lr=1 takes it off both."""
    model = torch.nn.ParameterDict(
        {"a": torch.nn.Parameter(torch.zeros(1)), "b": torch.nn.Parameter(torch.zeros(1))}
    )
    loss = lambda model, batch: ((model["a"] + model["b"]) * batch).mean()
    return fl.TrainState.create(model, optimizer(model.parameters())), fl.pipeline()(loss)


def half_way(error, at=2):
    """Descent that fails between its first and its second weight, in its n-th step."""

    class HalfWay(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            for p in self.param_groups[0]["params"]:
                with torch.no_grad():
                    p -= p.grad
                if self.steps == at:
                    error()

    return lambda parameters: HalfWay(parameters, lr=1.0)


def boom():
    raise Boom


def failing_once(at, error=Boom):
    """Batches to evaluate whose n-th pass fails, once."""
    passes = []

    def batches():
        passes.append(1)
        yield torch.tensor([2.0])
        if len(passes) == at:
            raise error
        yield torch.tensor([4.0])

    return batches


class Told:
    """A hook that wants to know of a failure."""

    def __init__(self, fails=False):
        self.fails, self.told = fails, []

    def __call__(self, state):
        return state

    def failed(self, state, error):
        self.told.append((state.step, state.run, type(error), list(error.__notes__)))
        if self.fails:
            raise OSError("disk full")
