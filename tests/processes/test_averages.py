"""Averages on several processes: buffers, sharded models, checkpoints, and their statistics."""

import attrs
import pytest
import torch
import torch.distributed as dist
from process_problems import default_dtype, difference, entropy, loader, said, whole, world
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop._core.averages import view_with_average
from fnloop._step.engine import engine_of

pytestmark = pytest.mark.slow
EMA = fl.ema(0.9)
UNSEEN = fl.ema(0.9, evaluate=False)


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def state_of(make, shard=False):
    torch.manual_seed(0)
    model = make()
    if shard:
        fully_shard(model)
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=3)


def flat(tensors):
    return torch.cat([whole(t).detach().flatten() for t in tensors]).tolist()


def job(folder):
    if world() > 1:
        dist.init_process_group("gloo")
    with default_dtype(torch.float64):
        step = fl.pipeline(EMA, fl.accumulate(2))(entropy)
        data = {"train": loader(shuffle=True, drop_last=True), "valid": loader(size=5)}
        found = {}

        # The statistics of BatchNorm are of each process's own share. Those of the main one count.
        state = fl.fit(step, state_of(normed), data, epochs=2, hooks=())
        averaged = fl.averaged(state)
        found["reported"] = state.history[-1].metrics["valid/ema/loss"]
        found["evaluated"] = fl.evaluate(step, averaged, data["valid"])["loss"]
        path = fl.save(averaged, folder / f"normed-{world()}")
        file = load_file(path / "model.safetensors")
        model = normed()
        model.load_state_dict(file)
        with torch.no_grad():
            losses = [len(b[0]) * entropy(model.eval(), b)[0] for b in loader(size=5)]
        found["alone"] = (sum(losses) / 41).item()

        averaged = fl.update_batchnorm(step, averaged, loader(size=6))
        norm = averaged.model[1]
        found["mean"], found["batches"] = flat([norm.running_mean]), int(norm.num_batches_tracked)
        hidden = averaged.model[0](torch.cat([b[0] for b in loader(size=6)]))
        parts = hidden.split(6)
        found["expected mean"] = torch.stack([part.mean(0) for part in parts]).mean(0).tolist()
        found["var"] = flat([norm.running_var])
        found["expected var"] = torch.stack([part.var(0) for part in parts]).mean(0).tolist()

        # Saved in the middle of a run, and continued by another number of processes.
        step = fl.pipeline(UNSEEN, fl.swa(2, every=2, evaluate=False))(entropy)
        for name, shard in (("whole", False), ("sharded", world() > 1)):
            first = fl.fit(step, state_of(plain, shard), loader(), epochs=1, steps=5, hooks=())
            fl.save(first, folder.parent / f"{name}-{world()}")
            last = fl.fit(step, first, loader(), epochs=2, hooks=())
            found[name] = [flat(last.slots[slot].values()) for slot in ("ema", "swa")]
        if world() > 1:
            both = [state_of(normed), state_of(normed, True)]
            both = [fl.update_batchnorm(step, one, loader(size=6)) for one in both]
            found["statistics"] = [flat([s.model[1].running_var]) for s in both]
            view = view_with_average(state.model, state.model, state.slots["ema"])
            same = engine_of(attrs.evolve(state, model=view)) is engine_of(state)
            found["one engine"] = same
            sharded = state_of(plain, True)
            found["refused"] = [
                said(lambda: fl.fit(fl.pipeline(EMA)(entropy), sharded, loader(), hooks=())),
                said(lambda: fl.averaged(last)),
            ]
    return found


def resumed(folder):
    """Continue from the checkpoints of 1, 2 and 3 processes, whole and sharded."""
    if world() > 1:
        dist.init_process_group("gloo")
    found = {}
    with default_dtype(torch.float64):
        step = fl.pipeline(UNSEEN, fl.swa(2, every=2, evaluate=False))(entropy)
        for name in ("whole", "sharded"):
            for n in (1, 2, 3):
                for shard in {False, world() > 1}:
                    path = folder.parent / f"{name}-{n}"
                    state = fl.restore(path, state_of(plain, shard))
                    state = fl.fit(step, state, loader(), epochs=2, hooks=())
                    found[f"{name}-{n}-{shard}"] = [
                        flat(state.slots[slot].values()) for slot in ("ema", "swa")
                    ]
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_main_process_s_statistics_count(launched, n):
    for found in launched(job, n):
        assert found["evaluated"] == pytest.approx(found["reported"], rel=1e-14)
        assert found["alone"] == pytest.approx(found["reported"], rel=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_statistics_are_of_all_batches(launched, n):
    for found in launched(job, n):
        assert found["batches"] == 7
        for what in ("mean", "var"):
            assert found[what] == pytest.approx(found[f"expected {what}"], rel=1e-9)


@pytest.mark.parametrize("n", [2, 3])
def test_a_sharded_model_has_the_same_statistics(launched, n):
    for found in launched(job, n):
        one, two = found["statistics"]
        assert two == pytest.approx(one, rel=1e-12) and len(one) == 8


@pytest.mark.parametrize("n", [2, 3])
def test_a_view_has_the_engine_of_its_model(launched, n):
    assert all(found["one engine"] for found in launched(job, n))


@pytest.mark.parametrize("n", [2, 3])
def test_an_average_that_would_not_be_evaluated_is_refused(launched, n):
    for found in launched(job, n):
        fit, averaged = found["refused"]
        assert "ema: the average of a model under fully_shard cannot be evaluated" in fit
        assert "write ema(..., evaluate=False), restore a checkpoint into a model that is" in fit
        assert "write save(state, path), and restore that into a model that is not" in averaged


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_checkpoint_of_n_processes_is_continued_by_m(launched, n):
    whole_run = launched(job, 1)[0]["whole"]
    for m in (1, 2, 3):
        launched(job, m)
    for found in launched(resumed, n):
        for name, averages in found.items():
            for mine, expected in zip(averages, whole_run, strict=True):
                assert difference(mine, expected) < 1e-12, name
    # On as many processes as before, bit for bit.
    same = launched(job, n)[0]
    found = launched(resumed, n)[0]
    assert found[f"whole-{n}-False"] == same["whole"]
    if n > 1:
        assert found[f"sharded-{n}-True"] == same["sharded"]
