"""nanoGPT, tiny: by hand, and with fresh batches for each estimate of the losses by a hook."""

import functools
import math

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, kept, stop_when

import fnloop as fl
from fnloop._core.rng import fold_in
from fnloop.testing import assert_same

BLOCK, BATCH, WORDS = 4, 4, 7
UPDATES, WINDOW, EVERY, ESTIMATES = 12, 2, 3, 2
RATE, LEAST, WARMUP = 0.01, 0.001, 3


class Gpt(nn.Module):
    """One layer of causal attention; the embedding is the head, too."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(BLOCK, 8)
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x = self.words(ids) + self.places.weight
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x)


def loss_fn(model, batch):
    ids, targets = batch
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


TEXT = torch.randint(WORDS, (300,), generator=torch.Generator().manual_seed(5)).sort().values
SPLITS = {"train": TEXT[:240], "val": TEXT[200:]}


def get_batch(split, *numbers):
    """Return a batch that is drawn by its numbers."""
    draw = torch.Generator().manual_seed(fold_in(0, len(split), *numbers))
    data = SPLITS[split]
    at = torch.randint(len(data) - BLOCK, (BATCH,), generator=draw)
    return tuple(torch.stack([data[i + k : i + k + BLOCK] for i in at]) for k in (0, 1))


def rate_of(i, total=UPDATES):
    """Return the rate as nanoGPT does: a warm-up, then a cosine to the least."""
    if i < WARMUP:
        return RATE * (i + 1) / (WARMUP + 1)
    share = (i - WARMUP) / (total - WARMUP)
    return LEAST + 0.5 * (1 + math.cos(math.pi * share)) * (RATE - LEAST)


def created():
    torch.manual_seed(0)
    model = Gpt()
    params = [*model.parameters()]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


@torch.no_grad()
def estimate(model, step):
    """Return the mean loss of fresh batches of each split."""
    found = {}
    for split in SPLITS:
        batches = [get_batch(split, step, n) for n in range(ESTIMATES)]
        found[split] = torch.stack([loss_fn(model, batch) for batch in batches]).mean().item()
    return found


@functools.cache
def by_hand():
    model, optimizer = created()
    # In the order of the groups, as clip does: the last bit of a norm depends on the order.
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    losses = [estimate(model, 0)]
    for i in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(i)
        for k in range(WINDOW):
            (loss_fn(model, get_batch("train", i * WINDOW + k)) / WINDOW).backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (i + 1) % EVERY == 0:
            losses.append(estimate(model, i + 1))
    return model, losses


STEP = fl.pipeline(
    fl.accumulate(WINDOW), fl.clip(1.0), fl.schedule(rate_of, absolute=True)
)(loss_fn)  # fmt: skip
ESTIMATE = fl.measure(
    lambda state: estimate(state.model, state.step),
    name="estimate",
    every=fl.at_start() | fl.every(steps=EVERY),
)


def new_state():
    return fl.TrainState.create(*created(), seed=0)


def run(state, *hooks):
    batches = [get_batch("train", n) for n in range(UPDATES * WINDOW)]
    return fl.fit(STEP, state, batches, epochs=1, hooks=(ESTIMATE, *hooks))


def assert_as_by_hand(state):
    model, losses = by_hand()
    assert_same_weights(state.model, model)
    for split in SPLITS:
        assert state.history[f"estimate/{split}"] == tuple(each[split] for each in losses)


def test_it_has_the_bits_of_the_loop_by_hand():
    state = run(new_state())
    assert_as_by_hand(state)
    found = state.history["estimate/val"]
    assert len({*found}) == len(found) == 5 and found[-1] < found[0]


def test_the_checkpoint_is_that_of_the_best_estimate(tmp_path):
    saves = fl.checkpoint(tmp_path, best="estimate/val", mode="min")
    state = run(new_state(), fl.every(steps=EVERY)(saves))
    losses = [each["val"] for each in by_hand()[1][1:]]
    best = fl.best(tmp_path)
    assert fl.restore(best, new_state()).step == EVERY * (1 + losses.index(min(losses)))
    assert state.step == UPDATES


@pytest.mark.parametrize("after", range(1, UPDATES))
def test_it_continues_after_any_update_bit_for_bit(after, tmp_path):
    state = run(new_state(), stop_when(lambda state: state.step == after))
    assert state.step == after
    state = run(kept("checkpoint", state, new_state(), tmp_path))
    assert_as_by_hand(state)
    assert_same(state, run(new_state()))
