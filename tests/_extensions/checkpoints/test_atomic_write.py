"""A checkpoint is complete or absent; what a save may replace, what it cleans up, a full disk."""

import _thread
import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from killed_run import toy_fit
from saved import ONE, contents_of, names, saved_steps, step, train

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.testing import assert_same, stochastic, toy, toy_loss

w_of = lambda path: fl.restore(path, toy()).model.w.item()


def test_a_kill_between_two_renames_loses_nothing(tmp_path):
    path = fl.save(toy(w=3.0), tmp_path / "a")
    path.rename(tmp_path / ".a.old")
    fl.save(toy(), tmp_path / "b")  # its cleanup must not remove what may be the only checkpoint
    shutil.rmtree(tmp_path / "b")
    assert w_of(path) == 3.0
    for found in (tmp_path, path):
        assert fl.resume(found, toy()).model.w.item() == 3.0  # without a warning


def test_a_folder_that_another_thread_is_writing_is_not_removed(tmp_path):
    def save(i):
        # One folder, spelled in two ways
        folder = tmp_path if i % 2 else tmp_path / ".." / tmp_path.name
        return [fl.save(toy(w=float(i)), folder / f"{i}") for _ in range(5)][-1]

    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(save, range(4)))
    assert [*map(w_of, paths)] == [0.0, 1.0, 2.0, 3.0]
    assert names(tmp_path) == ["0", "1", "2", "3"]


