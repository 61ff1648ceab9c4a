"""Averages in checkpoints: a file that torch alone loads, and what becomes of it."""

import json

import pytest
import torch
from crafted import craft
from safetensors.torch import load_file, load_model
from saved import ONE, check_continues, check_refused, names, sgd
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints.files import verify
from fnloop._extensions.checkpoints.restore import read_checkpoint
from fnloop.testing import assert_same, stochastic, toy, toy_loss

BOTH = (fl.ema(0.9), fl.swa(0.5, every=2))


def trained(*members, epochs=2, state=None, problem=None, **settings):
    problem = problem or stochastic()
    step = fl.pipeline(*members)(problem.loss_fn)
    settings = {"hooks": (), **settings}
    return fl.fit(step, state or problem.state(), problem.batches, epochs=epochs, **settings)


PLAIN = sorted([
    "model.safetensors", "optimizer.safetensors", "slots.safetensors", "state.json",
    "manifest.json",
])  # fmt: skip
AVERAGES = ["ema.safetensors", "swa.safetensors"]
new = lambda: stochastic().state()


def test_each_average_is_a_file_that_loads_into_the_plain_module(tmp_path):
    state = trained(*BOTH)
    path = fl.save(state, tmp_path / "a")
    assert names(path) == sorted([*PLAIN, *AVERAGES])
    for name in ("ema", "swa"):
        model = stochastic().model()
        assert load_model(model, path / f"{name}.safetensors") == (set(), [])
        expected = fl.averaged(state, name).model.state_dict()
        assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
        model.load_state_dict(load_file(path / f"{name}.safetensors"))  # torch alone reads it
    assert not any("ema" in key or "swa" in key for key in load_file(path / "slots.safetensors"))


def test_a_state_without_averages_is_saved_as_before(tmp_path):
    path = fl.save(trained(), tmp_path / "a")
    assert names(path) == PLAIN and verify(path)["format_version"] == 1
    assert "averages" not in json.loads((path / "state.json").read_text())
    assert verify(fl.save(trained(fl.ema()), tmp_path / "b"))["format_version"] == 2


def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    step, data = fl.pipeline(*BOTH)(stochastic().loss_fn), stochastic().batches
    whole = check_continues(tmp_path, new, step, data, splits=(1, 4, 7, 8, 11))
    assert {name: kept.count for name, kept in whole.slots.items()} == {"ema": 14, "swa": 3}


def test_an_average_may_be_added_to_a_run_or_left_out(tmp_path):
    fl.save(trained(), tmp_path / "a")
    state = fl.restore(tmp_path / "a", new())
    before = state.model[0].weight.detach().clone()
    state = trained(fl.ema(1.0), epochs=3, state=state)
    assert torch.equal(state.slots["ema"]["0.weight"], before)
    fl.save(trained(fl.ema(0.9)), tmp_path / "b")
    state = trained(epochs=3, state=fl.restore(tmp_path / "b", new()))
    assert state.slots["ema"].count == 14


def test_partial_checkpoints(tmp_path):
    state = trained(fl.ema(0.9))
    whole = fl.save(state, tmp_path / "whole")
    assert not fl.restore(whole, new(), only=("model", "counters")).slots
    model = fl.save(state, tmp_path / "a", only=("model",))
    assert names(model) == PLAIN and verify(model)["format_version"] == 2
    slots = fl.save(state, tmp_path / "b", only=("slots",))
    assert verify(slots)["format_version"] == 2
    for path in (whole, slots):
        found = fl.restore(path, new(), only=("slots",)).slots["ema"]
        assert all(torch.equal(found[name], value) for name, value in state.slots["ema"].items())
        assert found.count == 14


def test_another_model_begins_another_average(tmp_path, caplog):
    path = fl.save(trained(fl.ema(0.9)), tmp_path / "a")
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Identity(), nn.Tanh())
    other = sgd(model.append(nn.Linear(8, 2)).double())
    check_refused(path, other, "of another model")
    state = fl.restore(path, other, only=("model", "slots"), strict=False)
    assert "the average 'ema' is of another model, and begins again" in caplog.text
    assert not state.slots


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.w = nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))
        self.low = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

    def forward(self, x):
        out = self.second(self.first(x))
        return out.mean() + self.w.real + self.low.float().mean()


