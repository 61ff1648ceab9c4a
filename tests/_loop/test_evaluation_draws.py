"""Draws of a forward in evaluation depend on the seed and the position of the batch alone."""

import pytest
import torch
from evaluation_draws import CALLS, draws_in


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_batch_has_its_own_draw_which_is_reproducible(call):
    draws = draws_in(call)
    assert len(draws) == len(set(draws.values())) == 6
    torch.manual_seed(7)  # the caller's generator is not used
    assert draws_in(call) == draws


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_batch_that_draws_more_does_not_change_the_draws_of_others(call):
    assert draws_in(call, wasteful=(0, 2, 3)) == draws_in(call)
