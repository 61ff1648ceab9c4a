"""ema and swa: the numbers of an average, what is averaged, and what is refused."""

import copy
import importlib.machinery
import importlib.util
import logging
import pickle
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import fnloop as fl
from fnloop._core.averages import Average
from fnloop._step import averages as averaging
from fnloop.testing import assert_same, small, toy, toy_loss

ONE = torch.tensor([1.0])


def averages(member, updates=4, **settings):
    """Return the average after each update; the weights are -1, -2, -3, ..."""
    (name,) = [m.name for m in fl.pipeline(member).middleware]
    found = []

    def note(state):
        found.append(state.slots[name]["w"].item())
        return state

    settings = {"hooks": (note,), **settings}
    fl.fit(fl.pipeline(member)(toy_loss), toy(lr=1.0), [ONE] * updates, **settings)
    return found


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        (fl.ema(0.5), [-0.5, -1.25, -2.125, -3.0625]),
        (fl.ema(0.0), [-1, -2, -3, -4]),
        (fl.ema(1.0), [0, 0, 0, 0]),
        (fl.ema(0.5, start=2), [-1, -2, -2.5, -3.25]),
        (fl.ema(0.5, start=0.5), [-1, -2, -2.5, -3.25]),
        (fl.ema(0.5, start=1.0), [-1, -2, -3, -4]),
        (fl.ema(0.5, every=2), [0, -1, -1, -2.5]),
        (fl.ema(0.5, start=1, every=2), [-1, -1, -2, -2]),
        (fl.swa(0), [-1, -1.5, -2, -2.5]),
        (fl.swa(0.0), [-1, -1.5, -2, -2.5]),
        (fl.swa(2), [-1, -2, -3, -3.5]),
        (fl.swa(0.5), [-1, -2, -3, -3.5]),
        (fl.swa(), [-1, -2, -3, -4]),
        (fl.swa(0, every=2), [0, -2, -2, -3]),
        (fl.swa(100), [-1, -2, -3, -4]),
    ],
    ids=repr,
)
def test_the_average_after_each_update(member, expected):
    assert averages(member) == expected


def test_a_skipped_update_changes_no_average():
    """The weights are -1, -1 after a skipped update, and -2."""

    def skip(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="no" if batch > 1 else None)

        return skipping

    step = fl.pipeline(fl.Middleware("skip", loss=skip), fl.swa(0), fl.ema(0.5))(toy_loss)
    state = fl.fit(step, toy(lr=1.0), [ONE, 2 * ONE, ONE], hooks=())
    swa, ema = state.slots["swa"], state.slots["ema"]
    assert (swa["w"].item(), swa.count) == (-1.5, 2)
    assert (ema["w"].item(), ema.count) == (-1.25, 2)


def test_an_update_that_is_not_blended_in_does_nothing(monkeypatch):
    blends = []
    lerp = averaging.foreach_lerp_
    monkeypatch.setattr(averaging, "foreach_lerp_", lambda *a: blends.append(1) or lerp(*a))
    assert averages(fl.ema(0.5, every=3), updates=6)[-1] == (-3 / 2 - 6) / 2
    assert len(blends) == 2


def test_the_model_of_averaged_needs_no_average(monkeypatch):
    step = fl.pipeline(fl.ema(0.5))(toy_loss)
    state = fl.averaged(fl.fit(step, toy(lr=1.0), [ONE], hooks=()))
    monkeypatch.delattr(averaging, "make_average")
    assert fl.evaluate(step, state, [ONE]) == {"loss": -0.5}


def test_bare_steps_average_too():
    step, state = fl.pipeline(fl.ema(0.5, start=1))(toy_loss), toy(lr=1.0)
    for expected in (-1.0, -1.5, -2.25):
        state, _ = step(state, ONE)
        assert state.slots["ema"]["w"].item() == expected


def test_an_average_has_its_name():
    step = fl.pipeline(fl.ema(0.5, name="fast"), fl.ema(0.75, name="slow"))(toy_loss)
    state = fl.fit(step, toy(lr=1.0), ([ONE], [ONE]), hooks=())
    assert {k: v["w"].item() for k, v in state.slots.items()} == {"fast": -0.5, "slow": -0.25}
    assert {k: v for k, v in state.history[-1].metrics.items() if "valid" in k} == {
        "valid/loss": -1.0,
        "valid/fast/loss": -0.5,
        "valid/slow/loss": -0.25,
    }


