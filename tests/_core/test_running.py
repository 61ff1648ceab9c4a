"""Running metrics of the epoch and of the interval since the last record, in one pass."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fnloop import Last, Max, Mean, Min, Sum
from fnloop._core.metrics import (
    RECENT,
    update_,
    update_both_,
    update_loss_,
    update_losses_,
    without_recent,
)

VALUES = [0.1, 0.7, -1e-9, 3e7, 0.3, -0.0]
KINDS = {
    "mean": lambda x: Mean(torch.tensor(x), 3),
    "mean of tensor weight": lambda x: Mean(torch.tensor(x), torch.tensor(3.5)),
    "mean of floats": lambda x: Mean(x, 3),
    "sum": lambda x: Sum(torch.tensor(x)),
    "min": lambda x: Min(torch.tensor(x)),
    "max": lambda x: Max(torch.tensor(x)),
    "last": lambda x: Last(torch.tensor(x)),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def bits(running):
    return {name: float(metric.compute()).hex() for name, metric in running.items()}


@kinds
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_epoch_and_the_interval_are_each_as_if_alone(make, interval):
    both, epoch = {}, {}
    for i, value in enumerate(VALUES):
        if i % interval == 0:
            both, recent = without_recent(both), {}
        both = update_both_(both, {"m": make(value)})
        epoch, recent = update_(epoch, {"m": make(value)}), update_(recent, {"m": make(value)})
        assert bits(both) == bits({**epoch, RECENT + "m": recent["m"]})


@pytest.mark.parametrize("weight", [3, torch.tensor(3), torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_losses_too(weight, interval):
    both = epoch = recent = None
    for i, value in enumerate(VALUES):
        loss = torch.tensor(value)
        if i % interval == 0:
            both, recent = (both and both[0], None), None
        both = update_losses_(*both, loss, weight)
        epoch, recent = update_loss_(epoch, loss, weight), update_loss_(recent, loss, weight)
        assert bits(dict(enumerate(both))) == bits({0: epoch, 1: recent})


@pytest.mark.parametrize("copied_after", range(6))
def test_a_copy_continues_by_itself(copied_after):
    running = {}
    for i, value in enumerate(VALUES):
        if i == copied_after:
            before, running = running, copy.deepcopy(running)
            kept = bits(before)
        running = update_both_(running, {"m": KINDS["mean"](value)})
    assert bits(before) == kept
    expected = {}
    for value in VALUES:
        expected = update_(expected, {"m": KINDS["mean"](value)})
    assert bits(running) == bits({**expected, RECENT + "m": expected["m"]})


def test_within_an_interval_the_second_mean_takes_no_operation_of_its_own():
    once, twice, mean = {}, {}, KINDS["mean"](1.0)
    for _ in range(3):
        with Calls() as alone:
            once = update_(once, {"m": mean})
        with Calls() as together:
            twice = update_both_(twice, {"m": mean})
    assert (alone.count, together.count) == (1, 1)


def test_an_interval_after_nan_is_not_nan():
    nan = update_both_({}, {"m": KINDS["mean"](float("nan"))})
    running = update_both_(without_recent(nan), {"m": KINDS["mean"](6.0)})
    assert running[RECENT + "m"].compute() == 2.0


def test_an_interval_of_other_tensors_is_continued():
    a, b = (update_both_({}, {"m": KINDS["mean"](x)}) for x in (1.0, 5.0))
    mixed = {**without_recent(a), RECENT + "m": b[RECENT + "m"]}
    found = update_both_(mixed, {"m": KINDS["mean"](3.0)})
    assert (found["m"].compute(), found[RECENT + "m"].compute()) == (2 / 3, 4 / 3)


def test_means_of_an_epoch_and_of_an_interval_in_tensors_of_their_own_are_both_added_to():
    double = torch.float64
    epoch = Mean(torch.tensor([6.0, 9.0], dtype=double)[0], 2)
    recent = Mean(torch.tensor([4.0, 9.0], dtype=double)[0], 1)
    added = update_losses_(epoch, recent, torch.tensor(3.0), 2)
    assert [mean.compute() for mean in added] == [12 / 4, 10 / 3]
