"""Loaders made of loaders on two processes are those of one."""

import pytest
import torch
from composed_cases import CASES, contents, samples

import fnloop as fl
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow


def loss(model, batch):
    numbers = torch.tensor(samples(contents(batch)), dtype=torch.float64)
    return toy_loss(model, numbers / 50)[0], {"weight": len(numbers)}


def runs(folder, window=1):
    """Predict, and train two epochs at once and in two parts, with each loader."""
    found = {}
    step = fl.pipeline(fl.accumulate(window))(loss)
    for name, make in CASES.items():
        state = toy()
        predicted = list(fl.predict(lambda model, batch: contents(batch), state, make(0)))
        whole = fl.fit(step, toy(), (make(0), make(0)), epochs=2, hooks=())
        part = fl.fit(step, toy(), (make(0), make(0)), steps=whole.step // 2 + 1, hooks=())
        both = fl.fit(step, part, (make(0), make(0)), epochs=2, hooks=())
        found[name] = {
            "predicted": predicted,
            "trained": [whole.step, whole.model.w.item(), *whole.history["valid/loss"]],
            "in parts": [both.step, both.model.w.item()],
        }
    return found


@pytest.fixture(scope="module")
def alone():
    return runs(None, window=2)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_read_and_train_what_one_does(launched, alone, name):
    for mine in launched(runs, 2):
        assert mine[name]["predicted"] == alone[name]["predicted"]
        assert mine[name]["trained"] == pytest.approx(alone[name]["trained"], rel=1e-6)
        assert mine[name]["in parts"] == mine[name]["trained"][:2]
