"""Optimizers that take a closure by choice, and those that differentiate gradients."""

import warnings

import pytest
import torch
from toy_runs import assert_same_weights, fitted, of

import fnloop as fl
from fnloop._core.rng import COMPUTE, fold_in
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


class AdaHessian(torch.optim.Optimizer):
    """The update of the paper, without momentum: divide by Hutchinson's diagonal of the Hessian."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [p for group in self.param_groups for p in group["params"]]
        signs = [torch.randint(0, 2, p.shape).to(p) * 2 - 1 for p in params]
        gradients = [p.grad for p in params]
        products = torch.autograd.grad(gradients, params, grad_outputs=signs)
        for p, sign, product in zip(params, signs, products, strict=True):
            state = self.state.setdefault(p, {"square": torch.zeros_like(p)})
            state["square"].mul_(0.9).addcmul_(sign * product, sign * product, value=0.1)
            p.addcdiv_(p.grad, state["square"].sqrt() + 1e-4, value=-self.defaults["lr"])
        return loss


@pytest.mark.filterwarnings("error")
def test_ada_hessian_equals_the_loop_by_hand_bit_for_bit_also_when_it_is_resumed(tmp_path):
    problem, member = small(), fl.closure(create_graph=True)
    new = lambda: of(problem.state().model, AdaHessian, lr=0.1)
    state = fit(problem, member, state=new(), epochs=1)
    state = fl.restore(fl.save(state, tmp_path / "one"), new())
    state, by = fit(problem, member, state=state, epochs=2), new()
    for epoch in range(2):
        for i, batch in enumerate(problem.batches):
            torch.manual_seed(fold_in(0, COMPUTE, epoch, i))
            by.optimizer.zero_grad()
            with warnings.catch_warnings(action="ignore"):  # torch's, of a cycle that leaks memory
                problem.loss_fn(by.model, batch)[0].backward(create_graph=True)
            by.optimizer.step()
    assert_same_weights(state, by)
    assert all(p.grad is None for p in state.model.parameters())


class Newton(torch.optim.SGD):
    """Divides the gradient by its derivative."""

    def step(self, closure=None):
        closure()
        (p,) = self.param_groups[0]["params"]
        (second,) = torch.autograd.grad(p.grad, p)
        with torch.no_grad():
            p.sub_(p.grad / second)


@pytest.mark.parametrize("member", [fl.clip(1.0), fl.clip_value(1.0)], ids=repr)
def test_clipping_changes_the_gradient_and_not_what_is_differentiated(member):
    square = lambda model, batch: (2 * model.w.square() * batch).mean()
    closure, state = fl.closure(create_graph=True), of(Toy(w=3.0), Newton)
    state = fitted([1], member, closure, loss_fn=square, state=state)
    assert state.model.w.item() == pytest.approx(2.75)  # 3 - 1 / 4


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
