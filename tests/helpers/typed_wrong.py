"""Mistakes that type checkers find: each marked line has one, and no other line has any."""

# ruff: noqa: B018
from typing import Any

import torch
from torch import Tensor, nn

import fnloop as fl
from fnloop import schedules


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def number(model: nn.Module, batch: Tensor) -> float:
    return model(batch).mean().item()


def nothing(model: nn.Module, batch: Tensor) -> None:
    print(model(batch).mean())


def three(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x).mean() + y.mean()


def forgets(state: fl.TrainState) -> None:
    print(state.step)


def of_outputs(state: fl.TrainState, out: fl.Output) -> fl.TrainState:
    return state


def of_three(aux: Any, batch: Any, model: Any) -> Tensor:
    return model(batch)


@fl.middleware("gradient")
def noise(std: float, *, seed: int = 0):
    def wrap(step: fl.Step) -> fl.Step:
        def noisy(state: fl.TrainState, batch: Tensor) -> tuple[fl.TrainState, fl.Output]:
            state, out = step(state, batch)
            print(out.los)  # wrong
            print(state.modle)  # wrong
            return state, out

        return noisy

    return wrap


@fl.middleware("gradient")
def halves(std: float):
    def wrap(step: fl.Step) -> fl.Step:
        def halving(state: fl.TrainState, batch: Tensor) -> fl.TrainState:
            return step(state, batch)[0]

        return halving  # wrong

    return wrap


@fl.middleware("gradient")  # wrong
def no_return(std: float):
    def wrap(step: fl.Step) -> fl.Step:
        return step


@fl.middleware("gradeint")  # wrong
def misspelt(std: float):
    def wrap(step: fl.Step) -> fl.Step:
        return step

    return wrap


model = nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
state = fl.TrainState.create(model, sgd)
step = fl.pipeline()(loss_fn)
loaders = {"train": [torch.ones(2)]}

fl.clip("1.0")  # wrong
fl.clip(max_nrom=1.0)  # wrong
fl.clip(1.0, onyl="head.*")  # wrong
fl.clip()  # wrong
fl.accumulate("four")  # wrong
fl.ema(decay="0.9")  # wrong
fl.amp()  # wrong
fl.clipp(1.0)  # wrong
fl.Trainer  # wrong
schedules.cosin()  # wrong
fl.data.tak([1], 2)  # wrong
fl.debug.replya  # wrong
schedules.cosine(warm_up=0.1)  # wrong
fl.schedule(0.1)  # wrong
fl.schedule(schedules.cosine)  # wrong
fl.metric(accuracy=of_three)  # wrong
fl.skip_nonfinite(1.5)  # wrong
noise("0.1")  # wrong
noise(0.1, seeed=1)  # wrong
noise()  # wrong
fl.pipeline(fl.clip)(loss_fn)  # wrong
fl.pipeline(loss_fn)  # wrong
fl.pipeline([fl.clip(1.0)])  # wrong
fl.pipeline()(number)  # wrong
fl.pipeline()(nothing)  # wrong
fl.pipeline()(three)  # wrong
fl.fit(loss_fn, state, loaders)  # wrong
fl.fit(fl.pipeline(), state, loaders)  # wrong
fl.fit(step, loaders, state)  # wrong
fl.fit(step, state, loaders, epoch=3)  # wrong
fl.fit(step, state, loaders, epochs="3")  # wrong
fl.fit(step, state, loaders, 3)  # wrong
fl.fit(step, model, loaders)  # wrong
fl.fit(step, state)  # wrong
fl.fit(step, state, loaders, hooks=[forgets])  # wrong
fl.fit(step, state, loaders, hooks=[of_outputs])  # wrong
fl.fit(step, state, loaders, hooks=fl.progress())  # wrong
fl.fit(step, state, loaders, hooks=[fl.checkpoint])  # wrong
fl.fit(step, state, loaders, evaluate_every=2)  # wrong
fl.every(epoch=1)  # wrong
fl.every(epochs=1)(forgets)  # wrong
fl.every(1)  # wrong
fl.early_stop(patience=3)  # wrong
fl.early_stop("valid/loss", patience="3")  # wrong
fl.checkpoint("runs", best=True)  # wrong
fl.TrainState.create(model)  # wrong
fl.TrainState.create(model, sgd, sede=1)  # wrong
fl.evaluate(state, step, loaders)  # wrong
fl.evaluate(step, state, loaders).loss  # wrong
fl.predict(loss_fn, state)  # wrong
state.epochs  # wrong
state.history.lastest("train/loss")  # wrong
state.step = 3  # wrong
step(state)  # wrong
step.evalute(state, torch.ones(2))  # wrong
fl.restore(state, "runs")  # wrong
fl.save("runs", state)  # wrong
fl.resume("runs")  # wrong
fl.supervised(nn.CrossEntropyLoss)  # wrong
fl.find_lr(step, state, loaders["train"]).best_lr  # wrong
