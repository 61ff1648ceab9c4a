"""Loaders made of loaders on two processes are those of one, also after a resume on the other."""

import pytest
import torch
from composed_cases import CASES, contents, samples
from launch import results

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
        saved = fl.save(part, folder / name)
        both = fl.fit(step, part, (make(0), make(0)), epochs=2, hooks=())
        found[name] = {
            "predicted": predicted,
            "trained": [whole.step, whole.model.w.item(), *whole.history["valid/loss"]],
            "in parts": [both.step, both.model.w.item()],
            "saved": str(saved),
        }
    return found


def continued(folder, saved, window=1):
    """Continue the first of the two parts of each run, from where it was saved."""
    step = fl.pipeline(fl.accumulate(window))(loss)
    found = {}
    for name, make in CASES.items():
        state = fl.restore(saved[name], toy())
        state = fl.fit(step, state, (make(0), make(0)), epochs=2, hooks=())
        found[name] = [state.step, state.model.w.item()]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return runs(tmp_path_factory.mktemp("alone"), window=2)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_read_and_train_what_one_does(launched, alone, name):
    for mine in launched(runs, 2):
        assert mine[name]["predicted"] == alone[name]["predicted"]
        assert mine[name]["trained"] == pytest.approx(alone[name]["trained"], rel=1e-6)
        assert mine[name]["in parts"] == mine[name]["trained"][:2]


def test_one_process_continues_what_two_have_saved(launched, alone):
    saved = {name: found["saved"] for name, found in launched(runs, 2)[0].items()}
    for name, found in continued(None, saved, window=2).items():
        assert found == pytest.approx(alone[name]["trained"][:2], rel=1e-6), name


def test_two_processes_continue_what_one_has_saved(tmp_path, alone):
    saved = {name: found["saved"] for name, found in alone.items()}
    for mine in results(tmp_path, 2, continued, saved):
        for name, found in mine.items():
            assert found == pytest.approx(alone[name]["trained"][:2], rel=1e-6), name
