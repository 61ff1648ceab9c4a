"""What a process does that has no batch left: nothing, unless the loss function exchanges data."""

import pytest
import torch
import torch.distributed as dist
from process_problems import logged, rank, world
from torch import nn
from torch.distributed.fsdp import fully_shard

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


def model_of(kind):
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model[0].weight)
    if kind == "synchronized":
        model = nn.Sequential(model, Synchronized())
    if kind == "sharded":
        fully_shard(model)
    return model


def fitted(loss, train, valid=(), kind="plain", **settings):
    model = model_of(kind)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.0), seed=0)
    step = fl.pipeline()(loss)
    loaders = {"train": train, **({"valid": valid} if valid else {})}
    with logged() as lines:
        state = fl.fit(step, state, loaders, hooks=(), **{"epochs": 2, **settings})
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
    }
    with logged() as lines:
        fitted(synchronized, five, kind="synchronized")
    found["synchronized"] = [line for line in lines if "exchanges data" in line]
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
    few = fitted_or_said(even(five[:1]))
    return {**found, "saved": str(part), "few": few}


def fitted_or_said(train):
    try:
        return fitted(alone, train)
    except ValueError as error:
        return str(error)


def synchronized(model, batch):
    return model(batch).mean()


def state_of():
    model = model_of("plain")
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)


@pytest.mark.parametrize("n", [2, 3])
def test_a_loss_function_that_is_given_a_batch_again_is_named_once(launched, n):
    found = launched(runs, n)
    update = {2: 3, 3: 2}[n]
    for process, mine in enumerate(found):
        assert mine["alone"]["said"] == mine["even"]["said"] == mine["sharded, alone"]["said"] == []
        idle = process >= (5 % n)
        for name, loss in (("uneven", "all_at_once"), ("in a group", "in_a_group")):
            said = mine[name]["said"]
            assert len(said) == idle
            if idle:
                assert said[0].startswith(
                    f"{loss} exchanges data with the other processes, and process {process} has no "
                    f"batch left in update {update}. "
                )
                assert "fl.data.even(loader)" in said[0]
        assert mine["again"]["said"] == []
        assert len(mine["sharded"]["said"]) == len(mine["synchronized"]) == idle
        (*ended,) = mine["in an evaluation"]["said"]
        assert len(ended) == idle
        assert all(f"in round {update} of an evaluation" in line for line in ended)


@pytest.mark.parametrize("n", [2, 3])
def test_an_even_loader_has_the_rounds_in_which_every_process_has_a_batch(launched, n):
    """Of 1 to 5 two processes take 1 to 4, whose mean is 2.5, and three take 1 to 3."""
    found = launched(runs, n)
    rounds = 5 // n
    mean = {2: 2.5, 3: 2.0}[n]
    for mine in found:
        assert mine["even"]["counters"] == [2 * rounds, 2, 0]
        assert mine["even"]["losses"] == [mean, mean]
        assert mine["accumulated"]["counters"] == [2 * (11 // n), 2, 0]
        for name in ("shares", "shares, marked inside"):  # of 4 and 3 batches the shortest
            assert mine[name]["counters"] == [6, 2, 0]
            assert mine[name]["losses"] == pytest.approx([sum(range(n)) / n] * 2)
        whole, again = mine["resumed"]
        assert whole == again
        assert mine["length"] == [rounds * n] * 2
        assert mine["few"].startswith("the training loader gave no batch in epoch 1. With even(")


def test_an_even_loader_continues_on_one_process(launched):
    """After four of ten batches on two processes, one process takes the other six."""
    saved = launched(runs, 2)[0]["saved"]
    step = fl.pipeline(fl.accumulate(4))(alone)
    state = fl.restore(saved, state_of())
    assert [state.step, state.batch] == [1, 4]
    state = fl.fit(step, state, fl.data.even([torch.ones(2, 1)] * 10), hooks=())
    assert [state.step, state.epoch] == [3, 1]
