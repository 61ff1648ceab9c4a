"""What a forward draws in evaluation is a function of the seed and the batch alone."""

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

BATCHES = [torch.tensor([float(n)]) for n in range(6)]


def draws_in(call, wasteful=()):
    """Return the first draw in the forward of each batch. Wasteful batches draw more after it."""
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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_batch_has_a_draw_of_its_own_and_the_same_each_time(call):
    draws = draws_in(call)
    assert len(draws) == len(set(draws.values())) == 6
    torch.manual_seed(7)  # the caller's generator has no part in it
    assert draws_in(call) == draws


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_that_draws_more_changes_no_draw_of_the_others(call):
    assert draws_in(call, wasteful=(0, 2, 3)) == draws_in(call)
