"""SAM against a loop by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import fnloop as fl
from fnloop.testing import Toy, small, stochastic, toy


def square(model, batch):
    """The gradient is w times the mean of x squared."""
    return (model.w * batch).square().mean() / 2


def test_the_gradient_is_that_of_the_place_nearby_and_the_loss_that_of_the_weights():
    state, out = fl.pipeline(fl.sam(0.5))(square)(toy(w=2.0, lr=1.0), torch.ones(1))
    assert state.model.w.item() == pytest.approx(-0.5)  # 2 - (2 + 0.5)
    assert out.loss.item() == 2.0


def by_hand(problem, rho, epochs, precision=None):
    """The SAM of the paper, with the same draws in both passes and the buffers of the first one."""
    from fnloop._core.rng import COMPUTE, fold_in

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
    model = by_hand(one, 0.05, 2, precision)
    for name, value in model.state_dict().items():
        assert torch.equal(state.model.state_dict()[name], value), name


def test_accumulate_inside_takes_the_gradient_of_the_window_at_both_places():
    batches = [torch.tensor([1.0]), torch.tensor([3.0])]  # gradients w and 9w: 5w
    inside = fl.pipeline(fl.accumulate(2), fl.sam(0.5))(square)
    outside = fl.pipeline(fl.sam(0.5), fl.accumulate(2))(square)
    whole = fl.pipeline(fl.sam(0.5))(square)
    one = inside(toy(w=2.0, lr=0.1), batches)[0].model.w.item()
    two = outside(toy(w=2.0, lr=0.1), batches)[0].model.w.item()
    three = whole(toy(w=2.0, lr=0.1), torch.tensor([1.0, 3.0]))[0].model.w.item()
    assert one == pytest.approx(2 - 0.1 * 5 * 2.5)
    assert two == pytest.approx(one)  # one parameter: all gradients point the same way
    assert three == pytest.approx(one)


def two_weights(model, batch):
    return (model.weight * batch).square().sum() / 2


def test_accumulate_outside_moves_for_each_micro_batch():
    batches = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    model = nn.Linear(2, 1, bias=False)
    for order, moved in (((0, 1), 0.5), ((1, 0), 0.5 * 2**-0.5)):
        nn.init.ones_(model.weight)
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
        pair = (fl.sam(0.5), fl.accumulate(2))
        step = fl.pipeline(*(pair[i] for i in order))(two_weights)
        state, _ = step(state, batches)
        expected = 1 - (1 + moved) / 2
        assert state.model.weight.tolist()[0] == pytest.approx([expected, expected])


def test_fp16_is_unscaled_in_both_passes_and_an_overflow_in_either_skips():
    def loss_fn(model, batch):
        return square(model, batch).float()

    pipe = fl.pipeline(fl.amp("fp16", init_scale=2.0**10), fl.sam(0.5))
    state, _ = pipe(loss_fn)(toy(w=2.0, lr=1.0), torch.ones(1))
    assert state.model.w.item() == pytest.approx(-0.5)

    calls = []

    def overflows(model, batch):
        calls.append(1)
        return square(model, batch).float() * (float("inf") if len(calls) == at else 1.0)

    for at in (1, 2):
        calls.clear()
        state, out = pipe(overflows)(toy(w=2.0, lr=1.0), torch.ones(1))
        assert (state.step, state.skipped, state.model.w.item(), len(calls)) == (0, 1, 2.0, at)
        assert "overflowed" in out.skip


def test_weights_are_restored_when_the_second_pass_fails():
    calls = []

    def fails(model, batch):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no")
        return square(model, batch)

    state = toy(w=2.0)
    with pytest.raises(RuntimeError, match="no"):
        fl.pipeline(fl.sam())(fails)(state, torch.ones(1))
    assert (state.model.w.item(), fl.evaluate(fl.pipeline()(square), state, [torch.ones(1)])) == (
        2.0,
        {"loss": 2.0},
    )


def test_clip_after_it_clips_the_gradient_nearby():
    step = fl.pipeline(fl.sam(0.5), fl.clip(1.0))(square)
    state, out = step(toy(w=2.0, lr=1.0), torch.ones(1))
    assert state.model.w.item() == pytest.approx(1.0, abs=1e-5)
    assert out.metrics["grad_norm"].compute() == pytest.approx(2.5)


def test_a_carry_is_that_of_the_first_pass():
    def loss_fn(model, batch, carry):
        return square(model, batch), {}, model.w + (0 if carry is None else carry)

    step = fl.pipeline(fl.tbptt(1), fl.sam(0.5))(loss_fn)
    state, _ = step(toy(w=2.0, lr=0.0), torch.ones(1, 3))
    assert state.slots["tbptt"].item() == 6.0


def test_a_gradient_of_zero_moves_nothing():
    def flat(model, batch):
        return functional.mse_loss(model.w * 0, batch[0])

    state, _ = fl.pipeline(fl.sam())(flat)(toy(w=2.0), torch.ones(1))
    assert state.model.w.item() == 2.0
    assert isinstance(state.model, Toy)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fl.sam(0), ValueError, "rho"),
        (lambda: fl.sam("0.1"), TypeError, "rho"),
        (lambda: fl.pipeline(fl.sam(), fl.cuda_graph()), ValueError, "cannot capture sam"),
        (lambda: fl.pipeline(fl.sam(), fl.amp("fp16"))(square), ValueError, "List it first"),
    ],
)
def test_what_cannot_be_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
