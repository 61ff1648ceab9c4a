"""What a training loop costs on two processes: fnloop, its peers, and torch's
DistributedDataParallel by hand.

    pip install 'fnloop[bench]'              # the peers; those that are missing are left out
    torchrun --nproc-per-node 2 tests/benchmarks/processes.py
    python tests/benchmarks/processes.py     # starts that itself

It prints two tables, and writes the raw numbers as JSON beside itself.

All contenders live in the same two processes (gloo, CPU, one thread each, each process on a core
of its own: without that, ratios vary twice as much), and take turns there in random order: once per
round each trains on its half of one list of tensors. They begin with the same weights and have to
arrive at those of the loop written by hand, to 1e-6; otherwise nothing is timed. A round's time is
that of the slower process, between two barriers; ratios are taken within a round. What is timed is
described in overhead.py: of fnloop the whole call of ``fit``, of lightning its epoch alone. A call
of ``fit`` exchanges four messages beside those of its updates, a few milliseconds: ``--batches``
says over how many batches they are spread.

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
* Signals, the clock and the counters: 72 bytes every 0.1 seconds, on the host. The result of an
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

``--scale`` counts fnloop's own messages, measures them here, and prints what they would cost on 8
to 4,096 processes: see ``scale.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import gc
import itertools
import json
import os
import platform
import pstats
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scale
import torch
import torch.distributed as dist
from overhead import (
    ACCUMULATED,
    CLOCK,
    HAND,
    MAX_NORM,
    PLAIN,
    WARM_UP,
    WINDOW,
    Batches,
    Loader,
    Train,
    cpu,
    show,
    version,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import SGD, Optimizer

import fnloop as fl

TINY, MID = "tiny MLP", "mid-sized MLP"
SIZES = {
    TINY: ((64, 64, 64, 10), 16),
    MID: ((784, 512, 512, 10), 64),
}  # widths, and samples in a batch
SHARE = {TINY: 1.0, MID: 0.1}  # of the batches in a round


def mine(batches: Batches) -> Batches:
    return batches[dist.get_rank() :: dist.get_world_size()]


# --- the contenders: (model, optimizer, setting) -> train, which gets the batches of both processes
# ---------------------


def by_hand(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    model = DistributedDataParallel(model)

    def plain(batches: Batches) -> None:
        batches = mine(batches)
        CLOCK.start()
        total = torch.zeros(2)
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach() * len(y), torch.tensor(len(y))])
        dist.all_reduce(total)
        total.tolist()
        CLOCK.stop()

    def accumulated(batches: Batches) -> None:
        batches = mine(batches)
        CLOCK.start()
        total = torch.zeros(())
        for i in range(0, len(batches), WINDOW):
            optimizer.zero_grad()
            for n, (x, y) in enumerate(batches[i : i + WINDOW], 1):
                with contextlib.nullcontext() if n == WINDOW else model.no_sync():
                    loss = cross_entropy(model(x), y)
                    (loss / WINDOW).backward()
                total += loss.detach() * len(y)
            clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
        dist.all_reduce(total)
        total.item()
        CLOCK.stop()

    return plain if setting == PLAIN else accumulated


def with_fnloop(model: nn.Module, optimizer: Optimizer, setting: str, exact: bool = False) -> Train:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(model(x), y)

    middleware = () if setting == PLAIN else (fl.accumulate(WINDOW), fl.clip(MAX_NORM))
    step = fl.pipeline(*middleware)(loss_fn)
    state = fl.TrainState.create(model, optimizer, seed=0, exact=exact)

    def train(batches: Batches) -> None:
        nonlocal state
        CLOCK.start()
        state = fl.fit(step, state, batches, hooks=())
        CLOCK.stop()

    return train


def with_accelerate(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """The loops of its documentation, with the loss summed. A list needs no preparing."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=1 if setting == PLAIN else WINDOW
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(batches: Batches) -> None:
        batches = mine(batches)
        accelerator.gradient_accumulation_steps = 1 if setting == PLAIN else WINDOW  # process-wide
        CLOCK.start()
        total = torch.zeros(())
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(x), y)
                accelerator.backward(loss)
                if setting != PLAIN and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() * len(y)
        accelerator.reduce(total, "sum").item()
        CLOCK.stop()

    return train


def with_lightning(model: nn.Module, optimizer: Optimizer, setting: str) -> Train:
    """Each fit gets a new Trainer, which wraps the model again before its epoch begins."""
    import logging

    from lightning.pytorch import LightningModule, Trainer

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(LightningModule):
        on_train_epoch_start, on_train_epoch_end = CLOCK.start, CLOCK.stop

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Optimizer:
            return optimizer

    module = Module()
    extra = (
        {}
        if setting == PLAIN
        else {"accumulate_grad_batches": WINDOW, "gradient_clip_val": MAX_NORM}
    )

    def train(batches: Batches) -> None:
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy="ddp",
            max_epochs=1,
            barebones=True,
            use_distributed_sampler=False,
            **extra,
        )
        trainer.fit(module, Loader(mine(batches)))

    return train


CONTENDERS: dict[
    str, tuple[str, Callable[..., Train]]
] = {  # name -> (distribution, how to build it)
    HAND: ("torch", by_hand),
    "fnloop": ("fnloop", with_fnloop),
    "fnloop, exact": ("fnloop", functools.partial(with_fnloop, exact=True)),
    "accelerate": ("accelerate", with_accelerate),
    "lightning": ("lightning", with_lightning),
}


