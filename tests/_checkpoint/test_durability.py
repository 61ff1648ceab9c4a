"""Runs that are killed, disks that fill up, files that rot: what was saved is whole, or it isn't there.

Killed runs are children of one helper process, this file run as a script, which has imported everything and read the
images: it forks a child per attempt, so that an attempt costs what it does and not two seconds of imports, and a kill
meets training, saving or the way there.

The environment variable FNLOOP_KILLS, 30 by default, scales how many processes are killed.
"""

import collections
import contextlib
import errno
import hashlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Subset

import fnloop as fl
from fnloop._checkpoint import atomic_write, disk, format
from fnloop.schedules import one_cycle
from fnloop.testing import assert_same, stochastic

resource = pytest.importorskip("resource", reason="there are no fork, signals and limits here")

MNIST = Path(__file__).parents[2] / "examples" / "mnist.py"
KILLS = int(os.environ.get("FNLOOP_KILLS", "30"))
UPDATES = 32  # of a run on the digits: 2 epochs of 16 batches, the last of 20 images
FILES = (*format.FILES, "manifest.json")


# --- a run on the digits, in a process of its own


def train(run, background=False, pause=0.0, save_every=5):
    """Train the small CNN, going on from what there is, and note every update: what it saw, and what it made.

    Args:
        run: the folder for checkpoints, the log and the result.
        background: as in ``checkpoint``.
        pause: seconds that every fsync takes longer.
        save_every: updates between two checkpoints.
    """
    mnist, (images, held_out) = digits()
    seen = []

    def loss_fn(model, batch):
        pixels, labels = batch
        if model.training:
            seen[:] = len(labels), digest(pixels, labels)
        output = model(pixels)
        jitter = (
            1 + 0.1 * random.random()
        )  # python's generator is carried through an epoch, and through a restart
        return functional.cross_entropy(output, labels) * jitter, {"output": output}

    def note(text):
        os.write(log, f"{text} .\n".encode())  # at once: what is written stays, whoever is killed

    def note_update(state):
        size, images = seen
        note(
            f"update {state.step} {state.epoch} {state.batch} {size} {images} {digest(*state.model.state_dict().values())}"
        )
        return state

    def note_saved(state):
        note(f"saved {state.step}")
        return state

    if pause:
        flush = os.fsync
        os.fsync = lambda file: (time.sleep(pause), flush(file))
    log = os.open(Path(run) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    folder = Path(run) / "checkpoints"
    state = fl.resume(folder, new_state(mnist))
    os.write(log, b"\n")  # what was killed in the middle of a line must not spoil this one
    note(f"start {state.step}")

    loaders = {
        "train": DataLoader(images, batch_size=32, shuffle=True),
        "valid": DataLoader(held_out, batch_size=100),
    }
    step = fl.pipeline(
        fl.metric(accuracy=mnist["accuracy"]), fl.clip(1.0), fl.schedule(one_cycle())
    )(loss_fn)
    saves = fl.every(steps=save_every)(fl.checkpoint(folder, background=background))
    noted = fl.every(steps=save_every)(note_saved)
    state = fl.fit(step, state, loaders, epochs=2, hooks=(note_update, saves, noted))
    result = {
        **facts(state),
        "stop": state.stop,
        "kept": facts(fl.resume(folder, new_state(mnist))),
    }
    (Path(run) / "result.json").write_text(json.dumps(result))


def digits(found=[]):  # noqa: B006  # read once, by the helper, before it forks
    """Return what examples/mnist.py defines, 500 images to train on, and 200 held out."""
    if not found:
        mnist = runpy.run_path(str(MNIST))
        found += [
            mnist,
            [Subset(part, range(n)) for part, n in zip(mnist["digits"](), (500, 200), strict=True)],
        ]
    return found


def new_state(mnist):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mnist["small_cnn"]()
    return fl.TrainState.create(
        model, torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.05), seed=0
    )


