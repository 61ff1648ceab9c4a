"""What processes agree on, with one process that agrees with itself, and a clock of the test."""

import contextlib
import time

import pytest
import torch

import fnloop as fl
from fnloop._loop import peers as consensus
from fnloop._loop.peers import Interrupts
from fnloop.testing import toy, toy_loss


@pytest.mark.parametrize("then", ["an evaluation", "the next epoch"])
@pytest.mark.parametrize("updates", [1, 100, 5000])
@pytest.mark.parametrize("at", [1, 2, 3, 50])
def test_a_signal_is_obeyed_at_once_however_fast_the_updates_before_were(
    then, updates, at, monkeypatch
):
    """An update takes 0.1 ms, and a batch 10 s after that. A scheduler waits for 30 s."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(consensus, "start_all_reduce_max", lambda facts, what: lambda: facts)
    state, interrupts = toy(), Interrupts(single_process=False)
    peers = consensus.Consensus(state)
    for _ in range(updates):
        now[0] += 1e-4
        peers.poll(state, interrupts)
    if then == "an evaluation":
        peers.hurry()
    else:
        peers.barrier(state, interrupts, 0)
    for batch in range(60):
        peers.poll(state, interrupts)
        if interrupts.stop is not None:
            break
        now[0] += 10.0
        interrupts.requested[0] |= batch == at
    assert interrupts.stop == "SIGTERM" and batch <= at + 2


@pytest.mark.parametrize("slow", ["evaluation", "training"])
def test_a_signal_is_obeyed_soon_where_batches_become_slow(slow, monkeypatch):
    """There are 300 batches of 0.1 ms. Then each takes 10 s. The signal comes in the third."""
    now, batches = [0.0], {"training": 0, "evaluation": 0}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(consensus, "start_all_reduce_max", lambda facts, what: lambda: facts)
    monkeypatch.setattr("fnloop._loop.run.peers_of", consensus.Consensus)
    ones, interrupts = [torch.ones(1)], Interrupts(single_process=False)
    monkeypatch.setattr(
        "fnloop._loop.run._listening", lambda *_: contextlib.nullcontext(interrupts)
    )

    def loss_fn(model, batch):
        kind = "training" if model.training else "evaluation"
        is_slow = kind == slow and sum(batches.values()) >= 300
        batches[kind] += is_slow or kind != slow
        now[0] += 10.0 if is_slow else 1e-4
        interrupts.requested[0] |= batches[slow] == 3
        return toy_loss(model, batch)

    number = {"training": 300, "evaluation": 300, slow: 600}
    loaders = {"train": ones * number["training"], "valid": ones * number["evaluation"]}
    first = fl.every(steps=300) if slow == "evaluation" else fl.at_start()
    step = fl.pipeline()(loss_fn)
    state = fl.fit(step, toy(), loaders, evaluate_every=first, hooks=())
    assert state.stop == "SIGTERM" and batches[slow] <= 5
