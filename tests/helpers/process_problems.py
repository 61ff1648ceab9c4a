"""Models, losses, optimizers and states of the jobs that run on several processes."""

import torch
from joined import world
from several import split
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def dropping():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


def convolutions():
    one = nn.Conv2d(3, 3, (2, 1), padding=(1, 0))
    parts = nn.Unflatten(1, (3, 2, 1)), one, nn.Tanh(), one, nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*parts)


def adam_sgd(parameters):
    matrices, rest = split(parameters)
    return {
        "matrices": torch.optim.AdamW(matrices, lr=0.05),
        "rest": torch.optim.SGD(rest, lr=0.1, momentum=0.9),
    }


def entropy(model, batch):
    output = model(batch[0])
    return nn.functional.cross_entropy(output, batch[1]), {"output": output}


def by_tokens(model, batch):
    x, y, tokens, _ = batch
    losses = nn.functional.cross_entropy(model(x), y, reduction="none") * tokens
    return losses.sum() / tokens.sum(), {"weight": tokens.sum()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def created(shard=False, optimizer=sgd, make=network, **settings):
    """Return a state that is always the same; ``shard`` is a function, or whether several do so."""
    torch.manual_seed(0)
    model = make()
    if shard:
        shard = shard if callable(shard) else fully_shard if world() > 1 else lambda model: None
        shard(model)
    return fl.TrainState.create(model, optimizer(model.parameters()), **{"seed": 0, **settings})


def fitted(train, valid=None, loss=entropy, epochs=1, **settings):
    loaders = {"train": train} if valid is None else {"train": train, "valid": valid}
    return fl.fit(
        fl.pipeline()(loss), created(), loaders, epochs=epochs, **{"hooks": (), **settings}
    )