def digest(*tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def facts(state):
    """Return what two runs must agree on, to the bit."""
    weights, optimizer = state.model.state_dict(), state.optimizer.state_dict()
    return {
        "counters": [state.step, state.epoch, state.batch, state.samples, state.skipped],
        "model": [*weights, digest(*weights.values())],
        "optimizer": [
            digest(*(torch.as_tensor(v) for v in kept.values()))
            for kept in optimizer["state"].values()
        ],
        "settings": repr(optimizer["param_groups"]),
        "history": [
            [r.epoch, r.step, {k: v.hex() for k, v in r.metrics.items()}] for r in state.history
        ],
    }


# --- a run on a toy, to be killed before a chosen operation on files


def train_toy(folder, die_at):
    """Train a toy and save it twice, keeping one; die before the n-th operation on files."""
    problem = stochastic()
    die_before_operation(die_at, folder)
    toy_fit(
        problem,
        problem.state(),
        epochs=1,
        hooks=(fl.every(steps=4)(fl.checkpoint(folder, keep=1)),),
    )


def replace_toy(path, die_at):
    """Put a checkpoint in the place of another; die before the n-th operation on files."""
    problem = stochastic()
    state = toy_fit(problem, problem.state(), steps=2)
    die_before_operation(die_at, path)
    fl.save(state, path)


def die_before_operation(n, path):
    operations = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    left = iter(range(n - 1))

    def watch(event, arguments):
        here = event in operations or (
            event == "open" and str(Path(path).parent) in str(arguments[0])
        )
        if here and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def toy_fit(problem, state, **kwargs):
    step = fl.pipeline(fl.clip(1.0), fl.schedule(one_cycle()))(problem.loss_fn)
    loaders = {"train": problem.batches, "valid": problem.batches[:2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fl.fit(step, state, loaders, **{"epochs": 2, "hooks": (), **kwargs})


# --- the helper process


def serve():
    """Fork a child for every request that is read, disturb it as is asked, and say how it ended."""
    torch.set_num_threads(1)
    import_the_rest(new_state(digits()[0]))
    for line in sys.stdin:
        request = json.loads(line)
        log = Path(request["arguments"].get("run", "")) / "log"
        behind = log.stat().st_size if log.is_file() else 0
        pid = os.fork()
        if pid == 0:
            work(request)
        print(json.dumps(disturb(pid, log, behind, **request["disturb"])), flush=True)


def import_the_rest(state):
    """Take an update with gradients of zero: the first one of an optimizer imports for a second."""
    for p in state.model.parameters():
        p.grad = torch.zeros_like(p)  # no backward pass, which nobody should fork behind
    state.optimizer.step()


def work(request):
    status = 1
    try:
        errors = os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1), os.dup2(errors, 2)
        warnings.simplefilter("error")
        {"train": train, "train_toy": train_toy, "replace_toy": replace_toy}[request["what"]](
            **request["arguments"]
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def disturb(pid, log, behind, number=None, after=0.0, updates=0):
    """Send a signal some seconds after a number of updates were noted, and wait for the end of the process."""
    begun, due, noted = time.monotonic(), None, []
    while True:
        now = time.monotonic()
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return {
                "status": os.waitstatus_to_exitcode(status),
                "seconds": now - begun,
                "noted": noted,
            }
        if due is None and updates_noted(log, behind) >= updates:
            due = now + after
        if number is not None and not noted and due is not None and now >= due:
            noted.append(updates_noted(log, behind))
            os.kill(pid, number)
            noted.append(updates_noted(log, behind))
        if now > begun + 120:
            os.kill(pid, signal.SIGKILL)  # it hangs
        time.sleep(0.001)


def updates_noted(log, behind=0):
    return log.read_bytes()[behind:].count(b"update") if log.is_file() else 0


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """A function that lets the helper run something in a child of its own, and returns how that ended."""
    errors = tmp_path_factory.mktemp("helper") / "errors"
    command, one_thread = (
        [sys.executable, __file__],
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, **one_thread}) as helper:

        def ask(what, number=None, after=0.0, updates=0, **arguments):
            disturb = {"number": number, "after": after, "updates": updates}
            request = {
                "what": what,
                "arguments": arguments,
                "disturb": disturb,
                "errors": str(errors),
            }
            helper.stdin.write(json.dumps(request) + "\n")
            helper.stdin.flush()
            answer = json.loads(helper.stdout.readline())
            assert answer["status"] in (0, -(number or signal.SIGKILL)), errors.read_text()
            return answer

        yield ask


@pytest.fixture(scope="module")
def undisturbed(ask, tmp_path_factory):
    """The run that nothing happens to: its folder."""
    run = tmp_path_factory.mktemp("undisturbed")
    assert ask("train", run=str(run))["status"] == 0
    assert list(updates_of(run)) == list(range(1, UPDATES + 1))
    return run


def result_of(run):
    return json.loads((run / "result.json").read_text())


def attempts_of(run):
    """Return of every attempt where it began, what it noted of its updates, by step, and what it said was saved."""
    attempts = []
    for line in (run / "log").read_text().splitlines():
        what, *words = line.removesuffix(" .").split() if line.endswith(" .") else ("cut",)
        if what == "start":
            attempts.append((int(words[0]), {}, []))
        elif what == "update":
            attempts[-1][1][int(words[0])] = words[1:]
        elif what == "saved":
            attempts[-1][2].append(int(words[0]))
    return attempts


def updates_of(run):
    return {step: words for _, updates, _ in attempts_of(run) for step, words in updates.items()}


def check_updates(run, undisturbed):
    """Assert that no update was left out or made twice in a row of attempts, and that each was the right one."""
    right = updates_of(undisturbed)
    for begin, updates, _ in attempts_of(run):
        assert list(updates) == list(range(begin + 1, begin + 1 + len(updates)))
        assert all(right[step] == words for step, words in updates.items())


def check_end(run, undisturbed):
    """Assert that a run ended as the undisturbed one, with everything cleared away."""
    check_updates(run, undisturbed)
    assert updates_of(run) == updates_of(undisturbed)
    assert result_of(run) == result_of(undisturbed)
    there = names_in(run / "checkpoints")
    kept = sorted(name for name in there if not name.startswith("."))
    assert kept[-1] == f"step-{UPDATES:08d}"
    if (
        attempts_of(run)[-1][0] < UPDATES
    ):  # else it was killed behind the last save, and nothing was left to do
        assert there == set(kept) and len(kept) <= 3


def check_newest(run, undisturbed):
    """Assert that the newest checkpoint, if there is one, holds the undisturbed run at its step; return that step."""
    newest = fl.latest(run / "checkpoints")  # a warning would be an error
    if newest is None:
        return 0
    state = fl.restore(newest, new_state(digits()[0]))
    assert digest(*state.model.state_dict().values()) == updates_of(undisturbed)[state.step][-1]
    return state.step


# --- killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "settings"),
    [
        (1.0, {}),
        (0.4, {"background": True}),
        (0.5, {"pause": 0.04}),
        (0.4, {"pause": 0.04, "background": True}),
    ],
    ids=["plain", "background", "slow-disk", "slow-disk-background"],
)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    share, settings, ask, undisturbed, tmp_path
):
    begun, rng = time.monotonic(), random.Random(repr(settings))
    duration = ask("train", run=str(folder_of(tmp_path, "whole")), **settings)["seconds"]
    check_end(tmp_path / "whole", undisturbed)
    landed = collections.Counter()
    for n in range(10 + 2 * KILLS):
        run = folder_of(tmp_path, str(n))
        landed += kill_until_it_ends(ask, run, rng, duration / 2, settings, undisturbed)
        check_end(run, undisturbed)
        if landed.total() >= share * KILLS and (landed["a write"] >= 3 or "pause" not in settings):
            break
    print(
        f"{landed.total()} kills of {n + 1} runs in {time.monotonic() - begun:.0f} s, by where they landed: {dict(landed)}"
    )
    assert landed.total() >= share * KILLS
    if "pause" in settings:
        assert landed["a write"] >= 3


