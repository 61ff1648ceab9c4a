"""ema(decay=fn, only=...): warm-ups as other libraries have them, and averages of parts."""

import math

import attrs
import pytest
import torch
from torch import nn
from toy_runs import ONE, fitted, noting, of, of_timm

import fnloop as fl
from fnloop.testing import Toy, small

HALVES = (0.0, 0.5, 1.0, 0.5)  # the decay of each update


def halves(n):
    return HALVES[n]


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, [-1, -1.5, -1.5, -2.75]), ({"every": 2}, [0, -2, -2, -3]),
    ({"start": 2}, [-1, -2, -3, -3.5]),
], ids=repr)  # fmt: skip
def test_a_rule_is_given_the_number_of_averages_before(settings, expected):
    """The weights are -1, -2, -3 and -4."""
    asked = []
    member = fl.ema(lambda n: asked.append(n) or halves(n), **settings)
    note, found = noting(lambda state: state.slots["ema"]["w"].item())
    state = fitted([1] * 4, member, hooks=(note,))
    assert found == expected
    assert asked == [*range(len(asked))] and state.slots["ema"].count == len(asked)


def test_a_phase_continues_the_average():
    state = None
    for phase in ("one", "two"):
        state = fitted([1] * 2, fl.ema(halves), state=state, phase=phase)
    assert state.slots["ema"]["w"].item() == -2.75


def warmed_up(n, decay=0.97, gamma=4.0, power=2 / 3):
    return min(decay, 1 - (1 + n / gamma) ** -power)


class Timm:
    """As timm's train.py calls it: with the number of updates made."""

    def __init__(self, model):
        make = of_timm("utils/model_ema.py", "ModelEmaV3")
        settings = {"use_warmup": True, "warmup_gamma": 4.0, "warmup_power": 2 / 3}
        self.made = make(model, decay=0.97, **settings)
        self.module = self.made.module

    def update(self, model, step):
        self.made.update(model, step=step)


class Diffusers:
    """``EMAModel(use_ema_warmup=True)`` of diffusers, written out."""

    def __init__(self, model):
        self.module, self.optimization_step = fl.snapshot(of(model)).model, 0

    @torch.no_grad()
    def update(self, model, step):
        self.optimization_step += 1
        n = max(0, self.optimization_step - 1)
        decay = 0.0 if n <= 0 else 1 - (1 + n / 4.0) ** -(2 / 3)
        decay = max(min(decay, 0.97), 0.0)
        for mine, p in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.sub_((1 - decay) * (mine - p))


