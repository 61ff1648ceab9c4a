"""What fnloop's own messages would cost on 8 to 4,096 processes, from what is counted and measured.

    python tests/benchmarks/processes.py --scale

It counts the collectives of the host, by kind and bytes, that two processes begin for an update, an
agreement, a record, a checkpoint and an epoch's end. It measures how long each kind takes here on
2, 4 and 8 processes. From the counts it computes what the same costs on N processes, where a
message takes ``--hop`` microseconds (30: TCP within one data center) and a process receives
``--bandwidth`` bytes a second (1e9). Gradients and shards are not in it: see ``processes.py``.

The model, of gloo:

* An all-reduce of a few bytes is a ring: 2 (N - 1) hops. It grows with N, not with log N.
* A gather is a ring too: N - 1 hops, and N times the bytes arrive at each process.
* A broadcast is a tree: log2 N hops.
* Joining: process 0 reads three words of each process, one after the other. Then each process reads
  the addresses of all others in the store of process 0: N (N - 1) reads, which that store answers
  as fast as it did here those of 8 processes.
* The watchdog: process 0 reads N places each second, one after the other. Above 100 % of a process,
  it would need more than a second.

What it says: an update sends nothing, unless batches weigh differently. Then it is one all-reduce
during backward, which at N = 512 takes 31 ms and at 4,096 a quarter of a second. An agreement is
begun each 100 ms and read by the next one; up to about 1,600 processes it has arrived by then, and
above that the run waits. A record and a checkpoint stay below a second. Joining is what ends it:
reads grow with N squared, to minutes at 4,096. All of this is of gloo on the host; gradients are
exchanged by NCCL. A remedy would be a tree of groups, one for each machine and one among them.

None of this was run on more than 8 processes. On 2 cores the times of 4 and 8 show how processes
take turns, not the algorithm; that is read in gloo's sources, as are the reads of a join. What a
network does under the load of thousands is not in it. Records and checkpoints are those of a model
with one metric: what others gather is in the term N times the bytes.
"""

from __future__ import annotations

import collections
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fnloop as fl
from fnloop._backend import collectives
from fnloop._loop import peers

COUNTS, HERE = (8, 64, 512, 4096), (2, 4, 8)
REPEATS = 100
HOPS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1),
    "all_gather": lambda n: n - 1,
    "broadcast": lambda n: math.ceil(math.log2(n)),
}
Calls = collections.Counter[tuple[str, int]]  # how often, by kind and by bytes of one process


