"""One thread, because results must not depend on the number of cores; and shared fixtures."""

import fcntl
import gc
import json
import os
import signal
import sys

import launch
import pytest
import torch
from fake_recorder import FakeRecorder
from fake_terminal import fake_clock

import fnloop as fl
from fnloop._middleware import compiled

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # no test pulls the plug; processes that tests start do flush
# How many seconds a DataLoader waits for a worker that does not end, before it terminates it.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us ignoring it


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


@pytest.fixture(autouse=True)
def eighty_columns_without_colors(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def clock(monkeypatch):
    """A clock for a run and for progress that stands still until a test moves it."""
    return fake_clock(monkeypatch)


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
