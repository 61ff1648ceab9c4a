"""A checkpoint hook writes each state once, even at the end of a run."""

import threading

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

step = fl.pipeline()(toy_loss)
BATCHES = [torch.ones(1)] * 4


def fingerprint(path):
    """Return two facts that change when a checkpoint is written again."""
    manifest = (path / "manifest.json").stat()
    return manifest.st_ino, manifest.st_mtime_ns


def fit_and_fingerprint(folder, *hooks, **settings):
    """Return the fingerprints of the last checkpoint at the last boundary and after the run."""
    hook, found = fl.checkpoint(folder, **settings), []

    def look(state):
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # the writer in the background
                thread.join()
        path = folder / f"step-{state.step:08d}"
        found[:] = [fingerprint(path)] if path.exists() else []
        return state

    state = fl.fit(step, toy(), BATCHES, epochs=1, hooks=(fl.every(steps=2)(hook), look, *hooks))
    assert fl.latest(folder).name == f"step-{state.step:08d}"
    return found, [fingerprint(fl.latest(folder))]


@pytest.mark.parametrize("background", [False, True])
def test_the_last_state_is_not_written_again_when_the_run_ends(tmp_path, background):
    before, after = fit_and_fingerprint(tmp_path, background=background)
    assert before == after


def test_the_last_state_is_written_again_if_a_later_hook_changes_it(tmp_path):
    """The change is part of the state, so the checkpoint contains it."""

    def change(state):
        return attrs.evolve(state, extra={"seen": state.step})

    before, after = fit_and_fingerprint(tmp_path, change)
    assert before != after and fl.resume(tmp_path, toy()).extra == {"seen": 4}


def test_the_last_state_is_written_at_the_end_if_the_hook_was_not_due(tmp_path):
    hook = fl.every(steps=3)(fl.checkpoint(tmp_path))
    fl.fit(step, toy(), BATCHES, epochs=1, hooks=(hook,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
