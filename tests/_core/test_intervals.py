"""Running metrics of the epoch and of the interval since the last record, in one pass."""

import copy
import itertools

import pytest
import torch
from intervals import COPIES, OWN, VALUES, alone, batches, bits, both, own
from torch.utils._python_dispatch import TorchDispatchMode

from fnloop import Mean
from fnloop._core.metrics import RECENT, Metrics, update_loss_, update_losses_

kinds = pytest.mark.parametrize("kind", OWN)


@kinds
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_epoch_and_the_interval_are_each_as_if_alone(kind, interval):
    metric, data = own(kind), batches(5)
    for i, running in enumerate(both(metric, data, interval)):
        before = bits(running)
        assert before == bits(alone(metric, data[: i + 1], interval))
        assert bits(running) == before  # to read changes nothing


@pytest.mark.parametrize("weight", [3, torch.tensor(3), torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_losses_too(weight, interval):
    both = epoch = recent = None
    for i, loss in enumerate(VALUES):
        if i % interval == 0:
            both, recent = (both and both[0], None), None
        both = update_losses_(*both, loss, weight)
        epoch, recent = update_loss_(epoch, loss, weight), update_loss_(recent, loss, weight)
        assert bits(dict(enumerate(both))) == bits({0: epoch, 1: recent})


@pytest.mark.parametrize("at", [2, 3])  # at a record, and between two
@pytest.mark.parametrize(("kind", "change"), [*itertools.product(OWN, COPIES)])
def test_they_continue_after_a_copy(kind, change, at):
    metric, data = own(kind), batches(5)
    *_, running = both(metric, data, 2, at, COPIES[change])
    assert bits(running) == bits(alone(metric, data, 2))


class Calls(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def mean(value):
    return {"m": Mean(torch.tensor(value), 3)}


def test_within_an_interval_the_second_mean_takes_no_operation_of_its_own():
    once, twice, new = {}, {}, mean(1.0)
    for _ in range(3):
        with Calls() as alone:
            once = Metrics(once).update_(new)
        with Calls() as together:
            twice = Metrics(twice).update_(new, recent=True)
    assert (alone.count, together.count) == (1, 1)


class Root(Mean):
    """The root of a mean, a metric of a user's."""

    def compute(self):
        return (self.total / self.weight).item() ** 0.5


def test_a_mean_that_computes_something_else_stays_one():
    found = {}
    for _ in range(3):
        found = Metrics(found).update_({"root": Root(torch.tensor(32.0), 2)}, recent=True)
    assert (found["root"].compute(), found[RECENT + "root"].compute()) == (4.0, 4.0)


def test_an_interval_after_nan_or_of_other_tensors_is_continued():
    nan = Metrics().update_(mean(float("nan")), recent=True)
    nan = nan.without_recent().update_(mean(6.0), recent=True)
    assert nan[RECENT + "m"].compute() == 2.0
    a, b = (Metrics().update_(mean(x), recent=True) for x in (1.0, 5.0))
    found = Metrics({**a.without_recent(), RECENT + "m": b[RECENT + "m"]})
    found = found.update_(mean(3.0), recent=True)
    assert (found["m"].compute(), found[RECENT + "m"].compute()) == (2 / 3, 4 / 3)
    epoch, recent = (Mean(torch.tensor([x, 9.0]).double()[0], n) for x, n in ((6.0, 2), (4.0, 1)))
    added = update_losses_(epoch, recent, torch.tensor(3.0), 2)
    assert [metric.compute() for metric in added] == [12 / 4, 10 / 3]


def test_a_copy_continues_by_itself():
    metric, data = own("mean"), batches(6)
    *_, running = both(metric, data[:4], 3)
    kept, before = copy.deepcopy(running), bits(running)
    running = Metrics(running).without_recent().update_({"m": metric({}, data[4])}, recent=True)
    assert bits(kept) == before
    kept = Metrics(kept).without_recent().update_({"m": metric({}, data[4])}, recent=True)
    assert bits(kept) == bits(running)


def test_the_epoch_continues_without_records():
    metric, data = own("mean"), batches(5)
    *_, running = both(metric, data[:4], 3)
    running = Metrics(running).without_recent().update_({"m": metric({}, data[4])})
    assert bits(running) == bits(Metrics().update_({"m": alone(metric, data, 5)["m"]}))
