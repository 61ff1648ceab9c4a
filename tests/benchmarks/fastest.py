"""How fast a whole run is beside the same loop by hand: as it is, and with what ``tune`` advises.

    pip install -e '.[examples]'
    python tests/benchmarks/fastest.py --threads 2     # five minutes; --advice prints tune's table

* "mnist" is an epoch of ``examples/mnist.py``: the same CNN, optimizer, metric, clipping, schedule
  and loaders (batches of 64; 500 in the evaluation at its end). By hand, that is the loop that a
  user of PyTorch writes with a plain DataLoader. "fnloop" is the example as it is. "at its fastest"
  has ``amp("bf16")``, ``channels_last()`` and a fused AdamW, by hand and with fnloop.
* "MLP" is 784-64-10 with AdamW on a TensorDataset of 8,192 samples, in batches of 256 and 1024.

The contenders take turns in random order. Each trains its own copy for an epoch, from the same
weights and on the same batches in the same order. The numbers are medians of the ratios to the loop
by hand in the same round. Losses are compared in the first round: "same bits" are equal in every
bit. With one thread, the default, its own time is taken, so that other programs disturb less;
``--threads 2`` takes the time on the wall.

"two processes": each contender has a process of its own, and they take turns. In one process, a run
finds the memory that the other has freed, and what fnloop has set for it.

Two threads on two cores (AMD EPYC with AVX2, without bf16), torch 2.13, 70 rounds in turn, and 35
of batches of 512, whose times differed by 5 % between rounds:

| | s/epoch | ratio | 25-75 % | losses |
|---|---|---|---|---|
| mnist, two processes: by hand | 1.439 | 1.00 | | |
| mnist, two processes: fnloop | 1.329 | 0.948 | 0.907-0.993 | same bits |
| the same, batches of 512: by hand | 1.434 | 1.00 | | |
| the same, batches of 512: fnloop | 1.218 | 0.849 | 0.816-0.890 | same bits |

There an update takes 23.6 ms by hand, 20.8 of them forward and backward; the rest takes 2.76 ms by
hand and 2.07 with fnloop. An evaluation takes 191 ms by hand and 141 with fnloop: by hand, each of
its two batches gets 12,000 new pages from the system.

One thread of two cores (AMD EPYC, AVX-512 BF16) that other programs used all the time, torch 2.13,
without evaluations and before memory was used again:

| | s/epoch | ratio | losses |
|---|---|---|---|
| MLP, 256: by hand | 0.091 | 1.00 | |
| MLP, 256: fnloop | 0.062 | 0.66 | same bits |
| MLP, 1024: by hand | 0.092 | 1.00 | |
| MLP, 1024: fnloop | 0.059 | 0.64 | same bits |
| mnist: by hand | 1.654 | 1.00 | |
| mnist: fnloop | 1.682 | 1.02 | same bits |
| mnist: by hand, at its fastest | 0.900 | 0.54 | apart by 0.001 |
| mnist: fnloop, at its fastest | 0.865 | 0.53 | apart by 0.001 |

After 10 epochs the accuracy is 98.5 % as it is, and 98.9 % at its fastest (``--epochs 10``).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fnloop as fl
from fnloop._core.rng import COMPUTE, ORDER, fold_in, mix
from fnloop.schedules import one_cycle

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mnist

Contender = Callable[[], tuple[float, list[float]]]  # trains once; the seconds and the losses
Make = Callable[..., tuple[nn.Module, torch.optim.Optimizer]]
SEED = 0


def clock() -> float:
    """Return the time of this thread if it is the only one, else that on the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def batches_of(dataset: Any, size: int) -> DataLoader[Any]:
    """Return a plain loader in the order that fnloop's first epoch has."""
    order = torch.Generator().manual_seed(fold_in(SEED, ORDER, 0))
    return DataLoader(dataset, size, sampler=RandomSampler(dataset, generator=order))


def by_hand(
    make: Make, dataset: TensorDataset, size: int, fast: bool, held_out: TensorDataset | None = None
) -> Contender:
    """Return the loop written by hand; ``held_out``: with all that the example for MNIST does."""
    full = held_out is not None
    criterion = nn.CrossEntropyLoss()
    layout = torch.channels_last if fast else torch.contiguous_format

    def evaluate(model: nn.Module) -> float:
        total, correct, seen = torch.zeros((), dtype=torch.float64), 0, 0
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=fast):
            for x, y in DataLoader(held_out, 500):  # type: ignore[arg-type]
                output = model(x.contiguous(memory_format=layout))
                total += criterion(output, y).double() * len(y)
                correct += (output.argmax(dim=1) == y).sum()
                seen += len(y)
        return total.item() / seen

    def train() -> tuple[float, list[float]]:
        model, optimizer = make(fused=fast or None)
        factor = one_cycle()
        if fast:
            model = model.to(memory_format=layout)
        data, rate = batches_of(dataset, size), optimizer.param_groups[0]["lr"]
        total, correct, seen, norms = torch.zeros((), dtype=torch.float64), 0, 0, torch.zeros(())
        began = clock()
        steps = len(data)
        for i, (x, y) in enumerate(data):
            if full:  # dropout as in fnloop
                torch.default_generator.manual_seed(mix(fold_in(SEED, COMPUTE, 0), i))
                optimizer.param_groups[0]["lr"] = rate * factor(i, steps)
            x = x.contiguous(memory_format=layout) if fast else x
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                output = model(x)
                loss = criterion(output, y)
            loss.backward()
            if full:
                norms += clip_grad_norm_(model.parameters(), 1.0)
                correct += (output.argmax(dim=1) == y).sum()
            optimizer.step()
            total += loss.detach().double() * len(y)
            seen += len(y)
        losses = [total.item() / seen, *([evaluate(model)] if full else [])]
        return clock() - began, losses

    return train


