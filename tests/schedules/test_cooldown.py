"""The first update of a run changes the weights, even under a long cooldown."""

import pytest
import torch

import fnloop as fl
from fnloop.schedules import cosine, linear, polynomial
from fnloop.testing import toy, toy_loss


@pytest.mark.parametrize("make", [linear, cosine, polynomial])
@pytest.mark.parametrize("cooldown", [4, 9, 1.0])
def test_the_first_factor_is_one_under_a_cooldown_as_long_as_the_run(make, cooldown):
    assert [make(cooldown=cooldown)(i, 4) for i in range(4)] == [1.0, 0.0, 0.0, 0.0]
    assert [make(cooldown=cooldown, min_ratio=0.5)(i, 4) for i in range(4)] == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("make", [linear, cosine, polynomial])
def test_a_cooldown_that_leaves_no_room_follows_the_warmup_at_once(make):
    assert [make(warmup=2, cooldown=9)(i, 4) for i in range(4)] == [0.5, 1.0, 0.0, 0.0]


def test_a_cooldown_as_long_as_the_run_still_changes_the_weights_once():
    step = fl.pipeline(fl.schedule(linear(cooldown=4)))(toy_loss)
    state = fl.fit(step, toy(lr=1.0), [torch.ones(1)] * 4, epochs=1, hooks=())
    assert (state.step, state.model.w.item()) == (4, -1.0)
