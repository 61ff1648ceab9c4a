"""Checkpoints that are read as they appear. The loss of the toy is w, and each update takes 1."""

import shutil

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._extensions.checkpoints import follow as followed
from fnloop.testing import toy, toy_loss

STEP, ONE = fl.pipeline()(toy_loss), torch.ones(1)


def trained(folder, updates=4, hooks=(), **settings):
    """Save each update of a run, as step-1, step-2, ... Return the paths, in their order."""
    saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None, **settings))
    fl.fit(STEP, toy(), [ONE] * updates, hooks=(saves, *hooks))
    return sorted(folder.iterdir())


def arriving(monkeypatch, folder, *groups):
    """Copy the next checkpoints into a folder whenever the follower sleeps."""
    left, waits = iter(groups), []

    def sleep(seconds):
        waits.append(seconds)
        for path in next(left):
            shutil.copytree(path, folder / path.name)

    monkeypatch.setattr(followed.time, "sleep", sleep)
    return waits


def steps(folder, **settings):
    return [(s.step, s.model.w.item()) for s in fl.follow(folder, toy(), **settings)]


def test_each_checkpoint_is_read_when_it_appears_until_the_run_has_ended(tmp_path, monkeypatch):
    a, b, c, d = trained(tmp_path / "run")
    waits = arriving(monkeypatch, tmp_path / "seen", [a], [], [b], [c], [d])
    found = steps(tmp_path / "seen", poll=7)
    assert found == [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0)]
    assert waits == [7] * 5  # the folder was not there at first, and nothing was new once


@pytest.mark.parametrize(("every", "expected"), [(False, [1, 4]), (True, [1, 2, 3, 4])])
def test_a_follower_that_lags_skips_what_is_older_than_the_newest(
    every, expected, tmp_path, monkeypatch
):
    a, b, c, d = trained(tmp_path / "run")
    arriving(monkeypatch, tmp_path / "seen", [a], [b, c, d])
    assert [step for step, _ in steps(tmp_path / "seen", every=every)] == expected


def test_the_states_are_those_of_the_run(tmp_path):
    trained(tmp_path, 3)
    for state in fl.follow(tmp_path, toy(), every=True):
        assert fl.evaluate(STEP, state, [ONE]) == {"loss": -state.step}
        assert state.optimizer.param_groups[0]["lr"] == 1.0
    assert state.history["train/loss"] == (-1.0,)  # the mean of 0, -1 and -2


def stop_at(step, reason):
    return lambda state: attrs.evolve(state, stop=reason) if state.step == step else state


def test_a_stop_of_a_hook_ends_it(tmp_path):
    trained(tmp_path, hooks=(stop_at(2, "enough"),))
    assert [step for step, _ in steps(tmp_path, every=True)][-1] == 2


def test_an_interruption_is_waited_for(tmp_path, monkeypatch):
    def interrupt(state):
        if state.step == 2:
            raise KeyboardInterrupt
        return state

    trained(tmp_path, hooks=(interrupt,))
    monkeypatch.setattr(followed.time, "sleep", lambda seconds: train_on(tmp_path))
    assert [step for step, _ in steps(tmp_path)] == [2, 4]


def train_on(folder):
    saves = fl.every(steps=1)(fl.checkpoint(folder, keep=None))
    fl.fit(STEP, fl.resume(folder, toy()), [ONE] * 4, hooks=(saves,))


def test_the_time_without_a_new_one_may_be_limited(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(followed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(followed.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    assert steps(tmp_path / "none", poll=10, timeout=25) == []
    assert now == [30.0]


def test_a_damaged_checkpoint_is_skipped_in_words(tmp_path):
    _, b, _, _ = trained(tmp_path)
    file = b / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert [step for step, _ in steps(tmp_path, every=True)] == [1, 3, 4]


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped(tmp_path):
    _, b, *_ = trained(tmp_path)
    found = fl.follow(tmp_path, toy(), every=True)
    assert next(found).step == 1
    shutil.rmtree(b)
    assert [state.step for state in found] == [3, 4]


def test_what_a_partial_checkpoint_holds_is_restored(tmp_path, monkeypatch):
    trained(tmp_path, only=("model",))
    found = fl.follow(tmp_path, toy(), timeout=0)
    assert [(state.step, state.model.w.item()) for state in found] == [(0, -4.0)]


def test_a_run_of_another_model_is_refused(tmp_path):
    trained(tmp_path)
    model = torch.nn.Linear(1, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(fl.CheckpointError, match="is of another model"):
        next(fl.follow(tmp_path, state))


def test_a_state_that_was_trained_further_is_refused(tmp_path):
    trained(tmp_path)
    found = fl.follow(tmp_path, toy(), every=True)
    STEP(next(found), ONE)
    with pytest.raises(fl.StaleStateError):
        next(found)


def epochs(folder, n):
    """Return a run that saves after each update, of which n epochs of one update are made."""
    saves = fl.every(steps=1)(fl.checkpoint(folder, keep=2))
    made = fl.run(STEP, fl.resume(folder, toy()), [ONE], epochs=9, hooks=(saves,))
    return [next(made) for _ in range(n)]


def test_a_run_that_begins_again_in_the_folder_is_followed(tmp_path):
    epochs(tmp_path, 5)
    seen = fl.follow(tmp_path, toy(), timeout=0)
    assert next(seen).step == 5
    shutil.rmtree(tmp_path)
    epochs(tmp_path, 3)
    assert next(seen).step == 3
    shutil.rmtree(fl.latest(tmp_path))  # so the next one has its number
    epochs(tmp_path, 7)
    assert [state.step for state in seen] == [9]


def test_what_appears_late_or_again_is_not_newer(tmp_path, monkeypatch):
    a, b, c, d = trained(tmp_path / "run")
    shutil.rmtree(d)
    arriving(monkeypatch, tmp_path / "seen", [b], [a], [c])
    seen = fl.follow(tmp_path / "seen", toy())
    assert [next(seen).step for _ in range(2)] == [2, 3]
    shutil.rmtree(tmp_path / "seen" / c.name)
    with pytest.raises(RuntimeError, match="StopIteration"):  # it sleeps, and nothing is left
        next(seen)
