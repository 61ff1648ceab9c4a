"""Samples per second that a loader gives: fnloop, and torch's DataLoader by itself.

    python tests/benchmarks/fetch.py              # a minute

One pass over 8,192 shuffled samples of 784 numbers and a label, in batches of 64, 256 and 1024,
without workers and with 2 and 4. The batches are looked at and dropped; nothing is trained. The two
take turns, and the ratio is that of their medians. Both are called with the same loader, on one
thread of torch. Workers are persistent, and are warm before the clock starts.

Two cores that other programs used all the time, torch 2.13, thousands of samples per second by
DataLoader and by fnloop, medians of 5:

| workers | batch | TensorDataset | random_split | arrays |
|---|---|---|---|---|
| 0 | 64 | 46, 258 | 32, 134 | 35, 131 |
| 0 | 256 | 64, 294 | 28, 146 | 33, 136 |
| 0 | 1024 | 52, 216 | 40, 203 | 23, 84 |
| 2 | 256 | 20, 30 | 39, 67 | 48, 21 |
| 2 | 1024 | 27, 37 | 24, 66 | 56, 72 |
| 4 | 256 | 33, 60 | 24, 63 | 35, 29 |
| 4 | 1024 | 30, 47 | 36, 39 | 37, 46 |

Rows that are in memory already are read fastest without workers, which have to send them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, StackDataset, TensorDataset, random_split

from fnloop._data.source import open_source

SAMPLES = 8192


def datasets() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 784, generator=draw), torch.arange(SAMPLES) % 10
    tensors = TensorDataset(x, y)
    return {
        "TensorDataset": tensors,
        "random_split": random_split(tensors, [SAMPLES - 1, 1], draw)[0],
        "arrays": StackDataset(np.asarray(x), np.asarray(y)),
    }


def seconds(batches: Callable[[], Iterator[Any]]) -> float:
    began = time.perf_counter()
    for batch in batches():
        assert len(batch) == 2
    return time.perf_counter() - began


def compare(data: DataLoader[Any], rounds: int) -> tuple[float, float]:
    """Return the median seconds of a pass by DataLoader, and by fnloop."""
    source = open_source(data, 0)
    ways: list[Callable[[], Iterator[Any]]] = [
        lambda: iter(data),
        lambda: source.batches(0, 0, 0),
    ]
    times: list[list[float]] = [[], []]
    for way in ways:
        seconds(way)
    for _ in range(rounds):
        for which in random.sample((0, 1), 2):
            times[which].append(seconds(ways[which]))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2, 4])
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # what torch advises about the number of workers

    print(f"{'dataset':<15}{'workers':>8}{'batch':>7}{'DataLoader':>12}{'fnloop':>9}{'times':>8}")
    for name, dataset in datasets().items():
        for workers in args.workers:
            for size in (64, 256, 1024):
                data = DataLoader(
                    dataset, size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
                )
                torchs, ours = compare(data, args.rounds)
                print(
                    f"{name:<15}{workers:>8}{size:>7}{SAMPLES / torchs / 1e3:>11.0f}k"
                    f"{SAMPLES / ours / 1e3:>8.0f}k{torchs / ours:>8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
