"""Several optimizers: what may be given, and runs that equal a loop by hand, bit for bit."""

import copy
import pickle
import re

import attrs
import pytest
import test_laws as laws
import torch
from several import problem, single_precision
from torch import nn
from torch.optim.lr_scheduler import StepLR
from toy_runs import xs

import fnloop as fl
from fnloop import schedules
from fnloop._core.settings import forget_schedules
from fnloop.testing import Toy, toy, toy_loss

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
HALF, LINEAR = schedules.exponential(0.5), schedules.linear()


class Pair(nn.Module):
    """The gradient of ``a`` is x, and that of ``b`` is -x."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (self.a - self.b) * x


def pair(a=1.0, b=10.0):
    model = Pair()
    optimizers = {"first": SGD([model.a], lr=a), "second": SGD([model.b], lr=b)}
    return fl.TrainState.create(model, optimizers, seed=0)


def weights(state):
    return state.model.a.item(), state.model.b.item()


# --- what may be given


def of(*parameters):
    return SGD(parameters, lr=0.1)


@pytest.mark.parametrize(("make", "said"), [
    (lambda m: [of(m.weight), of(m.bias)],
     "TypeError: TrainState.create expects an optimizer second, such as .*"
     r'{"matrices": muon, .*; got \[SGD \( Parameter Group 0 .*\.\.\.$'),
    (lambda m: {"a": of(m.weight)}, "ValueError: this parameter is in no optimizer: bias. Give "
     r"it to one, or freeze it: requires_grad_\(False\)"),
    (lambda m: {"a": of(*nn.Linear(2, 2).parameters())},
     "ValueError: these parameters are in no optimizer: weight, bias. .* after the model"),
    (lambda m: {"a": of(m.weight), "b": m.bias},
     "TypeError: TrainState.create expects optimizers in the mapping; got .* under 'b'"),
    (lambda m: {" ": of(*m.parameters())}, "ValueError: .* names of optimizers.*; got ' '"),
    (lambda m: {"a/b": of(*m.parameters())}, "ValueError: .* without \"/\".*; got 'a/b'"),
])  # fmt: skip
def test_a_wrong_mapping_says_what_to_write(make, said):
    model = nn.Linear(2, 2)
    with pytest.raises((TypeError, ValueError)) as raised:
        fl.TrainState.create(model, make(model))
    assert re.search(said, found := f"{raised.type.__name__}: {raised.value}", re.DOTALL), found


def test_a_frozen_parameter_may_be_in_none_and_tied_weights_belong_to_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    state = fl.TrainState.create(model, {"a": of(model[1].weight)})
    state, _ = fl.pipeline()(lambda m, x: m(x).sum())(state, torch.ones(1, 2))
    assert state.updates == {"a": 1}
    state, _ = fl.pipeline()(toy_loss)(toy(), torch.ones(1))  # one optimizer is kept as it is
    assert isinstance(state.optimizer, SGD) and (state.updates, state.step) == ({}, 1)
    state = problem().state()
    assert "optimizer=Muon, AdamW" in repr(state) and "Muon, AdamW" in state._repr_html_()


def test_the_mapping_can_be_read_only():
    model = Pair()
    mine = {"first": SGD([model.a], lr=1.0), "second": SGD([model.b], lr=10.0)}
    given = fl.TrainState.create(model, mine).optimizer
    del mine["second"]  # without effect
    assert list(given) == ["first", "second"] and given["second"].param_groups[0]["lr"] == 10.0
    assert repr(given) == "{'first': SGD, 'second': SGD}"
    with pytest.raises(TypeError):
        given["first"] = given["second"]
    with pytest.raises(KeyError, match="no optimizer 'third'; those are: first, second"):
        given["third"]
    assert "third" not in given and given.get("third") is None
    for name, message in (
        ("param_groups", r"write state.optimizer\[name\].param_groups, with"),
        ("colour", "no attribute 'colour'"),
    ):
        with pytest.raises(AttributeError, match=message):
            getattr(given, name)
    for again in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert list(again) == ["first", "second"]
        assert again["first"] is not given["first"]
        assert again["second"].state_dict() == given["second"].state_dict()


# --- updates


def rates(record):
    return {k: v for k, v in record.metrics.items() if "lr" in k.split("/")}


def test_all_of_them_update_in_the_order_given_and_are_counted_by_name():
    calls, start = [], pair()
    for name, optimizer in start.optimizer.items():
        optimizer.register_step_post_hook(lambda *_, name=name: calls.append(name))
    state = fl.fit(fl.pipeline()(toy_loss), start, xs(1, 2), hooks=())
    assert weights(state) == (-3.0, 30.0)
    assert (state.updates, state.step) == ({"first": 2, "second": 2}, 2)
    assert rates(state.history[-1]) == {"train/lr/first": 1.0, "train/lr/second": 10.0}
    assert calls == ["first", "second"] * 2


def test_an_overflow_in_one_skips_all():
    """Scaled, the gradient of a is infinite and that of b is not."""
    loss = lambda model, batch: model.a * (batch.sum() * 1e35) - model.b * batch.sum()
    step = fl.pipeline(fl.amp("fp16"), fl.schedule(LINEAR, only="second"))(loss)
    state = fl.fit(step, pair(), xs(1), hooks=())
    assert (state.skipped, state.updates) == (1, {"first": 0, "second": 0})
    assert weights(state) == (0.0, 0.0)
    state = fl.fit(step, pair(), xs(1e-35, 1e-35), hooks=())
    assert state.updates == {"first": 2, "second": 2}


def test_parameters_beside_the_model_are_trained_with_a_warning(caplog):
    model, beside = Toy(), nn.Parameter(torch.ones(()))
    named = {"model": SGD(model.parameters(), lr=1.0), "beside": SGD([beside], lr=1.0)}
    state = fl.TrainState.create(model, named)
    assert "the optimizer 'beside' has parameters that are not in this Toy" in caplog.text
    fl.fit(fl.pipeline()(lambda m, x: toy_loss(m, x)[0] + beside), state, xs(1), hooks=())
    assert beside.item() == 0.0


# --- schedules


def test_a_schedule_acts_on_all_or_on_those_named():
    for only, expected in [(None, (-3.5, 35.0)), (("first",), (-3.5, 40.0)), ("second", (-4, 35))]:
        step = fl.pipeline(fl.schedule(lambda i, total: 1 - i // 3 / 2, only=only))(toy_loss)
        assert weights(fl.fit(step, pair(), xs(1, 1, 1, 1), hooks=())) == expected


FIRST, SECOND = {"only": ("first",)}, {"only": "second"}


@pytest.mark.parametrize(("members", "expected"), [
    ((fl.schedule(lambda i, total: 1 - i, **FIRST), fl.schedule(lambda i, total: i, **SECOND)),
     {"schedule(lr, first)": (-1.0, 0.0), "schedule(lr, second)": (10.0, 10.0)}),
    ((fl.torch_scheduler(lambda o, run: StepLR(o, 1, 0.5), only="first"),
      fl.torch_scheduler(lambda o, run: StepLR(o, 1, 0.1), **SECOND)),
     {"torch_scheduler(first)": (-1.5, 0.5), "torch_scheduler(second)": (11.0, 1.0)}),
])  # fmt: skip
def test_two_schedules_act_on_different_optimizers(members, expected):
    state = fl.fit(fl.pipeline(*members)(toy_loss), pair(), xs(1, 1), hooks=())
    found = zip(weights(state), rates(state.history[-1]).values(), strict=True)
    assert dict(zip(state.slots, found, strict=True)) == expected


def halve(optimizer, run):
    return StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("members", [
    (fl.schedule(HALF), fl.schedule(LINEAR, only="second")),
    (fl.schedule(HALF, only=("first", "second")), fl.schedule(LINEAR, "lr", "second")),
    (fl.schedule(HALF), fl.torch_scheduler(halve)),
    (fl.torch_scheduler(halve, "first"), fl.schedule(HALF, only="first")),
], ids=repr)  # fmt: skip
def test_two_schedules_of_one_optimizer_are_refused_when_composing(members):
    with pytest.raises(ValueError, match=r"both set lr of one optimizer: name others with only="):
        fl.pipeline(*members)
    other = fl.schedule(LINEAR, field="weight_decay", only="second")
    fl.pipeline(members[0], other)  # another field is another number
    fl.pipeline(fl.torch_scheduler(halve, "first"), other, fl.schedule(LINEAR, only="second"))


@pytest.mark.parametrize(("member", "state", "said"), [
    (fl.schedule(HALF, only="third"), pair, "names the optimizer 'third', but .* first, sec"),
    (fl.schedule(HALF, only="first"), toy, "one optimizer, without a name: leave out only="),
    (fl.torch_scheduler(halve, only="third"), pair, "scheduler names the optimizer 'third'"),
    (fl.torch_scheduler(halve), pair,
     r'is for one optimizer, but .* first, second: name one, .*only="first"\)'),
    (fl.schedule(HALF, only="third"),
     lambda: attrs.evolve(pair(), slots={"schedule(lr, third)": None}), "optimizer 'third'"),
])  # fmt: skip
def test_unknown_names_are_refused_before_the_first_update(member, state, said):
    model = (one := state()).model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        fl.fit(fl.pipeline(member)(toy_loss), one, xs(1), hooks=())
    assert model.state_dict() == before


def test_a_torch_scheduler_of_another_length_says_how_to_make_a_new_one():
    decay = fl.torch_scheduler(lambda o, run: StepLR(o, run.total_steps), only="second")
    step = fl.pipeline(decay)(toy_loss)
    state = fl.fit(step, pair(), xs(1), hooks=())
    with pytest.raises(ValueError, match="begin a phase, which has a scheduler of its own"):
        fl.fit(step, state, xs(1), epochs=3, hooks=())


# --- equal to a loop by hand


RUNS = {
    "plain": ((), {}),
    "clip": ((fl.clip(0.05),), {"clip": 0.05}),
    "schedule": ((fl.schedule(LINEAR, only="rest"),), {"factor": LINEAR}),
    "accumulate, clip, schedule": (
        (fl.accumulate(3), fl.clip(0.05), fl.schedule(LINEAR, only=("rest",))),
        {"n": 3, "clip": 0.05, "factor": LINEAR},
    ),
    "fp16": (
        (fl.amp("fp16", init_scale=2.0**17, growth_interval=3), fl.clip(0.05)),
        {"precision": torch.float16, "scale": 2.0**17, "clip": 0.05},
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_muon_and_adamw_equal_a_loop_by_hand_bit_for_bit(name):
    members, settings = RUNS[name]
    one = single_precision(problem()) if "scale" in settings else problem()
    step = fl.pipeline(*members)(one.loss_fn)
    state = fl.fit(step, one.state(), one.batches, epochs=3, hooks=())
    hand = laws.by_hand(one, 3, **settings)
    laws.check_by_hand(state, hand, settings)
    assert state.updates == {"matrices": hand.step, "rest": hand.step}
    assert name != "fp16" or state.skipped > 0


def test_all_groups_of_all_optimizers_are_trained_and_clipped():
    """The norm of four gradients of 3 is 6; clipped to 2, each is 1."""
    a, b, c, d = model = nn.ParameterList(torch.zeros(()) for _ in range(4))
    optimizers = {"x": SGD([{"params": [p]} for p in (a, b)], lr=1.0), "y": SGD([c], lr=1.0)}
    optimizers["y"].add_param_group({"params": [d], "lr": 10.0})
    state = fl.TrainState.create(model, optimizers, seed=0)
    step = fl.pipeline(fl.clip(2.0))(lambda model, x: sum(model) * x.mean())
    state = fl.fit(step, state, xs(3), hooks=())
    assert state.history["train/grad_norm"] == (6.0,)
    assert [p.item() for p in model] == pytest.approx([-1.0, -1.0, -1.0, -10.0])
    expected = {"x": 1.0, "x/1": 1.0, "y": 1.0, "y/1": 10.0}
    assert rates(state.history[-1]) == {f"train/lr/{name}": lr for name, lr in expected.items()}


# --- groups with names


def grouped(*names, kind=torch.optim.SGD):
    """A state whose optimizer has a group for each name, or None, with the rates 1, 1/2, ..."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in names)
    groups = [
        {"params": part.parameters(), "lr": 0.5**i} | ({} if name is None else {"name": name})
        for i, (part, name) in enumerate(zip(model, names, strict=True))
    ]
    return fl.TrainState.create(model, kind(groups, lr=9.0), seed=0)


