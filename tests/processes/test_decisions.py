"""Stops, signals and saves happen after the same update in all processes."""

import contextlib
import io
import math
import os
import signal
import time

import attrs
import pytest
from process_problems import (
    SIZE,
    Stream,
    entropy,
    fitted,
    loader,
    rank,
    samples,
    world,
)

import fnloop as fl
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow


class Long:
    """Slow batches of one sample. At one of them something happens in one process only."""

    def __init__(self, batches=400, pause=0.001):
        self.batches, self.pause = batches, pause

    def __len__(self):
        return self.batches * world()

    def __iter__(self):
        for n in range(len(self)):
            if n % world() == 0:
                time.sleep(self.pause)
            yield samples()[n % SIZE : n % SIZE + 1]


@attrs.frozen
class at_batch:
    """Send this process a signal at an update, if it is the last one of all."""

    update: int
    number: int

    def __call__(self, state):
        if state.step == self.update and rank() == world() - 1:
            os.kill(os.getpid(), self.number)
        return state


def decisions(folder):
    return {name: decide(folder / name) for name, decide in DECISIONS.items()}


def stop_early(folder):
    """Stop by the validation loss, which is the same everywhere."""
    return outcome(
        fitted(
            loader(),
            valid=loader(),
            epochs=50,
            hooks=(fl.early_stop("valid/loss", patience=2, min_delta=9.0),),
        )
    )


def terminate(folder):
    hooks = (fl.checkpoint(folder, keep=100), at_batch(20, signal.SIGTERM))
    state = fitted(Long(), hooks=(fl.every(steps=1000)(hooks[0]), hooks[1]))
    kept = sorted(path.name for path in folder.iterdir())
    on = fl.fit(fl.pipeline()(entropy), state, Long(), steps=state.step + 3, hooks=())
    return {**outcome(state), "kept": kept, "continued": on.step - state.step}


def terminate_group(folder, data):
    """SIGTERM reaches the workers of the loader too."""

    def kill(state):
        if state.step == 5 and rank() == world() - 1:
            os.killpg(0, signal.SIGTERM)
        return state

    return outcome(
        fitted(
            loader(data(), size=1, num_workers=2), epochs=100, hooks=(kill, fl.checkpoint(folder))
        )
    )


def save_then_stop(folder):
    """SIGTERM comes while the answer to SIGUSR1 is under way."""
    hooks = (
        fl.every(steps=1000)(fl.checkpoint(folder)),
        at_batch(20, signal.SIGUSR1),
        at_batch(21, signal.SIGTERM),
    )
    return outcome(fitted(Long(), hooks=hooks))


def save_and_continue(folder):
    state = fitted(
        Long(),
        hooks=(fl.every(steps=1000)(fl.checkpoint(folder, keep=100)), at_batch(20, signal.SIGUSR1)),
    )
    return {**outcome(state), "kept": sorted(path.name for path in folder.iterdir())}


def terminate_evaluation(folder):
    """SIGTERM comes to one process at the second of 400 rounds of an evaluation."""
    seen = []

    def loss_fn(model, batch):
        if not model.training:
            seen.append(0)
            if len(seen) == 2 and rank() == world() - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return entropy(model, batch)

    hooks = (fl.every(steps=1000)(fl.checkpoint(folder)),)
    state = fitted(loader(), valid=Long(), loss=loss_fn, hooks=hooks)
    kept = sorted(path.name for path in folder.iterdir())
    settings = {"hooks": (), "epochs": 1}
    resumed = fl.fit(fl.pipeline()(entropy), state, (loader(), loader()), **settings)
    assert_same(resumed, fitted(loader(), valid=loader()))
    return {**outcome(state), "kept": kept, "evaluated": len(seen)}


def requeue(folder):
    """SIGUSR1 comes to one process of a SLURM job."""
    folder.mkdir(exist_ok=True)
    script = folder / "scontrol"
    script.write_text(f"#!/bin/sh\necho $@ $(ls {folder}/run) >> {folder}/calls\n")
    script.chmod(0o755)
    before = dict(os.environ)
    os.environ["PATH"] = f"{folder}:{before['PATH']}"
    if rank() == 0:
        os.environ["SLURM_JOB_ID"] = "12"  # what the main process says counts
    saving = fl.every(steps=1000)(fl.checkpoint(folder / "run"))
    hooks = (at_batch(20, signal.SIGUSR1), saving, fl.requeue())
    state = fitted(Long(), hooks=hooks)
    os.environ.clear()
    os.environ.update(before)
    fl.gather(0)  # the main process has called it
    return {**outcome(state), "calls": (folder / "calls").read_text().splitlines()}


def clock(folder):
    due = []

    def note(state):
        due.append(state.step)
        return state

    slow = 0.002 if rank() else 0.001
    state = fitted(
        Long(pause=slow), hooks=(fl.every(seconds=0.2)(note),), evaluate_every=fl.every(seconds=0.3)
    )
    return {**outcome(state), "due": due, "records": [r.step for r in state.history]}


def main_alone(folder):
    called, file = [], io.StringIO()

    def note(state):
        called.append(state.step)
        return state

    table = fl.on_main(fl.to_csv(folder / "a.csv"))  # its begin needs all processes
    fitted(loader(), hooks=(fl.every(steps=2)(fl.on_main(note)), fl.progress(file=file), table))
    with (
        pytest.raises(ValueError, match="must return the state that it is given")
        if rank() == 0
        else contextlib.nullcontext()
    ):
        fl.on_main(lambda state: attrs.evolve(state, stop="now"))(fitted(loader()))
    return {"called": called, "lines": file.getvalue().count("train/loss")}