@pytest.mark.parametrize(("make", "close"), [(Timm, 0), (Diffusers, 1e-11)])
def test_the_warm_ups_of_others(make, close):
    """That of DINO: tests/_step/test_original_loops.py."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    theirs = make(model)
    update = lambda state: theirs.update(state.model, state.step) or state
    settings = {"loss_fn": fl.supervised(nn.MSELoss()), "state": of(model, lr=0.1), "epochs": 2}
    state = fitted(small().batches, fl.ema(warmed_up), hooks=(update,), **settings)
    mine = fl.averaged(state).model
    assert state.step == 14 and not torch.equal(mine[0].weight, state.model[0].weight)
    for p, right in zip(mine.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(p, right, rtol=close, atol=close)


class Two(nn.Module):
    """In an update on ONE each weight falls by 1, and each mean rises by 4."""

    def __init__(self):
        super().__init__()
        self.a, self.b = One(), One()

    def forward(self, x):
        return self.a(x) + self.b(x)


class One(Toy):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 4
        return super().forward(x)


def mean_output(model, batch):
    return model(batch).mean()


def two(only, n=2, state=None, evaluate=True, **settings):
    member = fl.ema(0.5, only=only, evaluate=evaluate)
    loaders = {"train": [ONE] * n, "valid": [ONE]}
    state = of(Two()) if state is None else state
    return fitted(loaders, member, loss_fn=mean_output, state=state, **settings)


@pytest.mark.parametrize(("only", "names"), [
    ("a", ["a.w", "a.seen"]), (["a.*", "b.w"], ["a.w", "b.w"]),
    (lambda name, p: name.startswith("b"), ["b.w"]), ("*", ["a.w", "b.w", "a.seen", "b.seen"]),
])  # fmt: skip
def test_what_is_not_chosen_is_that_of_the_model(only, names):
    """The averages are (0 - 1) / 2, then (-0.5 - 2) / 2; of the buffers 2 and 5."""
    state = two(only)
    assert [*state.slots["ema"]] == names
    found = fl.averaged(state).model.state_dict()
    averages, model = {"w": -1.25, "seen": 5.0}, {"w": -2.0, "seen": 8.0}
    for name, value in found.items():
        assert value.item() == (averages if name in names else model)[name[2:]], name
    weights = [found["a.w"], found["b.w"]]
    assert state.history["valid/ema/loss"] == (sum(w.item() for w in weights),)
    assert state.history["valid/loss"] == (-4.0,)


def test_a_module_is_chosen_too():
    model = Two()
    assert [*two(model.a, state=of(model)).slots["ema"]] == ["a.w", "a.seen"]


def test_the_rest_is_that_of_the_model_at_the_time():
    state = two("a")
    before = fl.averaged(state)
    with torch.no_grad():
        state.model.b.w.fill_(7.0)
    assert (before.model.b.w.item(), fl.averaged(state).model.b.w.item()) == (-2.0, 7.0)
    step = fl.pipeline(fl.ema(0.5, only="a"))(mean_output)
    assert fl.evaluate(step, state, [ONE])["ema/loss"] == -1.25 + 7.0
    assert state.model.a.w.item() == -2.0 and before.model.b.w is not state.model.b.w


def test_an_average_of_other_parts_is_named():
    match = r"is of other parts of the model than only= chooses \(a.w differs\)"
    with pytest.raises(ValueError, match=match):
        two("b", state=attrs.evolve(two("a"), stop=None), epochs=2)


def test_turns_have_an_average_of_one_of_them():
    model = Two()
    optimizers = {k: torch.optim.SGD(model.get_submodule(k).parameters(), lr=1.0) for k in "ab"}
    step = fl.alternate({k: fl.pipeline(fl.schedule(lambda i, n: 1.0))(mean_output) for k in "ab"})
    around = fl.pipeline(fl.ema(0.5, only="b.*"), fl.schedule(lambda i, n: 0.1, "weight_decay"))
    state = fl.TrainState.create(model, optimizers)
    state = fl.fit(around(step), state, [ONE] * 2, hooks=())
    assert {k: v.item() for k, v in state.slots["ema"].items()} == {"b.w": -1.25}


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: fl.ema(fl.schedules.cosine()), TypeError, r"Schedule takes .step: 'int', total"),
    (lambda: fl.ema(name="a" * 201), ValueError, "ema expects name of at most 200 characters"),
    (lambda: fl.swa(name="a" * 300), ValueError, "name of a file has it; got 300: aaaaa"),
    (lambda: two("c"), ValueError, 'nothing in the Two has a name like "c"'),
    (lambda: two(Two().a), ValueError, "ema: this One is not a module of the state's Two"),
])  # fmt: skip
def test_a_wrong_argument_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("given", "error", "shown"),
    [(1.5, ValueError, "1.5"), (None, TypeError, "None"), (math.nan, ValueError, "nan"),
     (torch.tensor(0.5), TypeError, "Tensor")],
)  # fmt: skip
def test_a_rule_returns_a_number_from_0_to_1(given, error, shown):
    def rule(n):
        return given if n else 0.5

    with pytest.raises(error, match=r"ema expects decay\(1\) of rule .*<= 1; got") as caught:
        fitted([1] * 2, fl.ema(rule))
    assert shown in str(caught.value) and caught.value.state.step == 1
    assert caught.value.state.slots["ema"].count == 1


def test_only_parts_that_have_a_mean():
    model = nn.Module()
    model.w, model.n = nn.Parameter(torch.zeros(())), nn.Module()
    model.n.register_buffer("calls", torch.tensor(0))
    loss_fn = lambda model, batch: model.w * batch.mean()
    with pytest.raises(ValueError, match="ema: only= chooses nothing that has a mean"):
        fitted([1], fl.ema(only="n"), loss_fn=loss_fn, state=of(model))
