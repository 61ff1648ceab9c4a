"""A checkpoint is complete or absent; what a save may replace and what it cleans up."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fnloop as fl
from fnloop._checkpoint import files
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def train(folder, state, steps, every=1, **settings):
    hook = fl.every(steps=every)(fl.checkpoint(folder, **settings))
    return fl.fit(step, state, [ONE] * 100, steps=steps, hooks=(hook,))


@pytest.mark.slow
def test_leftovers_are_removed_by_the_next_run(tmp_path):
    for name in (".step-00000001.writing-0123456789ab", ".step-00000009.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    assert fl.latest(tmp_path) is None
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    assert names(tmp_path) == ["step-00000001"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    path = fl.save(toy(w=3.0), tmp_path / "a")
    path.rename(tmp_path / ".a.old")
    fl.save(toy(), tmp_path / "b")  # its cleanup must not remove what may be the only checkpoint
    shutil.rmtree(tmp_path / "b")
    assert fl.restore(path, toy()).model.w.item() == 3.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fl.resume(tmp_path, toy()).model.w.item() == 3.0


def test_a_folder_that_another_thread_is_writing_is_not_removed(tmp_path):
    def save(i):
        # One folder, spelled in two ways
        folder = tmp_path if i % 2 else tmp_path / ".." / tmp_path.name
        return [fl.save(toy(w=float(i)), folder / f"{i}") for _ in range(5)][-1]

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(save, range(4)))
    assert [fl.restore(path, toy()).model.w.item() for path in paths] == [0.0, 1.0, 2.0, 3.0]
    assert names(tmp_path) == ["0", "1", "2", "3"]


def test_a_hidden_folder_of_the_user_is_not_touched(tmp_path):
    (tmp_path / ".photos.removing").mkdir()
    (tmp_path / ".photos.removing" / "one.jpg").write_bytes(b"1")
    fl.save(toy(), tmp_path / "a")
    fl.fit(step, toy(), [ONE], hooks=(fl.checkpoint(tmp_path),))
    assert (tmp_path / ".photos.removing" / "one.jpg").exists()


def test_saving_to_a_link_writes_to_its_target(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for w in (2.0, 3.0):
        fl.save(toy(w=w), tmp_path / "link")
        assert fl.restore(tmp_path / "link", toy()).model.w.item() == w
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("ours", ["model.safetensors", "manifest.json", "state.json"])
def test_a_folder_with_user_files_is_refused_and_not_touched(tmp_path, ours):
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


def test_a_checkpoint_with_a_user_file_in_it_is_refused_and_not_touched(tmp_path):
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


def test_a_backup_that_is_not_a_checkpoint_is_not_removed(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "a")
    (tmp_path / ".a.old").mkdir()
    (tmp_path / ".a.old" / "photo.jpg").write_text("mine")
    with pytest.raises(fl.CheckpointError, match=r"\.a\.old exists and is not a checkpoint"):
        fl.save(toy(w=2.0), tmp_path / "a")
    assert (tmp_path / ".a.old" / "photo.jpg").exists() and fl.restore(
        tmp_path / "a", toy()
    ).model.w.item() == 1.0


@pytest.mark.parametrize("folder", [".history", ".records"])
def test_user_folders_next_to_the_checkpoints_are_not_touched(tmp_path, folder):
    for name in (folder, ".fin.writing-2024", ".fin.removing", ".step-00000001.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_2024.py").write_text("mine")
    fl.save(toy(), tmp_path / "fin")
    train(tmp_path, toy(), 2, keep=1)
    assert len([*tmp_path.glob(".*/train_2024.py")]) == 4


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
def test_two_machines_that_save_to_one_folder_do_not_interfere(tmp_path):
    """Each is process 1 of its own namespace, as in two containers."""
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
        pytest.skip("namespaces cannot be created here")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, name], **pipes) for name in ("a", "b")]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and "saved" in out, err
    assert names(tmp_path) == ["a-final", "b-final"]


@pytest.mark.slow
def test_leftovers_are_removed_only_after_their_process_has_ended(tmp_path):
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


def test_leftovers_of_other_checkpoints_are_not_touched(tmp_path):
    (tmp_path / ".b.writing-0123456789ab").mkdir()
    fl.save(toy(), tmp_path / "a")
    assert names(tmp_path) == [".b.writing-0123456789ab", "a"]


def test_leftovers_of_a_killed_prune_are_removed_when_a_run_begins(tmp_path):
    train(tmp_path, toy(), 2, keep=2)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.removing")
    state = fl.resume(tmp_path, toy())
    fl.fit(step, state, [ONE] * 100, steps=2, hooks=(fl.checkpoint(tmp_path),))  # nothing to do
    found = []
    seen = lambda state: found.extend(names(tmp_path)) or state
    fl.fit(step, state, [ONE] * 100, steps=3, hooks=(seen, fl.checkpoint(tmp_path)))
    assert found == ["step-00000002"]
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


LEFT = {
    "a cut backup": ".a.old/model.safetensors",
    "a backup that NFS keeps": ".a.old/.nfs000000000001",
    "a cut one that is being removed": ".a.removing-0123456789ab/.nfs000000000001",
    "a half of safetensors without a lock": ".a.writing-0123456789ab/.tmpAb_C12",
}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_what_is_left_of_a_checkpoint_never_blocks_a_save_and_is_removed(tmp_path, left):
    path = fl.save(toy(w=1.0), tmp_path / "a")
    (tmp_path / left).parent.mkdir()
    (tmp_path / left).write_bytes(b"left")
    fl.save(toy(w=2.0), path)
    assert names(tmp_path) == ["a"]
    assert fl.restore(path, toy()).model.w.item() == 2.0


def test_a_kill_while_the_old_checkpoint_is_removed_does_not_block_the_next_save(
    tmp_path, monkeypatch
):
    """Whichever file is removed first: here it is the manifest."""
    path = fl.save(toy(w=1.0), tmp_path / "a")

    def cut(folder, **settings):
        if (folder / "manifest.json").exists():
            (folder / "manifest.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", cut)
        fl.save(toy(w=2.0), path)
    assert len(names(tmp_path)) == 2 and fl.restore(path, toy()).model.w.item() == 2.0
    fl.save(toy(w=3.0), path)
    assert names(tmp_path) == ["a"] and fl.latest(tmp_path) == path


def test_leftovers_that_cannot_be_read_do_not_block_a_save(tmp_path, monkeypatch):
    def unreadable(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    (tmp_path / ".a.removing").mkdir()
    monkeypatch.setattr(files, "has_only_our_files", unreadable)
    assert fl.restore(fl.save(toy(w=2.0), tmp_path / "a"), toy()).model.w.item() == 2.0


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_every_file_has_the_mode_that_the_umask_gives(tmp_path, monkeypatch, umask, background):
    monkeypatch.setattr(files, "IN_BLOCK", 2)
    tables = (fl.to_csv(tmp_path / "t" / "a.csv"), fl.to_jsonl(tmp_path / "t" / "a.jsonl"))
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", background=background))
    steps = fl.pipeline(fl.ema(0.5))(toy_loss)
    before = os.umask(umask)
    try:
        fl.fit(steps, toy(), [ONE], epochs=3, hooks=(*tables, saves))
    finally:
        os.umask(before)
    modes = {p: p.stat().st_mode & 0o777 for p in tmp_path.rglob("*")}
    kinds = {path.suffix for path in modes}
    assert {".safetensors", ".json", ".jsonl", ".csv", ".run"} <= kinds
    assert modes == {p: (0o777 if p.is_dir() else 0o666) & ~umask for p in modes}


def test_resume_finds_a_checkpoint_killed_between_two_renames(tmp_path):
    fl.save(fl.fit(step, toy(), [ONE] * 4, hooks=()), tmp_path / "final")
    (tmp_path / "final").rename(tmp_path / ".final.old")
    assert (
        fl.restore(tmp_path / "final", toy()).step == fl.resume(tmp_path / "final", toy()).step == 4
    )


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_is_flushed_before_it_is_renamed(tmp_path, monkeypatch, replaced):
    """A power failure keeps only flushed data. The parent folder is flushed last."""
    path, events = tmp_path / "a", []
    fsync, rename = os.fsync, os.rename
    if replaced:
        fl.save(toy(w=1.0), path)

    def flush(descriptor):
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def move(source, target):
        rename(source, target)
        events.append(f"{Path(target).name} was renamed")

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "rename", move)
    fl.save(toy(w=2.0), path)
    renamed = events.index("a was renamed")
    assert {item.stat().st_ino for item in (path, *path.iterdir())} <= {*events[:renamed]}
    assert tmp_path.stat().st_ino in events[renamed:]


@pytest.mark.parametrize("write", ["save", "claim", "table"])
def test_the_names_of_new_folders_are_flushed(tmp_path, monkeypatch, write):
    """A power failure may otherwise take the run with its folder."""
    flushed, fsync, folder = set(), os.fsync, tmp_path / "runs" / "a"

    def flush(descriptor):
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", flush)
    if write == "save":
        fl.save(toy(), folder / "last")
    else:
        hook = fl.checkpoint(folder) if write == "claim" else fl.to_csv(folder / "a.csv")
        hook.begin(toy())
    files = [path for path in folder.iterdir() if path.is_file()]
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "runs", folder, *files)} <= flushed


def test_a_failed_write_names_its_file(tmp_path, monkeypatch):
    def full(*args, **settings):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.safetensors'"):
        fl.save(toy(), tmp_path / "a")
