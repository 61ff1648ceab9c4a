"""The order in which a program names the phases of its run, and those that it passes over."""

import logging

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONES = [torch.ones(1)]
PLAIN = fl.pipeline()(toy_loss)


def fit(state, *names, steps=1):
    for name in names:
        state = fl.fit(PLAIN, state, ONES, hooks=(), phase=name, steps=steps)
    return state


def began(state):
    return [phase.name for phase in state.phases]


@pytest.fixture
def restored(tmp_path):
    """Return a function that restores the end of the phases a and b, as another process does."""
    path = fl.save(fit(toy(), "a", "b"), tmp_path / "ab")
    return lambda: fl.restore(path, toy())


def test_a_phase_that_was_inserted_before_one_that_had_ended_is_refused(restored, caplog):
    state = fit(restored(), "a", "new")  # it cannot be known yet
    assert began(state) == ["a", "b", "new"]
    assert "'new' begins where 'b' ended, which this program has not named" in caplog.text
    message = (
        "this program names 'new' before 'b', but in this run 'b' had ended when 'new' began, at "
        r"step 2. To keep the run, write fit\(..., phase='b'\) before fit\(..., phase='new'\)"
    )
    with pytest.raises(ValueError, match=message):
        fit(state, "b")
    with pytest.raises(ValueError, match=message):  # at once, not at the first epoch
        fl.run(PLAIN, state, ONES, hooks=(), phase="b")


def test_so_it_is_when_the_script_is_started_again(restored, tmp_path):
    path = fl.save(fit(restored(), "a", "new"), tmp_path / "abn")
    with pytest.raises(ValueError, match="out of order"):
        fit(fl.restore(path, toy()), "a", "new", "b")
    assert began(fit(fl.restore(path, toy()), "a", "b", "new", "c")) == ["a", "b", "new", "c"]


@pytest.mark.parametrize(
    "names",
    [
        "abc",  # the script, started again
        "aabbcc",  # cells of a notebook, each run twice
        "abcabc",  # all cells, run twice
        "abacbc",  # an earlier cell again
        "bc",  # a script that does not name the first
        "c",  # a second script
        "cc",
        "bbcb",
    ],
)
@pytest.mark.parametrize("kept", [True, False])
def test_a_script_a_resumed_run_and_a_cell_that_is_run_twice_are_in_order(
    names, kept, restored, caplog
):
    state = restored()
    for name in names:
        state = fit(state, name)
        state = fl.snapshot(state) if kept else state
    assert (began(state), state.step) == (["a", "b", "c"], 3)
    assert "has not named" not in caplog.text


def test_a_phase_that_is_no_longer_in_the_script_is_only_a_warning(restored, caplog):
    assert began(fit(restored(), "a", "c", "d", "a", "c")) == ["a", "b", "c", "d"]
    assert [r.levelname for r in caplog.records if "has not named" in r.message] == ["WARNING"]


def test_what_a_script_passes_over_on_its_way_is_not_a_warning(restored, caplog):
    caplog.set_level(logging.INFO, "fnloop")

    def told(state, name):
        caplog.clear()
        fit(state, name)
        return [(r.levelname, r.message) for r in caplog.records]

    passed = "fit: nothing to do: the phase 'a' has ended"
    assert told(restored(), "a") == [("INFO", passed)]
    assert told(fit(restored(), "a"), "a") == [("WARNING", passed)]  # a cell, run twice
    assert told(restored(), "b") == [("WARNING", passed.replace("'a'", "'b'"))]  # the end of it


def test_the_names_that_a_program_has_given_are_not_saved(restored):
    state = fit(toy(), "a", "b")
    assert [phase.named for phase in state.phases] == [True, True]
    assert [phase.named for phase in restored().phases] == [False, False]
    assert state.phases == restored().phases
