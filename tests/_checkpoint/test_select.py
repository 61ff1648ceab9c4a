"""latest, best and resume: which checkpoint they find, and which faults they report."""

import errno
import json
import os
import threading
from pathlib import Path

import attrs
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


def test_best_requires_a_metric(tmp_path):
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    with pytest.raises(ValueError, match=r'write best\(folder, "valid/loss"\)'):
        fl.best(tmp_path)
    assert fl.best(tmp_path, "train/loss").name == "step-00000001"
    assert fl.best(tmp_path / "nowhere") is None is fl.latest(tmp_path / "nowhere")


def test_a_restart_logs_that_the_run_was_stopped(tmp_path, caplog):
    hooks = (lambda state: attrs.evolve(state, stop="enough"), fl.checkpoint(tmp_path))
    fl.fit(step, toy(), [ONE] * 5, hooks=hooks)
    state = fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 5, hooks=hooks)
    assert state.step == 1 and "stopped (enough)" in caplog.text


def test_resume_skips_a_damaged_checkpoint(tmp_path):
    fl.fit(step, toy(), [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)),))
    file = tmp_path / "step-00000003" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.warns(
        UserWarning, match=r"step-00000003 is damaged: the checksum of model\.safetensors is wrong"
    ):
        assert fl.resume(tmp_path, toy()).step == 2


def test_resume_accepts_a_single_checkpoint_but_not_a_file(tmp_path):
    assert fl.resume(fl.save(toy(w=3.0), tmp_path / "a"), toy()).model.w.item() == 3.0
    (tmp_path / "file").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="is a file: resume expects a folder"):
        fl.resume(tmp_path / "file", toy())


def test_the_most_recently_written_checkpoint_is_the_newest(tmp_path):
    def train(state, steps, x=1.0):
        saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=9))
        return fl.fit(step, state, [torch.tensor([x])] * 9, steps=steps, hooks=(saves,))

    train(toy(), 3)
    train(fl.restore(tmp_path / "step-00000001", toy()), 2, x=50.0)  # a run that went back
    state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (2, -51.0)
    assert fl.latest(tmp_path).name == "step-00000002"


@pytest.fixture
def unreadable(monkeypatch):
    """A function that makes every read of a checkpoint file fail."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    return lambda: monkeypatch.setattr(files, "checksum_of_file", fail)


@pytest.mark.parametrize(
    "call", [fl.latest, lambda folder: fl.resume(folder, toy()), lambda folder: fl.best(folder)]
)
def test_a_read_error_is_raised_and_never_treated_as_damage(tmp_path, unreadable, call):
    train(tmp_path, toy(), 3, best="train/loss")
    unreadable()
    with pytest.raises(OSError, match="Input/output error"):
        call(tmp_path)


def test_an_unreadable_manifest_is_an_error(tmp_path, monkeypatch):
    train(tmp_path, toy(), 2)
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path / "x" if path.name == "manifest.json" else path)
    )
    with pytest.raises(OSError):
        fl.resume(tmp_path, toy())


def test_resume_raises_if_there_are_checkpoints_and_none_is_valid(tmp_path):
    train(tmp_path, toy(), 2)
    for path in tmp_path.iterdir():
        (path / "model.safetensors").write_bytes(b"rot")
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(
            fl.CheckpointError,
            match=r"has 2 checkpoints, and none is valid: .*step-00000002 is damaged.*another",
        ),
    ):
        fl.resume(tmp_path, toy())
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_newer_format_is_not_skipped(tmp_path):
    train(tmp_path, toy(), 2)
    file = tmp_path / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["check"]
    manifest["format_version"] = 99
    file.write_text(json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)}))
    for call in (lambda: fl.resume(tmp_path, toy()), lambda: fl.latest(tmp_path)):
        with pytest.raises(fl.CheckpointError, match="pip install -U fnloop"):
            call()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_only_regular_files_are_opened(tmp_path, name, kind):
    path = fl.save(toy(), tmp_path / "a")
    (path / name).unlink()
    os.mkfifo(path / name) if kind == "fifo" else (path / name).symlink_to("/dev/zero")
    found = []

    def restore():
        try:
            fl.restore(path, toy())
        except fl.CheckpointError as error:
            found.append(str(error))

    thread = threading.Thread(target=restore, daemon=True)
    thread.start()
    thread.join(10)
    assert len(found) == 1 and ("not a regular file" in found[0] or "is missing" in found[0])


def test_resuming_a_checkpoint_without_its_manifest_is_an_error(tmp_path):
    path = fl.save(toy(w=3.0), tmp_path / "final")
    (path / "manifest.json").unlink()
    with pytest.raises(fl.CheckpointError, match=r"it has no manifest\.json"):
        fl.resume(path, toy())


def test_a_checkpoint_that_was_moved_and_linked_is_found(tmp_path):
    train(tmp_path / "run", toy(), 2, keep=1)
    (tmp_path / "run" / "step-00000002").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000002").symlink_to(tmp_path / "moved")
    assert fl.resume(tmp_path / "run", toy()).step == 2


def test_a_checkpoint_that_vanishes_while_listing_is_not_an_error(tmp_path, monkeypatch):
    train(tmp_path, toy(), 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    stat = Path.stat

    def vanishing(path, **kwargs):
        if path.name == "step-00000002":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert fl.latest(tmp_path).name == "step-00000003"


def test_a_checkpoint_between_two_evaluations_is_not_ranked_by_the_previous_one(tmp_path):
    """Evaluations are at 2, 4 and 6, checkpoints at 3 and 6. The loss falls from -2 to -6."""
    hooks = (fl.every(steps=3)(fl.checkpoint(tmp_path)),)
    loaders = {"train": [ONE] * 6, "valid": [ONE]}
    state = fl.fit(step, toy(), loaders, hooks=hooks, evaluate_every=fl.every(steps=2))
    assert state.history["valid/loss"] == (-2.0, -4.0, -6.0)
    assert fl.latest(tmp_path).name == "step-00000006"
    assert fl.best(tmp_path, "valid/loss", mode="max").name == "step-00000006"


def test_the_position_of_a_checkpoint_includes_skipped_updates(tmp_path):
    """It is [attempted updates, epochs, batches]. One of four batches is empty."""
    state = fl.fit(step, toy(), [ONE, torch.ones(0), ONE, ONE], hooks=())
    manifest = json.loads((fl.save(state, tmp_path / "a") / "manifest.json").read_text())
    assert manifest["position"] == [4, 1, 0]
