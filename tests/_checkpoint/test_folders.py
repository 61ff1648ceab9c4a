"""No folder and no run is ever lost: whose a folder is, what may be replaced, and what an unreadable disk means."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

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


# --- what save may replace


@pytest.mark.parametrize("ours", ["model.safetensors", "manifest.json", "state.json"])
def test_a_folder_with_files_of_the_user_is_refused_and_not_touched(tmp_path, ours):
    folder = tmp_path / "bert"
    folder.mkdir()
    mine = {ours: "{}", "config.json": "{}", "thesis.tex": "years"}
    for name, text in mine.items():
        (folder / name).write_text(text)
    with pytest.raises(
        fl.CheckpointError, match=r"bert exists and is not a checkpoint: save to another path"
    ):
        fl.save(toy(), folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == mine
    assert names(tmp_path) == ["bert"]


def test_a_checkpoint_with_a_file_of_the_user_in_it_is_refused_and_not_touched(tmp_path):
    path = fl.save(toy(w=1.0), tmp_path / "a")
    (path / "notes.txt").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="exists and is not a checkpoint"):
        fl.save(toy(w=2.0), path)
    assert (path / "notes.txt").read_text() == "mine" and fl.restore(
        path, toy()
    ).model.w.item() == 1.0


def test_a_damaged_checkpoint_and_an_empty_folder_are_replaced(tmp_path):
    path = fl.save(toy(w=1.0), tmp_path / "a")
    (path / "model.safetensors").write_bytes(b"")
    (tmp_path / "b").mkdir()
    for target in (path, tmp_path / "b"):
        assert fl.restore(fl.save(toy(w=2.0), target), toy()).model.w.item() == 2.0


def test_a_backup_that_is_not_ours_is_not_removed(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "a")
    (tmp_path / ".a.old").mkdir()
    (tmp_path / ".a.old" / "photo.jpg").write_text("mine")
    with pytest.raises(fl.CheckpointError, match=r"\.a\.old exists and is not a checkpoint"):
        fl.save(toy(w=2.0), tmp_path / "a")
    assert (tmp_path / ".a.old" / "photo.jpg").exists() and fl.restore(
        tmp_path / "a", toy()
    ).model.w.item() == 1.0


# --- a disk that does not answer


@pytest.fixture
def unreadable(monkeypatch):
    """A function that lets every read of a file of a checkpoint fail."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    return lambda: monkeypatch.setattr(files, "checksum_of_file", fail)


@pytest.mark.parametrize(
    "call", [fl.latest, lambda folder: fl.resume(folder, toy()), lambda folder: fl.best(folder)]
)
def test_a_read_error_is_raised_and_never_taken_for_damage(tmp_path, unreadable, call):
    train(tmp_path, toy(), 3, best="train/loss")
    unreadable()
    with pytest.raises(OSError, match="Input/output error"):
        call(tmp_path)


def test_an_unreadable_manifest_is_an_error_too(tmp_path, monkeypatch):
    train(tmp_path, toy(), 2)
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path / "x" if path.name == "manifest.json" else path)
    )
    with pytest.raises(OSError):
        fl.resume(tmp_path, toy())


def test_resume_raises_if_there_are_checkpoints_and_none_is_whole(tmp_path):
    train(tmp_path, toy(), 2)
    for path in tmp_path.iterdir():
        (path / "model.safetensors").write_bytes(b"rot")
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(
            fl.CheckpointError,
            match=r"has 2 checkpoints, and none is valid: .*step-00000002 is damaged.*another folder",
        ),
    ):
        fl.resume(tmp_path, toy())
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_newer_format_is_not_passed_over(tmp_path):
    train(tmp_path, toy(), 2)
    file = tmp_path / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["check"]
    manifest["format_version"] = 99
    file.write_text(json.dumps({**manifest, "check": files.checksum_of_manifest(manifest)}))
    for call in (lambda: fl.resume(tmp_path, toy()), lambda: fl.latest(tmp_path)):
        with pytest.raises(fl.CheckpointError, match="pip install -U fnloop"):
            call()


def test_a_folder_beside_the_checkpoints_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "model.safetensors").write_text("not ours")
    assert fl.resume(tmp_path, toy()).step == 0
    train(tmp_path, toy(), 2, keep=1)
    assert names(tmp_path) == ["bert", "step-00000002"]


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


# --- whose a folder is


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


def test_a_run_may_go_back_within_itself_in_its_own_folder(tmp_path):
    state = train(tmp_path, toy(), 2)
    kept = fl.snapshot(state)
    train(tmp_path, state, 4)
    train(tmp_path, kept, 3)
    assert fl.resume(tmp_path, toy()).step == 3
    train(tmp_path, fl.restore(tmp_path / "step-00000002", toy()), 3)


