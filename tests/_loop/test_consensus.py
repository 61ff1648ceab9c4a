"""What processes agree on, with one process that agrees with itself, and a clock of the test."""

import time

import pytest
import torch

import fnloop as fl
from fnloop._loop import consensus
from fnloop._loop.interrupts import Interrupts
from fnloop._loop.peers import Alone
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
    monkeypatch.setattr(consensus, "start_all_reduce_max", lambda facts: lambda: facts)
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


def test_each_evaluation_begins_with_an_exchange_soon(monkeypatch):
    class Hurried(Alone):
        calls = 0

        def hurry(self):
            self.calls += 1

    peers, ones = Hurried(), [torch.ones(1)]
    monkeypatch.setattr("fnloop._loop.run.peers_of", lambda state: peers)
    loaders = {"train": ones, "valid": ones, "test": ones}
    fl.fit(fl.pipeline()(toy_loss), toy(), loaders, epochs=3, hooks=())
    assert peers.calls == 6
