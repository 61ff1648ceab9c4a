"""A file or folder of another library is refused by what it seems to be, with a page to read."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fnloop as fl
from fnloop._extensions.checkpoints.foreign import ADVICE, explain_foreign
from fnloop.testing import toy

WEIGHTS = {"w": torch.ones(1)}
LIGHTNING = {"state_dict": WEIGHTS, "pytorch-lightning_version": "2.6.0", "epoch": 1}


def of_names(*names):
    def write(folder):
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"{}")

    return write


def distributed(folder):
    dcp.save(WEIGHTS, checkpoint_id=folder, no_dist=True)


def legacy(path):
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)


HUGGING_FACE = "a folder of weights as Hugging Face writes them"
FILES = {
    "a.pt": (lambda path: torch.save(WEIGHTS, path), "a file that torch.save has written"),
    "old.pth": (legacy, "a file that torch.save has written"),
    "last.ckpt": (lambda path: torch.save(LIGHTNING, path), "a checkpoint of Lightning"),
    "renamed.pt": (lambda path: torch.save(LIGHTNING, path), "a checkpoint of Lightning"),
    "a.safetensors": (lambda path: save_file(WEIGHTS, path), "a file of safetensors"),
}
FOLDERS = {
    "dcp": (distributed, "a checkpoint of torch.distributed.checkpoint"),
    "accelerate": (
        of_names("model.safetensors", "optimizer.bin", "random_states_0.pkl"),
        "what accelerate's save_state writes",
    ),
    "one file": (of_names("config.json", "model.safetensors"), HUGGING_FACE),
    "shards": (
        of_names("model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        HUGGING_FACE,
    ),
    "old shards": (of_names("config.json", "pytorch_model.bin.index.json"), HUGGING_FACE),
    "lightning": (of_names("epoch=1-step=20.ckpt"), "a folder of Lightning's checkpoints"),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", FILES | FOLDERS)
@pytest.mark.parametrize("read", [fl.restore, fl.resume])
def test_what_another_library_has_written_is_refused_by_what_it_seems_to_be(tmp_path, read, name):
    write, kind = (FILES | FOLDERS)[name]
    write(tmp_path / name)
    state = toy(w=3.0)
    with pytest.raises(fl.CheckpointError) as caught:
        read(tmp_path / name, state)
    assert f"It seems to be {kind}. {ADVICE}" in str(caught.value)
    assert fl.fit(fl.pipeline()(lambda m, b: m(b).mean()), state, [torch.ones(1)], hooks=()).step


def test_the_page_that_is_named_is_there():
    book = Path(__file__).parents[3] / "notebooks"
    page = (book / "how_to" / "foreign_checkpoints.md").read_text()
    assert "\n# Checkpoints of other libraries\n" in page
    assert "Checkpoints of other libraries" in ADVICE


@pytest.mark.parametrize("write", [
    of_names(), of_names("notes.txt"), of_names("config.json"), of_names("model.safetensors"),
    of_names("state.json", "model.safetensors", "optimizer.safetensors"), of_names("best.pt"),
])  # fmt: skip
def test_a_folder_of_which_nothing_is_known_begins_a_run(tmp_path, write):
    write(tmp_path / "run")
    assert explain_foreign(tmp_path / "run") is None
    assert fl.resume(tmp_path / "run", toy(w=3.0)).step == 0


def test_a_run_resumes_from_a_folder_that_has_files_of_other_libraries_too(tmp_path):
    fl.save(toy(w=3.0), tmp_path / "run" / "step-00000000")
    of_other = tmp_path / "run" / "config.json", tmp_path / "run" / "model.safetensors"
    for file in of_other:
        file.write_text(json.dumps({}))
    assert fl.resume(tmp_path / "run", toy()).model.w.item() == 3.0


class Harmful:
    def __reduce__(self):
        return pytest.fail, ("a file was unpickled",)


def test_no_file_is_unpickled_to_tell_what_it_is(tmp_path):
    torch.save({"x": Harmful()}, tmp_path / "a.ckpt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Harmful()))
    (tmp_path / "c.pt").write_bytes(b"PK\x03\x04 and no archive")
    for name in ("a.ckpt", "b.pt", "c.pt"):
        assert "seems to be" in explain_foreign(tmp_path / name)
