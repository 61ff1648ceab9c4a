"""Metrics, and middleware by a function, of the jobs that run on several processes."""

import attrs
import torch

import fnloop as fl


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


def changing(ring, change, name="changing"):
    """Return middleware that changes what its step returns: ``change(state, out, batch)``."""

    def wrap(step):
        def changed(state, batch):
            state, out = step(state, batch)
            return state, change(state, out, batch)

        return changed

    return fl.Middleware(name, **{ring: wrap})


def with_metrics(out, **metrics):
    return attrs.evolve(out, metrics={**out.metrics, **metrics})


def items():
    """Report the samples of an update: 1 / the largest element of the gradient."""
    items = lambda state: fl.Sum(1 / state.model.w.grad.max())
    return changing("gradient", lambda state, out, batch: with_metrics(out, items=items(state)))
