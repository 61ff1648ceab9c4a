"""A job on 1 to 3 machines that fail and come at random moments trains as if none had failed.

The environment variable FNLOOP_KILLS, 15 by default, scales how many of these events there are: 2
of 15, so 150 is for the full program of 20. It runs with ``exact=True``; in the full program, also
without.
"""

import json
import os
import random
import sys
import time

import pytest
import torch
from agents import Elastic
from joined import come_to, difference, rank, world
from process_metrics import changing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop import schedules

pytestmark = pytest.mark.slow

EVENTS = max(2, int(os.environ.get("FNLOOP_KILLS", "15")) * 2 // 15)
SAMPLES, TOTAL, SAVED_EVERY = 80, 16, 3
BETWEEN = (3, 7)  # updates between two events, at least and at most
EPOCHS = 4 * EVENTS  # of 5 updates
UPDATES = EPOCHS * SAMPLES // TOTAL


class Net(nn.Module):
    """A small net, and a weight for each sample, which counts how often it was in an update."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.counts = nn.Parameter(torch.zeros(SAMPLES))


def loss_fn(model, batch):
    x, y, index = batch
    return nn.functional.cross_entropy(model.net(x), y) + model.counts[index].mean()


def data():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (SAMPLES,), generator=draw)
    return TensorDataset(x, y, torch.arange(SAMPLES))


def learn(folder, pause=0.02, exact=False):
    """Train or resume; note each update, and the samples that were in it."""
    torch.manual_seed(0)
    model, samples = Net().double(), []
    optimizers = {
        "net": torch.optim.SGD(model.net.parameters(), lr=0.1, momentum=0.9),
        "counts": torch.optim.SGD([model.counts], lr=float(TOTAL)),  # minus 1 for each time
    }

    def note(state, out, batch):
        samples[:] = state.model.counts.grad.nonzero().flatten().tolist()
        return out

    def log(state):
        if rank() == 0:
            rate = state.optimizer["net"].param_groups[0]["lr"]
            with (folder / "log").open("a") as file:
                file.write(json.dumps([state.step, world(), rate, *samples]) + "\n")
        time.sleep(pause)
        if pause and state.step > int((folder / "limit").read_text()):
            time.sleep(2)  # what is to happen by now takes some seconds
        return state

    state = fl.TrainState.create(model, optimizers, seed=0, exact=exact)
    state = fl.resume(folder / "saved", state)
    cosine = fl.schedule(schedules.cosine(warmup=0.1), only="net")
    step = fl.pipeline(fl.accumulate(total=TOTAL), changing("gradient", note), cosine)(loss_fn)
    loaders = {"train": DataLoader(data(), 4, shuffle=True), "valid": DataLoader(data(), 7)}
    saves = fl.every(steps=SAVED_EVERY)(fl.checkpoint(folder / "saved", keep=2))
    state = fl.fit(step, state, loaders, epochs=EPOCHS, hooks=(log, saves))
    if state.stop is not None:  # by the agent, because a machine has come
        sys.exit(state.stop)
    records = [[one.metrics["train/loss"], one.metrics["valid/loss"]] for one in state.history]
    return {**come_to(state), "records": records, "counts": state.model.counts.tolist()}


def learn_exactly(folder, pause=0.02):
    return learn(folder, pause, exact=True)


TOLERANCES = {learn_exactly: 0.0, **({learn: 1e-12} if EVENTS > 2 else {})}


def rows(folder):
    """Return what was noted of each update, the step first; the newest row of a step counts."""
    path = folder / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def disturb(job, draw, events):
    """Kill and add machines at random while they train. Return what was done, and when."""
    done, reached = [], 0
    for _ in range(events):
        until = reached + draw.randint(*BETWEEN)
        limit(job.folder, until + 1)
        job.wait(lambda until=until: (rows(job.folder) or [[0]])[-1][0] >= until, 300)
        machines = len(job.running)
        known = len(rows(job.folder))
        event = draw.choice({1: ["add"], 2: ["add", "kill", "process"], 3: ["kill"]}[machines])
        time.sleep(draw.random() * 0.05)
        if event == "add":
            job.add()
        elif event == "kill":
            job.kill(draw.randrange(machines))
        else:
            job.kill_process(draw.randrange(machines))
        reached = rows(job.folder)[-1][0]
        done.append([event, reached, len(job.running)])
        continued = lambda known: any(r[1] == len(job.running) for r in rows(job.folder)[known:])
        job.wait(lambda known=known: continued(known), 300)
    limit(job.folder, UPDATES)
    return done


def limit(folder, step):
    """Let the job wait at a step for what is to happen by then."""
    (folder / "limit.part").write_text(str(step))
    (folder / "limit.part").rename(folder / "limit")


@pytest.mark.long
@pytest.mark.parametrize(("learn", "tolerance"), TOLERANCES.items())
def test_a_job_whose_machines_fail_and_come_is_as_one_undisturbed(learn, tolerance, tmp_path):
    (tmp_path / "alone").mkdir()
    expected = learn(tmp_path / "alone", pause=0)
    job = Elastic(tmp_path / "elastic", learn, most=3)
    try:
        limit(job.folder, 0)
        job.add(), job.add()
        began = time.monotonic()
        done = disturb(job, random.Random(EVENTS), EVENTS)
        job.wait(lambda: (job.folder / "0.json").exists(), 300)
        print(f"{done}, {time.monotonic() - began:.0f} s")
        found = json.loads((job.folder / "0.json").read_text())
    finally:
        job.close()
    assert found["counts"] == expected["counts"] == [-float(EPOCHS)] * SAMPLES
    assert found["counters"] == expected["counters"] == [UPDATES, EPOCHS, 0]
    assert difference(expected["weights"], found["weights"]) <= tolerance
    assert difference(expected["records"], found["records"]) <= tolerance
    trained = {row[0]: row for row in rows(tmp_path / "elastic")}
    undisturbed = {row[0]: row for row in rows(tmp_path / "alone")}
    assert trained.keys() == undisturbed.keys() == {*range(1, UPDATES + 1)}
    for step, row in trained.items():  # the same samples at the same rate, on any number
        assert row[3:] == undisturbed[step][3:]
        assert row[2] == pytest.approx(undisturbed[step][2], rel=1e-12)
    assert len({row[1] for row in trained.values()}) > 1, "the number of machines never changed"
