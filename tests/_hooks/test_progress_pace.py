"""The rate and the time left of a run, where a whole run would show too little."""

import attrs
import pytest
import torch
from fake_terminal import Terminal

import fnloop as fl
from fnloop import Record, RunInfo, progress
from fnloop._backend.processes import Backend
from fnloop._hooks.progress import Pace
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])


def start(device="cpu", **facts):
    """Return a state before the first update of a run of 10 epochs of 100 updates."""
    facts = {"epochs": 10, "steps_per_epoch": 100, "total_steps": 1000, **facts}
    return attrs.evolve(toy(), run=RunInfo(**facts), backend=Backend(device))


def after(state, updates, seconds):
    """Return the state some updates later, which took some time."""
    state.run.stopwatch.trained += seconds
    step, batch = state.step + updates, state.batch + updates
    return attrs.evolve(state, step=step, batch=batch, events=frozenset({"update"}))


def recorded(state, seconds, **metrics):
    """Return the state with a record, whose evaluation took some time."""
    state.run.stopwatch.evaluated = seconds
    history = state.history.append(Record(state.epoch, state.step, metrics))
    return attrs.evolve(state, history=history, events=state.events | {"record"})


@pytest.mark.parametrize(("device", "rate"), [("cpu", 10.0), ("cuda", 5.0)])
def test_hooks_count_where_they_may_wait_for_a_device(clock, device, rate):
    state = start(device)
    pace = Pace(state)
    clock.now += 1.0
    state = after(state, 10, 1.0)
    assert pace.look(state).rate == 10.0
    clock.now += 1.0 + 2.0  # the updates, and a hook
    assert pace.look(after(state, 10, 1.0)).rate == pytest.approx(rate)


def test_evaluations_do_not_count_on_any_device(clock):
    state = start("cuda")
    pace = Pace(state)
    clock.now += 1.0
    pace.look(after(state, 10, 1.0))
    clock.now += 1.0 + 5.0
    state = recorded(after(state, 20, 1.0), 5.0, **{"valid/loss": 1.0})
    pace.read_records(state)
    assert pace.look(state).rate == 10.0


def test_the_time_left_has_the_evaluations_to_come(clock):
    state = start()
    pace = Pace(state)
    for updates, evaluations in ((50, 19), (50, 18), (50, 17)):
        clock.now += 50.0 + 4.0
        state = recorded(after(state, updates, 50.0), 4.0, **{"valid/loss": 1.0})
        pace.read_records(state)
        if state.batch == 100:  # the end of an epoch
            events = state.events | {"epoch"}
            state = attrs.evolve(state, epoch=state.epoch + 1, batch=0, events=events)
        assert pace.look(state).left == (1000 - state.step) * 1.0 + evaluations * 4.0


def test_each_loader_is_expected_at_its_own_pace(clock):
    """One takes a second after every 10 updates; the other 30 seconds after every 400."""
    state = start()
    pace = Pace(state)
    for step in range(10, 500, 10):
        clock.now += 10.0
        state, rare = after(state, 10, 10.0), step % 400 == 0
        pace.begin_evaluation("valid")
        clock.now += 1.0
        if rare:
            pace.begin_evaluation("test")
            clock.now += 30.0
        metrics = {"valid/loss": 1.0, **({"test/loss": 1.0} if rare else {})}
        state = recorded(state, 31.0 if rare else 1.0, **metrics)
        pace.read_records(state)
        left = (1000 - step) * 1.0 + (1000 - step) // 10 * 1.0
        left += 30.0 * (step >= 400)  # at 800; before 400, nothing is known of it
        assert pace.look(state).left == pytest.approx(left), step


def test_the_first_evaluation_is_expected_again_while_it_runs(clock):
    state = start()
    pace = Pace(state)
    clock.now += 100.0
    state = after(state, 100, 100.0)
    position = pace.look(state)
    assert position.left == 900.0
    state = attrs.evolve(state, epoch=1, batch=0, events=state.events | {"epoch"})
    pace.begin_evaluation("valid")
    # 5 seconds have passed and 15 are left, and then there are nine more of 20 seconds.
    left = pace.left_in_evaluation(state, "valid", position, 0.0, 5.0, 15.0)
    assert left == 900.0 + 15.0 + 9 * 20.0
    assert pace.left_in_evaluation(state, "valid", position, 0.0, 5.0, None) is None
    clock.now += 20.0
    state = recorded(state, 20.0, **{"valid/loss": 1.0})
    pace.read_records(state)
    assert pace.look(state).left == 900.0 + 9 * 20.0


def test_an_evaluation_at_the_start_is_expected_at_the_end_of_each_epoch(clock):
    state = start()
    pace = Pace(state)
    clock.now += 4.0
    state = recorded(state, 4.0, **{"valid/loss": 1.0})
    pace.read_records(state)
    clock.now += 50.0
    assert pace.look(after(state, 50, 50.0)).left == 950 * 1.0 + 10 * 4.0


def test_the_smaller_of_two_targets_decides(clock):
    state = start(total_steps=150)
    pace = Pace(state)
    clock.now += 100.0
    state = after(state, 100, 100.0)
    events = frozenset({"update", "epoch", "record"})
    position = pace.look(attrs.evolve(state, epoch=1, batch=0, events=events))
    assert (position.epoch, position.done, position.total, position.left) == (1, 100, 100, 50.0)
    state = attrs.evolve(state, epoch=1, batch=0)
    position = pace.look(after(state, 10, 10.0))
    assert (position.epoch, position.done, position.total) == (2, 10, 50)


def test_skipped_updates_are_updates(clock):
    """As after an overflow of fp16: nothing is applied, and the batch is gone."""

    def overflows(state, batch):
        return batch > 1

    step = fl.pipeline(skip_large(overflows))(clock.timed(toy_loss, 1.0))
    file = Terminal()
    batches = [ONE, 2 * ONE, ONE, ONE]
    state = fl.fit(step, toy(), batches, hooks=(progress(file=file),))
    assert (state.step, state.skipped) == (3, 1)
    assert "2/4  1.00 step/s" in file.getvalue()
    assert "3/4  1.00 step/s" in file.getvalue()


@fl.middleware("loss")
def skip_large(is_large):
    def wrap(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="large" if is_large(state, batch) else None)

        return skipping

    return wrap


def test_a_hook_that_goes_back_to_a_snapshot(clock):
    kept, file = [], Terminal()

    def back(state):
        if state.step == 2 and not kept:
            kept.append(fl.snapshot(state))
        if state.step == 5 and len(kept) == 1:
            kept.append(None)
            return fl.snapshot(kept[0])
        return state

    step = fl.pipeline()(clock.timed(toy_loss, 1.0))
    state = fl.fit(step, toy(), [ONE] * 6, epochs=2, hooks=(progress(file=file), back))
    assert (state.step, state.epoch) == (12, 2)
    assert file.lines()[-2].startswith("done: epoch 2/2, step 12, after 15s")
