"""If one process fails, the job ends; and launchers start it."""

import importlib
import os
import signal
import time
from pathlib import Path

import launch
import pytest
import torch
from process_problems import (
    adam_and_sgd,
    batches,
    entropy,
    fitted,
    loader,
    network,
    rank,
    said,
    world,
)
from torch.distributed.fsdp import fully_shard

import fnloop as fl

pytestmark = pytest.mark.slow


def failing(folder, way):
    """Train; in the second update something goes wrong in one process, and the moment is noted."""

    def now(message):
        (folder / "failed").write_text(str(time.time()))
        if message == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError(message)

    def loss(model, batch):
        if way in ("loss", "kill") and rank() == 1 and batch[3][0] > 10:
            now("broken on 1" if way == "loss" else "kill")
        return entropy(model, batch)

    def hook(state):
        if way == "hook" and state.step == 2:
            now("broken on 0")
        return state

    def stream():
        for n, batch in enumerate(batches(1)):
            if way == "loader" and rank() == 0 and n == 10:
                now("broken on 0")
            yield batch

    if way == "share":
        (folder / "failed").write_text(str(time.time()))
        fitted(fl.sharded(batches(1) if rank() else []))
    fitted(stream, loss=loss, hooks=(fl.on_main(hook), fl.checkpoint(folder / "saved")))


WAYS = {
    "loss": "ArithmeticError: broken on 1",
    "loader": "ArithmeticError: broken on 0",
    "hook": "ArithmeticError: broken on 0",
    "share": "ValueError: this process's share of the data has no batch",
    "kill": "",
}


LAUNCHERS = {"by hand": (), "torchrun": launch.TORCHRUN, "accelerate": launch.ACCELERATE}


@pytest.mark.parametrize(
    ("way", "launcher"),
    [
        *((way, "by hand") for way in WAYS),
        pytest.param("kill", "torchrun", marks=pytest.mark.long),
        pytest.param("loss", "accelerate", marks=pytest.mark.long),
    ],
)
def test_if_one_process_fails_all_end_at_once(tmp_path, way, launcher):
    by, forked = LAUNCHERS[launcher], way in ("loader", "hook", "share")
    found = launch.launch(tmp_path, 2, failing, way, by=by, timeout=90, forked=forked)
    errors = "\n".join(found.errors)
    assert all(found.codes), errors
    assert max(found.ended) - float((tmp_path / "failed").read_text()) < 10
    assert found.results == [None, None]
    if way != "kill":
        assert WAYS[way] in errors and "while in" in errors
    if launcher == "by hand" and way in ("loss", "kill"):
        assert all(found.codes) and (way == "loss" or found.codes[1] == -signal.SIGKILL), found


def test_if_one_process_is_killed_at_a_random_moment_the_others_end(monkeypatch):
    """Run tests/benchmarks/losses.py for more than these three."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    losses = importlib.import_module("losses")
    assert max(losses.kill(3, seed=1)) < losses.LIMIT


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_launchers_start_a_run(tmp_path, launcher):
    found = launch.results(tmp_path, 2, facts_of_backend, by=LAUNCHERS[launcher])
    assert found == [["cpu", 0, 2, True, None], ["cpu", 1, 2, False, None]]


def facts_of_backend(folder):
    backend = fitted(batches(3)).backend
    return [backend.device.type, backend.rank, backend.world_size, backend.main, backend.precision]


@fl.middleware("gradient")
def its_own():
    """Train the last process with other gradients, from its third update on."""

    def wrap(step):
        def scaled(state, batch):
            new, out = step(state, batch)
            if state.step >= 2 and rank() == world() - 1:
                for p in new.model.parameters():
                    p.grad.mul_(1.1)
            return new, out

        return scaled

    return wrap


def saves(folder):
    """Return, by the way in which a run saves, what it keeps of 6 updates and how it ends."""
    return {
        f"{way}, {'healthy' if healthy else 'diverged'}": saved_by(
            folder / way / str(healthy), way, healthy
        )
        for way in SAVES
        for healthy in (True, False)
    }


def saved_by(folder, way, healthy):
    def save(state):
        fl.save(state, folder / f"step-{state.step:08d}")
        return state

    torch.manual_seed(0)
    model = network()
    shard = fully_shard if way == "sharded" else lambda model: None
    shard(model)
    optimizer = (
        adam_and_sgd(model.parameters())
        if way == "two optimizers"
        else torch.optim.SGD(model.parameters(), lr=0.01)
    )
    state = fl.TrainState.create(model, optimizer, seed=0, exact=way == "exact")
    hook = save if way == "fl.save" else fl.checkpoint(folder, None, background=way == "background")
    rings = (fl.ema(0.5),) if way == "average" else ()
    rings += () if healthy else (its_own(),)
    step = fl.pipeline(*rings)(entropy)
    end = said(
        lambda: fl.fit(step, state, loader(size=2), steps=6, hooks=(fl.every(steps=2)(hook),)).step
    )
    return [end, sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))]


SAVES = ("hook", "background", "fl.save", "average", "two optimizers", "exact", "sharded")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", SAVES)
def test_a_state_that_has_diverged_is_not_saved(launched, way, n):
    """Some norms differ by less than 0.001, which is the tolerance of many updates."""
    for mine in launched(saves, n):
        steps = [f"step-{step:08d}" for step in (2, 4, 6)]
        assert mine[f"{way}, healthy"] == [6, steps]
        end, kept = mine[f"{way}, diverged"]
        if way == "sharded":  # each process has other weights: there is nothing to compare
            assert (end, kept) == (6, steps)
            continue
        assert kept == steps[:1]
        assert end.startswith("RuntimeError: the processes have diverged: the norm of the weight ")
        assert f" in process {n - 1}" in end and " in process 0" in end
        assert "All norms were last equal at step 2. " in end
