"""A damaged checkpoint is refused by restore and skipped by latest and resume."""

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from crafted import craft
from killed_run import toy_fit
from saved import contents_of, names

import fnloop as fl
from fnloop._extensions.checkpoints import files, format
from fnloop.testing import Toy, assert_same, stochastic, toy, toy_loss

skipped = lambda: pytest.warns(UserWarning, match="skipped a damaged checkpoint")
FILES = (*format.FILES, "manifest.json")
KINDS = {
    "flipped": lambda name, mine, other: flips(name, mine[name]),
    "cut": lambda name, mine, other: (
        (f"to {n} bytes", {name: mine[name][:n]}) for n in spread(len(mine[name]), 16)),
    "longer": lambda name, mine, other: (
        (repr(more), {name: mine[name] + more}) for more in (b"\0", b"}", b" {}", bytes(4096))),
    "removed": lambda name, mine, other: [("removed", {name: None})],
    "emptied": lambda name, mine, other: [("emptied", {name: b""})],
    "zeros": lambda name, mine, other: [("zeros", {name: bytes(len(mine[name]))})],
    "a folder": lambda name, mine, other: [("a folder", {name: Path})],
    "overwritten": lambda name, mine, other: (
        (f"with {o}", {name: mine[o]}) for o in mine if o != name),
    "exchanged": lambda name, mine, other: (
        (f"and {o}", {name: mine[o], o: mine[name]}) for o in mine if o != name),
    "of another": lambda name, mine, other: [("of another", {name: other[name]})],
}  # fmt: skip
LONG_CASES = {(kind, name) for kind in KINDS for name in FILES if name != "state.json"}
LONG_CASES.add(("flipped", "state.json"))


def flips(name, data):
    """Yield the data with one bit flipped: at evenly spaced places, and at random ones."""
    rng = random.Random(name)
    all_over = spread(len(data), 120 if name == "manifest.json" else 40)
    for position in (*all_over, *(rng.randrange(len(data)) for _ in range(20))):
        bit = rng.randrange(8)
        flipped = data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]
        yield f"bit {bit} of byte {position}", {name: flipped}


