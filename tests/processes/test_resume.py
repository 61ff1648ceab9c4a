"""Checkpoints are independent of the number of processes."""

import itertools
import math
import random

import attrs
import numpy as np
import pytest
from joined import COUNTS, FEW, come_to, difference, flat, in_double, rank, said, world
from launch import reads, written_by
from process_data import SIZE, batches, count, loader, tally
from process_metrics import items
from process_problems import (
    adam_sgd,
    adamw,
    by_tokens,
    created,
    dropping,
    entropy,
    fitted,
    network,
)
from sample_hooks import stop_at
from sample_middleware import halved, warming_up
from test_training import Gan, fooled, own, real_and_fake, turns, two, weighted

import fnloop as fl

pytestmark = pytest.mark.slow
CLOSE = 1e-11


def noisy(model, batch):
    loss, aux = entropy(model, batch)
    return loss * (1 + 0.1 * np.random.rand() + 0.1 * random.random()), aux


@attrs.frozen
class Kind:
    """A run of 2 epochs that is cut in the middle of one."""

    members: tuple
    cut: int = 6  # updates until it is saved, of 4 in an epoch
    optimizer: object = adamw
    make: object = network
    loss: object = entropy
    size: object = None
    ends: tuple = (8, 2, 0)

    def train(self, shard=False, folder=None, until=None):
        state = created(shard, self.optimizer, self.make)
        state = state if folder is None else fl.resume(folder, state)
        train, often = loader(size=self.size, shuffle=True), {"record_every": fl.every(steps=3)}
        step = fl.pipeline(*self.members)(self.loss)
        state = fl.fit(step, state, train, epochs=2, hooks=(stop_at(until),), **often)
        return attrs.evolve(state, stop=None)

    def result(self, *given):
        state = self.train(*given)
        averages = [t for s in ("ema", "swa") for t in state.slots.get(s, {}).values()]
        return {**come_to(state), "averages": flat(averages) if averages else [1.0]}


USUAL = fl.accumulate(2), fl.clip(0.5)
COSINE = fl.schedules.cosine(warmup=0.1)
PART = fl.ema(warming_up, only="0", evaluate=False)
GAN = {"make": Gan, "optimizer": two}
AVERAGES = fl.ema(0.9, evaluate=False), fl.swa(2, every=2, evaluate=False)
KINDS = {
    "plain": Kind((*USUAL, fl.schedule(COSINE), *AVERAGES)),
    "several": Kind((*USUAL, fl.schedule(COSINE, only="rest")), optimizer=adam_sgd),
    "noisy": Kind((*USUAL, fl.schedule(COSINE)), loss=noisy, make=dropping),
    "total": Kind((fl.accumulate(total=8), fl.schedule(COSINE)), size=2, cut=8, ends=(12, 2, 0)),
    "turns": Kind(
        (fl.ema(0.9, evaluate=False),), cut=4, ends=(6, 2, 0), **GAN,
        loss=turns([], [fl.clip(0.5)], order=("d", "d", "g"), batch="next")),
    "own": Kind((*USUAL, PART), loss=own(by_tokens)),
    "own turn": Kind(
        (), cut=5, ends=(8, 2, 0), **GAN, loss=fl.alternate(
            {"d": own(real_and_fake), "g": fl.pipeline()(fooled)}, order=("d", "d", "g"),
            batch={"d": "next", "g": "same"})),
    "rates": Kind((fl.torch_scheduler(halved), PART), cut=9, ends=(14, 2, 0), loss=by_tokens),
    "scheduled": Kind(
        (fl.scheduled(beta=fl.schedules.linear(min_ratio=0.1)),), cut=5, ends=(14, 2, 0),
        loss=weighted),
}  # fmt: skip
SHARDED = ("plain", "several")
# Each kind, and how it is saved and resumed: on a sharded model or not. Draws depend on the number.
PAIRS = [
    *((kind, a, b) for kind in SHARDED for a in (False, True) for b in (False, True)),
    *((kind, False, False) for kind in KINDS if kind not in SHARDED),
]


def counted(batch_size, folder=None, steps=None):
    state = tally() if folder is None else fl.resume(folder, tally())
    step = fl.pipeline(fl.metric(samples=lambda aux, batch: fl.Sum(len(batch[-1]))), items())(count)
    train = loader(size=batch_size, shuffle=True)
    return fl.fit(step, state, train, epochs=1, steps=steps, hooks=())


@in_double
def saves(folder):
    """Save runs in the middle of an epoch; return what they come to if they are not interrupted."""
    found = {}
    for name, kind in KINDS.items():
        for shard in (False, True) if name in SHARDED else (False,):
            fl.save(kind.train(shard, until=kind.cut), folder / f"{name} {shard}" / "half")
            found[f"{name} {shard}"] = kind.result(shard)
    fl.save(counted(4, steps=2), folder / "tally" / "half")
    return found


