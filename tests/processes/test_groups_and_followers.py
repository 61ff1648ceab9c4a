"""Rates of parameter groups, and checkpoints that are read as they appear, on several processes."""

from pathlib import Path

import pytest
import torch
from joined import world
from process_problems import created
from torch import nn

import fnloop as fl

pytestmark = pytest.mark.slow


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def in_groups(parameters):
    first, *rest = parameters
    groups = [{"params": [first], "name": "first"}, {"params": rest, "name": "rest"}]
    return torch.optim.SGD(groups, lr=0.1)


def loss_fn(model, batch):
    return (model(batch) - batch[:, :3]).square().mean()


def loader():
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    return torch.utils.data.DataLoader(data, batch_size=4)


RATES = (
    fl.schedule(lambda i, total: 1 / (i + 1), only="first"),
    fl.plateau("train/loss", patience=1, factor=0.5, mode="max", min_value=0.03, only="rest"),
)


def trained(folder):
    step = fl.pipeline(fl.accumulate(2 // world()), *RATES)(loss_fn)
    saves = fl.every(epochs=1)(fl.checkpoint(Path(folder) / "saves", keep=9))
    state = created(optimizer=in_groups, make=network)
    return fl.fit(step, state, loader(), epochs=4, hooks=(saves,))


def rates(folder):
    state = trained(folder)
    weights = [p.detach().flatten().tolist() for p in state.model.parameters()]
    return [*state.history["train/lr/first"]], [*state.history["train/lr/rest"]], weights


def test_two_processes_set_the_rates_of_groups_as_one_does(launched):
    ((first, rest, one),), both = launched(rates, 1), launched(rates, 2)
    # 3 updates in an epoch: the last ones are the 3rd, 6th, 9th and 12th. The loss falls.
    assert first == pytest.approx([0.1 / 3, 0.1 / 6, 0.1 / 9, 0.1 / 12])
    assert rest == pytest.approx([0.1, 0.1, 0.05, 0.03])
    for found in both:
        assert found[:2] == [first, rest]
        for ours, theirs in zip(found[2], one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)


def followed(folder):
    state, step = trained(folder), fl.pipeline()(loss_fn)
    wanted = fl.evaluate(step, state, loader())["loss"]
    found = [
        (seen.step, fl.evaluate(step, seen, loader())["loss"])
        for seen in fl.follow(
            Path(folder) / "saves", created(optimizer=in_groups, make=network), every=True
        )
    ]
    return [at for at, _ in found], found[-1][1] == wanted


def test_two_processes_follow_a_run_together(launched):
    for at, same in launched(followed, 2):
        assert at[:3] == [3, 6, 9] and at[-1] == 12 and same