def spread(n, count):
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
            if (path / name).is_dir():
                (path / name).rmdir()
            (path / name).unlink(missing_ok=True)
            (path / name).write_bytes(files[name])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with two checkpoints of a run, their paths, contents and states."""
    problem, folder, states = stochastic(), tmp_path_factory.mktemp("shelf"), []
    copy = lambda state: states.append(fl.snapshot(state)) or state
    copies = fl.when(lambda state: state.step in (9, 12))(copy)
    saves = fl.every(steps=3)(fl.checkpoint(folder, keep=2))
    toy_fit(problem, problem.state(), steps=12, hooks=(copies, saves))
    older, newer = sorted(folder.iterdir())
    contents = [{name: (path / name).read_bytes() for name in FILES} for path in (older, newer)]
    assert names(folder) == ["step-00000009", "step-00000012"]
    assert all(names(path) == sorted(FILES) for path in (older, newer))
    assert all(contents[0][name] != contents[1][name] for name in FILES)
    return folder, (older, newer), contents, states


@pytest.fixture(scope="module")
def given():
    problem = stochastic()
    state = toy_fit(problem, problem.state(seed=5), steps=2)
    return state, toy_fit(problem, fl.snapshot(state), steps=3)


def cases(kind, name, shelf):
    _, _, (other, mine), _ = shelf
    return KINDS[kind](name, mine, other)


def test_there_are_hundreds_of_kinds_of_damage(shelf):
    numbers = {name: sum(len(list(cases(kind, name, shelf))) for kind in KINDS) for name in FILES}
    assert sum(numbers.values()) >= 500 and min(numbers.values()) >= 90, numbers


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_and_the_state_is_unchanged(kind, name, shelf, given):
    _, (_, newer), (_, files), _ = shelf
    before, after = given
    state = fl.snapshot(before)
    for case, changes in cases(kind, name, shelf):
        with damaged(newer, files, changes), pytest.raises(fl.CheckpointError) as caught:
            fl.restore(newer, state)
        check_named(caught.value, newer, kind, name, case, changes)
        assert_same(state, before)
    assert_same(toy_fit(stochastic(), state, steps=3), after)


@pytest.mark.parametrize(("kind", "name"), [
    # The refusals above try every kind of damage to every file.
    pytest.param(*case, marks=[pytest.mark.long] if case in LONG_CASES else [])
    for case in itertools.product(KINDS, FILES)
])  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_says_why(kind, name, shelf, given):
    folder, (older, newer), (_, files), (right, _) = shelf
    for case, changes in cases(kind, name, shelf):
        with damaged(newer, files, changes), skipped() as caught:
            assert fl.latest(folder) == older
            assert_same(fl.resume(folder, fl.snapshot(given[0])), right)
        assert len(caught) >= 2
        for warning in caught:
            check_named(warning.message, newer, kind, name, case, changes)


def check_named(message, path, kind, name, case, changes):
    """Assert that a file is named: a changed one, or any if the manifest is a foreign one."""
    faults = FILES if (kind, name) == ("of another", "manifest.json") else changes
    words = [word.rpartition("/")[2].rstrip(":.,") for word in str(message).split()]
    assert str(path) in str(message), f"{case}: {message}"
    assert {*faults} & {*words}, f"{case}: {message} names no file of {list(changes)}"


DAMAGES = {
    "a bit of model.safetensors": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "the end of optimizer.safetensors": lambda data: data[:-100],
    "state.json": None,
    "a bit of manifest.json": lambda data: data[:80] + b"x" + data[81:],
    "manifest.json": None,
}
damages = pytest.mark.parametrize("damage", DAMAGES)


def damaged_copy(shelf, folder, damage):
    folder = Path(shutil.copytree(shelf[0], folder))
    file = folder / "step-00000012" / damage.rpartition(" ")[2]
    data = file.read_bytes()
    file.unlink()
    if change := DAMAGES[damage]:
        file.write_bytes(change(data))
    return folder


@damages
def test_a_run_resumes_from_the_one_before_and_replaces_the_damaged_one(damage, shelf, tmp_path):
    problem, folder, right = stochastic(), damaged_copy(shelf, tmp_path / "a", damage), shelf[3][1]
    hooks = (fl.every(steps=3)(fl.checkpoint(folder, keep=2)),)
    with skipped():
        state = fl.resume(folder, problem.state())
    state = toy_fit(problem, state, steps=12, hooks=hooks)
    assert fl.latest(folder) == folder / "step-00000012"
    assert_same(fl.resume(folder, problem.state()), right)
    assert_same(toy_fit(problem, state, hooks=hooks), toy_fit(problem, fl.snapshot(right)))


@damages
def test_if_all_are_damaged_resume_raises_and_a_new_run_is_refused(damage, shelf, tmp_path):
    problem, folder = stochastic(), damaged_copy(shelf, tmp_path / "a", damage)
    shutil.rmtree(folder / "step-00000009")
    shutil.copytree(folder / "step-00000012", folder / "step-00000009")
    state, before = problem.state(), contents_of(folder)
    message = r"has 2 checkpoints, and none is valid: .*step-00000012[ /].*another"
    with skipped(), pytest.raises(fl.CheckpointError, match=message):
        fl.resume(folder, state)
    with pytest.raises(fl.CheckpointError, match=r"of another run|that cannot be read"):
        toy_fit(problem, state, steps=3, hooks=(fl.every(steps=3)(fl.checkpoint(folder, keep=1)),))
    assert contents_of(folder) == before


@pytest.mark.parametrize(("place", "read"), [(hashlib, "file_digest"), (Path, "read_bytes")])
def test_an_unreadable_file_is_an_error_and_not_damage(shelf, given, monkeypatch, place, read):
    folder, (_, newer), _, _ = shelf
    original = getattr(place, read)

    def unreadable(file, *rest):
        path = file if place is Path else file.name
        if str(newer) in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return original(file, *rest)

    monkeypatch.setattr(place, read, unreadable)
    if place is hashlib:  # it takes the checksums of large files
        monkeypatch.setattr(files, "MOST_KEPT", 0)
    state = fl.snapshot(given[0])
    for call, *arguments in (
        (fl.restore, newer, state), (fl.resume, folder, state), (fl.latest, folder),
        (fl.best, folder, "valid/loss"),
    ):  # fmt: skip
        with pytest.raises(OSError, match="Input/output error"):
            call(*arguments)
    assert_same(state, given[0])


NUMBERS = ("EIO", "EMFILE", "EACCES", "ESTALE", "ENOENT")


@contextlib.contextmanager
def failing_after_its_checksum(file, number):
    """Let the second opening of a file fail: the first one is for its checksum."""
    opened, original = [], Path.open

    def open_once(path, *args, **kwargs):
        if path == file:
            opened.append(path)
            if len(opened) > 1:
                raise OSError(number, os.strerror(number), str(path))
        return original(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_once)
        yield


@pytest.mark.parametrize("name", NUMBERS)
def test_a_file_that_cannot_be_read_again_is_an_error_and_not_damage(
    shelf, given, name, monkeypatch
):
    """A run must not go back to an older checkpoint because of it. Small files are read once."""
    monkeypatch.setattr(files, "MOST_KEPT", 0)
    folder, (_, newer), _, (_, right) = shelf
    for file in newer.glob("*.safetensors"):
        for read, path in ((fl.restore, newer), (fl.resume, folder)):
            state = fl.snapshot(given[0])
            number = getattr(errno, name)
            with failing_after_its_checksum(file, number), pytest.raises(OSError) as caught:
                read(path, state)
            assert (caught.value.errno, caught.value.filename) == (number, str(file))
            assert_same(state, given[0])
    assert_same(fl.resume(folder, fl.snapshot(given[0])), right)


NO_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("said", "expected"), [(NO_MEMORY, MemoryError), ("a mistake of fnloop", RuntimeError)]
)
@pytest.mark.parametrize("call", [1, 2, 9])
def test_no_memory_is_not_damage(shelf, given, said, expected, call, monkeypatch):
    folder, (_, newer), _, _ = shelf
    place, name = (torch, "empty") if expected is MemoryError else (format, "_empty")
    calls, original = [], getattr(place, name)

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) >= call:
            raise RuntimeError(said)
        return original(*args, **kwargs)

    for read, path in ((fl.restore, newer), (fl.resume, folder)):
        state = fl.snapshot(given[0])
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises(expected) as caught:
            patch.setattr(place, name, fail)
            read(path, state)
        assert type(caught.value) is expected
        assert_same(state, given[0])


# --- crafted contents, with right checksums

VALUES = (None, [], {}, "x", float("inf"), -1, True)
READERS = {
    "latest": lambda folder, path, state: fl.latest(folder),
    "best": lambda folder, path, state: fl.best(folder),
    "resume": lambda folder, path, state: fl.resume(folder, state),
    "restore": lambda folder, path, state: fl.restore(path, state),
    "diff": lambda folder, path, state: fl.debug.diff(path, path),
}
crafted_step = fl.pipeline(fl.metric(one=lambda aux, batch: batch.mean()), fl.ema(0.5))(toy_loss)


def new_for_crafting(kind, seed=0):
    model = Toy()
    if kind == "several":
        optimizer = {"a": torch.optim.SGD([model.w], lr=0.1, momentum=0.9)}
    else:
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    return fl.TrainState.create(model, optimizer, seed=seed)


def train_for_crafting(state, **settings):
    loaders = {"train": [torch.ones(1)] * 3, "valid": [torch.ones(1)]}
    return fl.fit(crafted_step, state, loaders, record_every=fl.every(steps=1), **settings)


def places(value, path=()):
    """Yield where the values of JSON are. Of a list, the first two are enough."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else ()
    for key, inner in [*enumerate(value[:2])] if isinstance(value, list) else inside:
        yield from places(inner, (*path, key))