# --- the measurement ------------------------------------------------------------------------------
# ----------------------


def make_model(size: str) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    widths, _ = SIZES[size]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_batches(size: str, n: int) -> Batches:
    torch.manual_seed(1)
    widths, samples = SIZES[size]
    return [
        (torch.randn(samples, widths[0]), torch.randint(widths[-1], (samples,))) for _ in range(n)
    ]


def build(size: str, setting: str, names: list[str], warm_up: Batches) -> dict[str, Train]:
    """Build the contenders and warm them up. Exit unless all have done the same work."""
    contenders, weights = {}, {}
    for name in names:
        model, optimizer = make_model(size)
        contenders[name] = CONTENDERS[name][1](model, optimizer, setting)
        contenders[name](warm_up)
        weights[name] = parameters_to_vector(model.parameters()).detach()
        apart = (weights[name] - weights[HAND]).abs().max().item()
        if not apart <= 1e-6:
            raise SystemExit(
                f"{size}, {setting}: weights of {name} are {apart:.2g} from those by hand"
            )
    return contenders


def measure(contenders: dict[str, Train], batches: Batches, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per batch of the slower process, round by round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = random.Random(0)  # the same in both processes
    for _ in range(rounds):
        for name in order.sample(list(contenders), len(contenders)):
            gc.collect()
            dist.barrier()
            contenders[name](batches)
            slower = torch.tensor(CLOCK.seconds)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            times[name].append(slower.item() / len(mine(batches)) * 1e6)
    return times


def profile(contenders: dict[str, Train], batches: Batches) -> None:
    """Say where the main process's time goes in a call of ``fit``."""
    with cProfile.Profile() if dist.get_rank() == 0 else contextlib.nullcontext() as seen:
        contenders["fnloop"](batches)
    if seen is not None:
        pstats.Stats(seen).sort_stats("tottime").print_stats(30)


def pin_to_one_core() -> None:
    """Give this process a core of its own, with its threads, where the system can."""
    rank = int(os.environ["LOCAL_RANK"])
    if hasattr(os, "sched_setaffinity") and rank < len(cores := sorted(os.sched_getaffinity(0))):
        os.sched_setaffinity(0, {cores[rank]})


def launch() -> None:
    """Start two processes, each of which is this script, and become their launcher."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    os.execv(sys.executable, [*command, __file__, *sys.argv[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    beside = Path(__file__).with_suffix(".json")
    parser.add_argument(
        "--rounds", type=int, default=15, help="default: %(default)s; 15 or more to quote"
    )
    parser.add_argument(
        "--batches",
        type=int,
        default=400,
        help="per process in a round of the tiny model; default: %(default)s",
    )
    parser.add_argument(
        "--only", nargs="*", default=list(CONTENDERS), help="contenders, beside the loop by hand"
    )
    parser.add_argument(
        "--profile", action="store_true", help="show where fnloop's time goes, instead of measuring"
    )
    parser.add_argument(
        "--json", type=Path, default=beside, help="where numbers go; default: %(default)s"
    )
    parser.add_argument(
        "--scale", action="store_true", help="what messages cost on N processes: see scale.py"
    )
    parser.add_argument(
        "--hop", type=float, default=30.0, help="us of a message; default: %(default)s"
    )
    parser.add_argument(
        "--bandwidth", type=float, default=1e9, help="bytes per second; default: %(default)s"
    )
    args = parser.parse_args()
    if args.scale:
        scale.show(args.hop * 1e-6, args.bandwidth)
        return
    if args.rounds < 2 or args.batches < WARM_UP or args.batches % (10 * WINDOW):
        parser.error(
            f"expected 2 rounds or more, and {WARM_UP} batches or more, a multiple of {10 * WINDOW}"
        )
    if "RANK" not in os.environ:
        launch()

    warnings.simplefilter("ignore")  # what peers advise about loaders and loggers
    os.environ["ACCELERATE_USE_CPU"] = "true"
    pin_to_one_core()  # before threads start
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main, size_of_world = dist.get_rank() == 0, dist.get_world_size()
    versions = {distribution: version(distribution) for distribution, _ in CONTENDERS.values()}
    names = [
        name
        for name, (distribution, _) in CONTENDERS.items()
        if versions[distribution] and name in {HAND, *args.only}
    ]
    if main:
        print(
            f"{cpu()}, Python {platform.python_version()}, {size_of_world} processes, "
            f"{args.rounds} rounds"
        )
        print(
            ", ".join(
                f"{distribution} {found}" for distribution, found in versions.items() if found
            )
        )
    results: dict[str, Any] = {}
    for size in SIZES:
        if main:
            print(f"\n{size}: {SIZES[size][1]} samples, {' – '.join(map(str, SIZES[size][0]))}")
        batches = make_batches(size, int(args.batches * SHARE[size]) * size_of_world)
        for setting in (PLAIN, ACCUMULATED):
            contenders = build(size, setting, names, batches[: WARM_UP * size_of_world])
            if args.profile:
                profile(contenders, batches)
                continue
            times = measure(contenders, batches, args.rounds)
            results[f"{size}, {setting}"] = times
            if main:
                show(setting, times, dict.fromkeys([HAND, *args.only]))
    if main and results:
        facts = {
            "cpu": cpu(),
            "python": platform.python_version(),
            "versions": versions,
            "processes": size_of_world,
        }
        args.json.write_text(
            json.dumps({**facts, "batches": args.batches, "us_per_batch": results}, indent=1) + "\n"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
