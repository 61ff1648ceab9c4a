"""Checkpoints are independent of the number of processes."""

import math
import random

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import reads, written_by
from process_problems import (
    COUNTS,
    SIZE,
    adam_and_sgd,
    batches,
    come_to,
    count,
    default_dtype,
    difference,
    entropy,
    fitted,
    items,
    loader,
    network,
    rank,
    said,
    tally,
    world,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl

pytestmark = pytest.mark.slow


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def noisy(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random()), aux


HALF = 10  # updates until it is saved, of 4 in an epoch


KINDS = ("plain", "sharded", "noisy", "several", "several, sharded")


def resumable(kind, folder=None, until=None):
    """Train a state, or resume from a folder."""
    torch.manual_seed(0)
    model = Noisy() if kind == "noisy" else network()
    if kind.endswith("sharded") and world() > 1:
        fully_shard(model)
    several = kind.startswith("several")
    optimizer = (adam_and_sgd if several else adamw)(model.parameters())
    state = fl.TrainState.create(model, optimizer, seed=0)
    state = state if folder is None else fl.resume(folder, state)
    schedule = fl.schedule(fl.schedules.cosine(warmup=0.1), only="rest" if several else None)
    pipe = fl.pipeline(fl.accumulate(2), fl.clip(0.5), schedule)
    step, train = pipe(noisy if kind == "noisy" else entropy), loader(shuffle=True)
    enough = fl.when(lambda state: state.step == until)(
        lambda state: attrs.evolve(state, stop="enough")
    )
    return attrs.evolve(
        fl.fit(step, state, train, epochs=6, hooks=(enough,), record_every=fl.every(steps=3)),
        stop=None,
    )


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def counted(batch_size, folder=None, steps=None):
    state = tally() if folder is None else fl.resume(folder, tally())
    step = fl.pipeline(fl.metric(samples=lambda aux, batch: fl.Sum(len(batch[-1]))), items())(count)
    return fl.fit(
        step, state, loader(size=batch_size, shuffle=True), epochs=1, steps=steps, hooks=()
    )


def saves(folder):
    """Save runs in the middle of an epoch; return what they come to if they are not interrupted."""
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        for kind in KINDS:
            fl.save(resumable(kind, until=HALF), folder / kind / "half")
        fl.save(counted(4, steps=2), folder / "tally" / "half")
        return {kind: come_to(resumable(kind)) for kind in KINDS}


@reads(saves, COUNTS)
def resumes(folder):
    """Resume what was saved on any number of processes."""
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        for n in COUNTS:
            saved = written_by(saves, n, folder)
            for before, after in (
                ("plain", "plain"),
                ("plain", "sharded"),
                ("sharded", "plain"),
                ("sharded", "sharded"),
                ("several", "several"),
                ("several", "several, sharded"),
                ("several, sharded", "several"),
            ):
                found[f"{before} on {n}, then {after}"] = come_to(resumable(after, saved / before))
            if n == world():
                found["noisy"] = come_to(resumable("noisy", saved / "noisy"))
            state = counted(3, saved / "tally")
            row = state.history[-1].metrics
            found[f"tally of {n}"] = [
                *(-state.model.w).tolist(),
                state.step,
                row["train/items"],
                row["train/samples"],
            ]
        mine = written_by(saves, 1, folder) / "plain" if rank() else folder / "nothing"
        begun = fitted(batches(1), steps=1)
        found["main sees none"] = said(lambda: fl.resume(mine, begun).step)
    return found


@pytest.fixture(params=COUNTS)
def resumed(request, launched):
    return request.param, launched(resumes, request.param)


def test_a_run_saved_on_any_number_of_processes_resumes_on_any_other(launched, resumed):
    _, found = resumed
    for mine in found:
        assert mine == found[0]
        for name in [name for name in mine if "then" in name]:
            expected = launched(saves, 1)[0]["several" if "several" in name else "plain"]
            assert mine[name]["updates"] == expected["updates"], name
            assert mine[name]["counters"] == expected["counters"] == [24, 6, 0], name
            assert difference(expected["weights"], mine[name]["weights"]) < 1e-11, name
            assert difference(expected["history"], mine[name]["history"]) < 1e-11, name


def test_a_run_resumes_on_the_same_number_bit_for_bit(launched, resumed):
    n, found = resumed
    assert found[0]["noisy"] == launched(saves, n)[0]["noisy"]


def test_the_rest_of_an_epoch_is_trained_once(resumed):
    n, found = resumed
    for saved_on in COUNTS:
        *shares, step, items, samples = found[0][f"tally of {saved_on}"]
        left = SIZE - 2 * 4 * saved_on
        assert (
            step == 2 + math.ceil(left / (3 * n))
            and min(shares) > 0
            and sum(shares) == pytest.approx(step, rel=1e-12)
        )
        assert [items, samples] == pytest.approx([SIZE, SIZE], rel=1e-12)


def test_a_run_does_not_begin_again_where_another_process_sees_a_checkpoint(resumed):
    n, found = resumed
    for mine in found:
        if n == 1:
            assert mine["main sees none"] == 1
        else:
            assert mine["main sees none"].startswith("CheckpointError: process 1 on ")
            assert "All machines of a run must share the folder" in mine["main sees none"]
