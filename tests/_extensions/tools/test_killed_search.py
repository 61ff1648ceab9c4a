"""A search that is killed nine times, on one process and on two, ends as a whole one."""

import itertools
import random

import launch
import pytest
import torch
from joined import rank, world
from killed_run import facts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.schedules import cosine

SETTINGS = {
    "lr": [0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.1],
    "weight_decay": [0.0, 0.1, 1.0],
}
RUNGS, UPDATES = (1, 3, 9), (27 * 1 + 9 * 2 + 3 * 6) * 30  # 1,500 images in batches of 50
STEP = fl.pipeline(fl.clip(1.0), fl.schedule(cosine(warmup=0.1)))(
    fl.supervised(nn.CrossEntropyLoss())
)


def states():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return fl.fork(fl.TrainState.create(model, optimizer, seed=0), SETTINGS)


def loaders():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), 50 // world(), shuffle=True)
    return {"train": train, "valid": DataLoader(TensorDataset(x[1500:], y[1500:]), 100)}


def alone(folder, last):
    """Return what each run is at each rung up to its last, when it is trained without a search."""
    data, found = loaders(), {}
    for name, state in states().items():
        reached = fl.run(STEP, state, data, epochs=RUNGS[-1], hooks=())
        epochs = itertools.islice(reached, last[name])
        found[name] = {s.epoch: facts(s) for s in epochs if s.epoch in RUNGS}
    return found


def searches(folder, limit):
    """Search, and ask to be killed after a number of updates. Return what each run has come to."""
    made = 0

    def ask(state):
        nonlocal made
        made += 1
        if made == limit and rank() == 0:
            (folder / "kill").touch()
        return state

    runs = folder.parent / "runs"
    found = fl.search(STEP, states(), loaders(), rungs=RUNGS, folder=runs, hooks=(ask,))
    saved = {name: fl.restore(fl.latest(runs / name), state) for name, state in states().items()}
    assert facts(saved[found.best]) == facts(found.state)
    assert {name: state.history for name, state in saved.items()} == found.histories
    values = [(rung.epoch, rung.name, rung.value.hex()) for rung in found.rungs]
    return {"rungs": values, "runs": {name: facts(state) for name, state in saved.items()}}


def saved(runs):
    """Return how many updates the checkpoints of all runs have, of UPDATES."""
    newest = [fl.latest(run) for run in runs.iterdir()] if runs.exists() else []
    return sum(int(path.name.removeprefix("step-")) for path in newest if path)


@pytest.mark.long
@pytest.mark.parametrize("n", [1, 2])
def test_a_search_killed_nine_times_has_the_runs_that_each_would_be_alone(n, tmp_path):
    """Each kill comes up to 20 ms after an update, wherever the processes are then."""
    draw, runs, made = random.Random(n), tmp_path / "runs", [0]
    for kill in range(9):
        left, folder = UPDATES - made[-1], tmp_path / str(kill)
        limit = draw.randint(1, max(1, min(3 * left // (10 - kill), left - 200)))
        settings = {"kill_when": folder / "kill", "forked": True, "timeout": 200}
        killed = launch.launch(folder, n, searches, limit, **settings)
        assert killed.codes == [-9] * n and killed.results == [None] * n, killed.errors
        made.append(saved(runs))
    assert made[1] < 27 * 30 and made[-1] > (27 + 9 * 2) * 30  # from the first rung to the last
    found, *others = launch.results(tmp_path / "9", n, searches, 0, timeout=200)
    assert others == [found] * (n - 1)
    assert [epoch for epoch, _, _ in found["rungs"]] == [1] * 27 + [3] * 9 + [9] * 3
    last = {name: epoch for epoch, name, _ in found["rungs"]}
    whole = launch.results(tmp_path / "alone", n, alone, last, timeout=200)[0]
    for epoch, name, loss in found["rungs"]:
        assert loss == whole[name][str(epoch)]["history"][-1][2]["valid/loss"]
    assert found["runs"] == {name: whole[name][str(epoch)] for name, epoch in last.items()}
