"""A SLURM job that is given back to its queue, by an ``scontrol`` that only notes its calls."""

import os
import signal

import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ONES = [torch.ones(1)] * 4
SCONTROL = """#!/bin/sh
echo "$@" $(ls {folder}/run) >> {folder}/calls
echo no such job >&2
exit {status}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Return a function that makes this process one of a SLURM job."""

    def begin(status=0, **variables):
        script = tmp_path / "scontrol"
        script.write_text(SCONTROL.format(folder=tmp_path, status=status))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for name, value in ({"JOB_ID": "12"} | variables).items():
            monkeypatch.setenv(f"SLURM_{name}", value)

    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return begin


def calls(folder):
    """Return the calls of scontrol, each with the checkpoints that were there by then."""
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def signalling(at, number=signal.SIGUSR1):
    def send(state):
        if state.step == at:
            os.kill(os.getpid(), number)
        return state

    return send


def job(folder, *hooks, epochs=3, loaders=ONES, **kwargs):
    """Run a script that resumes, as a job that may be requeued does."""
    saving = fl.every(epochs=1)(fl.checkpoint(folder / "run"))
    return fl.fit(
        fl.pipeline()(toy_loss),
        fl.resume(folder / "run", toy()),
        loaders,
        epochs=epochs,
        hooks=(*hooks, saving, fl.requeue()),
        **kwargs,
    )


@pytest.mark.slow
def test_sigusr1_saves_requeues_once_and_the_same_script_continues(slurm, tmp_path, caplog):
    slurm()
    caplog.set_level("INFO", "fnloop")
    state = job(tmp_path, signalling(2), signalling(2))
    assert (state.step, state.stop) == (2, "SIGUSR1")
    assert calls(tmp_path) == ["requeue 12 step-00000002"]  # it was saved before
    assert "the job 12 is in the queue again" in caplog.text
    state = job(tmp_path)
    assert (state.step, state.stop) == (12, None)
    assert_same(state, fl.fit(fl.pipeline()(toy_loss), toy(), ONES, epochs=3, hooks=()))
    assert len(calls(tmp_path)) == 1  # not at the end of the run


@pytest.mark.slow
def test_each_job_of_a_run_is_requeued(slurm, tmp_path):
    slurm()
    job(tmp_path, signalling(2))
    job(tmp_path, signalling(4), signalling(5))  # at the end of an epoch
    assert [call.split()[-1] for call in calls(tmp_path)] == ["step-00000002", "step-00000004"]


@pytest.mark.slow
def test_a_task_of_an_array_is_requeued_alone(slurm, tmp_path):
    slurm(JOB_ID="14", ARRAY_JOB_ID="12", ARRAY_TASK_ID="2")
    job(tmp_path, signalling(2))
    assert [call.split()[1] for call in calls(tmp_path)] == ["12_2"]


def test_a_run_at_its_target_is_not_requeued(slurm, tmp_path):
    slurm()
    assert job(tmp_path, signalling(12)).step == 12
    assert calls(tmp_path) == []
    job(tmp_path)
    assert calls(tmp_path) == []


@pytest.mark.slow
def test_a_run_of_phases_is_requeued_at_the_target_of_one(slurm, tmp_path):
    """The next phase is refused after an interruption, so that another job has to begin it."""
    slurm()
    state = job(tmp_path, signalling(4), epochs=1, phase="a")
    assert (state.step, state.stop, len(calls(tmp_path))) == (4, "SIGUSR1", 1)
    state = job(tmp_path, epochs=1, phase="a")
    state = fl.fit(fl.pipeline()(toy_loss), state, ONES, hooks=(), phase="b")
    assert (state.step, state.stop, len(calls(tmp_path))) == (8, None, 1)


@pytest.mark.slow
def test_a_sigterm_alone_does_not_requeue_but_one_that_comes_later_does_not_keep_it_from(
    slurm, tmp_path
):
    slurm()
    assert job(tmp_path, signalling(2, signal.SIGTERM)).stop == "SIGTERM"
    assert calls(tmp_path) == []
    state = job(tmp_path, signalling(4), signalling(4, signal.SIGTERM))
    assert (state.stop, len(calls(tmp_path))) == ("SIGUSR1", 1)


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_requeued(slurm, tmp_path, clock):
    slurm()
    limit = fl.time_limit(seconds=25, per="job")
    state = job(tmp_path, clock.takes(10), limit)
    assert (state.step, len(calls(tmp_path))) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fails", "is missing"])
def test_an_scontrol_that_fails_is_an_error_in_the_log_and_the_run_ends(
    slurm, tmp_path, caplog, monkeypatch, how
):
    slurm(status=1)
    if how == "is missing":
        monkeypatch.setenv("PATH", "")
    state = job(tmp_path, signalling(2))
    assert (state.step, state.stop) == (2, "SIGUSR1")
    assert fl.resume(tmp_path / "run", toy()).step == 2
    why = "exit status 1: no such job" if how == "fails" else "No such file"
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "'scontrol requeue 12' failed" in message and why in message
    assert "submit the job again" in message


def test_outside_of_slurm_it_says_so_and_the_run_only_saves(slurm, tmp_path, caplog):
    caplog.set_level("INFO", "fnloop")
    state = job(tmp_path, signalling(10))
    assert (state.step, state.stop) == (12, None)
    assert caplog.text.count("this is not a SLURM job") == 1
    assert "step-00000010" in [path.name for path in (tmp_path / "run").iterdir()]


@pytest.mark.parametrize("how", ["none", "after", "in part"])
def test_a_job_that_would_start_from_zero_each_time_is_refused(tmp_path, how):
    saving = fl.checkpoint(tmp_path / "a", only=("model",) if how == "in part" else None)
    hooks = {"none": (fl.requeue(),), "after": (fl.requeue(), saving)}
    with pytest.raises(ValueError, match=r"list checkpoint\(folder\) before it, of all parts"):
        chosen = hooks.get(how, (saving, fl.requeue()))
        fl.fit(fl.pipeline()(toy_loss), toy(), ONES, hooks=chosen)


def test_without_it_sigusr1_only_saves_in_a_job_too(slurm, tmp_path):
    slurm()
    hooks = (signalling(2), fl.checkpoint(tmp_path / "run"))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), ONES, hooks=hooks)
    assert (state.step, state.stop, calls(tmp_path)) == (4, None, [])


def test_it_shows_as_it_was_written():
    assert repr(fl.requeue()) == "requeue()"
