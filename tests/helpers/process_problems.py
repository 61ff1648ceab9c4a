"""Data, models, losses and helpers of the jobs that run on several processes."""

import contextlib
import functools
import logging
import os

import attrs
import numpy as np
import torch
import torch.distributed as dist
from several import split
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnloop as fl

SIZE, BATCH = 41, 6  # samples; and samples per update of all processes. 41 is prime
COUNTS = (1, 2, 3)
FEW = (1, 2)  # for long jobs, where other tests show what an odd number changes


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


def join():
    """Let the processes of this job meet, before a model is sharded over them."""
    if world() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")


def in_double(job):
    """Decorate a job whose processes have met, and whose numbers are of double precision."""

    @functools.wraps(job)
    def run(*arguments, **settings):
        join()
        with default_dtype(torch.float64):
            return job(*arguments, **settings)

    return run


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples())


def samples():
    """Return SIZE of (x, y, a number of tokens, its index)."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SIZE, 6, generator=draw), torch.randint(0, 3, (SIZE,), generator=draw)
    return TensorDataset(x, y, torch.randint(1, 9, (SIZE,), generator=draw), torch.arange(SIZE))


def batches(size):
    return [samples()[i : i + size] for i in range(0, SIZE, size)]


def loader(data=None, size=None, **settings):
    return DataLoader(
        samples() if data is None else data, batch_size=size or BATCH // world(), **settings
    )


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def dropping():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))


def convolutions():
    one = nn.Conv2d(3, 3, (2, 1), padding=(1, 0))
    parts = nn.Unflatten(1, (3, 2, 1)), one, nn.Tanh(), one, nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*parts)


def adam_and_sgd(parameters):
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


def accuracy(aux, batch):
    return (aux["output"].argmax(1) == batch[1]).to(torch.float64).mean()


def torchmetrics():
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    inputs = lambda aux, batch: (aux["output"], batch[1])
    metrics = {"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)}
    return {name: fl.from_torchmetrics(metric, inputs) for name, metric in metrics.items()}


def kinds():
    return fl.metric(
        accuracy=accuracy,
        sum=lambda aux, batch: fl.Sum(aux["output"].sum()),
        samples=lambda aux, batch: fl.Sum(len(batch[0])),
        min=lambda aux, batch: fl.Min(aux["output"].min()),
        max=lambda aux, batch: fl.Max(aux["output"].max()),
    )


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def difference(a, b):
    """Return the largest difference of two lists of numbers, relative to the largest of them."""
    a, b = np.array(a), np.array(b)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(a).max())


class Tally(nn.Module):
    """A weight for each sample. SGD at lr 1 subtracts 1 / the items of the sample's update."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, indices):
        return self.w[indices]


def count(model, batch):
    return model(batch[-1]).mean()


def tally():
    model = Tally()
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=5)


@fl.middleware("gradient")
def items():
    """Report the samples of an update: 1 / the largest element of the gradient."""

    def wrap(step):
        def reporting(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(
                out, metrics={**out.metrics, "items": fl.Sum(1 / state.model.w.grad.max())}
            )

        return reporting

    return wrap


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


def flat(tensors):
    return torch.cat([whole(t).detach().flatten() for t in tensors]).tolist()


def come_to(state):
    records = [record.metrics for record in state.history if not record.closing]
    losses = [row.get("train/loss", row.get("recent/loss")) for row in records]
    return {
        "weights": flat(state.model.parameters()),
        "counters": [state.step, state.epoch, state.batch],
        "updates": dict(state.updates),
        "history": losses,
    }


@contextlib.contextmanager
def logged():
    """Give a list of what fnloop logs."""
    log, lines = logging.getLogger("fnloop"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def said(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
