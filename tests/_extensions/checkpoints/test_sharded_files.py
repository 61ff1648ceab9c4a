"""A checkpoint whose tensors are parts in several files, as several processes write it."""

import json

import pytest
import torch
from crafted import craft
from safetensors.torch import save_file
from saved import check_refused, sgd
from torch import nn

import fnloop as fl
from fnloop._extensions.checkpoints import files, format, model
from fnloop._extensions.checkpoints.format import CheckpointError, Slices, decode_index
from fnloop._extensions.checkpoints.parts import weights_kept_on_error

NUMBERS = torch.arange(12.0).view(4, 3)
state_of = lambda fill=0.0: sgd(Linear(fill))


class Linear(nn.Module):
    def __init__(self, fill=0.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((4, 3), fill))


def shard(number, *offsets, key="w"):
    return {"file": f"model-0000{number}-of-00002.safetensors", "key": key, "offsets": [*offsets]}


def entry(*shards, shape=(4, 3), dtype="float32", **dim):
    return {"shape": [*shape], "dtype": dtype, **(dim or {"dim": 0}), "shards": [*shards]}


def split_by_hand(folder, first, second, entries):
    """Save a state, and put its model into two files and an index."""
    path = fl.save(state_of(7.0), folder / "a")
    (path / "model.safetensors").unlink()
    for number, tensors in ((1, first), (2, second)):
        save_file(tensors, path / f"model-0000{number}-of-00002.safetensors")
    (path / "index.json").write_text(json.dumps({"model": entries}))
    sizes = {
        file.name: {"bytes": file.stat().st_size, "sha256": files.disk.checksum_of_file(file)}
        for file in path.iterdir() if file.name != "manifest.json"
    }  # fmt: skip
    return craft(path, lambda made: made.update(format_version=3, files=sizes))


WHOLE = shard(1, 0, 0), shard(2, 2, 0)
HALVES = {"w": NUMBERS[:2].clone()}, {"w": NUMBERS[2:].clone()}


@pytest.mark.parametrize("columns", [False, True])
def test_parts_are_put_together(tmp_path, columns):
    """Rows, or columns of other widths under other names."""
    parts, entries = HALVES, entry(*WHOLE)
    if columns:
        parts = {"one": NUMBERS[:, :1].clone()}, {"w": NUMBERS[:, 1:].clone()}
        entries = entry(shard(1, 0, 0, key="one"), shard(2, 0, 1), dim=1)
    path = split_by_hand(tmp_path, *parts, {"w": entries})
    assert fl.restore(path, state_of()).model.w.tolist() == NUMBERS.tolist()
    assert fl.resume(tmp_path, state_of()).model.w.tolist() == NUMBERS.tolist()
    assert fl.latest(tmp_path) == path


LACKS, SPLIT = "its index lacks parts of w", "does not say how w is split"


@pytest.mark.parametrize(("given", "said"), [
    (entry(shard(1, 0, 0)), "instead of"), (entry(shard(2, 2, 0)), LACKS),
    (entry(shard(2, 2, 0), shard(1, 0, 0)), LACKS), (entry(), LACKS),
    (entry(shard(1, 0, 0), shard(2, 1, 0)), "instead of"),
    (entry(shard(1, 0, 0), shard(2, 3, 0)), "instead of"),
    (entry(shard(1, 0, 0), shard(2, 2, 1)), LACKS), (entry(*WHOLE, dim=None), LACKS),
    (entry(shard(1, 0, 0), shard(2, 2)), LACKS),
    (entry(shard(1, 0, 0), dim=None), "instead of"), (entry(*WHOLE, dim=2), SPLIT),
    (entry(*WHOLE, dim="0"), "model.w.dim is '0'"), (entry(*WHOLE, dtype="load"), SPLIT),
    (entry(*WHOLE, dtype="float64"), "is torch.float32 instead of torch.float64"),
    (entry(*WHOLE, shape=(4, 4)), "instead of"),
    (entry(*WHOLE, shape=(4, -3)), "model.w.shape.1 is -3"),
    (entry(*WHOLE, shape=(4, 3.0)), "model.w.shape.1 is 3.0"),
    (entry(shard(1, 0, 0), {**shard(2, 2, 0), "file": "../b"}), "the manifest does not list"),
    (entry(shard(1, 0, 0), {**shard(2, 2, 0), "key": "v"}), "does not contain tensor v"),
    ({}, "model.w.shape is missing"), (entry(*WHOLE, shape=(10**15, 3)), "instead of"),
])  # fmt: skip
def test_an_index_that_does_not_fit_is_refused_and_the_state_stays(tmp_path, given, said):
    path, state = split_by_hand(tmp_path, *HALVES, {"w": given}), state_of(1.0)
    check_refused(path, state, said)
    assert fl.restore(fl.save(state, tmp_path / "b"), state_of()).step == 0


