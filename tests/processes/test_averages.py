"""Averages on several processes, and what is frozen and trained again: as on one."""

import attrs
import pytest
import torch
from joined import flat, in_double, rank, said, world
from process_data import loader
from process_problems import adamw, created, entropy
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._core.view import shown
from fnloop._step.engine import engine_of

pytestmark = pytest.mark.slow
EMA = fl.ema(0.9)
state_of = lambda shard=False: created(shard, adamw, normed, seed=3)
normed = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def one_process():
    """Return a state that each process trains for itself."""
    torch.manual_seed(rank())
    model = normed()
    state = fl.TrainState.create(model, adamw(model.parameters()), backend=Backend("cpu"))
    batches = [(x * (1 + rank()), *rest) for x, *rest in loader(drop_last=True)]
    return fl.fit(fl.pipeline(EMA)(entropy), state, batches, epochs=2, hooks=())


@in_double
def averages(folder):
    step = fl.pipeline(EMA, fl.accumulate(2))(entropy)
    data = {"train": loader(shuffle=True, drop_last=True), "valid": loader(size=5)}
    # The statistics of BatchNorm are of each process's own share. Those of the main one count.
    state = fl.fit(step, state_of(), data, epochs=2, hooks=())
    averaged = fl.averaged(state)
    found = {"reported": state.history[-1].metrics["valid/ema/loss"]}
    found["evaluated"] = fl.evaluate(step, averaged, data["valid"])["loss"]
    path = fl.save(averaged, folder / "normed")
    model = normed()
    model.load_state_dict(load_file(path / "model.safetensors"))
    with torch.no_grad():
        losses = [len(b[0]) * entropy(model.eval(), b)[0] for b in loader(size=5)]
    found["alone"] = (sum(losses) / 41).item()

    averaged = fl.update_batchnorm(step, averaged, loader(size=6))
    norm = averaged.model[1]
    parts = averaged.model[0](torch.cat([b[0] for b in loader(size=6)])).split(6)
    found["batches"] = int(norm.num_batches_tracked)
    over_parts = lambda of: flat([torch.stack([of(p, 0) for p in parts]).mean(0)])
    found["mean"] = flat([norm.running_mean]), over_parts(torch.mean)
    found["var"] = flat([norm.running_var]), over_parts(torch.var)
    if world() > 1:
        unseen = fl.pipeline(fl.ema(0.9, evaluate=False))(entropy)
        both = [fl.update_batchnorm(unseen, state_of(shard), loader(size=6)) for shard in (0, 1)]
        found["sharded var"] = [flat([s.model[1].running_var]) for s in both]
        with shown(EMA.view, state) as view:
            found["one engine"] = engine_of(attrs.evolve(state, model=view)) is engine_of(state)
        alone = one_process()
        found["of one process"] = [
            fl.evaluate(fl.pipeline(EMA)(entropy), alone, loader())["ema/loss"],
            fl.evaluate(fl.pipeline()(entropy), fl.averaged(alone), loader())["loss"],
        ]
        sharded = fl.fit(unseen, created(True), loader(), steps=1, hooks=())
        found["refused"] = [
            said(lambda: fl.fit(fl.pipeline(EMA)(entropy), created(True), loader(), hooks=())),
            said(lambda: fl.averaged(sharded)),
        ]
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_main_process_s_statistics_count_and_can_be_those_of_all_batches(launched, n):
    for found in launched(averages, n):
        assert found["evaluated"] == pytest.approx(found["reported"], rel=1e-14)
        assert found["alone"] == pytest.approx(found["reported"], rel=1e-12)
        assert found["batches"] == 7
        for what in ("mean", "var", *(["sharded var"] if n > 1 else [])):
            mine, expected = found[what]
            assert mine == pytest.approx(expected, rel=1e-9) and len(mine) == 8


def test_an_average_of_a_sharded_model_is_not_evaluated(launched):
    for found in launched(averages, 2):
        assert found["one engine"]  # a view has that of its model
        ema, averaged = found["of one process"]
        assert ema == averaged
        fit, averaged = found["refused"]
        assert "ema: the average of a model under fully_shard cannot be evaluated" in fit
        assert "write ema(..., evaluate=False), restore a checkpoint into a model that is" in fit
        assert "write save(state, path), and restore that into a model that is not" in averaged


# --- frozen

STEP = fl.pipeline(fl.schedule(fl.schedules.linear()))(entropy)
second_alone = lambda state: fl.unfreeze(fl.freeze(state, "4"), "2.*", lr=0.2)
weights = lambda state: [flat([p]) for p in state.model.parameters()]


def frozen_state(shard, norm=False):
    def make():
        first = nn.BatchNorm1d(8) if norm else nn.Tanh()
        return nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def by_layers(model):
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(layer)

    def of_the_head(parameters):
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        return torch.optim.SGD([*parameters][-2:], **settings)

    return created(by_layers if shard else False, of_the_head, make, seed=3)


@fl.when(lambda state: state.step == 17)
def thaw(state):
    return fl.unfreeze(state, "*", lr=0.05)


def trained(state, name, data=None, hooks=()):
    return fl.fit(STEP, state, data or loader(), epochs=1, hooks=hooks, phase=name)


@in_double
def freezing(folder):
    """Train the head; then the second layer alone; then that and, from a hook on, everything."""
    found = {}
    for kind, shard in (("whole", False), ("sharded", world() > 1)):
        state = trained(fl.freeze(frozen_state(shard), "0", "2"), "head")
        path = fl.save(state, folder / kind)
        found[kind] = [weights(state)]
        for name, change, hooks in (("second", second_alone, ()), ("all", lambda s: s, (thaw,))):
            state = trained(change(state), name, hooks=hooks)
            found[kind].append(weights(state))
        resumed = second_alone(fl.restore(path, frozen_state(shard)))
        found[f"{kind} resumed"] = weights(trained(resumed, "second"))
    state = trained(fl.freeze(frozen_state(False, norm=True), "0", "1"), None)
    found["norm"] = [weights(state)]
    found["tracked"] = int(state.model[1].num_batches_tracked)
    # All but one process begin the second phase with padding.
    state = trained(fl.freeze(frozen_state(False), "0", "2"), "a")
    state = fl.unfreeze(fl.freeze(state, "4"), "0", lr=0.1)
    return {**found, "padded": [weights(trained(state, "b", [*loader(size=6)][:1]))]}


@pytest.mark.parametrize("n", [2, 3])
def test_phases_train_the_same_on_any_number_of_processes(launched, n):
    (one,) = launched(freezing, 1)
    for found in launched(freezing, n):
        for kind in ("whole", "sharded", "norm", "padded"):
            for mine, right in zip(found[kind], one[kind], strict=True):
                assert mine == [pytest.approx(one, rel=1e-9, abs=1e-12) for one in right], kind
            assert kind in ("norm", "padded") or found[f"{kind} resumed"] == found[kind][1]
        assert found["tracked"] == one["tracked"] == 0  # frozen norm layers take no statistics
    head, second, everything = one["whole"]
    assert (second[0], second[4]) == (head[0], head[4]) and second[2] != head[2]
    assert all(a != b for a, b in zip(everything, second, strict=True))
