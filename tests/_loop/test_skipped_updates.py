"""Skipped updates count towards the length of a run, but not towards its schedules."""

import logging

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE, EMPTY = torch.ones(1), torch.ones(0)
# Three updates are applied. The second is skipped because its batch is empty.
BATCHES = [ONE, EMPTY, ONE, ONE]


def total_as_factor(step, total):
    return total


@pytest.mark.parametrize("steps", [1, 2, 3], ids="after {} updates".format)
def test_a_resume_after_skipped_updates_does_not_change_the_length_of_the_run(
    tmp_path, caplog, steps
):
    """Two epochs are planned as 8 updates. Each applied update subtracts 8."""
    step = fl.pipeline(fl.schedule(total_as_factor))(toy_loss)
    totals = []

    def note(state):
        totals.append(state.run.total_steps)
        return state

    def pause(state):
        return attrs.evolve(state, stop="pause")

    stop = fl.when(lambda state: state.step == steps)(pause)
    first = fl.fit(step, toy(lr=1.0), BATCHES, epochs=2, hooks=(note, stop), evaluate_every=None)
    assert (first.step, first.model.w.item()) == (steps, -8.0 * steps)
    resumed = fl.restore(fl.save(attrs.evolve(first, stop=None), tmp_path / "a"), toy(lr=1.0))
    with caplog.at_level(logging.WARNING, "fnloop"):
        last = fl.fit(step, resumed, BATCHES, epochs=2, hooks=(note,), evaluate_every=None)
    assert (last.step, last.skipped, last.model.w.item()) == (6, 2, -48.0)
    assert set(totals) == {8} and not caplog.records


def test_a_schedule_counts_only_applied_updates():
    """The second batch is empty. The factors of the others are 1, 2 and 3."""
    scheduled = fl.pipeline(fl.schedule(lambda i, total: i + 1))(toy_loss)
    state = fl.fit(scheduled, toy(), [ONE, EMPTY, ONE, ONE], hooks=())
    assert (state.step, state.skipped, state.model.w.item()) == (3, 1, -6.0)
