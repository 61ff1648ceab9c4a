"""ema and swa: the numbers of an average, what is averaged, and what is refused."""

import logging

import attrs
import pytest
import torch
from saved import stop_at
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from toy_runs import ONE, assert_same_weights, fitted, noting, of, of_timm

import fnloop as fl
from fnloop._backend import torch_compat
from fnloop._extensions.middleware import ema as averaging
from fnloop._extensions.middleware.ema import Average
from fnloop.testing import small, toy, toy_loss


@pytest.mark.parametrize(("member", "expected"), [
    (fl.ema(0.5), [-0.5, -1.25, -2.125, -3.0625]), (fl.ema(0.0), [-1, -2, -3, -4]),
    (fl.ema(1.0), [0, 0, 0, 0]),
    *((fl.ema(0.5, start=start), [-1, -2, -2.5, -3.25]) for start in (2, 0.5)),
    (fl.ema(0.5, start=1.0), [-1, -2, -3, -4]), (fl.ema(0.5, every=2), [0, -1, -1, -2.5]),
    (fl.ema(0.5, start=1, every=2), [-1, -1, -2, -2]),
    *((fl.swa(start), [-1, -1.5, -2, -2.5]) for start in (0, 0.0)),
    *((fl.swa(start), [-1, -2, -3, -3.5]) for start in (2, 0.5)),
    *((member, [-1, -2, -3, -4]) for member in (fl.swa(), fl.swa(100))),
    (fl.swa(0, every=2), [0, -2, -2, -3]),
], ids=repr)  # fmt: skip
def test_the_average_after_each_update(member, expected):
    """The weights are -1, -2, -3 and -4."""
    note, found = noting(lambda state: state.slots[member.name]["w"].item())
    fitted([1] * 4, member, hooks=(note,))
    assert found == expected


def test_an_update_that_is_not_blended_in_does_nothing(monkeypatch):
    blends, lerp = [], torch_compat.foreach_lerp_
    monkeypatch.setattr(torch_compat, "foreach_lerp_", lambda *a: blends.append(1) or lerp(*a))
    state = fitted([1] * 6, fl.ema(0.5, every=3))
    assert state.slots["ema"]["w"].item() == (-3 / 2 - 6) / 2 and len(blends) == 2


def test_the_model_of_averaged_needs_no_average(monkeypatch):
    state = fl.averaged(fitted([1], fl.ema(0.5)))
    monkeypatch.delattr(averaging, "_make_average")
    assert fl.evaluate(fl.pipeline(fl.ema(0.5))(toy_loss), state, [ONE]) == {"loss": -0.5}


def test_a_longer_run_begins_its_average_again(caplog):
    state = fitted([1] * 4, fl.swa(0.5))
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (-3.5, 2)
    with caplog.at_level(logging.WARNING):
        state = fitted([1] * 4, fl.swa(0.5), state=state, epochs=4)
    (said,) = caplog.messages
    assert "start=0.5 is update 8 of this run, and the average is the weights again through" in said
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (-12.5, 8)


@pytest.mark.parametrize(("planned", "then", "said"), [
    (1, 2, "start=0.5 is update 4 of this run, and the average is of 2 updates too many: "),
    (3, 2, "start=0.5 is update 4 of this run, and the average is of 1 update too few: "),
    (2, 2, None),
])  # fmt: skip
def test_an_average_of_other_updates_than_the_total_says_is_named(caplog, planned, then, said):
    """Of 4 updates the average begins with update 3, of 8 with update 5, of 12 with update 7."""
    hooks = (stop_at(5),)
    state = fitted([1] * 4, fl.swa(0.5, evaluate=False), epochs=planned, hooks=hooks)
    state = attrs.evolve(state, stop=None)
    caplog.clear()
    fitted([1] * 4, fl.swa(0.5, evaluate=False), state=state, epochs=then)
    found = [message for message in caplog.messages if message.startswith("swa")]
    assert len(found) == (said is not None) and all(said in message for message in found)


class AsOfTimm:
    """timm's average as one of torch's."""

    def __init__(self, model):
        self.made = of_timm("utils/model_ema.py", "ModelEmaV3")(model, decay=0.9)
        self.module, self.update_parameters = self.made.module, self.made.update


def of_torch(rule):
    return lambda model: AveragedModel(model, multi_avg_fn=rule, use_buffers=True)


