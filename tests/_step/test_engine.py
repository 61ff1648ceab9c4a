"""The seam between one process and several: the answers of the engine for one process."""

import gc
import re
import weakref
from pathlib import Path

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._step.engine import WeightedSum, engine_of
from fnloop._step.engine_distributed import DistributedEngine
from fnloop.testing import toy, toy_loss

ROOT = Path(fl.__file__).parent


def in_two_processes():
    """Return a state that believes it is one of two. Nothing is exchanged until it is trained."""
    return attrs.evolve(toy(), backend=Backend("cpu", world_size=2))


def test_in_one_process_the_engine_returns_what_it_is_given():
    mine, out = engine_of(toy()), fl.Output(torch.tensor(2.0), 3)
    assert mine is engine_of(toy())
    assert (mine.any(True), mine.any(False)) == (True, False)
    assert mine.mean_loss(out) is out.loss
    metrics = {"loss": fl.Mean(6.0, 3)}
    assert mine.merge_metrics(metrics) == mine.reduce_report(metrics, "train/") == metrics


def test_a_window_is_the_weighted_mean_of_its_batches_and_combines_their_metrics():
    """(3 × 2 + 1 × 6) / 4"""
    total = WeightedSum()
    total.add(fl.Output(torch.tensor(2.0), 3, metrics={"n": fl.Sum(1)}))
    total.add(fl.Output(torch.tensor(6.0), 1, metrics={"n": fl.Sum(2)}))
    out = total.output()
    assert (out.loss.item(), out.weight, out.metrics["n"].compute()) == (3.0, 4, 3.0)


@pytest.mark.parametrize("weight", [0, torch.tensor(0)])
def test_a_batch_may_have_no_item(weight):
    loss_fn = lambda model, batch: (toy_loss(model, batch)[0], {"weight": weight})
    _, out = fl.pipeline()(loss_fn)(toy(), torch.ones(1))
    assert out.weight == 0


def test_states_of_one_model_share_a_distributed_engine_and_a_snapshot_has_its_own():
    state = in_two_processes()
    mine = engine_of(state)
    assert isinstance(mine, DistributedEngine)
    assert engine_of(attrs.evolve(state, stop="later")) is mine
    assert engine_of(fl.snapshot(state)) is not mine


def test_a_distributed_engine_dies_with_its_states():
    state = in_two_processes()
    found = weakref.ref(engine_of(state))
    del state
    gc.collect()
    assert found() is None


def test_only_the_engine_looks_at_the_number_of_processes():
    """A comparison elsewhere in steps, middleware or metrics is a branch to move there."""
    branch = re.compile(r"(world_size|processes)\s*(==|>|!=|<)|if .*\bworld_size\b")
    files = [*ROOT.glob("_step/*.py"), *ROOT.glob("_middleware/*.py"), ROOT / "_core/metrics.py"]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if branch.search(line)
    ]
    chosen = "state.backend.world_size == 1"
    assert found == [f"engine.py: if {chosen}:", f"engine.py: alone = {chosen}"]
