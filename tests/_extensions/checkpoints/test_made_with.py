"""Checkpoints say what their run was made with."""

import json

import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop._core.types import Call
from fnloop._extensions.checkpoints.made_with import hash_of
from fnloop._extensions.engines.consensus import comparable
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        return self.linear(x)


def helper(x):
    return x * 2


def loss_fn(model, batch):
    return helper(model(batch)).mean()


def half(step, total):
    return 0.5


@fl.middleware("gradient")
def own():
    return lambda step: step


def kept(folder, pipe, loss, state, hooks=()):
    """Return what the checkpoint of a run says."""
    fl.fit(pipe(loss), state, [ONE], hooks=(*hooks, fl.checkpoint(folder)))
    return json.loads((folder / "step-00000001" / "state.json").read_text())["made_with"]


def test_the_step_the_functions_the_device_and_the_hooks_are_kept(tmp_path):
    model = Net()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))
    pipe = fl.pipeline(fl.clip(1.0), fl.schedule(half), own())

    def nothing(state):
        return state

    found = kept(tmp_path, pipe, loss_fn, state, (nothing, fl.halt_on_nonfinite()))
    assert found["step"] == repr(pipe(loss_fn))
    assert found["device"].startswith("cpu (") and found["device"].endswith("1 threads)")
    assert (found["hooks"], found["hook_slots"]) == (["nothing"], [])
    names = ["Net.__init__", "Net.forward", "half", "helper", "loss_fn", "own"]
    assert [*found["functions"]] == names
    assert found["functions"]["helper"] == hash_of(helper)


def test_nothing_is_looked_at_where_no_checkpoint_is_saved(monkeypatch):
    def refuse(function):
        raise AssertionError

    monkeypatch.setattr("fnloop._extensions.checkpoints.made_with.hash_of", refuse)
    fl.fit(fl.pipeline()(lambda model, batch: toy_loss(model, batch)), toy(), [ONE], hooks=())


@pytest.mark.parametrize(("a", "b", "same"), [
    ("lambda x: x + 1", "lambda x: x + 1", True),
    ("lambda x: x + 1", "lambda x: x + 2", False),
    ("lambda x: x.a", "lambda x: x.b", False),
    ("lambda x: [x + i for i in x]", "lambda x: [x - i for i in x]", False),
    ("lambda x: x in {0, 'a', 'b'}", "lambda x: x in {0, 'b', 'a'}", True),
])  # fmt: skip
def test_a_function_without_a_source_is_known_by_its_code(a, b, same):
    assert (hash_of(eval(a)) == hash_of(eval(b))) is same


def test_a_setting_is_compared_by_what_is_the_same_in_every_process():
    """Plain data, and the names of functions and classes: no address, no order of a set."""
    one, other = (
        Call(fl.metric, (), {"a": lambda aux, batch: 0, "loaders": ("valid",)}) for _ in range(2)
    )
    assert comparable(one) == comparable(other)
    assert comparable(fl.clip(1).call) == comparable(fl.clip(max_norm=1.0).call)
    assert comparable(fl.clip(1).call) != comparable(fl.clip(2).call)
    assert comparable(nn.Linear(1, 1)) == comparable(nn.Linear(1, 1)) == "Linear"
    assert comparable({"b", "a"}) == ["'a'", "'b'"]
    assert comparable({1: [2, None, torch.float16]}) == [[1.0, [2.0, None, torch.float16]]]
    linear = fl.schedules.linear
    assert comparable(linear(warmup=2)) == comparable(linear(warmup=2))
    assert comparable(linear(warmup=2)) != comparable(linear(warmup=3))
