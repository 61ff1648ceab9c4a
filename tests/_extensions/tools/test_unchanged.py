"""What tries or looks at a run changes no state, no draws, and nothing that it does after that."""

import pytest
import torch
from loop_cases import generators
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy_runs import of

import fnloop as fl
from fnloop.debug import check_script
from fnloop.testing import assert_same, small

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
