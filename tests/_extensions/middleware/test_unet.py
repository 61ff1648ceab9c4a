"""A tiny U-Net as Pytorch-UNet trains it: by hand, and by plateau on Dice within epochs."""

import functools

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, kept, stop_when

import fnloop as fl
from fnloop.testing import assert_same

EPOCHS, EVERY, PATIENCE = 4, 2, 1
RATE = 2.0**-6  # halving it is exact, so torch's rate has the bits of a power


class UNet(nn.Module):
    """One level: down, up, and the input of the level beside it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        beside = self.first(x)
        return self.last(torch.cat([beside, self.up(self.down(beside))], 1)).squeeze(1)


def dice(found, wanted):
    """Return 2 × both / (one + other), of the whole batch."""
    total = found.sum() + wanted.sum()
    return (2 * (found * wanted).sum() + 1e-6) / (total + 1e-6)


def loss_fn(model, batch):
    image, mask = batch
    logits = model(image)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, mask)
    loss = loss + 1 - dice(logits.sigmoid(), mask)
    return loss, {"dice": dice((logits > 0).float(), mask)}


def pictures(n, seed):
    """Return batches of two noisy pictures with a bright square, and the squares."""
    draw, found = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        mask = torch.zeros(2, 8, 8)
        for one, at in zip(mask, torch.randint(5, (2, 2), generator=draw).tolist(), strict=True):
            one[at[0] : at[0] + 3, at[1] : at[1] + 3] = 1
        image = mask + torch.randn(2, 8, 8, generator=draw)
        found.append((image[:, None], mask))
    return found


TRAIN, VALID = pictures(5, 0), pictures(3, 1)


def created():
    torch.manual_seed(0)
    model = UNet()
    return model, torch.optim.RMSprop(model.parameters(), lr=RATE, momentum=0.9, foreach=True)


@functools.cache
def by_hand():
    model, optimizer = created()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, "max", factor=0.5, patience=PATIENCE
    )
    rates, scores, step = [], [], 0
    for _ in range(EPOCHS):
        for batch in TRAIN:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            loss_fn(model, batch)[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % EVERY == 0:
                model.eval()
                with torch.no_grad():
                    scores.append(sum(loss_fn(model, one)[1]["dice"] for one in VALID) / len(VALID))
                model.train()
                scheduler.step(scores[-1])
    return model, rates, [float(score) for score in scores]


STEP = fl.pipeline(
    fl.metric(dice=lambda aux, batch: aux["dice"]),
    fl.clip(1.0),
    fl.plateau("valid/dice", 0.5, patience=PATIENCE + 1, cooldown=1, relative=True, mode="max"),
)(loss_fn)


def new_state():
    return fl.TrainState.create(*created(), seed=0)


def run(state, *hooks):
    return fl.fit(
        STEP, state, {"train": TRAIN, "valid": VALID}, epochs=EPOCHS, hooks=hooks,
        evaluate_every=fl.every(steps=EVERY),
    )  # fmt: skip


def test_it_has_the_bits_of_the_loop_by_hand():
    used = []

    def note(state):
        used.append(state.optimizer.param_groups[0]["lr"])
        return state

    state, (model, rates, scores) = run(new_state(), note), by_hand()
    assert_same_weights(state.model, model)
    assert used == rates
    assert len({*rates}) >= 3 and rates[0] == RATE  # it was lowered twice or more
    assert state.history["valid/dice"] == pytest.approx(scores, rel=1e-6)


@pytest.mark.parametrize("after", [1, 4, 5, 7, 10, 13, 19])
def test_it_continues_after_any_update_bit_for_bit(after, tmp_path):
    state = run(new_state(), stop_when(lambda state: state.step == after))
    assert state.step == after
    state = run(kept("checkpoint", state, new_state(), tmp_path))
    assert_same_weights(state.model, by_hand()[0])
    assert_same(state, run(new_state()))
