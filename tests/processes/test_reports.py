"""What is reported of a pass, on any number of processes: outputs, times and norms."""

import time

import pytest
import torch
from joined import COUNTS, FEW, rank, world
from process_data import BATCH, SIZE, batches, loader, samples
from process_problems import created, entropy
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._middleware import metric

pytestmark = pytest.mark.slow

VALID, TEST = 4, 7  # the sizes of their batches: 11 batches, and 6, which do not divide evenly
in_batches = lambda size: [list(range(i, min(i + size, SIZE))) for i in range(0, SIZE, size)]
data = lambda: {"train": DataLoader(samples(), BATCH // world()), "valid": batches(VALID)}
resting = lambda: created(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))


def indexed(model, batch):
    loss, aux = entropy(model, batch)
    return loss, {**aux, "index": batch[3]}


def reports(folder):
    """Evaluate a model that does not change, and look at the outputs."""
    seen, kept = {"valid": [], "test": [], "main": []}, []

    def look(name):
        def fn(state, outputs):
            assert all(out.loss.device.type == "cpu" for out in outputs)
            seen[name].append([out.aux["index"].tolist() for out in outputs])
            seen[name].append(sum(out.loss.item() * out.weight for out in outputs) / SIZE)

        return fn

    on_main = fl.inspect(look("main"))
    later = lambda state: kept.append(on_main._now.outputs is not None) or state
    hooks = (
        fl.inspect(look("valid"), every=fl.every(epochs=2)),
        fl.inspect(look("test"), loader="test"),
        fl.on_main(on_main),
        later,
    )
    loaders = {**data(), "test": DataLoader(samples(), TEST)}
    state = fl.fit(fl.pipeline()(indexed), resting(), loaders, epochs=2, hooks=hooks)
    return {"loss": state.history[-1].metrics["valid/loss"], "seen": seen, "kept": any(kept)}


def rare(folder):
    """Look at the outputs on the main process only, in a run that a hook stops."""
    seen = []
    look = lambda state, outputs: seen.append([state.epoch, len(outputs)])
    first = fl.when(lambda state: (state.epoch, state.batch) == (1, 0))
    inspects = [fl.on_main(fl.inspect(look, every=every)) for every in (first, fl.at_end())]
    hooks = (fl.early_stop("valid/loss", patience=2), *inspects)
    state = fl.fit(fl.pipeline()(indexed), resting(), data(), epochs=9, hooks=hooks)
    return [state.epoch, seen]


@pytest.mark.parametrize("n", COUNTS)
def test_the_main_process_may_look_alone_at_some_evaluations(launched, n):
    """No loss is below that of the first epoch, so it stops after the third."""
    count = len(in_batches(VALID))
    assert launched(rare, n) == [[3, [[1, count], [3, count]]], *[[3, []]] * (n - 1)]


@pytest.mark.parametrize("n", COUNTS)
def test_each_process_is_given_all_outputs_in_order(launched, n):
    for process, mine in enumerate(launched(reports, n)):
        index, loss = mine["seen"]["valid"]  # of one evaluation: it is due every second epoch
        assert index == in_batches(VALID)
        assert loss == pytest.approx(mine["loss"], rel=1e-6)
        assert mine["seen"]["test"][::2] == [in_batches(TEST)] * 2
        assert mine["seen"]["main"][::2] == ([] if process else [in_batches(VALID)] * 2)
        assert not mine["kept"]  # also where the function is not called


# --- times


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
    members = (fl.timings(), fl.throughput(flops=3.0, peak=4.0), fl.device_memory())
    some = [(torch.randn(6 // world(), 6), torch.zeros(6 // world()).long())] * (4 * world())
    loaders = {"train": Slow(some), "valid": some}
    try:
        state = fl.fit(fl.pipeline(*members)(slow), created(), loaders, epochs=1, hooks=())
    finally:
        time.perf_counter = before
    counted = []

    def count(state):
        if found := state.metrics.get("throughput/samples"):
            counted.append(found.to_cpu().amount / world())
        return state

    step, steps = fl.pipeline(fl.grad_norm(), fl.throughput())(entropy), SIZE // BATCH
    normed = fl.fit(step, created(), loader(), steps=steps, hooks=(count,))
    return [state.history[-1].metrics, normed.history.latest("train/grad_norm"), counted[-1]]


@pytest.mark.parametrize("n", FEW)
def test_times_norms_and_samples_are_of_all_processes(launched, n):
    ((_, norm, _),), results = launched(measured_times, 1), launched(measured_times, n)
    waits = sum(range(1, n + 1)) / n
    seconds = 4 * (1.0 + waits)
    expected = {
        "train/time/step": 1.0,
        "train/time/data": waits,
        "valid/time/evaluate": 4 * 10.0 * n,  # the longest
        "train/throughput/samples": 24 / seconds,
        "train/throughput/mfu": 24 / seconds * 3 / 4 / n,
        "train/memory/peak_gib": float(n),
    }
    for found, its_norm, _ in results:
        assert {name: found[name] for name in expected} == pytest.approx(expected)
        assert its_norm == pytest.approx(norm, rel=1e-5)
    assert sum(samples for *_, samples in results) == SIZE // BATCH * BATCH
