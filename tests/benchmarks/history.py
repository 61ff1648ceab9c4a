"""The cost of a record after ten others, and after a hundred thousand.

    python tests/benchmarks/history.py    # a table; last the ratios of the last column to the first

Each number is the median of several measurements, in microseconds per record: of processor time,
and of wall time for checkpoints, which wait for the disk.

* append: ``history.append(record)``, for records of four metrics;
* early_stop: one call of the hook at a boundary with a new record;
* fit: a whole run with a record at every update (``evaluate_every=every(steps=1)``, one batch to
  evaluate) and ``early_stop``, per update. It starts from a state that already has that many
  records;
* checkpoint: one save by the hook ``checkpoint(folder, keep=2, best="valid/loss")`` after each new
  record.

A cost that does not depend on the length of the history has the ratio 1.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable

import attrs
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

LENGTHS = (10, 1_000, 100_000)
RECORDS, SAVES, ROUNDS = 200, 20, 9  # per measurement; measurements
ONE = torch.ones(1)
NAMES = ("train/loss", "train/grad_norm", "valid/loss", "valid/accuracy")


def record(step: int) -> fl.Record:
    """Return a record of falling losses, so that no hook stops the run."""
    return fl.Record(0, step, dict.fromkeys(NAMES, -float(step)), step / 1000)


def history(length: int) -> fl.History:
    """Return a history of a number of records."""
    return fl.History(map(record, range(1, length + 1)))


def appending(length: int) -> Callable[[], None]:
    """Return a function that appends records to a history."""
    longer, new = history(length), [record(length + i) for i in range(1, RECORDS + 1)]

    def run() -> None:
        nonlocal longer
        for one in new:
            longer = longer.append(one)

    return run


def stopping(length: int) -> Callable[[], None]:
    """Return a function that calls early_stop after each of several new records."""
    stop, longer, states = fl.early_stop("valid/loss", patience=10**9), history(length), []
    state = attrs.evolve(toy(), history=longer, events=frozenset({"update", "record"}))
    stop(state)
    for i in range(1, ROUNDS * RECORDS + 1):
        longer = longer.append(record(length + i))
        states.append(attrs.evolve(state, history=longer))
    left = iter(states)

    def run() -> None:
        for one in itertools.islice(left, RECORDS):
            stop(one)

    return run


def fitting(length: int) -> Callable[[], None]:
    """Return a function that trains with a record at every update."""
    step = fl.pipeline()(toy_loss)
    hooks = (fl.early_stop("valid/loss", patience=10**9),)
    state = attrs.evolve(toy(lr=1e-6), history=history(length), step=length)
    loaders = {"train": [ONE] * RECORDS, "valid": [ONE]}

    def run() -> None:
        nonlocal state
        state = fl.fit(step, state, loaders, hooks=hooks, evaluate_every=fl.every(steps=1))

    run()

    return run


def saving(length: int) -> Callable[[], None]:
    """Return a function that saves a checkpoint after each of several new records."""
    folder = tempfile.TemporaryDirectory()
    hook, longer = fl.checkpoint(folder.name, keep=2, best="valid/loss"), history(length)
    events = frozenset({"update", "record"})
    state = hook.begin(attrs.evolve(toy(), step=length, history=longer, events=events))
    hook(state)  # writes the older records, once

    # The folder is removed with this function.
    def run(folder: tempfile.TemporaryDirectory = folder) -> None:
        nonlocal longer
        for _ in range(SAVES):
            n = len(longer) + 1
            longer = longer.append(record(n))
            hook(attrs.evolve(state, history=longer, step=n))

    return run


def microseconds(run: Callable[[], None], clock: Callable[[], float], records: int) -> float:
    """Return the median time of one record."""
    times = []
    for _ in range(ROUNDS):
        began = clock()
        run()
        times.append((clock() - began) / records * 1e6)
    return statistics.median(times)


MEASURED = {"append": appending, "early_stop": stopping, "fit": fitting}


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':12}" + "".join(f"{length:>12,}" for length in LENGTHS) + f"{'ratio':>12}")
    rows = [(name, make, time.process_time, RECORDS) for name, make in MEASURED.items()]
    for name, make, clock, records in (*rows, ("checkpoint", saving, time.perf_counter, SAVES)):
        found = [microseconds(make(length), clock, records) for length in LENGTHS]
        shown = "".join(f"{value:12.1f}" for value in found)
        print(f"{name:12}{shown}{found[-1] / found[0]:12.2f}", flush=True)


if __name__ == "__main__":
    main()
