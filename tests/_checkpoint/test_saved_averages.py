"""Averages in checkpoints: a file that torch alone loads, and what becomes of it."""

import json
import subprocess
import sys

import attrs
import pytest
import torch
from crafted import craft
from safetensors.torch import load_file, load_model
from torch import nn

import fnloop as fl
from fnloop import CheckpointError
from fnloop._checkpoint.files import checksum_of_manifest, verify
from fnloop._checkpoint.restore import read_checkpoint
from fnloop.testing import assert_same, stochastic, toy, toy_loss

ONE = torch.tensor([1.0])
BOTH = (fl.ema(0.9), fl.swa(0.5, every=2))


def trained(*members, epochs=2, state=None, problem=None, **settings):
    problem = problem or stochastic()
    step = fl.pipeline(*members)(problem.loss_fn)
    settings = {"hooks": (), **settings}
    return fl.fit(step, state or problem.state(), problem.batches, epochs=epochs, **settings)


def names(path):
    return {file.name for file in path.iterdir()}


PLAIN = {
    *("model.safetensors", "optimizer.safetensors", "slots.safetensors"),
    *("state.json", "manifest.json"),
}


def test_each_average_is_a_file_that_loads_into_the_plain_module(tmp_path):
    state = trained(*BOTH)
    path = fl.save(state, tmp_path / "a")
    assert names(path) == PLAIN | {"ema.safetensors", "swa.safetensors"}
    for name in ("ema", "swa"):
        model = stochastic().model()
        assert load_model(model, path / f"{name}.safetensors") == (set(), [])
        expected = fl.averaged(state, name).model.state_dict()
        assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
        model.load_state_dict(load_file(path / f"{name}.safetensors"))
    assert not any("ema" in key or "swa" in key for key in load_file(path / "slots.safetensors"))


@pytest.mark.slow
def test_torch_alone_reads_it(tmp_path):
    path = fl.save(trained(*BOTH), tmp_path / "a")
    code = f"""if True:
        import sys, torch
        from safetensors.torch import load_model
        from torch import nn
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
        model = nn.Sequential(*layers).double()
        load_model(model, {str(path / "ema.safetensors")!r})
        print(model[0].weight.sum().item(), "fnloop" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    value, loaded = done.stdout.split()
    assert float(value) == load_file(path / "ema.safetensors")["0.weight"].sum().item()
    assert loaded == "False"


def test_a_state_without_averages_is_saved_as_before(tmp_path):
    path = fl.save(trained(), tmp_path / "a")
    assert names(path) == PLAIN and verify(path)["format_version"] == 1
    assert "averages" not in json.loads((path / "state.json").read_text())
    assert verify(fl.save(trained(fl.ema()), tmp_path / "b"))["format_version"] == 2


@pytest.mark.parametrize("split", [1, 4, 7, 8, 11])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path, split):
    whole = trained(*BOTH)
    stop = fl.when(lambda state: state.step == split)(lambda s: attrs.evolve(s, stop="paused"))
    fl.save(trained(*BOTH, hooks=(stop,)), tmp_path / "a")
    restored = attrs.evolve(fl.restore(tmp_path / "a", stochastic().state()), stop=None)
    assert list(restored.slots) == ["ema", "swa"]
    resumed = trained(*BOTH, state=restored)
    assert_same(resumed, whole)
    assert [resumed.slots[name].count for name in resumed.slots] == [14, 3]


def test_an_average_that_is_added_to_a_run_begins_there(tmp_path):
    fl.save(trained(), tmp_path / "a")
    state = fl.restore(tmp_path / "a", stochastic().state())
    before = state.model[0].weight.detach().clone()
    state = trained(fl.ema(1.0), epochs=3, state=state)
    assert torch.equal(state.slots["ema"]["0.weight"], before)


def test_an_average_that_is_left_out_stays_in_the_state(tmp_path):
    fl.save(trained(fl.ema(0.9)), tmp_path / "a")
    state = trained(epochs=3, state=fl.restore(tmp_path / "a", stochastic().state()))
    assert (tmp_path / "a" / "ema.safetensors").exists() and state.slots["ema"].count == 14


def test_parts(tmp_path):
    path = fl.save(trained(fl.ema(0.9)), tmp_path / "a")
    assert not fl.restore(path, stochastic().state(), only=("model", "counters")).slots
    slots = fl.restore(path, stochastic().state(), only=("slots",)).slots
    assert slots["ema"].count == 14 and slots["ema"]["0.weight"].shape == (8, 6)


def test_partial_checkpoints(tmp_path):
    state = trained(fl.ema(0.9))
    model = fl.save(state, tmp_path / "a", only=("model",))
    assert names(model) == PLAIN and verify(model)["format_version"] == 2
    slots = fl.save(state, tmp_path / "b", only=("slots",))
    assert verify(slots)["format_version"] == 2
    found = fl.restore(slots, stochastic().state(), only=("slots",)).slots["ema"]
    assert all(torch.equal(found[name], value) for name, value in state.slots["ema"].items())


def test_another_model_begins_another_average(tmp_path, caplog):
    path = fl.save(trained(fl.ema(0.9)), tmp_path / "a")
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Identity(), nn.Tanh())
    model.append(nn.Linear(8, 2))
    other = fl.TrainState.create(model.double(), torch.optim.SGD(model.parameters()), seed=0)
    with pytest.raises(CheckpointError, match="of another model"):
        fl.restore(path, other)
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
        model = Tied()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)

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


@pytest.mark.slow  # compiles
def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path):
    model = torch.compile(nn.Sequential(nn.Linear(1, 1)), backend="eager")
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    step = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch).mean())
    state = fl.fit(step, state, [torch.ones(1, 1)], hooks=())
    path = fl.save(state, tmp_path / "a")
    assert sorted(load_file(path / "ema.safetensors")) == ["0.bias", "0.weight"]
    plain = nn.Sequential(nn.Linear(1, 1))
    again = fl.TrainState.create(plain, torch.optim.SGD(plain.parameters(), lr=0.1), seed=0)
    assert_same(fl.restore(path, again), attrs.evolve(state, model=model._orig_mod))


# --- folders of checkpoints


def runs(folder, epochs=6, *members, **settings):
    step = fl.pipeline(*(members or (fl.ema(0.5), fl.swa(1))))(toy_loss)
    save = fl.every(epochs=1)(fl.checkpoint(folder, keep=2, **settings))
    return fl.fit(step, fl.resume(folder, toy()), ([ONE], [ONE]), epochs=epochs, hooks=(save,))


@pytest.mark.parametrize("background", [False, True])
def test_retention_removes_folders_with_averages(tmp_path, background):
    state = runs(tmp_path, background=background)
    assert sorted(names(tmp_path)) == ["step-00000005", "step-00000006"]
    restored = fl.resume(tmp_path, toy())
    assert_same(restored, state)
    newest = fl.latest(tmp_path)
    assert load_file(newest / "ema.safetensors")["w"] == state.slots["ema"]["w"]


def test_a_folder_with_a_file_of_the_user_stays(tmp_path):
    runs(tmp_path, epochs=1)
    (tmp_path / "step-00000001" / "notes.safetensors").write_bytes(b"mine")
    runs(tmp_path, epochs=4)
    assert sorted(names(tmp_path)) == [f"step-0000000{n}" for n in (1, 3, 4)]
    with pytest.raises(CheckpointError, match=r"it contains notes\.safetensors"):
        fl.save(toy(), tmp_path / "step-00000001")


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda file: file.unlink(), r"ema\.safetensors is missing"),
        (lambda file: file.write_bytes(b""), r"ema\.safetensors has 0 bytes instead of"),
        (lambda file: file.write_bytes(flipped(file.read_bytes())), "checksum of ema"),
    ],
    ids=["missing", "empty", "flipped"],
)
def test_a_damaged_average_is_named_and_skipped(tmp_path, damage, fault):
    runs(tmp_path)
    damage(tmp_path / "step-00000006" / "ema.safetensors")
    with pytest.raises(CheckpointError, match=fault):
        fl.restore(tmp_path / "step-00000006", toy())
    with pytest.warns(UserWarning, match=fault):
        assert fl.resume(tmp_path, toy()).step == 5
    with pytest.warns(UserWarning, match=fault):
        assert runs(tmp_path).step == 6  # it is replaced
    assert_same(fl.resume(tmp_path, toy()), runs(tmp_path / "b"))


def test_a_damaged_manifest_beside_an_average_is_replaced(tmp_path):
    runs(tmp_path)
    (tmp_path / "step-00000006" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="its own checksum is wrong"):
        assert runs(tmp_path).step == 6
    assert fl.latest(tmp_path).name == "step-00000006"


def crafted(path, change):
    """Change the manifest of a checkpoint, with a checksum that fits."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["check"]
    change(manifest)
    manifest["check"] = checksum_of_manifest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["../a/b.safetensors", "/etc/passwd", "x.pt", ".safetensors", ""])
