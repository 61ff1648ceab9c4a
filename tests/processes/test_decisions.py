"""Stops, signals and saves happen after the same update in all processes."""

import contextlib
import io
import os
import signal
import time
from unittest.mock import patch

import attrs
import pytest
from joined import rank, world
from process_data import SIZE, Stream, loader, samples
from process_problems import entropy, fitted
from sample_hooks import start_again

import fnloop as fl
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow
STEP = fl.pipeline()(entropy)
BATCHES = 400


class Long:
    """Slow batches of one sample. At one of them something happens in one process only."""

    def __init__(self, pause=0.001):
        self.pause = pause

    def __len__(self):
        return BATCHES * world()

    def __iter__(self):
        for n in range(len(self)):
            if n % world() == 0:
                time.sleep(self.pause)
            yield samples()[n % SIZE : n % SIZE + 1]


def at_update(update, number, send=os.kill):
    def hook(state):
        if state.step == update and rank() == world() - 1:
            send(os.getpid() if send is os.kill else 0, number)
        return state

    return hook


def saves(folder, keep=100):
    return fl.every(steps=1000)(fl.checkpoint(folder, keep=keep))


def outcome(state, folder=None):
    return {
        "counters": [state.step, state.epoch, state.batch],
        "stop": state.stop,
        "seconds": [r.seconds for r in state.history],
        "kept": sorted(path.name for path in folder.iterdir()) if folder else None,
    }


def terminate(folder):
    state = fitted(Long(), hooks=(saves(folder), at_update(20, signal.SIGTERM)))
    found = outcome(state, folder)
    with pytest.raises(SystemExit) as refused:  # another run
        fitted(Long())
    on = fl.fit(STEP, state, Long(), steps=state.step + 3, hooks=())
    return {**found, "status": refused.value.code, "continued": on.step - state.step}


def terminate_group(data):
    hooks = (at_update(5, signal.SIGTERM, os.killpg),)
    return lambda folder: outcome(
        fitted(loader(data(), size=1, num_workers=2), epochs=100, hooks=(*hooks, saves(folder)))
    )


def save_then_stop(folder):
    """SIGTERM comes while the answer to SIGUSR1 is under way."""
    signals = at_update(20, signal.SIGUSR1), at_update(21, signal.SIGTERM)
    return outcome(fitted(Long(), hooks=(saves(folder), *signals)))


def save_and_continue(folder):
    hooks = (saves(folder), at_update(20, signal.SIGUSR1))
    return outcome(fitted(Long(), hooks=hooks), folder)


def terminate_evaluation(folder):
    """SIGTERM comes to one process at the second of 400 rounds of an evaluation."""
    seen = []

    def loss_fn(model, batch):
        if not model.training:
            seen.append(0)
            if len(seen) == 2 and rank() == world() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return entropy(model, batch)

    state = fitted(loader(), valid=Long(), loss=loss_fn, hooks=(saves(folder),))
    found = {**outcome(state, folder), "evaluated": len(seen)}
    resumed = fl.fit(STEP, state, (loader(), loader()), epochs=1, hooks=())
    assert_same(resumed, fitted(loader(), valid=loader()))
    return found


def requeue(folder):
    """SIGUSR1 comes to one process of a SLURM job."""
    folder.mkdir(exist_ok=True)
    script = folder / "scontrol"
    script.write_text(f"#!/bin/sh\necho $@ $(ls {folder}/run) >> {folder}/calls\n")
    script.chmod(0o755)
    job = {} if rank() else {"SLURM_JOB_ID": "12"}  # what the main process says counts
    with patch.dict(os.environ, {"PATH": f"{folder}:{os.environ['PATH']}", **job}):
        hooks = (at_update(20, signal.SIGUSR1), saves(folder / "run"), fl.requeue())
        state = fitted(Long(), hooks=hooks)
    fl.gather(0)  # the main process has called it
    return {**outcome(state), "calls": (folder / "calls").read_text().splitlines()}


def clock(folder):
    due = []
    note = lambda state: due.append(state.step) or state
    hooks = (fl.every(seconds=0.2)(note),)
    data, often = Long(0.002 if rank() else 0.001), fl.every(seconds=0.3)
    state = fitted(data, hooks=hooks, evaluate_every=often)
    return {**outcome(state), "due": due, "records": [r.step for r in state.history]}


