"""Optimizers of which each process keeps the state of its own parameters."""

import itertools

import pytest
import torch
import torch.distributed as dist
from joined import COUNTS, difference, flat, in_double, join, rank, said, world
from launch import reads, written_by
from process_data import loader
from process_problems import created, entropy
from several import split
from torch import nn

import fnloop as fl
from fnloop._core.optimizers import optimizers_in

pytestmark = pytest.mark.slow


class Owned(torch.optim.Optimizer):
    """SGD with momentum. Each process updates some parameters, and all exchange the updates."""

    counts = False

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                update = torch.zeros_like(p)
                if self.counts:  # an entry that all processes have, beside one that one process has
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                if i % world() == rank():
                    held = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    update = held.mul_(group["momentum"]).add_(p.grad).clone()
                    if self.counts:
                        update /= self.state[p]["step"]
                if world() > 1:
                    dist.all_reduce(update)
                p.sub_(update, alpha=group["lr"])


class Counted(Owned):
    counts = True


def several(params):
    matrices, rest = split(params)
    return {"matrices": Owned(matrices), "rest": torch.optim.SGD(rest, lr=0.1, momentum=0.9)}


def zero(params):
    if world() == 1:
        return torch.optim.Adam(params, lr=0.01)
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    return ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01)


KINDS = {"owned": Owned, "counted": Counted, "several": several, "zero": zero, "background": Owned}
weights = lambda state: flat(fl.unwrap(state).parameters())


def made(kind, shift=0.0):
    state = created(optimizer=KINDS[kind])
    with torch.no_grad():
        fl.unwrap(state)[0].bias.add_(shift)
    return state


def trained(state, epochs, hooks=()):
    return fl.fit(fl.pipeline()(entropy), state, loader(), epochs=epochs, hooks=hooks)


def saving(kind, folder):
    return (fl.every(epochs=1)(fl.checkpoint(folder, background=kind == "background")),)


def keys(state):
    found = {}
    for name, p in fl.unwrap(state).named_parameters():
        for one in optimizers_in(state.optimizer).values():
            held = getattr(one, "optim", one).state.get(p)
            found |= {name: sorted(held)} if held else {}
    return found


@in_double
def straight(folder):
    found = {}
    for kind in KINDS:
        half = trained(made(kind), 1, saving(kind, folder / kind))
        fl.save(half, folder / f"{kind} saved")
        found[kind] = {"kept": keys(half), "weights": weights(trained(half, 3))}
    return found


@reads(straight, COUNTS)
@in_double
def resumed(folder):
    found = {}
    for n, kind in itertools.product(COUNTS, KINDS):
        where, own = written_by(straight, n, folder), folder / f"{kind} of {n}"
        kept = keys(fl.resume(where / kind, made(kind, 1.0)))
        state = fl.restore(where / f"{kind} saved", made(kind, 1.0))
        fl.save(state, own / "at once")  # nothing has changed since: all are copies
        state = fl.restore(own / "at once", made(kind, 1.0))
        copied = state if kind == "zero" else fl.snapshot(state)  # it holds a process group
        half = trained(copied, 2, saving(kind, own / "half"))
        again = trained(fl.resume(own / "half", made(kind, 2.0)), 3)
        found[f"{kind} of {n}"] = [kept, weights(trained(half, 3)), weights(again)]
    return found


@pytest.mark.parametrize("m", [pytest.param(1, marks=pytest.mark.long), 2, 3])
@pytest.mark.parametrize("n", COUNTS)
def test_a_run_of_n_processes_is_continued_by_m_and_again(launched, n, m):
    """A copy that another process continues does not count when m processes save."""
    whole, (expected,) = launched(straight, n), launched(straight, 1)
    for right, mine in zip(whole * 3, launched(resumed, m), strict=False):
        for kind in KINDS:
            kept, found, again = mine[f"{kind} of {n}"]
            assert again == found, kind  # bit for bit
            assert difference(expected[kind]["weights"], found) < 1e-9, kind
            if n == m:
                assert found == right[kind]["weights"] and kept == right[kind]["kept"], kind


class Rows(Owned):
    """Each process keeps the momentum of its own rows, under the same name."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                own = p.grad.flatten().tensor_split(world())[rank()]
                self.state[p].setdefault("momentum", torch.zeros_like(own)).mul_(0.9).add_(own)


class Described(Owned):
    def state_dict(self):
        return super().state_dict()


def refused(folder):
    join()
    found = {}
    for kind in (Rows, Described):
        state = created(optimizer=kind)
        hooks = (fl.checkpoint(folder / kind.__name__),)
        found[kind.__name__] = said(lambda state=state, hooks=hooks: trained(state, 1, hooks))
        found[f"{kind.__name__} began"] = state.step, bool(state.optimizer.state)
    state = trained(state, 1)
    found["Described saved"] = said(lambda: fl.save(state, folder / "saved"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    own = torch.optim.SGD(model[rank()].parameters(), lr=0.1)
    other = fl.TrainState.create(model, own, seed=0)
    found["groups"] = said(lambda: fl.save(other, folder / "groups"))
    return found


def test_what_cannot_be_merged_is_refused_before_the_first_update(launched):
    part = "processes 0 and 1 each keep another part of the state under the name"
    for found in launched(refused, 2):
        for kind, name in {"Rows": "0.weight.momentum", "Described": "state_dict.state.0"}.items():
            begun = f"a run with {kind} on 2 processes cannot be resumed bit for bit"
            assert f"{begun}: {part} {name}" in found[kind]
            assert found[f"{kind} began"] == [0, False]
        kept = "Described keeps state.0.momentum in process 0 and not in process 1"
        assert f"{kept}. A checkpoint cannot merge that, because" in found["Described saved"]
        only = "only in process 0: 0.bias, 0.weight; only in process 1: 1.bias, 1.weight"
        assert only in found["groups"]
