"""Partial checkpoints of several processes, of sharded and unsharded models."""

import pytest
import torch
import torch.distributed as dist
from launch import reads, written_by
from process_problems import FEW, come_to, default_dtype, loader, said, whole, world
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl

pytestmark = pytest.mark.slow

KINDS = ("plain", "sharded")


class Adapter(nn.Module):
    def __init__(self, shift=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.up = nn.Linear(6, 3), nn.Linear(3, 3)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(shift)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.up(self.base(x))


def made(kind, shift=0.0):
    model = Adapter(shift)
    if kind == "sharded" and world() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.up.parameters(), lr=0.05)
    return fl.TrainState.create(model, optimizer, seed=0)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def partial_saves(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        for kind in KINDS:
            for part in ("model", "trained"):
                where = folder / kind / part
                saves = fl.checkpoint(
                    where, keep=1, best="valid/loss", only=(part,), named=("valid/loss",)
                )
                hooks = (fl.every(epochs=1)(saves),)
                state = fl.fit(
                    fl.pipeline()(loss), made(kind), (loader(), loader()), epochs=2, hooks=hooks
                )
                found[f"{kind} {part}"] = come_to(state)["weights"]
                found[f"{kind} {part} resumed"] = said(
                    lambda where=where: fl.resume(where, made("plain"))
                )
    return found


@reads(partial_saves, FEW)
def partial_restores(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        for n in FEW:
            for before in KINDS:
                for after in KINDS:
                    for part in ("model", "trained"):
                        where = written_by(partial_saves, n, folder) / before / part
                        state = fl.restore(fl.best(where), made(after, 1.0), only=(part,))
                        model = state.model
                        weights = {k: whole(p).tolist() for k, p in model.named_parameters()}
                        found[f"{part} of {before} on {n}, then {after}"] = weights
    return found


@pytest.mark.parametrize("n", FEW)
def test_parts_saved_on_any_number_are_restored_on_any_other(launched, n):
    with default_dtype(torch.float64):
        shifted = {k: p.tolist() for k, p in Adapter(1.0).named_parameters()}
        base = {k: p.tolist() for k, p in Adapter().named_parameters()}
    for mine in launched(partial_restores, n):
        expected = mine["model of plain on 1, then plain"]
        for name, found in mine.items():
            for k, value in found.items():
                wanted = expected[k] if "up" in k or name.startswith("model") else shifted[k]
                assert torch.allclose(torch.tensor(value), torch.tensor(wanted), rtol=1e-9), (
                    name,
                    k,
                )
        assert expected["base.weight"] == base["base.weight"]
        assert expected["up.weight"] != base["up.weight"]


@pytest.mark.parametrize("n", FEW)
def test_no_process_resumes_from_parts(launched, n):
    for mine in launched(partial_saves, n):
        for kind in KINDS:
            assert "a run cannot be resumed: " in mine[f"{kind} model resumed"]