def test_saving_to_a_link_writes_to_its_target(tmp_path):
    fl.save(toy(w=1.0), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for w in (2.0, 3.0):
        assert w_of(fl.save(toy(w=w), tmp_path / "link")) == w
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["link", "real"]


OURS = ["model.safetensors", "manifest.json", "state.json"]


@pytest.mark.parametrize(("checkpoint", "files", "named"), [
    *((False, [f"a/{ours}", "a/config.json", "a/thesis.tex"], "a exists") for ours in OURS),
    (False, ["a/notes.txt"], "a exists"),
    (True, ["a/notes.txt"], "a exists"),  # in a checkpoint
    (True, ["a/notes.safetensors"], r"it contains notes\.safetensors"),
    (True, [".a.old/photo.jpg"], r"\.a\.old exists"),  # in the place of a backup
])  # fmt: skip
def test_files_of_the_user_are_refused_and_not_touched(tmp_path, checkpoint, files, named):
    if checkpoint:
        fl.save(toy(w=1.0), tmp_path / "a")
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    before = contents_of(tmp_path)
    with pytest.raises(fl.CheckpointError, match=named) as error:
        fl.save(toy(w=2.0), tmp_path / "a")
    assert "is not a checkpoint: save to another path" in str(error.value)
    assert contents_of(tmp_path) == before
    assert not checkpoint or w_of(tmp_path / "a") == 1.0


def test_a_damaged_checkpoint_and_an_empty_folder_are_replaced(tmp_path):
    path = fl.save(toy(w=1.0), tmp_path / "a")
    (path / "model.safetensors").write_bytes(b"")
    (tmp_path / "b").mkdir()
    for target in (path, tmp_path / "b"):
        assert w_of(fl.save(toy(w=2.0), target)) == 2.0


@pytest.mark.parametrize("newer", [False, True])
def test_a_damaged_manifest_is_replaced_by_the_hook_alone_and_a_newer_one_by_none(tmp_path, newer):
    path = fl.save(toy(w=1.0), tmp_path / "step-00000000")
    manifest = {**files.read_manifest(path), "format_version": 99}
    check = files.checksum_of_manifest(manifest)
    text = json.dumps({**manifest, "check": check}) if newer else "{}"
    (path / "manifest.json").write_text(text)
    refused = pytest.raises(fl.CheckpointError, match="it contains another manifest")
    with refused:
        fl.save(toy(w=2.0), path)
    with refused if newer else contextlib.nullcontext():
        fl.checkpoint(tmp_path)(toy(w=2.0))
    assert newer or w_of(path) == 2.0


@pytest.mark.parametrize("folder", [".history", ".records"])
def test_user_folders_next_to_the_checkpoints_are_not_touched(tmp_path, folder):
    left = ".b.writing-0123456789ab"  # of another checkpoint
    for name in (folder, "bert", ".fin.writing-2024", ".fin.removing", ".step-00000001.removing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train_2024.py").write_text("mine")
        (tmp_path / name / "model.safetensors").write_text("mine")
    (tmp_path / left).mkdir()
    fl.save(toy(), tmp_path / "fin")
    assert left in names(tmp_path)
    assert fl.restore(fl.latest(tmp_path), toy()).step == 0
    train(tmp_path, fl.restore(tmp_path / "fin", toy()), 2, keep=1)
    assert len([*tmp_path.glob("*/train_2024.py")]) == 5
    assert "step-00000002" in names(tmp_path) and "step-00000001" not in names(tmp_path)


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


def test_leftovers_of_a_killed_prune_and_save_are_removed_when_a_run_begins(tmp_path):
    train(tmp_path, toy(), 2, keep=2)
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.removing")
    (tmp_path / ".step-00000009.writing-0123456789ab").mkdir()
    (tmp_path / ".step-00000009.writing-0123456789ab" / "model.safetensors").write_bytes(b"half")
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
    assert names(tmp_path) == ["a"] and w_of(path) == 2.0


def test_a_kill_while_the_old_one_is_removed_does_not_block_a_save(tmp_path, monkeypatch):
    """Whichever file is removed first: here it is the manifest."""
    path = fl.save(toy(w=1.0), tmp_path / "a")

    def cut(folder, **settings):
        if (folder / "manifest.json").exists():
            (folder / "manifest.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", cut)
        fl.save(toy(w=2.0), path)
    assert len(names(tmp_path)) == 2 and w_of(path) == 2.0
    fl.save(toy(w=3.0), path)
    assert names(tmp_path) == ["a"] and fl.latest(tmp_path) == path


def test_leftovers_that_cannot_be_read_do_not_block_a_save(tmp_path, monkeypatch):
    def unreadable(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    (tmp_path / ".a.removing").mkdir()
    monkeypatch.setattr(files, "has_only_our_files", unreadable)
    assert w_of(fl.save(toy(w=2.0), tmp_path / "a")) == 2.0


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


@pytest.fixture
def flushed(monkeypatch):
    """The files and folders that were flushed, by their numbers, and what was renamed."""
    events, fsync = [], os.fsync

    def flush(descriptor):
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def noting(rename):
        return lambda a, b: (rename(a, b), events.append(f"{Path(b).name} was renamed"))[0]

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    return events


@pytest.mark.parametrize("replaced", [False, True])
def test_a_checkpoint_is_flushed_before_it_is_renamed(tmp_path, flushed, replaced):
    """A power failure keeps only flushed data. The parent folder is flushed last."""
    path = tmp_path / "a"
    if replaced:
        fl.save(toy(w=1.0), path)
        flushed.clear()
    fl.save(toy(w=2.0), path)
    renamed = flushed.index("a was renamed")
    assert {item.stat().st_ino for item in (path, *path.iterdir())} <= {*flushed[:renamed]}
    assert tmp_path.stat().st_ino in flushed[renamed:]


WRITES = {"save": lambda folder: fl.save(toy(), folder / "last")}
CLAIMS = {
    ".run": lambda folder: fl.checkpoint(folder).begin(toy()),
    ".a.csv.run": lambda folder: fl.to_csv(folder / "a.csv").begin(toy()),
}


@pytest.mark.parametrize("write", [*WRITES.values(), *CLAIMS.values()])
def test_the_names_of_new_folders_are_flushed(tmp_path, flushed, write):
    """A power failure may otherwise take the run with its folder."""
    write(folder := tmp_path / "runs" / "a")
    files = [path for path in folder.iterdir() if path.is_file()]
    there = {path.stat().st_ino for path in (tmp_path, tmp_path / "runs", folder, *files)}
    assert there <= {*flushed}


@pytest.mark.parametrize(("name", "claim"), CLAIMS.items())
def test_the_identity_of_a_run_is_flushed_before_it_has_its_name(tmp_path, flushed, name, claim):
    """A power failure leaves no empty file."""
    claim(tmp_path)
    renamed = flushed.index(f"{name} was renamed")
    assert (tmp_path / name).stat().st_ino in flushed[:renamed]
    assert tmp_path.stat().st_ino in flushed[renamed:]


# --- a full disk is an error, and the previous checkpoint stays


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("call", ["save_file", pytest.param("fsync", marks=pytest.mark.slow)])
def test_any_failed_write_is_raised(call, background, tmp_path, monkeypatch):
    problem = stochastic()
    whole, every, last = toy_fit(problem, problem.state()), 5, 14
    saves = [*range(every, last, every), last]

    def run(n):
        """Train while the n-th call fails; return the folder, the error, the number of calls."""
        folder, calls, state = tmp_path / str(n), [], problem.state()
        fl.checkpoint(folder).begin(state)  # claims it, which is not counted

        def failing(*args, **kwargs):
            calls.append(args)
            if len(calls) == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        hook = fl.every(steps=every)(fl.checkpoint(folder, keep=10, background=background))
        place = files if call == "save_file" else files.os
        original = getattr(place, call)
        with monkeypatch.context() as patch:
            patch.setattr(place, call, failing)
            try:
                assert_same(toy_fit(problem, state, hooks=(hook,)), whole)
            except OSError as error:
                return folder, error, len(calls)
            return folder, None, len(calls)

    folder, error, calls = run(0)
    assert error is None and saved_steps(folder) == saves
    each, rest = divmod(calls, len(saves))
    assert rest == 0
    for n in range(1, calls + 1):
        folder, error, _ = run(n)
        place, within = divmod(n - 1, each)
        there = saves[: place + (call == "fsync" and within == each - 1)]
        assert error is not None and error.errno == errno.ENOSPC
        assert call == "fsync" or ".safetensors'" in str(error)  # its file is named
        # No earlier one is missing, and no partial one there. The claim stays until the first save.
        assert {*names(folder)} - {".run"} == {f"step-{step:08d}" for step in there}
        newest = fl.latest(folder)
        assert (newest and newest.name) == (f"step-{there[-1]:08d}" if there else None)

        # In the background: at the first boundary after the writer failed
        surfaces = error.state.step
        assert saves[place] <= surfaces <= saves[min(place + background, len(saves) - 1)]
        where = r"while in (the end of the run|every\(steps=5\)\(checkpoint\()"
        assert any(re.match(rf"{where}.*step {surfaces}", text) for text in error.__notes__)
        assert_same(toy_fit(problem, error.state), whole)
        assert_same(toy_fit(problem, fl.resume(folder, problem.state())), whole)


@pytest.mark.parametrize("limit", [0, 1, 100, 500, 1000, 1400, 1800, 2200, 2600, 10_000])
def test_a_full_disk_raises_oserror_and_the_previous_checkpoint_stays(limit, tmp_path):
    problem = stochastic()
    first, second = (toy_fit(problem, problem.state(), steps=n) for n in (1, 3))
    path = fl.save(first, tmp_path / "a")
    assert max(file.stat().st_size for file in path.iterdir()) > limit
    with pytest.raises(OSError), no_file_longer_than(limit):
        fl.save(second, path)
    assert names(tmp_path) == ["a"]
    assert_same(fl.restore(path, problem.state()), first)
    fl.save(second, path)
    assert_same(fl.restore(path, problem.state()), second)


@contextlib.contextmanager
def no_file_longer_than(limit):
    resource = pytest.importorskip("resource", reason="this system has no limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- threads


@pytest.mark.parametrize("fault", [RuntimeError("can't start new thread"), MemoryError(), None])
def test_a_save_needs_no_further_thread(tmp_path, monkeypatch, fault):
    """It cannot be had, or it never begins, because there is no memory for it."""

    def start(*arguments):
        if fault is not None:
            raise fault

    monkeypatch.setattr(_thread, "start_new_thread", start)
    assert fl.restore(fl.save(toy(w=3.0), tmp_path / "a"), toy()).model.w.item() == 3.0


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_items_are_shared_with_helpers_in_order(helpers):
    assert files.disk.map_with_help(lambda x: x * 2, range(50), helpers) == [*range(0, 100, 2)]
    assert files.disk.map_with_help(lambda x: x, (), helpers) == []
    begun = []

    def fail(item):
        begun.append(item)
        if item == 3:
            raise KeyError(item)

    with pytest.raises(KeyError):
        files.disk.map_with_help(fail, range(1000), helpers)
    assert 4 <= len(begun) < 1000


def test_an_error_is_raised_when_no_helper_works_any_more():
    both, ended = threading.Barrier(2), []

    def do(item):
        both.wait(10)
        if item == 0:
            raise KeyError(item)
        time.sleep(0.1)
        ended.append(item)

    with pytest.raises(KeyError):
        files.disk.map_with_help(do, (0, 1), helpers=1)
    assert ended == [1]