def total(model, x):
    return sum(part(x).mean() for part in model)


X = [torch.ones(1, 1)] * 2


HALVING = {
    "plain": ((), 1.0), "schedule": ((fl.schedule(lambda i, total: 0.5**i),), 0.5),
    # The rate of the last update, of all groups: the scheduler has stepped once more since.
    "torch_scheduler": ((fl.torch_scheduler(halve),), 0.5),
}  # fmt: skip


@pytest.mark.parametrize(("members", "factor"), HALVING.values(), ids=HALVING)
@pytest.mark.parametrize(("names", "labels"), [
    ((None, None), ["lr", "lr/1"]), (("body", "head"), ["lr/body", "lr/head"]),
    ((None, "head", None), ["lr", "lr/head", "lr/2"]), (("body", None), ["lr/body", "lr/1"]),
    (("a/b", "layer.0", 7, ""), ["lr/a/b", "lr/layer.0", "lr/2", "lr/3"]),
])  # fmt: skip
def test_a_group_with_a_name_is_called_by_it_in_records(names, labels, members, factor):
    step, moment = fl.pipeline(*members)(total), fl.every(steps=2)
    state = fl.fit(step, grouped(*names), X, hooks=(), record_every=moment)
    expected = {label: factor * 0.5**i for i, label in enumerate(labels)}
    assert rates(state.history[-1]) == {
        f"{of}/{label}": rate for of in ("train", "recent") for label, rate in expected.items()
    }


