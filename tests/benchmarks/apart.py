"""Contenders in processes of their own: pinned, in turns, medians with quartiles.

Within one process the same comparison shows anything from 0.95 to 1.02: the settings of the
allocator outlive a run, and memory is laid out by whichever ran first. So each contender has a
process, which imports only what it needs. All of them are pinned to the same core. They take turns,
in another order in each round, while the others wait for a line. Ratios are taken within a round.

A benchmark is a file with a mapping ``CONTENDERS`` from "case: who" to a function that sets up and
returns another one, which does the work once and may return the seconds it took. Of each case, the
first is what the others are compared with. Its last lines:

    if __name__ == "__main__":
        apart.main(CONTENDERS)
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Once = Callable[[], float | None]
READY, MISSING = "ready", "not installed: pip install 'fnloop[bench]'"


class Clock:
    """A stopwatch for work of which only a part is timed. Its methods fit the hooks of peers."""

    now = staticmethod(time.process_time if "--cpu" in sys.argv else time.perf_counter)
    wait: Callable[[], object] = staticmethod(lambda: None)  # for a device

    def start(self, *_: object) -> None:
        self.wait()
        self.began = self.now()

    def stop(self, *_: object) -> None:
        self.wait()
        self.seconds = self.now() - self.began


CLOCK = Clock()


class Loader:
    """The batches as they are, for peers that do not take a list."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches
        self.batch_sampler = SimpleNamespace()  # pytorch-accelerated sets an attribute of it

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def serve(set_up: Callable[[], Once], cores: Sequence[int]) -> None:
    """Do the work once for each line read. Write the seconds that it took."""
    os.sched_setaffinity(0, cores)
    try:
        once = set_up()
    except ModuleNotFoundError:
        print(MISSING, flush=True)
        return
    print(READY, flush=True)
    for _ in sys.stdin:
        began = Clock.now()
        took = once()
        print(Clock.now() - began if took is None else took, flush=True)


class Running:
    """A contender in its process.

    Args:
        name: its name in ``CONTENDERS`` of the running file.
        options: those of this process, for the other one.
        tree: the folder from which it imports fnloop; None: the installed one.
    """

    def __init__(self, name: str, options: Sequence[str], tree: str | None = None) -> None:
        environment = {**os.environ, **({"PYTHONPATH": tree} if tree else {})}
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--serve", name, *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.is_ready = self.read() == READY

    def read(self) -> str:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("a contender has failed: its traceback is above")
        return line.strip()

    def once(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        self.process.communicate()


def measure(
    running: Mapping[str, Running], rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Return the seconds of each round by label. ``warm_up`` rounds before these do not count."""
    times: dict[str, list[float]] = {label: [] for label in running}
    order = random.Random(0)
    for number in range(warm_up + rounds):
        for label in order.sample(list(running), len(running)):
            took = running[label].once()
            if number >= warm_up:
                times[label].append(took)
    return times


def show(times: Mapping[str, Sequence[float]]) -> None:
    """Print a table of times and of ratios to the first of them."""
    first, *_ = times
    for label, own in times.items():
        median = f"  {label:<28} {statistics.median(own) * 1e6:>12,.0f} µs"
        if label == first:
            print(median)
            continue
        pairs = list(zip(own, times[first], strict=True))
        low, middle, high = statistics.quantiles([mine / its for mine, its in pairs], n=4)
        more = statistics.median(mine - its for mine, its in pairs) * 1e6
        print(f"{median}  {middle:.3f} ({low:.3f} to {high:.3f})  {more:+,.0f} µs", flush=True)


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main(contenders: Mapping[str, Callable[[], Once]], cores: Sequence[int] = ()) -> None:
    """Serve one contender, or measure all and print a table for each case.

    Contenders are pinned to ``cores``, by default to the last one. With ``--tree FOLDER``, fnloop
    from there is one more contender of each case, "before".
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    last = [max(os.sched_getaffinity(0))]
    parser.add_argument("--cores", type=int, nargs="+", default=[*cores] or last)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--cpu", action="store_true", help="time on the core: on a busy machine")
    parser.add_argument("--tree", help="another checkout, to compare with")
    given = parser.parse_args()
    if given.serve:
        serve(contenders[given.serve], given.cores)
        return
    cases: dict[str, list[str]] = {}
    for name in contenders:
        case, _, who = name.partition(": ")
        cases.setdefault(case, []).append(who)
    options = ["--cores", *map(str, given.cores), *["--cpu"] * given.cpu]
    print(f"{cpu()}; {given.rounds} rounds; medians, with quartiles of ratios")
    for case, every in cases.items():
        if given.only not in case:
            continue
        print(f"\n{case}", flush=True)
        running = {who: Running(f"{case}: {who}", options) for who in every}
        if given.tree:
            running |= {
                f"{who}, before": Running(f"{case}: {who}", options, given.tree)
                for who in every[1:]
            }
        for label in [label for label, one in running.items() if not one.is_ready]:
            print(f"  {label:<28} {MISSING}")
            running.pop(label)
        show(measure(running, given.rounds))
        for one in running.values():
            one.close()
