"""What a training loop costs on two processes: fnloop, its peers, and DDP by hand.

    pip install 'fnloop[bench]'              # the peers; those that are missing are left out
    python tests/benchmarks/processes.py     # a table for each case

How it is measured is in ``apart.py``. A contender is a pair of processes (gloo, one thread each),
each on a core of its own. It trains on its half of one list of tensors. Before it is timed, its
weights have to be those of the loop by hand, to 1e-6. A round's time is that of the slower process,
between two barriers. What is timed is described in ``overhead.py``: of fnloop the whole call of
``fit``, of lightning its epoch alone. A call of ``fit`` waits for five messages beside those of its
updates: pipelines, data and weights are compared as it begins; as an epoch ends, metrics are
gathered, and all else is compared. It does not wait for requests to stop or to save: three messages
as it begins, and then one for each 0.1 s.

Two models: a tiny one, in which the loop shows beside the latency of an exchange, and one whose
batch takes milliseconds. Each plain, and with four batches to an update, of which only the last is
exchanged (``no_sync``), and gradients clipped.

The plan for more processes, on paper
-------------------------------------

Weak scaling: N processes train with b samples each. An update takes as long as with one process,
plus what is not hidden of the following.

* Gradients, P bytes. A ring sends and receives 2 (N-1)/N · P per process and update, between 1 P
  (N = 2) and 2 P. Over a link of bandwidth B that takes that / B, plus 2 (N-1) latencies for each
  bucket of 25 MiB. All buckets but the last travel during backward. Under ``fully_shard`` it is
  3 (N-1)/N · P, of which 2 are per batch of a window rather than per update.
* The number of items: 8 bytes, and only if it is not known beforehand (token counts, a ragged end,
  a ``sharded`` loader). It is sent before the last backward and needed after it, so it costs only
  its start: 0.1 to 0.3 ms over gloo.
* Buffers: a broadcast from the main process per update, before forward, so nothing hides it
  (ResNet-50: 0.2 MB).
* Signals, the clock and the counters: 128 bytes every 0.1 seconds, on the host. The result of an
  exchange is read one exchange later.
* Metrics: those of a report are pickled (about 100 bytes each) and gathered by all processes,
  N · bytes to each process, per report and not per update.
* The data: nothing is sent. But each process draws the whole order and skips the batches of the
  others. With a loader by index, that takes N · b indices and N seeds per update, in Python. Of any
  other iterable that is not ``sharded``, each process makes all N batches.

For example, GPT-2 with 124 M parameters in float32 (P = 0.5 GB), 32 × 1,024 tokens per H100 at 40 %
of its 989 TFLOP/s: 62 ms of compute, 41 of them in backward; one link to each machine.

    N               link                   2 (N-1)/N · P / B  not hidden  scaling  accumulate(4)
    8, one machine  NVLink, 400 GB/s       2 ms               < 1 ms      > 98 %   > 99 %
    16, two         400 Gbit/s, 50 GB/s    19 ms              < 1 ms      > 98 %   > 99 %
    16, two         100 Gbit/s, 12.5 GB/s  74 ms              34 ms       65 %     88 %
    64, eight       100 Gbit/s             78 ms              38 ms       62 %     87 %

What limits scaling first: on slow links the gradients, from the second machine on. The remedies
are ``accumulate``, which has n times the compute to hide them, and a communication hook that sends
bf16, which halves them. On fast links it is the order of the data: 0.25 µs of Python for each
sample of an update, in every process. That is 2 ms at N · b = 8,192, and 30 ms at 128 thousand.
Workers do not help, because it happens in the process of the loop. From there on, a stream of which
each process reads a part (``sharded``) is better. For loaders that are not DataLoaders of a
map-style dataset it is better in any case, since otherwise N processes read everything N times.
Then comes gloo, which carries the messages of the host: N - 1 sockets in each process, N² in all.
And every process waits for the slowest one.

fnloop's own messages, counted and then computed for gloo with 30 µs a hop: an update sends none,
unless batches weigh differently. Then it is one all-reduce during backward, 31 ms at N = 512 and a
quarter of a second at 4,096. An agreement is begun every 100 ms; up to about 1,600 processes it has
arrived when it is read. A record and a checkpoint stay below a second. Joining ends it: its reads
grow with N squared, to minutes at 4,096. A remedy would be a group for each machine and one among
them. None of this was run on more than 8 processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import apart
import costs
import overhead
from apart import CLOCK
from overhead import CLIPPED, MAX_NORM, PLAIN, WINDOW, Train

SIZES = {  # widths, samples in a batch, and batches of a round in each process
    "tiny": ((64, 64, 64, 10), 16, 400),
    "mid-sized": ((784, 512, 512, 10), 64, 40),
}
CHECKED = 40  # batches of both processes, after which weights are compared


def mine(batches: list[Any]) -> list[Any]:
    import torch.distributed as dist

    return batches[dist.get_rank() :: dist.get_world_size()]


# --- the contenders: (model, optimizer, case) -> train, which gets the batches of both processes


def by_hand(model: Any, optimizer: Any, case: str) -> Train:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    model, window = DistributedDataParallel(model), 1 if case == PLAIN else WINDOW

    def train(batches: list[Any]) -> None:
        batches = mine(batches)
        CLOCK.start()
        total = torch.zeros(2)
        for i in range(0, len(batches), window):
            optimizer.zero_grad()
            for n, (x, y) in enumerate(batches[i : i + window], 1):
                with contextlib.nullcontext() if n == window else model.no_sync():
                    loss = costs.loss_fn(model, (x, y))
                    (loss / window if window > 1 else loss).backward()
                total += torch.stack([loss.detach() * len(y), torch.tensor(len(y))])
            if window > 1:
                clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        dist.all_reduce(total)
        total.tolist()
        CLOCK.stop()

    return train


def with_fnloop(model: Any, optimizer: Any, case: str, exact: bool = False) -> Train:
    import fnloop as fl

    middleware = () if case == PLAIN else (fl.accumulate(WINDOW), fl.clip(MAX_NORM))
    step = fl.pipeline(*middleware)(costs.loss_fn)
    state = fl.TrainState.create(model, optimizer, seed=0, exact=exact)

    def train(batches: list[Any]) -> None:
        nonlocal state
        CLOCK.start()
        state = fl.fit(step, state, batches, hooks=())
        CLOCK.stop()

    return train


def on_its_half(build: Callable[..., Train]) -> Callable[..., Train]:
    """Return a peer of ``overhead.py`` that is given the batches of this process."""

    def built(model: Any, optimizer: Any, case: str) -> Train:
        train = build(model, optimizer, case)
        return lambda batches: train(mine(batches))

    return built


def with_lightning(model: Any, optimizer: Any, case: str) -> Train:
    settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    return overhead.with_lightning(model, optimizer, case, **settings)


PEERS = {
    "by hand": by_hand,
    "fnloop": with_fnloop,
    "fnloop, exact": functools.partial(with_fnloop, exact=True),
    "accelerate": on_its_half(overhead.with_accelerate),
    "lightning": on_its_half(with_lightning),
}


# --- a contender is a pair of processes


def make_model(size: str) -> costs.State:
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths, *_ = SIZES[size]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_batches(size: str) -> list[Any]:
    import torch

    torch.manual_seed(1)
    widths, samples, number = SIZES[size]
    return [
        (torch.randn(samples, widths[0]), torch.randint(widths[-1], (samples,)))
        for _ in range(2 * number)
    ]


def on_two(
    name: str, build: Callable[..., Train], size: str, case: str
) -> Callable[[], apart.Once]:
    """Return a contender, which starts the second process unless it is the second."""

    def set_up() -> apart.Once:
        if "RANK" not in os.environ:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            os.environ |= {**place, "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
            second = {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
            subprocess.Popen([sys.executable, __file__, "--serve", name], env=second)
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"])]})
        return pair(build, size, case)

    return set_up


def pair(build: Callable[..., Train], size: str, case: str) -> apart.Once:
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector

    warnings.simplefilter("ignore")  # what peers advise about loaders and loggers
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (model, optimizer), batches = make_model(size), make_batches(size)
    train = build(model, optimizer, case)
    if build is not by_hand:
        hand, its_optimizer = make_model(size)
        by_hand(hand, its_optimizer, case)(batches[:CHECKED])
        train(batches[:CHECKED])
        made, right = map(parameters_to_vector, (model.parameters(), hand.parameters()))
        if not (made - right).abs().max() <= 1e-6:
            raise SystemExit(f"{size}, {case}: {build} makes other weights than the loop by hand")

    def once() -> float:
        dist.barrier()
        train(batches)
        slower = torch.tensor(CLOCK.seconds)
        dist.all_reduce(slower, op=dist.ReduceOp.MAX)
        return slower.item()

    if dist.get_rank():  # the second process follows the first, until that ends
        with contextlib.suppress(RuntimeError):
            while True:
                once()
        os._exit(0)
    return once


def contenders() -> Iterator[tuple[str, Callable[[], apart.Once]]]:
    for size, case in itertools.product(SIZES, (PLAIN, CLIPPED)):
        for peer, build in PEERS.items():
            name = f"{size}, {case}: {peer}"
            yield name, on_two(name, build, size, case)


CONTENDERS = dict(contenders())

if __name__ == "__main__":
    apart.main(CONTENDERS, cores=sorted(os.sched_getaffinity(0))[:2])
