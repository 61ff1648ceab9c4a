"""Runs that are killed at any moment, or asked to stop or to save, resume bit for bit.

The environment variable FNLOOP_KILLS, 15 by default, scales how many processes are killed.
"""

import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import killed_run
import pytest
import terminated
from killed_run import UPDATES, digest, digits, new_state, toy_fit
from saved import names

import fnloop as fl
from fnloop.testing import assert_same, stochastic

resource = pytest.importorskip("resource", reason="this system has no fork, signals and limits")
LONG = pytest.mark.long
KILLS = int(os.environ.get("FNLOOP_KILLS", "15"))
result_of = lambda run: json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def run_child(tmp_path_factory):
    """A function that runs something in a child of the helper process, and returns how it ended."""
    errors = tmp_path_factory.mktemp("helper") / "errors"
    command = [sys.executable, killed_run.__file__]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env={**os.environ, **one_thread}) as helper:

        def run_child(what, number=None, after=0.0, updates=0, **arguments):
            when = {"number": number, "after": after, "updates": updates}
            request = {"what": what, "arguments": arguments, "signal": when, "errors": str(errors)}
            helper.stdin.write(json.dumps(request) + "\n")
            helper.stdin.flush()
            answer = json.loads(helper.stdout.readline())
            assert answer["status"] in (0, -(number or signal.SIGKILL)), errors.read_text()
            return answer

        yield run_child


