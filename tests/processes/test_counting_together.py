"""Runs by items in several processes: all decide alike, and as one process with larger batches."""

import pytest
import torch
from launch import reads, written_by
from torch.utils.data import DataLoader
from toy_runs import noting

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow

DATA = torch.arange(1.0, 12.0)  # 11 samples: batches of 4 in all, and the last one of 3
REACHED = [4, 8, 11, 15, 19, 22, 26]


def numbers(model, batch):
    """Weigh samples by their own number, which differs between processes."""
    return toy_loss(model, batch)[0], {"weight": int(batch.sum())}


def on_device(model, batch):
    return toy_loss(model, batch)[0], {"weight": torch.tensor(len(batch))}


LOSSES = {"samples": toy_loss, "numbers": numbers, "on_device": on_device}


def trained(loss_fn, state, n, *hooks, members=(), **settings):
    """Return what a run has come to, and what its hooks have seen."""
    look, seen = noting(lambda state: (state.step, state.items))
    due, dues = noting(lambda state: state.step)
    rates = []
    schedule = fl.schedule(lambda items, total: rates.append((items, total)) or 0.1, by="items")
    loader = DataLoader(DATA, batch_size=4 // n)
    hooks = (look, fl.every(items=10)(due), *hooks)
    state = fl.fit(fl.pipeline(*members, schedule)(loss_fn), state, loader, hooks=hooks, **settings)
    return state, [seen, dues, rates, [state.step, state.items, state.history[-1].items]]


def by_items(folder):
    n, found = toy().backend.data_size, {}
    for name, loss_fn in LOSSES.items():
        target = 150 if name == "numbers" else 26
        saves = fl.every(steps=1)(fl.checkpoint(folder / name, keep=None))
        found[name] = trained(loss_fn, toy(lr=0.01), n, saves, items=target)[1]
    model = toy().model
    exact = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0, exact=True)
    members = (fl.accumulate(2 // n),)
    found["exact"] = trained(toy_loss, exact, 2, members=members, items=26)[1]
    state = fl.fit(fl.pipeline()(on_device), toy(), DataLoader(DATA, batch_size=4 // n), hooks=())
    found["not followed"] = [state.items, state.epoch]
    asked = lambda state: state.items and state
    try:
        fl.fit(fl.pipeline()(toy_loss), toy(), DataLoader(DATA, batch_size=4 // n), hooks=(asked,))
        found["asked"] = ""
    except RuntimeError as error:
        found["asked"] = str(error)
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_all_processes_count_alike_and_as_one(launched, n):
    for found in launched(by_items, n):
        seen, due, rates, end = found["samples"]
        assert seen == [[step, items] for step, items in enumerate(REACHED, 1)]
        assert due == [3, 6] and end == [7, 26, 26]
        assert rates == [[items, 26] for items in [0, *REACHED[:-1]]]
        seen, due, rates, end = found["on_device"]
        assert seen == [[step, items] for step, items in enumerate([0, *REACHED], 1)]
        assert due == [4, 7] and end == [8, 26, 30]
        assert rates == [[items, 26] for items in [0, 0, *REACHED[:-1]]]
        seen, due, _, end = found["numbers"]  # 1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10 + 11
        assert seen == [[1, 10], [2, 36], [3, 66], [4, 76], [5, 102], [6, 132], [7, 142], [8, 168]]
        assert due == [*range(1, 9)] and end == [8, 168, 168]
        assert found["exact"] == found["on_device"]  # which sums all weights on the device
        assert found["not followed"] == [8, 1]
        assert ("Record.items has it in any run" in found["asked"]) == (n > 1)


@reads(by_items, [2])
def continued(folder):
    """Continue each run from each of its checkpoints."""
    n, found = toy().backend.data_size, {}
    for name, loss_fn in LOSSES.items():
        target = 150 if name == "numbers" else 26
        for path in sorted((written_by(by_items, 2, folder) / name).iterdir()):
            state = fl.restore(path, toy(lr=0.01))
            if state.batch and n != 2:
                continue  # in mid-epoch, batches are of other processes
            step, known = state.step, state.items
            found[f"{name} {step}"] = [known, *trained(loss_fn, state, n, items=target)[1]]
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_a_run_that_continues_counts_as_one_that_was_not_cut(launched, n):
    whole = launched(by_items, 2)[0]
    for found in launched(continued, n):
        assert len(found) > (15 if n == 2 else 5)
        for name, (known, seen, due, rates, end) in found.items():
            kind, step = name.split()
            right = whole[kind]
            assert known == dict(map(tuple, right[0]))[int(step)], name
            assert seen == right[0][int(step) :], name
            assert due == [at for at in right[1] if at > int(step)], name
            assert rates == right[2][int(step) :] and end == right[3], name
