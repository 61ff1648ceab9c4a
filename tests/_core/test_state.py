import copy

import attrs
import pytest
import torch
from torch import nn

import fnloop as fl
from fnloop.testing import Toy, assert_same, stochastic, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def test_a_new_state_is_at_the_beginning():
    state = toy()
    assert (state.step, state.epoch, state.batch, state.skipped, len(state.history)) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert state.run is None and state.stop is None and state.generators is None


def test_the_seed_is_drawn_from_torchs_generator():
    def create():
        model = Toy()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    torch.manual_seed(0)
    first, second = create().seed, create().seed
    torch.manual_seed(0)
    assert create().seed == first != second


def test_a_record_cannot_be_assigned_to():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        toy().step = 3


@pytest.mark.parametrize(
    "use",
    [
        lambda state: step(state, ONE),
        lambda state: step.evaluate(state, ONE),
        lambda state: fl.fit(step, state, [ONE], hooks=()),
        lambda state: fl.run(step, state, [ONE]),
        lambda state: fl.evaluate(step, state, [ONE]),
        lambda state: fl.predict(lambda model, batch: batch, state, [ONE]),
        fl.snapshot,
    ],
    ids=["step", "step.evaluate", "fit", "run", "evaluate", "predict", "snapshot"],
)
@pytest.mark.parametrize(
    "advance", [lambda s: step(s, ONE), lambda s: fl.fit(step, s, [ONE], hooks=())]
)
def test_a_state_that_has_been_advanced_cannot_be_used_again(use, advance):
    state = toy()
    advance(state)
    with pytest.raises(fl.StaleStateError, match=r"before = snapshot\(state\)"):
        use(state)


def test_evolving_a_stale_state_does_not_make_it_fresh():
    state = toy()
    step(state, ONE)
    with pytest.raises(fl.StaleStateError):
        fl.fit(step, attrs.evolve(state, stop=None), [ONE], hooks=())


def test_the_repr_of_a_stale_state_says_so():
    state = toy()
    new, _ = step(state, ONE)
    assert repr(state).startswith("stale TrainState(step=0")
    assert repr(new).startswith("TrainState(step=1")


def test_a_step_that_raises_leaves_its_state_fresh():
    def fails(model, batch):
        loss = toy_loss(model, batch)
        if batch[0] == 2:
            raise ZeroDivisionError
        return loss

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


def test_a_snapshot_is_independent_and_equal():
    problem = stochastic()
    make = fl.pipeline(
        fl.accumulate(2),
        fl.torch_scheduler(lambda opt, run: torch.optim.lr_scheduler.StepLR(opt, 1)),
    )
    one = fl.fit(make(problem.loss_fn), problem.state(), problem.batches, steps=3, hooks=())
    kept = fl.snapshot(one)
    assert_same(one, kept)
    reference = copy.deepcopy(one.model.state_dict())
    fl.fit(make(problem.loss_fn), one, problem.batches, epochs=2, hooks=())
    for name, tensor in kept.model.state_dict().items():
        assert torch.equal(tensor, reference[name])


def test_a_snapshot_copies_model_and_optimizer_together():
    kept = fl.snapshot(toy())
    (parameter,) = kept.optimizer.param_groups[0]["params"]
    assert parameter is kept.model.w


def test_a_snapshot_of_lbfgs_can_be_trained():
    """LBFGS has its own list of parameters, which torch does not copy."""
    model = Toy(w=5.0)
    state = fl.TrainState.create(
        model, torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe")
    )
    kept, _ = fl.pipeline()(lambda model, batch: (model(batch) - 3).square().mean())(
        fl.snapshot(state), ONE
    )
    assert (kept.model.w.item(), state.model.w.item()) == (pytest.approx(3.0), 5.0)


def test_two_forks_of_one_snapshot_are_independent():
    state = toy()
    fork = fl.snapshot(state)
    state, _ = step(state, ONE)
    fork, _ = step(fork, torch.tensor([5.0]))
    assert (state.model.w.item(), fork.model.w.item()) == (-1.0, -5.0)


def test_a_snapshot_taken_in_a_hook_continues_as_the_run_does():
    """A snapshot within an epoch has the states of Python's and NumPy's generators."""
    import random

    import numpy as np

    def draws(model, batch):
        return (model.w * random.random() * np.random.rand()).mean(), {"weight": 1}

    kept = []

    def keep(state):
        kept.append(fl.snapshot(state))
        return state

    drawing = fl.pipeline()(draws)
    whole = fl.fit(drawing, toy(), [ONE] * 5, hooks=(fl.when(lambda state: state.step == 2)(keep),))
    again = fl.fit(drawing, kept[0], [ONE] * 5, hooks=())
    assert_same(whole, again)


def test_unwrap_gives_the_users_module():
    state = toy()
    assert fl.unwrap(state) is state.model
    inner = nn.Linear(1, 1)
    wrapper = nn.Module()
    wrapper._orig_mod = inner
    assert fl.unwrap(attrs.evolve(state, model=wrapper)) is inner
    assert fl.unwrap(attrs.evolve(state, model=nn.DataParallel(wrapper))) is inner


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda m, o: fl.TrainState.create(Toy, o),
            TypeError,
            "expects model as a torch.nn.Module; got the class Toy",
        ),
        (lambda m, o: fl.TrainState.create(m, 0.1), TypeError, "expects an optimizer second"),
        (lambda m, o: fl.TrainState.create(m, torch.optim.SGD), TypeError, "got the class SGD"),
        (
            lambda m, o: fl.TrainState.create(m, o, seed=-1),
            ValueError,
            "seed expects an int from 0",
        ),
        (
            lambda m, o: fl.TrainState.create(m, o, seed=1.5),
            ValueError,
            "seed expects an int from 0",
        ),
        (
            lambda m, o: fl.TrainState.create(Toy(), o),
            ValueError,
            "optimizer's parameters belongs to this Toy",
        ),
    ],
)
def test_bad_input_says_what_to_type(make, error, message):
    model = Toy()
    with pytest.raises(error, match=message):
        make(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_an_optimizer_or_a_module_that_wraps_another_is_kept():
    class Slow(torch.optim.SGD):
        """Holds another optimizer, as a Lookahead does."""

        def __init__(self, inner):
            super().__init__(inner.param_groups[0]["params"], lr=1.0)
            self.optimizer = inner

    model = nn.DataParallel(Toy())
    optimizer = Slow(torch.optim.SGD(model.parameters(), lr=1.0))
    state = fl.TrainState.create(model, optimizer)
    assert state.optimizer is optimizer and state.model is model


@fl.middleware("update")
def counter():
    """Count updates in place, in a tensor in the slot."""

    def wrap(step):
        def counted(state, batch):
            state, out = step(state, batch)
            state.slots["counter"].add_(1)
            return state, out

        return counted

    return fl.Middleware("counter", update=wrap, init=lambda state: torch.zeros(()))


def test_a_snapshot_copies_the_slots():
    counting = fl.pipeline(counter())(toy_loss)
    state = fl.fit(counting, toy(), [ONE] * 2, hooks=())
    before = fl.snapshot(state)
    fl.fit(counting, state, [ONE] * 3, hooks=())
    assert before.slots["counter"].item() == 2.0
