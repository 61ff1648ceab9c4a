"""What a process does that has no batch left: nothing, unless the loss function exchanges data."""

import pytest
import torch
import torch.distributed as dist
from joined import logged, rank, said, world
from launch import reads, written_by
from process_problems import created
from torch import nn

import fnloop as fl

pytestmark = pytest.mark.slow

GROUPS = []  # a group of the user's own


def gathered(x, group=None):
    """Return what all processes have, with the gradient of this process's part."""
    parts = [torch.empty_like(x) for _ in range(world())]
    dist.all_gather(parts, x.detach(), group=group)
    parts[rank()] = x
    return torch.cat(parts)


def all_at_once(model, batch):
    return gathered(model(batch)).mean()


def in_a_group(model, batch):
    return gathered(model(batch), GROUPS[0]).mean()


def alone(model, batch):
    return model(batch).mean()


def all_ended(model, batch):
    return gathered(model(batch)).mean(), {"weight": len(batch)}


class Synchronized(nn.Module):
    """Like SyncBatchNorm, which needs GPUs, it exchanges in training only."""

    def forward(self, x):
        return x - gathered(x).mean().detach() if self.training else x


def state_of(kind="plain", lr=0.1):
    def make():
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        nn.init.ones_(model[0].weight)
        return nn.Sequential(model, Synchronized()) if kind == "synchronized" else model

    return created(kind == "sharded", lambda ps: torch.optim.SGD(ps, lr=lr), make)


def fitted(loss, train, valid=(), kind="plain", epochs=2):
    loaders = {"train": train, **({"valid": valid} if valid else {})}
    with logged() as lines:
        state = fl.fit(fl.pipeline()(loss), state_of(kind, 0.0), loaders, hooks=(), epochs=epochs)
    return {
        "said": [line for line in lines if "exchanges data" in line],
        "counters": [state.step, state.epoch, state.batch],
        "losses": state.history[("valid" if valid else "train") + "/loss"],
    }


def runs(folder):
    """Train on five batches of the numbers 1 to 5, or to 7."""
    five = [torch.full((2, 1), i + 1.0) for i in range(5)]
    fl.fit(fl.pipeline()(alone), state_of(), five[:1], hooks=())  # joins the processes
    GROUPS.append(dist.new_group())
    even = fl.data.even
    found = {
        "alone": fitted(alone, five),
        "even": fitted(all_at_once, even(five), even(five)),
        "uneven": fitted(all_at_once, five, epochs=3),
        "again": fitted(all_at_once, five),
        "in a group": fitted(in_a_group, five),
        "in an evaluation": fitted(all_ended, even(five), five),
        "accumulated": fitted(alone, even([*five, *five, five[0]])),
        "sharded, alone": fitted(lambda model, batch: model(batch).mean(), five, kind="sharded"),
        "sharded": fitted(lambda model, batch: gathered(model(batch)).mean(), five, kind="sharded"),
        "synchronized": fitted(synchronized, five, kind="synchronized"),
    }
    shares = [torch.full((2, 1), float(rank()))] * (3 if rank() else 4)
    found["shares"] = fitted(alone, even(fl.sharded(shares)))
    found["shares, marked inside"] = fitted(alone, fl.sharded(even(shares)))
    step = fl.pipeline(fl.accumulate(2))(alone)
    ten = even([torch.full((2, 1), i + 1.0) for i in range(10)])
    part = fl.save(fl.fit(step, state_of(), ten, steps=1, hooks=()), folder / "part")
    whole = fl.fit(step, state_of(), ten, hooks=())
    again = fl.fit(step, fl.restore(part, state_of()), ten, hooks=())
    found["resumed"] = [[s.step, s.epoch, s.model[0].weight.item()] for s in (whole, again)]
    found["length"] = [len(even(five)), len(fl.data.take(even(five), 5))]
    return {**found, "few": said(lambda: fitted(alone, even(five[:1])))}


def synchronized(model, batch):
    return model(batch).mean()


@pytest.mark.parametrize("n", [2, 3])
def test_a_loss_function_that_is_given_a_batch_again_is_named_once(launched, n):
    update = {2: 3, 3: 2}[n]
    named = {"uneven": "all_at_once", "in a group": "in_a_group", "synchronized": "synchronized"}
    named |= {"sharded": "", "in an evaluation": "all_ended"}
    for process, mine in enumerate(launched(runs, n)):
        for name in ("alone", "even", "sharded, alone", "again"):
            assert mine[name]["said"] == []
        for name, loss in named.items():
            where = "round {} of an evaluation" if name == "in an evaluation" else "update {}"
            said = mine[name]["said"]
            assert len(said) == (process >= 5 % n)
            for line in said:
                assert f"{loss} exchanges data with the other processes, and process " in line
                assert f"process {process} has no batch left in {where.format(update)}. " in line
                assert "fl.data.even(loader)" in line


@pytest.mark.parametrize("n", [2, 3])
def test_an_even_loader_has_the_rounds_in_which_every_process_has_a_batch(launched, n):
    """Of 1 to 5 two processes take 1 to 4, whose mean is 2.5, and three take 1 to 3."""
    rounds, mean = 5 // n, {2: 2.5, 3: 2.0}[n]
    for mine in launched(runs, n):
        assert mine["even"]["counters"] == [2 * rounds, 2, 0]
        assert mine["even"]["losses"] == [mean, mean]
        assert mine["accumulated"]["counters"] == [2 * (11 // n), 2, 0]
        for name in ("shares", "shares, marked inside"):  # of 4 and 3 batches the shortest
            assert mine[name]["counters"] == [6, 2, 0]
            assert mine[name]["losses"] == pytest.approx([sum(range(n)) / n] * 2)
        whole, again = mine["resumed"]
        assert whole == again
        assert mine["length"] == [rounds * n] * 2
        few = "ValueError: the training loader gave no batch in epoch 1. With even("
        assert mine["few"].startswith(few)


@reads(runs, (2,))
def continued(folder):
    state = fl.restore(written_by(runs, 2, folder) / "part", state_of())
    step, ten = fl.pipeline(fl.accumulate(4))(alone), fl.data.even([torch.ones(2, 1)] * 10)
    return [state.step, state.batch, fl.fit(step, state, ten, hooks=()).step]


def test_an_even_loader_continues_on_one_process(launched):
    """After four of ten batches on two processes, one process takes the other six."""
    assert launched(continued, 1) == [[1, 4, 3]]