def test_the_identity_is_kept_by_a_full_restore_and_a_new_one_drawn_otherwise(tmp_path):
    state = toy()
    path = fl.save(state, tmp_path / "a")
    assert fl.restore(path, toy()).run_id == state.run_id == fl.snapshot(state).run_id
    assert fl.restore(path, toy(), only=("model",)).run_id != state.run_id
    torch.manual_seed(0)
    first = toy().run_id
    torch.manual_seed(0)
    assert toy().run_id != first


def test_what_identity_a_state_gets_draws_nothing_from_generators():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.get_rng_state()
    fl.TrainState.create(model, optimizer, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_checkpoints_of_another_run_are_neither_pruned_nor_ranked(tmp_path):
    """They came there while this run was training already."""
    other = train(tmp_path / "other", toy(w=-9.0), 3, keep=9, best="train/loss")
    assert other.step == 3

    def intrude(state):
        if state.step == 2:
            shutil.copytree(
                tmp_path / "other" / "step-00000003",
                tmp_path / "mine" / "step-00000001",
                dirs_exist_ok=True,
            )
        return state

    hook = fl.checkpoint(tmp_path / "mine", keep=1, best="train/loss")
    hooks = (intrude, fl.when(lambda state: state.step >= 2)(hook))
    fl.fit(step, toy(), [ONE], epochs=4, hooks=hooks)
    assert "step-00000001" in names(tmp_path / "mine")
    assert fl.best(tmp_path / "mine").name == "step-00000004"


def test_the_place_of_another_runs_checkpoint_is_not_taken(tmp_path):
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


def test_two_hooks_of_one_folder_are_found_however_it_is_spelled(tmp_path):
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
def test_a_run_that_forgets_to_resume_does_not_replace_what_it_cannot_read(tmp_path, damage):
    train(tmp_path, toy(), 2)
    for path in tmp_path.iterdir():
        damage(path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        fl.CheckpointError, match=r"checkpoints (of another run|that cannot be read)"
    ):
        train(tmp_path, toy(), 4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_weights_of_the_user_under_the_name_of_a_checkpoint_are_not_replaced(tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "model.safetensors").write_text("mine")
    with pytest.raises(fl.CheckpointError, match="cannot be read"):
        train(tmp_path, toy(), 4)
    assert (tmp_path / "step-00000002" / "model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("folder", [".history", ".records"])
def test_folders_of_the_user_beside_the_checkpoints_are_left_alone(tmp_path, folder):
    for name in (folder, ".fin.writing-2024", ".fin.removing", ".step-00000001.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_2024.py").write_text("mine")
    fl.save(toy(), tmp_path / "fin")
    train(tmp_path, toy(), 2, keep=1)
    assert len([*tmp_path.glob(".*/train_2024.py")]) == 4


def test_a_checkpoint_with_a_file_of_the_user_in_it_is_not_pruned(tmp_path):
    def predict(state):
        if state.step == 2:
            (tmp_path / "step-00000002" / "predictions.csv").write_text("mine")
        return state

    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=1)), predict)
    fl.fit(step, toy(), [ONE] * 4, hooks=hooks)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_resume_of_a_checkpoint_that_lost_its_manifest_is_an_error(tmp_path):
    path = fl.save(toy(w=3.0), tmp_path / "final")
    (path / "manifest.json").unlink()
    with pytest.raises(fl.CheckpointError, match=r"it has no manifest\.json"):
        fl.resume(path, toy())


def test_a_checkpoint_that_was_moved_and_linked_is_found(tmp_path):
    train(tmp_path / "run", toy(), 2, keep=1)
    (tmp_path / "run" / "step-00000002").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000002").symlink_to(tmp_path / "moved")
    assert fl.resume(tmp_path / "run", toy()).step == 2


def test_checkpoints_without_an_identity_are_told_apart_by_their_folders(tmp_path):
    """As fnloop wrote them before there were identities."""
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


def test_two_runs_that_begin_in_one_empty_folder_are_not_both_let_in(tmp_path):
    def intrude(state):
        if state.step == 1:
            fl.checkpoint(tmp_path).begin(toy())
        return state

    with pytest.raises(fl.CheckpointError, match="another run has begun in"):
        fl.fit(step, toy(), [ONE] * 4, hooks=(intrude, fl.every(steps=2)(fl.checkpoint(tmp_path))))


# --- writers beside each other


