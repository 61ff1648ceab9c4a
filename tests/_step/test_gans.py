"""GANs by steps in turn equal the loops that their authors write, also when they are resumed."""

import attrs
import pytest
import torch
from torch import nn
from torch.func import functional_call

import fnloop as fl
from fnloop._core.rng import COMPUTE, fold_in
from fnloop.testing import assert_same

ADAM = {"lr": 2e-3, "betas": (0.5, 0.999)}
SEED = 7


def resumed(run, new_state, stopped_after, folder):
    """Return the state of a run that is saved and restored after some rounds; None: never."""
    if stopped_after is None:
        return run(new_state(), ())
    pause = fl.when(lambda state: state.step == stopped_after)(
        lambda state: attrs.evolve(state, stop="paused")
    )
    state = run(new_state(), (pause,))
    assert (state.step, state.stop) == (stopped_after, "paused")
    fl.save(state, folder / "paused")
    return run(attrs.evolve(fl.restore(folder / "paused", new_state()), stop=None), ())


def of_whole_epochs(state, *names):
    records = [record.metrics for record in state.history if not record.closing]
    return [[record[name] for record in records] for name in names]


def assert_same_weights(state, gan):
    for name, value in gan.state_dict().items():
        assert torch.equal(state.model.state_dict()[name], value), name


# --- examples/dcgan/main.py of PyTorch, with small nets


