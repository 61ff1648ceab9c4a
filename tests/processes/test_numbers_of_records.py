"""Numbers that hooks add to records, and evaluations without a loss, on any number of processes."""

import pytest
import torch
from joined import COUNTS, FEW, join, rank, world
from process_data import BATCH, SIZE, samples
from process_problems import created, entropy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import fnloop as fl

pytestmark = pytest.mark.slow
rows = lambda state: [dict(record.metrics) for record in state.history]


def data():
    return {
        "train": DataLoader(samples(), BATCH // world()),
        "valid": DataLoader(samples(), 4),
    }


def still(**settings):
    return created(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0), **settings)


def all_numbers(folder):
    """Count samples over all outputs, and add the number of the process, which must not differ."""
    calls = []
    count = lambda state, outputs: {"samples": sum(out.weight for out in outputs), "rank": rank()}

    def alone(state):
        calls.append(state.epoch)
        draw = torch.rand(1).item()
        return {"rank": rank(), "draw": draw, "mode": state.model.training}

    def together(state):
        found = fl.evaluate(fl.pipeline()(entropy), state, DataLoader(samples(), 4))
        return {"rank": rank(), "loss": found["loss"]}

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
        assert (
            {row["valid/rank"] for row in found} == {row["together/rank"] for row in found} == {0}
        )
        assert [row.get("alone/rank") for row in found] == [None, 0, None, 0]
        assert result["calls"] == ([] if process else [2, 4]) and result["training"]
        assert found[1]["alone/draw"] == found[3]["alone/draw"] and found[1]["alone/mode"] == 0
        for row in found:
            assert row["together/loss"] == pytest.approx(row["valid/loss"], rel=1e-6)


def failing(folder):
    def explode(state):
        raise ArithmeticError("boom")

    try:
        fl.fit(fl.pipeline()(entropy), still(), data(), hooks=(fl.measure(explode, name="two"),))
    except (ArithmeticError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("n", FEW)
def test_all_processes_raise_if_the_function_fails_on_the_main_one(launched, n):
    main, *others = launched(failing, n)
    assert main == "ArithmeticError: boom"
    message = "measure(explode, name='two') failed on the main process: ArithmeticError: boom"
    assert others == [f"RuntimeError: {message}"] * (n - 1)


def sharded_model(folder):
    """A part of the weights is in each process, so each has to take part."""
    join()

    def shard(model):
        fully_shard(model)

    measured = lambda state: {"sum": state.model(torch.ones(1, 6)).sum(), "rank": rank()}
    found = []
    for everywhere in (False, True):
        model = nn.Sequential(nn.Linear(6, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        if world() > 1:
            shard(model)
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.0), seed=0)
        hook = fl.measure(measured, name="two", everywhere=everywhere)
        try:
            state = fl.fit(fl.pipeline()(entropy), state, data(), hooks=(hook,))
            found.append([state.history[-1].metrics[f"two/{name}"] for name in ("sum", "rank")])
        except ValueError as error:
            found.append(str(error))
    return found


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
    accuracy = fl.metric(
        accuracy=lambda aux, batch: (aux["output"].argmax(1) == batch[1]).double().mean()
    )
    found = {}
    for exact in (False, True):
        step = fl.pipeline(accuracy, fl.ema(0.5))(without_loss)
        state = still(exact=exact)
        if exact:
            step = fl.pipeline(accuracy)(without_loss)
        found[f"evaluate {exact}"] = fl.evaluate(step, state, data()["valid"])
        if not exact:
            found["names"] = [*fl.fit(step, state, data(), hooks=()).history[-1].metrics]
    try:
        fl.evaluate(fl.pipeline()(mixed), still(), data()["valid"])
    except ValueError as error:
        found["mixed"] = str(error)
    return found


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
