"""Checkpoints at an address: as on a disk, and whole whatever is cut."""

import contextlib
import errno
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import attrs
import pytest
import storage
import torch
from crafted import craft
from fsspec.implementations import local
from saved import ONE, names, stop_at, train
from torch import nn

import fnloop as fl
from fnloop._display.checks import is_address
from fnloop._extensions.checkpoints import files, remote
from fnloop.testing import assert_same, toy

RUN = "faulty://run"


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    """The storage, with a folder for local copies, and no pauses."""
    monkeypatch.setenv("FNLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "OBJECT_STORES", {*remote.OBJECT_STORES, "faulty"})
    made = storage.Storage(tmp_path / "cache")
    yield made
    made.works()


def another_machine(at):
    """Let the next process have no local copies."""
    shutil.rmtree(at.cache, ignore_errors=True)


def local_files(at):
    """The names of the tensors and states that are left in local copies of runs."""
    found = at.cache.glob("*/run-*/step-*/*")
    return [path for path in found if path.name != "manifest.json"]


# --- as on a disk

SETTINGS = {
    "keep": {"keep": 2},
    "best": {"keep": 1, "best": "train/loss"},
    "best-max": {"keep": 1, "best": "train/loss", "mode": "max", "keep_best": 2},
    "all": {"keep": None},
    "background": {"keep": 2, "background": True},
    "background-best": {"keep": 1, "best": "train/loss", "background": True},
    "partial": {"keep": 2, "only": ("model",)},
    "named": {"keep": 2, "named": ("train/loss",)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_address_keeps_what_a_disk_keeps_and_finds_the_same(name, tmp_path, at):
    settings, disk = SETTINGS[name], tmp_path / "disk"
    whole = [train(folder, toy(), 7, **settings) for folder in (disk, RUN)]
    assert_same(*whole)
    assert at.names() == names(disk)
    assert fl.latest(RUN).name == fl.latest(disk).name
    if "best" in settings:
        assert fl.best(RUN).name == fl.best(disk).name
        assert fl.best(RUN, "train/loss", "max").name == fl.best(disk, "train/loss", "max").name
    if "only" not in settings:
        resumed = [fl.resume(folder, toy()) for folder in (disk, RUN)]
        assert resumed[0].step == 7
        assert_same(*resumed)
        whole = [
            train(folder, state, 9, **settings)
            for folder, state in zip((disk, RUN), resumed, strict=True)
        ]
        assert at.names() == names(disk)
    assert not local_files(at)


def test_what_is_at_an_address_is_a_folder_that_a_disk_can_hold(tmp_path, at):
    state = train(RUN, toy(), 3)
    for path, data in at.files.items():
        file = tmp_path / path.strip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    assert_same(fl.resume(tmp_path / "run", toy()), state)


def test_one_checkpoint_is_saved_and_restored_by_its_address(at):
    state = toy(w=3.0)
    assert fl.save(state, "faulty://a/b/") == "faulty://a/b"
    assert fl.restore("faulty://a/b", toy()).model.w.item() == 3.0
    assert fl.resume("faulty://a/b", toy()).model.w.item() == 3.0
    fl.save(toy(w=4.0), "faulty://a/b")
    assert fl.restore("faulty://a/b", toy()).model.w.item() == 4.0
    assert fl.latest("faulty://a").name == "b"
    fl.save(toy(w=5.0), "faulty://a/c", only=("model",))
    assert fl.latest("faulty://a").name == "c"
    assert fl.restore("faulty://a/c", toy(), only=("model",)).model.w.item() == 5.0
    with pytest.raises(fl.CheckpointError, match=r"cannot be resumed: faulty://a/c"):
        fl.resume("faulty://a/c", toy())
    assert not [*at.cache.glob("*/*save-*")]


def test_nothing_is_there_yet(at):
    assert fl.latest(RUN) is None and fl.best(RUN) is None
    assert fl.resume(RUN, state := toy()) is state
    with pytest.raises(fl.CheckpointError, match="faulty://run is not a checkpoint"):
        fl.restore(RUN, toy())
    with pytest.raises(fl.CheckpointError, match=r"faulty://run is not a checkpoint.*see latest"):
        train(RUN, toy(), 1)
        fl.restore(RUN, toy())
    assert at.names() == ["step-00000001"]


def test_a_folder_belongs_to_one_run(at):
    train(RUN, toy(), 2)
    before = at.files
    with pytest.raises(
        fl.CheckpointError, match=r'faulty://run has .* another run.*resume\("faulty'
    ):
        train(RUN, state := toy(), 2)
    assert (state.step, at.files) == (0, before)


def test_a_run_that_is_killed_before_its_first_save_is_the_same_run(at):
    state = toy()
    with pytest.raises(storage.Cut):
        at.cut_at(2)
        train(RUN, state, 2)
    at.works()
    assert not at.names()
    assert fl.resume(RUN, toy()).run_id == state.run_id


def test_a_run_that_another_has_replaced_does_not_save(at):
    def begin_another(state):
        at.drop("/run/.checkpoints.json")
        train(RUN, toy(), 1)

    state = toy()
    hooks = fl.every(steps=1)(fl.checkpoint(RUN)), stop_at(9)
    other = fl.when(lambda state: state.step == 1)(lambda state: begin_another(state) or state)
    with pytest.raises(fl.CheckpointError, match="another run has begun in faulty://run"):
        fl.fit(fl.pipeline()(fl.testing.toy_loss), state, [ONE] * 9, hooks=(other, *hooks))


def test_a_long_history_is_uploaded_once_and_read_whole(at, monkeypatch):
    monkeypatch.setattr(files, "IN_BLOCK", 4)
    moment, loaders = fl.every(steps=1), ([ONE] * 100, [ONE])
    step = fl.pipeline()(fl.testing.toy_loss)

    def run(state, steps):
        hooks = (moment(fl.checkpoint(RUN, keep=2)),)
        return fl.fit(step, state, loaders, steps=steps, evaluate_every=moment, hooks=hooks)

    run(toy(), 10)
    sent = [path for request, path in at.requests if request == "send" and ".records" in path]
    assert len(sent) == len({*sent}) == 2
    another_machine(at)
    resumed = fl.resume(RUN, toy())
    assert [record.step for record in resumed.history] == [*range(1, 11)]
    run(resumed, 12)
    assert len([path for path in at.files if ".records" in path]) == 3


def test_what_others_have_there_is_not_touched(at):
    at.put("/run/notes.txt", b"mine")
    at.put("/run/step-00000001/notes.txt", b"mine")
    at.put("/a/b/data.bin", b"mine")
    with pytest.raises(
        fl.CheckpointError, match=r"faulty://run/step-00000001 exists and is not .*notes"
    ):
        train(RUN, toy(), 1)
    with pytest.raises(fl.CheckpointError, match=r"faulty://a/b exists and is not .*data.bin"):
        fl.save(toy(), "faulty://a/b")
    assert [data for path, data in at.files.items() if "json" not in path] == [b"mine"] * 3


# --- damage

DAMAGE = {
    "a file is missing": ("model.safetensors", None, "model.safetensors is missing"),
    "a file is cut": ("state.json", b"{", "state.json is missing|state.json has 1 bytes"),
    "a byte differs": ("model.safetensors", ..., "checksum of model.safetensors"),
    "the manifest is cut": ("manifest.json", b'{"a', "manifest.json is damaged"),
    "the manifest is empty": ("manifest.json", b"", "manifest.json is damaged"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(what, at):
    name, data, said = DAMAGE[what]
    train(RUN, toy(), 2)
    path = f"/run/step-00000002/{name}"
    if data is None:
        at.drop(path)
    else:
        at.put(path, at.files[path][:-1] + b"\1" if data is ... else data)
    for find in (lambda: fl.resume(RUN, toy()).step, lambda: int(fl.latest(RUN).name[-1])):
        another_machine(at)
        with pytest.warns(UserWarning, match=f"(?s)damaged.*faulty://run/step-00000002.*{said}"):
            assert find() == 1


def test_a_damaged_local_copy_is_downloaded_again(at):
    train(RUN, toy(), 2)
    copy = fl.latest(RUN)
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-1] + b"\1")
    with pytest.warns(UserWarning, match="skipped a damaged"):
        assert fl.latest(RUN).name == "step-00000001"
    assert fl.latest(RUN) == copy


@pytest.mark.parametrize("catalogue", [
    b"", b"[]", b"{", b'{"checkpoints": 3}', b'{"checkpoints": ["../../x", "", 4, ".", "a/b"]}',
    b'{"run": "../../x", "checkpoints": null}', b'{"run": 3}',
])  # fmt: skip
def test_a_list_of_names_that_says_nonsense_changes_nothing(at, catalogue):
    train(RUN, toy(), 2)
    at.put("/run/.checkpoints.json", catalogue)
    another_machine(at)
    assert fl.resume(RUN, toy()).step == 2


@pytest.mark.parametrize("find", [fl.latest, fl.best, lambda run: fl.resume(run, toy())])
def test_without_names_a_list_that_lags_is_not_taken_for_an_empty_folder(at, monkeypatch, find):
    at.lag()
    train(RUN, toy(), 2)
    monkeypatch.setattr(storage.FaultyStorage, "pseudo_dirs", [""])  # they do not lag
    at.put("/run/.checkpoints.json", b'{"run": "')
    another_machine(at)
    with pytest.raises(fl.CheckpointError, match=r"run/.checkpoints.json is damaged, and no check"):
        find(RUN)
    storage.FaultyStorage.listed = None
    assert fl.latest(RUN).name == "step-00000002"


@pytest.mark.parametrize("objects", ["../../a", "/etc", 3, None, ["a"]])
def test_a_manifest_cannot_name_files_elsewhere(at, tmp_path, objects):
    train(RUN, toy(), 1)
    path = tmp_path / "crafted"
    path.mkdir()
    for name, data in at.files.items():
        if "/step-" in name:
            (path / name.rpartition("/")[2]).write_bytes(data)
    craft(path, lambda made: made.update(objects=objects))
    at.put("/run/step-00000001/manifest.json", (path / "manifest.json").read_bytes())
    another_machine(at)
    at.requests.clear()
    with pytest.raises(fl.CheckpointError), pytest.warns(UserWarning):
        fl.resume(RUN, toy())
    assert not [path for request, path in at.requests if request == "receive"]


# --- whole or not at all: a run is cut at each request, and resumed here or elsewhere

STEPS = 3


def run_once(state, **settings):
    return train(RUN, state, STEPS, keep=1, **settings)


def count_changes(at):
    return len([request for request, _ in at.requests if request != "read"])


@pytest.mark.parametrize(("here", "background"), [
    pytest.param(False, False, marks=pytest.mark.slow),
    *(pytest.param(*row, marks=pytest.mark.long)
      for row in ((False, True), (True, False), (True, True))),
])  # fmt: skip
def test_a_run_that_is_cut_at_any_request_resumes_as_if_it_had_not_been(at, here, background):
    whole = run_once(toy(), background=background)
    right, changes = at.files, count_changes(at)
    assert changes > 20
    for number in range(changes):
        another_machine(at)
        at.__init__(at.cache)
        at.cut_at(number)
        with contextlib.suppress(storage.Cut):
            run_once(toy(), background=background)
        at.works()
        if not here:
            another_machine(at)
        newest = at.names()[-1:]
        resumed = fl.resume(RUN, toy())
        assert [f"step-{resumed.step:08d}"] >= (newest or [""])  # it is at least what is there
        ended = run_once(resumed, background=background)
        assert_same(ended, whole)
        assert at.names()[-1] == "step-00000003"
        if resumed.step < STEPS:  # otherwise nothing was left to do
            assert at.names() == ["step-00000003"]
            plain = lambda files: sorted(path.rpartition("/")[2] for path in files)
            assert plain(at.files) == plain(right)
        assert not local_files(at)


def test_a_checkpoint_is_replaced_at_once(at):
    fl.save(toy(w=1.0), "faulty://a/b")
    before, requests = dict(storage.FaultyStorage.store), len(at.requests)
    fl.save(toy(w=2.0), "faulty://a/b")
    values = []
    for number in range(len(at.requests) - requests):
        storage.FaultyStorage.store = dict(before)
        at.cut_at(number)
        with contextlib.suppress(storage.Cut):
            fl.save(toy(w=2.0), "faulty://a/b")
        at.works()
        another_machine(at)
        values.append(fl.restore("faulty://a/b", toy()).model.w.item())
    assert {*values} == {1.0, 2.0} and values == sorted(values)


def test_nothing_depends_on_a_list(at):
    """All that is listed is what was there at the beginning: nothing."""
    at.lag()
    train(RUN, toy(), 5, keep=2)
    assert at.names() == ["step-00000004", "step-00000005"]
    another_machine(at)
    assert fl.latest(RUN).name == "step-00000005"
    train(RUN, fl.resume(RUN, toy()), 6, keep=2)
    assert at.names() == ["step-00000005", "step-00000006"]
    at.lag()
    train(RUN, fl.resume(RUN, toy()), 9, keep=2)
    another_machine(at)
    assert fl.resume(RUN, toy()).step == 9


# --- storage where a file is written in place


class Killed(BaseException):
    pass


@pytest.fixture
def killed(monkeypatch):
    """Return a function: the n-th manifest or list of names that is opened to write stays empty."""

    def kill(n):
        def opened(file):
            open_file(file)
            if "w" in file.mode and ("manifest" in file.path or ".checkpoints" in file.path):
                seen.append(file.path)
                if len(seen) == n:
                    raise Killed

        seen = []
        monkeypatch.setattr(local.LocalFileOpener, "_open", opened)

    open_file = local.LocalFileOpener._open
    return kill


def test_a_kill_while_a_manifest_is_written_in_place_loses_no_checkpoint(at, tmp_path, killed):
    url, started = f"file://{tmp_path}/store/run", toy()
    train(url, started, 2, keep=1)
    kept = tmp_path / "kept"
    (tmp_path / "store").rename(kept)
    for n in range(1, 9):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(kept, tmp_path / "store")
        another_machine(at)
        state = fl.resume(url, toy())
        killed(n)
        # A hook after it changes the state, so that step 3 is saved twice: the second replaces it.
        change = lambda state: attrs.evolve(state, extra={"seen": state.step})
        hooks = fl.every(steps=1)(fl.checkpoint(url, keep=1)), change
        with contextlib.suppress(Killed):
            fl.fit(fl.pipeline()(fl.testing.toy_loss), state, [ONE] * 9, steps=3, hooks=hooks)
        killed(0)
        another_machine(at)
        assert fl.resume(url, toy()).step in (2, 3)
        ended = train(url, fl.resume(url, toy()), 4, keep=1)
        assert ended.model.w.item() == -4.0
        stored = [path.name for path in (tmp_path / "store" / "run").rglob("*")]
        assert not [name for name in stored if "part" in name and "manifest" in name]


def test_a_server_that_renames_to_nothing_that_is_there_gets_the_place_free(at, monkeypatch):
    """As smb:// does. The file at the new name is whole before the old one goes."""
    asked = []

    def move(fs, one, two):
        asked.append("move")
        if fs.exists(two):
            raise OSError(errno.EEXIST, "STATUS_OBJECT_NAME_COLLISION")
        fs.pipe_file(two, fs.cat_file(one))
        fs.rm_file(one)

    monkeypatch.setattr(storage.FaultyStorage, "mv", move, raising=False)
    monkeypatch.setattr(remote, "OBJECT_STORES", {*remote.OBJECT_STORES} - {"faulty"})
    monkeypatch.setattr(storage.FaultyStorage, "makedirs", lambda *a, **k: None)
    train(RUN, toy(), 3, keep=1)
    another_machine(at)
    assert fl.resume(RUN, toy()).step == 3 and "move" in asked
    assert not [path for path in at.files if path.endswith(".part")]


# --- faults


class Refused(OSError):
    pass


def failing(times, requests=("read", "write", "send", "receive", "remove", "list"), error=Refused):
    """Let each request to a path fail some times."""
    seen = {}

    def fail(request, path):
        seen[request, path] = seen.get((request, path), 0) + 1
        if request in requests and seen[request, path] <= times:
            raise error("503 Slow Down")

    return fail


@pytest.mark.parametrize("error", [Refused, TimeoutError, ConnectionError, RuntimeError])
def test_a_fault_that_passes_is_not_noticed(at, error):
    at.before(failing(3, error=error))
    train(RUN, toy(), 3, keep=1, background=True)
    another_machine(at)
    assert fl.resume(RUN, toy()).step == 3


def test_the_pauses_between_attempts_grow_to_a_minute(at, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 1.0)
    slept = []
    monkeypatch.setattr(remote.time, "sleep", slept.append)
    at.before(failing(99))
    with pytest.raises(OSError, match="faulty://run: Refused: 503 Slow Down"):
        fl.latest(RUN)
    assert slept == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("request_", ["send", "write"])
def test_a_fault_that_lasts_is_an_error_and_the_local_copy_stays(at, background, request_):
    whole = train("faulty://whole", toy(), 7, keep=1)
    fails = failing(99, (request_,))
    at.before(lambda request, path: "step-00000003" in path and fails(request, path))
    message = (
        r"step-00000003 could not be uploaded .*503 Slow Down.* whole in (\S+)\. The next resume"
    )
    with pytest.raises(OSError, match=message) as raised:
        train(RUN, toy(), 6, keep=1, background=background)
    folder = Path(str(raised.value).split("whole in ")[1].split(". The")[0])
    assert fl.restore(folder, toy()).step == 3
    assert raised.value.state.step >= 3
    at.works()
    resumed = fl.resume(RUN, toy())  # which uploads it first, and has it then
    assert background or not at.received
    assert resumed.step >= 3 and f"step-{resumed.step:08d}" == at.names()[-1]
    assert "step-00000003" in at.names()
    assert_same(train(RUN, resumed, 7, keep=1), whole)
    assert at.names() == ["step-00000007"] and not local_files(at)


@pytest.mark.parametrize("settings", [{"keep": None}, {"keep": 1, "best": "train/loss"}])
def test_what_could_not_be_uploaded_is_sent_although_newer_ones_are_there(
    at, monkeypatch, settings
):
    """The losses are 5, 1, 4, 3, 2. The best, of step 2, is refused; 3, 4 and 5 are uploaded."""
    losses, ended = iter([5.0, 1.0, 4.0, 3.0, 2.0]), threading.Event()
    monkeypatch.setattr(remote, "IN_FLIGHT", 9)

    def refuse(request, path):
        if "step-00000002" in path and request == "send":
            ended.wait(20)
            raise PermissionError("the token has expired")

    at.before(refuse)
    hooks = (
        fl.every(epochs=1)(fl.checkpoint(RUN, background=True, **settings)),
        lambda state: (ended.set() if state.step == 5 else None, state)[1],
    )
    step = fl.pipeline()(lambda model, batch: model.w * 0.0 + next(losses))
    with pytest.raises(PermissionError, match=r"00000002 could not be .* The next resume from"):
        fl.fit(step, toy(), [ONE], epochs=5, hooks=hooks)
    at.works()
    assert at.names()[-1] == "step-00000005" and "step-00000002" not in at.names()
    assert fl.resume(RUN, toy()).step == 5
    another_machine(at)
    assert fl.restore(f"{RUN}/step-00000002", toy()).step == 2
    assert fl.best(RUN, "train/loss").name == "step-00000002"


def test_an_account_that_may_not_delete_is_told_so(at):
    """What was saved is there, and the message does not call it an upload."""

    def refuse(request, path):
        if request == "remove":
            raise PermissionError("AccessDenied")

    at.before(refuse)
    message = r"step-00000001/\S+ could not be removed \(.*AccessDenied\)\. What was saved is there"
    with pytest.raises(PermissionError, match=message) as raised:
        train(RUN, toy(), 3, keep=1)
    assert "uploaded" not in str(raised.value) and raised.value.state.step == 2
    fl.save(toy(w=1.0), "faulty://a/b")
    with pytest.raises(PermissionError, match=r"a/b/.* could not be removed") as raised:
        fl.save(toy(w=2.0), "faulty://a/b")
    assert "uploaded" not in str(raised.value)
    assert fl.restore("faulty://a/b", toy()).model.w.item() == 2.0


def test_a_run_continues_from_the_state_of_the_error(at):
    at.before(failing(99, ("send",)))
    with pytest.raises(OSError) as raised:
        train(RUN, toy(), 6)
    at.works()
    state = train(RUN, raised.value.state, 6)
    assert (state.step, at.names()[-1]) == (6, "step-00000006")


def test_a_local_copy_that_another_machine_has_passed_is_removed(at, tmp_path):
    at.before(lambda request, path: "step-00000003" in path and failing(99)(request, path))
    with pytest.raises(OSError):
        train(RUN, toy(), 6)
    at.works()
    shutil.move(at.cache, tmp_path / "first")
    train(RUN, fl.resume(RUN, toy()), 5)  # from step 2
    another_machine(at)
    shutil.move(tmp_path / "first", at.cache)
    assert fl.resume(RUN, toy()).step == 5
    assert not local_files(at)


def test_a_save_that_cannot_be_uploaded_keeps_its_copy(at):
    at.before(failing(99, ("send",)))
    with pytest.raises(OSError, match=r"b could not be uploaded .*whole in (\S+)$") as raised:
        fl.save(toy(w=3.0), "faulty://a/b")
    copy = str(raised.value).split("whole in ")[1]
    at.works()
    assert fl.restore(copy, toy()).model.w.item() == 3.0
    assert fl.latest("faulty://a") is None


# --- beside training


def test_a_bounded_number_of_uploads_waits(at, monkeypatch):
    monkeypatch.setattr(remote, "IN_FLIGHT", 2)
    opened, steps = threading.Event(), []
    at.before(lambda request, path: request == "send" and opened.wait(20))
    note = fl.every(steps=1)(lambda state: steps.append(state.step) or state)
    hooks = note, fl.every(steps=1)(fl.checkpoint(RUN, keep=1, background=True))
    fit = lambda: fl.fit(fl.pipeline()(fl.testing.toy_loss), toy(), [ONE] * 9, hooks=hooks)
    run = threading.Thread(target=fit)
    run.start()
    deadline = time.monotonic() + 10
    while len(steps) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    waits = list(steps)
    opened.set()
    run.join(30)
    # one is uploaded, one waits, one is written and waits for a place, and the fourth waits for it
    assert waits == [1, 2, 3, 4]
    assert steps == [*range(1, 10)] and at.names() == ["step-00000009"]


def test_each_byte_is_downloaded_once(at):
    train(RUN, toy(), 4, keep=3)
    another_machine(at)
    at.received.clear()
    fl.resume(RUN, toy())
    fl.resume(RUN, toy())
    fl.latest(RUN)
    newest = {k: len(v) for k, v in at.files.items() if "00000004" in k and "manifest" not in k}
    assert at.received == newest


def test_local_copies_are_removed_when_the_address_has_them_no_longer(at):
    train(RUN, toy(), 3, keep=1)
    first = fl.latest(RUN)
    train(RUN, fl.resume(RUN, toy()), 4, keep=1)
    second = fl.latest(RUN)
    assert second.exists() and not first.exists()


# --- what is refused

CALLS = {
    "save": lambda at: fl.save(toy(), at), "restore": lambda at: fl.restore(at, toy()),
    "resume": lambda at: fl.resume(at, toy()), "latest": fl.latest, "best": fl.best,
    "checkpoint": fl.checkpoint,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("given", "kind", "said"), [
    ("nosuch://bucket/a", ValueError, r"an address of fsspec.*got 'nosuch://bucket/a'.*nosuch"),
    ("s3://", ValueError, "the address of a folder; got 's3://'"),
    ("s3://bucket/a", ImportError, r"pip install 'fnloop\[remote\]' s3fs"),
    (Path("faulty://bucket/a"), ValueError, "a Path loses a slash"),
])  # fmt: skip
def test_an_address_that_cannot_be_meant_is_refused_by_name(name, given, kind, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(kind, match=rf"(?s){name}.*{said}"):
        CALLS[name](given)


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_what_may_not_be_written_is_refused_before_the_first_update(at, error):
    at.before(failing(99, ("write", "send"), error))
    with pytest.raises(error, match="faulty://run"):
        train(RUN, state := toy(), 3)
    assert state.step == 0
    assert len([request for request, _ in at.requests if request == "write"]) == 1  # not again
    with pytest.raises(error, match=r"faulty://a.*whole in"):
        fl.save(state, "faulty://a/b")


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("save", "checkpoint")])
def test_what_may_not_be_read_is_an_error_and_not_an_empty_folder(at, name):
    at.before(failing(99, error=PermissionError))
    with pytest.raises(PermissionError, match="faulty://run"):
        CALLS[name](RUN)


def test_two_hooks_cannot_share_an_address(at):
    hooks = fl.checkpoint(RUN), fl.checkpoint(RUN + "/")
    with pytest.raises(ValueError, match="two checkpoint hooks share faulty://run"):
        fl.fit(fl.pipeline()(fl.testing.toy_loss), toy(), [ONE], hooks=hooks)


@pytest.mark.parametrize(("value", "right"), [
    ("s3://b/a", True), ("memory://a", True), ("gs://b", True), ("file:///tmp/a", True),
    ("runs/a", False), ("/runs/a", False), ("C://a", False), ("a:b", False), ("", False),
    (None, False), (3, False), (b"s3://a", False), (Path("s3://b/a"), False),
])  # fmt: skip
def test_what_is_an_address(value, right):
    assert is_address(value) is right


def test_a_password_is_not_shown(at):
    place = remote.Remote("save", "faulty://me:secret@host/run")
    assert place.name == "faulty://host/run" and "secret" not in str(place.home)


def test_an_address_of_files_makes_its_folders(tmp_path):
    train(f"file://{tmp_path}/new/run", toy(), 3, keep=2)
    kept = [name for name in names(tmp_path / "new" / "run") if not name.startswith(".")]
    assert kept == ["step-00000002", "step-00000003"]
    assert fl.resume(f"file://{tmp_path}/new/run", toy()).step == 3
    assert fl.resume(tmp_path / "new" / "run", toy()).step == 3


@pytest.mark.slow
def test_without_an_address_nothing_is_imported_for_it(tmp_path):
    code = """
import sys, torch, fnloop as fl
from fnloop.testing import toy, toy_loss
before = {*sys.modules}
hook = fl.every(steps=1)(fl.checkpoint("run", background=True))
state = fl.fit(fl.pipeline()(toy_loss), fl.resume("run", toy()), [torch.ones(1)], hooks=(hook,))
fl.save(state, "a"), fl.restore("a", toy()), fl.latest("run")
print(sorted({name.partition(".")[0] for name in {*sys.modules} - before} & {"fsspec", "s3fs"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


# --- several processes


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        return self.layer(x).square().mean()


def sharded_state():
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    module = fully_shard(Halves())
    return fl.TrainState.create(module, torch.optim.Adam(module.parameters()), seed=0)


def train_sharded(folder, background):
    """A run that is stopped, and resumed from an address."""
    import os

    rank = 0 if background else os.environ["RANK"]  # as on one machine, or on two
    os.environ["FNLOOP_CACHE"] = f"{folder}/cache-{rank}"
    step = fl.pipeline()(lambda model, x: model(x))
    data = [torch.full((2, 4), float(i)) for i in range(6)]

    def run(state, steps, place):
        hooks = (fl.every(steps=2)(fl.checkpoint(place, keep=1, background=background)),)
        return fl.fit(step, state, data, steps=steps, hooks=hooks)

    at = f"file://{folder}/at"
    whole = run(sharded_state(), 6, f"{folder}/disk")
    run(sharded_state(), 4, at)
    state = run(fl.resume(at, sharded_state()), 6, at)
    bits = lambda state: [p.to_local().tolist() for p in state.model.parameters()]
    fl.save(state, f"file://{folder}/saved/a")
    again = fl.restore(f"file://{folder}/saved/a", sharded_state())
    left = [str(p) for p in Path(f"{folder}/cache-{rank}").glob("*/run-*/*/*.safetensors")]
    return {"equal": bits(state) == bits(whole) == bits(again), "left": left, "step": state.step}


def sharded_at_once(folder):
    return train_sharded(folder, False)


def sharded_in_the_background(folder):
    return train_sharded(folder, True)


@pytest.mark.slow
@pytest.mark.parametrize("job", [sharded_at_once, sharded_in_the_background])
def test_each_process_uploads_its_own_part(launched, job):
    for found in launched(job, 2):
        assert found == {"equal": True, "left": [], "step": 6}


def test_the_list_of_names_is_json(at):
    train(RUN, toy(), 2, keep=1)
    catalogue = json.loads(at.files["/run/.checkpoints.json"])
    assert {*catalogue["checkpoints"]} >= {*at.names()} and len(catalogue["run"]) == 16
