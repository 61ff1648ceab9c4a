"""Kill one of two processes of a job at random moments, and let torchrun restart the job.

At the end the weights must equal those of an uninterrupted job, bit for bit.

    python tests/benchmarks/restarts.py --kills 20

Each job is killed up to three times (``torchrun --max-restarts 3``), in any of its updates and
anywhere within one.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import launch
import torch
from killed_run import digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl

UPDATES, PER_JOB = 64, 3


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def train(folder, kills):
    """Train or resume. Each kill is (step, rank, seconds after it), and happens once."""
    rank = int(os.environ["RANK"])

    def bomb(state):
        for step, victim, delay in kills:
            mark = folder / f"killed after {step}"
            if (step, victim) == (state.step, rank) and not mark.exists():
                mark.touch()
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(0.005)
        return state

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    data = TensorDataset(torch.randn(256, 16), torch.randint(0, 4, (256,)))
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters()), seed=0)
    state = fl.resume(folder / "saved", state)
    hooks = (fl.every(steps=5)(fl.checkpoint(folder / "saved", keep=2)), bomb)
    step, loader = fl.pipeline(fl.clip(1.0))(loss), DataLoader(data, 4, shuffle=True)
    state = fl.fit(step, state, loader, epochs=2, hooks=hooks)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return {"step": state.step, "hash": digest(*state.model.parameters()), "restarts": restarts}


def hashes(results):
    return [one["hash"] for one in results]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, done, equal = random.Random(arguments.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        expected = launch.results(Path(folder) / "alone", 2, train, [])
        print("uninterrupted:", expected[0], flush=True)
        for job in range(-(-arguments.kills // PER_JOB)):
            count = min(PER_JOB, arguments.kills - done)
            steps = sorted(draw.sample(range(1, UPDATES - 1), count))
            kills = [(step, draw.randrange(2), draw.random() * 0.01) for step in steps]
            began, by = time.monotonic(), (*launch.TORCHRUN, "--max-restarts", "3")
            found = launch.launch(Path(folder) / str(job), 2, train, kills, by=by, timeout=180)
            same = not any(found.codes) and hashes(found.results) == hashes(expected)
            done, equal = done + count, equal + count * same
            reply = found.results[0] or found.errors[0][-500:]
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"job {job}: kills {kills}, {reply}, {seconds}, equal: {same}", flush=True)
    print(f"{done} kills, {equal} of them in jobs that end bit for bit as the uninterrupted one")
    return 0 if done == equal else 1


if __name__ == "__main__":
    sys.exit(main())
