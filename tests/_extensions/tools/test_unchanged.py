"""What tries or looks at a run changes no state, no draws, and nothing that it does after that."""

import copy
import random

import pytest
import torch
from loop_cases import generators
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from toy_runs import of

import fnloop as fl
import fnloop.data
from fnloop._extensions.tools import tune
from fnloop.debug import check_script
from fnloop.testing import assert_same, small, toy, toy_loss

SAMPLES = TensorDataset(*map(torch.cat, zip(*small().batches, strict=True)))


def shuffled(size):
    return DataLoader(SAMPLES, batch_size=size, shuffle=True)


class Counter(nn.Module):
    """Changes a buffer in evaluation too, as the observers of fake quantization do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x


def net():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), Counter(), nn.Dropout(0.3), nn.Dropout().eval(), nn.Linear(8, 1)
    return of(nn.Sequential(*layers).double(), torch.optim.AdamW, lr=0.01)


TOOLS = {
    "dry_run": lambda *given: fl.dry_run(*given).problems,
    "find_lr": lambda *given: fl.find_lr(*given, updates=12),
    "find_batch_size": lambda step, state, _: fl.find_batch_size(step, state, shuffled, most=6),
    "summary": lambda step, state, _: repr(fl.summary(state, SAMPLES[:4])),
    "check_script": lambda *given: check_script(*given).problems,
    "evaluate": fl.evaluate,
}


@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_changes(tool):
    metric = fl.metric(a=lambda aux, batch: batch[1].mean())
    members = fl.clip(1.0), fl.ema(0.9), metric, fl.schedule(lambda i, total: 1 - i / total)
    step, loader = fl.pipeline(*members)(small().loss_fn), shuffled(4)
    state = fl.fit(step, net(), loader, steps=2, hooks=())
    before, drawn = fl.snapshot(state), generators()
    modes = [module.training for module in state.model.modules()]
    found = TOOLS[tool](step, state, loader)
    assert generators() == drawn
    assert_same(state, before)
    assert [module.training for module in state.model.modules()] == modes
    assert not any(module._forward_hooks for module in state.model.modules())
    assert all(p.grad is None for p in state.model.parameters())
    assert TOOLS[tool](step, state, loader) == found
    assert_same(*(fl.fit(step, s, loader, epochs=2, hooks=()) for s in (state, before)))


class Stream:
    """Continues where it was left, and draws its batches from a generator of its own."""

    def __init__(self):
        self.at, self.draws = 2, random.Random(3)

    def __iter__(self):
        self.at %= 6
        while self.at < 6:
            self.at += 1
            yield torch.tensor([self.at + self.draws.random()])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


LOADERS = {
    "a stream": Stream,
    "an even stream": lambda: fl.data.even(Stream()),
    "streams in turn": lambda: fl.data.interleave({"a": Stream(), "b": Stream()}, {"a": 1, "b": 2}),
    "a sampler": lambda: DataLoader(torch.rand(6, 1), sampler=Drawn()),
    "a generator of torch": lambda: DataLoader(
        torch.rand(6, 1), shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
}


class Drawn(Sampler):
    """Gives samples in an order that a generator of its own draws."""

    def __init__(self):
        self.draws = random.Random(4)

    def __iter__(self):
        return iter(self.draws.sample(range(6), 6))

    def __len__(self):
        return 6


READERS = {
    "dry_run": lambda step, state, loader: fl.dry_run(step, state, (loader, loader)),
    "find_lr": lambda *given: fl.find_lr(*given, updates=11),
    "find_batch_size": lambda step, state, loader: fl.find_batch_size(
        step, state, lambda size: loader, most=2
    ),
    "check_script": check_script,
    "tune": lambda *given: fl.data.tune(*given, seconds=0.001),
}


@pytest.mark.parametrize("tool", READERS)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_stays_where_it_is(kind, tool, monkeypatch):
    monkeypatch.setattr(tune, "_changes_of_loading", lambda loader, state: {})  # no processes
    torch.manual_seed(0)
    loader, step, seen = LOADERS[kind](), fl.pipeline()(toy_loss), []

    untouched = copy.deepcopy(loader)
    READERS[tool](step, toy(), loader)
    for each in (untouched, loader):
        torch.manual_seed(1)
        loss_fn = lambda model, batch: seen.append(batch.item()) or toy_loss(model, batch)
        fl.fit(fl.pipeline()(loss_fn), toy(), each, epochs=2, hooks=())
        seen.extend(torch.cat([*each]).tolist())
    half = len(seen) // 2
    assert seen[:half] == seen[half:]


def test_what_a_dry_run_restores_reads_the_same_batches():
    assert not fl.dry_run(fl.pipeline()(toy_loss), toy(), Stream()).problems
