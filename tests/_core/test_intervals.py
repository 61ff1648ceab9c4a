"""Running metrics of the epoch and of the interval since the last record, in one pass."""

import copy
import itertools

import pytest
import torch
from test_torchmetrics_collections import (
    CLASSES,
    ForwardInside,
    Total,
    classification,
    collection,
    torchmetrics,
)
from torch.utils._python_dispatch import TorchDispatchMode

import fnloop as fl
from fnloop import Last, Max, Mean, Min
from fnloop._core.metrics import (
    RECENT,
    update_,
    update_both_,
    update_loss_,
    update_losses_,
    without_recent,
)
from fnloop._core.saved import Pending

# of AUROC, in batches without one of the classes
pytestmark = pytest.mark.filterwarnings("ignore:No (positive|negative) samples")


class Counts(torchmetrics.Metric):
    """The number and the largest of the values."""

    full_state_update = False

    def __init__(self, start=0, reduction="sum"):
        super().__init__()
        self.add_state("count", torch.tensor(start), dist_reduce_fx=reduction)
        self.add_state("most", torch.tensor(-torch.inf), dist_reduce_fx="max")

    def update(self, values, target):
        self.count += len(values)
        self.most = torch.maximum(self.most, values.max())

    def compute(self):
        return self.count * self.most


class Dependent(Counts):
    """A metric whose update may depend on what it has seen."""

    full_state_update = None


def of_classes(name, **settings):
    return getattr(classification, f"Multiclass{name}")(CLASSES, validate_args=False, **settings)


EXACT = {
    "counts": lambda: of_classes("Accuracy"),
    "lists": lambda: of_classes("AUROC"),
    "extremes": Counts,
    "a collection": collection,
    "a collection with a prefix": lambda: collection(prefix="a_", postfix="_b"),
    "a collection without groups": lambda: collection(compute_groups=False),
    "a collection with given groups": lambda: collection(
        compute_groups=[["recall", "precision"], ["auroc"]]
    ),
}
OTHERS = {
    "a sum of floats": Total, "a count that begins at 1": lambda: Counts(start=1),
    "a reduction of the user's": lambda: Counts(reduction=lambda parts: parts.sum(0)),
    "no reduction": lambda: Counts(reduction=None),
    "an update that may depend on the state": Dependent,
    "a metric in a metric": lambda: ForwardInside(Counts()),
    "a collection with one of them": lambda: torchmetrics.MetricCollection([Counts(), Total()]),
}  # fmt: skip
# of floats, whose bits are those of each pass by itself
OWN = {
    "mean": lambda x: Mean(x, 3),
    "mean of tensor weight": lambda x: Mean(x, torch.tensor(3.5)),
    "mean of floats": lambda x: Mean(x.item(), 3), "sum": fl.Sum, "min": Min, "max": Max,
    "last": Last,
}  # fmt: skip
TORCHMETRICS = EXACT | OTHERS
KINDS = {**TORCHMETRICS, **OWN}
kinds = pytest.mark.parametrize("kind", KINDS)


def batches(count):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.rand(n, CLASSES, generator=draw), torch.randint(CLASSES, (n,), generator=draw))
        for n in (1 + i % 3 for i in range(count))
    ]


VALUES = torch.tensor([0.1, 0.7, -1e-9, 3e7, 0.3, -0.0])


def function(kind):
    """Return a metric function, of a kind or of a metric of torchmetrics."""
    if kind in OWN:
        return lambda aux, batch: OWN[kind](VALUES[int(1e6 * batch[0].sum()) % 6].clone())
    return fl.from_torchmetrics(KINDS[kind](), lambda aux, batch: batch)


def bits(metrics):
    """Return what each metric has seen, in the order in which it was seen."""
    found = {}
    for name, metric in metrics.items():
        values = metric.compute()
        values = values if isinstance(values, dict) else {"": values}
        updates = metric.to_parts().get("updates") if hasattr(metric, "to_parts") else None
        found[name] = updates, {part: float(value).hex() for part, value in values.items()}
    return found


def alone(metric, data, interval):
    """Return the metric of the epoch, and that of the interval, each updated by itself."""
    epoch, recent = {}, {}
    for i, batch in enumerate(data):
        epoch = update_(epoch, {"m": metric({}, batch)})
        recent = update_({} if i % interval == 0 else recent, {"m": metric({}, batch)})
    return {**epoch, RECENT + "m": recent["m"]}


