"""Which tests run when and where; one thread, as no result depends on cores; shared fixtures."""

import fcntl
import gc
import json
import multiprocessing.process
import os
import re
import signal
import subprocess
import sys

import launch
import pytest
import torch
from fake_recorder import FakeRecorder
from fake_terminal import fake_clock

import fnloop as fl
from fnloop._display import screen
from fnloop._extensions.middleware import compiled
from fnloop._loop import peers

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # no test pulls the plug; processes that tests start do flush
# How many seconds a DataLoader waits for a worker that does not end, before it terminates it.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us ignoring it


def pytest_xdist_auto_num_workers(config):
    """Run what is named by its file in this process; else one worker more than cores.

    Tests of several processes wait half of their time, for messages and for clocks.
    """
    alone = all(".py" in argument for argument in config.args)
    return 0 if alone else min(len(os.sched_getaffinity(0)), 8) + 1


COMPILES = re.compile(r"compiled\((backend=|\))")  # in the name of a test: a row that compiles
# What is said of any number of processes is tried on three too; elsewhere that is long.
ON_THREE = ("test_training",)


def is_on_three(item):
    """Return whether a test runs a job on three processes or more."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return "processes" in item.path.parts and any(type(n) is int and n > 2 for n in values)


@pytest.hookimpl(tryfirst=True)  # before some of them are chosen by their kind
def pytest_collection_modifyitems(items):
    """Make each test fast or slow, and run the fast ones first."""
    for item in items:
        if COMPILES.search(item.name):
            item.add_marker("slow")
        if is_on_three(item) and item.path.stem not in ON_THREE:
            item.add_marker("long")
        if item.get_closest_marker("long"):
            item.add_marker("slow")
        elif not item.get_closest_marker("slow"):
            item.add_marker("fast")
    items.sort(key=lambda item: item.get_closest_marker("fast") is None)


def pytest_collection_finish():
    """Let collections of garbage pass over what exists before the first test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """Return a function that returns the results of a job on n processes, by rank.

    A job runs once for all tests, in whichever worker of pytest needs it first.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def run(job, n, forked=True):
        for first in getattr(job, "reads", ()):
            run(*first)
        path = shared / launch.name_of(job, n)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.with_suffix(".json").exists():
                try:
                    found = launch.results(path, n, job, timeout=300, forked=forked)
                except (AssertionError, TimeoutError) as error:
                    found = str(error)
                path.with_suffix(".json").write_text(json.dumps(found))
        found = json.loads(path.with_suffix(".json").read_text())
        return pytest.fail(found) if isinstance(found, str) else found

    return run


@pytest.fixture
def recorders(monkeypatch):
    """Capture on fake recorders instead of CUDA; a list of all that were made."""
    made = []
    monkeypatch.setattr(
        compiled, "recorder_on", lambda device: made.append(FakeRecorder()) or made[-1]
    )
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *_, **__: ["cpu"],
    )
    return made


def frames_compiled():
    """Return how many frames torch has compiled in this process, without importing its compiler."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["frames"]["total"] if compiler else 0


@pytest.fixture(autouse=True)
def a_fast_test_starts_no_process_and_compiles_nothing(request, monkeypatch):
    if request.node.get_closest_marker("slow"):
        yield
        return

    def refused(*args, **kwargs):
        pytest.fail("it starts a process: mark it slow")

    for place, name in (
        *((subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start")),
        *((os, "fork"), (os, "posix_spawn")),
    ):
        monkeypatch.setattr(place, name, refused)
    before = frames_compiled()
    yield
    assert frames_compiled() == before, "it compiles: mark it slow"


@pytest.fixture(autouse=True)
def nothing_was_said_before():
    screen._warn.cache_clear()


@pytest.fixture(autouse=True)
def no_run_was_interrupted_before():
    peers.forget_interruption()


@pytest.fixture(autouse=True)
def eighty_columns_without_colors(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def clock(monkeypatch):
    """A clock for a run and for progress that stands still until a test moves it."""
    return fake_clock(monkeypatch)


@pytest.fixture
def no_state_of_accelerate_is_left():
    yield
    sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def back_once():
    """A hook that goes back once, at step 3, to a snapshot of step 1."""
    kept = []

    def back(state):
        if state.step == 1 and not kept:
            kept.append(fl.snapshot(state))
        elif state.step == 3 and len(kept) == 1:
            kept.append(None)
            return kept[0]
        return state

    return back
