"""``layers``: parts of a model by number."""

import copy

import pytest
import torch
from torch import nn

import fnloop as fl


def linear():
    return nn.Linear(1, 1)


class Wrapped(nn.Module):
    def __init__(self, *children, own=False):
        super().__init__()
        for i, child in enumerate(children):
            self.add_module(f"part{i}", child)
        if own:
            self.token = nn.Parameter(torch.zeros(1))


A, B, C = linear(), nn.Sequential(linear(), nn.ReLU()), linear()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(A, B, C), (A, B, C)),
        (Wrapped(A, nn.ReLU(), B, nn.Dropout(), C, nn.Identity()), (A, B, C)),  # none without
        (Wrapped(nn.Sequential(A, B, C)), (A, B, C)),  # opened, as a wrapper of a model is
        (Wrapped(nn.Dropout(), Wrapped(nn.ModuleList([A, B, C]))), (A, B, C)),
        (Wrapped(nn.ModuleDict({"a": A, "c": C})), (A, C)),
        (nn.Sequential(A), (A,)),
        (Wrapped(A, A, C), (A, C)),  # one module in two places
        (A, (A,)),
    ],
)
def test_layers_are_the_children_that_have_parameters(model, expected):
    assert fl.layers(model) == expected


def test_a_module_with_parameters_of_its_own_is_not_opened():
    inner = nn.Sequential(A, B)
    assert fl.layers(Wrapped(inner, own=True)) == (inner,)


def test_a_wrapped_model_has_the_layers_of_its_module():
    assert fl.layers(nn.DataParallel(nn.Sequential(A, B, C))) == (A, B, C)


def test_all_but_the_last_are_frozen_then_one_more_is_trained():
    net = copy.deepcopy(Wrapped(A, nn.ReLU(), B, C))
    state = fl.TrainState.create(net, torch.optim.SGD(net.parameters(), lr=1.0))
    trained = lambda: [name for name, p in net.named_parameters() if p.requires_grad]
    state = fl.freeze(state, *fl.layers(net)[:-1])
    assert trained() == ["part3.weight", "part3.bias"]
    state = fl.unfreeze(state, *fl.layers(state.model)[-2:])
    assert trained() == ["part2.0.weight", "part2.0.bias", "part3.weight", "part3.bias"]
    with pytest.raises(TypeError, match="freeze expects what to freeze after the state"):
        fl.freeze(state, *fl.layers(state.model)[:0])


def test_a_state_is_not_a_model():
    state = fl.TrainState.create(A, torch.optim.SGD(A.parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"layers expects model as a module, such as state\.model"):
        fl.layers(state)