def by_fnloop(
    make: Make, dataset: TensorDataset, size: int, fast: bool, held_out: TensorDataset | None = None
) -> Contender:
    members: tuple[fl.Middleware, ...] = ()
    if held_out is not None:
        members = fl.metric(accuracy=mnist.accuracy), fl.clip(1.0), fl.schedule(one_cycle())
    if fast:
        members = fl.amp("bf16"), *members, fl.channels_last()
    step = fl.pipeline(*members)(fl.supervised(nn.CrossEntropyLoss()))

    def train() -> tuple[float, list[float]]:
        model, optimizer = make(fused=fast or None)
        state = fl.TrainState.create(model, optimizer, seed=SEED)
        loaders = {"train": DataLoader(dataset, size, shuffle=True)}
        if held_out is not None:
            loaders["valid"] = DataLoader(held_out, 500)
        began = clock()
        state = fl.fit(step, state, loaders, epochs=1, hooks=())
        return clock() - began, [state.history.latest(f"{name}/loss") for name in loaders]

    return train


def cnn(fused: bool | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = mnist.small_cnn()
    settings = {"lr": 5e-3, "weight_decay": 0.05, "fused": fused}
    return model, torch.optim.AdamW(model.parameters(), **settings)


def mlp(fused: bool | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def measure(title: str, contenders: dict[str, Contender], rounds: int) -> None:
    """Print the ratios to the first contender."""
    first, *_ = contenders
    times: dict[str, list[float]] = {name: [] for name in contenders}
    losses = {name: train()[1] for name, train in contenders.items()}  # and warm up
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            times[name].append(contenders[name]()[0])
    print(f"\n{title:<28}{'s/epoch':>9}{'ratio':>8}{'25-75 %':>15}   losses")
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, times[first], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        apart = max(abs(a - b) for a, b in zip(losses[name], losses[first], strict=True))
        agree = f"apart by {apart:.1g}" if apart else "same bits"
        middle = f"{low:.3f}-{high:.3f}"
        print(
            f"{name:<28}{statistics.median(taken):>9.3f}{ratio:>8.3f}{middle:>15}   {agree}",
            flush=True,
        )


@functools.cache
def contender_alone(by: str, size: int, threads: int) -> Contender:
    """Return a contender of "mnist", in a process that trains nothing else."""
    torch.set_num_threads(threads)
    digits, held_out = mnist.digits()
    train = {"by hand": by_hand, "fnloop": by_fnloop}[by](cnn, digits, size, False, held_out)
    train()  # to warm up
    return train


def epoch_alone(*args: Any) -> tuple[float, list[float]]:
    return contender_alone(*args)()


def measure_apart(title: str, size: int, rounds: int) -> None:
    """Print the ratio of epochs in two processes that take turns.

    In one process, a run would find the memory that the other one has freed, and its settings.
    """
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with ProcessPoolExecutor(1, context) as hand, ProcessPoolExecutor(1, context) as library:
        pools = {"by hand": hand, "fnloop": library}
        contenders = {
            by: lambda by=by: pools[by].submit(epoch_alone, by, size, threads).result()
            for by in pools
        }
        measure(title, contenders, rounds)


def accuracies(epochs: int) -> None:
    """Print the accuracy that the example reaches, as it is and at its fastest."""
    train, valid = mnist.digits()
    members = fl.metric(accuracy=mnist.accuracy), fl.clip(1.0), fl.schedule(one_cycle())
    fastest = fl.amp("bf16"), *members, fl.channels_last()
    for name, listed, fused in (("as it is", members, None), ("at its fastest", fastest, True)):
        step = fl.pipeline(*listed)(fl.supervised(nn.CrossEntropyLoss()))
        loaders = (DataLoader(train, 64, shuffle=True), DataLoader(valid, 500))
        state = fl.TrainState.create(*cnn(fused), seed=SEED)
        state = fl.fit(step, state, loaders, epochs=epochs, hooks=())
        print(f"mnist {name}: accuracy {state.history['valid/accuracy'][-1]:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=0, help="compare accuracies after this many")
    parser.add_argument("--advice", action="store_true", help="print the table of fl.data.tune")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("expected 2 rounds or more")
    torch.set_num_threads(args.threads)

    draw = torch.Generator().manual_seed(0)
    numbers = TensorDataset(
        torch.randn(8192, 784, generator=draw), torch.randint(10, (8192,), generator=draw)
    )
    for size in (256, 1024):
        made = (mlp, numbers, size, False)
        contenders = {"by hand": by_hand(*made), "fnloop": by_fnloop(*made)}
        measure(f"MLP, batches of {size}", contenders, 2 * args.rounds)
    digits, held_out = mnist.digits()
    as_it_is, fastest = (cnn, digits, 64, False, held_out), (cnn, digits, 64, True, held_out)
    contenders = {
        "by hand": by_hand(*as_it_is),
        "fnloop": by_fnloop(*as_it_is),
        "by hand, at its fastest": by_hand(*fastest),
        "fnloop, at its fastest": by_fnloop(*fastest),
    }
    measure("mnist", contenders, args.rounds)
    for size in (64, 512):
        measure_apart(f"mnist, {size}, two processes", size, 3 * args.rounds)
    if args.epochs:
        accuracies(args.epochs)
    if args.advice:
        members = fl.metric(accuracy=mnist.accuracy), fl.clip(1.0), fl.schedule(one_cycle())
        step = fl.pipeline(*members)(fl.supervised(nn.CrossEntropyLoss()))
        print(fl.data.tune(step, fl.TrainState.create(*cnn()), DataLoader(digits, 64)))


if __name__ == "__main__":
    main()
