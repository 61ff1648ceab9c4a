"""device_memory: peaks between records, reset at each of them."""

import resource

import pytest
import torch

import fnloop as fl
from fnloop._middleware import metric
from fnloop.testing import assert_same, toy, toy_loss

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
    monkeypatch.setattr(metric, "_peak_gib", lambda device: found.peak)
    monkeypatch.setattr(metric, "_reset", found.reset)
    metric._gauge.cache_clear()
    yield found
    metric._gauge.cache_clear()


def taking(gauge):
    def loss_fn(model, batch):
        gauge.take(batch.max().item())
        return toy_loss(model, batch)

    return loss_fn


def fitted(gauge, sizes, state=None, **settings):
    step = fl.pipeline(fl.device_memory())(taking(gauge))
    batches = [torch.full((1,), float(size)) for size in sizes]
    return fl.fit(step, toy() if state is None else state, batches, **{"hooks": (), **settings})


def test_the_largest_of_the_epoch_and_of_the_interval(gauge):
    state = fitted(gauge, (1, 9, 2, 3, 4, 5), record_every=fl.every(steps=2))
    assert state.history[f"recent/{NAME}"] == (9.0, 3.0, 5.0)
    assert state.history[f"train/{NAME}"] == (9.0,)


def test_every_epoch_begins_again(gauge):
    orders = iter([(1, 9), (3, 2)])
    step = fl.pipeline(fl.device_memory())(taking(gauge))
    loader = lambda: iter([torch.full((1,), float(size)) for size in next(orders)])
    state = fl.fit(step, toy(), loader, epochs=2, hooks=())
    assert state.history[f"train/{NAME}"] == (9.0, 3.0)
    assert gauge.resets == 2  # by the first update after each record, not by every update


def test_an_evaluation_counts_in_its_record(gauge):
    step = fl.pipeline(fl.device_memory())(taking(gauge))
    loaders = {"train": [torch.ones(1)] * 2, "valid": [torch.full((1,), 30.0)]}
    state = fl.fit(step, toy(), loaders, epochs=1, hooks=())
    assert state.history[f"train/{NAME}"] == (30.0,)


def test_a_look_in_between_loses_nothing(gauge):
    def look(state):
        assert not state.batch or state.metrics[NAME].compute() == 7.0
        return state

    state = fitted(gauge, (7, 1, 2), hooks=(look,))
    assert state.history[f"train/{NAME}"] == (7.0,)


def test_a_checkpoint_keeps_the_peak(gauge, tmp_path):
    state = fitted(gauge, (8, 1, 2), steps=1, epochs=1)
    gauge.reset(None)
    state = fitted(gauge, (8, 1, 2), fl.restore(fl.save(state, tmp_path / "a"), toy()))
    assert state.history.latest(f"train/{NAME}") == 8.0
    assert_same(fitted(gauge, (8, 1, 2)), fitted(gauge, (8, 1, 2)))


def test_the_resident_memory_of_a_process():
    state = fl.fit(fl.pipeline(fl.device_memory())(toy_loss), toy(), [torch.ones(1)], hooks=())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30
    assert state.history.latest(f"train/{NAME}") == pytest.approx(peak, rel=0.1)


def test_a_bare_step(gauge):
    gauge.take(4.0)
    _, out = fl.pipeline(fl.device_memory())(toy_loss)(toy(), torch.ones(1))
    assert out.metrics[NAME].compute() == 4.0 and gauge.resets == 0


def test_a_system_that_does_not_tell(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "resource", None)
    with pytest.raises(RuntimeError, match="this system does not tell the memory of a process"):
        fl.fit(fl.pipeline(fl.device_memory())(toy_loss), toy(), [torch.ones(1)], hooks=())
