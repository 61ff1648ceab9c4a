"""Steps that are no pipeline of a plain loss function: by hand, in turns, over windows."""

import torch

import fnloop as fl
from fnloop.testing import Toy, toy_loss


def by_hand(state, batch):
    """An update of a toy for ``raw``."""
    loss, aux = toy_loss(state.model, batch)
    loss.backward()
    state.optimizer.step()
    return fl.Output(loss.detach(), len(batch), aux)


def carried(model, batch, carry):
    """A loss function for ``tbptt`` that carries nothing from window to window."""
    return *toy_loss(model, batch), carry


def in_turns(loss_fn=toy_loss, lr=1.0):
    """Return a step that trains two toys in turns, and its state."""
    model = torch.nn.ModuleDict({"a": Toy(), "b": Toy()})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=lr) for name in model}
    losses = {name: (lambda model, batch, name=name: loss_fn(model[name], batch)) for name in model}
    step = fl.alternate({name: fl.pipeline()(losses[name]) for name in model})
    return step, fl.TrainState.create(model, optimizers, seed=0)


def backward_of(loss_fn):
    """Return the function that makes the gradients of a plain step, for ``raw``."""

    def makes(state, batch):
        loss, aux = loss_fn(state.model, batch)
        loss.backward()
        items = len(batch["x"] if isinstance(batch, dict) else batch[0])
        return fl.Output(loss, aux.get("weight", items), aux)

    return makes
