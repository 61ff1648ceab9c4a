"""Contenders in processes of their own: pinned to one core, in turns, medians with quartiles.

Within one process the same comparison shows anything from 0.95 to 1.02: the settings of the
allocator outlive a run, and memory is laid out by whichever ran first. So each contender has a
process, which imports only what it needs. All of them are pinned to one core. They take turns, in
another order in each round, while the others wait for a line. Ratios are taken within a round.

A benchmark is a file with a mapping ``CONTENDERS`` from a name to a function that sets up and
returns another one, which does the work once and may return the seconds it took. Its last lines:

    if __name__ == "__main__":
        apart.main(CONTENDERS, base="by hand")
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Once = Callable[[], float | None]


def serve(once: Once, core: int, cpu: bool) -> None:
    """Do the work once for each line read. Write the seconds that it took."""
    os.sched_setaffinity(0, {core})
    clock = time.process_time if cpu else time.perf_counter
    for _ in sys.stdin:
        began = clock()
        took = once()
        print(clock() - began if took is None else took, flush=True)


class Running:
    """A contender in its process.

    Args:
        name: its name in ``CONTENDERS`` of the running file.
        core: the core that it is pinned to.
        tree: the folder from which it imports fnloop; None: the installed one.
        cpu: whether to take the time that the process had a core, and not that of the clock.
    """

    def __init__(self, name: str, core: int, tree: str | None = None, cpu: bool = False) -> None:
        environment = {**os.environ, **({"PYTHONPATH": tree} if tree else {})}
        self.process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--serve", name, "--core", str(core), *["--cpu"] * cpu],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def once(self) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        took = self.process.stdout.readline()
        if not took:
            raise SystemExit("a contender has failed: its traceback is above")
        return float(took)

    def close(self) -> None:
        self.process.communicate()


def measure(
    names: Mapping[str, tuple[str, str | None]],
    rounds: int,
    core: int,
    cpu: bool = False,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """Return the seconds of each round by label.

    Args:
        names: label to the name of a contender, and the tree that it imports.
        rounds: how many count.
        core: the core for all of them.
        cpu: as in :class:`Running`.
        warm_up: rounds before these.
    """
    running = {label: Running(name, core, tree, cpu) for label, (name, tree) in names.items()}
    times: dict[str, list[float]] = {label: [] for label in names}
    order = random.Random(0)
    for number in range(warm_up + rounds):
        for label in order.sample(list(running), len(running)):
            took = running[label].once()
            if number >= warm_up:
                times[label].append(took)
    for one in running.values():
        one.close()
    return times


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def main(contenders: Mapping[str, Callable[[], Once]], base: str) -> None:
    """Serve one contender, or measure all and print a table.

    A name is "case: who". The contenders of a case are compared with ``base`` in it. With
    ``--tree FOLDER``, fnloop from there is one more contender of each case, "before".
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--cpu", action="store_true", help="time on the core: on a busy machine")
    parser.add_argument("--tree", help="another checkout, to compare with")
    given = parser.parse_args()
    if given.serve:
        serve(contenders[given.serve](), given.core, given.cpu)
        return
    cases: dict[str, list[str]] = {}
    for name in contenders:
        case, _, who = name.partition(": ")
        cases.setdefault(case, []).append(who)
    print(f"{given.rounds} rounds on core {given.core}; medians, with quartiles of ratios")
    for case, every in cases.items():
        if given.only not in case:
            continue
        names: dict[str, tuple[str, str | None]] = {w: (f"{case}: {w}", None) for w in every}
        if given.tree:
            names |= {f"{w}, before": (f"{case}: {w}", given.tree) for w in every if w != base}
        times = measure(names, given.rounds, given.core, given.cpu)
        print(f"\n{case}")
        for label, own in times.items():
            median = f"  {label:<28} {statistics.median(own) * 1e6:>12,.0f} µs"
            if label == base:
                print(median)
                continue
            pairs = list(zip(own, times[base], strict=True))
            low, middle, high = quartiles([mine / hand for mine, hand in pairs])
            more = statistics.median(mine - hand for mine, hand in pairs) * 1e6
            print(f"{median}  {middle:.3f} ({low:.3f} to {high:.3f})  {more:+,.0f} µs")
