"""Kill runs of random configurations at random moments, and compare their ends.

A killed run must end as the uninterrupted one.

    python tests/benchmarks/kills.py              # 300 kills, a few minutes
    python tests/benchmarks/kills.py --kills 20

Each run restarts from its own folder. That is a folder of checkpoints that the hook writes, or one
checkpoint that ``save`` replaces repeatedly. In the same folder are a checkpoint of another run, a
Hugging Face model and a text file. The weights, the optimizer, the history and the table must be
equal bit for bit, and the other files must be unchanged. Processes are forked from one that has
imported everything, so an attempt costs no imports.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop import schedules

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from killed_run import facts


def configuration(rng):
    """Draw the configuration of a run."""
    return {
        "kind": rng.choice(["folder", "one path"]),
        "workers": rng.choice([0, 0, 0, 1]),
        "accumulate": rng.choice([1, 2, 3]),
        "every": rng.choice([1, 2, 3, 5]),
        "keep": rng.choice([1, 2, 3]),
        "best": rng.choice([None, "valid/loss"]),
        "background": rng.random() < 0.4,
        "table": rng.choice([None, "csv", "jsonl"]),
        "prefetch": rng.choice([1, 1, 2]),
        "schedule": rng.random() < 0.5,
        "clip": rng.random() < 0.5,
        "bf16": rng.random() < 0.3,
        "evaluate": rng.choice([{"epochs": 1}, {"steps": 4}, {"epochs": 0.5}]),
        "seed": rng.randrange(1000),
    }


def train(config, parent):
    """Resume a run and train to its end. Return the step it began at, and the final state."""
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = fl.TrainState.create(model, optimizer, seed=config["seed"])
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(90, 8, generator=draw), torch.randint(4, (90,), generator=draw)
    )
    loaders = {
        "train": DataLoader(data, 8, shuffle=True, num_workers=config["workers"]),
        "valid": DataLoader(data, 30),
    }
    middleware = [fl.accumulate(config["accumulate"])]
    middleware += [fl.amp("bf16")] * config["bf16"] + [fl.clip(1.0)] * config["clip"]
    middleware += [fl.schedule(schedules.cosine(warmup=3))] * config["schedule"]
    step = fl.pipeline(*middleware)(fl.supervised(nn.CrossEntropyLoss()))

    own = parent / "own"
    hook = fl.checkpoint(own, config["keep"], config["best"], background=config["background"])
    if config["kind"] == "one path":
        hook = lambda state: fl.save(state, own) and state
    hooks = [fl.every(steps=config["every"])(hook)]
    if config["table"]:
        write = {"csv": fl.to_csv, "jsonl": fl.to_jsonl}[config["table"]]
        hooks.append(write(parent / f"own.{config['table']}"))
    state = fl.resume(own, state)
    begun = state.step
    evaluate_every = fl.every(**config["evaluate"])
    settings = {"evaluate_every": evaluate_every, "prefetch": config["prefetch"]}
    state = fl.fit(step, state, loaders, epochs=3, hooks=hooks, **settings)
    if config["kind"] == "one path":
        fl.save(state, own)
    return begun, state


def table_is_the_history(config, parent, state):
    """Return whether a table has a row for each record, with the same counters."""
    if not config["table"]:
        return True
    lines = (parent / f"own.{config['table']}").read_text().splitlines()[config["table"] == "csv" :]
    counters = [
        [int(part.split(":")[-1]) for part in line.strip("{").split(",")[:2]] for line in lines
    ]
    return counters == [[record.epoch, record.step] for record in state.history]


def forked(work, after=None):
    """Run a function in a child process. Return its reply, or None if the child was killed.

    Args:
        work: the function.
        after: after how many seconds to kill the child; None never does.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            warnings.simplefilter("error")
            os.write(write, json.dumps(work()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    end = None if after is None else time.monotonic() + after
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if end is not None and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            # A worker of a loader that has just started may outlive it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            break
        time.sleep(0.0005)
    with os.fdopen(read, "rb") as pipe:
        reply = pipe.read()
    code = os.waitstatus_to_exitcode(ended[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit("an attempt failed: see above")
    return json.loads(reply) if code == 0 else None


def neighbours(parent):
    """Put a checkpoint, a model of another library and a text file next to the run."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Linear(3, 3)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=7)
    fl.save(state, parent / "neighbour")
    (parent / "bert").mkdir()
    (parent / "bert" / "model.safetensors").write_text("theirs")
    (parent / "bert" / "config.json").write_text("{}")
    (parent / "thesis.tex").write_text("years")
    (parent / ".neighbour.writing-0123456789ab").mkdir()
    return True


def contents(parent):
    """Return a checksum of every file that does not belong to the run."""
    files = {str(path.relative_to(parent)): path for path in sorted(parent.rglob("*"))}
    return [
        (name, path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest())
        for name, path in files.items()
        if not name.removeprefix(".").startswith("own")
    ]


def try_one(config, parent, rng, counts):
    """Restart and kill a run until it ends. Return the number of kills."""

    def run(where):
        def work():
            begun, state = train(config, where)
            return [begun, facts(state), table_is_the_history(config, where, state)]

        return work

    whole, own = parent / "whole", parent / "killed"
    for folder in (whole, own):
        folder.mkdir()
        forked(lambda folder=folder: neighbours(folder))
    started = time.monotonic()
    _, right, _ = forked(run(whole))
    duration, before = time.monotonic() - started, contents(own)
    kills, patience = 0, 1.0
    while (found := forked(run(own), rng.uniform(0, duration * patience))) is None:
        kills += 1
        patience *= 1.02  # so that the run ends eventually
    begun, mine, table = found
    counts["resumed"] += begun > 0
    faults = {
        "another end": mine != right,
        "another table": not table,
        "a neighbour was touched": contents(own) != before,
        "left over": any("writing" in p.name for p in own.iterdir() if "own" in p.name),
    }
    for fault in (fault for fault, is_there in faults.items() if is_there):
        counts[fault] += 1
        print(f"{fault}: {config}")
    return kills


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, counts = random.Random(arguments.seed), collections.Counter()
    kills, runs, started = 0, 0, time.monotonic()
    while kills < arguments.kills:
        config, parent = configuration(rng), Path(tempfile.mkdtemp())
        kills, runs = kills + try_one(config, parent, rng, counts), runs + 1
        shutil.rmtree(parent)
    faults = sum(counts.values()) - counts["resumed"]
    seconds, resumed = time.monotonic() - started, counts["resumed"]
    print(f"{kills} kills of {runs} runs in {seconds:.0f} s, ", end="")
    print(f"{resumed} of them ended from a checkpoint: {faults} faults")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
