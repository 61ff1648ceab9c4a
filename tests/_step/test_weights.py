"""Weights that loss functions return as tensors, which are only read on the device."""

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy

ONE = torch.ones(1)


@pytest.mark.parametrize("inner", [(), (fl.clip(9.0),)], ids=["in place", "averaged"])
@pytest.mark.parametrize("weight", [0.0, float("nan"), -1.0])
def test_a_window_without_a_positive_weight_trains_nothing(inner, weight):
    def loss_fn(model, batch):
        return model(batch).mean(), {"weight": torch.tensor(weight)}

    state, _ = fl.pipeline(*inner, fl.accumulate(2))(loss_fn)(toy(), [ONE, ONE])
    assert state.model.w.item() == 0.0


def test_a_negative_weight_is_an_error_even_if_the_sum_is_positive():
    """The sum of -1 and 3 is 2, which would be a valid number of items."""
    weights = iter([-1.0, 3.0])

    def loss_fn(model, batch):
        return model(batch).mean(), {"weight": torch.tensor(next(weights))}

    with pytest.raises(ValueError, match="one of them was NaN, infinite or negative"):
        fl.fit(fl.pipeline()(loss_fn), toy(), [ONE] * 2, hooks=())
