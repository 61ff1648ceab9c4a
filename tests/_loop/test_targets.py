"""Targets: where a run ends, and what ``run`` yields on the way."""

import logging

import pytest
from loop_cases import ONE, fit, step

import fnloop as fl
from fnloop.testing import assert_same, stochastic, toy


@pytest.mark.parametrize(
    ("targets", "steps", "epochs", "batch"),
    [
        ({}, 3, 1, 0),
        ({"epochs": 2}, 6, 2, 0),
        ({"steps": 4}, 4, 1, 1),
        ({"epochs": 2, "steps": 4}, 4, 1, 1),
        ({"epochs": 1, "steps": 4}, 3, 1, 0),
        (
            {"steps": 3},
            3,
            1,
            0,
        ),  # the end of an epoch is one state: not the beginning of an empty one
        ({"epochs": 0}, 0, 0, 0),
    ],
)
def test_targets_are_absolute_and_the_smaller_wins(targets, steps, epochs, batch):
    state = fit(**targets)
    assert (state.step, state.epoch, state.batch) == (steps, epochs, batch)
    assert state.run is None


def test_a_second_call_with_the_same_target_reports_nothing_to_do(caplog):
    state = fit(epochs=2)
    with caplog.at_level(logging.WARNING, "fnloop"):
        again = fit(state, epochs=2)
    assert again is state
    assert (
        "nothing to do: the state is at epoch 2, step 6, and the target is epochs=2. Targets are "
        "absolute" in caplog.text
    )


def test_without_a_target_it_trains_the_rest_of_the_epoch_or_one_more():
    state = fit(fit(steps=2))
    assert (state.step, state.epoch) == (3, 1)
    assert fit(state).epoch == 2


def test_five_epochs_equal_two_and_then_three_more():
    problem = stochastic()
    make = lambda: fl.pipeline(fl.accumulate(2), fl.clip(0.1))(problem.loss_fn)
    whole = fl.fit(make(), problem.state(), problem.batches, epochs=5, hooks=())
    part = fl.fit(make(), problem.state(), problem.batches, epochs=2, hooks=())
    assert_same(whole, fl.fit(make(), part, problem.batches, epochs=5, hooks=()))


@pytest.mark.parametrize("bad", [{"epochs": 1.5}, {"epochs": -1}, {"steps": True}, {"steps": "10"}])
def test_a_bad_target_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"as an int >= 0, the target for state\."):
        fit(**bad)


def test_run_yields_after_every_epoch_and_at_the_end():
    states = fl.run(step, toy(), [ONE] * 3, steps=7, hooks=())
    assert [(s.step, s.epoch, s.run) for s in states] == [(3, 1, None), (6, 2, None), (7, 2, None)]


def test_a_run_at_its_target_yields_the_state_once():
    state = fit(epochs=1)
    assert list(fl.run(step, state, [ONE] * 3, epochs=1, hooks=())) == [state]


def test_a_run_completes_an_epoch_that_bare_steps_exhausted():
    state = toy()
    for _ in range(5):
        state, _ = step(state, ONE)
    assert (state.step, state.epoch, state.batch) == (5, 0, 5)
    state = fit(state, [ONE] * 5, epochs=2)
    assert (state.step, state.epoch, state.batch, state.model.w.item()) == (10, 2, 0, -10.0)


def test_leaving_a_run_closes_its_hooks():
    class Closes:
        closed = 0

        def __call__(self, state):
            return state

        def close(self):
            self.closed += 1

    hook = Closes()
    for _ in fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=(hook,)):
        break
    assert hook.closed == 1


def test_advancing_a_yielded_state_elsewhere_ends_the_run():
    states = fl.run(step, toy(), [ONE] * 3, epochs=5, hooks=())
    fit(next(states))
    with pytest.raises(fl.StaleStateError):
        next(states)


def test_run_checks_its_arguments_at_once():
    with pytest.raises(ValueError, match="as an int >= 0"):
        fl.run(step, toy(), [ONE], epochs=-1)
