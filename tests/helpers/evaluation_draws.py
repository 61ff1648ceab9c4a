"""The random draws of a forward in evaluation, by each function that evaluates."""

import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

BATCHES = [torch.tensor([float(n)]) for n in range(6)]


def draws_in(call, wasteful=()):
    """Return the first draw of each batch. Wasteful batches then draw more."""
    found = {}

    def loss(model, batch):
        n = int(batch)
        found[str(n)] = torch.rand(()).item()
        torch.rand(10 if n in wasteful else 0)
        return model(batch).mean()

    call(loss)
    return found


def in_evaluate(loss):
    fl.evaluate(fl.pipeline()(loss), toy(), BATCHES)


def in_predict(loss):
    list(fl.predict(loss, toy(), BATCHES))


def in_fit(loss):
    def only_in_evaluation(model, batch):
        return toy_loss(model, batch) if model.training else loss(model, batch)

    fl.fit(fl.pipeline()(only_in_evaluation), toy(), (BATCHES, BATCHES), epochs=1, hooks=())


CALLS = {"evaluate": in_evaluate, "predict": in_predict, "fit": in_fit}
