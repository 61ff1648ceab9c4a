"""A disk that does not answer is an error: nothing is taken for absent because of it."""

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from saved import ONE, contents_of, names, saved_steps, step, train

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.testing import toy

stat = os.stat
saves_each = lambda folder, **settings: fl.every(steps=1)(fl.checkpoint(folder, **settings))


@pytest.fixture
def fails(monkeypatch):
    """Return a function that lets the disk say nothing about paths that match a pattern."""

    def fail(name, pattern):
        def asked(path, *rest, **settings):
            if not isinstance(path, int) and re.search(pattern, os.fspath(path)):
                raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))
            return stat(path, *rest, **settings)

        monkeypatch.setattr(os, "stat", asked)

    yield fail
    monkeypatch.undo()


READERS = {
    "latest": fl.latest,
    "best": lambda folder: fl.best(folder, "train/loss"),
    "resume": lambda folder: fl.resume(folder, toy()),
    "fit": lambda folder: train(folder, toy(), 1),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", [
    "step-00000003/.", "step-00000003$", "step-0000000[123]/.", "step-00000003/manifest.json",
    "step-00000001/manifest.json", "/run$",
])  # fmt: skip
@pytest.mark.parametrize("name", ["EACCES", "EIO", "ESTALE", "ETIMEDOUT"])
def test_what_cannot_be_looked_at_is_an_error_and_not_absence(tmp_path, fails, reader, what, name):
    train(tmp_path / "run", toy(), 3, keep=None)
    before = contents_of(tmp_path)
    fails(name, what)
    with pytest.raises(OSError) as raised:
        READERS[reader](tmp_path / "run")
    assert raised.value.errno == getattr(errno, name)
    os.stat = stat
    assert contents_of(tmp_path) == before and fl.resume(tmp_path / "run", toy()).step == 3


def test_a_save_that_cannot_see_the_others_fails_and_removes_none(tmp_path, fails):
    """Without their numbers, what it wrote would seem older than they are."""
    state = train(tmp_path, toy(), 3, keep=9)
    lose = lambda state: (fails("ESTALE", "step-00000003/"), state)[1]
    hooks = fl.when(lambda state: state.step == 4)(lose), saves_each(tmp_path, keep=1)
    with pytest.raises(OSError) as raised:
        fl.fit(step, state, [ONE] * 9, steps=6, hooks=hooks)
    assert (raised.value.errno, raised.value.state.step) == (errno.ESTALE, 4)
    os.stat = stat
    assert saved_steps(tmp_path) == [1, 2, 3]


def test_the_folder_of_others_does_not_stop_a_save(tmp_path, fails):
    fl.save(toy(), tmp_path / "theirs")
    fails("EACCES", "theirs/")
    assert fl.save(toy(w=3.0), tmp_path / "mine").name == "mine"


# --- links


def link_to_itself(path):
    path.symlink_to(path)


LINKS = {
    "a manifest that is a link to itself": (
        "manifest.json", lambda path: (path.unlink(), link_to_itself(path)),
    ),
    "a file that is a link to itself": (
        "model.safetensors", lambda path: (path.unlink(), link_to_itself(path)),
    ),
    "a link to itself": ("", lambda path: (shutil.rmtree(path), link_to_itself(path))),
    "a link to nothing": ("", lambda path: (shutil.rmtree(path), path.symlink_to("/no/such"))),
}  # fmt: skip


@pytest.mark.parametrize("what", LINKS)
def test_a_link_that_leads_nowhere_hides_no_neighbour(tmp_path, what):
    file, damage = LINKS[what]
    train(tmp_path, toy(), 3, keep=9)
    damage(tmp_path / "step-00000003" / file)
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: .*step-00000003"):
        assert fl.latest(tmp_path).name == "step-00000002"
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint: .*step-00000003"):
        assert fl.resume(tmp_path, toy()).step == 2


@pytest.mark.parametrize("target", ["../elsewhere", "step-00000002"])
def test_a_link_to_nothing_is_not_written_through(tmp_path, target):
    folder = tmp_path / "run"
    state = train(folder, toy(), 1)
    (link := folder / "step-00000002").symlink_to(target)
    message = "step-00000002 exists and is not a checkpoint: .*it is a link to nothing"
    with pytest.raises(fl.CheckpointError, match=message) as raised:
        train(folder, state, 3)
    assert raised.value.state.step == 2
    with pytest.raises(fl.CheckpointError, match=message):
        fl.save(toy(), link)
    assert names(tmp_path) == ["run"] and link.is_symlink()


# --- how often manifests are read


@pytest.mark.parametrize("settings", [
    {"keep": None}, {"keep": 5}, {"keep": 2, "best": "train/loss"},
    {"keep": None, "named": ("train/loss",)},
])  # fmt: skip
def test_each_save_reads_one_manifest(tmp_path, monkeypatch, settings):
    """It reads that of the save before, or its own, and those that are there once."""
    monkeypatch.setattr(files, "SAME_TIME", 0)  # as saves are seconds apart
    train(tmp_path, toy(), 30, keep=None)
    state, reads, counts, read = fl.resume(tmp_path, toy()), [], [], Path.read_bytes
    note = lambda path: (path.name == "manifest.json" and reads.append(path), read(path))[1]
    monkeypatch.setattr(Path, "read_bytes", note)
    count = lambda state: (counts.append(len(reads)), reads.clear(), state)[2]
    fl.fit(step, state, [ONE] * 100, steps=40, hooks=(saves_each(tmp_path, **settings), count))
    assert len(counts) == 10 and counts[0] <= 3 * 30 and counts[1:] == [1] * 9
