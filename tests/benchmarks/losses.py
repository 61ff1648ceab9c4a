"""Kill one process of a job at a random moment, and measure how long the others live.

    python tests/benchmarks/losses.py             # 50 kills, some minutes
    python tests/benchmarks/losses.py --kills 5

Nothing restarts the job or ends the others: they have to find out by themselves, as on another
machine. A kill is in any of the updates, anywhere within one, of any process; in training, in an
evaluation, or while the main process writes a checkpoint. All others must end within ``LIMIT``
seconds, each with an error that says so.
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
from torch import nn

import fnloop as fl

LIMIT = 10.0  # seconds: "all others end within seconds"
UPDATES = 30


def loss(model, batch):
    time.sleep(0.002)
    return model(batch).mean()


def train(folder, victim, step, delay):
    """Train. One process is killed some time after an update."""
    rank = int(os.environ["RANK"])

    def die():
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    def bomb(state):
        if (state.step, rank) == (step, victim):
            threading.Timer(delay, die).start()
        return state

    model = nn.Linear(4, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    loaders = {"train": [torch.ones(2, 4)] * 3000, "valid": [torch.ones(2, 4)] * 12}
    hooks = (bomb, fl.every(steps=3)(fl.checkpoint(folder / "run")))
    settings = {"hooks": hooks, "evaluate_every": fl.every(steps=4)}
    fl.fit(fl.pipeline()(loss), state, loaders, epochs=1, **settings)


def kill_one(folder, rng, n):
    """Return how long the others lived after a kill, in seconds."""
    victim, step, delay = rng.randrange(n), rng.randrange(1, UPDATES), 0.05 * rng.random()
    found = launch.launch(folder, n, train, victim, step, delay, timeout=90, forked=True)
    case = f"process {victim} of {n}, {delay:.3f} s after update {step}"
    assert all(found.codes), f"{case}: {found.codes}"
    others = [at for rank, at in enumerate(found.ended) if rank != victim]
    return case, max(others) - float((folder / "killed").read_text())


def kill(times, seed=0):
    """Return how long the others lived after each kill.

    Raises:
        AssertionError: they lived longer than ``LIMIT``, or ended without an error.
    """
    rng, lived = random.Random(seed), []
    for n in range(times):
        with tempfile.TemporaryDirectory() as folder:
            case, seconds = kill_one(Path(folder), rng, 2 + n % 2)
        print(f"{n + 1}: {case}: {seconds:.1f} s", flush=True)
        assert seconds < LIMIT, case
        lived.append(seconds)
    return lived


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    lived = sorted(kill(args.kills, args.seed))
    print(f"{len(lived)} kills: median {lived[len(lived) // 2]:.1f} s, longest {lived[-1]:.1f} s")
