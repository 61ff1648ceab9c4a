"""Limits on the time of a run and of a job, by a clock that a test moves."""

import os
import signal
import time

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONES = [torch.ones(1)] * 4


def fit(state, clock, *hooks, seconds=10, loaders=ONES, **kwargs):
    """Train; each update takes these seconds."""

    settings = {"epochs": 2, **kwargs}
    return fl.fit(
        fl.pipeline()(toy_loss), state, loaders, hooks=(clock.takes(seconds), *hooks), **settings
    )


def test_the_run_ends_after_the_update_in_which_its_time_is_up(clock):
    state = fit(toy(), clock, fl.time_limit(seconds=25))
    assert (state.step, state.stop) == (3, "time_limit: the run has taken its 25s")
    assert [record.closing for record in state.history] == [True]


def test_a_limit_is_the_sum_of_its_parts():
    assert fl.time_limit(hours=1, minutes=2, seconds=3).limit == 3723
    assert repr(fl.time_limit(hours=1, per="job")) == "time_limit(hours=1, per='job')"


def test_the_time_of_a_run_is_saved_and_a_raised_limit_continues(clock, tmp_path, caplog):
    def resumed():
        return fl.resume(tmp_path / "run", toy())

    saving = fl.checkpoint(tmp_path / "run")
    fit(toy(), clock, fl.time_limit(seconds=25), saving)
    assert resumed().slots["time_limit"] == [30.0]
    assert fit(resumed(), clock, fl.time_limit(seconds=25), saving).step == 3
    assert "nothing to do: the run was stopped (time_limit" in caplog.text
    assert "To continue, raise the limit: time_limit(...)" in caplog.text
    state = fit(resumed(), clock, fl.time_limit(seconds=50), saving)
    assert (state.step, state.slots["time_limit"]) == (5, [50.0])


def test_a_job_has_its_time_again_and_makes_no_closing_record(clock):
    state = fit(toy(), clock, fl.time_limit(seconds=25, per="job"))
    assert (state.step, len(state.history)) == (3, 0)
    assert state.stop == "time_limit: this job has taken its 25s"
    state = fit(state, clock, fl.time_limit(seconds=25, per="job"))
    assert (state.step, state.stop) == (6, "time_limit: this job has taken its 25s")
    state = fit(state, clock, fl.time_limit(seconds=25, per="job"))
    assert (state.step, state.stop) == (8, None)
    assert "time_limit" not in state.slots


def test_a_job_of_several_runs_has_one_limit(clock):
    limit = fl.time_limit(seconds=45, per="job")
    state = fit(toy(), clock, limit, epochs=1)
    clock.now += 1000  # between two runs
    assert fit(state, clock, limit, epochs=2).step == 5


@pytest.mark.parametrize("per", ["run", "job"])
def test_a_time_limit_does_not_end_a_phase(clock, per):
    state = fit(toy(), clock, fl.time_limit(seconds=25, per=per), phase="a")
    assert not state.phases[0].done
    state = fit(state, clock, fl.time_limit(seconds=1000, per=per), phase="a")
    assert (state.step, state.phases[0].done) == (8, True)


@pytest.mark.parametrize(("loaders", "expected"), [(ONES, 12), ({"train": ONES, "valid": ONES}, 4)])
def test_a_job_without_a_figure_ends_before_slurm_ends_it(clock, monkeypatch, loaders, expected):
    """It leaves a minute and twice the longest time between two updates: 80 s of 200 s, which are
    left after 12 updates of 10 s; or 160 s, after the evaluation of 40 s that follows the fourth.
    """
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    loss_fn = clock.timed(toy_loss, train=10.0, valid=10.0)
    limit = fl.time_limit(per="job")
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, epochs=9, hooks=(limit,))
    assert state.step == expected and state.stop.startswith("time_limit: this job ends in ")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 9000))  # the next job
    limit = fl.time_limit(per="job")
    state = fl.fit(fl.pipeline()(loss_fn), state, loaders, epochs=4, hooks=(limit,))
    assert (state.step, state.stop) == (16, None)


def test_a_job_without_an_end_has_no_limit_and_a_warning_says_so(clock, monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    state = fit(toy(), clock, fl.time_limit(per="job"), seconds=1e9)
    assert (state.step, state.stop) == (8, None)
    assert "SLURM_JOB_END_TIME is not set), so there is no limit" in caplog.text


@pytest.mark.parametrize("per", ["run", "job"])
def test_the_reason_of_an_earlier_hook_stays(clock, per):
    step = fl.pipeline()(clock.timed(toy_loss, 10.0))
    loaders = ([torch.ones(1)] * 2, [torch.ones(1)])
    falls = fl.early_stop("valid/loss", mode="max", patience=1)
    hooks = (falls, fl.time_limit(seconds=35, per=per))
    state = fl.fit(step, toy(), loaders, epochs=9, hooks=hooks)
    assert state.step == 4 and state.stop.startswith("early_stop: ")


def test_evaluation_counts(clock):
    loss_fn = clock.timed(toy_loss, train=10.0, valid=10.0)
    loaders = {"train": ONES[:1], "valid": ONES[:2]}  # 30 seconds an epoch
    limit = fl.time_limit(seconds=60)
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, epochs=9, hooks=(limit,))
    assert (state.step, len(state.history)) == (2, 2)


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({}, TypeError, r"a time above 0, such as time_limit\(hours=8\)"),
    ({"hours": 0}, TypeError, "a time above 0"), ({"hours": -1}, ValueError, "hours"),
    ({"minutes": "ten"}, ValueError, "minutes"),
    ({"hours": 1, "per": "epoch"}, ValueError, "per"),
])  # fmt: skip
def test_wrong_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        fl.time_limit(**settings)


def test_a_time_without_its_unit_is_refused():
    with pytest.raises(
        TypeError, match=r"time_limit\(8\) does not say .*: write time_limit\(hours=8\)"
    ):
        fl.time_limit(8)


def test_an_evaluation_that_a_signal_cuts_counts_too(clock):
    """Otherwise a job that is always ended there would never reach the limit of its run."""

    def cut(model, batch):
        if not model.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return toy_loss(model, batch)

    loss_fn = clock.timed(cut, train=10.0, valid=5.0)
    limit, loaders = fl.time_limit(seconds=60), (ONES[:1], ONES)
    state = fl.fit(fl.pipeline()(loss_fn), toy(), loaders, epochs=9, hooks=(limit,))
    assert (state.step, state.stop, state.slots["time_limit"]) == (1, "SIGTERM", [15.0])
