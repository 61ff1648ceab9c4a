"""A small file of a checkpoint is read once: its checksum and its tensors are of the same bytes."""

import collections
import time
from pathlib import Path

import pytest
import torch

import fnloop as fl
from fnloop._extensions.checkpoints import files, format
from fnloop.testing import assert_same, toy, toy_loss

STEP = fl.pipeline(fl.ema(0.5))(toy_loss)


def momentum():
    model = toy().model
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), 0.1, 0.9), seed=0)


READERS = {
    "restore": lambda folder: fl.restore(folder / "step-00000002", momentum()),
    "resume": lambda folder: fl.resume(folder, momentum()),
}


@pytest.fixture
def folder(tmp_path):
    batches, hooks = [torch.ones(2)] * 2, (fl.checkpoint(tmp_path / "a"),)
    fl.fit(STEP, momentum(), batches, hooks=hooks)
    return tmp_path / "a"


@pytest.mark.parametrize("name", READERS)
def test_each_file_is_opened_once(folder, monkeypatch, name):
    time.sleep(0.05)  # a listing reads again what is so new that it may still change
    monkeypatch.setattr(files, "_listed", {})  # as in a new process
    opened, original = collections.Counter(), Path.open
    mapped = lambda path, **_: pytest.fail(f"{path} is read again")
    note = lambda path, *a, **k: (opened.update([path]), original(path, *a, **k))[1]
    monkeypatch.setattr(Path, "open", note)
    monkeypatch.setattr(format, "safe_open", mapped)
    READERS[name](folder)
    newest = folder / "step-00000002"
    assert opened[newest / "model.safetensors"] == opened[newest / "state.json"] == 1
    assert {*opened.values()} == {1}


@pytest.mark.parametrize("most", [0, 1000, files.MOST_KEPT])
@pytest.mark.parametrize("name", READERS)
def test_files_of_any_size_give_the_same_state_in_the_same_order(folder, monkeypatch, name, most):
    right = READERS[name](folder)
    monkeypatch.setattr(files, "MOST_KEPT", most)
    state = READERS[name](folder)
    assert_same(state, right)
    assert [*state.slots] == [*right.slots] and [*state.metrics] == [*right.metrics]


def test_a_file_of_which_a_bit_has_changed_is_damaged_also_where_it_is_kept(folder):
    file = folder / "step-00000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(fl.CheckpointError, match=r"checksum of model\.safetensors is wrong"):
        READERS["restore"](folder)
