"""A damaged checkpoint is refused by restore and skipped by latest and resume."""

import contextlib
import errno
import hashlib
import itertools
import os
import random
import shutil
from pathlib import Path

import pytest
from killed_run import toy_fit

import fnloop as fl
from fnloop._checkpoint import format
from fnloop.testing import assert_same, stochastic


def names_in(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


FILES = (*format.FILES, "manifest.json")
KINDS = {
    "flipped": lambda name, mine, other: flips(name, mine[name]),
    "cut": lambda name, mine, other: (
        (f"to {n} bytes", {name: mine[name][:n]}) for n in spread(len(mine[name]), 24)
    ),
    "longer": lambda name, mine, other: (
        (repr(more), {name: mine[name] + more}) for more in (b"\0", b"}", b" {}", bytes(4096))
    ),
    "removed": lambda name, mine, other: [("removed", {name: None})],
    "emptied": lambda name, mine, other: [("emptied", {name: b""})],
    "zeros": lambda name, mine, other: [("zeros", {name: bytes(len(mine[name]))})],
    "a folder": lambda name, mine, other: [("a folder", {name: Path})],
    "overwritten": lambda name, mine, other: (
        (f"with {o}", {name: mine[o]}) for o in mine if o != name
    ),
    "exchanged": lambda name, mine, other: (
        (f"and {o}", {name: mine[o], o: mine[name]}) for o in mine if o != name
    ),
    "of another": lambda name, mine, other: [("of another", {name: other[name]})],
}


SLOW_CASES = {(kind, name) for kind in KINDS for name in FILES if name != "state.json"}
SLOW_CASES.add(("flipped", "state.json"))


def flips(name, data):
    """Yield the data with one bit flipped: at evenly spaced places, and at random ones."""
    rng = random.Random(name)
    all_over = spread(len(data), 250 if name == "manifest.json" else 60)
    for position in (*all_over, *(rng.randrange(len(data)) for _ in range(40))):
        bit = rng.randrange(8)
        flipped = data[position] ^ (1 << bit)
        yield (
            f"bit {bit} of byte {position}",
            {name: data[:position] + bytes([flipped]) + data[position + 1 :]},
        )


def spread(n, count):
    """Return evenly spaced numbers below n, with the first and the last."""
    return sorted({round(i * (n - 1) / (count - 1)) for i in range(count)})


@contextlib.contextmanager
def damaged(path, files, changes):
    """Change files of a checkpoint temporarily; None removes one, Path replaces one by a folder."""
    try:
        for name, content in changes.items():
            (path / name).unlink()
            if content is Path:
                (path / name).mkdir()
            elif content is not None:
                (path / name).write_bytes(content)
        yield
    finally:
        for name in changes:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                (path / name).unlink()
            if (path / name).is_dir():
                (path / name).rmdir()
            (path / name).write_bytes(files[name])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with two checkpoints of a run, their paths, contents and states."""
    problem, folder, states = stochastic(), tmp_path_factory.mktemp("shelf"), []
    copies = fl.when(lambda state: state.step in (9, 12))(
        lambda state: states.append(fl.snapshot(state)) or state
    )
    toy_fit(
        problem,
        problem.state(),
        steps=12,
        hooks=(copies, fl.every(steps=3)(fl.checkpoint(folder, keep=2))),
    )
    older, newer = sorted(folder.iterdir())
    contents = [{name: (path / name).read_bytes() for name in FILES} for path in (older, newer)]
    assert [path.name for path in (older, newer)] == ["step-00000009", "step-00000012"]
    assert all(names_in(path) == set(FILES) for path in (older, newer))
    assert all(contents[0][name] != contents[1][name] for name in FILES)
    return folder, (older, newer), contents, states


@pytest.fixture(scope="module")
def given():
    """A state to restore into, and the same state after one more update."""
    problem = stochastic()
    state = toy_fit(problem, problem.state(seed=5), steps=2)
    return state, toy_fit(problem, fl.snapshot(state), steps=3)


def cases(kind, name, shelf):
    _, _, (other, mine), _ = shelf
    return KINDS[kind](name, mine, other)


def test_there_are_hundreds_of_kinds_of_damage(shelf):
    numbers = {name: sum(len(list(cases(kind, name, shelf))) for kind in KINDS) for name in FILES}
    print(f"{sum(numbers.values())} damages: {numbers}")
    assert sum(numbers.values()) >= 800 and min(numbers.values()) >= 100


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_and_the_state_is_unchanged(kind, name, shelf, given):
    _, (_, newer), (_, files), _ = shelf
    before, after = given
    state = fl.snapshot(before)
    for case, changes in cases(kind, name, shelf):
        with damaged(newer, files, changes), pytest.raises(fl.CheckpointError) as caught:
            fl.restore(newer, state)
        assert faults(kind, name, changes) & set(words_of(caught.value)), (
            f"{case}: {caught.value} names no file of {changes}"
        )
        assert str(newer) in str(caught.value)
        assert_same(state, before)
    assert_same(toy_fit(stochastic(), state, steps=3), after)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        # The refusals above try every kind of damage to every file.
        pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW_CASES else [])
        for case in itertools.product(KINDS, FILES)
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_says_why(kind, name, shelf, given):
    folder, (older, newer), (_, files), (right, _) = shelf
    for case, changes in cases(kind, name, shelf):
        with damaged(newer, files, changes):
            with pytest.warns(UserWarning, match="skipped a damaged checkpoint") as caught:
                assert fl.latest(folder) == older
            with pytest.warns(UserWarning, match="skipped a damaged checkpoint") as again:
                state = fl.resume(folder, fl.snapshot(given[0]))
        assert_same(state, right)
        for warning in (*caught, *again):
            text = str(warning.message)
            assert str(newer) in text, f"{case}: {text}"
            assert faults(kind, name, changes) & set(words_of(text)), (
                f"{case}: {text} names no file of {list(changes)}"
            )


def faults(kind, name, changes):
    """Return the files that may be named: changed ones, or all if the manifest is a foreign one."""
    return set(FILES) if (kind, name) == ("of another", "manifest.json") else set(changes)


def words_of(text):
    return [word.rpartition("/")[2].rstrip(":.,") for word in str(text).split()]


DAMAGES = {
    "a bit of model.safetensors": lambda path: rewrite(
        path / "model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])
    ),
    "the end of optimizer.safetensors": lambda path: rewrite(
        path / "optimizer.safetensors", lambda data: data[:-100]
    ),
    "state.json": lambda path: (path / "state.json").unlink(),
    "a bit of manifest.json": lambda path: rewrite(
        path / "manifest.json", lambda data: data[:80] + b"x" + data[81:]
    ),
    "manifest.json": lambda path: (path / "manifest.json").unlink(),
}


def rewrite(file, change):
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(change(data))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_resumes_from_the_previous_checkpoint_and_replaces_the_damaged_one(
    damage, shelf, tmp_path
):
    problem, folder = stochastic(), Path(shutil.copytree(shelf[0], tmp_path / "a"))
    DAMAGES[damage](folder / "step-00000012")
    hooks = (fl.every(steps=3)(fl.checkpoint(folder, keep=2)),)
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        state = fl.resume(folder, problem.state())
    state = toy_fit(problem, state, steps=12, hooks=hooks)
    assert fl.latest(folder) == folder / "step-00000012"
    assert_same(fl.resume(folder, problem.state()), shelf[3][1])
    assert_same(toy_fit(problem, state, hooks=hooks), toy_fit(problem, fl.snapshot(shelf[3][1])))


@pytest.mark.parametrize("damage", DAMAGES)
def test_if_all_are_damaged_resume_raises_and_a_new_run_is_refused(damage, shelf, tmp_path):
    problem, folder = stochastic(), Path(shutil.copytree(shelf[0], tmp_path / "a"))
    shutil.rmtree(folder / "step-00000009")
    DAMAGES[damage](folder / "step-00000012")
    state, before = (
        problem.state(),
        {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()},
    )
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(fl.CheckpointError, match="1 checkpoint, and none is"),
    ):
        fl.resume(folder, state)
    with pytest.raises(fl.CheckpointError, match=r"of another run|that cannot be read"):
        toy_fit(problem, state, steps=3, hooks=(fl.every(steps=3)(fl.checkpoint(folder, keep=1)),))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_unreadable_file_is_an_error_and_not_damage(shelf, given, monkeypatch):
    folder, (_, newer), _, _ = shelf
    original = hashlib.file_digest

    def unreadable(file, name):
        if str(newer) in str(file.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), file.name)
        return original(file, name)

    monkeypatch.setattr(hashlib, "file_digest", unreadable)
    state = fl.snapshot(given[0])
    for call in (
        lambda: fl.restore(newer, state),
        lambda: fl.latest(folder),
        lambda: fl.resume(folder, state),
    ):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    assert_same(state, given[0])


def test_a_restored_state_does_not_depend_on_its_files(shelf, tmp_path):
    _, (_, newer), _, (_, right) = shelf
    path = Path(shutil.copytree(newer, tmp_path / "a"))
    state = fl.restore(path, stochastic().state())
    for name in FILES:
        # In place: truncating a mapped file would end the process
        with (path / name).open("r+b") as file:
            file.write(bytes((path / name).stat().st_size))
    assert_same(state, right)