def run_together(job: Callable[[], Any], n: int) -> Any:
    """Run a job in n processes that are forked from this one. Return the result of the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def begin(rank: int) -> None:
        torch.set_num_threads(1)
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port}
        os.environ.update({k: str(v) for k, v in numbers.items()}, MASTER_ADDR="127.0.0.1")
        found = job()
        dist.barrier()
        if rank == 0:
            send.send(found)
        sys.stdout.flush()
        os._exit(0)

    children = [context.Process(target=begin, args=(rank,)) for rank in range(n)]
    for child in children:
        child.start()
    send.close()
    found = receive.recv()
    for child in children:
        child.join()
    return found


# --- what is counted


def count_calls() -> dict[str, Calls]:
    """Return the collectives of the host that fnloop begins for each event, in one process."""
    calls: Calls = collections.Counter()

    def counted(kind: str) -> Callable[..., Any]:
        begin = getattr(dist, kind)

        def call(first: Any, *rest: Any, **settings: Any) -> Any:
            tensor = rest[0] if kind == "all_gather" else first
            calls[kind, tensor.nbytes] += 1
            return begin(first, *rest, **settings)

        return call

    for kind in HOPS:
        setattr(dist, kind, counted(kind))

    def during(do: Callable[[], Any]) -> Calls:
        calls.clear()
        do()
        return calls.copy()

    def start(loss: Callable[..., Any], batches: int, **settings: Any) -> Callable[[], Any]:
        model = torch.nn.Linear(4, 1)
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
        loaders = {"train": [torch.ones(2, 4)] * batches, "valid": [torch.ones(2, 4)] * 2}
        step = fl.pipeline(fl.clip(1.0))(loss)
        settings = {"hooks": (), "evaluate_every": None, **settings}
        return lambda: fl.fit(step, state, loaders, epochs=1, **settings)

    plain = lambda model, x: model(x).mean()
    items = lambda model, x: (model(x).mean(), {"weight": torch.tensor(2.0)})
    few, many = (without_agreements(during(start(plain, n))) for n in (20, 60))
    few_items, many_items = (without_agreements(during(start(items, n))) for n in (20, 60))
    every = fl.every(steps=1)
    records = without_agreements(during(start(plain, 20, evaluate_every=every)))
    state = start(plain, 20)()
    with tempfile.TemporaryDirectory() as folder:
        path = fl.broadcast(f"{folder}/a")
        saved = during(lambda: fl.save(state, path))
    agreed = peers.Consensus(state)
    exchange = during(lambda: agreed.poll(state, _NOTHING))
    return {
        "an update": each(many - few, 20),
        "an update with a count of items": each(many_items - few_items, 20),
        "an agreement": exchange,
        "a record with an evaluation": each(records - few, 9),
        "a checkpoint": saved,
        "a run of one epoch, besides": few,
    }


class _Nothing:
    requested = (False, False)


_NOTHING: Any = _Nothing()


def without_agreements(calls: Calls) -> Calls:
    """Return calls without those of agreements, which are made by the clock: 9 numbers."""
    return collections.Counter({k: n for k, n in calls.items() if k != ("all_reduce", 72)})


def each(calls: Calls, events: int) -> Calls:
    """Return the calls of one of many events."""
    found = {k: round(n / events) for k, n in calls.items()}
    return collections.Counter({k: n for k, n in found.items() if n})


# --- what is measured


def measure_latencies() -> dict[str, float]:
    """Return the median seconds of each kind of collective of a few bytes."""
    dist.init_process_group("gloo")
    ones, found = torch.ones(9, dtype=torch.float64), {}
    parts = [torch.empty(9, dtype=torch.float64) for _ in range(dist.get_world_size())]
    ways = {
        "all_reduce": lambda: dist.all_reduce(ones, op=dist.ReduceOp.MAX),
        "all_gather": lambda: dist.all_gather(parts, ones),
        "broadcast": lambda: dist.broadcast(ones, 0),
    }
    for kind, call in ways.items():
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        found[kind] = statistics.median(times)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"word of {dist.get_rank()}", "word")
    began = time.perf_counter()
    for _ in range(REPEATS):
        store.get(f"word of {dist.get_rank()}")
    found["read of the store"] = (time.perf_counter() - began) / REPEATS
    return found


# --- what is computed


def cost(calls: Calls, n: int, hop: float, bandwidth: float) -> float:
    """Return the seconds that calls take on n processes."""
    received = sum(times * n * size for (kind, size), times in calls.items() if "gather" in kind)
    hops = sum(times * HOPS[kind](n) for (kind, _), times in calls.items())
    return hops * hop + received / bandwidth


def show(hop: float, bandwidth: float) -> None:
    """Count, measure, and print the table."""
    counts = run_together(count_calls, 2)
    print("\nCollectives of the host, of one process:")
    for event, calls in counts.items():
        listed = ", ".join(f"{t} {kind} of {size:,} B" for (kind, size), t in calls.items())
        print(f"  {event:33} {listed or 'none'}")
    here = {n: run_together(measure_latencies, n) for n in HERE}
    print(f"\nMeasured here on {os.cpu_count()} cores, microseconds:")
    print(" " * 36 + "".join(f"{f'N = {n}':>10}" for n in HERE))
    for kind in here[HERE[0]]:
        print(f"  {kind:33} " + "".join(f"{here[n][kind] * 1e6:10.0f}" for n in HERE))
    print(f"\nOn N processes, {hop * 1e6:.0f} us a hop, {bandwidth:.0e} B/s, in milliseconds:")
    print(" " * 36 + "".join(f"{f'N = {n:,}':>12}" for n in COUNTS))
    for event, calls in counts.items():
        times = (cost(calls, n, hop, bandwidth) * 1e3 for n in COUNTS)
        print(f"  {event:33} " + "".join(f"{t:12.2f}" for t in times))
    waits = (max(cost(counts["an agreement"], n, hop, bandwidth) - peers.PERIOD, 0) for n in COUNTS)
    print(f"  {'waiting for one, each 100 ms':33} " + "".join(f"{t * 1e3:12.2f}" for t in waits))
    read = here[HERE[0]]["read of the store"]
    answer = min(times["read of the store"] / n for n, times in here.items())
    joining = ((3 * n * read + n * (n - 1) * answer) * 1e3 for n in COUNTS)
    print(f"  {'joining, reads of the store':33} " + "".join(f"{t:12.0f}" for t in joining))
    watch = (n * read / collectives.POLL_SECONDS * 100 for n in COUNTS)
    print(f"  {'the watchdog, % of one process':33} " + "".join(f"{t:12.2f}" for t in watch))
