"""Optimizers that take a closure by choice, and those that differentiate gradients."""

import warnings

import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, small, toy, toy_loss


def fit(problem, *members, state=None, **kwargs):
    state = problem.state() if state is None else state
    step = fl.pipeline(*members)(problem.loss_fn)
    return fl.fit(step, state, problem.batches, hooks=(), **kwargs)


def test_an_optimizer_that_calls_it_once_makes_the_same_update():
    problem = small()
    assert_same(fit(problem, fl.closure()), fit(problem))


class Extragradient(torch.optim.Optimizer):
    """Takes the gradient a step ahead, if it is given a closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = None if closure is None else closure()
        kept = [p.clone() for p in params]
        if closure is not None:
            for p in params:
                p.sub_(p.grad, alpha=self.defaults["lr"])
            with torch.enable_grad():
                closure()
        for p, value in zip(params, kept, strict=True):
            p.copy_(value).sub_(p.grad, alpha=self.defaults["lr"])
        return loss


@pytest.mark.parametrize("listed", [True, False])
def test_the_closure_is_given_only_if_it_is_listed(listed):
    problem = small()
    state = problem.state()
    optimizer = Extragradient(state.model.parameters(), lr=0.1)
    state = fl.TrainState.create(state.model, optimizer, seed=0)
    state = fit(problem, *((fl.closure(),) if listed else ()), state=state)

    model = problem.state().model
    optimizer = Extragradient(model.parameters(), lr=0.1)
    for batch in problem.batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = problem.loss_fn(model, batch)[0]
            loss.backward()
            return loss

        if listed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    for mine, theirs in zip(state.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert state.step == len(problem.batches)


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


@pytest.mark.parametrize("stopped_after", [None, 1])
def test_ada_hessian_equals_the_loop_by_hand_bit_for_bit(stopped_after, tmp_path):
    from fnloop._core.rng import COMPUTE, fold_in

    problem = small()

    def new_state():
        model = problem.state().model
        return fl.TrainState.create(model, AdaHessian(model.parameters()), seed=3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = new_state()
        if stopped_after:
            state = fit(problem, fl.closure(create_graph=True), state=state, epochs=1)
            fl.save(state, tmp_path / "one")
            state = fl.restore(tmp_path / "one", new_state())
        state = fit(problem, fl.closure(create_graph=True), state=state, epochs=2)

    by_hand = new_state()
    for epoch in range(2):
        for i, batch in enumerate(problem.batches):
            torch.manual_seed(fold_in(3, COMPUTE, epoch, i))
            by_hand.optimizer.zero_grad()
            problem.loss_fn(by_hand.model, batch)[0].backward(create_graph=True)
            by_hand.optimizer.step()
    for mine, theirs in zip(state.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.grad is None


@pytest.mark.parametrize("member", [fl.clip(1.0), fl.clip_value(1.0)], ids=repr)
def test_clipping_changes_the_gradient_and_not_what_is_differentiated(member):
    class Newton(torch.optim.SGD):
        """Divides the gradient by its derivative."""

        def step(self, closure=None):
            closure()
            (p,) = self.param_groups[0]["params"]
            (second,) = torch.autograd.grad(p.grad, p)
            with torch.no_grad():
                p.sub_(p.grad / second)

    model = toy(w=3.0).model
    state = fl.TrainState.create(model, Newton(model.parameters(), lr=1.0))
    step = fl.pipeline(member, fl.closure(create_graph=True))(
        lambda model, batch: (2 * model.w.square() * batch).mean()
    )
    state, _ = step(state, torch.ones(1))
    assert state.model.w.item() == pytest.approx(2.75)  # 3 - 1 / 4


def test_an_optimizer_without_a_closure_is_refused():
    class Plain(torch.optim.SGD):
        def step(self):
            super().step()

    state = toy()
    state = fl.TrainState.create(state.model, Plain(state.model.parameters(), lr=1.0))
    with pytest.raises(TypeError, match=r"Plain.step takes no closure: leave closure\(\) out"):
        fl.pipeline(fl.closure())(toy_loss)(state, torch.ones(1))


def test_several_optimizers_are_refused():
    model = torch.nn.Linear(1, 1)
    named = {k: torch.optim.SGD([p], lr=1.0) for k, p in model.named_parameters()}
    state = fl.TrainState.create(model, named)
    with pytest.raises(TypeError, match=r"closure\(\) calls the step of one optimizer"):
        fl.pipeline(fl.closure())(lambda m, x: m(x).mean())(state, torch.ones(1, 1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.closure(create_graph=1), TypeError, "create_graph"),
        (lambda: fl.pipeline(fl.closure(), fl.cuda_graph()), ValueError, "cannot capture"),
        (
            lambda: fl.pipeline(fl.closure(), fl.closure(create_graph=True)),
            ValueError,
            r"both listed: leave closure\(\) out",
        ),
        (
            lambda: fl.pipeline(fl.accumulate(2), fl.closure(create_graph=True)),
            ValueError,
            "changes gradients in place",
        ),
        (
            lambda: fl.pipeline(fl.amp("fp16"), fl.closure(create_graph=True)),
            ValueError,
            "changes gradients in place",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
