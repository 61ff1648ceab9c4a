"""What uploading checkpoints costs training, and what a resume downloads.

    pip install 'fnloop[test]'
    python tests/benchmarks/upload.py    # a table, and the bytes of a resume; minutes

Every contender trains the same model with AdamW: a third of --megabytes are weights, two thirds are
moments. It saves once in a round, in the background, while it makes --updates updates: nowhere, to
a disk, or to S3. The server is moto's, on another core. The updates from the second on are timed,
and the upload ends before they do, which is checked. What a save costs is the difference to the
contender that saves nowhere. It is stated as a part of a minute, for one save a minute: by the
clock, and by the time in which no other program has the core. Use the latter on a busy machine,
where the server displaces other programs.

Training, saving and uploading share one core, which is the worst case: s3fs alone needs 1.4 seconds
of a core for 512 MB. With --any-core the threads that save and upload may use the server's core.

A resume then starts with no local copies, over a link that counts the bytes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fnloop as fl

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import s3

LAYERS = 4


def new_state(megabytes):
    torch.manual_seed(0)
    width = int((megabytes * 2**20 / 12 / LAYERS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), fused=True), seed=0)


def loss_fn(model, x):
    return model(x).square().mean()


def now():
    """Return seconds: of the clock, and those in which this process, and not another, is at work.

    The latter are the time of the processor, of all threads, and the time in which the thread that
    trains waits for something else than the processor.
    """
    running, waiting, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    clock = time.perf_counter()
    return clock, time.process_time() + clock - (running + waiting) / 1e9


def train(options, who, folder):
    """Train a round for each line read. Write the seconds of it, and whether all was uploaded."""
    cores = os.sched_getaffinity(0) if options.any_core else ()  # those of the server
    os.sched_setaffinity(0, {options.core, *cores})
    torch.set_num_threads(1)
    place = {"disk": str(folder / "disk"), "s3": f"s3://{s3.BUCKET}/{who}"}.get(who)
    state, step = new_state(options.megabytes), fl.pipeline()(loss_fn)
    width = next(state.model.parameters()).shape[0]
    data = [torch.randn(8, width)] * (options.updates * 99)
    # At the second update of a round, and not at the end of it.
    saves = None if place is None else fl.checkpoint(place, keep=1, background=True)
    moment = fl.when(lambda state: state.step % options.updates == 2)
    hooks = () if saves is None else (moment(saves),)
    clock = {}

    def tick(state):
        at = state.step % options.updates
        if at == 1:
            clock["began"] = now()
        elif at == 0:
            took = [b - a for a, b in zip(clock["began"], now(), strict=True)]
            jobs = [] if saves is None else saves._place._uploads._jobs
            busy = any(not job.done() for job in jobs)
            print(*took, int(busy), flush=True)
            sys.stdin.readline()
        return state

    print("ready", flush=True)
    sys.stdin.readline()
    hooks = (*hooks, fl.every(steps=1)(tick))
    fl.fit(step, state, data, steps=options.updates * options.rounds, hooks=hooks)


def resume(options, who):
    state = fl.resume(f"s3://{s3.BUCKET}/s3", new_state(options.megabytes))
    print(state.step, flush=True)


def start(options, who, folder, port):
    variables = {**os.environ, **s3.environment(port), "FNLOOP_CACHE": str(folder / f"cache-{who}")}
    command = [sys.executable, __file__, *sys.argv[1:], "--who", who, "--folder", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=variables, text=True, **pipes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--any-core", action="store_true", help="also that of the server")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--who")
    options = parser.parse_args()
    if options.who == "resume":
        resume(options, options.who)
        return
    if options.who:
        train(options, options.who, options.folder)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    others = os.sched_getaffinity(0) - {options.core}
    os.sched_setaffinity(0, others or {options.core})  # the server inherits it
    try:
        with s3.s3_server() as port:
            measure(options, folder, port)
            with s3.Link.to(port) as link, start(options, "resume", folder, link.port) as process:
                step = int(process.communicate()[0])
                sizes = {k: n for k, n in link.received.items() if "step-" in k}
                state = sum(p.nbytes * 3 for p in new_state(options.megabytes).model.parameters())
                print(*link.seen, sizes, sep="\n") if options.verbose else None
                print(
                    f"a resume at step {step} downloaded {sum(sizes.values()):,} bytes in "
                    f"{len(sizes)} files; weights and moments are {state:,}"
                )
    finally:
        shutil.rmtree(folder)


def measure(options, folder, port):
    names = ("nowhere", "disk", "s3")
    running = {who: start(options, who, folder, port) for who in names}
    for process in running.values():
        assert process.stdout.readline() == "ready\n"
    rows = {who: [] for who in names}
    for number in range(options.rounds):
        for who in names if number % 2 else reversed(names):
            running[who].stdin.write("\n")
            running[who].stdin.flush()
            *took, busy = map(float, running[who].stdout.readline().split())
            rows[who].append(took)
            print(
                f"round {number}: {who}: {took[0]:.1f} s, {took[1]:.1f} s of its own"
                + ", UPLOAD NOT FINISHED" * int(busy),
                flush=True,
            )
    for process in running.values():
        process.communicate("\n")
    counted = {who: found[1:] for who, found in rows.items()}  # the first allocates memory
    for i, kind in enumerate(("clock", "own time")):
        for who in ("disk", "s3"):
            pairs = zip(counted[who], counted["nowhere"], strict=True)
            costs = sorted((a[i] - b[i]) / 60 for a, b in pairs)
            print(
                f"{kind}: one save a minute, {who}: {statistics.median(costs):+.2%} "
                f"({costs[0]:+.2%} to {costs[-1]:+.2%})"
            )


if __name__ == "__main__":
    main()
