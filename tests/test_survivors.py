"""Promises that one-line mutations of the code broke before a test noticed."""

import inspect
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from fake_recorder import FakeRecorder
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss

ONE, EMPTY = torch.ones(1), torch.ones(0)
step = fl.pipeline()(toy_loss)


# --- runs


@pytest.mark.parametrize("target", [{"steps": 2}, {"epochs": 1}], ids=["steps", "epochs"])
def test_a_target_at_the_end_of_an_epoch_needs_no_closing_record(target):
    """The epoch has its record anyway. It is one without an evaluation, which is not due."""
    loaders, moment = {"train": [ONE] * 2, "valid": [ONE]}, fl.every(epochs=2)
    state = fl.fit(step, toy(), loaders, **target, hooks=(), evaluate_every=moment)
    assert state.history.records == (fl.Record(1, 2, {"train/loss": -0.5}),)


def test_the_seconds_of_a_resumed_run_go_on_where_they_were(monkeypatch, tmp_path):
    """Each update takes one second. The time between the two runs does not count."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def slow(model, batch):
        clock[0] += 1.0
        return toy_loss(model, batch)

    first = fl.fit(fl.pipeline()(slow), toy(), [ONE] * 2, epochs=1, hooks=())
    clock[0] += 1000.0
    again = fl.restore(fl.save(first, tmp_path / "a"), toy())
    last = fl.fit(fl.pipeline()(slow), again, [ONE] * 2, epochs=3, hooks=())
    assert [record.seconds for record in last.history] == [2.0, 4.0, 6.0]


# --- steps and middleware


@pytest.mark.parametrize("inner", [(), (fl.clip(9.0),)], ids=["in place", "averaged"])
@pytest.mark.parametrize("weight", [0.0, float("nan"), -1.0])
def test_a_window_whose_weights_on_the_device_count_for_nothing_trains_nothing(inner, weight):
    def loss_fn(model, batch):
        return model(batch).mean(), {"weight": torch.tensor(weight)}

    state, _ = fl.pipeline(*inner, fl.accumulate(2))(loss_fn)(toy(), [ONE, ONE])
    assert state.model.w.item() == 0.0


def test_a_negative_weight_on_the_device_is_an_error_also_if_the_sum_is_not_negative():
    """The sum of -1 and 3 is 2, which could be a number of items."""
    weights = iter([-1.0, 3.0])

    def loss_fn(model, batch):
        return model(batch).mean(), {"weight": torch.tensor(next(weights))}

    with pytest.raises(ValueError, match="one of them was NaN, infinite or negative"):
        fl.fit(fl.pipeline()(loss_fn), toy(), [ONE] * 2, hooks=())


REGISTER = {
    "of the optimizer, before": lambda state, hook: state.optimizer.register_step_pre_hook(hook),
    "of the optimizer, after": lambda state, hook: state.optimizer.register_step_post_hook(hook),
    "of all, before": lambda state, hook: register_optimizer_step_pre_hook(hook),
    "of all, after": lambda state, hook: register_optimizer_step_post_hook(hook),
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_every_kind_of_hook_of_torchs_optimizers_is_called_at_each_update(register):
    called, state = [], toy()
    handle = register(state, lambda *_: called.append(1))
    try:
        fl.fit(step, state, [ONE] * 3, hooks=())
    finally:
        handle.remove()
    assert len(called) == 3


def test_a_schedule_counts_applied_updates_only():
    """The second batch has no item. The factors of the others are 1, 2 and 3."""
    scheduled = fl.pipeline(fl.schedule(lambda i, total: i + 1))(toy_loss)
    state = fl.fit(scheduled, toy(), [ONE, EMPTY, ONE, ONE], hooks=())
    assert (state.step, state.skipped, state.model.w.item()) == (3, 1, -6.0)


def test_the_norm_in_a_record_is_the_mean_over_updates_whatever_their_items():
    """The norms are 3, of one item, and 1, of two."""
    batches = [torch.tensor([3.0]), torch.tensor([1.0, 1.0])]
    state = fl.fit(fl.pipeline(fl.clip(9.0))(toy_loss), toy(), batches, hooks=())
    assert state.history["train/grad_norm"] == (2.0,)


@fl.middleware("update")
def counter():
    """Count updates in a tensor of a slot, in place."""

    def wrap(step):
        def counted(state, batch):
            state, out = step(state, batch)
            state.slots["counter"].add_(1)
            return state, out

        return counted

    return fl.Middleware("counter", update=wrap, init=lambda state: torch.zeros(()))


def test_a_snapshot_has_slots_of_its_own():
    counting = fl.pipeline(counter())(toy_loss)
    state = fl.fit(counting, toy(), [ONE] * 2, hooks=())
    before = fl.snapshot(state)
    fl.fit(counting, state, [ONE] * 3, hooks=())
    assert before.slots["counter"].item() == 2.0


# --- checkpoints


def test_a_checkpoint_between_two_evaluations_is_not_ranked_by_the_one_before_it(tmp_path):
    """Evaluations are at 2, 4 and 6, checkpoints at 3 and 6. The loss is -2 at 2 and -6 at 6."""
    hooks = (fl.every(steps=3)(fl.checkpoint(tmp_path)),)
    loaders = {"train": [ONE] * 6, "valid": [ONE]}
    state = fl.fit(step, toy(), loaders, hooks=hooks, evaluate_every=fl.every(steps=2))
    assert state.history["valid/loss"] == (-2.0, -4.0, -6.0)
    assert fl.latest(tmp_path).name == "step-00000006"
    assert fl.best(tmp_path, "valid/loss", mode="max").name == "step-00000006"


def test_the_position_of_a_checkpoint_counts_updates_that_were_skipped(tmp_path):
    """It is (updates tried, epochs, batches). Of four batches one has no item."""
    state = fl.fit(step, toy(), [ONE, EMPTY, ONE, ONE], hooks=())
    manifest = json.loads((fl.save(state, tmp_path / "a") / "manifest.json").read_text())
    assert manifest["position"] == [4, 1, 0]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_has_reached_the_disk_before_it_has_its_name(tmp_path, monkeypatch, replaced):
    """A loss of power keeps what was flushed: all files and their folder first, then the name."""
    path, events = tmp_path / "a", []
    fsync, rename = os.fsync, os.rename
    if replaced:
        fl.save(toy(w=1.0), path)

    def flush(descriptor):
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def move(source, target):
        rename(source, target)
        events.append(f"{Path(target).name} has its name")

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    fl.save(toy(w=2.0), path)
    named = events.index("a has its name")
    assert {item.stat().st_ino for item in (path, *path.iterdir())} <= {*events[:named]}
    assert tmp_path.stat().st_ino in events[named:]


def test_a_run_goes_on_beside_a_checkpoint_of_its_own_that_cannot_be_read(tmp_path):
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path))
    fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=(saves,))
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: .*step-00000002"):
        state = fl.resume(tmp_path, toy())
    assert state.step == 1
    assert fl.fit(step, state, [ONE] * 4, steps=3, hooks=(saves,)).model.w.item() == -3.0


class Refusing(torch.optim.SGD):
    """An optimizer with a state_dict of its own, which does not take it back."""

    def state_dict(self):
        return super().state_dict()

    def load_state_dict(self, state_dict):
        raise ValueError("not today")


def test_an_optimizer_that_refuses_a_checkpoint_keeps_the_state_that_it_had(tmp_path):
    """The momentum is 1, 2 and 3 in three updates, so the weight is -1, -3 and -6."""

    def make():
        model = Toy()
        optimizer = Refusing(model.parameters(), lr=1.0, momentum=1.0)
        return fl.TrainState.create(model, optimizer, seed=0)

    state = fl.fit(step, make(), [ONE] * 3, steps=2, hooks=())
    assert state.model.w.item() == -3.0
    with pytest.raises(fl.CheckpointError, match="not today"):
        fl.restore(fl.save(make(), tmp_path / "a"), state)
    assert fl.fit(step, state, [ONE] * 3, steps=3, hooks=()).model.w.item() == -6.0


# --- signals and graphs


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="there are no signals here")
def test_the_first_ctrl_c_waits_for_the_update_also_after_a_sigterm():
    """Only a second Ctrl-C raises at once."""

    def loss_fn(model, batch):
        if model.w.item() == -1.0:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        return toy_loss(model, batch)

    try:
        state = fl.fit(fl.pipeline()(loss_fn), toy(), [ONE] * 5, hooks=())
    except KeyboardInterrupt:
        pytest.fail("the first Ctrl-C has raised")
    assert (state.step, state.stop, state.model.w.item()) == (2, "interrupted", -2.0)


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="there are no signals here")
@pytest.mark.parametrize("in_time", [True, False])
def test_a_sigterm_that_comes_too_late_for_the_run_is_raised_when_it_ends(monkeypatch, in_time):
    """One that comes in time is noted in the state instead."""
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)

    class Terminating:
        def __call__(self, state):
            if in_time and state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return state

        def close(self):
            if not in_time:
                os.kill(os.getpid(), signal.SIGTERM)

    state = fl.fit(step, toy(), [ONE] * 3, hooks=(Terminating(),))
    expected = (2, "SIGTERM", []) if in_time else (3, None, [signal.SIGTERM])
    assert (state.step, state.stop, raised) == expected


class Failing(FakeRecorder):
    """A recorder whose replays fail when that is asked for."""

    fails = False

    def record(self, update):
        parts, reply = super().record(update)

        def replay():
            if self.fails:
                raise RuntimeError("the device is lost")
            parts[-1]()

        return [*parts[:-1], replay], reply


def test_a_replay_that_fails_leaves_no_state(monkeypatch):
    """The graph changes the weights, and how far it came is not known."""
    recorder = Failing()
    internals = inspect.unwrap(fl.cuda_graph).__globals__
    monkeypatch.setitem(internals, "recorder_on", lambda device: recorder)
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(1.0), fused=True)
    state = fl.TrainState.create(model, optimizer, seed=0)
    captured = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    for _ in range(3):
        state, _ = captured(state, ONE)
    assert state.model.w.item() == -3.0
    recorder.fails = True
    with pytest.raises(RuntimeError, match="the device is lost"):
        captured(state, ONE)
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(captured, state, [ONE])
