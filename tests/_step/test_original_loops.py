"""DINO as its authors publish it, written out by hand, against the same by middleware.

Momentum, temperature, rate and weight decay go by update; the teacher is the average.
"""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from toy_runs import assert_same_weights, kept, stop_when

import fnloop as fl
from fnloop.testing import assert_same

SEED, EPOCHS = 3, 2


class Dino(nn.Module):
    """A network, and the centre of the teacher's outputs."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5))
        self.register_buffer("center", torch.zeros(1, 5))

    def forward(self, x):
        return self.net(x)


def views():
    """Batches of two views."""
    draw = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(4, 6, generator=draw) for _ in range(2)) for _ in range(5)]


TOTAL = EPOCHS * len(views())


def cosine_from_to(first, last):
    return lambda i, total: last + (first - last) * (1 + math.cos(math.pi * i / total)) / 2


momentum_of = lambda n: cosine_from_to(0.9, 1.0)(n, TOTAL)
rate_of = lambda i, total: min(1.0, (i + 1) / 3) * cosine_from_to(1.0, 0.1)(i, total)
decay_of = cosine_from_to(0.04, 0.4)
temperature_of = lambda i, total: min(0.07, 0.04 + 0.01 * i)


def dino_loss(students, teachers, center, temperature):
    targets = [((t - center) / temperature).softmax(1) for t in teachers]
    logs = [(s / 0.1).log_softmax(1) for s in students]
    pairs = [(a, b) for a in range(2) for b in range(2) if a != b]
    return sum(-(targets[a] * logs[b]).sum(1).mean() for a, b in pairs) / len(pairs)


def move_center(center, teachers):
    with torch.no_grad():
        center.mul_(0.9).add_(torch.cat(teachers).mean(0, keepdim=True), alpha=0.1)


@fl.middleware("forward")
def taught():
    """Give the outputs of the average to the loss function, after the batch."""

    def wrap(step):
        def teaching(state, batch):
            with torch.no_grad():
                average = dict(state.slots["ema"])
                made = [functional_call(state.model, average, (view,)) for view in batch]
            return step(state, (batch, made))

        return teaching

    return wrap


def self_distillation(model, batch, *, temperature):
    two, teachers = batch
    loss = dino_loss([model(view) for view in two], teachers, model.center, temperature)
    if model.training:
        move_center(model.center, teachers)
    return loss


def new_dino():
    torch.manual_seed(0)
    model = Dino()
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.01), seed=SEED)


DINO = fl.pipeline(
    taught(),
    fl.clip(3.0),
    fl.schedule(rate_of),
    fl.schedule(decay_of, field="weight_decay", absolute=True),
    fl.scheduled(temperature=temperature_of),
    fl.ema(momentum_of, only="net", evaluate=False),
)(self_distillation)


def dino_by_hand():
    state, teacher = new_dino(), new_dino().model.net
    model, optimizer = state.model, state.optimizer
    it = 0
    for _ in range(EPOCHS):
        for two in views():
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"] = 0.01 * rate_of(it, TOTAL), decay_of(it, TOTAL)
            with torch.no_grad():
                teachers = [teacher(view) for view in two]
            students = [model.net(view) for view in two]
            loss = dino_loss(students, teachers, model.center, temperature_of(it, TOTAL))
            move_center(model.center, teachers)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()
            with torch.no_grad():
                m = momentum_of(it)
                for q, k in zip(model.net.parameters(), teacher.parameters(), strict=True):
                    k.lerp_(q, 1 - m)  # k × m + q × (1 - m)
            it += 1
    return model, teacher


@pytest.mark.parametrize("stopped_after", [None, 1, 4, 5, 7])
def test_dino_equals_the_loop_by_hand_bit_for_bit(stopped_after, tmp_path):
    run = lambda state, *hooks: fl.fit(DINO, state, views(), epochs=EPOCHS, hooks=hooks)
    state = new_dino()
    if stopped_after is not None:
        state = run(state, stop_when(lambda state: state.step == stopped_after))
        state = kept("checkpoint", state, new_dino(), tmp_path)
    state = run(state)
    model, teacher = dino_by_hand()
    assert_same_weights(state.model, model)
    assert_same_weights(fl.averaged(state).model.net, teacher)
    assert not torch.equal(teacher[0].weight, model.net[0].weight)
    assert_same(state, run(new_dino()))
