"""Metrics of torchmetrics of the epoch and of the interval since the last record, in one pass."""

import copy
import itertools

import pytest
import torch
from intervals import COPIES, alone, batches, bits, both
from test_torchmetrics_collections import (
    CLASSES,
    ForwardInside,
    Total,
    classification,
    collection,
    torchmetrics,
)

import fnloop as fl
from fnloop._core.metrics import RECENT, Metrics
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
KINDS = EXACT | OTHERS
kinds = pytest.mark.parametrize("kind", KINDS)


def function(kind):
    """Return a metric function of a metric of torchmetrics."""
    return fl.from_torchmetrics(KINDS[kind](), lambda aux, batch: batch)


def saved(running):
    """Return running metrics of torchmetrics as a checkpoint holds them."""
    return {
        name: Pending("fnloop.TorchMetric", copy.deepcopy(metric.to_parts()))
        for name, metric in running.items()
    }


CHANGES = {**COPIES, "a checkpoint": saved}


@kinds
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_epoch_and_the_interval_are_each_as_if_alone(kind, interval):
    metric, data = function(kind), batches(5)
    for i, running in enumerate(both(metric, data, interval)):
        before = bits(running)
        assert before == bits(alone(metric, data[: i + 1], interval))
        assert bits(running) == before  # to read changes nothing
    # Only what merges exactly is updated once.
    assert (running["m"].later is running[RECENT + "m"].seen) == (kind in EXACT)


@pytest.mark.parametrize("at", [2, 3])  # at a record, and between two
@pytest.mark.parametrize(("kind", "change"), [*itertools.product(KINDS, CHANGES)])
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


def test_a_copy_continues_by_itself():
    metric, data = function("a collection"), batches(6)
    *_, running = both(metric, data[:4], 3)
    kept, before = copy.deepcopy(running), bits(running)
    running = Metrics(running).without_recent().update_({"m": metric({}, data[4])}, recent=True)
    assert bits(kept) == before
    kept = Metrics(kept).without_recent().update_({"m": metric({}, data[4])}, recent=True)
    assert bits(kept) == bits(running)


def test_the_epoch_continues_without_records():
    metric, data = function("a collection"), batches(5)
    *_, running = both(metric, data[:4], 3)
    running = Metrics(running).without_recent().update_({"m": metric({}, data[4])})
    assert bits(running) == bits(Metrics().update_({"m": alone(metric, data, 5)["m"]}))
