"""What an update costs over a slow link: averaged every time, or with ``local_sgd``.

    sudo python tests/benchmarks/slow_link.py                   # 100 Mbit/s, a minute
    sudo python tests/benchmarks/slow_link.py --rate 20 --delay 30

Two processes, each in a network namespace of its own, are joined by a veth pair. The kernel limits
it: netem to a rate and a delay, or where it has no netem, tbf to the rate alone. It needs root on
Linux, with ``ip`` and ``tc`` (iproute2).

Each contender is a pair of processes, which trains one model with AdamW on 32 batches in a round.
The pairs take turns, as in ``apart.py``. A round's time is that of the whole call of ``fit`` in the
slower process, with the messages of its beginning and its end, over its updates.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import apart

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from launch import bare, free_port

NAMES = f"fnloop-link-a-{os.getpid()}", f"fnloop-link-b-{os.getpid()}"
ADDRESSES = "10.78.0.1", "10.78.0.2"
UPDATES = 32  # of a round: every contender ends it with an average
CONTENDERS = {"every update": 0, "local_sgd(8)": 8, "local_sgd(32)": 32}


def serve(every, width, core):
    """Train a round for each line read, and write the seconds of an update."""
    os.sched_setaffinity(0, {core})
    import torch
    from torch import nn

    import fnloop as fl

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), fused=True), seed=0)
    listed = [fl.local_sgd(every)] if every else []
    step = fl.pipeline(*listed)(lambda model, x: model(x).square().mean())
    batches = [torch.randn(16, width) for _ in range(2 * UPDATES)]  # of both processes
    print(apart.READY, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        state = fl.fit(step, state, batches, epochs=state.epoch + 1, hooks=())
        print((time.perf_counter() - began) / UPDATES, flush=True)


class Pair:
    """A contender: a process at each end of the link.

    Args:
        every: updates between two averages; 0 averages gradients in every update.
        width: of the model's layers.
    """

    def __init__(self, every, width):
        cores, port = sorted(os.sched_getaffinity(0)), free_port()
        self.ends = []
        for rank, name in enumerate(NAMES):
            variables = bare() | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            serving = "--serve", str(every), str(width), str(cores[-1 - rank % len(cores)])
            inside = "ip", "netns", "exec", name, sys.executable, __file__, *serving
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self.ends.append(subprocess.Popen(inside, env=variables, **pipes))
        if [*map(self.read, self.ends)] != [apart.READY] * 2:
            raise SystemExit("a contender has failed: its traceback is above")

    @staticmethod
    def read(end):
        return end.stdout.readline().strip()

    def once(self):
        for end in self.ends:
            end.stdin.write("\n")
            end.stdin.flush()
        return max(float(self.read(end)) for end in self.ends)

    def close(self):
        for end in self.ends:
            end.stdin.close()
        for end in self.ends:
            end.wait()


# --- the link


def command(*words):
    """Run a command. Return what it complains of, or None."""
    done = subprocess.run(words, capture_output=True, text=True)
    return (done.stderr.strip() or "it failed") if done.returncode else None


def check(*words):
    if (complaint := command(*words)) is not None:
        raise SystemExit(f"{' '.join(words)}: {complaint}")


def join(rate, delay):
    """Make the two ends of the link. Return what limits it, in words."""
    for name in NAMES:
        check("ip", "netns", "add", name)
    cable = "ip", "link", "add", "cable-a", "netns", NAMES[0], "type", "veth"
    check(*cable, "peer", "name", "cable-b", "netns", NAMES[1])
    for name, address, end in zip(NAMES, ADDRESSES, ("cable-a", "cable-b"), strict=True):
        check("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
        check("ip", "-n", name, "link", "set", end, "up")
        check("ip", "-n", name, "link", "set", "lo", "up")
        qdisc = "tc", "-n", name, "qdisc", "add", "dev", end, "root"
        netem = "netem", "rate", f"{rate}mbit", "delay", f"{delay}ms"
        tbf = "tbf", "rate", f"{rate}mbit", "burst", "32kbit", "latency", "400ms"
        if command(*qdisc, *netem) is None:
            limited = f"{rate:g} Mbit/s, {delay:g} ms each way (netem)"
        elif command(*qdisc, *tbf) is None:
            limited = f"{rate:g} Mbit/s (tbf); this kernel has no netem, so no delay"
        else:
            raise SystemExit("this kernel has neither netem nor tbf, so no link can be made slow")
    return limited


def take_apart():
    for name in NAMES:
        command("ip", "netns", "del", name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=100, help="Mbit/s, default: %(default)s")
    parser.add_argument("--delay", type=float, default=10, help="ms each way, default: %(default)s")
    parser.add_argument("--width", type=int, default=512, help="of two layers: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(*given.serve)
        return
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        raise SystemExit("slow_link needs root, and ip and tc (iproute2)")
    try:
        limited = join(given.rate, given.delay)
        pairs = {who: Pair(every, given.width) for who, every in CONTENDERS.items()}
        times = apart.measure(pairs, given.rounds, warm_up=1)
        for pair in pairs.values():
            pair.close()
    finally:
        take_apart()
    megabytes = 4 * 2 * given.width * (given.width + 1) / 1e6
    print(f"{apart.cpu()}; {limited}; {megabytes:.1f} MB of weights; {given.rounds} rounds")
    first, *_ = times.values()
    for who, own in times.items():
        low, middle, high = (1e3 * t for t in statistics.quantiles(own, n=4))
        faster = statistics.median(its / mine for mine, its in zip(own, first, strict=True))
        print(f"  {who:<14} {middle:>8.1f} ms ({low:.1f} to {high:.1f})  {faster:.1f}x as fast")


if __name__ == "__main__":
    main()