@pytest.mark.parametrize(("member", "start", "make"), [
    (fl.ema(0.9, start=1), 1, of_torch(get_ema_multi_avg_fn(0.9))),
    (fl.ema(0.97, start=4), 4, of_torch(get_ema_multi_avg_fn(0.97))),
    (fl.swa(0), 1, of_torch(get_swa_multi_avg_fn())),
    (fl.swa(6), 7, of_torch(get_swa_multi_avg_fn())), (fl.ema(0.9), 1, AsOfTimm),
], ids=["ema", "ema later", "swa", "swa later", "timm"])  # fmt: skip
def test_it_is_the_average_of_torch_and_of_timm_bit_for_bit(member, start, make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    if make is not AsOfTimm:
        model[1].num_batches_tracked = None  # an integer, of which torch cannot make the mean
    theirs = make(model)

    def update(state):
        if state.step >= start:  # torch copies what it is given first
            theirs.update_parameters(state.model)
        return state

    batches = [tuple(x.float() for x in batch) for batch in small().batches if len(batch[0]) > 1]
    settings = {"loss_fn": fl.supervised(nn.MSELoss()), "state": of(model, lr=0.1), "epochs": 3}
    state = fitted(batches, member, steps=14, hooks=(update,), **settings)
    mine = fl.averaged(state, member.name).model
    assert_same_weights(mine, theirs.module)
    assert not torch.equal(mine[0].weight, state.model[0].weight)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.seen = self.seen + 4  # another tensor, as in modules with a codebook
        return self.w * x + self.mask.softmax(0)[1] * self.table.sum()


def mean_output(model, batch):
    output = model(batch)
    return output.mean(), {"output": output}


def averaged_in(model, batch, n=1, lr=1.0, decay=0.5, **settings):
    """Train and evaluate with an average on n equal batches. Return the state and the average."""
    loaders, member = {"train": [batch] * n, "valid": [batch] * n}, fl.ema(decay)
    state = fitted(loaders, member, loss_fn=mean_output, state=of(model, lr=lr), **settings)
    return state, state.slots["ema"]


def test_floating_buffers_are_averaged_and_others_are_those_of_the_model():
    state, slot = averaged_in(Buffers(), ONE, n=2)
    assert {k: v.item() for k, v in slot.items()} == {"w": -1.25, "seen": 5.0}
    model = fl.averaged(state).model
    assert (model.w.item(), model.seen.item(), model.calls.item()) == (-1.25, 5.0, 2)
    assert (state.model.w.item(), state.model.seen.item()) == (-2.0, 8.0)
    assert model.mask.tolist() == [0.0, -torch.inf] and model.table.tolist() == [1.0, 1.0]
    assert state.history["valid/ema/loss"] == (-1.25,)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


def test_tied_weights_are_averaged_once():
    state, slot = averaged_in(Tied(), torch.ones(1, 2), n=2, lr=0.1)
    model, (found,) = fl.averaged(state).model, state.history["valid/ema/loss"]
    assert list(slot) == ["first.weight"] and model.second.weight is model.first.weight
    assert found == model(torch.ones(1, 2)).mean().item() != state.history["valid/loss"][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_low_precision_is_in_float32(dtype):
    model, expected = nn.Linear(1, 1, bias=False).to(dtype), torch.tensor(1.0)
    nn.init.ones_(model.weight)
    batch = torch.ones(1, 1, dtype=dtype)
    state, slot = averaged_in(model, batch, n=3, lr=0.5, decay=0.99)
    for weight in (0.5, 0.0, -0.5):
        expected.lerp_(torch.tensor(weight), 1 - 0.99)
    assert model.weight.item() == -0.5 and slot["weight"].dtype == torch.float32
    assert slot["weight"].item() == expected.item()
    averaged = fl.averaged(state).model.weight
    assert averaged.dtype == dtype and averaged.item() == expected.to(dtype).item()
    assert state.history["valid/ema/loss"] == (expected.to(dtype).item(),)


def test_complex_weights_and_frozen_ones_are_averaged():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(0j))
    model.frozen = nn.Parameter(torch.tensor(3.0), requires_grad=False)
    loss_fn = lambda model, x: (model.w.real - model.w.imag) * x.mean()
    slot = fitted([1, 1], fl.ema(0.5), loss_fn=loss_fn, state=of(model)).slots["ema"]
    assert (slot["w"].item(), slot["frozen"].item()) == (-1.25 + 1.25j, 3.0)


def test_a_fraction_needs_the_length_of_the_run():
    endless = lambda: iter([ONE] * 9)
    with pytest.raises(ValueError, match=r"swa\(start=0.5\) needs the length of the run, but"):
        fitted(endless, fl.swa(0.5), epochs=1)
    with pytest.raises(ValueError, match="which a bare step does not know: call fit"):
        fl.pipeline(fl.swa(0.5))(toy_loss)(toy(), ONE)
    assert fitted(endless, fl.swa(0.5), steps=4).slots["swa"]["w"].item() == -3.5
    # 0.0 is the whole run, however long it is.
    assert fitted(endless, fl.swa(0.0), epochs=1).slots["swa"]["w"].item() == -5.0


@pytest.mark.parametrize(("n", "names"), [(2, ("weight", "bias")), (1, ("weight",)), (1, ())])
def test_what_is_new_to_an_average_begins_at_its_value(n, names):
    """It has been averaged of a model with one output. A weight of another shape is new to it."""
    _, slot = averaged_in(nn.Linear(1, 1), torch.ones(1, 1))
    model = nn.Linear(1, n)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    kept = {k: slot[k].clone() for k in names if slot[k].shape == before[k].shape}
    other = attrs.evolve(
        of(model), slots={"ema": Average({k: slot[k] for k in names} | {"x": ONE})}
    )
    found = fitted([torch.ones(1, 1)], fl.ema(0.5), loss_fn=mean_output, state=other).slots["ema"]
    assert found.keys() == before.keys()
    for k, p in model.named_parameters():
        assert torch.equal(found[k], (before | kept)[k].lerp(p.detach(), 0.5)), k


class Grows(nn.Module):
    """A row of two weights, and a buffer."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2))


@pytest.mark.parametrize(("name", "advice"), [("w", "new nn.Parameter"), ("seen", "with only=")])
def test_what_gets_another_shape_in_place_is_named_with_both_shapes(name, advice):
    def grow(state):
        if state.step == 2:
            getattr(state.model, name).data = torch.zeros(3)
        return state

    model = Grows()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    step = fl.pipeline(fl.ema(0.5))(lambda model, x: (model.w * x).sum())
    message = rf"ema: {name} has the shape \(3,\), and its average \(2,\): .*{advice}"
    with pytest.raises(ValueError, match=message):
        fl.fit(step, state, [torch.ones(1)] * 4, hooks=(grow,))