def folder_of(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


def kill_until_it_ends(ask, run, rng, longest, settings, undisturbed):
    """Start a run and kill it after a random time, until it comes to its end before that. Return where the kills landed."""
    landed, step, promised, begun, left_over = collections.Counter(), 0, 0, 0, {}
    while True:
        delay = rng.uniform(0, longest)
        answer = ask("train", number=signal.SIGKILL, after=delay, run=str(run), **settings)
        if answer["status"] == 0:
            return landed
        before, step = step, check_newest(run, undisturbed)
        attempts = attempts_of(run) if (run / "log").is_file() else []
        for (
            _,
            _,
            saved,
        ) in attempts:  # in the background, that one was saved is said when the next is begun
            promised = max([promised, *(saved[:-1] if settings.get("background") else saved)])
        assert step >= max(promised, before), "a checkpoint that was complete is gone"
        if step == before:
            longest *= (
                1.1  # whatever else the machine does: it gets to the next checkpoint some day
            )

        there = names_in(run / "checkpoints")
        unfinished = {name for name in there if ".writing-" in name}
        for name in unfinished & left_over.keys():
            assert len(there - unfinished - left_over[name]) <= 1, (
                f"{name} is still there behind another save"
            )
        new = unfinished - left_over.keys()
        left_over.update(dict.fromkeys(new, there - unfinished))
        training = len(attempts) > begun and attempts[-1][1]
        landed["a write" if new else "training" if training else "the start"] += 1
        begun = len(attempts)


def names_in(folder):
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.slow
def test_whichever_operation_on_files_a_run_is_killed_before_it_goes_on_from_a_whole_checkpoint(
    ask, tmp_path
):
    problem, found = stochastic(), collections.Counter()
    whole = toy_fit(problem, problem.state(), epochs=1)
    for n in range(1, 1000):
        folder = tmp_path / str(n) / "checkpoints"
        folder.parent.mkdir()
        if ask("train_toy", folder=str(folder), die_at=n)["status"] == 0:
            break
        state = fl.resume(folder, problem.state())
        found[state.step] += 1
        end = toy_fit(
            problem, state, epochs=1, hooks=(fl.every(steps=4)(fl.checkpoint(folder, keep=1)),)
        )
        assert_same(end, whole)
        if state.step < 7:
            assert names_in(folder) == {"step-00000007"}
    print(f"{n - 1} operations; found behind them: {dict(found)}")
    assert set(found) == {0, 4, 7} and n > 30


@pytest.mark.slow
def test_whichever_operation_on_files_a_replacing_save_is_killed_before_one_of_the_two_is_there(
    ask, tmp_path
):
    problem = stochastic()
    first, third = (
        toy_fit(problem, problem.state(), steps=1),
        toy_fit(problem, problem.state(), steps=3),
    )
    found = collections.Counter()
    for n in range(1, 1000):
        path = tmp_path / str(n) / "a"
        fl.save(first, path)
        ended = ask("replace_toy", path=str(path), die_at=n)["status"]
        newest = fl.latest(path.parent)
        assert newest is not None
        found[fl.restore(path, problem.state()).step] += 1
        assert fl.restore(newest, problem.state()).step in (1, 2)
        fl.save(third, path)
        assert_same(fl.restore(path, problem.state()), third)
        if ended == 0:
            break
    print(f"{n - 1} operations; found behind them: {dict(found)}")
    assert set(found) == {1, 2} and n > 15


# --- asked to stop, or to save


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"background": True}, {"pause": 0.04}],
    ids=["plain", "background", "slow-disk"],
)
def test_sigterm_ends_a_run_behind_the_update_with_a_checkpoint_of_it(
    settings, ask, undisturbed, tmp_path
):
    rng, stopped = random.Random(f"SIGTERM {settings}"), []
    for _ in range(3):
        updates, after = rng.randint(1, 5), rng.uniform(0, 0.02)
        answer = ask(
            "train",
            number=signal.SIGTERM,
            after=after,
            updates=updates,
            run=str(tmp_path),
            **settings,
        )
        assert answer["status"] == 0
        result = result_of(tmp_path)
        stopped.append(result["counters"][0])
        assert result["stop"] == "SIGTERM" and result["counters"][0] < UPDATES

        begin, updates, _ = attempts_of(tmp_path)[-1]
        assert (
            answer["noted"][0] <= stopped[-1] - begin <= answer["noted"][1] + 2
        )  # it may be between update and note
        assert list(updates)[-1] == stopped[-1]
        newest = fl.latest(tmp_path / "checkpoints")
        manifest = json.loads((newest / "manifest.json").read_text())
        assert newest.name == f"step-{stopped[-1]:08d}" and manifest["stop"] == "SIGTERM"
        assert manifest["position"] == result["counters"][:3]
        assert result["kept"] == facts_of(result)
    assert ask("train", run=str(tmp_path), **settings)["status"] == 0
    assert [begin for begin, _, _ in attempts_of(tmp_path)] == [0, *stopped]
    check_end(tmp_path, undisturbed)


