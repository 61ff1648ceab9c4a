"""clip_adaptive: each unit's gradient against its weights, as timm's adaptive_clip_grad does."""

import importlib.metadata
import importlib.util
import math

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import spy, toy


def published(parameters, ratio):
    """timm's ``adaptive_clip_grad``, from its file: the package needs torchvision."""
    try:
        path = importlib.metadata.distribution("timm").locate_file("timm/utils/agc.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("timm is not installed")
    spec = importlib.util.spec_from_file_location("agc", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.adaptive_clip_grad(parameters, clip_factor=ratio)


@pytest.mark.parametrize(
    ("w", "grad", "clipped"), [(2.0, 4.0, 1.0), (-2.0, -4.0, -1.0), (2.0, 0.5, 0.5), (0.0, 1, 5e-4)]
)
def test_the_limit_is_a_part_of_the_weight_which_counts_as_a_thousandth_at_least(w, grad, clipped):
    state, _ = fl.clip_adaptive(0.5).gradient(spy(grad=grad))(toy(w=w), None)
    assert state.model.w.grad.item() == pytest.approx(clipped)


def test_each_row_is_a_unit_and_a_bias_is_one():
    model = nn.Linear(2, 2)
    model.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # norms 5 and 0.5
    model.bias.data = torch.tensor([6.0, 8.0])  # norm 10
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fl.clip_adaptive(0.1).gradient(spy(grad=1.0))(state, None)  # norms of sqrt(2)
    rows = model.weight.grad.norm(dim=1).tolist()
    assert rows == [pytest.approx(0.5), pytest.approx(0.05)]
    assert model.bias.grad.norm().item() == pytest.approx(1.0)


def test_it_equals_timm_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    x, state = torch.randn(2, 3, 4, 4), None
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    hand = fl.snapshot(state)

    def loss_fn(model, batch):
        return model(batch).square().mean()

    fl.fit(fl.pipeline(fl.clip_adaptive(0.02))(loss_fn), state, [x], hooks=())
    loss_fn(hand.model, x).backward()
    before = [p.grad.clone() for p in hand.model.parameters()]
    published(hand.model.parameters(), 0.02)
    assert not all(
        torch.equal(p.grad, g) for p, g in zip(hand.model.parameters(), before, strict=True)
    )
    hand.optimizer.step()
    for mine, theirs in zip(model.parameters(), hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_others_are_left_alone_and_infinity_switches_it_off():
    model = nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    fl.clip_adaptive(0.1, only="weight").gradient(spy(grad=9.0))(state, None)
    assert model.bias.grad.item() == 9.0 > model.weight.grad.item()
    assert fl.clip_adaptive(math.inf).gradient is None


def test_a_unit_whose_norm_is_not_finite_becomes_nan_and_others_do_not():
    model = nn.Linear(2, 2, bias=False)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def one_bad(state, batch):
        state, out = spy(grad=1.0)(state, batch)
        model.weight.grad[0, 0] = math.inf
        return state, out

    fl.clip_adaptive(0.1).gradient(one_bad)(state, None)
    assert model.weight.grad[0].isnan().all() and model.weight.grad[1].isfinite().all()


def test_a_skipped_update_is_not_clipped():
    state, _ = fl.clip_adaptive(0.1).gradient(spy(grad=4.0, skip="no"))(toy(), None)
    assert state.model.w.grad.item() == 4.0


@pytest.mark.parametrize(
    ("ratio", "error"),
    [(0.0, ValueError), (-1, ValueError), (math.nan, ValueError), ("1", TypeError)],
)
def test_the_ratio_must_be_a_number_above_zero(ratio, error):
    with pytest.raises(error, match="clip_adaptive expects ratio"):
        fl.clip_adaptive(ratio)
