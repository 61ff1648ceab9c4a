import random

import attrs
import numpy as np
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import Toy, assert_same, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def test_a_new_state_is_at_the_beginning():
    state = toy()
    counters = state.step, state.epoch, state.batch, state.skipped, len(state.history)
    assert counters == (0, 0, 0, 0, 0)
    assert state.run is None and state.stop is None and state.generators is None
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        state.step = 3


def test_the_seed_is_drawn_from_torchs_generator():
    def create():
        model = Toy()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    torch.manual_seed(0)
    first, second = create().seed, create().seed
    torch.manual_seed(0)
    assert create().seed == first != second


USES = {
    "step": lambda state: step(state, ONE),
    "step.evaluate": lambda state: step.evaluate(state, ONE),
    "fit": lambda state: fl.fit(step, state, [ONE], hooks=()),
    "fit, evolved": lambda state: fl.fit(step, attrs.evolve(state, stop=None), [ONE], hooks=()),
    "run": lambda state: fl.run(step, state, [ONE]),
    "evaluate": lambda state: fl.evaluate(step, state, [ONE]),
    "predict": lambda state: fl.predict(lambda model, batch: batch, state, [ONE]),
    "snapshot": fl.snapshot,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("advance", [USES["step"], USES["fit"]], ids=["step", "fit"])
def test_a_state_that_has_been_advanced_cannot_be_used_again(use, advance):
    state = toy()
    advance(state)
    with pytest.raises(fl.StaleStateError, match=r"before = snapshot\(state\)"):
        use(state)
    assert repr(state).startswith("stale TrainState(step=0")


def test_a_step_that_raises_leaves_its_state_fresh():
    fails = lambda model, batch: toy_loss(model, batch) if batch[0] != 2 else 1 / 0
    state, failing = toy(), fl.pipeline(fl.accumulate(2))(fails)
    with pytest.raises(ZeroDivisionError):
        failing(state, [ONE, torch.tensor([2.0])])
    assert state.model.w.grad is None  # no partial gradient is left for the next update
    state, _ = step(state, ONE)
    assert state.model.w.item() == -1.0


def test_a_prediction_that_outlives_its_state_raises():
    state = toy()
    results = fl.predict(lambda model, batch: batch, state, [ONE, ONE])
    next(results)
    step(state, ONE)
    with pytest.raises(fl.StaleStateError):
        next(results)


def test_a_snapshot_of_lbfgs_can_be_trained():
    """LBFGS has its own list of parameters, which torch does not copy."""
    model = Toy(w=5.0)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    kept = fl.snapshot(fl.TrainState.create(model, lbfgs))
    kept, _ = fl.pipeline()(lambda model, batch: (model(batch) - 3).square().mean())(kept, ONE)
    assert (kept.model.w.item(), model.w.item()) == (pytest.approx(3.0), 5.0)


def test_a_snapshot_taken_in_a_hook_continues_as_the_run_does():
    """A snapshot within an epoch has the states of Python's and NumPy's generators."""
    draws = lambda model, batch: (model.w * random.random() * np.random.rand()).mean()
    kept, drawing = [], fl.pipeline()(draws)
    keep = fl.when(lambda state: state.step == 2)(lambda s: kept.append(fl.snapshot(s)) or s)
    whole = fl.fit(drawing, toy(), [ONE] * 5, hooks=(keep,))
    assert_same(whole, fl.fit(drawing, kept[0], [ONE] * 5, hooks=()))


def test_unwrap_gives_the_users_module():
    state = toy()
    assert fl.unwrap(state) is state.model
    inner = nn.Linear(1, 1)
    wrapper = nn.Module()
    wrapper._orig_mod = inner
    assert fl.unwrap(attrs.evolve(state, model=wrapper)) is inner
    assert fl.unwrap(attrs.evolve(state, model=nn.DataParallel(wrapper))) is inner


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="optimizer's parameters belongs to this Toy"):
        fl.TrainState.create(Toy(), torch.optim.SGD(Toy().parameters(), lr=1.0))


def test_an_optimizer_or_a_module_that_wraps_another_is_kept():
    model = nn.DataParallel(Toy())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # as a Lookahead does
    state = fl.TrainState.create(model, optimizer)
    assert state.optimizer is optimizer and state.model is model


SGD = torch.optim.SGD
ONE_OPTIMIZER = "expects one optimizer, as the state has; got the names a. For others make a new"
NAMES = "expects the names a, b, as the state has; got"


@pytest.mark.parametrize(("several", "given", "error", "message"), [
    (False, lambda m: {"a": SGD(m.parameters(), lr=1.0)}, ValueError, ONE_OPTIMIZER),
    (False, lambda m: {}, TypeError, "expects an optimizer, or several by name"),
    (False, lambda m: None, TypeError, "several by name where the state has them; got None"),
    (True, lambda m: SGD(m.parameters(), lr=1.0), ValueError, f"{NAMES} SGD"),
    (True, lambda m: {"a": SGD(m.parameters(), lr=1.0)}, ValueError, f"{NAMES} the names a"),
    (True, lambda m: {"a": 1, "b": 2}, TypeError, "got {'a': 1, 'b': 2}"),
])  # fmt: skip
def test_a_state_is_given_optimizers_in_the_form_that_it_has(several, given, error, message):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    if several:
        optimizer = {"a": SGD([model.weight], lr=1.0), "b": SGD([model.bias], lr=1.0)}
    state = fl.TrainState.create(model, optimizer)
    with pytest.raises(error, match=r"attrs.evolve\(state, optimizer=...\) expects") as raised:
        attrs.evolve(state, optimizer=given(model))
    assert message in str(raised.value)


def test_a_state_takes_other_optimizers_of_the_same_names():
    nn.init.zeros_((model := nn.Linear(1, 1)).bias)
    make = lambda lr: {"a": SGD([model.weight], lr=lr), "b": SGD([model.bias], lr=lr)}
    state = attrs.evolve(fl.TrainState.create(model, make(0.0)), optimizer=make(2.0))
    fl.fit(fl.pipeline()(lambda m, x: m.bias.sum()), state, [ONE], hooks=())
    assert model.bias.item() == -2.0 and repr(state.optimizer) == "{'a': SGD, 'b': SGD}"
