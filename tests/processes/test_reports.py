"""What is reported of one pass, on any number of processes: metrics, and what they cannot say."""

import pytest
import torch
from process_problems import BATCH, COUNTS, SIZE, batches, network, samples, world
from torch.utils.data import DataLoader

import fnloop as fl

pytestmark = pytest.mark.slow

VALID, TEST = 4, 7  # the sizes of their batches: 11 batches, and 6, which do not divide evenly


def indexed(model, batch):
    output = model(batch[0])
    loss = torch.nn.functional.cross_entropy(output, batch[1])
    return loss, {"output": output, "index": batch[3]}


def labels(aux, batch):
    return aux["output"], batch[1]


def collection():
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassF1Score, MulticlassPrecision, MulticlassRecall

    metrics = {
        "precision": MulticlassPrecision(3, average=None),
        "recall": MulticlassRecall(3, average=None),
        "f1": MulticlassF1Score(3),
    }
    return fl.from_torchmetrics(MetricCollection(metrics), labels, names=("a", "b", "c"))


def total():
    """A collection whose value, which is not a ratio, would double if it were reduced twice."""
    from torchmetrics import MetricCollection, SumMetric

    return fl.from_torchmetrics(MetricCollection({"sum": SumMetric()}), lambda aux, b: (b[3],))


def items(aux, batch):
    return fl.Sum(len(batch[0]))


def reports(folder):
    """Evaluate a model that does not change, and look at the outputs."""
    torch.manual_seed(0)
    model = network()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.0), seed=0)
    step = fl.pipeline(
        fl.metric(collection()),
        fl.metric(total()),
        fl.metric(trained=items, on="training"),
        fl.metric(evaluated=items, on="evaluation"),
        fl.metric(tested=items, loaders=("test",)),
        fl.derive(double=lambda m: 2 * m["loss"], part=lambda m: m["tested"] / m["evaluated"]),
    )(indexed)
    seen: dict[str, list] = {"valid": [], "test": [], "main": []}

    def look(name):
        def fn(state, outputs):
            assert all(out.loss.device.type == "cpu" for out in outputs)
            seen[name].append([out.aux["index"].tolist() for out in outputs])
            seen[name].append(sum(out.loss.item() * out.weight for out in outputs) / SIZE)

        return fn

    on_main, kept = fl.inspect(look("main")), []

    def later(state):
        kept.append(on_main._now.outputs is not None)
        return state

    hooks = (
        fl.inspect(look("valid"), every=fl.every(epochs=2)),
        fl.inspect(look("test"), loader="test"),
        fl.on_main(on_main),
        later,
    )
    loaders = {
        "train": DataLoader(samples(), BATCH // world()),
        "valid": batches(VALID),
        "test": DataLoader(samples(), TEST),
    }
    every_other = fl.every(steps=2)
    state = fl.fit(step, state, loaders, epochs=2, hooks=hooks, record_every=every_other)
    return {
        "record": dict(state.history[-1].metrics),
        "intervals": [
            [record.step, {k: v for k, v in record.metrics.items() if k.startswith("recent/")}]
            for record in state.history
        ],
        "seen": seen,
        "main": state.backend.main,
        "kept": any(kept),
    }


def rare(folder):
    """Look at the outputs on the main process only, in a run that a hook stops."""
    torch.manual_seed(0)
    model, seen = network(), []
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.0), seed=0)
    look = lambda state, outputs: seen.append([state.epoch, len(outputs)])
    first = fl.when(lambda state: (state.epoch, state.batch) == (1, 0))
    hooks = (
        fl.early_stop("valid/loss", patience=2),
        fl.on_main(fl.inspect(look, every=first)),
        fl.on_main(fl.inspect(look, every=fl.at_end())),
    )
    loaders = {"train": DataLoader(samples(), BATCH // world()), "valid": batches(VALID)}
    state = fl.fit(fl.pipeline()(indexed), state, loaders, epochs=9, hooks=hooks)
    return {"seen": seen, "main": state.backend.main, "epoch": state.epoch}


@pytest.mark.parametrize("n", COUNTS)
def test_the_main_process_may_look_alone_at_some_evaluations(launched, n):
    for mine in launched(rare, n):
        count = len(in_batches(VALID))
        assert mine["seen"] == ([[1, count], [3, count]] if mine["main"] else [])
        assert mine["epoch"] == 3  # no loss is below that of the first epoch


def in_batches(size):
    return [list(range(i, min(i + size, SIZE))) for i in range(0, SIZE, size)]


@pytest.mark.parametrize("n", COUNTS)
def test_each_process_is_given_all_outputs_in_order(launched, n):
    for mine in launched(reports, n):
        index, loss = mine["seen"]["valid"]  # of one evaluation: it is due every second epoch
        assert index == in_batches(VALID)
        assert loss == pytest.approx(mine["record"]["valid/loss"], rel=1e-6)
        assert mine["seen"]["test"][::2] == [in_batches(TEST)] * 2
        expected = [in_batches(VALID)] * 2 if mine["main"] else []
        assert mine["seen"]["main"][::2] == expected
        assert not mine["kept"]  # also where the function is not called


@pytest.mark.parametrize("n", COUNTS)
def test_metrics_of_a_phase_a_loader_and_a_collection_do_not_depend_on_the_processes(launched, n):
    alone = launched(reports, 1)[0]["record"]
    for mine in launched(reports, n):
        assert mine["record"] == pytest.approx(alone, rel=1e-6)
    assert alone["train/trained"] == alone["valid/evaluated"] == alone["test/tested"] == SIZE
    assert alone["train/sum"] == alone["valid/sum"] == sum(range(SIZE))
    assert "valid/tested" not in alone and alone["test/part"] == 1.0
    assert alone["valid/recall/a"] == alone["test/recall/a"] == alone["train/recall/a"]
    assert alone["valid/double"] == 2 * alone["valid/loss"]


@pytest.mark.parametrize("n", COUNTS)
def test_metrics_of_an_interval_do_not_depend_on_the_processes(launched, n):
    alone = launched(reports, 1)[0]["intervals"]
    trained = [metrics["recent/trained"] for _, metrics in alone]
    assert sum(trained) == 2 * SIZE and len(set(trained)) > 1  # the last of an epoch is shorter
    for mine in launched(reports, n):
        assert [step for step, _ in mine["intervals"]] == [step for step, _ in alone]
        for (_, metrics), (_, expected) in zip(mine["intervals"], alone, strict=True):
            assert metrics == pytest.approx(expected, rel=1e-6)
            assert "recent/recall/a" in metrics and "recent/sum" in metrics