def facts_of(result):
    return {name: value for name, value in result.items() if name not in ("stop", "kept")}


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_sigusr1_saves_behind_the_update_and_the_run_goes_on(
    background, ask, undisturbed, tmp_path
):
    rng = random.Random(f"SIGUSR1 {background}")
    for n in range(3):
        run, updates = folder_of(tmp_path, str(n)), rng.randint(1, 12)
        settings = {
            "background": background,
            "save_every": 1000,
            "after": rng.uniform(0, 0.02),
            "updates": updates,
        }
        answer = ask("train", number=signal.SIGUSR1, run=str(run), **settings)
        assert answer["status"] == 0
        check_end(run, undisturbed)
        saved, last = sorted(path.name for path in (run / "checkpoints").iterdir())
        step = int(saved.removeprefix("step-"))
        assert answer["noted"][0] <= step <= answer["noted"][1] + 2
        state = fl.restore(run / "checkpoints" / saved, new_state(digits()[0]))
        assert digest(*state.model.state_dict().values()) == updates_of(undisturbed)[step][-1]
        assert state.stop is None and last == f"step-{UPDATES:08d}"


# --- a disk that is full


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("call", ["save_file", "fsync"])
def test_whichever_write_fails_the_error_comes_out_and_the_checkpoint_before_stays(
    call, background, tmp_path, monkeypatch
):
    problem = stochastic()
    whole, every, last = toy_fit(problem, problem.state()), 3, 14
    saves = [*range(every, last, every), last]

    def run(n):
        """Train with the n-th call failing; return the folder, the error, and the number of calls."""
        folder, calls = tmp_path / str(n), []

        def failing(*args, **kwargs):
            calls.append(args)
            if len(calls) == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*args, **kwargs)

        hook = fl.every(steps=every)(fl.checkpoint(folder, keep=10, background=background))
        place = atomic_write if call == "save_file" else disk.os
        original = getattr(place, call)
        with monkeypatch.context() as patch:
            patch.setattr(place, call, failing)
            try:
                assert_same(toy_fit(problem, problem.state(), hooks=(hook,)), whole)
            except OSError as error:
                return folder, error, len(calls)
            return folder, None, len(calls)

    folder, error, calls = run(0)
    assert error is None and names_in(folder) == {f"step-{step:08d}" for step in saves}
    each, rest = divmod(calls, len(saves))
    assert rest == 0
    for n in range(1, calls + 1):
        folder, error, _ = run(n)
        place, within = divmod(n - 1, each)
        there = (
            [*saves[:place], saves[place]]
            if call == "fsync" and within == each - 1
            else saves[:place]
        )
        assert error is not None and error.errno == errno.ENOSPC
        found = names_in(folder) - {
            ".run"
        }  # which says whose the folder is, until the first save is complete
        assert found == {f"step-{step:08d}" for step in there}, (
            "not those before, or something half-written"
        )
        newest = fl.latest(folder)
        assert (newest and newest.name) == (f"step-{there[-1]:08d}" if there else None)

        surfaces = (
            error.state.step
        )  # in the background, at the first boundary at which the writer has failed
        assert saves[place] <= surfaces <= saves[min(place + background, len(saves) - 1)]
        where = ("while in the end", "while in every(steps=3)(checkpoint(")
        assert any(
            text.startswith(where) and f"step {surfaces}" in text for text in error.__notes__
        )
        assert_same(toy_fit(problem, error.state), whole)
        assert_same(toy_fit(problem, fl.resume(folder, problem.state())), whole)