def pace(folder):
    """What a call takes on the main process counts: sqrt(2 * 0.02 * 1) = 0.2 seconds."""
    due = []
    note = lambda state: (time.sleep(0.2 if rank() else 0.02), due.append(state.step), state)[2]
    hooks = (fl.paced(failures_per_day=24 * 60 * 60)(note),)
    state = fitted(Long(0.002), hooks=hooks)
    costs = [value for mark, value in state.noted.items() if mark.endswith("cost")]
    return {**outcome(state), "due": due, "costs": costs}


def main_alone(folder):
    called, file = [], io.StringIO()
    note = lambda state: called.append(state.step) or state
    table = fl.on_main(fl.to_csv(folder / "a.csv"))  # its begin needs all processes
    fitted(loader(), hooks=(fl.every(steps=2)(fl.on_main(note)), fl.progress(file=file), table))
    refused = pytest.raises(ValueError, match="must return the state that it is given")
    with refused if rank() == 0 else contextlib.nullcontext():
        fl.on_main(lambda state: attrs.evolve(state, stop="now"))(fitted(loader()))
    return {"called": called, "lines": file.getvalue().count("train/loss")}


DECISIONS = {
    "SIGTERM": terminate,
    "SIGTERM to all": terminate_group(samples),
    "SIGTERM to all, of a stream": terminate_group(Stream),
    "SIGUSR1": save_and_continue,
    "SIGUSR1, then SIGTERM": save_then_stop,
    "SIGTERM in an evaluation": terminate_evaluation,
    "requeue": requeue,
    "seconds": clock,
    "paced": pace,
    "main": main_alone,
}


def decisions(folder):
    found = {}
    for name, decide in DECISIONS.items():
        start_again()
        found[name] = decide(folder / name)
    return found


@pytest.fixture(params=[2, 3])
def decided(request, launched):
    """What all processes have done alike, and what each has done of what the main one does."""
    found = launched(decisions, request.param, forked=False)  # their workers are signalled
    alone = [mine.pop("main") for mine in found]
    assert all(mine == found[0] for mine in found)
    return {**found[0], "main": alone}


def test_a_signal_to_one_process_stops_all_after_the_same_update_and_saves_once(decided):
    found = decided["SIGTERM"]
    step = found["counters"][0]
    assert found["stop"] == "SIGTERM" and 20 <= step < BATCHES
    assert found["kept"] == [f"step-{step:08d}"] and found["continued"] == 3
    assert found["status"] == 143  # in all of them
    found = decided["SIGUSR1, then SIGTERM"]  # it is not lost
    assert found["stop"] == "SIGTERM" and 21 <= found["counters"][0] < BATCHES
    for name in ("SIGTERM to all", "SIGTERM to all, of a stream"):  # it does not end the workers
        assert decided[name]["stop"] == "SIGTERM" and decided[name]["counters"][0] >= 5


def test_a_signal_to_one_process_saves_once_and_the_run_continues(decided):
    found = decided["SIGUSR1"]
    assert found["stop"] is None and found["counters"] == [BATCHES, 1, 0]
    first, last = found["kept"]
    assert last == "step-00000400" and 20 <= int(first[5:]) < BATCHES


def test_an_evaluation_is_abandoned_at_the_same_batch_in_all_processes(decided):
    found = decided["SIGTERM in an evaluation"]
    assert found["stop"] == "SIGTERM" and found["counters"][1] == 1 and not found["seconds"]
    assert 2 <= found["evaluated"] < BATCHES and len(found["kept"]) == 1


def test_a_job_is_requeued_once_by_the_main_process_after_a_signal_to_one(decided):
    found = decided["requeue"]
    step = found["counters"][0]
    assert found["stop"] == "SIGUSR1" and 20 <= step < BATCHES
    assert found["calls"] == [f"requeue 12 step-{step:08d}"]


def test_seconds_are_due_at_the_same_update_in_all_processes(decided):
    found = decided["seconds"]
    assert len(found["due"]) >= 2 and len(found["records"]) >= 2


def test_a_hook_that_is_paced_is_due_at_the_same_update_in_all_processes(decided):
    found = decided["paced"]
    assert found["due"][0] == 1 and len(found["due"]) >= 2
    assert 0.02 <= found["costs"][0] < 0.2


def test_the_main_process_alone_prints(decided):
    main, *others = decided["main"]
    assert main["lines"] == 1
    assert main["called"] == [2, 4, 6, 8, 10, 12, 14][: len(main["called"])] != []
    assert others == [{"called": [], "lines": 0}] * len(others)
