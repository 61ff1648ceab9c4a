"""An update of several processes is made again on as many, bit for bit."""

import math

import pytest
import torch
import torch.distributed as dist
from process_problems import entropy, loader, samples
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.debug import diff, replay
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow
BAD = 17  # a sample


def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=3)


def job(folder):
    dist.init_process_group("gloo")
    found = {}
    step = fl.pipeline(fl.accumulate(2), fl.clip(0.1), fl.ema(0.9))(entropy)
    states = {}

    def keep(state):
        states[state.step] = fl.snapshot(state)
        return state

    saves = fl.when(lambda state: state.step == 2)(fl.checkpoint(folder / "runs", keep=None))
    fl.fit(step, fresh(), loader(shuffle=True), epochs=3, hooks=(keep, saves))
    made = replay(folder / "runs", step, fresh(), loader(shuffle=True), update=6)
    assert_same(made.before, states[5])
    assert_same(made.after, states[6])
    found["equal"] = not diff(made.after, states[6])
    found["indices"] = made.indices
    found["batches"] = [batch[3].tolist() for batch in made.batches]  # their own indices
    found["grads"] = {name: grad.sum().item() for name, grad in made.grads.items()}

    x, y = samples().tensors[:2]
    x[BAD] = math.nan
    bad = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    hook = fl.halt_on_nonfinite(keep=True)
    first = (fl.at_start())(fl.checkpoint(folder / "bad", keep=None))
    state = fl.fit(fl.pipeline()(entropy), fresh(), bad, hooks=(hook, first))
    found["place"], found["stop"] = state.extra["nonfinite"], state.stop
    made = replay(
        folder / "bad", fl.pipeline()(entropy), fresh(), bad, update=found["place"]["step"]
    )
    found["nonfinite"] = made.nonfinite
    return found


def test_an_update_is_made_again_by_as_many_processes(launched):
    one, two = launched(job, 2)
    assert one["equal"] and two["equal"]
    assert one["grads"] == two["grads"]
    assert one["indices"] == one["batches"] and two["indices"] == two["batches"]
    mine, its = ({i for index in found["indices"] for i in index} for found in (one, two))
    assert len(mine) == len(its) == 6 and not mine & its


def test_a_bad_sample_is_named_by_all_processes(launched):
    one, two = launched(job, 2)
    assert one["place"] == two["place"] and one["stop"] == two["stop"]
    indices = one["place"]["indices"]
    assert len(indices) == 2 and BAD in indices[0] + indices[1]
    assert sorted([one["nonfinite"], two["nonfinite"]]) == [[], [BAD]]
