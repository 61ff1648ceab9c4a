"""Random generators, training flags and gradients around a run."""

import random

import numpy as np
import pytest
import torch
from loop_cases import NUMBERS, ONE, Boom, fit, generators, raising, step

import fnloop as fl
from fnloop.testing import Toy, assert_same, small, stochastic, toy, toy_loss


def test_the_generators_of_the_caller_are_restored():
    problem = stochastic()
    loader = torch.utils.data.DataLoader(problem.batches, batch_size=None, shuffle=True)
    make = fl.pipeline()(problem.loss_fn)
    drawn = generators()
    for state in fl.run(make, problem.state(), (loader, loader), epochs=2, hooks=()):
        assert generators() == drawn
        list(fl.predict(lambda model, batch: torch.rand(1), state, loader))
        make.evaluate(state, problem.batches[0])
    assert generators() == drawn
    with pytest.raises(Boom):
        fl.fit(fl.pipeline()(raising(Boom())), toy(), NUMBERS, hooks=())
    assert generators() == drawn


def test_python_and_numpy_draws_resume_in_mid_epoch():
    def draws(model, batch):
        return (model.w * random.random() * np.random.rand() * torch.rand(())).mean(), {"weight": 1}

    make = fl.pipeline()(draws)
    whole = fl.fit(make, toy(), [ONE] * 5, epochs=2, hooks=())
    parts = fl.fit(make, toy(), [ONE] * 5, steps=2, hooks=())
    (
        random.random(),
        np.random.rand(),
        torch.rand(1),
    )  # what the caller draws in between doesn't matter
    parts = fl.fit(make, parts, [ONE] * 5, steps=7, hooks=())
    assert_same(whole, fl.fit(make, parts, [ONE] * 5, epochs=2, hooks=()))


def test_frozen_submodules_stay_in_evaluation_mode():
    problem = stochastic()
    state = problem.state()
    state.model[1].eval()
    before = state.model[1].running_mean.clone()
    state = fl.fit(
        fl.pipeline()(problem.loss_fn),
        state,
        (problem.batches, problem.batches),
        epochs=2,
        hooks=(),
    )
    assert torch.equal(state.model[1].running_mean, before)
    assert [m.training for m in state.model] == [True, False, True, True, True]


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_in_training_mode(caplog):
    problem = stochastic()
    expected = fl.fit(fl.pipeline()(problem.loss_fn), problem.state(), problem.batches, hooks=())
    state = problem.state()
    state.model.eval()
    state = fl.fit(fl.pipeline()(problem.loss_fn), state, problem.batches, hooks=())
    assert "model.train()" in caplog.text
    assert_same(state, expected)


def test_pending_gradients_do_not_leak_into_a_run():
    state = toy()
    state.model.w.grad = torch.tensor(100.0)
    assert fit(state).model.w.item() == -3.0


def test_several_runs_in_one_process_are_independent():
    one, two = toy(), toy()
    runs = [fl.run(step, s, [ONE] * 3, epochs=2, hooks=()) for s in (one, two)]
    assert [s.model.w.item() for pair in zip(*runs, strict=True) for s in pair] == [
        -3.0,
        -3.0,
        -6.0,
        -6.0,
    ]


def test_a_parameter_outside_the_model_is_trained():
    scale = torch.nn.Parameter(torch.tensor(0.0))
    model = Toy()
    state = fl.TrainState.create(model, torch.optim.SGD([*model.parameters(), scale], lr=1.0))
    state = fl.fit(
        fl.pipeline(fl.clip(10.0))(lambda m, b: (m(b) + scale * 2).mean()),
        state,
        [ONE] * 3,
        hooks=(),
    )
    assert (scale.item(), scale.grad) == (-6.0, None)


def test_law_problems_are_reproducible():
    assert_same(small().state(), small().state())


def test_an_error_in_the_evaluation_loader_names_the_loader():
    def broken():
        yield torch.ones(1)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone") as caught:
        fl.fit(
            fl.pipeline()(toy_loss), toy(), {"train": [torch.ones(1)], "valid": broken}, hooks=()
        )
    assert caught.value.__notes__ == ["while in the valid loader, epoch 1, batch 1, step 1"]


def test_an_error_while_making_a_slot_has_a_note_and_the_state():
    def init(state):
        raise OSError("no slot")

    member = fl.Middleware("a", init=init)
    with pytest.raises(OSError, match="no slot") as caught:
        fl.fit(fl.pipeline(member)(toy_loss), toy(w=3.0), [torch.ones(1)], hooks=())
    assert caught.value.__notes__ == [
        "while in the making of slots, train, epoch 1, batch 0, step 0"
    ]
    assert caught.value.state.model.w.item() == 3.0


def test_all_hooks_are_closed_even_if_one_raises():
    closed = []

    class Closes:
        def __init__(self, name):
            self.name = name

        def __call__(self, state):
            return state

        def close(self):
            closed.append(self.name)
            if self.name == "a":
                raise OSError("stuck")

    with pytest.raises(OSError, match="stuck"):
        fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(Closes("a"), Closes("b")))
    assert closed == ["a", "b"]
