"""Times, throughput, memory and norms over processes."""

import time

import pytest
import torch
from process_problems import BATCH, FEW, SIZE, entropy, loader, network, rank, world

import fnloop as fl
from fnloop._middleware import metric

pytestmark = pytest.mark.slow


class Clock:
    now = 0.0


class Slow:
    """Batches that process r waits r + 1 seconds for."""

    def __init__(self, of):
        self.of = of

    def __len__(self):
        return len(self.of)

    def __iter__(self):
        for batch in self.of:
            Clock.now += (rank() + 1.0) / world()  # every process reads the batches of all
            yield batch


def slow(model, batch):
    Clock.now += 1.0 if model.training else 10.0 * (rank() + 1)
    return entropy(model, batch)


def measured_times(folder):
    before, time.perf_counter = time.perf_counter, lambda: Clock.now
    metric._peak_gib = lambda device: 1.0 + rank()
    members = (fl.grad_norm(), fl.timings(), fl.throughput(flops=3.0, peak=4.0), fl.device_memory())
    torch.manual_seed(0)
    model = network()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    batches = [(torch.randn(6 // world(), 6), torch.zeros(6 // world()).long())] * (4 * world())
    loaders = {"train": Slow(batches), "valid": batches}
    try:
        step = fl.pipeline(*members)(slow)
        state = fl.fit(step, state, loaders, epochs=1, hooks=())
    finally:
        time.perf_counter = before
    return state.history[-1].metrics


def norms_and_samples(folder):
    torch.manual_seed(0)
    model = network()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    counted = []

    def count(state):
        if found := state.metrics.get("throughput/samples"):
            counted.append(found.to_cpu().amount / world())
        return state

    step = fl.pipeline(fl.grad_norm(), fl.throughput())(entropy)
    state = fl.fit(step, state, loader(), steps=SIZE // BATCH, hooks=(count,))
    return {"norm": state.history.latest("train/grad_norm"), "samples": counted[-1]}


@pytest.mark.parametrize("n", FEW)
def test_times_are_of_all_processes(launched, n):
    for found in launched(measured_times, n):
        waits = [r + 1.0 for r in range(n)]
        assert found["train/time/step"] == pytest.approx(1.0)
        assert found["train/time/data"] == pytest.approx(sum(waits) / n)
        assert found["valid/time/evaluate"] == pytest.approx(4 * 10.0 * n)  # the longest
        seconds = 4 * (1.0 + sum(waits) / n)
        assert found["train/throughput/samples"] == pytest.approx(24 / seconds)
        assert found["train/throughput/mfu"] == pytest.approx(24 / seconds * 3 / 4 / n)
        assert found["train/memory/peak_gib"] == float(n)


@pytest.mark.parametrize("n", FEW)
def test_the_norm_and_the_samples_are_those_of_all_together(launched, n):
    (expected,) = launched(norms_and_samples, 1)
    results = launched(norms_and_samples, n)
    for found in results:
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert sum(found["samples"] for found in results) == SIZE // BATCH * BATCH
