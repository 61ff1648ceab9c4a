"""A SLURM job that is given back to its queue, by an ``scontrol`` that only notes its calls."""

import os
from signal import SIGTERM, SIGUSR1

import pytest
from sample_hooks import signal_at
from toy_runs import fit

import fnloop as fl
from fnloop.testing import assert_same, toy

SCONTROL = """#!/bin/sh
echo "$@" $(ls {folder}/run) >> {folder}/calls
echo no such job >&2
exit {status}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):

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


def job(folder, *hooks, **run):
    """Run a script that resumes, as a job that may be requeued does."""
    saving = fl.every(epochs=1)(fl.checkpoint(folder / "run"))
    state = fl.resume(folder / "run", toy())
    return fit(*hooks, saving, fl.requeue(), state=state, **{"epochs": 3, **run})


@pytest.mark.slow
def test_sigusr1_saves_requeues_once_and_the_same_script_continues(slurm, tmp_path, caplog):
    slurm()
    caplog.set_level("INFO", "fnloop")
    state = job(tmp_path, signal_at(2, SIGUSR1), signal_at(2, SIGUSR1))
    assert (state.step, state.stop) == (2, "SIGUSR1")
    assert calls(tmp_path) == ["requeue 12 step-00000002"]  # it was saved before
    assert "the job 12 is in the queue again" in caplog.text
    job(tmp_path, signal_at(4, SIGUSR1), signal_at(5, SIGUSR1))  # at the end of an epoch
    saved = [call.split()[-1] for call in calls(tmp_path)]  # each job of a run is requeued
    assert saved == ["step-00000002", "step-00000004"]
    state = job(tmp_path)
    assert (state.step, state.stop) == (12, None)
    assert_same(state, fit(epochs=3))
    assert len(calls(tmp_path)) == 2  # not at the end of the run


@pytest.mark.slow
def test_a_run_of_phases_is_requeued_at_the_target_of_one(slurm, tmp_path):
    """The next phase is refused after an interruption, so that another job has to begin it."""
    slurm()
    state = job(tmp_path, signal_at(4, SIGUSR1), epochs=1, phase="a")
    assert (state.step, state.stop, len(calls(tmp_path))) == (4, "SIGUSR1", 1)
    state = fit(state=job(tmp_path, epochs=1, phase="a"), phase="b")
    assert (state.step, state.stop, len(calls(tmp_path))) == (8, None, 1)


@pytest.mark.slow
def test_a_sigterm_alone_does_not_requeue_but_one_that_comes_later_does_not_keep_it_from(
    slurm, tmp_path
):
    slurm()
    assert job(tmp_path, signal_at(2, SIGTERM)).stop == "SIGTERM"
    assert calls(tmp_path) == []
    state = job(tmp_path, signal_at(4, SIGUSR1), signal_at(4, SIGTERM))
    assert (state.stop, len(calls(tmp_path))) == ("SIGUSR1", 1)


@pytest.mark.slow
def test_a_job_whose_time_is_up_is_requeued_and_of_an_array_its_task_alone(slurm, tmp_path, clock):
    slurm(JOB_ID="14", ARRAY_JOB_ID="12", ARRAY_TASK_ID="2")
    state = job(tmp_path, clock.takes(10), fl.time_limit(seconds=25, per="job"))
    assert (state.step, [call.split()[1] for call in calls(tmp_path)]) == (3, ["12_2"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "why"), [
    ("fails", "exit status 1: no such job"), ("is missing", "No such file"),
])  # fmt: skip
def test_an_scontrol_that_fails_is_an_error_in_the_log_and_the_run_ends(
    slurm, tmp_path, caplog, monkeypatch, how, why
):
    slurm(status=1)
    if how == "is missing":
        monkeypatch.setenv("PATH", "")
    state = job(tmp_path, signal_at(2, SIGUSR1))
    assert (state.step, state.stop) == (2, "SIGUSR1")
    assert fl.resume(tmp_path / "run", toy()).step == 2
    (message,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert "'scontrol requeue 12' failed" in message and why in message
    assert "submit the job again" in message


def test_outside_of_slurm_it_says_so_and_the_run_only_saves(slurm, tmp_path, caplog):
    caplog.set_level("INFO", "fnloop")
    state = job(tmp_path, signal_at(10, SIGUSR1))
    assert (state.step, state.stop) == (12, None)
    assert caplog.text.count("this is not a SLURM job") == 1
    assert "step-00000010" in [path.name for path in (tmp_path / "run").iterdir()]


def test_a_job_that_would_start_from_zero_each_time_is_refused(tmp_path):
    saves, in_part = fl.checkpoint(tmp_path / "a"), fl.checkpoint(tmp_path / "a", only=("model",))
    for hooks in ((fl.requeue(),), (fl.requeue(), saves), (in_part, fl.requeue())):
        with pytest.raises(ValueError, match=r"list checkpoint\(folder\) before it, of all parts"):
            fit(*hooks)


def test_a_run_at_its_target_is_not_requeued_and_without_it_sigusr1_only_saves(slurm, tmp_path):
    slurm()
    assert job(tmp_path, signal_at(12, SIGUSR1)).step == 12
    assert calls(tmp_path) == []
    job(tmp_path)
    assert calls(tmp_path) == []
    state = fit(signal_at(2, SIGUSR1), fl.checkpoint(tmp_path / "other"))
    assert (state.step, state.stop, calls(tmp_path)) == (4, None, [])
