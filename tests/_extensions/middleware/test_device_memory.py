"""device_memory: peaks between records, reset at each of them."""

import resource
import sys

import pytest
import torch
from toy_runs import ONE, fitted, noting, xs

import fnloop as fl
from fnloop._extensions.middleware import times
from fnloop.testing import toy, toy_loss

NAME = "memory/peak_gib"


@pytest.fixture
def gauge(monkeypatch):
    """A device whose peak is the largest GiB since its reset; a batch of x takes x GiB."""

    class Gauge:
        peak, resets = 0.0, 0

        def take(self, gib):
            self.peak = max(self.peak, gib)

        def reset(self, device):
            self.peak, self.resets = 0.0, self.resets + 1

    found = Gauge()
    monkeypatch.setattr(times, "_peak_gib", lambda device: found.peak)
    monkeypatch.setattr(times, "_reset", found.reset)
    times._gauge.cache_clear()
    yield found
    times._gauge.cache_clear()


def taking(gauge):
    return lambda model, batch: gauge.take(batch.max().item()) or toy_loss(model, batch)


def taken(gauge, sizes, **settings):
    """Return the largest of each record between epochs and of each epoch."""
    history = fitted(sizes, fl.device_memory(), loss_fn=taking(gauge), **settings).history
    names = f"recent/{NAME}", f"train/{NAME}"
    return [history[name] for name in names if name in history]


def test_the_largest_of_the_epoch_and_of_the_interval(gauge):
    found = taken(gauge, [1, 9, 2, 3, 4, 5], record_every=fl.every(steps=2))
    assert found == [(9.0, 3.0, 5.0), (9.0,)]


def test_every_epoch_begins_again(gauge):
    orders = iter([(1, 9), (3, 2)])
    assert taken(gauge, lambda: iter(xs(*next(orders))), epochs=2) == [(9.0, 3.0)]
    assert gauge.resets == 2  # by the first update after each record, not by every update


def test_an_evaluation_counts_in_its_record(gauge):
    assert taken(gauge, {"train": [ONE] * 2, "valid": xs(30)}) == [(30.0,)]


def test_a_look_in_between_loses_nothing(gauge):
    note, seen = noting(lambda state: state.metrics[NAME].compute() if state.batch else 7.0)
    assert taken(gauge, [7, 1, 2], hooks=(note,)) == [(7.0,)]
    assert seen == [7.0] * 3


def test_a_checkpoint_keeps_the_peak(gauge, tmp_path):
    half = fitted([8, 1, 2], fl.device_memory(), loss_fn=taking(gauge), steps=1)
    gauge.reset(None)
    again = fl.restore(fl.save(half, tmp_path / "a"), toy())
    assert taken(gauge, [8, 1, 2], state=again)[-1][-1] == 8.0


def test_the_resident_memory_of_a_process():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    found = fitted([1], fl.device_memory()).history.latest(f"train/{NAME}")
    assert found == pytest.approx(peak, rel=0.1)


def test_a_bare_step(gauge):
    gauge.take(4.0)
    _, out = fl.pipeline(fl.device_memory())(toy_loss)(toy(), torch.ones(1))
    assert out.metrics[NAME].compute() == 4.0 and gauge.resets == 0


def test_a_system_that_does_not_tell(monkeypatch):
    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(RuntimeError, match="this system does not tell the memory of a process"):
        fitted([1], fl.device_memory())
