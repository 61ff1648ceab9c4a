"""Soft actor-critic as CleanRL publishes it, tiny: by hand, and as turns of three optimizers.

An update of the critics follows each step of the environment. After every second one, the actor and
its temperature are updated twice.
"""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, kept, stop_when

import fnloop as fl
from fnloop.testing import assert_same

ROUNDS, SIZE, BATCH = 10, 16, 4
GAMMA, TAU, TARGET_ENTROPY = 0.99, 0.1, -1.0
ITEMS = {"weight": BATCH}


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out))


class Sac(nn.Module):
    """The networks. The environment is a place on a line, and a buffer replays what happened."""

    def __init__(self):
        super().__init__()
        self.actor = mlp(1, 2)
        self.critics = nn.ModuleList([mlp(2, 1), mlp(2, 1)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.zeros(1))
        self.register_buffer("place", torch.ones(1))
        self.register_buffer("replay", torch.zeros(SIZE, 4))  # place, action, reward, next place
        self.register_buffer("added", torch.tensor(0))

    def act(self, place, noise):
        """Return actions, and the logarithms of their probabilities."""
        mean, log_std = self.actor(place).chunk(2, -1)
        log_std = log_std.tanh() - 1
        action = (mean + log_std.exp() * noise).tanh()
        log_p = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2
        return action, log_p - (1 - action.square() + 1e-6).log()

    def sample(self, uniform):
        rows = self.replay[(uniform * self.added.clamp(max=SIZE)).long()]
        return rows.split(1, -1)


@torch.no_grad()
def live(model, noise):
    """Make a step of the environment, and remember it."""
    action, _ = model.act(model.place, noise)
    after = model.place + 0.3 * action
    model.replay[model.added % SIZE] = torch.cat([model.place, action, -after.square(), after])
    model.added += 1
    model.place.copy_(after)


@torch.no_grad()
def follow(model):
    """Let the targets follow the critics."""
    pairs = zip(model.critics.parameters(), model.targets.parameters(), strict=True)
    for p, target in pairs:
        target.copy_(TAU * p + (1 - TAU) * target)


def draws():
    """Return all that is random in each step of the environment, and the updates after it."""
    draw = torch.Generator().manual_seed(0)
    return [
        {
            "live": torch.randn(1, generator=draw),
            "uniform": torch.rand(BATCH, generator=draw),
            "critic": torch.randn(BATCH, 1, generator=draw),
            "actor": torch.randn(2, BATCH, 1, generator=draw),
            "alpha": torch.randn(2, BATCH, 1, generator=draw),
        }
        for _ in range(2 * ROUNDS)
    ]


def critic_loss(model, drawn):
    place, action, reward, after = model.sample(drawn["uniform"])
    with torch.no_grad():
        chosen, log_p = model.act(after, drawn["critic"])
        both = torch.cat([after, chosen], -1)
        least = torch.min(*(target(both) for target in model.targets))
        wanted = reward + GAMMA * (least - model.log_alpha.exp() * log_p)
    both = torch.cat([place, action], -1)
    return sum((critic(both) - wanted).square().mean() for critic in model.critics), ITEMS


def actor_loss(model, drawn, noise):
    place = model.sample(drawn["uniform"])[0]
    action, log_p = model.act(place, noise)
    both = torch.cat([place, action], -1)
    least = torch.min(*(critic(both) for critic in model.critics))
    return (model.log_alpha.exp().detach() * log_p - least).mean(), ITEMS


def alpha_loss(model, drawn, noise):
    with torch.no_grad():
        _, log_p = model.act(model.sample(drawn["uniform"])[0], noise)
    return (-model.log_alpha.exp() * (log_p + TARGET_ENTROPY)).mean(), ITEMS


def created():
    torch.manual_seed(0)
    model = Sac()
    optimizers = {
        "critic": torch.optim.Adam(model.critics.parameters(), lr=0.01),
        "actor": torch.optim.Adam(model.actor.parameters(), lr=0.003),
        "alpha": torch.optim.Adam([model.log_alpha], lr=0.01),
    }
    return model, optimizers


@functools.cache
def by_hand():
    model, optimizers = created()

    def update(name, given):
        loss, _ = given
        optimizers[name].zero_grad()
        loss.backward()
        optimizers[name].step()

    for i, drawn in enumerate(draws(), 1):
        live(model, drawn["live"])
        update("critic", critic_loss(model, drawn))
        if i % 2 == 0:
            for n in range(2):
                update("actor", actor_loss(model, drawn, drawn["actor"][n]))
                update("alpha", alpha_loss(model, drawn, drawn["alpha"][n]))
        follow(model)
    return model


# --- as turns


@fl.middleware("step")
def living():
    """Make a step of the environment before an update, and let the targets follow after it."""

    def wrap(step):
        def train(state, drawn):
            live(state.model, drawn["live"])
            state, out = step(state, drawn)
            follow(state.model)
            return state, out

        return train

    return wrap


@fl.middleware("forward")
def noise_of_turn(name):
    """Give each of two turns its own noise."""

    def wrap(step):
        def noisy(state, drawn):
            return step(state, (drawn, drawn[name][state.step % 2]))

        return noisy

    return wrap


SAC = fl.alternate(
    {
        "critic": fl.pipeline(living())(critic_loss),
        "actor": fl.pipeline(noise_of_turn("actor"))(lambda m, given: actor_loss(m, *given)),
        "alpha": fl.pipeline(noise_of_turn("alpha"))(lambda m, given: alpha_loss(m, *given)),
    },
    order=("critic", "critic", "actor", "alpha", "actor", "alpha"),
    batch={"critic": "next", "actor": "same", "alpha": "same"},
)


def new_state():
    return fl.TrainState.create(*created(), seed=0)


def run(state, *hooks):
    return fl.fit(SAC, state, draws(), epochs=1, hooks=hooks)


def test_it_has_the_bits_of_the_loop_by_hand():
    state = run(new_state())
    assert dict(state.updates) == {"critic": 20, "actor": 20, "alpha": 20} and state.step == 10
    assert_same_weights(state.model, by_hand())
    assert state.model.added == 20


@pytest.mark.parametrize("after", range(1, ROUNDS))
def test_it_continues_after_any_round_bit_for_bit(after, tmp_path):
    """The environment and the buffer are in the checkpoint too."""
    state = run(new_state(), stop_when(lambda state: state.step == after))
    assert state.step == after
    state = run(kept("checkpoint", state, new_state(), tmp_path))
    assert_same_weights(state.model, by_hand())
    assert_same(state, run(new_state()))
