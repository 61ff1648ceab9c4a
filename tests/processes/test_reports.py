"""What is reported on any number of processes: outputs, times, norms and numbers of hooks."""

import time
from unittest.mock import patch

import pytest
import torch
from joined import COUNTS, FEW, join, rank, said, world
from process_data import BATCH, SIZE, batches, loader, samples
from process_metrics import accuracy
from process_problems import created, entropy
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._extensions.middleware import times

pytestmark = pytest.mark.slow

VALID, TEST = 4, 7  # the sizes of their batches: 11 batches, and 6, which do not divide evenly
in_batches = lambda size: [list(range(i, min(i + size, SIZE))) for i in range(0, SIZE, size)]
data = lambda: {"train": DataLoader(samples(), BATCH // world()), "valid": batches(VALID)}
still = lambda **more: created(optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), **more)
rows = lambda state: [dict(record.metrics) for record in state.history]


def indexed(model, batch):
    loss, aux = entropy(model, batch)
    return loss, {**aux, "index": batch[3]}


def reports(folder):
    seen, kept = {"valid": [], "test": [], "main": []}, []

    def look(name):
        def fn(state, outputs):
            assert all(out.loss.device.type == "cpu" for out in outputs)
            seen[name].append([out.aux["index"].tolist() for out in outputs])
            seen[name].append(sum(out.loss.item() * out.weight for out in outputs) / SIZE)

        return fn

    on_main = fl.inspect(look("main"))
    later = lambda state: kept.append(on_main._outputs is not None) or state
    on_valid, on_test = look("valid"), look("test")
    inspects = fl.inspect(on_valid, every=fl.every(epochs=2)), fl.inspect(on_test, loader="test")
    hooks = (*inspects, fl.on_main(on_main), later)
    loaders = {**data(), "test": DataLoader(samples(), TEST)}
    state = fl.fit(fl.pipeline()(indexed), still(), loaders, epochs=2, hooks=hooks)
    return {"loss": state.history[-1].metrics["valid/loss"], "seen": seen, "kept": any(kept)}


def rare(folder):
    seen = []
    look = lambda state, outputs: seen.append([state.epoch, len(outputs)])
    first = fl.when(lambda state: (state.epoch, state.batch) == (1, 0))
    inspects = [fl.on_main(fl.inspect(look, every=every)) for every in (first, fl.at_end())]
    hooks = (fl.early_stop("valid/loss", patience=2), *inspects)
    state = fl.fit(fl.pipeline()(indexed), still(), data(), epochs=9, hooks=hooks)
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
    times._peak_gib = lambda device: 1.0 + rank()
    members = (fl.timings(), fl.throughput(flops=3.0, peak=4.0), fl.device_memory())
    some = [(torch.randn(6 // world(), 6), torch.zeros(6 // world()).long())] * (4 * world())
    loaders = {"train": Slow(some), "valid": some}
    with patch.object(time, "perf_counter", lambda: Clock.now):
        state = fl.fit(fl.pipeline(*members)(slow), created(), loaders, epochs=1, hooks=())
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


# --- numbers that hooks add to records


def all_numbers(folder):
    """Count samples over all outputs, and add the number of the process, which must not differ."""
    calls = []
    count = lambda state, outputs: {"samples": sum(out.weight for out in outputs), "rank": rank()}

    def alone(state):
        calls.append(state.epoch)
        return {"rank": rank(), "draw": torch.rand(1).item(), "mode": state.model.training}

    def together(state):
        loss = fl.evaluate(fl.pipeline()(entropy), state, DataLoader(samples(), 4))["loss"]
        return {"rank": rank(), "loss": loss}

    hooks = (
        fl.inspect(count, reports=("samples",)),
        fl.measure(alone, name="alone", every=fl.every(epochs=2)),
        fl.measure(together, name="together", everywhere=True),
        fl.early_stop("valid/samples", mode="max", patience=3),
    )
    state = fl.fit(fl.pipeline()(entropy), still(), data(), epochs=9, hooks=hooks)
    return {"rows": rows(state), "calls": calls, "training": state.model.training}


@pytest.mark.parametrize("n", COUNTS)
def test_numbers_are_those_of_the_main_process_everywhere(launched, n):
    results = launched(all_numbers, n)
    for process, result in enumerate(results):
        found = result["rows"]
        assert found == results[0]["rows"] and len(found) == 4  # it stops: they are all equal
        assert [row["valid/samples"] for row in found] == [SIZE] * 4
        assert {row[f"{name}/rank"] for row in found for name in ("valid", "together")} == {0}
        assert [row.get("alone/rank") for row in found] == [None, 0, None, 0]
        assert result["calls"] == ([] if process else [2, 4]) and result["training"]
        assert found[1]["alone/draw"] == found[3]["alone/draw"] and found[1]["alone/mode"] == 0
        for row in found:
            assert row["together/loss"] == pytest.approx(row["valid/loss"], rel=1e-6)


def failing(folder):
    def explode(state):
        raise ArithmeticError("boom")

    hooks = (fl.measure(explode, name="two"),)
    return said(lambda: fl.fit(fl.pipeline()(entropy), still(), data(), hooks=hooks))


@pytest.mark.parametrize("n", FEW)
def test_all_processes_raise_if_the_function_fails_on_the_main_one(launched, n):
    main, *others = launched(failing, n)
    assert main == "ArithmeticError: boom"
    message = "measure(explode, name='two') failed on the main process: ArithmeticError: boom"
    assert others == [f"RuntimeError: {message}"] * (n - 1)


def sharded_model(folder):
    """A part of the weights is in each process, so each has to take part."""
    join()

    def halves():
        model = nn.Sequential(nn.Linear(6, 3))
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        return model

    def measured(everywhere):
        sums = lambda state: {"sum": state.model(torch.ones(1, 6)).sum(), "rank": rank()}
        hooks = (fl.measure(sums, name="two", everywhere=everywhere),)
        state = still(shard=True, make=halves)
        state = fl.fit(fl.pipeline()(entropy), state, data(), hooks=hooks)
        return [state.history[-1].metrics[f"two/{name}"] for name in ("sum", "rank")]

    return [said(lambda: measured(False)), measured(True)]


def test_of_a_sharded_model_every_process_has_to_measure(launched):
    for refused, made in launched(sharded_model, 2):
        assert "each process has a part of its weights" in refused
        assert made == [10.5, 0.0]  # 3 × (6 × 0.5 + 0.5)


# --- without a loss


def without_loss(model, batch):
    loss, aux = entropy(model, batch)
    return (loss if model.training else None), aux


def mixed(model, batch):
    loss, aux = entropy(model, batch)
    return (loss if model.training or rank() == 0 else None), aux


def evaluations(folder):
    step, valid = fl.pipeline(fl.metric(accuracy=accuracy))(without_loss), data()["valid"]
    averaged = fl.pipeline(fl.metric(accuracy=accuracy), fl.ema(0.5))(without_loss)
    return {
        "evaluate False": fl.evaluate(averaged, still(), valid),
        "evaluate True": fl.evaluate(step, still(exact=True), valid),
        "names": [*fl.fit(averaged, still(), data(), hooks=()).history[-1].metrics],
        "mixed": said(lambda: fl.evaluate(fl.pipeline()(mixed), still(), valid)),
    }


@pytest.mark.parametrize("n", FEW)
def test_an_evaluation_without_a_loss_has_the_metrics_of_all_samples(launched, n):
    one = launched(evaluations, 1)[0]
    for found in launched(evaluations, n):
        for exact in (False, True):
            assert "loss" not in found[f"evaluate {exact}"]
            for name, value in one[f"evaluate {exact}"].items():
                assert found[f"evaluate {exact}"][name] == pytest.approx(value, rel=1e-12)
        assert not [name for name in found["names"] if name.endswith("loss") and "valid" in name]
        assert {"valid/accuracy", "valid/ema/accuracy"} <= {*found["names"]}
        assert n == 1 or "for some batches of an evaluation and None for others" in found["mixed"]
