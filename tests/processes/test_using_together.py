"""Optimizers that rest, on several processes."""

from pathlib import Path

import pytest
import torch
from joined import world
from process_problems import adam_sgd, created
from torch import nn

import fnloop as fl

pytestmark = pytest.mark.slow


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def adam_and_lbfgs(parameters):
    parameters = [*parameters]
    lbfgs = torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")
    return {"adam": torch.optim.Adam(parameters, lr=0.02), "lbfgs": lbfgs}


def loss_fn(model, batch):
    return (model(batch) - batch[:, :3]).square().mean()


def loader():
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
    return torch.utils.data.DataLoader(data, batch_size=4)


def trained(names, optimizers, state=None, folder=None, **settings):
    """Train two epochs with each optimizer in turn."""
    if state is None:
        state = created(optimizer=optimizers, make=network, **settings)
    hooks = () if folder is None else (fl.every(steps=4)(fl.checkpoint(folder, keep=9)),)
    for name in names:
        step = fl.pipeline(fl.accumulate(2 // world()), fl.clip(0.5), fl.using(name))(loss_fn)
        state = fl.fit(step, state, loader(), epochs=2, phase=name, hooks=hooks)
    return state


def seen(state):
    weights = [getattr(p, "full_tensor", lambda p=p: p)() for p in state.model.parameters()]
    return [
        dict(state.updates), [p.detach().flatten().tolist() for p in weights],
        [*state.history["train/loss"]], [*state.history["train/grad_norm"]],
    ]  # fmt: skip


TABLE = {
    "lbfgs": (("adam", "lbfgs"), adam_and_lbfgs, {}),
    "parts": (("matrices", "rest"), adam_sgd, {}),
    "exact": (("adam", "lbfgs"), adam_and_lbfgs, {"exact": True}),
    "sharded": (("matrices", "rest"), adam_sgd, {"shard": True}),
}


def table(folder):
    return {
        case: seen(trained(names, optimizers, **settings))
        for case, (names, optimizers, settings) in TABLE.items()
    }


def test_two_processes_come_to_what_one_does(launched):
    (one,), both = launched(table, 1), launched(table, 2)
    assert both[0] == both[1] and both[0]["exact"] == one["exact"]
    for case, (updates, weights, *metrics) in both[0].items():
        assert updates == dict.fromkeys(TABLE[case][0], 6)
        for ours, theirs in zip([*weights, *metrics], [*one[case][1], *one[case][2:]], strict=True):
            rel = 1e-6 if case == "lbfgs" else 1e-9
            assert ours == pytest.approx(theirs, rel=rel, abs=1e-9), case


def resumed(folder):
    """Train with checkpoints of update 4, with Adam, and 8 and 12, with L-BFGS; resume each."""
    saves = Path(folder) / "saves"
    found = [seen(trained(("adam", "lbfgs"), adam_and_lbfgs, folder=saves))]
    for path in sorted(saves.glob("*step*")):
        state = fl.restore(path, created(optimizer=adam_and_lbfgs, make=network))
        found.append(seen(trained(("adam", "lbfgs"), adam_and_lbfgs, state=state)))
    return found


def test_a_checkpoint_of_two_processes_continues_in_either_half(launched):
    for whole, *others in launched(resumed, 2):
        assert len(others) >= 2 and others == [whole] * len(others)