@reads(saves, COUNTS)
@in_double
def resumes(folder):
    found = {}
    for n in COUNTS:
        saved = written_by(saves, n, folder)
        for name, before, after in PAIRS:
            if name != "noisy" or n == world():
                one = KINDS[name].result(after, saved / f"{name} {before}")
                found[f"{name} of {n}, {before} to {after}"] = one
        state = counted(3, saved / "tally")
        row = state.history[-1].metrics
        shares = (-state.model.w).tolist()
        found[f"tally of {n}"] = [shares, state.step, row["train/items"], row["train/samples"]]
    mine = written_by(saves, 1, folder) / "plain False" if rank() else folder / "nothing"
    begun = fitted(batches(1), steps=1)
    return {**found, "main sees none": said(lambda: fl.resume(mine, begun).step)}


@pytest.mark.parametrize("n", COUNTS)
def test_a_run_saved_on_any_number_of_processes_resumes_on_any_other(launched, n):
    expected, whole_runs = launched(saves, 1)[0], launched(saves, n)[0]
    mine, *others = launched(resumes, n)
    assert all(other == mine for other in others)
    for (name, before, after), saved_on in itertools.product(PAIRS, COUNTS):
        if saved_on != n and name == "noisy":
            continue
        found, right = mine[f"{name} of {saved_on}, {before} to {after}"], expected[f"{name} False"]
        if saved_on == n and before == after:
            assert found == whole_runs[f"{name} {after}"], name  # bit for bit
        if name != "noisy":
            assert found["updates"] == right["updates"], name
            assert found["counters"] == right["counters"] == [*KINDS[name].ends], name
            for part in ("weights", "averages", "history"):
                assert difference(right[part], found[part]) < CLOSE, (name, part)


@pytest.mark.parametrize("n", COUNTS)
def test_the_rest_of_an_epoch_is_trained_once(launched, n):
    for saved_on in COUNTS:
        shares, step, *counts = launched(resumes, n)[0][f"tally of {saved_on}"]
        assert step == 2 + math.ceil((SIZE - 2 * 4 * saved_on) / (3 * n))
        assert min(shares) > 0 and sum(shares) == pytest.approx(step, rel=1e-12)
        assert counts == pytest.approx([SIZE, SIZE], rel=1e-12)


@pytest.mark.parametrize("n", COUNTS)
def test_a_run_does_not_begin_again_where_another_process_sees_a_checkpoint(launched, n):
    for mine in launched(resumes, n):
        if n == 1:
            assert mine["main sees none"] == 1
        else:
            assert mine["main sees none"].startswith("CheckpointError: process 1 on ")
            assert "All machines of a run must share the folder" in mine["main sees none"]


# --- the best weights

SAVED, END = 4, 5  # epochs; from the fourth on, the loss rises again
FALLING = fl.schedule(lambda i, total: 1.0 if i < 0.6 * total else -1.0)


def best_of(shard, folder=None, saved=None, hooks=None):
    state = created(shard, adamw)
    state = state if saved is None else fl.resume(saved, state)
    save = lambda state: fl.save(state, folder / str(shard) / "a") and state
    saves = fl.when(lambda state: (state.epoch, state.batch) == (SAVED, 0))(save)
    usual = (fl.restore_best("valid/loss"), *((saves,) if folder else ()))
    loaders = {"train": loader(shuffle=True), "valid": loader()}
    step = fl.pipeline(FALLING, fl.ema(0.5, evaluate=False))(entropy)
    state = fl.fit(step, state, loaders, epochs=END, hooks=usual if hooks is None else hooks)
    valid = list(state.history["valid/loss"])
    return {**come_to(state), "average": flat(state.slots["ema"].values()), "valid": valid}


@in_double
def ends(folder):
    found = {str(shard): best_of(shard, folder) for shard in (False, True)}
    found["last"] = best_of(True, hooks=())
    return {**found, "refused": said(lambda: fl.on_main(fl.restore_best("valid/loss")))}


@reads(ends, FEW)
@in_double
def resumes_to_the_best(folder):
    ways = itertools.product(FEW, (False, True), (False, True))
    return [best_of(b, saved=written_by(ends, n, folder) / str(a)) for n, a, b in ways]


@pytest.mark.parametrize("n", FEW)
def test_any_number_of_processes_ends_with_the_same_best_weights(launched, n):
    right = launched(ends, 1)[0]["False"]
    losses = launched(ends, 1)[0]["last"]["valid"]
    assert min(range(END), key=losses.__getitem__) == 2
    for mine, resumed in zip(launched(ends, n), launched(resumes_to_the_best, n), strict=True):
        assert mine["last"]["valid"] == pytest.approx(losses, rel=CLOSE)
        assert "needs all processes" in mine["refused"]
        for found in (mine["False"], mine["True"], *resumed):
            assert found["counters"] == right["counters"]
            for part in ("weights", "average"):
                assert difference(right[part], found[part]) < CLOSE
                assert difference(mine["last"][part], found[part]) > 0.01
