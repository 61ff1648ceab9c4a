"""SAM against a loop by hand."""

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, of

import fnloop as fl
from fnloop._core.rng import COMPUTE, fold_in
from fnloop.testing import small, stochastic, toy

ONE = torch.ones(1)


def square(model, batch):
    """The gradient is w times the mean of x squared."""
    return (model.w * batch).square().mean() / 2


def update(*members, loss_fn=square, w=2.0, lr=1.0, batch=ONE):
    return fl.pipeline(*members)(loss_fn)(toy(w=w, lr=lr), batch)


def test_the_gradient_is_that_of_the_place_nearby_and_the_loss_that_of_the_weights():
    state, out = update(fl.sam(0.5))
    assert state.model.w.item() == pytest.approx(-0.5)  # 2 - (2 + 0.5)
    assert out.loss.item() == 2.0
    state, out = update(fl.sam(0.5), fl.clip(1.0))  # it clips the gradient nearby
    assert state.model.w.item() == pytest.approx(1.0, abs=1e-5)
    assert out.metrics["grad_norm"].compute() == pytest.approx(2.5)
    flat = lambda model, batch: (model.w * 0).square().mean()
    assert update(fl.sam(0.5), loss_fn=flat)[0].model.w.item() == 2.0


def by_hand(problem, rho, epochs, precision=None):
    """The SAM of the paper, with the same draws in both passes and the buffers of the first one."""
    state = problem.state()
    model, optimizer = state.model, state.optimizer
    for epoch in range(epochs):
        for i, batch in enumerate(problem.batches):
            for again in (False, True):
                torch.manual_seed(fold_in(state.seed, COMPUTE, epoch, i))
                optimizer.zero_grad()
                with torch.autocast("cpu", precision, enabled=precision is not None):
                    loss, _ = problem.loss_fn(model, batch)
                loss.backward()
                if again:
                    break
                norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
                kept = [p.detach().clone() for p in model.parameters()]
                buffers = [b.clone() for b in model.buffers()]
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(p.grad * (rho / (norm + 1e-12)))
            with torch.no_grad():
                for p, value in zip(model.parameters(), kept, strict=True):
                    p.copy_(value)
                for b, value in zip(model.buffers(), buffers, strict=True):
                    b.copy_(value)
            optimizer.step()
    return model


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("problem", [small, stochastic])
def test_it_equals_the_loop_by_hand_bit_for_bit(problem, precision):
    one = problem()
    pipe = fl.pipeline(*((fl.amp("bf16"),) if precision else ()), fl.sam(0.05))
    state = fl.fit(pipe(one.loss_fn), one.state(), one.batches, epochs=2, hooks=())
    assert_same_weights(state, by_hand(one, 0.05, 2, precision))


@pytest.mark.parametrize(("order", "moved"), [(1, 0.5), (-1, 0.5 * 2**-0.5)])
def test_accumulate_outside_moves_for_each_micro_batch(order, moved):
    batches = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    step = fl.pipeline(*(fl.sam(0.5), fl.accumulate(2))[::order])
    step(lambda model, batch: (model.weight * batch).square().sum() / 2)(of(model), batches)
    assert model.weight.tolist()[0] == pytest.approx([1 - (1 + moved) / 2] * 2)


@pytest.mark.parametrize("at", [None, 1, 2])
def test_fp16_is_unscaled_in_both_passes_and_an_overflow_in_either_skips(at):
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        return square(model, batch).float() * (float("inf") if len(calls) == at else 1.0)

    state, out = update(fl.amp("fp16", init_scale=2.0**10), fl.sam(0.5), loss_fn=loss_fn)
    assert (state.step, state.skipped, len(calls)) == ((1, 0, 2) if at is None else (0, 1, at))
    assert state.model.w.item() == pytest.approx(-0.5 if at is None else 2.0)
    assert out.skip is None if at is None else "overflowed" in out.skip


def test_weights_are_restored_when_the_second_pass_fails():
    calls = []

    def fails(model, batch):
        calls.append(1)
        return square(model, batch) if len(calls) < 2 else 1 / 0

    state = toy(w=2.0)
    with pytest.raises(ZeroDivisionError):
        fl.pipeline(fl.sam())(fails)(state, ONE)
    assert state.model.w.item() == 2.0
    assert fl.evaluate(fl.pipeline()(square), state, [ONE]) == {"loss": 2.0}


def test_a_carry_is_that_of_the_first_pass():
    def loss_fn(model, batch, carry):
        return square(model, batch), {}, model.w + (0 if carry is None else carry)

    batch = torch.ones(1, 3)
    state, _ = update(fl.tbptt(1), fl.sam(0.5), loss_fn=loss_fn, lr=0.0, batch=batch)
    assert state.slots["tbptt"].item() == 6.0
