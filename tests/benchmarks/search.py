"""What ``search`` costs beside the same updates by hand: 27 states on handwritten digits.

    python tests/benchmarks/search.py

The states are nine learning rates times three weight decays, and the rungs 1, 3 and 9 epochs: 63
epochs in all, each with an evaluation. By hand means: a loop for each state, which trains it to its
rung and evaluates it, without fnloop imported. Each makes the same 1,890 updates of 50 images. How
it is measured is in ``apart.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import apart
from costs import State, loss_fn

RATES = [0.0003, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03, 0.1]
DECAYS = [0.0, 0.1, 1.0]
RUNGS = (1, 3, 9)


def make(lr: float = 0.01, decay: float = 0.0) -> State:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=decay, fused=True)


def digits(shuffled: bool) -> tuple[Any, Any]:
    """Return what to train on, and what to evaluate: batches in a list, or a DataLoader."""
    import torch
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    train = DataLoader(TensorDataset(x[:1500], y[:1500]), 50, shuffle=shuffled)
    valid = [(x[1500:], y[1500:])]
    return (train if shuffled else [*train]), valid


def by_hand(shuffled: bool) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import torch
        from by_hand import train

        batches, valid = digits(shuffled)

        def once() -> float:
            left = [make(lr, decay) for lr in RATES for decay in DECAYS]
            begin, reached = apart.Clock.now(), 0
            for epoch in RUNGS:
                values = []
                for model, optimizer in left:
                    for _ in range(reached, epoch):
                        model.train()
                        train(model, optimizer, batches)
                        model.eval()
                        with torch.no_grad():
                            value = sum(loss_fn(model, batch) for batch in valid).item()
                    values.append(value)
                reached = epoch
                order = sorted(range(len(left)), key=values.__getitem__)
                left = [left[i] for i in order[: len(left) // 3]]
            return apart.Clock.now() - begin

        return once

    return set_up


def searched(shuffled: bool, saves: bool = False) -> Callable[[], apart.Once]:
    def set_up() -> apart.Once:
        import fnloop as fl

        batches, valid = digits(shuffled)
        step, nowhere = fl.pipeline()(loss_fn), open(os.devnull, "w")  # noqa: SIM115  # until the end

        def once() -> float:
            states = fl.fork(
                fl.TrainState.create(*make(), seed=0), {"lr": RATES, "weight_decay": DECAYS}
            )
            folder = tempfile.mkdtemp() if saves else None
            with redirect_stdout(nowhere):
                begin = apart.Clock.now()
                fl.search(step, states, (batches, valid), rungs=RUNGS, folder=folder)
                took = apart.Clock.now() - begin
            if folder is not None:
                shutil.rmtree(folder)
            return took

        return once

    return set_up


CONTENDERS = {
    "batches in a list: by hand": by_hand(shuffled=False),
    "batches in a list: search": searched(shuffled=False),
    "batches in a list: search, folder=": searched(shuffled=False, saves=True),
    "a shuffled DataLoader: by hand": by_hand(shuffled=True),
    "a shuffled DataLoader: search": searched(shuffled=True),
    "a shuffled DataLoader: search, folder=": searched(shuffled=True, saves=True),
}

if __name__ == "__main__":
    apart.main(CONTENDERS)
