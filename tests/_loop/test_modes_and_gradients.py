"""Training flags, gradients and closed hooks around a run."""

import pytest
import torch
from loop_cases import ONE, fit
from sample_hooks import Notes

import fnloop as fl
from fnloop.testing import Toy, assert_same, stochastic, toy, toy_loss

STEP = fl.pipeline()(toy_loss)


def test_frozen_submodules_stay_in_evaluation_mode_and_a_whole_model_does_not(caplog):
    problem = stochastic()
    step, loaders = fl.pipeline()(problem.loss_fn), (problem.batches, problem.batches)
    plain, frozen, whole = (problem.state() for _ in range(3))
    frozen.model[1].eval(), whole.model.eval()
    before = frozen.model[1].running_mean.clone()
    plain, frozen = (fl.fit(step, s, loaders, epochs=2, hooks=()) for s in (plain, frozen))
    assert torch.equal(frozen.model[1].running_mean, before)
    assert [m.training for m in frozen.model] == [True, False, True, True, True]
    assert "model.train()" not in caplog.text
    assert_same(fl.fit(step, whole, loaders, epochs=2, hooks=()), plain)
    assert "model.train()" in caplog.text


def test_gradients_from_before_and_from_a_hook_do_not_enter_an_update():
    state = toy()
    state.model.w.grad = torch.tensor(100.0)
    probe = lambda state: toy_loss(state.model, 100 * ONE)[0].backward() or state
    assert fit(state, hooks=(probe,)).model.w.item() == -3.0


def test_a_parameter_outside_the_model_is_trained():
    scale = torch.nn.Parameter(torch.tensor(0.0))
    model = Toy()
    state = fl.TrainState.create(model, torch.optim.SGD([*model.parameters(), scale], lr=1.0))
    step = fl.pipeline(fl.clip(10.0))(lambda m, b: (m(b) + scale * 2).mean())
    fl.fit(step, state, [ONE] * 3, hooks=())
    assert (scale.item(), scale.grad) == (-6.0, None)


def test_all_hooks_are_closed_even_if_one_raises():
    class Closes(Notes):
        def close(self):
            self.closed += 1
            raise OSError("stuck")

    hooks = Closes(), Notes()
    with pytest.raises(OSError, match="stuck") as raised:
        fit(hooks=hooks)
    assert [hook.closed for hook in hooks] == [1, 1]
    assert raised.value.__notes__[-1].startswith("while in the method close of notes")
    assert raised.value.state.model.w.item() == -3.0  # the run is not lost
    assert fl.fit(STEP, raised.value.state, [ONE] * 3, epochs=2, hooks=()).step == 6

    def fails(state):
        raise ValueError("first")

    with pytest.raises(ValueError, match="first") as raised:
        fit(hooks=(fails, Closes(), Closes()))
    assert raised.value.state.step == 1
    assert [n.split(" failed too: ")[1] for n in raised.value.__notes__[1:]] == [
        "OSError: stuck", "OSError: stuck",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["begin", "collects", "receive", "numbers", "flush", "close"])
def test_an_error_of_any_method_of_a_hook_names_the_hook(method):
    class Culprit(fl.Hook):
        def __call__(self, state):
            return state

        def receive(self, state, outputs):
            pass

    def fails(*given):
        raise ValueError("first")

    setattr(Culprit, method, fails)
    with pytest.raises(ValueError, match="first") as raised:
        fl.fit(STEP, toy(), ([ONE], [ONE]), hooks=(Notes(), Culprit(), Notes()))
    assert "Culprit" in " ".join(raised.value.__notes__)