def test_names_of_groups_come_after_those_of_several_optimizers():
    model = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    groups = [{"params": [model[0].weight], "name": "x"}, {"params": [model[0].bias]}]
    sgd = {
        "a": SGD(groups, lr=0.5),
        "b": SGD([{"params": model[1].parameters(), "name": "y"}], 0.5),
    }
    state = fl.unfreeze(fl.TrainState.create(model, sgd), "1.bias", lr=0.25)  # has no name
    state = fl.fit(fl.pipeline()(total), state, X, hooks=())
    expected = {"a/x": 0.5, "a/1": 0.5, "b/y": 0.5, "b/1": 0.25}
    assert rates(state.history[-1]) == {f"train/lr/{name}": lr for name, lr in expected.items()}


@pytest.mark.parametrize("names", [("head", "head"), ("body", "head", "head"), ("1", None)])
def test_two_groups_of_one_name_are_refused(names):
    with pytest.raises(ValueError, match=r'called .*would both be train/lr/.*group\["name"\] once'):
        grouped(*names)


def test_a_rate_in_a_tensor_of_one_dimension_is_put_back():
    rate = torch.tensor([0.5])
    group = {"lr": rate, "initial_lr": torch.tensor([2.0]), "set_by_schedule_lr": rate}
    forget_schedules([group])
    assert group["lr"] is rate and rate.item() == 2.0