@pytest.mark.parametrize("member", [fl.ema(0.9), fl.swa(0.5, every=2)], ids=repr)
def test_training_does_not_depend_on_it(member):
    problem = small()

    def run(*members):
        loaders = {"train": problem.batches, "valid": problem.batches[:2]}
        step = fl.pipeline(fl.accumulate(2), *members)(problem.loss_fn)
        return fl.fit(step, problem.state(), loaders, epochs=2, hooks=())

    plain, averaged = run(), run(member)
    names = plain.history.keys()
    for mine, other in zip(averaged.history, plain.history, strict=True):
        assert {name: mine.metrics[name] for name in names} == other.metrics
    assert_same(attrs.evolve(averaged, slots={}, history=plain.history), plain)


def test_a_longer_run_begins_its_average_again(caplog):
    step = fl.pipeline(fl.swa(0.5))(toy_loss)
    run = {"loaders": [ONE] * 4, "hooks": ()}
    state = fl.fit(step, toy(lr=1.0), epochs=1, **run)
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (-3.5, 2)
    with caplog.at_level(logging.WARNING):
        state = fl.fit(step, state, epochs=4, **run)
    assert caplog.messages == [
        "swa: the run has another length now: the average is the weights again through update 8"
    ]
    assert (state.slots["swa"]["w"].item(), state.slots["swa"].count) == (-12.5, 8)


# --- the same numbers as others