def put(tree, path, value):
    *first, last = path
    for key in first:
        tree = tree[key]
    tree[last] = value


@pytest.mark.parametrize(("kind", "which"), [
    pytest.param("AdamW", [0], marks=pytest.mark.slow),
    pytest.param("AdamW", [1, 3], marks=pytest.mark.long),
    pytest.param("several", [2, 5], marks=pytest.mark.long),
])  # fmt: skip
def test_any_value_of_json_may_be_crafted(kind, which, tmp_path):
    """A reader works, or raises CheckpointError. It never changes the state, or hides another."""
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2, best="train/loss", keep_best=2)),)
    state = train_for_crafting(new_for_crafting(kind), epochs=1, hooks=hooks, phase="head")
    state = train_for_crafting(state, steps=2, hooks=hooks, phase="all")
    *_, path = sorted(p for p in tmp_path.iterdir() if p.name.startswith("step"))
    files = {file: file.read_bytes() for file in path.iterdir()}
    state = new_for_crafting(kind, seed=1)
    before, tried = fl.snapshot(state), 0
    for name in ("state", "manifest"):
        tree = json.loads(files[path / f"{name}.json"])
        for i, place in enumerate(places(tree)):
            if place == ("check",):
                continue
            for value in (VALUES[(i + n) % len(VALUES)] for n in which):
                change = functools.partial(put, path=place, value=value)
                craft(path, **{"facts" if name == "state" else "manifest": change})
                check_readers(tmp_path, path, state, before, f"{name} {place} {value!r}")
                tried += 1
                for file, content in files.items():
                    file.write_bytes(content)
    assert tried > 100 and fl.latest(tmp_path) == path
    assert_same(fl.restore(path, state), fl.restore(path, before))


