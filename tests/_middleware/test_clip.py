"""clip and clip_value: norms, limits and what is reported."""

import math

import pytest
import torch

import fnloop as fl
from fnloop.testing import spy, toy, toy_loss


@pytest.mark.parametrize(("grad", "clipped"), [(4.0, 1.0), (-4.0, -1.0), (0.5, 0.5), (0.0, 0.0)])
def test_clip_scales_to_the_limit_and_reports_the_norm_before_it(grad, clipped):
    state, out = fl.clip(1.0).gradient(spy(grad=grad))(toy(), None)
    assert state.model.w.grad.item() == pytest.approx(clipped, abs=1e-6)
    assert out.metrics["grad_norm"].compute() == abs(grad)


def test_the_norm_is_over_all_parameters_together():
    model = torch.nn.Linear(2, 1)  # three parameters, each with gradient 2: a norm of 2 sqrt(3)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    _, out = fl.clip(1.0).gradient(spy(grad=2.0))(state, None)
    assert out.metrics["grad_norm"].compute() == pytest.approx(2 * math.sqrt(3))
    assert model.weight.grad.tolist() == [[pytest.approx(1 / math.sqrt(3), rel=1e-5)] * 2]
    _, out = fl.clip(1.0, norm_type=math.inf).gradient(spy(grad=2.0))(state, None)
    assert out.metrics["grad_norm"].compute() == 2.0


def test_clip_inf_measures_the_norm_and_changes_nothing():
    state, out = fl.clip(math.inf).gradient(spy(grad=math.inf))(toy(), None)
    assert (state.model.w.grad.item(), out.metrics["grad_norm"].compute()) == (math.inf, math.inf)


def test_the_norm_is_in_the_history():
    state = fl.fit(
        fl.pipeline(fl.clip(1.0))(toy_loss),
        toy(),
        [torch.tensor([3.0]), torch.tensor([5.0])],
        hooks=(),
    )
    assert state.history["train/grad_norm"] == (4.0,)


@pytest.mark.parametrize(("grad", "clamped"), [(4.0, 1.5), (-4.0, -1.5), (1.0, 1.0)])
def test_clip_value_clamps_each_element(grad, clamped):
    state, _ = fl.clip_value(1.5).gradient(spy(grad=grad))(toy(), None)
    assert state.model.w.grad.item() == clamped


def test_a_skipped_update_is_not_clipped():
    state, out = fl.clip(1.0).gradient(spy(grad=4.0, skip="no"))(toy(), None)
    assert (state.model.w.grad.item(), "grad_norm" in out.metrics) == (4.0, False)


@pytest.mark.parametrize("factory", [fl.clip, fl.clip_value])
@pytest.mark.parametrize(
    ("limit", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)],
)
def test_a_limit_must_be_a_number_above_zero(factory, limit, error):
    with pytest.raises(error, match=f"{factory.__name__} expects"):
        factory(limit)


def test_the_norm_in_a_record_is_the_unweighted_mean_over_updates():
    """The norms are 3 for a batch of one item and 1 for a batch of two."""
    batches = [torch.tensor([3.0]), torch.tensor([1.0, 1.0])]
    state = fl.fit(fl.pipeline(fl.clip(9.0))(toy_loss), toy(), batches, hooks=())
    assert state.history["train/grad_norm"] == (2.0,)
