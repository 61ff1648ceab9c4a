"""Problems with several optimizers."""

import attrs
import torch

import fnloop as fl
from fnloop.testing import small


def split(parameters):
    """Return the matrices and the rest."""
    parameters = list(parameters)
    return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]


def muon_and_adamw(parameters, muon=0.02, adamw=0.01):
    """Muon for matrices, AdamW for the rest, as in ``TrainState.create(model, {...})``."""
    matrices, rest = split(parameters)
    return {
        "matrices": torch.optim.Muon(matrices, lr=muon),
        "rest": torch.optim.AdamW(rest, lr=adamw),
    }


def muon_and_sgd(parameters):
    """The same with SGD, since AdamW on the CPU reads its count of updates to the host."""
    matrices, rest = split(parameters)
    sgd = torch.optim.SGD(rest, lr=0.05, momentum=0.9)
    return {"matrices": torch.optim.Muon(matrices, lr=0.02), "rest": sgd}


def fused_sgd_twice(parameters):
    """Two that a graph can capture."""
    parts = zip(("matrices", "rest"), split(parameters), (0.05, 0.02), strict=True)
    fused = lambda part, lr: torch.optim.SGD(part, lr=torch.tensor(lr), momentum=0.9, fused=True)
    return {name: fused(part, lr) for name, part, lr in parts}


def problem(optimizers=muon_and_adamw):
    return attrs.evolve(small(), optimizer=optimizers)


def alternating(matrices=(), rest=(), problem=None, **settings):
    """The same loss in turn for each of two optimizers, with middleware of its own."""
    one = problem or attrs.evolve(small(), optimizer=muon_and_sgd)
    steps = {
        "matrices": fl.pipeline(*matrices)(one.loss_fn),
        "rest": fl.pipeline(*rest)(one.loss_fn),
    }
    return attrs.evolve(one, loss_fn=fl.alternate(steps, **settings))


def single_precision(problem):
    """fp16 unscales float32 gradients; problems are in float64."""

    def loss_fn(model, batch):
        output = model(batch[0].float())
        return torch.nn.functional.mse_loss(output.float(), batch[1].float()), {"output": output}

    return attrs.evolve(problem, model=lambda: problem.model().float(), loss_fn=loss_fn)


def stopped_after(updates):
    """Return a hook that stops a run there."""
    return fl.when(lambda state: state.step + state.skipped == updates)(
        lambda state: attrs.evolve(state, stop="enough")
    )