def test_a_damaged_part_is_found(tmp_path):
    path = split_by_hand(tmp_path, *HALVES, {"w": entry(*WHOLE)})
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    check_refused(path, state_of(), "checksum of model-00002-of-00002")
    file.unlink()
    check_refused(path, state_of(), r"model-00002-of-00002.* is missing")


@pytest.mark.parametrize("most", [1, 24, 10**6])
def test_a_slice_is_read_across_parts_some_rows_at_a_time(tmp_path, monkeypatch, most):
    monkeypatch.setattr(format, "MOST_MAPPED", most)
    path = split_by_hand(tmp_path, *HALVES, {"w": entry(*WHOLE)})
    index = json.loads((path / "index.json").read_text())
    names = {"model-00001-of-00002.safetensors", WHOLE[1]["file"]}
    found = decode_index(index, names, path)
    whole, reader = found["model"]["w"], Slices(path)
    assert torch.equal(reader.read(whole, 1, 3, 0), NUMBERS[1:3])
    assert torch.equal(reader.read(whole, 1, 2, 1), NUMBERS[:, 1:2])
    assert reader.read(whole, 4, 4, 0).shape == (0, 3)
    assert torch.equal(reader.read(whole), NUMBERS)
    reader.close()


@pytest.mark.parametrize("shape", [(), (1,), (12,), (1, 12), (12, 1), (2, 1, 6), (0, 3)])
def test_a_whole_file_is_read_in_small_blocks(tmp_path, monkeypatch, shape):
    """A block is two numbers of four bytes, or one row where a row is more."""
    monkeypatch.setattr(format, "MOST_MAPPED", 8)
    value = torch.arange(float(torch.Size(shape).numel())).view(shape)
    save_file({"a": value}, tmp_path / "x.safetensors")
    reader, sizes, read = Slices(tmp_path), [], Slices._slice
    note = lambda *given: (sizes.append((t := read(*given)).nbytes), t)[1]
    monkeypatch.setattr(Slices, "_slice", note)
    entry = reader.entries_in("x.safetensors")["a"]
    assert (entry.shape, entry.dtype) == (shape, torch.float32)
    assert torch.equal(reader.read(entry), value)
    assert max(sizes, default=0) <= (24 if shape == (2, 1, 6) else 8)


def test_a_large_file_is_opened_few_times(tmp_path, monkeypatch):
    """Of 4800 bytes, 300 are in memory at a time, and not 8: opening takes time for each tensor."""
    monkeypatch.setattr(format, "MOST_MAPPED", 8)
    save_file({"a": torch.arange(1200.0)}, tmp_path / "x.safetensors")
    reader, opened, open_file = Slices(tmp_path), [], format.safe_open
    note = lambda *given, **how: opened.append(1) or open_file(*given, **how)
    monkeypatch.setattr(format, "safe_open", note)
    entry = reader.entries_in("x.safetensors")["a"]
    assert torch.equal(reader.read(entry), torch.arange(1200.0))
    assert len(opened) <= 16


# --- files that are damaged, with the right checksum