WRITER = """
    import sys, time
    import torch
    import fnloop as fl
    model = torch.nn.Linear(200, 200)
    state = fl.TrainState.create(model, torch.optim.Adam(model.parameters()))
    end, n = time.monotonic() + 4, 0
    while time.monotonic() < end:
        fl.save(state, f"{sys.argv[1]}/{sys.argv[2]}-final")
        n += 1
    print("saved", n)
"""


@pytest.mark.slow
def test_two_machines_that_save_beside_each_other_do_not_disturb_each_other(tmp_path):
    """Both are process 1 of a namespace of their own, as in two containers."""
    command = [
        *["unshare", "--fork", "--pid", "--mount-proc"],
        sys.executable,
        "-c",
        textwrap.dedent(WRITER),
        str(tmp_path),
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command[:4], "true"], capture_output=True).returncode
    ):
        pytest.skip("namespaces can't be made here")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, name], **pipes) for name in ("a", "b")]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "saved" in out, err
    assert names(tmp_path) == ["a-final", "b-final"]


def test_what_another_process_is_writing_is_not_cleaned_away_and_what_it_left_is(tmp_path):
    half, lock = tmp_path / ".a.writing-0123456789ab", tmp_path / ".a.writing-0123456789ab.lock"
    half.mkdir()
    code = f"""if True:
        import fcntl, sys
        file = open({str(lock)!r}, "x")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("locked", flush=True)
        sys.stdin.read()
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as writer:
        writer.stdout.readline()
        fl.save(toy(), tmp_path / "a")
        assert names(tmp_path) == [half.name, lock.name, "a"]
        writer.kill()
    fl.save(toy(), tmp_path / "a")
    assert names(tmp_path) == ["a"]


def test_a_neighbours_half_written_folder_is_none_of_our_business(tmp_path):
    (tmp_path / ".b.writing-0123456789ab").mkdir()
    fl.save(toy(), tmp_path / "a")
    assert names(tmp_path) == [".b.writing-0123456789ab", "a"]


def test_checkpoints_that_vanish_while_they_are_listed_are_no_error(tmp_path, monkeypatch):
    train(tmp_path, toy(), 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    stat = Path.stat

    def vanishing(path, **kwargs):
        if path.name == "step-00000002":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert fl.latest(tmp_path).name == "step-00000003"


def test_what_was_killed_while_it_pruned_is_cleaned_when_a_run_begins(tmp_path):
    train(tmp_path, toy(), 2, keep=2)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.removing")
    state = fl.resume(tmp_path, toy())
    fl.fit(step, state, [ONE] * 100, steps=2, hooks=(fl.checkpoint(tmp_path),))  # nothing to do
    found = []
    seen = lambda state: found.extend(names(tmp_path)) or state
    fl.fit(step, state, [ONE] * 100, steps=3, hooks=(seen, fl.checkpoint(tmp_path)))
    assert found == ["step-00000002"]
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_resume_of_a_checkpoint_that_was_killed_between_two_renames_finds_it(tmp_path):
    fl.save(fl.fit(step, toy(), [ONE] * 4, hooks=()), tmp_path / "final")
    (tmp_path / "final").rename(tmp_path / ".final.old")
    assert (
        fl.restore(tmp_path / "final", toy()).step == fl.resume(tmp_path / "final", toy()).step == 4
    )


# --- paths


def test_a_relative_folder_stays_where_it_was_when_the_hook_was_made(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = fl.checkpoint("rel/run", keep=9)

    def move(state):
        if state.step == 2:
            os.chdir(tmp_path / "elsewhere")
        return state

    fl.fit(step, toy(), [ONE] * 4, hooks=(move, fl.every(steps=1)(hook)))
    assert names(tmp_path / "rel" / "run") == [f"step-{n:08d}" for n in (1, 2, 3, 4)]
    assert repr(hook) == "checkpoint('rel/run', keep=9)" and names(tmp_path / "elsewhere") == []


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert fl.save(toy(w=2.0), "~/ck/a") == tmp_path / "ck" / "a"
    assert (
        fl.restore("~/ck/a", toy()).model.w.item() == fl.resume("~/ck", toy()).model.w.item() == 2.0
    )
    train("~/run", toy(), 1)
    fl.fit(step, toy(), [ONE], hooks=(fl.to_csv("~/a.csv"),))
    assert names(tmp_path) == [".a.csv.run", "a.csv", "ck", "run"]


CALLS = {
    "save": lambda path: fl.save(toy(), path),
    "restore": lambda path: fl.restore(path, toy()),
    "resume": lambda path: fl.resume(path, toy()),
    "latest": fl.latest,
    "best": fl.best,
    "checkpoint": fl.checkpoint,
    "to_csv": fl.to_csv,
    "to_jsonl": fl.to_jsonl,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("", ValueError, "got an empty one"),
        ("s3://bucket/a", ValueError, "disks of this machine; got 's3://bucket/a'"),
        ("gs:/bucket", ValueError, "disks of this machine"),
        (5, TypeError, "such as .*; got 5"),
        (b"runs", TypeError, "such as .*; got b'runs'"),
        (None, TypeError, "got None"),
    ],
)
def test_what_is_not_a_path_of_this_machine_is_refused_by_name(
    name, path, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"(?s){name} .*{message}"):
        CALLS[name](path)
    assert names(tmp_path) == []


# --- best, and failed runs


def test_a_best_that_falls_between_evaluations_is_taken_at_the_next_one(tmp_path):
    values = iter([5.0, 1.0, 3.0, 4.0, 4.0])
    loss = lambda model, batch: (
        model.w * batch.mean() if model.training else torch.tensor(next(values))
    )
    hook = fl.every(steps=3)(fl.checkpoint(tmp_path, keep=9, best="valid/loss", mode="min"))
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    fl.fit(fl.pipeline()(loss), toy(), loaders, evaluate_every=fl.every(steps=4), hooks=(hook,))
    assert names(tmp_path) == [
        f"step-{n:08d}" for n in (3, 4, 6, 8, 9, 10)
    ]  # evaluations at 4, 8 and 10
    assert fl.best(tmp_path).name == "step-00000008"


def test_that_an_evaluation_is_waited_for_is_known_after_a_resume(tmp_path):
    loss = lambda model, batch: model.w * batch.mean()
    make = lambda: fl.every(steps=3)(fl.checkpoint(tmp_path, keep=9, best="valid/loss", mode="min"))
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    settings = {"evaluate_every": fl.every(steps=4)}

    class Killed(BaseException):
        pass

    def kill(state):
        if state.step == 3:
            raise Killed
        return state

    with pytest.raises(Killed):
        fl.fit(fl.pipeline()(loss), toy(), loaders, hooks=(make(), kill), **settings)
    fl.fit(
        fl.pipeline()(loss),
        fl.resume(tmp_path, toy()),
        loaders,
        steps=5,
        hooks=(make(),),
        **settings,
    )
    assert "step-00000004" in names(tmp_path)


def test_a_failed_run_is_saved_once_if_that_is_asked_for(tmp_path):
    def fail(state):
        if state.step in (2, 4):
            raise KeyError("no")
        return state

    hook = fl.every(steps=2)(fl.checkpoint(tmp_path, on_exception=True))
    with pytest.raises(KeyError):
        fl.fit(step, toy(), [ONE] * 6, hooks=(fail, hook))
    assert names(tmp_path) == ["step-00000002-exception_KeyError"]
    state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (2, -2.0)
    with pytest.raises(KeyError):
        fl.fit(step, state, [ONE] * 6, hooks=(hook, fail))
    assert names(tmp_path) == [
        "step-00000002-exception_KeyError",
        "step-00000004",
    ]  # that one was saved already


def test_a_failure_after_going_back_is_not_taken_for_the_state_of_the_abandoned_branch(tmp_path):
    train(tmp_path, toy(), 6, keep=None)

    def fail(state):
        if state.step == 4:
            raise ValueError("no")
        return state

    hook = fl.every(steps=100)(fl.checkpoint(tmp_path, keep=None, on_exception=True))
    back = fl.restore(tmp_path / "step-00000002", toy())
    with pytest.raises(ValueError, match="no"):
        fl.fit(step, back, [2 * ONE] * 100, hooks=(fail, hook))
    assert fl.restore(tmp_path / "step-00000004-exception_ValueError", toy()).model.w.item() == -6.0


def test_a_misspelled_metric_is_found_after_the_first_record_however_rarely_the_hook_is_called(
    tmp_path,
):
    loaders = {"train": [ONE], "valid": [ONE]}
    for hook in (fl.checkpoint(tmp_path, best="valid/losses"), fl.early_stop("valid/losses")):
        with pytest.raises(KeyError, match="no metric 'valid/losses'") as error:
            fl.fit(step, toy(), loaders, epochs=9, hooks=(fl.every(epochs=4)(hook),))
        assert error.value.state.epoch == 1


def test_a_failed_run_is_not_saved_otherwise(tmp_path):
    def fail(state):
        raise KeyError("no")

    with pytest.raises(KeyError):
        fl.fit(step, toy(), [ONE] * 6, hooks=(fail, fl.every(steps=2)(fl.checkpoint(tmp_path))))
    assert fl.latest(tmp_path) is None
