"""Running metrics of a run that another one continues, also where that begins with a record."""

import os
import signal
from unittest.mock import patch

import attrs
import pytest
import torch
from launch import reads, written_by
from process_metrics import changing, with_metrics
from sample_hooks import stop_at
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection, SumMetric

import fnloop as fl
from fnloop._extensions.engines.distributed import DistributedEngine
from fnloop.testing import toy, toy_loss

pytestmark = pytest.mark.slow

DATA = torch.arange(1.0, 29.0)  # 7 batches of 4: on two processes, one of the last is padding
STEPS = 3


def counted():
    """Report how many updates were made: the same sum in every process."""
    count = lambda state, out, batch: with_metrics(out, updates=fl.Sum(torch.tensor(1.0)))
    return changing("gradient", count)


def measured():
    """Return middleware that reports what is of each process's share, in every way."""
    squares = MetricCollection({"squares": MeanSquaredError()})
    return fl.metric(
        fl.from_torchmetrics(squares, lambda aux, batch: (batch, batch * 0)),
        mean=lambda aux, batch: batch.mean(),
        items=lambda aux, batch: fl.Sum(float(len(batch))),
        most=lambda aux, batch: fl.Max(batch.max()),
        total=fl.from_torchmetrics(SumMetric(), lambda aux, batch: (batch,)),
        on="training",
    )


def plain():
    around = lambda *members: fl.pipeline(measured(), counted(), *members)(toy_loss)
    return around, toy(lr=0.01)


def turns():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    named = {key: torch.optim.SGD(model[key].parameters(), lr=0.0) for key in model}
    pipe = fl.pipeline(measured(), counted())
    step_of = lambda key: pipe(lambda model, batch: model[key](batch[:, None]).mean())
    around = lambda *members: fl.pipeline(*members)(fl.alternate({k: step_of(k) for k in model}))
    return around, fl.TrainState.create(model, named, seed=0)


def fitted(kind, folder=None, cut=None, again=False):
    """Run, or continue, one of the problems. Return why it has stopped, and its records."""
    make_step, state = kind()
    armed = [cut == "SIGTERM"]

    def terminate(state, out, batch):
        if armed[0]:
            armed[0] = False
            os.kill(os.getpid(), signal.SIGTERM)
        return out

    state = attrs.evolve(fl.restore(folder, state), stop=None) if again else state
    valid = DataLoader(DATA[:24], batch_size=2)
    loaders = {"train": DataLoader(DATA, batch_size=4), "valid": valid}
    often = {"evaluate_every": fl.every(steps=STEPS), "record_every": fl.every(steps=2)}
    hooks = (stop_at(STEPS),) if cut == "enough" else ()
    step = make_step(changing("evaluation", terminate, "terminated"))
    state = fl.fit(step, state, loaders, epochs=2, hooks=hooks, **often)
    records = [(r.step, dict(r.metrics)) for r in state.history if not r.closing]
    if cut:
        fl.save(state, folder)
        steps = [step for step, _ in records]  # a signal leaves the record of the evaluation
        assert (state.stop, steps) == (cut, [2] if cut == "SIGTERM" else [2, 3])
    return records


def copied(folder):
    """Continue a snapshot whose epoch another run has left to be ended, with a record at once."""
    step = fl.pipeline(fl.metric(mean=lambda aux, batch: batch.mean()))(toy_loss)
    loader = DataLoader(DATA, batch_size=4)

    def end(state):
        return attrs.evolve(state, ends="epoch") if state.batch and state.step == 3 else state

    state = fl.fit(step, toy(lr=0.01), loader, steps=3, hooks=(end,))
    state = fl.fit(step, fl.snapshot(state), loader, epochs=1, hooks=(end,))
    return [dict(r.metrics)["train/mean"] for r in state.history if not r.closing]


KINDS = {"plain": plain, "turns": turns}
CUTS = ("SIGTERM", "enough")  # before the record of a boundary, and after it


def resumed_metrics(folder):
    found = {name: fitted(kind) for name, kind in KINDS.items()}
    for name, cut in ((name, cut) for name in KINDS for cut in CUTS):
        fitted(KINDS[name], folder / f"{name} {cut}", cut)
        found[f"{name} {cut}"] = fitted(KINDS[name], folder / f"{name} {cut}", again=True)
    whole = DistributedEngine.gather

    def gather(*given):
        merged, shares = whole(*given)
        return merged, [([], share) for _, share in shares]

    with patch.object(DistributedEngine, "gather", gather):
        fitted(turns, folder / "old", "SIGTERM")  # an old checkpoint
    return {**found, "old": fitted(turns, folder / "old", again=True), "copied": copied(folder)}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_run_that_continues_has_the_metrics_of_one_that_was_not_cut(launched, n):
    for found in launched(resumed_metrics, n):
        for name, cut in ((name, cut) for name in KINDS for cut in CUTS):
            pairs = zip(found[f"{name} {cut}"], found[name], strict=True)
            for (step, mine), (right_step, right) in pairs:
                assert step == right_step and mine == pytest.approx(right, rel=1e-12), (name, cut)


def test_the_metrics_are_those_of_all_processes(launched):
    for found in launched(resumed_metrics, 2):
        first = next(metrics for _, metrics in found["plain"] if "train/items" in metrics)
        assert first["train/items"] == 24 and first["train/total"] == 300  # 1 + ... + 24
        assert first["train/most"] == 24 and first["train/updates"] == 3
        assert first["train/squares"] == pytest.approx(4900 / 24)  # 1 + 4 + ... + 24 * 24
        assert found["copied"] == [pytest.approx(12.5)]  # the mean of 1, ..., 24
        # The means of turns are right from an old checkpoint too, which says less.
        (_, right), (_, mine) = found["turns"][1], found["old"][1]
        names = [name for name in right if name.endswith(("/loss", "/mean", "/squares"))]
        assert len(names) > 8
        assert [mine[name] for name in names] == pytest.approx([right[name] for name in names])


def begun(folder):
    """Leave a run in its second epoch, and at the end of that."""
    for steps in (10, 14):
        loader = DataLoader(DATA, batch_size=2)
        state = fl.fit(fl.pipeline()(toy_loss), toy(), loader, steps=steps, hooks=())
        fl.save(state, folder / str(steps))


@reads(begun, [2])
def continued(folder):
    """Continue both, and return the items of their newest records."""
    found = []
    for steps in ("10", "14"):
        state = fl.restore(written_by(begun, 2, folder) / steps, toy())
        loader = DataLoader(DATA, batch_size=2)
        state = fl.fit(fl.pipeline()(toy_loss), state, loader, epochs=3, hooks=())
        found.append(state.history[-1].items)
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_items_are_known_on_any_number_of_processes(launched, n):
    for found in launched(continued, n):
        assert found == [3 * 28, 3 * 28]
