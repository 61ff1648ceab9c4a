"""Views: a user's own average is what every reader sees, and training does not notice."""

import contextlib

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fnloop as fl
from fnloop._core.types import View
from fnloop._core.view import is_apart, view
from fnloop.testing import assert_same, toy, toy_loss

# The loss of the toy is w * x. With x = 1 and a rate of 1 its weight is 0, -1, -2 after updates
# 0, 1, 2, and so on; the mean of the last two is half way between.
ONE = torch.tensor([1.0])


@attrs.define
class Halfway(View):
    """The mean of the newest weights and of those before the newest update."""

    before: list[torch.Tensor]

    def changes(self, state):
        return [*state.model.parameters()]

    @contextlib.contextmanager
    def show(self, state):
        with torch.no_grad():
            for p, before in zip(state.model.parameters(), self.before, strict=True):
                p.copy_((p + before) / 2)
        yield state.model


def copies(state):
    return [p.detach().clone() for p in state.model.parameters()]


@fl.middleware("update")
def halfway():
    def wrap(step):
        def remembering(state, batch):
            before = copies(state)
            state, out = step(state, batch)
            state.slots["halfway"].before = before
            return state, out

        return remembering

    return fl.Middleware("halfway", update=wrap, init=lambda state: Halfway(copies(state)))


STEP = fl.pipeline(halfway())(toy_loss)


def trained(n=2, **settings):
    settings = {"hooks": (), "steps": n, **settings}
    return fl.fit(STEP, toy(w=0.0, lr=1.0), {"train": [ONE] * n, "valid": [ONE]}, **settings)


def weight(model, batch=None):
    return model.w.item()


def test_every_reader_sees_the_average_of_a_user_and_training_continues_with_its_own(tmp_path):
    seen = {}

    def look(state):
        seen["training"] = weight(state.model)
        with fl.evaluating(state) as model:
            seen["evaluating"] = weight(model)
        return state

    hooks = (fl.measure(lambda state: {"w": weight(state.model)}, name="measured"), look)
    state = trained(hooks=hooks)
    # After 2 updates the weight is -2, and half way it is -1.5; the loss of x = 1 is w.
    assert state.history.latest("valid/loss") == state.history.latest("measured/w") == -1.5
    assert seen == {"training": -2.0, "evaluating": -1.5}
    assert fl.evaluate(STEP, state, [ONE]) == {"loss": -1.5}
    assert STEP.evaluate(state, ONE).loss.item() == -1.5
    assert [*fl.predict(weight, state, [ONE])] == [-1.5]
    assert weight(state.model) == -2.0
    path = fl.save(state, tmp_path / "a")
    files = {name: load_file(path / f"{name}.safetensors") for name in ("model", "training")}
    assert {name: file["w"].item() for name, file in files.items()} == {
        "model": -1.5,
        "training": -2.0,
    }
    state, _ = STEP(state, ONE)
    assert weight(state.model) == -3.0


def test_a_restored_state_is_evaluated_with_it_and_refuses_readers_that_do_not_know_it(tmp_path):
    state = trained()
    path = fl.save(state, tmp_path / "a")
    restored = fl.restore(path, toy(w=5.0, lr=1.0))
    assert weight(restored.model) == -2.0
    with pytest.raises(ValueError, match=r'state.slots\["halfway"\].*evaluate\(step, state'):
        [*fl.predict(weight, restored, [ONE])]
    with pytest.raises(fl.CheckpointError, match=r'state.slots\["halfway"\]'):
        fl.save(restored, tmp_path / "b")
    assert fl.evaluate(STEP, restored, [ONE]) == {"loss": -1.5}
    ready = STEP.init_slots(restored)
    assert [*fl.predict(weight, ready, [ONE])] == [-1.5]
    assert_same(STEP(fl.restore(path, toy(w=5.0, lr=1.0)), ONE)[0], STEP(state, ONE)[0])
    assert weight(fl.restore(path, toy(), only=("model",)).model) == -1.5