@pytest.mark.parametrize("limit", [0, 1, 100, 500, 1000, 1400, 1800, 2200, 2600, 10_000])
def test_a_disk_that_takes_no_more_bytes_is_an_oserror_and_what_was_there_stays(limit, tmp_path):
    problem = stochastic()
    first = toy_fit(problem, problem.state(), steps=1)
    second = fl.snapshot(first)
    second = toy_fit(problem, second, steps=3)
    path = fl.save(first, tmp_path / "a")
    assert max(file.stat().st_size for file in path.iterdir()) > limit
    with pytest.raises(OSError), no_file_longer_than(limit):
        fl.save(second, path)
    assert names_in(tmp_path) == {"a"}
    assert_same(fl.restore(path, problem.state()), first)
    fl.save(second, path)
    assert_same(fl.restore(path, problem.state()), second)


@contextlib.contextmanager
def no_file_longer_than(limit):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- files that rot

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


def flips(name, data):
    """Yield the data with one bit flipped: all over the file, and at random in it."""
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
    """Return numbers below n, all over, with the first and the last."""
    return sorted({round(i * (n - 1) / (count - 1)) for i in range(count)})


@contextlib.contextmanager
def damaged(path, files, changes):
    """Change files of a checkpoint for a while; None removes one, Path puts a folder in its place."""
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
    """A folder with two checkpoints of a run; both paths, what is in the files of both, and their states."""
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
    """A state to restore into, and what it is after one more update."""
    problem = stochastic()
    state = toy_fit(problem, problem.state(seed=5), steps=2)
    return state, toy_fit(problem, fl.snapshot(state), steps=3)


