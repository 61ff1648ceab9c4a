"""Checkpoints that were written before a state had the actions that come next.

The archive has one for each way to say what was left, written by 0.2; "in events" is how 0.1 said
it. Its model is that of ``toy``; batches of 1, 2 and 3 make w -1, -3 and -6.
"""

import zipfile
from pathlib import Path

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._hooks.hook import Hook
from fnloop.testing import toy, toy_loss

ARCHIVE = Path(__file__).with_name("checkpoints_of_before.zip")
LOADERS = {
    "train": [torch.tensor([x]) for x in (1.0, 2.0, 3.0)],
    "valid": [torch.tensor([-1.0])],
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


class Flushed(Hook):
    """Notes at which steps it is called, and where it is flushed."""

    def __init__(self):
        self.called, self.flushed = [], []

    def __call__(self, state):
        self.called.append(state.step)
        return state

    def flush(self, state):
        self.flushed.append(state.step)
        return state


def continued(path, **targets):
    hook, state = Flushed(), fl.restore(path, toy())
    state = fl.fit(fl.pipeline()(toy_loss), state, LOADERS, hooks=(hook,), **targets)
    records = [(r.step, r.closing, r.metrics.get("valid/loss")) for r in state.history]
    return state, records, hook


def test_one_in_mid_epoch_continues(before):
    state, records, hook = continued(before / "plain", epochs=1)
    assert (state.step, state.model.w.item(), hook.called) == (3, -6.0, [3])
    assert records == [(2, True, 3.0), (3, False, 6.0)]


@pytest.mark.parametrize("name", ["boundary", "boundary in events"])
def test_a_boundary_that_was_left_is_made(before, name):
    state, records, hook = continued(before / name, epochs=2)
    assert (state.step, state.model.w.item(), hook.called) == (6, -12.0, [3, 4, 5, 6])
    assert records == [(3, False, 6.0), (6, False, 12.0)]


@pytest.mark.parametrize("name", ["end", "end in events"])
def test_an_end_that_was_left_is_made(before, name):
    state, records, hook = continued(before / name, epochs=2)
    assert (state.step, state.stop, state.todo) == (2, "enough", ())
    assert (records, hook.called, hook.flushed) == ([(2, True, 3.0)], [], [2])
    state = attrs.evolve(fl.restore(before / name, toy()), stop=None)
    state = fl.fit(fl.pipeline()(toy_loss), state, LOADERS, epochs=1, hooks=())
    assert (state.step, [r.closing for r in state.history]) == (3, [False])


def test_a_last_save_that_was_left_is_made_once(before, tmp_path):
    state, records, hook = continued(before / "flush", epochs=1)
    assert (state.step, hook.called, hook.flushed) == (3, [], [3])
    assert records == [(3, False, 6.0)]
    _, _, hook = continued(fl.save(state, tmp_path / "again"), epochs=1)
    assert hook.flushed == []


def test_one_of_a_phase_and_an_average_continues(before):
    step, state = fl.pipeline(fl.ema(0.5))(toy_loss), toy()
    state = fl.restore(before / "phases", state)
    assert state.phases[0].done and state.todo == ()
    state = fl.fit(step, state, LOADERS, epochs=1, phase="b", hooks=())
    assert (state.step, state.model.w.item()) == (6, -12.0)
