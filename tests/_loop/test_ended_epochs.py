"""Epochs that a hook ends early, and counters that it may not change."""

import attrs
import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy, toy_loss

ONES = [torch.ones(1)] * 5
STEP = fl.pipeline()(toy_loss)


def ends_at(*positions):
    """Return a hook that ends the epoch after these batches of it."""

    def end(state):
        return attrs.evolve(state, ends="epoch") if state.batch in positions else state

    return end


def test_a_hook_ends_the_epoch():
    seen = []

    def note(state):
        assert state.ends is None or "epoch" not in state.events
        seen.append((state.step, state.epoch, state.batch, sorted(state.events)))
        return state

    state = fl.fit(STEP, toy(), ONES, epochs=2, hooks=(ends_at(2), note))
    assert (state.step, state.epoch, state.batch, state.ends) == (4, 2, 0, None)
    assert [(r.step, r.epoch) for r in state.history] == [(2, 1), (4, 2)]
    assert seen == [
        (1, 0, 1, ["update"]),
        (2, 0, 2, ["update"]),
        (2, 1, 0, ["epoch", "record"]),
        (3, 1, 1, ["update"]),
        (4, 1, 2, ["update"]),
        (4, 2, 0, ["end", "epoch", "record"]),
    ]


def test_the_epoch_is_evaluated_and_its_hooks_are_called():
    called = []
    each = fl.every(epochs=1)(lambda state: called.append(state.step) or state)
    loaders = {"train": ONES, "valid": ONES[:1]}
    state = fl.fit(STEP, toy(), loaders, epochs=2, hooks=(ends_at(3), each))
    assert called == [3, 6]
    assert state.history["valid/loss"] == (-3.0, -6.0)


def test_the_next_epoch_draws_as_any_second_epoch():
    loader = torch.utils.data.DataLoader(torch.arange(10.0), batch_size=2, shuffle=True)
    seen = []

    def loss_fn(model, batch):
        seen.append(batch.tolist())
        return toy_loss(model, batch)

    fl.fit(fl.pipeline()(loss_fn), toy(), loader, epochs=2, hooks=(ends_at(2),))
    early = seen[2:]
    seen.clear()
    fl.fit(fl.pipeline()(loss_fn), toy(), loader, epochs=2, hooks=())
    assert early == seen[5:7]


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
def test_a_run_that_is_killed_continues_where_the_epoch_ended(killed_at, tmp_path):
    class Killed(BaseException):
        pass

    def kill(state):
        if state.step == killed_at:
            raise Killed
        return state

    def run(state, *hooks):
        saving = fl.every(steps=1)(fl.checkpoint(tmp_path / "run"))
        return fl.fit(STEP, state, ONES, epochs=2, hooks=(ends_at(2), saving, *hooks))

    with pytest.raises(Killed):
        run(toy(), kill)
    resumed = run(fl.resume(tmp_path / "run", toy()))
    assert_same(resumed, fl.fit(STEP, toy(), ONES, epochs=2, hooks=(ends_at(2),)))
    assert [r.step for r in resumed.history] == [2, 4]


def test_it_is_kept_when_the_run_ends_at_the_same_update():
    state = fl.fit(STEP, toy(), ONES, steps=2, hooks=(ends_at(2),))
    assert (state.step, state.epoch, state.ends) == (2, 0, "epoch")
    state = fl.fit(STEP, state, ONES, steps=4, hooks=())
    assert (state.step, state.epoch, state.batch) == (4, 1, 2)


def test_at_the_end_of_an_epoch_it_changes_nothing():
    state = fl.fit(STEP, toy(), ONES, epochs=2, hooks=(ends_at(0, 5),))
    assert (state.step, state.epoch, state.ends) == (10, 2, None)


@pytest.mark.parametrize("name", ["step", "epoch", "batch", "samples", "skipped", "seed"])
def test_a_hook_may_not_change_a_counter(name):
    def change(state):
        return attrs.evolve(state, **{name: getattr(state, name) + 1})

    with pytest.raises(ValueError, match=f"change changed state.{name} from .*ends=.epoch"):
        fl.fit(STEP, toy(), ONES, hooks=(change,))


@pytest.mark.parametrize(("name", "value"), [("phases", ()), ("updates", {"": 7})])
def test_a_hook_may_not_change_what_is_kept_of_phases_and_optimizers(name, value):
    def change(state):
        return attrs.evolve(state, **{name: value})

    with pytest.raises(ValueError, match=f"change changed state.{name} from .*ends=.epoch"):
        fl.fit(STEP, toy(), ONES, hooks=(change,), phase="a")


def test_only_an_epoch_can_be_ended():
    with pytest.raises(ValueError, match=r"set state.ends to .run."):
        fl.fit(STEP, toy(), ONES, hooks=(lambda s: attrs.evolve(s, ends="run"),))


# --- the length of the run


def halved(optimizer, run):
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=run.total_steps)


@pytest.mark.parametrize("ended", [ends_at(2), ends_at(2, 5)])
@pytest.mark.parametrize("rate", [fl.torch_scheduler(halved), fl.schedule(schedules.linear())])
def test_a_run_that_continues_has_the_length_that_was_planned(rate, ended, caplog):
    step = fl.pipeline(fl.accumulate(2), rate)(toy_loss)

    def script(state, *hooks):
        state = fl.fit(step, state, [*ONES, *ONES], epochs=3, hooks=(ended, *hooks), phase="a")
        if state.phases[0].done:  # as a script that was not interrupted
            state = fl.fit(step, state, ONES, epochs=3, hooks=(ended, *hooks), phase="b")
        return state

    whole, rounds = script(toy()), 0
    pressed = fl.every(steps=1)(lambda state: attrs.evolve(state, stop="interrupted"))
    state = script(toy(), pressed)
    while not (len(state.phases) == 2 and state.phases[1].done) and (rounds := rounds + 1) < 30:
        state = script(state, pressed)
    assert_same(state, whole)
    assert state.history["train/lr"] == whole.history["train/lr"]
    assert "was planned for" not in caplog.text


def test_updates_left_out_are_counted_once_if_the_evaluation_fails():
    """Three of five are, in each of two epochs."""
    passes = []

    def fails_once():
        passes.append(1)
        if len(passes) == 1:
            raise OSError("no answer")
        yield ONES[0]

    given = {"hooks": (ends_at(2),), "epochs": 2}
    with pytest.raises(OSError, match="no answer") as caught:
        fl.fit(STEP, toy(), {"train": ONES, "valid": fails_once}, **given)
    state = fl.fit(STEP, caught.value.state, {"train": ONES, "valid": fails_once}, **given)
    assert_same(state, fl.fit(STEP, toy(), {"train": ONES, "valid": ONES[:1]}, **given))
    assert state.slots["ends"] == 6


def test_the_end_of_an_epoch_that_a_phase_left_does_not_end_one_of_the_next_phase():
    stop = lambda state: attrs.evolve(state, stop="enough", ends="epoch")
    state = fl.fit(STEP, toy(), ONES, phase="a", hooks=(fl.every(steps=2)(stop),))
    assert (state.step, state.ends) == (2, "epoch")
    state = fl.fit(STEP, state, ONES, phase="b", hooks=())
    assert (state.step, state.epoch, state.ends) == (7, 2, None)