def nonfinite(folder):
    """NaN in the share of one process stops all."""

    def loss(model, batch):
        return entropy(model, batch)[0] * (math.nan if 40 in batch[3] else 1.0)

    return outcome(fitted(loader(), hooks=(fl.halt_on_nonfinite(steps=1),), loss=loss))


def close_at_target(folder):
    return closed(steps=3)


def close_by_a_stop(folder):
    return closed(
        hooks=(
            fl.when(lambda state: state.step == 3)(
                lambda state: attrs.evolve(state, stop="enough")
            ),
        )
    )


def closed(**settings):
    """End within an epoch with a record of training and evaluation, and resume."""
    state, whole = fitted(loader(), valid=loader(), **settings), fitted(loader(), valid=loader())
    kept = [
        [r.step, r.closing, r.metrics["train/loss"], r.metrics["valid/loss"]] for r in state.history
    ]
    evaluated = fl.evaluate(fl.pipeline()(entropy), state, loader())["loss"]
    state = fl.fit(
        fl.pipeline()(entropy),
        attrs.evolve(state, stop=None),
        (loader(), loader()),
        epochs=1,
        hooks=(),
    )
    assert_same(state, whole)
    return {**outcome(state), "kept": kept, "evaluated": evaluated}


DECISIONS = {
    "closing, at the target": close_at_target,
    "closing, by a stop": close_by_a_stop,
    "early stop": stop_early,
    "SIGTERM": terminate,
    "SIGTERM to all": lambda folder: terminate_group(folder, samples),
    "SIGTERM to all, of a stream": lambda folder: terminate_group(folder, Stream),
    "SIGUSR1": save_and_continue,
    "SIGUSR1, then SIGTERM": save_then_stop,
    "SIGTERM in an evaluation": terminate_evaluation,
    "requeue": requeue,
    "seconds": clock,
    "main": main_alone,
    "nonfinite": nonfinite,
}


def outcome(state):
    return {
        "counters": [state.step, state.epoch, state.batch],
        "stop": state.stop,
        "seconds": [r.seconds for r in state.history],
    }


@pytest.fixture(params=[2, 3])
def decided(request, launched):
    found = launched(decisions, request.param, forked=False)  # they are signalled
    for name in DECISIONS.keys() - {"main"}:
        assert all(mine[name] == found[0][name] for mine in found), name
    return found


def test_early_stop_is_the_same_everywhere(decided):
    assert decided[0]["early stop"]["stop"].startswith("early_stop: valid/loss has not improved")


def test_a_run_that_ends_between_two_records_appends_one(decided):
    one, two = (decided[0][f"closing, {why}"] for why in ("at the target", "by a stop"))
    ((step, closing, _, valid),) = one["kept"]
    assert (step, closing, valid) == (3, True, one["evaluated"])
    assert two["kept"] == one["kept"]


def test_a_signal_to_one_process_stops_all_after_the_same_update_and_saves_once(decided):
    found = decided[-1]["SIGTERM"]
    step = found["counters"][0]
    assert found["stop"] == "SIGTERM" and 20 <= step < 400
    assert found["kept"] == [f"step-{step:08d}"] and found["continued"] == 3


def test_a_signal_that_also_reaches_the_workers_stops_the_run_and_not_them(decided):
    for name in ("SIGTERM to all", "SIGTERM to all, of a stream"):
        assert decided[-1][name]["stop"] == "SIGTERM" and decided[-1][name]["counters"][0] >= 5


def test_a_signal_to_one_process_saves_once_and_the_run_continues(decided):
    found = decided[-1]["SIGUSR1"]
    assert found["stop"] is None and found["counters"] == [400, 1, 0]
    first, last = found["kept"]
    assert last == "step-00000400" and 20 <= int(first[5:]) < 400


def test_a_signal_after_another_is_not_lost(decided):
    found = decided[0]["SIGUSR1, then SIGTERM"]
    assert found["stop"] == "SIGTERM" and 21 <= found["counters"][0] < 400


def test_an_evaluation_is_abandoned_at_the_same_batch_in_all_processes(decided):
    found = decided[0]["SIGTERM in an evaluation"]
    assert found["stop"] == "SIGTERM" and found["counters"][1] == 0 and not found["seconds"]
    assert 2 <= found["evaluated"] < 400 and len(found["kept"]) == 1


def test_a_job_is_requeued_once_by_the_main_process_after_a_signal_to_one(decided):
    found = decided[0]["requeue"]
    step = found["counters"][0]
    assert found["stop"] == "SIGUSR1" and 20 <= step < 400
    assert found["calls"] == [f"requeue 12 step-{step:08d}"]


def test_seconds_are_due_at_the_same_update_in_all_processes(decided):
    found = decided[0]["seconds"]
    assert len(found["due"]) >= 2 and len(found["records"]) >= 2


def test_the_main_process_alone_prints(decided):
    main, *others = [mine["main"] for mine in decided]
    assert (
        main == {"called": [2, 4, 6, 8, 10, 12, 14][: len(main["called"])], "lines": 1}
        and len(main["called"]) >= 3
    )
    assert others == [{"called": [], "lines": 0}] * len(others)


def test_nan_in_one_process_stops_all(decided):
    assert decided[0]["nonfinite"]["stop"].startswith(
        "halt_on_nonfinite: the training loss became nan"
    )