def test_tied_complex_and_low_precision_weights(tmp_path):
    def state():
        torch.manual_seed(0)
        return sgd(Tied(), lr=0.1)

    step, data = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch)), [torch.ones(1, 2)] * 3
    found = fl.fit(step, state(), data, hooks=())
    path = fl.save(found, tmp_path / "a")
    file = load_file(path / "ema.safetensors")
    assert torch.equal(file["first.weight"], file["second.weight"])
    assert file["low"].dtype == torch.float32 and file["w"].shape == (2,)
    restored = fl.restore(path, state())
    assert list(restored.slots["ema"]) == list(found.slots["ema"])
    for name, value in found.slots["ema"].items():
        assert torch.equal(restored.slots["ema"][name], value), name
    plain = Tied()
    plain.load_state_dict({k: v for k, v in file.items() if k != "w"}, strict=False)
    assert plain.low.dtype == torch.bfloat16 and plain.second.weight is plain.first.weight


# --- folders of checkpoints


def runs(folder, epochs=6, *members, **settings):
    step = fl.pipeline(*(members or (fl.ema(0.5), fl.swa(1))))(toy_loss)
    save = fl.every(epochs=1)(fl.checkpoint(folder, keep=2, **settings))
    return fl.fit(step, fl.resume(folder, toy()), ([ONE], [ONE]), epochs=epochs, hooks=(save,))


@pytest.mark.parametrize(("damage", "fault"), [
    (lambda data: None, r"ema\.safetensors is missing"),
    (lambda data: b"", r"ema\.safetensors has 0 bytes instead of"),
    (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum of ema"),
], ids=["missing", "empty", "flipped"])  # fmt: skip
def test_a_damaged_average_is_named_and_skipped(tmp_path, damage, fault):
    runs(tmp_path)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]  # whole folders were removed
    newest = tmp_path / "step-00000006"
    file = newest / "ema.safetensors"
    content = damage(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)
    check_refused(newest, toy(), fault)
    with pytest.warns(UserWarning, match=fault):
        assert fl.resume(tmp_path, toy()).step == 5
    with pytest.warns(UserWarning, match=fault):
        assert runs(tmp_path).step == 6  # it is replaced
    assert_same(fl.resume(tmp_path, toy()), runs(tmp_path / "b"))


def test_a_copy_in_host_memory_has_the_averages(tmp_path):
    state = trained(*BOTH)
    contents = read_checkpoint(fl.save(state, tmp_path / "a"), state)
    copied = contents.copied()
    again = contents.copied(copied)
    for name in ("ema", "swa"):
        for key, value in contents.groups[name].items():
            assert torch.equal(copied.groups[name][key], value)
            assert copied.groups[name][key].data_ptr() != value.data_ptr()
            assert again.groups[name][key].data_ptr() == copied.groups[name][key].data_ptr()


@pytest.mark.parametrize("count", [-1, True, 1.5, None, "2"])
def test_a_count_that_is_none_is_damage(tmp_path, count):
    path = fl.save(trained(fl.ema(0.9)), tmp_path / "a")
    craft(path, facts=lambda facts: facts["averages"]["ema"].update(count=count))
    check_refused(path, new(), r"averages\.ema\.count is")


class Hidden(nn.Module):
    """A module that saves one of its two parameters."""

    def __init__(self):
        super().__init__()
        self.base, self.added = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def state_dict(self, *args, **kwargs):
        found = super().state_dict(*args, **kwargs)
        del found["base"]
        return found

    def forward(self, x):
        return ((self.base + self.added) * x).mean()


def test_an_average_of_what_the_module_does_not_save_is_saved(tmp_path):
    step = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch))
    path = fl.save(fl.fit(step, sgd(Hidden()), [ONE], hooks=()), tmp_path / "a", only=("slots",))
    found = fl.restore(path, sgd(Hidden()), only=("slots",)).slots["ema"]
    assert {name: value.item() for name, value in found.items()} == {"base": -0.5, "added": -0.5}