def header(data=bytes(8), **entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def held(start=0, stop=8, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": [*shape], "data_offsets": [start, stop], **more}


WRONG = {
    "empty": b"", "cut": header(a=held())[:20], "longer": header(a=held(), data=bytes(9)),
    "shorter": header(a=held(), data=bytes(7)), "not JSON": (2).to_bytes(8, "little") + b"{]",
    "deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "endless": (1 << 62).to_bytes(8, "little") + b"{}", "a list": (2).to_bytes(8, "little") + b"[]",
    "no entry": header(a=3),
    "a dtype": header(a=held(dtype="F31")), "a shape": header(a=held(shape=(3,))),
    "a negative shape": header(a=held(shape=(-1, -2))),
    "an offset": header(a={**held(), "data_offsets": [0]}), "backwards": header(a=held(8, 0)),
    "twice": header(a=held(), b=held()),
    "a hole": header(a=held(0, 4, (1,)), b=held(6, 8, (1,), "F16")),
    "a shape beyond all": header(b"", a=held(0, 0, (0, 1 << 40, 1 << 40))),
}  # fmt: skip


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_a_file_that_has_no_tensors_is_damaged(tmp_path, data):
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    reader = Slices(tmp_path)
    with pytest.raises(CheckpointError, match="is damaged"):
        reader.read(reader.entries_in("a.safetensors")["a"])


# --- a module, all or nothing


def load(module, values):
    with weights_kept_on_error(module, values):
        module.load_state_dict(values)


@pytest.fixture
def large(monkeypatch):
    """No model is small enough to be copied."""
    monkeypatch.setattr(model, "COPIED", 0)


def test_of_a_small_model_a_copy_is_kept_and_put_back():
    module, new = nn.Linear(2, 1), {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.ones(2)}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        load(module, new)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    assert new["weight"].tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("room", [0, 4, 8, 12])
def test_parts_of_one_memory_are_put_back_whether_they_are_copied_or_exchanged(monkeypatch, room):
    monkeypatch.setattr(model, "COPIED", room)
    module = nn.Module()
    memory = torch.tensor([1.0, 2.0])
    for name, part in {"whole": memory, "first": memory[:1], "last": memory[1:]}.items():
        module.register_buffer(name, part)
    values = {
        "whole": torch.tensor([3.0, 4.0]), "first": torch.tensor([5.0]), "last": torch.tensor([6.0])
    }  # fmt: skip
    with pytest.raises(OSError), weights_kept_on_error(module, values):
        module.load_state_dict(values)
        raise OSError
    assert memory.tolist() == [1.0, 2.0]


def test_weights_and_their_new_values_are_exchanged_and_back(large):
    module, new = nn.Linear(2, 1), {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.ones(2)}
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RuntimeError, match="size mismatch"):
        load(module, new)
    assert all(torch.equal(module.state_dict()[name], before[name]) for name in before)
    fitting = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.ones(1, dtype=torch.float64)}
    kept = fitting["weight"]
    load(module, fitting)
    assert module.weight.tolist() == [[1.0, 2.0]] and module.bias.tolist() == [1.0]
    assert torch.equal(kept, before["weight"])


def test_weights_in_another_memory_format_are_exchanged_too(large):
    """A copy of all weights beside the new ones would double the memory that a restore takes."""
    module, new = nn.Conv2d(2, 3, 2, bias=False), torch.arange(24.0).view(3, 2, 2, 2)
    module.to(memory_format=torch.channels_last)
    before, values = module.weight.detach().clone(), {"weight": new.clone()}
    kept = values["weight"]
    load(module, values)
    assert module.weight.equal(new) and kept.equal(before)
    assert module.weight.is_contiguous(memory_format=torch.channels_last)


def test_tied_weights_are_exchanged_once_for_each_name(large):
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    module[1].weight = module[0].weight
    before = module[0].weight.item()
    values = {"0.weight": torch.tensor([[2.0]]), "1.weight": torch.tensor([[3.0]])}
    load(module, values)
    assert module[0].weight.item() == 3.0  # the last, as load_state_dict does
    with pytest.raises(RuntimeError, match="Unexpected"):
        load(module, {"0.weight": torch.tensor([[before]]), "1.weight": torch.ones(1, 1), "x": 1})
    assert module[0].weight.item() == 3.0
