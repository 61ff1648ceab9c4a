"""A run that is resumed at any update ends bit for bit as an uninterrupted one."""

import math
import random

import attrs
import numpy as np
import pytest
import torch
from saved import ONE, step, stop_at
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy


class Augmented(Dataset):
    """Twenty samples, with noise from every global generator."""

    def __init__(self):
        self.x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self):
        return 20

    def __getitem__(self, i):
        noise = torch.rand(6) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1
        return self.x[i] + noise, self.x[i].sum(0, keepdim=True).sin()


def net():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
    return nn.Sequential(*layers).double()


def mixing(model, batch):
    x, y = batch
    lam = np.random.beta(0.4, 0.4) if random.random() < 0.5 else 1.0
    output = model(lam * x + (1 - lam) * x.roll(1, 0))
    return nn.functional.mse_loss(output.double(), y), {"output": output}


def halves(model, batch):
    x, y = batch
    output = model(x.float())
    return nn.functional.mse_loss(output.float(), y.float()), {"output": output}


largest = lambda aux, batch: fl.Max(aux["output"].max())


def one_cycle(optimizer, run):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=run.total_steps)


def loader(kind=DataLoader, **kwargs):
    # 7 batches, the last of 2
    return kind(Augmented(), **{"batch_size": 3, "shuffle": True, **kwargs})


class Flipped(DataLoader):
    def __iter__(self):
        return (tuple(part.flip(0) for part in batch) for batch in super().__iter__())


def streamed():
    x = Augmented().x
    for i in range(7):
        noise = torch.rand(1) + random.random() + np.random.rand()
        yield x[3 * i : 3 * i + 3] + noise, torch.ones(min(3, 20 - 3 * i), 1, dtype=torch.float64)


class Streamed(IterableDataset):
    def __iter__(self):
        return streamed()


VALID = list(loader(shuffle=False))[:2]
COSINE = fl.schedule(schedules.cosine(warmup=3))
FP16 = fl.amp("fp16", init_scale=2.0**18, growth_interval=3)
RUNS = {  # what composes the step, its loss, and the loader
    "workers": ((), mixing, loader(num_workers=2)),
    "persistent workers": ((fl.clip(0.1),), mixing, loader(num_workers=1, persistent_workers=True)),
    "torch scheduler": ((fl.torch_scheduler(one_cycle), fl.clip_value(0.1)), mixing, loader()),
    "bf16": ((fl.amp("bf16"), fl.metric(largest=largest)), mixing, loader()),
    "fp16 that skips, under a schedule of the whole run": ((FP16, COSINE), halves, loader()),
    "generator function": ((fl.schedule(schedules.exponential(0.9)),), mixing, streamed),
    "persistent workers of a stream": (
        (), mixing, DataLoader(Streamed(), None, num_workers=1, persistent_workers=True)),
    "own iter": ((), mixing, loader(Flipped)),
    "own iter and generator": (
        (), mixing, loader(Flipped, generator=torch.Generator().manual_seed(3))),
    "list": ((fl.clip(0.1),), mixing, list(loader(shuffle=False))),
    "accumulated": (
        (fl.accumulate(2), fl.clip(0.1), fl.schedule(schedules.linear())), mixing, loader()),
    "accumulated, workers, fp16": ((FP16, fl.accumulate(3)), halves, loader(num_workers=1)),
}  # fmt: skip
FAST_RUNS = ("accumulated", "own iter and generator")


@pytest.mark.parametrize(("members", "loss_fn", "data"), [
    pytest.param(*run, id=name, marks=[] if name in FAST_RUNS else [pytest.mark.slow])
    for name, run in RUNS.items()
])  # fmt: skip
def test_a_run_resumed_at_any_split_equals_an_uninterrupted_one(tmp_path, members, loss_fn, data):
    make = fl.pipeline(*members)(loss_fn)

    def new(seed):
        torch.manual_seed(seed)
        model = net().float() if loss_fn is halves else net()
        adamw = torch.optim.AdamW(model.parameters(), lr=0.02)
        return fl.TrainState.create(model, adamw, seed=seed)

    def train(state, stop=10**6):
        return fl.fit(make, state, (data, VALID), epochs=2, hooks=(stop_at(stop),))

    whole = train(new(0))
    updates = whole.step + whole.skipped
    assert updates == 2 * math.ceil(7 / make.window)
    for split in range(1, updates):
        paused = train(new(0), split)
        assert paused.step + paused.skipped == split
        # A new model with another seed
        restored = fl.restore(fl.save(paused, tmp_path / "state"), new(99))
        assert restored.stop == "here"
        later = train(attrs.evolve(restored, stop=None), split + 2)  # resume a resumed run too
        if later.stop and split + 2 < updates:
            later = fl.restore(fl.save(later, tmp_path / "state"), new(98))
        assert_same(train(attrs.evolve(later, stop=None)), whole)


def test_a_checkpoint_at_the_end_of_an_epoch_starts_the_next_one_or_ends_the_run(tmp_path):
    hooks = (fl.checkpoint(tmp_path),)
    fl.fit(step, toy(), [ONE] * 3, epochs=1, hooks=hooks)
    for epochs in (1, 2, 2):  # a run that has ended does nothing more
        state = fl.resume(tmp_path, toy())
        assert state.batch == 0 and state.step == 3 * state.epoch
        state = fl.fit(step, state, [ONE] * 3, epochs=epochs, hooks=hooks)
        assert (state.step, len(state.history)) == (3 * epochs, epochs)
    assert state.model.w.item() == -6.0


def test_once_does_not_run_again_after_a_resume(tmp_path):
    steps = []
    hooks = (fl.once(lambda state: steps.append(state.step) or state),)
    state = fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=hooks)
    fl.fit(step, fl.restore(fl.save(state, tmp_path / "a"), toy()), [ONE] * 4, hooks=hooks)
    assert steps == [1]
