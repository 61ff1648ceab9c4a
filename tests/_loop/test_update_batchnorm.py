"""update_batchnorm: the same statistics as torch's update_bn, and nothing else changes."""

import copy

import pytest
import torch
from loop_cases import generators
from torch import nn
from torch.optim.swa_utils import update_bn
from toy_runs import assert_same_weights, of

import fnloop as fl
from fnloop.testing import assert_same, small, toy, toy_loss


def loss_fn(model, batch):
    output = model(batch[0])
    return nn.functional.mse_loss(output.double(), batch[1]), {"output": output}


BATCHES = [batch for batch in small().batches if len(batch[0]) > 1]


def net(**settings):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, **settings)
    layers = (nn.Linear(6, 8), norm, nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 1))
    return nn.Sequential(*layers).double()


def trained(*members, model=None):
    step = fl.pipeline(fl.swa(2), *members)(loss_fn)
    return step, fl.fit(step, of(model or net(), lr=0.1), BATCHES, epochs=2, hooks=())


@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"affine": False}], ids=repr)
def test_the_statistics_are_those_of_torch(settings):
    step, state = trained(model=net(**settings))
    averaged = fl.averaged(state, "swa")
    theirs = copy.deepcopy(averaged.model)
    update_bn(BATCHES, theirs)
    found = fl.update_batchnorm(step, averaged, lambda: iter(BATCHES))
    assert not torch.equal(theirs[1].running_mean, state.model[1].running_mean)
    assert_same_weights(found, theirs)
    assert found.model[1].momentum == settings.get("momentum", 0.1)


def test_the_forward_is_that_of_the_step():
    step, state = trained(fl.amp("bf16"))
    averaged = fl.averaged(state, "swa")
    theirs = copy.deepcopy(averaged.model)
    with torch.autocast("cpu", torch.bfloat16):
        update_bn(BATCHES, theirs)
    assert_same_weights(fl.update_batchnorm(step, averaged, BATCHES), theirs)


def test_nothing_else_changes():
    step, state = trained()
    state.model[1].eval()
    flags = [module.training for module in state.model.modules()]
    drawn, before = generators(), fl.snapshot(state)
    found = fl.update_batchnorm(step, state, BATCHES)
    with pytest.raises(fl.StaleStateError):
        fl.update_batchnorm(step, state, BATCHES)
    assert flags == [module.training for module in found.model.modules()]
    assert generators() == drawn
    assert found.model[1].num_batches_tracked.item() == len(BATCHES)
    found.model[1].load_state_dict(before.model[1].state_dict())
    assert_same(found, before)


def test_it_is_of_averaged_too_and_survives_a_checkpoint(tmp_path):
    step, state = trained()
    averaged = fl.update_batchnorm(step, fl.averaged(state, "swa"), BATCHES)
    with pytest.raises(ValueError, match="fit: this state is averaged"):
        fl.fit(step, averaged, BATCHES)
    restored = fl.restore(fl.save(averaged, tmp_path / "a"), of(net(), lr=0.1))
    assert fl.evaluate(step, restored, BATCHES) == fl.evaluate(step, averaged, BATCHES)


def test_a_failure_leaves_the_statistics_as_they_were():
    step, state = trained()
    before = fl.snapshot(state)
    broken = [*BATCHES[:2], (torch.zeros(3, 5).double(), torch.zeros(3, 1).double())]
    with pytest.raises(RuntimeError) as caught:
        fl.update_batchnorm(step, state, broken)
    assert caught.value.__notes__ == [
        "the batch: (3, 5) float64, (3, 1) float64",
        "while in the loss function loss_fn, update_batchnorm, batch 2",
    ]
    assert_same(state, before)
    assert state.model[1].momentum == 0.1 and state.model[1].training
    with pytest.raises(ValueError, match="update_batchnorm: the loader gave no batch"):
        fl.update_batchnorm(step, state, [])
    assert_same(state, before)


def test_a_model_without_batchnorm_stays_as_it_is():
    def never():
        raise AssertionError("the loader is read")

    step, state = fl.pipeline()(toy_loss), toy(w=2.0)
    found = fl.update_batchnorm(step, state, never)
    assert found.model.w.item() == 2.0
    with pytest.raises(fl.StaleStateError):
        fl.evaluate(step, state, [torch.ones(1)])