def cases(kind, name, shelf):
    _, _, (other, mine), _ = shelf
    return KINDS[kind](name, mine, other)


def test_there_are_hundreds_of_damages(shelf):
    numbers = {name: sum(len(list(cases(kind, name, shelf))) for kind in KINDS) for name in FILES}
    print(f"{sum(numbers.values())} damages: {numbers}")
    assert sum(numbers.values()) >= 800 and min(numbers.values()) >= 100


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_refused_and_the_state_stays_as_it_is(kind, name, shelf, given):
    _, (_, newer), (_, files), _ = shelf
    before, after = given
    for case, changes in cases(kind, name, shelf):
        state = fl.snapshot(before)
        with damaged(newer, files, changes), pytest.raises(fl.CheckpointError) as caught:
            fl.restore(newer, state)
        assert faults(kind, name, changes) & set(words_of(caught.value)), (
            f"{case}: {caught.value} names no file of {changes}"
        )
        assert str(newer) in str(caught.value)
        assert_same(state, before)
        assert_same(toy_fit(stochastic(), state, steps=3), after)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_says_why(kind, name, shelf, given):
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
    """Return which files may be named: those that were changed, or any that a whole, foreign manifest doesn't describe."""
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
def test_a_run_goes_on_from_the_one_before_and_puts_a_whole_one_in_the_place_of_the_damaged(
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
def test_where_all_are_damaged_resume_raises_and_a_run_that_begins_anew_is_refused(
    damage, shelf, tmp_path
):
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


def test_a_file_that_cannot_be_read_is_an_error_and_not_a_damage(shelf, given, monkeypatch):
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


def test_what_was_restored_does_not_hang_on_the_files_that_it_came_from(shelf, tmp_path):
    _, (_, newer), _, (_, right) = shelf
    path = Path(shutil.copytree(newer, tmp_path / "a"))
    state = fl.restore(path, stochastic().state())
    for name in FILES:
        with (path / name).open(
            "r+b"
        ) as file:  # in place, without cutting: that would end the process
            file.write(bytes((path / name).stat().st_size))
    assert_same(state, right)


if __name__ == "__main__":
    serve()


# --- terminated


@pytest.mark.parametrize(("moment", "attempts"), [("training", 10), ("evaluation", 2)])
def test_a_run_with_workers_that_is_terminated_twice_is_saved(moment, attempts, tmp_path):
    """All processes of the run get both signals: the second one kills its workers, while it saves or evaluates."""
    script = Path(__file__).parents[1] / "terminated.py"
    out = subprocess.run(
        [sys.executable, str(script), str(tmp_path), moment, str(attempts)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    ended = [json.loads(line) for line in out.splitlines()]
    assert len(ended) == attempts
    for end in ended:
        assert (end["status"], end["error"], end["stop"]) == (0, "", "SIGTERM")
        assert end["saved"] == end["step"] >= 2
        assert (
            end["epoch"] == 0
        )  # in the evaluation of the first epoch too: a run that continues repeats it
