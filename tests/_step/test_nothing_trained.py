"""An update in which no parameter of the optimizers has a gradient is an error."""

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import Toy, toy, toy_loss

ONE = torch.ones(1)
OTHER = Toy(w=3.0)


def of_another_model(model, x):
    return OTHER(x).mean()


def of_both(model, x):
    return (OTHER(x) + model(x)).mean()


def without_gradient(model, x):
    return (0.0 * model(x)).mean()


def trained(loss_fn, *members, state=None, n=2, **settings):
    step = fl.pipeline(*members)(loss_fn)
    return fl.fit(step, toy() if state is None else state, [ONE] * n, hooks=(), **settings)


@pytest.mark.parametrize("members", [
    (), (fl.clip(1.0),), (fl.accumulate(2),), (fl.ema(),), (fl.skip_nonfinite(),),
    (fl.amp("bf16"),), (fl.accumulate(2), fl.sam(0.1)), (fl.grad_norm(),),
    (fl.clip_value(1.0), fl.accumulate(2)),
])  # fmt: skip
@pytest.mark.parametrize("exact", [False, True])
def test_a_loss_of_another_model_is_named(members, exact):
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = fl.TrainState.create(model, optimizer, seed=0, exact=exact)
    match = (
        "the loss has no gradient for any parameter of the optimizer, so of_another_model would "
        "train nothing: of_another_model probably uses another model than the one that it is given"
    )
    with pytest.raises(ValueError, match=match) as raised:
        trained(of_another_model, *members, state=state)
    assert raised.value.state.step == 0 and model.w.grad is None
    state = trained(of_both, *members, state=raised.value.state)  # it may be continued
    assert state.step and state.model.w.item() != 0.0


def test_a_bare_step_and_several_optimizers():
    model = nn.ModuleDict({"a": Toy(), "b": Toy()})
    optimizers = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in "ab"}
    state = fl.TrainState.create(model, optimizers)
    with pytest.raises(ValueError, match="any parameter of the optimizers, so of_another_model"):
        fl.pipeline()(of_another_model)(state, ONE)
    one_of_them = lambda model, x: model["b"](x).mean()
    state, _ = fl.pipeline()(one_of_them)(state, ONE)
    assert model["b"].w.item() == -1.0


def test_each_turn_of_alternate_trains_its_own():
    model = nn.ModuleDict({"a": Toy(), "b": Toy()})
    optimizers = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in "ab"}
    step = fl.alternate(
        {"a": fl.pipeline()(lambda m, x: m["a"](x).mean()), "b": fl.pipeline()(of_another_model)}
    )
    with pytest.raises(ValueError, match="optimizer, so of_another_model would") as raised:
        fl.fit(step, fl.TrainState.create(model, optimizers), [ONE], hooks=())
    assert "while in b" in " ".join(raised.value.__notes__)


def test_an_optimizer_of_another_model_is_said_to_lack_these():
    state = attrs.evolve(toy(), optimizer=torch.optim.SGD(OTHER.parameters(), lr=1.0))
    match = "toy_loss would train nothing: this parameter is in no optimizer: w. Give it to one"
    with pytest.raises(ValueError, match=match):
        trained(toy_loss, state=state)


def test_a_parameter_that_the_optimizer_lost_is_named_at_the_next_update():
    def forget(state):
        if state.step == 2:
            state.model.w = nn.Parameter(state.model.w.detach().clone())
        return state

    with pytest.raises(ValueError, match="this parameter is in no optimizer: w") as raised:
        fl.fit(fl.pipeline()(toy_loss), toy(), [ONE] * 4, hooks=(forget,))
    assert raised.value.state.step == 2


def test_frozen_ones_that_something_else_needs_a_gradient_for_are_said_to_be():
    state = fl.freeze(toy(), "*")
    with pytest.raises(ValueError, match="nothing: each of them has requires_grad=False"):
        trained(of_both, state=state)
    with pytest.raises(ValueError, match="every parameter of the model has requires_grad=False"):
        trained(toy_loss, state=state)


def test_what_has_no_gradient_by_design_is_allowed():
    assert trained(without_gradient).step == 2  # it is zero
    skipping = lambda model, x: fl.skip("no")
    assert trained(skipping).skipped == 2

    def own(state, x):
        return fl.Output(torch.zeros(()), weight=1)

    assert fl.fit(fl.raw(own), toy(), [ONE] * 2, hooks=()).step == 2
    model = Toy()
    optimizer = torch.optim.LBFGS(model.parameters())
    state = fl.TrainState.create(model, optimizer)
    assert trained(of_another_model, state=state).step == 2


def test_it_is_looked_for_in_the_first_update_that_has_a_gradient():
    """The first update is skipped, and after the second one nothing is looked for."""
    calls = iter([lambda m, x: fl.skip("no"), toy_loss, of_another_model, of_another_model])
    state = trained(lambda model, x: next(calls)(model, x), n=4)
    assert (state.step, state.skipped, state.model.w.item()) == (3, 1, -1.0)
    calls = iter([lambda m, x: fl.skip("no"), of_another_model])
    with pytest.raises(ValueError, match="probably uses another model"):
        trained(lambda model, x: next(calls)(model, x))
