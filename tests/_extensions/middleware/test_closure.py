"""Optimizers that take a closure by choice, and those that differentiate gradients."""

import pytest
import torch
from toy_runs import fitted, of

import fnloop as fl
from fnloop.testing import Toy, assert_same, small


def fit(problem, *members, state=None, **settings):
    state, loss_fn = problem.state() if state is None else state, problem.loss_fn
    return fitted(problem.batches, *members, loss_fn=loss_fn, state=state, **settings)


def test_an_optimizer_that_calls_it_once_makes_the_same_update():
    problem = small()
    assert_same(fit(problem, fl.closure()), fit(problem))


class Twice(torch.optim.SGD):
    """Makes a second update if it is given a closure."""

    def step(self, closure=None):
        if closure is not None:
            closure()
            super().step()
            closure()
        super().step()


@pytest.mark.parametrize(("members", "reached"), [((fl.closure(),), 0.5), ((), 1.0)])
def test_the_closure_is_given_only_if_it_is_listed(members, reached):
    """Each update halves the weight: the gradient is w, and the rate 1/2."""
    square = lambda model, batch: (model.w.square() * batch).mean() / 2
    state = fitted([1], *members, loss_fn=square, state=of(Toy(w=2.0), Twice, lr=0.5))
    assert (state.model.w.item(), state.step) == (reached, 1)


class Newton(torch.optim.SGD):
    """Divides the gradient by its derivative."""

    def step(self, closure=None):
        closure()
        (p,) = self.param_groups[0]["params"]
        (second,) = torch.autograd.grad(p.grad, p)
        with torch.no_grad():
            p.sub_(p.grad / second)


@pytest.mark.parametrize(("members", "reached"), [
    ((), 0.0), ((fl.clip(1.0),), 2.75), ((fl.clip_value(1.0),), 2.75),  # 3 - 12 / 4, 3 - 1 / 4
], ids=repr)  # fmt: skip
def test_clipping_changes_the_gradient_and_not_what_is_differentiated(members, reached):
    square = lambda model, batch: (2 * model.w.square() * batch).mean()
    closure, state = fl.closure(create_graph=True), of(Toy(w=3.0), Newton)
    state = fitted([1], *members, closure, loss_fn=square, state=state)
    assert state.model.w.item() == pytest.approx(reached) and state.model.w.grad is None


class Plain(torch.optim.SGD):
    def step(self):
        super().step()


def test_an_optimizer_without_a_closure_and_several_are_refused():
    with pytest.raises(TypeError, match=r"Plain.step takes no closure: leave closure\(\) out"):
        fitted([1], fl.closure(), state=of(Toy(), Plain))
    model = torch.nn.Linear(1, 1)
    named = {k: torch.optim.SGD([p], lr=1.0) for k, p in model.named_parameters()}
    with pytest.raises(TypeError, match=r"closure\(\) calls the step of one optimizer"):
        fitted([1], fl.closure(), state=fl.TrainState.create(model, named))