def test_the_best_weights_are_those_of_the_average_and_it_begins_again_from_them():
    batches = [ONE, ONE, -ONE, -ONE]  # the weight is -1, -2, -1, 0, and half way -0.5, -1.5, -1.5
    loaders, hooks = {"train": batches, "valid": [ONE]}, (fl.restore_best("valid/loss"),)
    settings = {"evaluate_every": fl.every(steps=1), "hooks": hooks}
    state = fl.fit(STEP, toy(w=0.0, lr=1.0), loaders, **settings)
    assert state.history["valid/loss"] == (-0.5, -1.5, -1.5, -0.5)
    assert fl.evaluate(STEP, state, [ONE]) == {"loss": -1.5} and weight(state.model) == -1.5
    state, _ = STEP(state, ONE)
    assert weight(state.model) == -2.5 and fl.evaluate(STEP, state, [ONE]) == {"loss": -2.0}


def test_what_a_view_changes_is_put_back_bit_for_bit_also_after_an_error():
    state = trained()
    with torch.no_grad():
        state.model.w.fill_(0.1)  # (0.1 + before) / 2 is not exact
    with pytest.raises(KeyError), view(state, "evaluation"):
        raise KeyError
    assert state.model.w.item() == torch.tensor(0.1).item() and state.model.training
    with view(state, "train") as model:
        assert weight(model) == torch.tensor(0.1).item()


class Scaled(View):
    """A copy of the model whose weights are ten times as large."""

    def __init__(self, beside):
        self.beside = beside

    @contextlib.contextmanager
    def show(self, state):
        model = toy(w=10 * state.model.w.item()).model
        yield model


@pytest.mark.parametrize(
    ("beside", "numbers"),
    [(True, {"loss": -2.0, "ten/loss": -20.0}), (False, {"loss": -20.0})],
)
def test_the_view_of_a_middleware_is_evaluated_beside_the_model_or_alone(beside, numbers):
    step = fl.pipeline(fl.Middleware("ten", view=Scaled(beside)))(toy_loss)
    state = fl.fit(step, toy(w=0.0, lr=1.0), [ONE, ONE], hooks=())
    assert fl.evaluate(step, state, [ONE]) == numbers
    assert [*fl.predict(weight, state, [ONE])] == [-2.0]  # it is of evaluations of its step alone


def test_two_views_of_middleware_are_not_evaluated_under_one_name():
    two = [fl.Middleware(name, view=Scaled(False)) for name in ("a", "b")]
    with pytest.raises(ValueError, match="would both be evaluated alone"):
        fl.pipeline(*two)
    with pytest.raises(TypeError, match="expects view as a View"):
        fl.Middleware("a", view=toy_loss)


def test_weights_that_each_process_has_are_shown_to_readers_that_are_together_alone():
    class Own(Halfway):
        apart = True

    state = toy(w=4.0)
    state = attrs.evolve(state, slots={"own": Own([torch.tensor(0.0)])})
    assert is_apart(state) and not is_apart(toy())
    with view(state, "evaluation") as model:
        assert weight(model) == 2.0
    with view(state, "evaluation", together=False) as model, fl.evaluating(state) as other:
        assert weight(model) == weight(other) == 4.0


def test_statistics_of_batchnorm_stay_where_a_view_puts_the_buffers_back():
    class WithBuffers(Halfway):
        def changes(self, state):
            return [*state.model.parameters(), *state.model.buffers()]

    norm = nn.BatchNorm1d(1)
    state = fl.TrainState.create(norm, torch.optim.SGD(norm.parameters()), seed=0)
    state = attrs.evolve(state, slots={"own": WithBuffers(copies(state))})
    step = fl.pipeline()(lambda model, x: model(x).mean())
    fl.update_batchnorm(step, state, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
    assert norm.running_mean.item() == 3.0  # of 1 and 5
