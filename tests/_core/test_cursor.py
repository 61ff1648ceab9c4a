"""The cursor: where a run is, as checkpoints have it."""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._core.cursor import COUNTERS, Cursor
from fnloop.testing import assert_same, toy, toy_loss

BATCHES = [torch.ones(1)] * 3
STEP = fl.pipeline()(toy_loss)


def go(steps):
    return fl.fit(STEP, toy(), BATCHES, steps=steps, hooks=())


def test_it_says_where_a_run_is():
    cursor = Cursor.of(attrs.evolve(go(4), skipped=2))
    assert (cursor.step, cursor.epoch, cursor.batch) == (4, 1, 1)
    assert cursor.place == [6, 1, 1]
    assert cursor.position["batch"] == 1 and cursor.generators is not None
    assert Cursor.of(go(3)).generators is None  # an epoch begins with its seed alone


def test_it_comes_back_from_a_checkpoint_as_it_was(tmp_path):
    state = go(4)
    found = Cursor.of(fl.restore(fl.save(state, tmp_path / "a"), toy()))
    for name in (*COUNTERS, "position"):
        assert getattr(found, name) == getattr(Cursor.of(state), name), name
    assert repr(found.generators.to_parts()) == repr(state.generators.to_parts())


@pytest.mark.parametrize("name", COUNTERS)
def test_states_that_differ_in_a_counter_are_not_the_same(name):
    other = {"": 1} if name == "updates" else 7
    with pytest.raises(AssertionError, match=f"^{name}: "):
        assert_same(toy(), attrs.evolve(toy(), **{name: other}))
