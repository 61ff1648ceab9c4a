"""A script that is right, with annotations as people write them: type checkers find no error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop import TrainState, schedules
from fnloop.testing import toy, toy_loss


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    norm: float = 1.0
    every: int = 4
    precision: str | None = "bf16"
    mode: str = "min"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def embed(self, x: Tensor) -> Tensor:
        return self.layer(x)


def loss_fn(model: Net, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    x, y = batch
    logits = model.embed(x)
    return F.cross_entropy(logits, y), {"logits": logits, "weight": len(x)}


def plain(model, batch):
    return model(batch).mean()


def leaves_out(model: nn.Module, batch: tuple[Tensor, Tensor]):
    if len(batch[0]) < 2:
        return fl.skip("too short")
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(aux: Mapping[str, Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (aux["logits"].argmax(1) == batch[1]).float().mean()


@fl.middleware("gradient")
def noise(std: float, *, seed: int = 0):
    def wrap(step: fl.Step) -> fl.Step:
        def noisy(state: fl.TrainState, batch: Any) -> tuple[fl.TrainState, fl.Output]:
            state, out = step(state, batch)
            for p in state.model.parameters():
                if p.grad is not None:
                    p.grad.add_(torch.randn_like(p), alpha=std)
            return state, out

        return noisy

    return wrap


@fl.middleware("update", init=lambda state: {"largest": torch.zeros(())})
def worst():
    def wrap(step):
        def remembering(state, batch):
            state, out = step(state, batch)
            slot = state.slots["worst"]
            slot["largest"] = torch.maximum(slot["largest"], out.loss)
            return state, out

        return remembering

    return wrap


@fl.middleware("gradient")
def both(std: float) -> fl.Middleware:
    return fl.Middleware("both", init=lambda state: {}, window=1)


def show(state: TrainState) -> TrainState:
    print(state.step, state.history["train/loss"][-1], state.history.latest("valid/loss"))
    return state


class Stop(fl.Hook):
    def __call__(self, state: TrainState) -> TrainState:
        return state


def make_step(settings: Settings) -> fl.Step:
    return fl.pipeline(
        fl.amp(settings.precision),
        fl.accumulate(settings.every),
        fl.accumulate({0: 8, 4: 4}),
        fl.clip(settings.norm, only="head.*"),
        noise(0.1, seed=3),
        worst(),
        both(1.0),
        fl.schedule(schedules.cosine(warmup=0.1)),
        fl.schedule(lambda step, total: 0.5),
        fl.ema(0.99, evaluate="only"),
        fl.metric(accuracy=accuracy),
        fl.skip_nonfinite(),
        fl.torch_scheduler(lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 2)),
        fl.derive(perplexity=lambda m: np.exp(m["loss"]).item()),
    )(loss_fn)


def train(settings: Settings, loaders: dict[str, DataLoader]) -> fl.History:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    state = TrainState.create(model, optimizer, seed=0)
    state = fl.resume("runs/a", state)
    step = make_step(settings)
    hooks = [
        fl.progress(),
        fl.every(epochs=1)(fl.checkpoint("runs/a", best="valid/loss")),
        fl.early_stop("valid/loss", patience=2, mode=settings.mode),
        fl.when(lambda state: state.step > 3)(show),
        Stop(),
    ]
    state = fl.fit(step, state, loaders, epochs=3, hooks=hooks)
    state = fl.fit(step, state, loaders, epochs=3, hooks=[fl.progress(), show, Stop()])
    state = fl.fit(step, state, (loaders["train"], loaders["valid"]), steps=3, hooks=(show,))
    moment = fl.every(steps=5) | fl.at_end()
    for at in fl.run(step, state, loaders, epochs=5, evaluate_every=moment):
        numbers: dict[str, float] = fl.evaluate(step, at, loaders["valid"])
        print(numbers["loss"])
    other = fl.pipeline(fl.clip(1.0))(plain)
    state, out = other(state, torch.ones(3, 8))
    print(out.loss.item(), other.evaluate(state, torch.ones(3)).aux, state.model.state_dict())
    for labels in fl.predict(
        lambda model, batch: model(batch[0]).argmax(1), state, loaders["valid"]
    ):
        print(labels.shape)
    average = fl.averaged(state)
    fl.save(average, "out", only=("model",))
    fl.freeze(state, "layer.*", model.layer)
    print(fl.find_lr(step, state, loaders["train"]))
    fl.alternate({"d": fl.pipeline()(leaves_out), "g": step}, batch="next")
    fl.pipeline()(fl.supervised(nn.CrossEntropyLoss()))
    fl.pipeline()(fl.supervised(F.cross_entropy))
    return state.history


def main() -> None:
    x = torch.randn(96, 8)
    data = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8)
    train(Settings(), {"train": data, "valid": data})
    print(fl.pipeline()(toy_loss)(toy(), torch.ones(1)))
