"""Settings that ``unfreeze`` refuses: those that the optimizer would."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import fnloop as fl
from fnloop.testing import toy


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"weight_decay": "x"}, ValueError, "unfreeze expects weight_decay as a finite number"),
        ({"momentum": -3}, ValueError, "SGD refuses these settings: Invalid momentum value: -3"),
        ({"nesterov": "yes"}, TypeError, "unfreeze expects nesterov as True or False"),
        ({"nesterov": True}, ValueError, "Nesterov momentum requires a momentum"),
        ({"lr": float("nan")}, ValueError, "unfreeze expects lr"),
    ],
)
def test_settings_that_the_optimizer_refuses_are_refused(settings, kind, message):
    state = toy()
    before = dict(state.optimizer.param_groups[0])
    with pytest.raises(kind, match=message):
        fl.unfreeze(state, "*", **settings)
    assert state.optimizer.param_groups == [before]
    state = fl.unfreeze(state, "*", nesterov=True, momentum=0.5)
    assert state.optimizer.param_groups[0]["momentum"] == 0.5


def test_pairs_and_settings_of_another_class_are_checked_as_far_as_possible():
    class Mine(SGD):
        def __init__(self, params):
            super().__init__(params, lr=1.0)

    w = nn.Linear(1, 1)
    for make, settings, message in (
        (lambda p: AdamW(p, lr=torch.tensor(1.0)), {"betas": (2.0, 0.5)}, "Invalid beta parameter"),
        (Mine, {"weight_decay": "x"}, "weight_decay as a finite number"),
    ):
        state = fl.TrainState.create(w, make(w.parameters()))
        with pytest.raises((TypeError, ValueError), match=message):
            fl.unfreeze(state, "*", **settings)
    assert fl.unfreeze(state, "*", momentum=0.5).optimizer.param_groups[0]["momentum"] == 0.5


def test_a_setting_that_one_of_the_groups_takes_is_not_refused():
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first = {"params": net[0].parameters(), "momentum": 0.5}
    optimizer = SGD([first, {"params": net[1].parameters()}], lr=1.0)
    state = fl.unfreeze(fl.TrainState.create(net, optimizer), "0", nesterov=True)
    assert [group["nesterov"] for group in state.optimizer.param_groups] == [True, False]
