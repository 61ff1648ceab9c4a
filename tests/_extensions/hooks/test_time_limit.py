"""Limits on the time of a run and of a job, by a clock that a test moves."""

import os
import signal
import time

import pytest
from toy_runs import fit, timed

import fnloop as fl
from fnloop.testing import toy, toy_loss


def limited(clock, *hooks, seconds=10, **run):
    """Train for two epochs of four updates, each of which takes some seconds."""
    return fit(clock.takes(seconds), *hooks, **{"epochs": 2, **run})


def test_the_run_ends_after_the_update_in_which_its_time_is_up(clock):
    state = limited(clock, fl.time_limit(seconds=25))
    assert (state.step, state.stop) == (3, "time_limit: the run has taken its 25s")
    assert [record.closing for record in state.history] == [True]


def test_the_time_of_a_run_is_saved_and_a_raised_limit_continues(clock, tmp_path, caplog):
    def resumed():
        return fl.resume(tmp_path / "run", toy())

    saving = fl.checkpoint(tmp_path / "run")
    limited(clock, fl.time_limit(seconds=25), saving)
    assert resumed().slots["time_limit"] == [30.0]
    assert limited(clock, fl.time_limit(seconds=25), saving, state=resumed()).step == 3
    assert "nothing to do: the run was stopped (time_limit" in caplog.text
    assert "To continue, raise the limit: time_limit(...)" in caplog.text
    state = limited(clock, fl.time_limit(seconds=50), saving, state=resumed())
    assert (state.step, state.slots["time_limit"]) == (5, [50.0])


def test_a_job_has_its_time_again_and_makes_no_closing_record(clock):
    state = None
    for step, records in ((3, 0), (6, 1), (8, 2)):
        state = limited(clock, fl.time_limit(seconds=25, per="job"), state=state)
        stop = None if step == 8 else "time_limit: this job has taken its 25s"
        assert (state.step, state.stop, len(state.history)) == (step, stop, records)
    assert "time_limit" not in state.slots


def test_a_job_of_several_runs_has_one_limit(clock):
    limit = fl.time_limit(seconds=45, per="job")
    state = limited(clock, limit, epochs=1)
    clock.now += 1000  # between two runs
    assert limited(clock, limit, state=state).step == 5


@pytest.mark.parametrize("per", ["run", "job"])
def test_a_time_limit_does_not_end_a_phase(clock, per):
    state = limited(clock, fl.time_limit(seconds=25, per=per), phase="a")
    assert not state.phases[0].done
    state = limited(clock, fl.time_limit(seconds=1000, per=per), state=state, phase="a")
    assert (state.step, state.phases[0].done) == (8, True)


@pytest.mark.parametrize(("valid", "expected"), [(0, 12), (4, 4)])
def test_a_job_without_a_figure_ends_before_slurm_ends_it(clock, monkeypatch, valid, expected):
    """It leaves a minute and twice the longest time between two updates: 80 s of 200 s, which are
    left after 12 updates of 10 s; or 160 s, after the evaluation of 40 s that follows the fourth.
    """
    step, limit = timed(clock, 10.0, 10.0), lambda: fl.time_limit(per="job")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    state = fit(limit(), step=step, valid=valid, epochs=9)
    assert state.step == expected and state.stop.startswith("time_limit: this job ends in ")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 9000))  # the next job
    state = fit(limit(), step=step, valid=valid, state=state, epochs=4)
    assert (state.step, state.stop) == (16, None)


def test_a_job_without_an_end_has_no_limit_and_a_warning_says_so(clock, monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    state = limited(clock, fl.time_limit(per="job"), seconds=1e9)
    assert (state.step, state.stop) == (8, None)
    assert "SLURM_JOB_END_TIME is not set), so there is no limit" in caplog.text


@pytest.mark.parametrize("per", ["run", "job"])
def test_the_reason_of_an_earlier_hook_stays(clock, per):
    falls = fl.early_stop("valid/loss", mode="max", patience=1)
    hooks = falls, fl.time_limit(seconds=35, per=per)
    state = fit(*hooks, step=timed(clock, 10.0), train=2, valid=1, epochs=9)
    assert state.step == 4 and state.stop.startswith("early_stop: ")


def test_an_evaluation_that_a_signal_cuts_counts_too(clock):
    """Otherwise a job that is always ended there would never reach the limit of its run."""

    def cut(model, batch):
        if not model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, batch)

    step = fl.pipeline()(clock.timed(cut, train=10.0, valid=5.0))
    state = fit(fl.time_limit(seconds=60), step=step, train=1, valid=4, epochs=9)
    assert (state.step, state.stop, state.slots["time_limit"]) == (1, "SIGTERM", [15.0])


@pytest.mark.parametrize(("args", "message"), [
    ((), r"a time above 0, such as time_limit\(hours=8\)"),
    ((8,), r"time_limit\(8\) does not say .*: write time_limit\(hours=8\)"),
])  # fmt: skip
def test_a_limit_is_the_sum_of_its_parts_and_a_limit_without_a_unit_is_refused(args, message):
    assert fl.time_limit(hours=1, minutes=2, seconds=3).limit == 3723
    with pytest.raises((TypeError, ValueError), match=message):
        fl.time_limit(*args)
