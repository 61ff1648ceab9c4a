"""How fast a whole run is beside the same loop by hand: as it is, and at its fastest.

    pip install -e '.[examples]'
    python tests/benchmarks/fastest.py --cores 0 1

How it is measured is in ``apart.py``; with ``--cores 0 1`` each contender has two threads.

* "mnist" is an epoch of ``examples/mnist.py``: the same CNN, optimizer, metric, clipping, schedule
  and loaders (batches of 64 or 512; 500 in the evaluation at its end). By hand, that is the loop
  that a user of PyTorch writes with a plain DataLoader. "fnloop" is the example as it is. "at its
  fastest" has ``amp("bf16")``, ``channels_last()`` and a fused AdamW, by hand and with fnloop.
* "MLP" is 784-64-10 with AdamW on a TensorDataset of 8,192 samples, in batches of 256.

Each trains its own copy for an epoch, from the same weights and on the same batches in the same
order. fnloop is not timed unless its losses are those of the loop by hand: in every bit as it is,
and to 0.01 at its fastest.

Two threads on two cores (AMD EPYC with AVX2, without bf16), torch 2.13, 70 rounds in turn, and 35
of batches of 512, whose times differed by 5 % between rounds:

| | s/epoch | ratio | 25-75 % | losses |
|---|---|---|---|---|
| mnist: by hand | 1.439 | 1.00 | | |
| mnist: fnloop | 1.329 | 0.948 | 0.907-0.993 | same bits |
| the same, batches of 512: by hand | 1.434 | 1.00 | | |
| the same, batches of 512: fnloop | 1.218 | 0.849 | 0.816-0.890 | same bits |

There an update takes 23.6 ms by hand, 20.8 of them forward and backward; the rest takes 2.76 ms by
hand and 2.07 with fnloop. An evaluation takes 191 ms by hand and 141 with fnloop: by hand, each of
its two batches gets 12,000 new pages from the system.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apart
from apart import CLOCK

EXAMPLES = str(Path(__file__).parents[2] / "examples")
SEED = 0
Make = Callable[..., tuple[Any, Any]]
Train = Callable[[], list[float]]  # trains once, and lets CLOCK time it; the losses


def fnloops_numbers(steps: int) -> tuple[int, list[int], list[float]]:
    """Return what fnloop has in an epoch, without importing it here.

    That is the seed of its order, and of each batch the seed and the factor of the learning rate.
    """
    code = (
        "from fnloop._core.rng import COMPUTE, ORDER, fold_in, mix\n"
        "from fnloop.schedules import one_cycle\n"
        f"compute, factor, steps = fold_in({SEED}, COMPUTE, 0), one_cycle(), range({steps})\n"
        f"print([fold_in({SEED}, ORDER, 0), [mix(compute, i) for i in steps], "
        "[factor(i, len(steps)) for i in steps]])"
    )
    order, seeds, factors = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    return order, seeds, factors


def by_hand(make: Make, dataset: Any, size: int, fast: bool = False, held_out: Any = None) -> Train:
    """Return the loop written by hand; ``held_out``: with all that the example for MNIST does."""
    import torch
    from torch import nn
    from torch.nn.utils import clip_grad_norm_
    from torch.utils.data import DataLoader, RandomSampler

    order, seeds, factors = fnloops_numbers(math.ceil(len(dataset) / size))
    criterion = nn.CrossEntropyLoss()
    layout = torch.channels_last if fast else torch.contiguous_format
    autocast = lambda: torch.autocast("cpu", torch.bfloat16) if fast else contextlib.nullcontext()

    def evaluate(model: Any) -> float:
        total, correct, seen = torch.zeros((), dtype=torch.float64), 0, 0
        model.eval()
        with torch.no_grad(), autocast():
            for x, y in DataLoader(held_out, 500):
                output = model(x.contiguous(memory_format=layout))
                total += criterion(output, y).double() * len(y)
                correct += (output.argmax(dim=1) == y).sum()
                seen += len(y)
        return total.item() / seen

    def train() -> list[float]:
        model, optimizer = make(fused=fast or None)
        if fast:
            model = model.to(memory_format=layout)
        shuffled = RandomSampler(dataset, generator=torch.Generator().manual_seed(order))
        data = DataLoader(dataset, size, sampler=shuffled)
        (group,) = optimizer.param_groups
        rate = group["lr"]
        total, correct, seen, norms = torch.zeros((), dtype=torch.float64), 0, 0, torch.zeros(())
        CLOCK.start()
        for i, (x, y) in enumerate(data):
            torch.default_generator.manual_seed(seeds[i])  # dropout as in fnloop
            if held_out:
                group["lr"] = rate * factors[i]
            x = x.contiguous(memory_format=layout) if fast else x
            optimizer.zero_grad()
            with autocast():
                output = model(x)
                loss = criterion(output, y)
            loss.backward()
            if held_out:
                norms += clip_grad_norm_(model.parameters(), 1.0)
                correct += (output.argmax(dim=1) == y).sum()
            optimizer.step()
            total += loss.detach().double() * len(y)
            seen += len(y)
        losses = [total.item() / seen, *([evaluate(model)] if held_out else [])]
        CLOCK.stop()
        return losses

    return train


def by_fnloop(
    make: Make, dataset: Any, size: int, fast: bool = False, held_out: Any = None
) -> Train:
    import mnist
    from torch import nn
    from torch.utils.data import DataLoader

    import fnloop as fl

    members: tuple[Any, ...] = ()
    if held_out is not None:
        cycle = fl.schedule(fl.schedules.one_cycle())
        members = fl.metric(accuracy=mnist.accuracy), fl.clip(1.0), cycle
    if fast:
        members = fl.amp("bf16"), *members, fl.channels_last()
    step = fl.pipeline(*members)(fl.supervised(nn.CrossEntropyLoss()))

    def train() -> list[float]:
        model, optimizer = make(fused=fast or None)
        state = fl.TrainState.create(model, optimizer, seed=SEED)
        loaders = {"train": DataLoader(dataset, size, shuffle=True)}
        if held_out is not None:
            loaders["valid"] = DataLoader(held_out, 500)
        CLOCK.start()
        state = fl.fit(step, state, loaders, epochs=1, hooks=())
        CLOCK.stop()
        return [state.history.latest(f"{name}/loss") for name in loaders]

    return train


def cnn(fused: bool | None = None) -> tuple[Any, Any]:
    import mnist
    import torch

    torch.manual_seed(SEED)
    model = mnist.small_cnn()
    settings: Any = {"lr": 5e-3, "weight_decay": 0.05, "fused": fused}
    return model, torch.optim.AdamW(model.parameters(), **settings)


def mlp(fused: bool | None = None) -> tuple[Any, Any]:
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)


def numbers() -> tuple[Any, None]:
    import torch
    from torch.utils.data import TensorDataset

    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8192, 784, generator=draw), torch.randint(10, (8192,), generator=draw)
    return TensorDataset(x, y), None


def digits() -> tuple[Any, Any]:
    import mnist

    return mnist.digits()


CASES = {  # how the model and the data are made, the size of a batch, and whether at its fastest
    "MLP, 256": (mlp, numbers, 256, False),
    "mnist": (cnn, digits, 64, False),
    "mnist, batches of 512": (cnn, digits, 512, False),
    "mnist, at its fastest": (cnn, digits, 64, True),
}


def contender(
    build: Callable[..., Train], make: Make, data: Any, size: int, fast: bool
) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import torch

        sys.path.insert(0, EXAMPLES)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dataset, held_out = data()
        train = build(make, dataset, size, fast, held_out)
        if build is by_fnloop:
            pairs = zip(train(), by_hand(make, dataset, size, fast, held_out)(), strict=True)
            far = max(abs(mine - right) for mine, right in pairs)
            print(f"losses are {far:.1g} from those by hand", file=sys.stderr)
            if far > (0.01 if fast else 0.0):
                raise SystemExit("so the work is not the same")

        def once() -> float:
            train()
            return CLOCK.seconds

        return once

    return set_up


def contenders() -> Iterator[tuple[str, Callable[[], apart.Once]]]:
    for case, given in CASES.items():
        yield f"{case}: by hand", contender(by_hand, *given)
        yield f"{case}: fnloop", contender(by_fnloop, *given)


CONTENDERS = dict(contenders())

if __name__ == "__main__":
    apart.main(CONTENDERS)
