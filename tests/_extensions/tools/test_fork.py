"""Runs that begin with one state."""

import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ONES = [torch.ones(1)] * 2


def ends(runs, step=None, **kwargs):
    """Return w at the end of each run of one epoch; each gradient is 1."""
    step = step or fl.pipeline()(toy_loss)
    settings = {"hooks": (), **kwargs}
    return {
        name: fl.fit(step, state, ONES, **settings).model.w.item() for name, state in runs.items()
    }


def test_each_combination_is_a_run_of_its_own():
    state = fl.fit(fl.pipeline()(toy_loss), toy(), ONES, hooks=())  # w is -2
    before = fl.snapshot(state)
    runs = fl.fork(state, {"lr": [1.0, 0.5], "weight_decay": [0.0, 1.0]})
    assert [*runs] == [
        "lr=1, weight_decay=0", "lr=1, weight_decay=1", "lr=0.5, weight_decay=0",
        "lr=0.5, weight_decay=1",
    ]  # fmt: skip
    # with decay: w - lr * (1 + w): -2 -> -1 -> -1, and -2 -> -1.5 -> -1.25
    assert [*ends(runs).values()] == [-4.0, -1.0, -3.0, -1.25]
    assert len({state.run_id, *(run.run_id for run in runs.values())}) == 5
    assert_same(state, before)
    assert state.optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0)])
def test_a_schedule_multiplies_the_new_rate(rate):
    model = toy().model
    start = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=rate), seed=0)
    step = fl.pipeline(fl.schedule(lambda i, total: 1 / (i + 1)))(toy_loss)
    state = fl.fit(step, start, ONES, hooks=())
    reached = state.model.w.item() - 4 / 3 - 4 / 4
    assert ends(fl.fork(state, {"lr": [4.0]}), step) == {"lr=4": pytest.approx(reached)}


def test_a_phase_makes_a_torch_scheduler_for_the_new_rate():
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 0.5**i))
    step = fl.pipeline(halving)(toy_loss)
    state = fl.fit(step, toy(), ONES, hooks=())  # -1.5
    runs = fl.fork(state, {"lr": [8.0]})
    assert ends(runs, step, phase="again") == {"lr=8": -1.5 - 8 - 4}


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"lr": 1e-3}, TypeError, r"settings\['lr'\] as a list of numbers"),
    ({"lr": []}, ValueError, "numbers that differ"),
    ({"lr": [1.0, 1.0]}, ValueError, "numbers that differ"),
    ({"momentum": ["a"]}, ValueError, r"settings\['momentum'\] as a finite number; got 'a'"),
    ({"lr": [-1.0]}, ValueError, r"settings\['lr'\] >= 0 and finite; got -1"),
    ({"lr": [0.1, 0.10000001]}, ValueError, "differ in their first six digits, which the name"),
    ({"betas": [1.0]}, ValueError, "no number 'betas'; they have lr, momentum"),
])  # fmt: skip
def test_wrong_settings_say_what_to_write(settings, error, message):
    with pytest.raises(error, match=message):
        fl.fork(toy(), settings)
