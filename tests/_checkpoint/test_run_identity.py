"""A folder belongs to one run: another run neither replaces nor removes its checkpoints."""

import json
import re
import shutil

import pytest
import torch

import fnloop as fl
from fnloop._checkpoint import files
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def train(folder, state, steps, every=1, **settings):
    hook = fl.every(steps=every)(fl.checkpoint(folder, **settings))
    return fl.fit(step, state, [ONE] * 100, steps=steps, hooks=(hook,))


def test_a_second_run_that_forgets_to_resume_is_refused_before_its_first_update(tmp_path):
    train(tmp_path, toy(), 5, best="train/loss")
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    state = toy()
    with pytest.raises(
        fl.CheckpointError,
        match=rf'checkpoints of another run.*resume\("{re.escape(str(tmp_path))}", state\)',
    ):
        train(tmp_path, state, 2)
    assert (state.step, state.model.w.item()) == (0, 0.0)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_run_may_go_back_in_its_own_folder(tmp_path):
    state = train(tmp_path, toy(), 2)
    kept = fl.snapshot(state)
    train(tmp_path, state, 4)
    train(tmp_path, kept, 3)
    assert fl.resume(tmp_path, toy()).step == 3
    train(tmp_path, fl.restore(tmp_path / "step-00000002", toy()), 3)


def test_a_full_restore_keeps_the_identity_and_other_states_get_a_new_one(tmp_path):
    state = toy()
    path = fl.save(state, tmp_path / "a")
    assert fl.restore(path, toy()).run_id == state.run_id == fl.snapshot(state).run_id
    assert fl.restore(path, toy(), only=("model",)).run_id != state.run_id
    torch.manual_seed(0)
    first = toy().run_id
    torch.manual_seed(0)
    assert toy().run_id != first


def test_drawing_an_identity_does_not_advance_generators():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    fl.TrainState.create(model, optimizer, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_of_another_run_is_not_replaced(tmp_path):
    train(tmp_path / "other", toy(w=-9.0), 3, keep=9)

    def intrude(state):
        if state.step == 2:
            shutil.copytree(
                tmp_path / "other" / "step-00000003", tmp_path / "mine" / "step-00000003"
            )
        return state

    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path / "mine")), intrude)
    with pytest.raises(fl.CheckpointError, match="is a checkpoint of another run"):
        fl.fit(step, toy(), [ONE] * 4, hooks=hooks)
    assert fl.restore(tmp_path / "mine" / "step-00000003", toy()).model.w.item() == -12.0


def test_two_hooks_of_one_folder_are_refused_for_any_spelling_of_it(tmp_path):
    hooks = (
        fl.checkpoint(tmp_path / "a", keep=4),
        fl.checkpoint(tmp_path / "b" / ".." / "a", keep=1),
    )
    with pytest.raises(ValueError, match="two checkpoint hooks share"):
        fl.fit(step, toy(), [ONE], hooks=hooks)


def newer(path):
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["check"]
    manifest["format_version"] = 99
    file.write_text(json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)}))


UNREADABLE = {
    "newer": newer,
    "a damaged manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "a file that is cut": lambda path: (path / "slots.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("damage", UNREADABLE.values(), ids=UNREADABLE)
def test_a_run_that_forgets_to_resume_does_not_replace_unreadable_checkpoints(tmp_path, damage):
    train(tmp_path, toy(), 2)
    for path in tmp_path.iterdir():
        damage(path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        fl.CheckpointError, match=r"checkpoints (of another run|that cannot be read)"
    ):
        train(tmp_path, toy(), 4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_user_weights_under_the_name_of_a_checkpoint_are_not_replaced(tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "model.safetensors").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="cannot be read"):
        train(tmp_path, toy(), 4)
    assert (tmp_path / "step-00000002" / "model.safetensors").read_text() == "mine"


def test_checkpoints_without_an_identity_are_identified_by_their_folder(tmp_path):
    """fnloop wrote such checkpoints before runs had identities."""
    for name in "ab":
        train(tmp_path / name, toy(), 2)
        for path in (tmp_path / name).iterdir():
            state, manifest = (
                json.loads((path / "state.json").read_text()),
                json.loads((path / "manifest.json").read_text()),
            )
            del state["run"], manifest["run"], manifest["check"]
            (path / "state.json").write_text(json.dumps(state))
            file = path / "state.json"
            manifest["files"]["state.json"] = {
                "bytes": file.stat().st_size,
                "sha256": files.checksum_of_file(file),
            }
            (path / "manifest.json").write_text(
                json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)})
            )
    state = fl.resume(tmp_path / "a", toy())
    with pytest.raises(fl.CheckpointError, match="of another run"):
        train(tmp_path / "b", state, 3)
    train(tmp_path / "a", state, 3, keep=1)
    assert names(tmp_path / "a") == ["step-00000003"]


def test_only_one_of_two_runs_may_begin_in_an_empty_folder(tmp_path):
    def intrude(state):
        if state.step == 1:
            fl.checkpoint(tmp_path).begin(toy())
        return state

    with pytest.raises(fl.CheckpointError, match="another run has begun in"):
        fl.fit(step, toy(), [ONE] * 4, hooks=(intrude, fl.every(steps=2)(fl.checkpoint(tmp_path))))


def test_a_run_resumes_next_to_an_unreadable_checkpoint_of_its_own(tmp_path):
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path))
    fl.fit(step, toy(), [ONE] * 4, steps=2, hooks=(saves,))
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: .*step-00000002"):
        state = fl.resume(tmp_path, toy())
    assert state.step == 1
    assert fl.fit(step, state, [ONE] * 4, steps=3, hooks=(saves,)).model.w.item() == -3.0
