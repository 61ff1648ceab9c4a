"""The seam between one process and several: the answers of the engine for one process."""

import gc
import re
import weakref
from pathlib import Path

import attrs
import torch

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._step.engine import engine_of
from fnloop._step.engine_distributed import DistributedEngine
from fnloop.testing import toy

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
