"""However long a cooldown is, the first update of a run changes the weights."""

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
def test_the_cooldown_follows_the_warmup_at_once_where_there_is_no_room_between_them(make):
    assert [make(warmup=2, cooldown=9)(i, 4) for i in range(4)] == [0.5, 1.0, 0.0, 0.0]


def test_a_run_under_a_cooldown_as_long_as_itself_makes_one_update():
    step = fl.pipeline(fl.schedule(linear(cooldown=4)))(toy_loss)
    state = fl.fit(step, toy(lr=1.0), [torch.ones(1)] * 4, epochs=1, hooks=())
    assert (state.step, state.model.w.item()) == (4, -1.0)