def test_a_manifest_names_files_of_its_own_folder_only(tmp_path, name):
    path = fl.save(toy(), tmp_path / "a")
    crafted(path, lambda m: m["files"].update({name: m["files"]["model.safetensors"]}))
    with pytest.raises(CheckpointError, match="no file of a checkpoint is named"):
        fl.restore(path, toy())


def test_a_newer_format_is_not_damaged(tmp_path):
    path = fl.save(toy(), tmp_path / "a")
    crafted(path, lambda m: m.update(format_version=5))
    with pytest.raises(CheckpointError, match=r"has format 5, and this fnloop reads .* up to 4"):
        fl.restore(path, toy())


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
    with pytest.raises(CheckpointError, match=r"averages\.ema\.count is"):
        fl.restore(path, stochastic().state())


@pytest.mark.slow  # compiles
def test_a_model_with_a_compiled_part_has_the_names_of_the_plain_one(tmp_path):
    def state(part=lambda part: part):
        torch.manual_seed(0)
        model = nn.Sequential(part(nn.Linear(1, 1)), nn.Linear(1, 1))
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)

    step = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch).mean())
    found = fl.fit(
        step, state(lambda part: torch.compile(part, backend="eager")), [torch.ones(1, 1)], hooks=()
    )
    path = fl.save(found, tmp_path / "a")
    names = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sorted(load_file(path / "ema.safetensors")) == names
    restored = fl.restore(path, state()).slots["ema"]
    assert all(torch.equal(restored[name], found.slots["ema"][name]) for name in names)


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
    def state():
        model = Hidden()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)

    step = fl.pipeline(fl.ema(0.5))(lambda model, batch: model(batch))
    path = fl.save(fl.fit(step, state(), [ONE], hooks=()), tmp_path / "a")
    found = fl.restore(path, state(), only=("slots",)).slots["ema"]
    assert {name: value.item() for name, value in found.items()} == {"base": -0.5, "added": -0.5}


@pytest.mark.parametrize("slots", [3, None, [1]])
def test_slots_that_are_no_mapping_are_named(tmp_path, slots):
    with pytest.raises(CheckpointError, match="slots must be a mapping; it is"):
        fl.save(attrs.evolve(toy(), slots=slots), tmp_path / "a")
