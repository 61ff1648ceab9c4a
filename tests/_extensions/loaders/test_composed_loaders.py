"""The laws of loaders made of loaders, over a table of them."""

import random

import attrs
import numpy as np
import pytest
import torch
from composed_cases import ALWAYS_THE_SAME, CASES, contents, read, samples
from public_names import MODULES, returning
from sample_hooks import stop_at
from toy_runs import fit

import fnloop as fl
from fnloop import schedules
from fnloop.extend import Source
from fnloop.testing import assert_same, toy_loss

EPOCHS = (0, 1, 2)

table = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def test_every_loader_of_loaders_is_in_the_table():
    found = {name.partition(" ")[0] for name in CASES}
    assert returning("Composed", *MODULES) - found == set(), "add a row to composed_cases.py"


@table
def test_what_is_read_is_a_function_of_seed_and_epoch(make):
    whole = [read(make(0), epoch) for epoch in EPOCHS]
    torch.rand(7)
    loader = make(0)
    assert [read(loader, epoch) for epoch in EPOCHS] == whole
    assert (whole[0] == whole[1]) is (make in ALWAYS_THE_SAME)
    assert read(make(0), None) == read(make(0), 0)  # an evaluation


@table
def test_an_epoch_can_be_resumed_at_every_batch(make):
    loader = make(0)
    for epoch in (0, 1):
        whole = read(loader, epoch)
        for start in range(len(whole) + 1):
            assert read(loader, epoch, start) == whole[start:]


@table
def test_its_length_is_the_number_of_its_batches(make):
    source = Source.open(make(0), 0)
    for epoch in EPOCHS:
        if (length := source.length_in(epoch)) is not None:
            assert len(read(make(0), epoch)) == length


@table
@pytest.mark.parametrize("processes", [2, 3])
def test_batches_are_distributed_to_processes_once(make, processes):
    for start in (0, 1):
        whole = read(make(0), 1, start)
        sharing = Source.open(make(0), 0, 0, processes)
        whole = whole[: sharing.kept(len(whole))]  # without an incomplete round, if it is even
        shares = [read(make(0), 1, start, rank, processes) for rank in range(processes)]
        for rank, share in enumerate(shares):
            mine = whole[rank::processes]
            assert share[: len(mine)] == mine
            left = len(whole) % processes
            assert share[len(mine) :] == ([[whole[-left]]] if rank >= left > 0 else [])  # padding


def loss(model, batch):
    numbers = torch.tensor(samples(contents(batch)), dtype=torch.float64)
    drawn = random.random() + np.random.rand()
    return toy_loss(model, numbers / 50)[0] * drawn, {"weight": len(numbers)}


@table
def test_a_run_can_be_paused_and_continued(make):
    """With accumulation, an evaluation, and a schedule where the length of the run is known."""
    known = Source.open(make(0), 0).length is not None
    step = fl.pipeline(fl.accumulate(2), *[fl.schedule(schedules.linear())] * known)(loss)
    both = {"step": step, "epochs": 2}
    run = lambda *hooks, **more: fit(*hooks, loaders=(make(0), make(0)), **both, **more)
    whole = run()
    assert whole.epoch == 2
    assert_same(run(prefetch=3), whole)
    for split in range(1, whole.step, 3):
        paused = run(stop_at(split))
        assert paused.step == split
        assert_same(run(state=attrs.evolve(paused, stop=None)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    *("fixed", "fixed of buckets", "interleave of streams", "zip_cycle", "leave_out"),
    *("take of interleaved", "twice the same"),
])  # fmt: skip
def test_workers_change_nothing(name):
    assert read(CASES[name](2), 1) == read(CASES[name](0), 1)
