"""What an average costs: one pass over the weights, as torch._foreach_lerp_ by hand takes.

    python tests/benchmarks/ema.py

Two ratios of medians of interleaved rounds, for a model of 10 million parameters:

* the work of ``ema`` alone, to ``torch._foreach_lerp_`` on lists that are made once;
* a whole update with ``ema``, to one without it and the same call after it.
"""

import statistics
import time

import torch
from torch import nn

import fnloop as fl
from fnloop import Output

ROUNDS, DECAY = 101, 0.999


def network():
    """Return 10.1 million parameters in 42 tensors, with batch norms."""
    layers = []
    for _ in range(10):
        layers += [nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1000, 10))


def state_of():
    torch.manual_seed(0)
    model = network()
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=0)


def loss_fn(model, batch):
    return model(batch).square().mean()


def by_hand(model):
    """Return a function that blends the model into an average."""
    sources = [
        t.detach() for t in model.state_dict(keep_vars=True).values() if t.dtype.is_floating_point
    ]
    average = [t.clone() for t in sources]
    return lambda: torch._foreach_lerp_(average, sources, 1 - DECAY)


def timed(do):
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def compare(mine, theirs):
    """Return the median times of two functions, in seconds; every round calls both."""
    for _ in range(5):
        mine(), theirs()
    pairs = []
    for i in range(ROUNDS):  # in alternating order
        a, b = (mine, theirs) if i % 2 else (theirs, mine)
        first, second = timed(a), timed(b)
        pairs.append((first, second) if i % 2 else (second, first))
    ones, others = zip(*pairs, strict=True)
    return statistics.median(ones), statistics.median(others)


def alone():
    state, member = state_of(), fl.ema(DECAY)
    state = fl.pipeline(member)(loss_fn).init_slots(state)
    out = Output(torch.zeros(()), 1)
    step = member.step(member.update(lambda state, batch: (state, out)))
    return compare(lambda: step(state, None), by_hand(state.model))


def whole():
    states = {"ema": state_of(), "plain": state_of()}
    steps = {"ema": fl.pipeline(fl.ema(DECAY))(loss_fn), "plain": fl.pipeline()(loss_fn)}
    batch, blend = torch.randn(16, 1000), by_hand(states["plain"].model)

    def update(name):
        states[name], _ = steps[name](states[name], batch)

    def plain():
        update("plain")
        blend()

    return compare(lambda: update("ema"), plain)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, measure in (("the average alone", alone), ("a whole update", whole)):
        mine, theirs = measure()
        print(
            f"{name}: {1e3 * mine:.3f} ms, by hand {1e3 * theirs:.3f} ms, ratio {mine / theirs:.3f}"
        )