@pytest.fixture(scope="module")
def uninterrupted(run_child, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted")
    assert run_child("train", run=str(run))["status"] == 0
    assert list(updates_of(run)) == list(range(1, UPDATES + 1))
    return run


def attempts_of(run):
    """Return for every attempt its first step, its logged updates by step, and its saved steps."""
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


def check_updates(run, uninterrupted):
    """Assert that the attempts together made every update, and each of them correctly."""
    right = updates_of(uninterrupted)
    for begin, updates, _ in attempts_of(run):
        assert list(updates) == list(range(begin + 1, begin + 1 + len(updates)))
        assert all(right[step] == words for step, words in updates.items())


def check_end(run, uninterrupted):
    check_updates(run, uninterrupted)
    assert updates_of(run) == updates_of(uninterrupted)
    assert result_of(run) == result_of(uninterrupted)
    there = names(run / "checkpoints")
    kept = [name for name in there if not name.startswith(".")]
    assert kept[-1] == f"step-{UPDATES:08d}"
    # Otherwise it was killed after the last save, with nothing left to do
    if attempts_of(run)[-1][0] < UPDATES:
        assert there == kept and len(kept) <= 3


def check_newest(run, uninterrupted):
    """Assert that the newest checkpoint equals the uninterrupted run there; return its step."""
    newest = fl.latest(run / "checkpoints")  # a warning would be an error
    if newest is None:
        return 0
    state = fl.restore(newest, new_state(digits()[0]))
    assert digest(*state.model.state_dict().values()) == updates_of(uninterrupted)[state.step][-1]
    return state.step


@pytest.mark.slow
@pytest.mark.parametrize(("share", "settings"), [
    pytest.param(0.4, {"background": True}, id="background", marks=LONG),
    pytest.param(0.4, {}, id="plain"),
    pytest.param(0.4, {"pause": 0.04, "background": True}, id="slow-disk-background", marks=LONG),
])  # fmt: skip
def test_a_run_killed_repeatedly_ends_as_whole(share, settings, run_child, uninterrupted, tmp_path):
    rng = random.Random(repr(settings))
    duration = run_child("train", run=str(folder_of(tmp_path, "whole")), **settings)["seconds"]
    check_end(tmp_path / "whole", uninterrupted)
    landed = collections.Counter()
    for n in range(10 + 2 * KILLS):
        run = folder_of(tmp_path, str(n))
        landed += kill_until_it_ends(run_child, run, rng, duration / 2, settings, uninterrupted)
        check_end(run, uninterrupted)
        if landed.total() >= share * KILLS and (landed["a write"] >= 3 or "pause" not in settings):
            break
    assert landed.total() >= share * KILLS, landed
    assert landed["a write"] >= 3 or "pause" not in settings, landed


def folder_of(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


def kill_until_it_ends(run_child, run, rng, longest, settings, uninterrupted):
    """Restart a run and kill it after random times until it ends. Return where the kills landed."""
    landed, step, promised, begun, left_over = collections.Counter(), 0, 0, 0, {}
    while True:
        delay = rng.uniform(0, longest)
        answer = run_child("train", number=signal.SIGKILL, after=delay, run=str(run), **settings)
        if answer["status"] == 0:
            return landed
        before, step = step, check_newest(run, uninterrupted)
        attempts = attempts_of(run) if (run / "log").is_file() else []
        # In the background, a save is logged before it is complete
        for _, _, saved in attempts:
            promised = max([promised, *(saved[:-1] if settings.get("background") else saved)])
        assert step >= max(promised, before), "a complete checkpoint is gone"
        if step == before:
            longest *= 1.1  # so that it reaches the next checkpoint even on a busy machine

        folder = run / "checkpoints"
        there = {*names(folder)} if folder.is_dir() else set()
        unfinished = {name for name in there if ".writing-" in name}
        for name in unfinished & left_over.keys():  # it does not outlive another save
            assert len(there - unfinished - left_over[name]) <= 1, name
        new = unfinished - left_over.keys()
        left_over.update(dict.fromkeys(new, there - unfinished))
        training = len(attempts) > begun and attempts[-1][1]
        landed["a write" if new else "training" if training else "the start"] += 1
        begun = len(attempts)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_killed_before_any_file_operation_resumes_from_a_whole_one(run_child, tmp_path):
    problem, found = stochastic(), collections.Counter()
    whole = toy_fit(problem, problem.state(), epochs=1)
    for n in range(1, 1000):
        folder = tmp_path / str(n) / "checkpoints"
        folder.parent.mkdir()
        if run_child("train_toy", folder=str(folder), die_at=n)["status"] == 0:
            break
        state = fl.resume(folder, problem.state())
        found[state.step] += 1
        saves = fl.every(steps=4)(fl.checkpoint(folder, keep=1))
        assert_same(toy_fit(problem, state, epochs=1, hooks=(saves,)), whole)
        if state.step < 7:
            assert names(folder) == ["step-00000007"]
    assert set(found) == {0, 4, 7} and n > 30, (n, found)


@pytest.mark.slow
def test_a_save_killed_before_any_file_operation_leaves_the_old_or_the_new(run_child, tmp_path):
    problem, found = stochastic(), collections.Counter()
    first, third = (toy_fit(problem, problem.state(), steps=n) for n in (1, 3))
    for n in range(1, 1000):
        path = tmp_path / str(n) / "a"
        fl.save(first, path)
        ended = run_child("replace_toy", path=str(path), die_at=n)["status"]
        newest = fl.latest(path.parent)
        assert newest is not None
        found[fl.restore(path, problem.state()).step] += 1
        assert fl.restore(newest, problem.state()).step in (1, 2)
        fl.save(third, path)
        assert_same(fl.restore(path, problem.state()), third)
        if ended == 0:
            break
    assert set(found) == {1, 2} and n > 15, (n, found)


def is_left_to_the_next(run):
    """Return whether the evaluation of an epoch and its hooks are: SIGTERM does not wait for it."""
    step, epoch = result_of(run)["counters"][:2]
    return step == epoch * UPDATES // 2 and step not in updates_of(run)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {}, {"background": True}, pytest.param({"pause": 0.04}, marks=LONG),
], ids=["plain", "background", "slow-disk"])  # fmt: skip
def test_sigterm_stops_after_the_update_and_saves(settings, run_child, uninterrupted, tmp_path):
    rng, stopped, before = random.Random(f"SIGTERM {settings}"), [], tmp_path.with_name("before")
    while len(stopped) < 3:
        updates, after = rng.randint(1, 5), rng.uniform(0, 0.02)
        when = {"number": signal.SIGTERM, "after": after, "updates": updates}
        shutil.copytree(tmp_path, before)
        answer = run_child("train", **when, run=str(tmp_path), **settings)
        assert answer["status"] == 0
        result = result_of(tmp_path)
        shutil.rmtree(tmp_path if is_left_to_the_next(tmp_path) else before)
        if before.exists():  # that run would call the hooks of an update that it has not seen
            before.rename(tmp_path)
            continue
        stopped.append(result["counters"][0])
        assert result["stop"] == "SIGTERM" and result["counters"][0] < UPDATES

        begin, updates, _ = attempts_of(tmp_path)[-1]
        # It may be between update and log
        assert answer["logged"][0] <= stopped[-1] - begin <= answer["logged"][1] + 2
        assert list(updates)[-1] == stopped[-1]
        newest = fl.latest(tmp_path / "checkpoints")
        manifest = json.loads((newest / "manifest.json").read_text())
        assert newest.name == f"step-{stopped[-1]:08d}" and manifest["stop"] == "SIGTERM"
        assert manifest["position"] == result["counters"][:3]
        facts = {name: v for name, v in result.items() if name not in ("stop", "kept")}
        assert result["kept"] == facts
    assert run_child("train", run=str(tmp_path), **settings)["status"] == 0
    assert [begin for begin, _, _ in attempts_of(tmp_path)] == [0, *stopped]
    check_end(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_sigusr1_saves_and_continues(background, run_child, uninterrupted, tmp_path):
    rng = random.Random(f"SIGUSR1 {background}")
    for n in range(3):
        run, updates = folder_of(tmp_path, str(n)), rng.randint(1, 12)
        when = {"number": signal.SIGUSR1, "after": rng.uniform(0, 0.02), "updates": updates}
        settings = {"background": background, "save_every": 1000}
        answer = run_child("train", **when, run=str(run), **settings)
        assert answer["status"] == 0
        check_end(run, uninterrupted)
        saved, last = names(run / "checkpoints")
        step = int(saved.removeprefix("step-"))
        assert answer["logged"][0] <= step <= answer["logged"][1] + 2
        state = fl.restore(run / "checkpoints" / saved, new_state(digits()[0]))
        assert digest(*state.model.state_dict().values()) == updates_of(uninterrupted)[step][-1]
        assert state.stop is None and last == f"step-{UPDATES:08d}"


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "attempts"), [
    ("training", 2), pytest.param("evaluation", 2, marks=LONG),
])  # fmt: skip
def test_a_run_with_workers_is_saved_if_it_is_terminated_twice(moment, attempts, tmp_path):
    """All processes of the run get both signals. The second kills its workers as it saves."""
    command = [sys.executable, terminated.__file__, str(tmp_path), moment, str(attempts)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    ended = [json.loads(line) for line in out.splitlines()]
    assert len(ended) == attempts
    for end in ended:
        assert (end["status"], end["error"], end["stop"]) == (0, "", "SIGTERM")
        assert end["saved"] == end["step"] >= 2
        # In the evaluation of the first epoch, which a resumed run repeats, the epoch is counted.
        assert end["epoch"] == (moment == "evaluation")
