"""A GAN by steps in turn equals the loop that its authors write, and gradient penalties."""

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, fitted

import fnloop as fl
from fnloop._core.rng import COMPUTE, fold_in
from fnloop.testing import toy

ADAM = {"lr": 2e-3, "betas": (0.5, 0.999)}
SEED = 7


def adams(gan):
    return {name: torch.optim.Adam(gan[name].parameters(), **ADAM) for name in "dg"}


def wgan():
    torch.manual_seed(1)
    g = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    d = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    return nn.ModuleDict({"g": g, "d": d})


def points(n=14, size=4):
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(size, 2, generator=draw) for _ in range(n)]


def gradient_penalty(d, real, fake):
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
    return 10 * (gradient.norm(dim=1) - 1).square().mean()


def critic_loss(model, real):
    d, fake = model["d"], model["g"](torch.randn(len(real), 3)).detach()
    with torch.enable_grad():  # an evaluation has no gradients otherwise
        penalty = gradient_penalty(d, real, fake)
    return d(fake).mean() - d(real).mean() + penalty


def generator_loss(model, real):
    return -model["d"](model["g"](torch.randn(len(real), 3))).mean()


def wgan_by_hand(batches, epochs, size):
    """Five batches for the critic. The generator takes the sixth, or the fifth too."""
    gan = wgan()
    d, g = gan["d"], gan["g"]
    optimizer_d, optimizer_g = adams(gan).values()
    for epoch in range(epochs):
        for i, real in enumerate(batches):
            if i % size == 0:  # a round begins: fnloop's draws are a function of the position
                torch.manual_seed(fold_in(SEED, COMPUTE, epoch, i))
            if i % size < 5:
                optimizer_d.zero_grad()
                fake = g(torch.randn(len(real), 3)).detach()
                penalty = gradient_penalty(d, real, fake)
                (d(fake).mean() - d(real).mean() + penalty).backward()
                optimizer_d.step()
            if i % size == size - 1:
                optimizer_g.zero_grad()
                (-d(g(torch.randn(len(real), 3))).mean()).backward()
                optimizer_g.step()
    return gan


def new_wgan():
    gan = wgan()
    return fl.TrainState.create(gan, adams(gan), seed=SEED)


def wgan_step(batch="next", **settings):
    steps = {"d": fl.pipeline()(critic_loss), "g": fl.pipeline()(generator_loss)}
    return fl.alternate(steps, order=("d",) * 5 + ("g",), batch=batch, **settings)


@pytest.mark.parametrize(("batch", "size", "critic"), [
    ("next", 6, 24),  # a round of 6 batches, a second one, and a third one of two critic updates
    ({"d": "next", "g": "same"}, 5, 28),  # two rounds of 5, and a third one of four
], ids=["next", "same"])  # fmt: skip
def test_a_critic_with_five_updates_to_one_equals_the_loop_by_hand(batch, size, critic):
    """An epoch has 14 batches."""
    loaders = points(), points(2)
    state = fl.fit(wgan_step(batch), new_wgan(), loaders, epochs=2, hooks=())
    assert_same_weights(state, wgan_by_hand(points(), 2, size))
    assert (state.step, dict(state.updates)) == (6, {"d": critic, "g": 4})


def test_the_critic_is_evaluated_with_its_penalty():
    state = new_wgan()
    found = fl.evaluate(wgan_step(evaluate="d"), state, points(1))
    assert set(found) == {"loss", "d/loss"} and found["d/loss"] > 0.1
    out = wgan_step().evaluate(state, points()[0])
    assert not out.loss.requires_grad and not out.metrics["d/loss"].total.requires_grad
    assert all(p.grad is None for p in state.model.parameters())


def penalty_alone(model, batch):
    """The square of the gradient w of w × x; with gradients switched on for it."""
    with torch.enable_grad():
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean(), {"gradient": gradient}


def test_a_plain_step_evaluates_a_gradient_penalty():
    seen = []
    look = fl.inspect(lambda state, outputs: seen.extend(outputs))
    members = fl.ema(0.5), fl.metric(size=lambda aux, batch: aux["gradient"].mean())
    loaders, state = {"train": [torch.ones(2)], "valid": [torch.ones(3)]}, toy(w=2.0, lr=0.25)
    state = fitted(loaders, *members, loss_fn=penalty_alone, state=state, hooks=(look,))
    assert state.model.w.item() == 1.0  # 2 - 0.25 × 4
    names = "valid/loss", "valid/ema/loss", "valid/size"
    assert [state.history.latest(name) for name in names] == [1.0, 2.25, 1.0]  # 1.5² is 2.25
    assert not seen[0].loss.requires_grad and not seen[0].aux["gradient"].requires_grad
    step = fl.pipeline(*members)(penalty_alone)
    assert not step.evaluate(state, torch.ones(1)).loss.requires_grad


@pytest.mark.parametrize("run", [
    lambda step: fl.fit(step, toy(), ([torch.ones(1)], [torch.ones(1)]), hooks=()),
    lambda step: fl.evaluate(step, toy(), [torch.ones(1)]),
    lambda step: step.evaluate(toy(), torch.ones(1)),
])  # fmt: skip
def test_a_penalty_without_gradients_says_what_to_type(run):
    def forgets(model, batch):
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        run(fl.pipeline()(forgets))
    assert "with torch.enable_grad(): ..." in "".join(caught.value.__notes__)