def check_readers(folder, path, state, before, what):
    for name, read in READERS.items():
        given = fl.snapshot(before) if name in ("resume", "restore") else state
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = read(folder, path, given)
        except fl.CheckpointError:
            assert name not in ("latest", "best"), f"{name} of {what}"
            assert_same(given, before)
        except Exception as error:
            raise AssertionError(f"{name} of {what}: {type(error).__name__}: {error}") from error
        else:
            if name in ("latest", "best"):
                # No checkpoint has the metric that a crafted one says to rank by.
                assert found is not None or "('best',)" in what, f"{name} of {what}"
            elif name == "restore" and what.startswith("state ('optimizer', 'state'"):
                train_for_crafting(found, steps=found.step - 3 + 1, hooks=(), phase="all")


def test_a_restored_state_does_not_depend_on_its_files(shelf, tmp_path):
    _, (_, newer), _, (_, right) = shelf
    path = Path(shutil.copytree(newer, tmp_path / "a"))
    state = fl.restore(path, stochastic().state())
    for name in FILES:
        # In place: truncating a mapped file would end the process
        with (path / name).open("r+b") as file:
            file.write(bytes((path / name).stat().st_size))
    assert_same(state, right)


# --- crafted: the checksums are right


CRAFTED = {
    "the mark of a schedule": ("optimizer", "param_groups", 0, "set_by_schedule_lr"),
    "an initial value": ("optimizer", "param_groups", 0, "set_by_schedule_initial_lr"),
    "the first record of restore_best": ("slots", "restore_best(valid/loss)", "first"),
    "the value of restore_best": ("slots", "restore_best(valid/loss)", "value"),
    "all of restore_best": ("slots", "restore_best(valid/loss)"),
    "the time that was taken": ("slots", "time_limit", 0),
    "all of time_limit": ("slots", "time_limit"),
    "a number of a guard": ("slots", "skip_nonfinite", "parts", "skipped"),
    "the parts of a guard": ("slots", "skip_nonfinite", "parts"),
    "the kind of a guard": ("slots", "skip_nonfinite", "$saved"),
    "a tensor of a guard": ("slots", "spike_guard", "parts", "recent"),
    "the batch": ("batch",),
    "the seed": ("seed",),
}


def crafted_run(folder, state, epochs):
    members = fl.schedule(lambda i, n: 0.5), fl.skip_nonfinite(3), fl.spike_guard(4)
    saves = fl.every(epochs=1)(fl.checkpoint(folder))
    hooks = fl.restore_best("valid/loss"), fl.time_limit(hours=9), saves
    one = torch.ones(1)
    loaders = {"train": [one] * 2, "valid": [one]}
    return fl.fit(fl.pipeline(*members)(toy_loss), state, loaders, epochs=epochs, hooks=hooks)


@pytest.mark.parametrize("value", ["crafted", [1, "a"]])
@pytest.mark.parametrize("what", CRAFTED)
def test_what_is_crafted_is_an_error_in_words_before_an_update(tmp_path, what, value):
    crafted_run(tmp_path, toy(), 2)
    *above, last = CRAFTED[what]

    def put(facts):
        for key in above:
            facts = facts[key]
        assert facts[last] != value  # and it is there
        facts[last] = 10**15 if last == "batch" else value

    craft(tmp_path / "step-00000004", facts=put)
    state = toy()
    with pytest.raises((fl.CheckpointError, ValueError)):  # and not a TypeError, for example
        state = fl.resume(tmp_path, state)
        crafted_run(tmp_path, state, 3)
    assert (state.step, state.model.w.item()) in ((0, 0.0), (4, -2.0))


def test_what_is_nested_too_deeply_is_an_error_in_words(tmp_path):
    crafted_run(tmp_path, toy(), 1)
    deep = functools.reduce(lambda inner, _: [inner], range(900), 1)
    craft(tmp_path / "step-00000002", facts=lambda facts: facts["extra"].update(mine=deep))
    found = []
    # How deep Python can read depends on its version: a RecursionError is what must not come.
    with contextlib.suppress(fl.CheckpointError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fl.resume(tmp_path, toy()).extra["mine"]
    assert found in ([], deep)