def net():
    """A net with a BatchNorm, in float32."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def without_counter():
    """The same without the counter of batches, an integer of which torch cannot make the mean."""
    model = net()
    model[1].num_batches_tracked = None
    return model


def loss_fn(model, batch):
    x, y = batch
    dtype = model[0].weight.dtype
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def train(*members, after=lambda model: None, make=net, updates=14):
    """Train, and call a function with the model after every update."""
    problem = small()
    torch.manual_seed(0)
    model = make()
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    noted = after(model)

    def note(state):
        if noted is not None:
            noted(state.model)
        return state

    step = fl.pipeline(*members)(loss_fn)
    batches = [batch for batch in problem.batches if len(batch[0]) > 1]
    return fl.fit(step, state, batches, epochs=3, steps=updates, hooks=(note,))


@pytest.mark.parametrize(
    ("member", "start", "rule"),
    [
        (fl.ema(0.9, start=1), 1, get_ema_multi_avg_fn(0.9)),
        (fl.ema(0.97, start=4), 4, get_ema_multi_avg_fn(0.97)),
        (fl.swa(0), 1, get_swa_multi_avg_fn()),
        (fl.swa(6), 7, get_swa_multi_avg_fn()),
    ],
    ids=["ema", "ema later", "swa", "swa later"],
)
def test_it_is_torchs_averaged_model_bit_for_bit(member, start, rule):
    made, updates = [], []

    def after(model):
        made.append(AveragedModel(model, multi_avg_fn=rule, use_buffers=True))

        def update(model):
            updates.append(None)
            if len(updates) >= start:  # torch copies what it is given first
                made[0].update_parameters(model)

        return update

    state = train(member, after=after, make=without_counter)
    theirs = made[0].module.state_dict()
    mine = state.slots[member.name]
    assert len(mine) == 8 and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert not torch.equal(mine["0.weight"], state.model[0].weight)


def timm_ema():
    """Return the class of timm, from its file: the package needs torchvision."""
    found = importlib.machinery.PathFinder.find_spec("timm")
    if found is None:
        pytest.skip("timm is not installed")
    path = Path(found.origin).parent / "utils" / "model_ema.py"
    spec = importlib.util.spec_from_file_location("timm_model_ema", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelEmaV3


def test_it_is_timms_average_bit_for_bit():
    made = []

    def after(model):
        made.append(timm_ema()(model, decay=0.9))
        return made[0].update

    state = train(fl.ema(0.9), after=after)
    theirs, mine = made[0].module.state_dict(), fl.averaged(state).model.state_dict()
    assert mine.keys() == theirs.keys() and len(mine) == 9
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_in_float64_swa_is_the_mean():
    weights = []
    state = train(
        fl.swa(4, every=3),
        make=lambda: net().double(),
        after=lambda model: lambda now: weights.append(now[0].weight.detach().clone()),
    )
    mean = torch.stack(weights[6::3]).mean(0)
    torch.testing.assert_close(state.slots["swa"]["0.weight"], mean, rtol=1e-15, atol=1e-16)


# --- what is averaged


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


def of(model, lr=1.0):
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=lr), seed=0)


def mean_output(model, batch):
    output = model(batch)
    return output.mean(), {"output": output}


def test_floating_buffers_are_averaged_and_others_are_those_of_the_model():
    step = fl.pipeline(fl.ema(0.5))(mean_output)
    state = fl.fit(step, of(Buffers()), ([ONE] * 2, [ONE]), hooks=())
    assert {k: v.item() for k, v in state.slots["ema"].items()} == {"w": -1.25, "seen": 5.0}
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
    step = fl.pipeline(fl.ema(0.5))(mean_output)
    data = [torch.ones(1, 2)] * 2
    state = fl.fit(step, of(Tied(), lr=0.1), (data, data), hooks=())
    assert list(state.slots["ema"]) == ["first.weight"]
    model = fl.averaged(state).model
    assert model.second.weight is model.first.weight
    expected = fl.evaluate(step, fl.averaged(state), data)["loss"]
    assert state.history["valid/ema/loss"] == (expected,)
    assert expected != state.history["valid/loss"][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_low_precision_is_in_float32(dtype):
    decay, weights, expected = 0.99, [], torch.tensor(1.0)
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    step = fl.pipeline(fl.ema(decay))(mean_output)
    data = [torch.ones(1, 1, dtype=dtype)] * 3

    def note(state):
        weights.append(state.model.weight.item())
        return state

    state = fl.fit(step, of(model, lr=0.5), (data, data), hooks=(note,))
    for weight in weights:
        expected.lerp_(torch.tensor(weight), 1 - decay)
    assert weights == [0.5, 0.0, -0.5] and state.slots["ema"]["weight"].dtype == torch.float32
    assert state.slots["ema"]["weight"].item() == expected.item()
    averaged = fl.averaged(state).model.weight
    assert averaged.dtype == dtype and averaged.item() == expected.to(dtype).item()
    assert state.history["valid/ema/loss"] == (expected.to(dtype).item(),)


def test_complex_weights_and_frozen_ones_are_averaged():
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(0j))
    model.frozen = nn.Parameter(torch.tensor(3.0), requires_grad=False)
    step = fl.pipeline(fl.ema(0.5))(lambda model, x: (model.w.real - model.w.imag) * x.mean())
    state = fl.fit(step, of(model), [ONE, ONE], hooks=())
    assert state.slots["ema"]["w"].item() == -1.25 + 1.25j
    assert state.slots["ema"]["frozen"].item() == 3.0


@pytest.mark.slow  # compiles
def test_names_are_those_of_the_plain_module():
    model = torch.compile(nn.Sequential(nn.Linear(1, 1, bias=False)), backend="eager")
    step = fl.pipeline(fl.ema(0.5))(mean_output)
    data = [torch.ones(1, 1)]
    state = fl.fit(step, of(model), (data, data), hooks=())
    assert list(state.slots["ema"]) == ["0.weight"]
    (found,) = state.history["valid/ema/loss"]
    assert found == state.slots["ema"]["0.weight"].item() != state.history["valid/loss"][0]


def test_a_snapshot_has_an_average_of_its_own():
    step = fl.pipeline(fl.swa(0))(toy_loss)
    state = fl.fit(step, toy(lr=1.0), [ONE] * 2, epochs=1, hooks=())
    before = fl.snapshot(state)
    state = fl.fit(step, state, [ONE] * 2, epochs=2, hooks=())
    assert state.slots["swa"]["w"].item() == -2.5
    assert (before.slots["swa"]["w"].item(), before.slots["swa"].count) == (-1.5, 2)
    assert_same(fl.fit(step, before, [ONE] * 2, epochs=2, hooks=()), state)


# --- what is refused


def test_two_of_one_name_may_have_another():
    with pytest.raises(ValueError, match=r'Leave one out, or give one another name: name="..."'):
        fl.pipeline(fl.ema(0.9), fl.ema(0.99))
    with pytest.raises(ValueError, match=r"Leave one out\.$"):
        fl.pipeline(fl.clip_value(1.0), fl.clip_value(2.0))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: fl.ema(1.5), ValueError, "ema expects decay"),
        (lambda: fl.ema("a"), ValueError, "ema expects decay"),
        (lambda: fl.ema(start=1.5), ValueError, "ema expects start as a fraction of the run"),
        (lambda: fl.ema(start=-1), ValueError, "ema expects start >= 0"),
        (lambda: fl.swa(True), TypeError, r"swa expects start as updates \(an int\)"),
        (lambda: fl.ema(every=0), ValueError, "ema expects every"),
        (lambda: fl.swa(every=1.5), ValueError, "swa expects every"),
        (lambda: fl.ema(evaluate="alone"), ValueError, "True .*\"only\".*got 'alone'"),
        (lambda: fl.ema(name="a/b"), ValueError, "ema expects name as letters, digits, _ and -"),
        (
            lambda: fl.swa(name="Model"),
            ValueError,
            "none of model, optimizer, slots, training, averaged",
        ),
        (lambda: fl.ema(name=3), TypeError, "ema expects name"),
        (lambda: fl.ema(name="closure"), ValueError, "other middleware; got 'closure'"),
        (
            lambda: fl.pipeline(fl.ema(evaluate="only"), fl.swa(evaluate="only")),
            ValueError,
            "would both be evaluated alone",
        ),
        (lambda: fl.pipeline(fl.ema(0.9), fl.ema(0.99)), ValueError, "have one name, 'ema'"),
    ],
)
def test_a_wrong_setting_is_refused_when_composing(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_a_fraction_needs_the_length_of_the_run():
    step = fl.pipeline(fl.swa(0.5))(toy_loss)
    with pytest.raises(ValueError, match=r"swa\(start=0.5\) needs the length of the run, but"):
        fl.fit(step, toy(), lambda: iter([ONE]), epochs=1, hooks=())
    with pytest.raises(ValueError, match="which a bare step does not know: call fit"):
        step(toy(), ONE)
    found = fl.fit(step, toy(lr=1.0), lambda: iter([ONE] * 9), steps=4, hooks=())
    assert found.slots["swa"]["w"].item() == -3.5
    step = fl.pipeline(fl.swa(0.0))(toy_loss)  # the whole run, however long it is
    found = fl.fit(step, toy(lr=1.0), lambda: iter([ONE] * 3), epochs=1, hooks=())
    assert found.slots["swa"]["w"].item() == -2.0


def test_an_average_of_another_model_is_named():
    step = fl.pipeline(fl.ema(0.5))(mean_output)
    state = fl.fit(step, of(nn.Linear(1, 1)), [torch.ones(1, 1)], epochs=1, hooks=())
    other = attrs.evolve(of(nn.Linear(1, 2)), slots=state.slots)
    with pytest.raises(ValueError, match=r"is of another model than this Linear \(weight differs"):
        fl.fit(step, other, [torch.ones(1, 1)], epochs=1, hooks=())
    left = Average({k: v for k, v in state.slots["ema"].items() if k != "bias"})
    other = attrs.evolve(of(nn.Linear(1, 1)), slots={"ema": left})
    with pytest.raises(ValueError, match=r"this Linear \(bias differs\)"):
        fl.fit(step, other, [torch.ones(1, 1)], epochs=1, hooks=())
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    other = attrs.evolve(of(model), slots={"ema": Average()})
    with pytest.raises(ValueError, match=r"this Linear \(weight differs\)"):
        fl.fit(step, other, [torch.ones(1, 1)], epochs=1, hooks=())
    without = {k: v for k, v in state.slots.items() if k != "ema"}
    again = attrs.evolve(of(nn.Linear(1, 2)), slots=without)
    assert fl.fit(step, again, [torch.ones(1, 1)], hooks=()).slots["ema"]["weight"].shape == (2, 1)


def test_it_shows_compares_and_pickles_as_it_was_typed():
    pipe = fl.pipeline(fl.ema(0.5, every=2), fl.swa(10, evaluate="only"))
    assert repr(pipe) == "pipeline(ema(0.5, every=2), swa(10, evaluate='only'))"
    assert pickle.loads(pickle.dumps(pipe)) == pipe == copy.deepcopy(pipe)
    assert fl.ema(0.5) != fl.ema(0.9)
    text = str(pipe(toy_loss))
    assert "update" in text and "ema(0.5, every=2) in evaluation" in text
