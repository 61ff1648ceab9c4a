"""If one process fails, the job ends; and launchers start it."""

import importlib
import os
import signal
import time
from pathlib import Path

import launch
import pytest
import torch
from joined import rank, said, world
from process_data import batches, loader
from process_metrics import changing
from process_problems import adam_sgd, created, entropy, fitted
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
LAUNCHERS = {"torchrun": launch.TORCHRUN, "accelerate": launch.ACCELERATE}
# Forked processes end without Python's handlers at exit; "by hand" is for those.
STARTS = [
    *((way, "fork") for way in WAYS),
    *(pytest.param(*row, marks=pytest.mark.long)
      for row in (("loss", "by hand"), ("kill", "torchrun"), ("loss", "accelerate"))),
]  # fmt: skip


@pytest.mark.parametrize(("way", "start"), STARTS)
def test_if_one_process_fails_all_end_at_once(tmp_path, way, start):
    how = {"by": LAUNCHERS.get(start, ()), "forked": start == "fork", "timeout": 90}
    found = launch.launch(tmp_path, 2, failing, way, **how)
    errors = "\n".join(found.errors)
    assert all(found.codes), errors
    assert max(found.ended) - float((tmp_path / "failed").read_text()) < 10
    assert found.results == [None, None]
    if way != "kill":
        assert WAYS[way] in errors and "while in" in errors
    elif start == "fork":
        assert found.codes[1] == -signal.SIGKILL, found


def test_if_one_process_is_killed_at_a_random_moment_the_others_end(monkeypatch):
    """Run tests/benchmarks/losses.py for more than these two."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    losses = importlib.import_module("losses")
    assert max(losses.kill(2, seed=1)) < losses.LIMIT


def its_own():
    """Train the last process with other gradients, from its third update on."""

    def scale(state, out, batch):
        if state.step >= 2 and rank() == world() - 1:
            for p in state.model.parameters():
                p.grad.mul_(1.1)
        return out

    return changing("gradient", scale)


SAVES = ("hook", "background", "fl.save", "average", "two optimizers", "exact", "sharded")


def saves(folder):
    ways = [(way, healthy) for way in SAVES for healthy in (True, False)]
    return {f"{way}, {well}": saved_by(folder / way / str(well), way, well) for way, well in ways}


def saved_by(folder, way, healthy):
    save = lambda state: fl.save(state, folder / f"step-{state.step:08d}") and state
    slow = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    optimizer = adam_sgd if way == "two optimizers" else slow
    state = created(way == "sharded" and fully_shard, optimizer, exact=way == "exact")
    hook = save if way == "fl.save" else fl.checkpoint(folder, None, background=way == "background")
    rings = [*([fl.ema(0.5)] if way == "average" else []), *([] if healthy else [its_own()])]
    step, hooks = fl.pipeline(*rings)(entropy), (fl.every(steps=2)(hook),)
    end = said(lambda: fl.fit(step, state, loader(size=2), steps=6, hooks=hooks).step)
    return [end, sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))]


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", SAVES)
def test_a_state_that_has_diverged_is_not_saved(launched, way, n):
    """Some norms differ by less than 0.001, which is the tolerance of many updates."""
    for mine in launched(saves, n):
        steps = [f"step-{step:08d}" for step in (2, 4, 6)]
        assert mine[f"{way}, True"] == [6, steps]
        end, kept = mine[f"{way}, False"]
        if way == "sharded":  # each process has other weights: there is nothing to compare
            assert (end, kept) == (6, steps)
            continue
        assert kept == steps[:1]
        assert end.startswith("RuntimeError: the processes have diverged: the norm of the weight ")
        assert f" in process {n - 1}" in end and " in process 0" in end
        assert "All norms were last equal at step 2. " in end
