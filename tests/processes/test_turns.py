"""Steps in turn on several processes equal those in one, with batches that do not divide evenly."""

import attrs
import pytest
import torch
import torch.distributed as dist
from launch import results
from process_problems import (
    COUNTS,
    accuracy,
    by_tokens,
    default_dtype,
    difference,
    entropy,
    loader,
    said,
    world,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop import schedules

pytestmark = pytest.mark.slow


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.d(x)


def real_and_fake(model, batch):
    """The noise is made of the batch, so it does not depend on the number of processes."""
    fake = model.g(batch[0][:, :3]).detach()
    loss, aux = entropy(model, batch)
    return loss + model.d(fake).square().mean(), aux


def fooled(model, batch):
    return nn.functional.cross_entropy(model.d(model.g(batch[0][:, :3])), batch[1])


def of_each_token(model, batch):
    x, y, tokens, _ = batch
    fake = model.g(x[:, :3])
    losses = nn.functional.cross_entropy(model.d(fake), y, reduction="none") * tokens
    return losses.sum() / tokens.sum(), {"weight": tokens.sum()}


ACCURACY = fl.metric(accuracy=accuracy, last=lambda aux, batch: fl.Last(batch[3][-1]))
CASES = {
    "same": ((), (), {"order": ("d", "d", "g")}),
    "next": ((ACCURACY,), (fl.clip(0.5),), {"order": ("d", "d", "g"), "batch": "next"}),
    "windows": (
        (fl.accumulate(2), ACCURACY, fl.clip(0.5)),
        (fl.accumulate(2), fl.schedule(schedules.linear())),
        {"evaluate": "g"},
    ),
    "unequal windows": ((fl.accumulate(3),), (fl.sam(0.05),), {"batch": "next"}),
}


def new(shard=False):
    torch.manual_seed(0)
    model = Gan()
    model.unused.requires_grad_(False)
    if shard:
        fully_shard(model)
    optimizers = {
        "d": torch.optim.AdamW(model.d.parameters(), lr=0.02),
        "g": torch.optim.SGD(model.g.parameters(), lr=0.1, momentum=0.9),
    }
    return fl.TrainState.create(model, optimizers, seed=3)


def step_of(name, g_loss=fooled):
    d, g, settings = CASES[name]
    steps = {"d": fl.pipeline(*d)(real_and_fake), "g": fl.pipeline(*g)(g_loss)}
    return fl.pipeline(fl.ema(0.9, evaluate=False))(fl.alternate(steps, **settings))


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).tolist()


def come_to(state):
    records = [{**r.metrics} for r in state.history if not r.closing]
    ema = state.slots["ema"]
    return {
        "weights": flat(state.model.parameters()),
        "ema": flat(ema[name] for name in sorted(ema)),
        "counters": [state.step, state.epoch, state.batch, dict(state.updates)],
        "records": records,
        "flags": [p.requires_grad for p in state.model.parameters()],
    }


@fl.middleware("gradient")
def guard():
    """Leave one update of a turn out, by the word of the last process alone."""

    def wrap(step):
        def guarded(state, batch):
            last = state.backend.rank == state.backend.world_size - 1
            fourth = state.batch == 3 * state.backend.world_size
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="the guard") if fourth and last else out

        return guarded

    return wrap


def draws(folder):
    """Return what the turns of a round draw: twice that of d, then that of g."""
    seen = []

    def drawn(loss_fn):
        def drawing(model, batch):
            seen.append(torch.rand(()).item())
            return loss_fn(model, batch)

        return fl.pipeline()(drawing)

    steps = {"d": drawn(real_and_fake), "g": drawn(fooled)}
    step = fl.alternate(steps, order=("d", "d", "g"))
    fl.fit(step, new(), loader(), epochs=1, steps=2, hooks=())
    return seen


def job(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        # Of 41 samples, batches of 4 leave padding for the second of 2 processes.
        for size in (6,) if world() == 3 else (6, 4):
            data = {"train": loader(size=size // world()), "valid": loader(size=5)}
            for name in CASES:
                state = fl.fit(step_of(name), new(), data, epochs=2, hooks=())
                found[f"{name}, {size}"] = come_to(state)
        data = {"train": loader(), "valid": loader(size=5)}
        state = fl.fit(step_of("same", of_each_token), new(), data, epochs=2, hooks=())
        found["tokens"] = come_to(state)
        steps = {"d": fl.pipeline(guard())(by_tokens), "g": fl.pipeline()(fooled)}
        state = fl.fit(fl.pipeline(fl.ema(0.9))(fl.alternate(steps)), new(), data, hooks=())
        found["guard"] = come_to(state)

        # In the middle of an epoch, on as many processes and, by the test, on others.
        path, step = folder.parent / f"paused-{world()}", step_of("next")
        train = loader(size=6 // world())
        pause = fl.when(lambda state: state.step == 2)(lambda s: attrs.evolve(s, stop="paused"))
        state = fl.fit(step, new(), train, epochs=2, hooks=(pause,))
        fl.save(state, path)
        state = attrs.evolve(fl.restore(path, new()), stop=None)
        found["resumed"] = come_to(fl.fit(step, state, train, epochs=2, hooks=()))
        found["whole"] = come_to(fl.fit(step, new(), train, epochs=2, hooks=()))
        if world() == 2:
            state = attrs.evolve(fl.restore(folder.parent / "paused-1", new()), stop=None)
            found["resumed by others"] = come_to(fl.fit(step, state, train, epochs=2, hooks=()))
        found["draws"] = draws(folder)
        if world() > 1:
            state = new(shard=True)
            found["sharded"] = said(lambda: fl.fit(step_of("same"), state, train, hooks=()))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alternate")
    return {n: results(folder / str(n), n, job, timeout=180) for n in COUNTS}


NAMES = [*(f"{name}, 6" for name in CASES), "tokens", "guard"]
ON_TWO = [f"{name}, 4" for name in CASES]


def assert_close(one, other):
    assert other["counters"] == one["counters"]
    assert other["flags"] == one["flags"]
    assert difference(other["weights"], one["weights"]) < 1e-12
    assert difference(other["ema"], one["ema"]) < 1e-12
    assert len(one["records"]) == len(other["records"])
    for mine, theirs in zip(other["records"], one["records"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(
    ("n", "name"), [*((n, name) for n in (2, 3) for name in NAMES), *((2, name) for name in ON_TWO)]
)
def test_turns_on_several_processes_equal_those_on_one(runs, n, name):
    (one,) = runs[1]
    for found in runs[n]:
        assert_close(one[name], found[name])


def test_a_turn_that_one_process_skips_is_skipped_by_all(runs):
    for n in COUNTS:
        for found in runs[n]:
            assert found["guard"]["counters"][3] == {"d": 6, "g": 7}


def test_turns_are_resumed_bit_for_bit_on_as_many_processes(runs):
    for n in COUNTS:
        for found in runs[n]:
            assert found["resumed"]["weights"] == found["whole"]["weights"]
            assert found["resumed"]["records"] == found["whole"]["records"]


def test_turns_are_resumed_on_another_number_of_processes(runs):
    (one,) = runs[1]
    for found in runs[2]:
        assert difference(found["resumed by others"]["weights"], one["whole"]["weights"]) < 1e-12


def test_each_turn_and_each_process_draws_numbers_of_its_own(runs):
    for n in COUNTS:
        drawn = [number for found in runs[n] for number in found["draws"]]
        assert len(drawn) == 6 * n == len(set(drawn))


def test_fully_shard_is_refused(runs):
    for found in runs[2]:
        assert "NotImplementedError: alternate does not work with fully_shard" in found["sharded"]
