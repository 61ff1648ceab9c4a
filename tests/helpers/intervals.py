"""Metrics of an epoch and of an interval since the last record, updated together and alone."""

import copy

import torch

import fnloop as fl
from fnloop import Last, Max, Mean, Min
from fnloop._core.metrics import RECENT, Metrics

CLASSES = 3
VALUES = torch.tensor([0.1, 0.7, -1e-9, 3e7, 0.3, -0.0])
# of floats, whose bits are those of each pass by itself
OWN = {
    "mean": lambda x: Mean(x, 3),
    "mean of tensor weight": lambda x: Mean(x, torch.tensor(3.5)),
    "mean of floats": lambda x: Mean(x.item(), 3), "sum": fl.Sum, "min": Min, "max": Max,
    "last": Last,
}  # fmt: skip


def batches(count):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.rand(n, CLASSES, generator=draw), torch.randint(CLASSES, (n,), generator=draw))
        for n in (1 + i % 3 for i in range(count))
    ]


def own(kind):
    """Return a metric function of a kind of fnloop's own."""
    return lambda aux, batch: OWN[kind](VALUES[int(1e6 * batch[0].sum()) % 6].clone())


def bits(metrics):
    """Return what each metric has seen, in the order in which it was seen."""
    found = {}
    for name, metric in metrics.items():
        values = metric.compute()
        values = values if isinstance(values, dict) else {"": values}
        updates = metric.to_parts().get("updates") if hasattr(metric, "to_parts") else None
        found[name] = updates, {part: float(value).hex() for part, value in values.items()}
    return found


def alone(metric, data, interval):
    """Return the metric of the epoch, and that of the interval, each updated by itself."""
    epoch, recent = {}, {}
    for i, batch in enumerate(data):
        epoch = Metrics(epoch).update_({"m": metric({}, batch)})
        recent = Metrics({} if i % interval == 0 else recent).update_({"m": metric({}, batch)})
    return {**epoch, RECENT + "m": recent["m"]}


def both(metric, data, interval, at=None, change=lambda running: running):
    """Return both, updated together, and changed before one of the batches."""
    running = {}
    for i, batch in enumerate(data):
        running = Metrics(running).without_recent() if i % interval == 0 else running
        running = change(running) if i == at else running
        running = Metrics(running).update_({"m": metric({}, batch)}, recent=True)
        yield running


COPIES = {
    "a copy": copy.deepcopy,
    "two copies": lambda running: {name: copy.deepcopy(m) for name, m in running.items()},
}
