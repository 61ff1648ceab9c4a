"""Models, optimizers and batches for the tests of graphs."""

import attrs
import torch

import fnloop as fl
from fnloop.testing import assert_same, small, stochastic


def done(recorders):
    return [entry for recorder in recorders for entry in recorder.log]


def fused_sgd(parameters):
    """What cuda_graph makes of SGD, so that runs with and without it are equal bit for bit."""
    return torch.optim.SGD(parameters, lr=torch.tensor(0.05), momentum=0.9, fused=True)


def capturable_adam(parameters):
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.02), capturable=True)


PROBLEMS = [
    attrs.evolve(small(), optimizer=fused_sgd),
    attrs.evolve(stochastic(), optimizer=capturable_adam),
]


def net(optimizer=fused_sgd):
    return attrs.evolve(small(), optimizer=optimizer)


def compared(problem, *members, rtol=0.0, loaders=None, settings=dict, **fixed):
    """Train with graphs and without, assert that both come to the same, and return the first.

    ``settings`` makes those of a run, such as hooks that keep something; ``fixed`` are others.
    """

    def run(*more):
        step = fl.pipeline(*members, *more)(problem.loss_fn)
        given = problem.batches if loaders is None else loaders
        return fl.fit(step, problem.state(), given, **{"hooks": (), **fixed, **settings()})

    captured = run(fl.cuda_graph(warmup=1))
    assert_same(captured, run(), rtol=rtol)
    return captured


def replays(recorders):
    return [entry for entry in done(recorders) if entry.startswith("replay")]