def dcgan():
    torch.manual_seed(0)
    nz, nf = 6, 4
    g = nn.Sequential(
        nn.ConvTranspose2d(nz, nf * 2, 4, 1, 0, bias=False),
        nn.BatchNorm2d(nf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(nf * 2, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    d = nn.Sequential(
        nn.Conv2d(1, nf, 4, 2, 1, bias=False),
        nn.BatchNorm2d(nf),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(nf, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    return nn.ModuleDict({"g": g, "d": d})


def images():
    """Return (images, noise): the noise of a batch is a part of it, since both turns need it."""
    draw = torch.Generator().manual_seed(5)
    sizes = (5, 5, 3, 5)
    return [
        (torch.rand(n, 1, 8, 8, generator=draw) * 2 - 1, torch.randn(n, 6, 1, 1, generator=draw))
        for n in sizes
    ]


def as_real(output):
    return nn.functional.binary_cross_entropy(output.view(-1), torch.ones(len(output)))


def as_fake(output):
    return nn.functional.binary_cross_entropy(output.view(-1), torch.zeros(len(output)))


def dcgan_d_loss(model, batch):
    """The generator's statistics are updated in its own turn, so these are copies."""
    real, noise = batch
    copies = {name: buffer.clone() for name, buffer in model["g"].named_buffers()}
    fake = functional_call(model["g"], copies, noise)
    return as_real(model["d"](real)) + as_fake(model["d"](fake))


def dcgan_g_loss(model, batch):
    _, noise = batch
    return as_real(model["d"](model["g"](noise)))


def dcgan_by_hand(batches, epochs):
    gan, criterion = dcgan(), nn.BCELoss()
    net_d, net_g = gan["d"], gan["g"]
    optimizer_d = torch.optim.Adam(net_d.parameters(), **ADAM)
    optimizer_g = torch.optim.Adam(net_g.parameters(), **ADAM)
    losses = []
    for _ in range(epochs):
        for real, noise in batches:
            net_d.zero_grad()
            label = torch.full((len(real),), 1.0)
            err_d_real = criterion(net_d(real).view(-1), label)
            err_d_real.backward()
            fake = net_g(noise)
            label.fill_(0.0)
            err_d_fake = criterion(net_d(fake.detach()).view(-1), label)
            err_d_fake.backward()
            err_d = err_d_real + err_d_fake
            optimizer_d.step()
            net_g.zero_grad()
            label.fill_(1.0)
            err_g = criterion(net_d(fake).view(-1), label)
            err_g.backward()
            optimizer_g.step()
            losses.append((err_d.item(), err_g.item(), len(real)))
    return gan, losses


@pytest.mark.parametrize("stopped_after", [None, 1, 3, 4, 6])
def test_dcgan_equals_the_loop_by_hand_bit_for_bit(stopped_after, tmp_path):
    batches, seen = images(), []
    steps = {"d": fl.pipeline()(dcgan_d_loss), "g": fl.pipeline()(dcgan_g_loss)}

    @fl.middleware("step")
    def noted():
        def wrap(step):
            def noting(state, batch):
                state, out = step(state, batch)
                d, g = (out.metrics[f"{name}/loss"].compute() for name in "dg")
                seen.append((d, g, len(batch[0])))
                return state, out

            return noting

        return wrap

    def new_state():
        gan = dcgan()
        optimizers = {name: torch.optim.Adam(gan[name].parameters(), **ADAM) for name in "dg"}
        return fl.TrainState.create(gan, optimizers, seed=SEED)

    def run(state, hooks):
        return fl.fit(
            fl.pipeline(noted())(fl.alternate(steps)), state, batches, epochs=2, hooks=hooks
        )

    state = resumed(run, new_state, stopped_after, tmp_path)
    gan, losses = dcgan_by_hand(batches, 2)
    assert_same_weights(state, gan)
    assert [(d, g) for d, g, _ in seen] == [(d, g) for d, g, _ in losses]
    assert dict(state.updates) == {"d": 8, "g": 8}
    of_epochs = [losses[:4], losses[4:]]
    for i, found in enumerate(of_whole_epochs(state, "train/d/loss", "train/g/loss")):
        means = [sum(row[i] * row[2] for row in rows) / 18 for rows in of_epochs]
        assert found == pytest.approx(means, rel=1e-12)


# --- WGAN-GP: five updates of the critic, with a gradient penalty, to one of the generator


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


def wgan_by_hand(batches, epochs):
    gan = wgan()
    d, g = gan["d"], gan["g"]
    optimizer_d = torch.optim.Adam(d.parameters(), **ADAM)
    optimizer_g = torch.optim.Adam(g.parameters(), **ADAM)
    for epoch in range(epochs):
        for i, real in enumerate(batches):
            if i % 6 == 0:  # a round begins: fnloop's draws are a function of the position
                torch.manual_seed(fold_in(SEED, COMPUTE, epoch, i))
            if i % 6 < 5:
                optimizer_d.zero_grad()
                fake = g(torch.randn(len(real), 3)).detach()
                penalty = gradient_penalty(d, real, fake)
                (d(fake).mean() - d(real).mean() + penalty).backward()
                optimizer_d.step()
            else:
                optimizer_g.zero_grad()
                (-d(g(torch.randn(len(real), 3))).mean()).backward()
                optimizer_g.step()
    return gan


def new_wgan():
    gan = wgan()
    optimizers = {name: torch.optim.Adam(gan[name].parameters(), **ADAM) for name in "dg"}
    return fl.TrainState.create(gan, optimizers, seed=SEED)


def wgan_step(**settings):
    steps = {"d": fl.pipeline()(critic_loss), "g": fl.pipeline()(generator_loss)}
    return fl.alternate(steps, order=("d",) * 5 + ("g",), batch="next", **settings)


@pytest.mark.parametrize("stopped_after", [None, 1, 2, 4])
def test_a_critic_with_five_updates_to_one_equals_the_loop_by_hand(stopped_after, tmp_path):
    """An epoch has 14 batches: two rounds, and a third one of two critic updates."""
    loaders = points(), points(2)

    def run(state, hooks):
        return fl.fit(wgan_step(), state, loaders, epochs=2, hooks=hooks)

    state = resumed(run, new_wgan, stopped_after, tmp_path)
    assert_same_weights(state, wgan_by_hand(points(), 2))
    assert (state.step, dict(state.updates)) == (6, {"d": 24, "g": 4})
    if stopped_after is not None:
        assert_same(state, run(new_wgan(), ()))


# --- gradient penalties in evaluation


def test_the_critic_is_evaluated_with_its_penalty():
    state = new_wgan()
    found = fl.evaluate(wgan_step(evaluate="d"), state, points(1))
    torch.manual_seed(fold_in(fold_in(SEED, COMPUTE), 0))
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
    from fnloop.testing import toy

    seen = []
    look = fl.inspect(lambda state, outputs: seen.extend(outputs))
    step = fl.pipeline(fl.ema(0.5), fl.metric(size=lambda aux, batch: aux["gradient"].mean()))
    loaders = [torch.ones(2)], [torch.ones(3)]
    state = fl.fit(step(penalty_alone), toy(w=2.0, lr=0.25), loaders, hooks=(look,))
    assert state.model.w.item() == 1.0  # 2 - 0.25 × 4
    assert state.history["valid/loss"] == (1.0,)
    assert state.history["valid/ema/loss"] == (2.25,)  # 1.5²
    assert state.history["valid/size"] == (1.0,)
    assert not seen[0].loss.requires_grad and not seen[0].aux["gradient"].requires_grad
    assert not step(penalty_alone).evaluate(state, torch.ones(1)).loss.requires_grad


def test_a_penalty_without_gradients_says_what_to_type():
    from fnloop.testing import toy

    def forgets(model, batch):
        x = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean()

    step = fl.pipeline()(forgets)
    for call in (
        lambda: fl.fit(step, toy(), ([torch.ones(1)], [torch.ones(1)]), hooks=()),
        lambda: fl.evaluate(step, toy(), [torch.ones(1)]),
        lambda: step.evaluate(toy(), torch.ones(1)),
    ):
        with pytest.raises(RuntimeError, match="does not require grad") as caught:
            call()
        assert "with torch.enable_grad(): ..." in "".join(caught.value.__notes__)