def both(metric, data, interval, at=None, change=lambda running: running):
    """Return both, updated together, and changed before one of the batches."""
    running = {}
    for i, batch in enumerate(data):
        running = without_recent(running) if i % interval == 0 else running
        running = change(running) if i == at else running
        running = update_both_(running, {"m": metric({}, batch)})
        yield running


def saved(running):
    """Return running metrics of torchmetrics as a checkpoint holds them."""
    return {
        name: Pending("fnloop.TorchMetric", copy.deepcopy(metric.to_parts()))
        for name, metric in running.items()
    }


CHANGES = {
    "a copy": copy.deepcopy,
    "two copies": lambda running: {name: copy.deepcopy(m) for name, m in running.items()},
    "a checkpoint": saved,
}


RESTORED_AS_THEMSELVES = [(kind, "a checkpoint") for kind in OWN]


@kinds
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_epoch_and_the_interval_are_each_as_if_alone(kind, interval):
    metric, data = function(kind), batches(5)
    for i, running in enumerate(both(metric, data, interval)):
        before = bits(running)
        assert before == bits(alone(metric, data[: i + 1], interval))
        assert bits(running) == before  # to read changes nothing
    if kind in TORCHMETRICS:  # only what merges exactly is updated once
        merges = running["m"].later is running[RECENT + "m"].seen
        assert merges == (kind in EXACT)


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
@pytest.mark.parametrize(
    ("kind", "change"),
    [case for case in itertools.product(KINDS, CHANGES) if case not in RESTORED_AS_THEMSELVES],
)
def test_they_continue_after_a_copy(kind, change, at):
    metric, data = function(kind), batches(5)
    *_, running = both(metric, data, 2, at, CHANGES[change])
    assert bits(running) == bits(alone(metric, data, 2))


@pytest.mark.parametrize("interval", [1, 2, 6])
def test_a_metric_is_updated_once_per_batch(monkeypatch, interval):
    updates = []
    monkeypatch.setattr(Counts, "update", lambda self, *args: updates.append(args))
    for _ in both(function("extremes"), batches(6), interval):
        pass
    assert len(updates) == 6


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
            once = update_(once, new)
        with Calls() as together:
            twice = update_both_(twice, new)
    assert (alone.count, together.count) == (1, 1)


class Root(Mean):
    """The root of a mean, a metric of a user's."""

    def compute(self):
        return (self.total / self.weight).item() ** 0.5


def test_a_mean_that_computes_something_else_stays_one():
    found = {}
    for _ in range(3):
        found = update_both_(found, {"root": Root(torch.tensor(32.0), 2)})
    assert (found["root"].compute(), found[RECENT + "root"].compute()) == (4.0, 4.0)


def test_an_interval_after_nan_or_of_other_tensors_is_continued():
    nan = update_both_({}, mean(float("nan")))
    assert update_both_(without_recent(nan), mean(6.0))[RECENT + "m"].compute() == 2.0
    a, b = (update_both_({}, mean(x)) for x in (1.0, 5.0))
    found = update_both_({**without_recent(a), RECENT + "m": b[RECENT + "m"]}, mean(3.0))
    assert (found["m"].compute(), found[RECENT + "m"].compute()) == (2 / 3, 4 / 3)
    epoch, recent = (Mean(torch.tensor([x, 9.0]).double()[0], n) for x, n in ((6.0, 2), (4.0, 1)))
    added = update_losses_(epoch, recent, torch.tensor(3.0), 2)
    assert [metric.compute() for metric in added] == [12 / 4, 10 / 3]


@pytest.mark.parametrize("kind", ["a collection", "mean"])
def test_a_copy_continues_by_itself(kind):
    metric, data = function(kind), batches(6)
    *_, running = both(metric, data[:4], 3)
    kept, before = copy.deepcopy(running), bits(running)
    running = update_both_(without_recent(running), {"m": metric({}, data[4])})
    assert bits(kept) == before
    kept = update_both_(without_recent(kept), {"m": metric({}, data[4])})
    assert bits(kept) == bits(running)


def test_the_epoch_continues_without_records():
    metric, data = function("a collection"), batches(5)
    *_, running = both(metric, data[:4], 3)
    running = update_(without_recent(running), {"m": metric({}, data[4])})
    assert bits(running) == bits(update_({}, {"m": alone(metric, data, 5)["m"]}))
