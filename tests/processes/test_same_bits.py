"""With ``exact=True``, a run has the same bits on any number of processes.

The job ``table`` trains a table of cases on 1, 2, 3 and 4 processes, each update from 12 batches of
2 samples in all. There are 41 samples: the last window has 9 batches, the last of them 1 sample.
"""

import hashlib
import logging
import random

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from joined import join, rank, said, world
from launch import reads, written_by
from process_data import loader
from process_metrics import changing, kinds, torchmetrics, with_metrics
from process_problems import (
    adam_sgd,
    adamw,
    by_tokens,
    convolutions,
    created,
    dropping,
    entropy,
    network,
)
from sample_hooks import stop_at
from sample_middleware import noise
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop._core.optimizers import optimizers_in

pytestmark = pytest.mark.slow
FOUR = pytest.param(4, marks=pytest.mark.long)
TOGETHER = 12  # batches of an update, in all processes
begun = lambda model, optimizer, exact=True: created(False, optimizer, model, exact=exact)
in_bf16 = lambda model, batch: entropy(model, (batch[0].bfloat16(), *batch[1:]))
window = lambda: fl.accumulate(TOGETHER // world())
momentum = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
newest = lambda: fl.metric(first=lambda aux, batch: fl.Last(batch[3][0]))
last_channels = lambda: convolutions().to(memory_format=torch.channels_last)


class Odd(nn.Module):
    """A layer that only some batches use, another that none does, and one of float64."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.never = nn.Linear(6, 3), nn.Linear(3, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        hidden = self.first(x)
        return (self.second(hidden) if x[0, 0] > 1 else hidden) * self.scale.float()


def drawing(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random()), aux


def choosy(model, batch):
    """Leave some batches out, and those of the first window nearly all."""
    return by_tokens(model, batch) if batch[3][0] % 5 < 2 else fl.skip("does not fit")


def weightless(model, batch):
    loss, aux = by_tokens(model, batch)
    return loss, {"weight": aux["weight"] * (batch[3][0] % 2)}


def cases():
    usual = fl.clip(0.5), fl.schedule(fl.schedules.cosine(warmup=0.1)), fl.ema(0.9)
    return {
        "all": (dropping, adamw, (window(), *usual, kinds(), newest()), drawing),
        "tokens": (dropping, adamw, (window(), fl.clip(0.1)), by_tokens),
        "weights of zero": (network, adamw, (window(),), weightless),
        "skips": (dropping, momentum, (window(),), choosy),
        "bf16": (dropping, adamw, (fl.amp("bf16"), window(), fl.clip(0.5)), entropy),
        "fp16": (network, momentum, (fl.amp("fp16", init_scale=2.0**18), window()), entropy),
        "bf16 weights": (lambda: network().bfloat16(), momentum, (window(),), in_bf16),
        "clip inside": (dropping, adamw, (fl.clip(0.1), noise(0.01), window()), by_tokens),
        "skips inside": (dropping, momentum, (fl.clip(0.1), window()), choosy),
        "pieces": (dropping, adamw, (fl.microbatch(1), window()), by_tokens),
        "pieces inside": (network, momentum, (fl.microbatch(1), fl.clip(0.1), window()), by_tokens),
        "sam": (dropping, momentum, (window(), fl.sam()), entropy),
        "unused": (Odd, adamw, (window(), fl.skip_nonfinite()), entropy),
        "channels last": (last_channels, adamw, (window(), fl.clip(0.5)), entropy),
        "several": (dropping, adam_sgd, (window(),), entropy),
        "torchmetrics": (network, momentum, (window(), fl.metric(**torchmetrics())), entropy),
        # 16 batches: on three processes 6, 5 and 5
        "a total": (dropping, adamw, (fl.accumulate(total=32), *usual), drawing),
    }


def bits_of(state):
    """Return a hash of the weights, the optimizers' states, the averages and the history."""
    found, tensors = hashlib.sha256(), [*state.model.state_dict().values()]
    for optimizer in optimizers_in(state.optimizer).values():
        for of_one in optimizer.state_dict()["state"].values():
            tensors += [value for value in of_one.values() if isinstance(value, torch.Tensor)]
    for tensor in (*tensors, *state.slots.get("ema", {}).values()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    # A run that continues makes its records as if a closing one did not exist.
    rows = [[*record.metrics.items()] for record in state.history if not record.closing]
    found.update(repr([rows, state.step, state.skipped, state.epoch, state.extra]).encode())
    return found.hexdigest()


def trained(case, exact=True, state=None, **settings):
    model, optimizer, middleware, loss = case
    state = begun(model, optimizer, exact) if state is None else state
    loaders = {"train": loader(size=2, shuffle=True), "valid": loader(size=3)}
    settings = {"epochs": 2, "hooks": (), "record_every": fl.every(steps=1), **settings}
    return fl.fit(fl.pipeline(*middleware)(loss), state, loaders, **settings)


def joined():
    logging.disable()
    join()


def table(folder):
    joined()
    return {name: bits_of(trained(case)) for name, case in cases().items()}


@pytest.mark.parametrize("n", [3, FOUR])
def test_the_bits_are_the_same_on_any_number_of_processes(launched, n):
    (one,) = launched(table, 1)
    assert launched(table, n) == [one] * n


# --- resume


RESUMED = ("all", "skips", "a total")
STEPS = 3  # of 4; each epoch has 2


def saves(folder):
    """Save runs in the middle of an epoch, and return the bits of those that are not stopped."""
    joined()
    for name in RESUMED:
        fl.save(trained(cases()[name], hooks=(stop_at(STEPS),)), folder / name)
    return [bits_of(trained(cases()[name])) for name in RESUMED]


@reads(saves, (1, 2, 3))
def resumes(folder):
    joined()
    found = {}
    for n in (1, 2, 3):
        saved = written_by(saves, n, folder)
        for name in RESUMED:
            model, optimizer, *_ = cases()[name]
            state = fl.restore(saved / name, begun(model, optimizer))
            state = trained(cases()[name], state=attrs.evolve(state, stop=None))
            found[f"{name} from {n}"] = bits_of(state)
    return found


@pytest.mark.parametrize("n", [1, 3, FOUR])
def test_a_run_saved_on_any_number_of_processes_continues_with_the_same_bits(launched, n):
    whole = dict(zip(RESUMED, launched(saves, 1)[0], strict=True))
    expected = {f"{name} from {m}": whole[name] for m in (1, 2, 3) for name in RESUMED}
    assert launched(resumes, n) == [expected] * n


# --- what is refused


def refused(folder):
    joined()
    usual = {"train": loader(size=2)}

    def gathering(model, batch):
        loss, _ = entropy(model, batch)
        dist.all_reduce(torch.zeros(1))
        return loss

    odd = lambda state, out, batch: with_metrics(out, odd=fl.Sum(1)) if rank() else out
    at_odds = changing("forward", odd)

    def fit(step, data=usual):
        fl.fit(step, begun(network, momentum), data, epochs=1, hooks=())

    shares = fl.sharded([next(iter(loader(size=2)))])
    return [
        said(lambda: created(fully_shard, exact=True)),
        said(lambda: fit(fl.pipeline()(gathering))),
        said(lambda: fit(fl.pipeline(at_odds)(entropy))),
        said(lambda: fit(fl.pipeline()(entropy), {"train": shares})),
    ]


def test_what_cannot_be_exact_on_several_processes_is_refused(launched):
    for sharding, gathering, at_odds, shares in launched(refused, 2):
        assert sharding.startswith("NotImplementedError: exact=True needs the whole model")
        assert gathering.startswith("NotImplementedError: exact=True: the loss function exchanges")
        assert at_odds.startswith("ValueError: exact=True: every batch has to report the same")
        assert shares.startswith("NotImplementedError: exact=True needs one order of all batches")
