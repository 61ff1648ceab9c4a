"""Jobs that are killed and restarted continue where they were."""

import os
import signal
import time

import attrs
import launch
import pytest
import torch
import torch.distributed as dist
from process_problems import (
    batches,
    come_to,
    created,
    default_dtype,
    difference,
    entropy,
    loader,
    network,
    rank,
    said,
)
from streams import READ, Stream, train
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.testing import toy

pytestmark = pytest.mark.slow


def enduring(folder, pause=0.05):
    """Train on, and save every second update; note where it is."""

    def note(state):
        (folder / f"at-{state.step}").touch()
        time.sleep(pause)
        return state

    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = network()
        state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)
        state = fl.resume(folder / "saved", state)
        hooks = (fl.every(steps=2)(fl.checkpoint(folder / "saved")), fl.on_main(note))
        began = state.step
        state = fl.fit(
            fl.pipeline(fl.clip(0.5))(entropy), state, loader(shuffle=True), epochs=4, hooks=hooks
        )
    return {"began": began, **come_to(state)}


def test_a_killed_run_resumes_on_2_and_3_and_1(tmp_path):
    for n, until in ((1, 6), (2, 14), (3, 20)):
        launched = launch.launch(
            *(tmp_path / "run", n, enduring),
            kill_when=tmp_path / "run" / f"at-{until}",
            forked=True,
        )
        assert launched.codes == [-signal.SIGKILL] * n, launched.errors
    (found,) = launch.results(tmp_path / "run", 1, enduring)
    (tmp_path / "whole").mkdir()
    expected = enduring(tmp_path / "whole", pause=0)
    assert found["began"] >= 18 and found["counters"] == expected["counters"] == [28, 4, 0]
    assert difference(expected["weights"], found["weights"]) < 1e-12
    assert difference(expected["history"], found["history"]) < 1e-12


def restarting(folder, kills, joined_before=False):
    """Train or resume. At each (step, rank) that was not reached before, that process is killed."""
    if joined_before:
        dist.init_process_group("gloo")

    def bomb(state):
        mark = folder / f"killed at {state.step} by {rank()}"
        if [state.step, rank()] in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return state

    torch.manual_seed(0)
    train, step = loader(shuffle=True), fl.pipeline(fl.clip(0.5))(entropy)
    state = fl.resume(folder / "saved", created())
    hooks = (fl.every(steps=2)(fl.checkpoint(folder / "saved", keep=2)), bomb)
    state = fl.fit(step, state, train, epochs=4, hooks=hooks)
    return {**come_to(state), "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT")}


def restarted(folder, kills, *arguments, environment=None, launcher=launch.TORCHRUN):
    """Kill a job of two processes that torchrun restarts, and return its result."""
    by = (*launcher, "--max-restarts", str(len(kills)))
    found = launch.launch(
        folder,
        2,
        restarting,
        kills,
        *arguments,
        by=by,
        timeout=120 + 30 * len(kills),
        environment=environment,
    )
    assert found.codes == [0], "\n".join(found.errors)
    assert [one.pop("attempt") for one in found.results] == [str(len(kills))] * 2
    return found.results


def test_a_job_that_torchrun_restarts_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    expected = launch.results(tmp_path / "alone", 2, restarting, [])
    assert expected[0].pop("attempt") is expected[1].pop("attempt") is None
    assert expected[0]["counters"] == [28, 4, 0]
    assert restarted(tmp_path / "killed", [[9, 1], [18, 0]]) == expected


def test_a_sharded_loader_resumes_mid_epoch_on_the_same_number_of_processes_only(tmp_path):
    def state():
        return created()

    def halt(state):
        return attrs.evolve(state, stop="half") if state.step == 2 else state

    step = fl.pipeline()(entropy)
    fl.save(fl.fit(step, state(), fl.sharded(batches(6)), hooks=(halt,)), tmp_path / "one")
    fl.save(train(whole_stream(), steps=4), tmp_path / "stream")
    found = launch.results(tmp_path, 2, continue_sharded)
    assert [one.pop() for one in found] == [
        {
            "one to two": [[*range(8, 16)], True],  # of both processes: each reads the whole stream
            "shares": [[8 * rank + 4, 8 * rank + 5, 8 * rank + 6, 8 * rank + 7], True],
        }
        for rank in (0, 1)
    ]
    assert found == [["ValueError: this checkpoint was written in mid-epoch by 1 proc", 8, 7]] * 2
    READ.clear()
    two = fl.restore(tmp_path / "two", toy())
    assert two.batch == 4 and train(whole_stream(), two, epochs=1).batch == 0
    assert [*range(8, 16)] == READ
    again = attrs.evolve(fl.restore(tmp_path / "one", state()), stop=None)
    assert fl.fit(step, again, fl.sharded(batches(6)), hooks=()).step == 7


def continue_sharded(folder):
    def again(loader):
        state = attrs.evolve(fl.restore(folder / "one", created()), stop=None)
        return fl.fit(fl.pipeline()(entropy), state, loader, epochs=1, hooks=())

    whole = again(batches(3))  # dealt
    on = fl.fit(
        fl.pipeline()(entropy), whole, fl.sharded(batches(6)), epochs=2, hooks=()
    )  # from the end of an epoch
    said_of_shards = said(lambda: again(fl.sharded(batches(3))))[:62]
    return [said_of_shards, whole.step, on.step - whole.step, continue_streams(folder)]


def whole_stream():
    return DataLoader(Stream(16, noisy=False), 2)


def continue_streams(folder):
    """Return what is read to continue a stream, and whether the numbers are as without that."""
    found = {}
    state = fl.restore(folder / "stream", toy())
    READ.clear()
    state = train(whole_stream(), state, epochs=1)
    read = [*READ]
    again = attrs.evolve(fl.restore(folder / "stream", toy()), position=None)
    again = train(whole_stream(), again, epochs=1)
    found["one to two"] = [read, state.model.w.item() == again.model.w.item()]

    def share():
        return fl.sharded(DataLoader(Stream(8, noisy=False, first=8 * rank()), 2))

    whole = train(share(), epochs=1)
    fl.save(train(share(), steps=2), folder / "shares")
    READ.clear()
    resumed = train(share(), fl.restore(folder / "shares", toy()), epochs=1)
    found["shares"] = [[*READ], resumed.model.w.item() == whole.model.w.item()]
    fl.save(train(whole_stream(), steps=2), folder / "two")
    return found


def test_a_run_continues_where_a_short_share_has_ended(tmp_path):
    """The shares have two, three and four batches. Each cut is resumed from a checkpoint."""
    for found in launch.results(tmp_path, 3, continue_uneven_shares):
        for whole, *resumed in found:
            assert [*resumed] == [whole] * 8


def continue_uneven_shares(folder):
    """Return what runs that were cut after each update reach, after that of a whole one."""
    n = 2 + rank()

    def as_list():
        return fl.sharded([torch.tensor([i + 1.0 + 10 * rank()]) for i in range(n)])

    def as_stream():
        return fl.sharded(DataLoader(Stream(2 * n, noisy=False, first=8 * rank()), 2))

    def reached(loader, cut=None):
        state = toy(lr=0.01)
        if cut is not None:
            fl.save(train(loader(), steps=cut), folder / "cut")
            state = fl.restore(folder / "cut", state)
        state = train(loader(), state, epochs=2)
        losses = [r.metrics["train/loss"] for r in state.history if not r.closing]
        return state.model.w.item(), state.step, losses

    return [
        [reached(loader, cut) for cut in (None, *range(1, 9))] for loader in (as_list, as_stream)
    ]
