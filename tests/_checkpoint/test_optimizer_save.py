"""How an optimizer is saved."""

import pytest
import torch
from sample_optimizers import CountingSaved, Typed, facts_of, toy_state
from torch import nn

import fnloop as fl
from fnloop._checkpoint.optimizer import NamedOptimizer, encode_optimizer
from fnloop.testing import assert_same

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def test_the_settings_of_an_optimizer_are_human_readable(tmp_path):
    state = toy_state(Typed)
    state.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    facts = facts_of(fl.save(state, tmp_path / "a"))["param_groups"][0]
    assert facts["lr"] == {"$scalar": 0.1, "dtype": "float32"}
    assert facts["momentum_dtype"] == {"$dtype": "float16"} and facts["shape_of"] == {
        "$setting": "max"
    }


def test_complex128_is_restored_in_the_model_the_loss_and_the_optimizer(tmp_path):
    def new():
        model = nn.Module()
        model.z = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
        model.register_buffer("turn", torch.tensor([0.5j], dtype=torch.complex128))
        own = nn.Parameter(torch.tensor([2j], dtype=torch.complex128))
        state = fl.TrainState.create(model, Adam([model.z, own], lr=0.1), seed=0)
        return state, fl.pipeline()(
            lambda model, batch: (model.z * own * model.turn).abs().sum() * batch
        )

    def fit(pair, **kwargs):
        return fl.fit(pair[1], pair[0], [torch.tensor(1.0)] * 4, hooks=(), **kwargs)

    whole, half = fit(new()), fit(new(), steps=2)
    pair = new()
    resumed = fl.restore(fl.save(half, tmp_path / "a"), pair[0])
    assert_same(fit((resumed, pair[1]), epochs=1), whole)
    assert torch.equal(
        resumed.optimizer.param_groups[0]["params"][1], whole.optimizer.param_groups[0]["params"][1]
    )
    assert resumed.model.z.dtype is torch.complex128


def test_a_sharded_model_is_refused_if_the_optimizer_has_its_own_state_dict():
    state = toy_state(CountingSaved)
    with pytest.raises(
        fl.CheckpointError,
        match="CountingSaved has its own state_dict and the model is sharded",
    ):
        encode_optimizer(
            NamedOptimizer(state.optimizer, NamedOptimizer.of_state(state)[""].names, sharded=True),
            {},
        )
