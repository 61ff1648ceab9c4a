"""Running metrics of a run that another one continues, also where that begins with a record."""

import os
import signal

import attrs
import pytest
import torch
from process_problems import rank
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._step.engine_distributed import DistributedEngine
from fnloop.testing import toy, toy_loss

torchmetrics = pytest.importorskip("torchmetrics")

pytestmark = pytest.mark.slow

DATA = torch.arange(1.0, 29.0)  # 7 batches of 4: on two processes, one of the last is padding
STEPS = 3


@fl.middleware("gradient")
def counted():
    """Report how many updates were made: the same sum in every process."""

    def wrap(step):
        def counting(state, batch):
            state, out = step(state, batch)
            metrics = {**out.metrics, "updates": fl.Sum(torch.tensor(1.0))}
            return state, attrs.evolve(out, metrics=metrics)

        return counting

    return wrap


def measured():
    """Return middleware that reports what is of each process's share, in every way."""
    total = fl.from_torchmetrics(torchmetrics.SumMetric(), lambda aux, batch: (batch,))
    squares = torchmetrics.MetricCollection({"squares": torchmetrics.MeanSquaredError()})
    return fl.metric(
        fl.from_torchmetrics(squares, lambda aux, batch: (batch, batch * 0)),
        mean=lambda aux, batch: batch.mean(),
        items=lambda aux, batch: fl.Sum(float(len(batch))),
        most=lambda aux, batch: fl.Max(batch.max()),
        total=total,
        on="training",
    )


def plain():
    pipe = fl.pipeline(measured(), counted())
    return lambda *around: fl.pipeline(*pipe.middleware, *around)(toy_loss), toy(lr=0.01)


def turns():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    named = {key: torch.optim.SGD(model[key].parameters(), lr=0.0) for key in model}

    def step_of(key):
        pipe = fl.pipeline(measured(), counted())
        return pipe(lambda model, batch: model[key](batch[:, None]).mean())

    steps = {key: step_of(key) for key in model}
    around = lambda *around: fl.pipeline(*around)(fl.alternate(steps))
    return around, fl.TrainState.create(model, named, seed=0)


def fitted(kind, folder=None, cut=None, again=False):
    """Run, or continue, one of the problems. Return why it has stopped, and its records."""
    make_step, state = kind()
    armed = [cut]

    def disarmed(kind):
        found, armed[0] = armed[0] == kind, None if armed[0] == kind else armed[0]
        return found

    def stop(state):
        enough = state.step == STEPS and disarmed("enough")
        return attrs.evolve(state, stop="enough") if enough else state

    @fl.middleware("evaluation")
    def terminated():
        def wrap(step):
            def evaluating(state, batch):
                if disarmed("SIGTERM"):
                    os.kill(os.getpid(), signal.SIGTERM)
                return step(state, batch)

            return evaluating

        return wrap

    state = attrs.evolve(fl.restore(folder, state), stop=None) if again else state
    loaders = {
        "train": DataLoader(DATA, batch_size=4),
        "valid": DataLoader(DATA[:24], batch_size=2),
    }
    often = {"evaluate_every": fl.every(steps=STEPS), "record_every": fl.every(steps=2)}
    state = fl.fit(make_step(terminated()), state, loaders, epochs=2, hooks=(stop,), **often)
    if cut:
        fl.save(state, folder)
    return state.stop, [(r.step, dict(r.metrics)) for r in state.history if not r.closing]


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
    found = {}
    for name, kind in KINDS.items():
        found[name] = fitted(kind)[1]
        for cut in CUTS:
            where = folder / f"{name} {cut}"
            stopped, records = fitted(kind, where, cut)
            assert stopped == cut, (stopped, rank())
            steps = [step for step, _ in records]  # a signal leaves the record of the evaluation
            assert steps == ([2] if cut == "SIGTERM" else [2, 3]), (steps, rank())
            found[f"{name} {cut}"] = fitted(kind, where, again=True)[1]
    found["old"] = of_an_old_checkpoint(folder / "old")
    return found


def of_an_old_checkpoint(folder):
    """Continue turns from a checkpoint that does not say what is of each process."""
    own_names = DistributedEngine.own_names
    DistributedEngine.own_names = lambda self, names: []
    try:
        fitted(turns, folder, "SIGTERM")
    finally:
        DistributedEngine.own_names = own_names
    return fitted(turns, folder, again=True)[1]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_run_that_continues_has_the_metrics_of_one_that_was_not_cut(launched, n, name, cut):
    for found in launched(resumed_metrics, n):
        whole, again = found[name], found[f"{name} {cut}"]
        assert [step for step, _ in again] == [step for step, _ in whole]
        for (step, mine), (_, right) in zip(again, whole, strict=True):
            assert mine == pytest.approx(right, rel=1e-12), (step, n)


def test_the_means_of_turns_are_right_from_an_old_checkpoint_too(launched):
    for found in launched(resumed_metrics, 2):
        (_, right), (_, mine) = found["turns"][1], found["old"][1]
        names = [name for name in right if name.endswith(("/loss", "/mean", "/squares"))]
        assert len(names) > 8
        assert [mine[name] for name in names] == pytest.approx([right[name] for name in names])


def test_a_copy_of_a_state_knows_what_is_of_each_process(launched):
    for found in launched(copied, 2):
        assert found == [pytest.approx(12.5)]  # the mean of 1, ..., 24


def test_the_metrics_are_those_of_all_processes(launched):
    for found in launched(resumed_metrics, 2):
        first = next(metrics for _, metrics in found["plain"] if "train/items" in metrics)
        assert first["train/items"] == 24 and first["train/total"] == 300  # 1 + ... + 24
        assert first["train/most"] == 24 and first["train/updates"] == 3
        assert first["train/squares"] == pytest.approx(4900 / 24)  # 1 + 4 + ... + 24 * 24
