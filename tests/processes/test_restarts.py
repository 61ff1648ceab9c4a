"""Jobs that are killed and restarted continue where they were."""

import os
import signal

import attrs
import launch
import pytest
import torch
from joined import come_to, rank, said
from process_data import batches, loader
from process_problems import created, entropy
from sample_hooks import stop_at
from streams import READ, Stream, train
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.testing import toy

pytestmark = pytest.mark.slow
CLIPPED = fl.pipeline(fl.clip(0.5))(entropy)
PLAIN = fl.pipeline()(entropy)
whole_stream = lambda: DataLoader(Stream(16, noisy=False), 2)


def restarting(folder, kills):
    """Train or resume. At each (step, rank) that was not reached before, that process is killed."""

    def bomb(state):
        mark = folder / f"killed at {state.step} by {rank()}"
        if [state.step, rank()] in kills and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return state

    state = fl.resume(folder / "saved", created())
    hooks = (fl.every(steps=2)(fl.checkpoint(folder / "saved", keep=2)), bomb)
    state = fl.fit(CLIPPED, state, loader(shuffle=True), epochs=4, hooks=hooks)
    return {**come_to(state), "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")}


@pytest.mark.long
def test_a_job_that_torchrun_restarts_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    expected = launch.results(tmp_path / "alone", 2, restarting, [])
    kills = [[9, 1], [18, 0]]
    by = (*launch.TORCHRUN, "--max-restarts", "2")
    found = launch.results(tmp_path / "killed", 2, restarting, kills, by=by, timeout=300)
    attempts = [[mine.pop("attempt") for mine in runs] for runs in (expected, found)]
    assert attempts == [["0"] * 2, ["2"] * 2]
    assert found == expected and expected[0]["counters"] == [28, 4, 0]


def test_a_sharded_loader_resumes_mid_epoch_on_the_same_number_of_processes_only(tmp_path):
    halt = {"hooks": (stop_at(2),)}
    fl.save(fl.fit(PLAIN, created(), fl.sharded(batches(6)), **halt), tmp_path / "one")
    fl.save(train(whole_stream(), steps=4), tmp_path / "stream")
    found = launch.results(tmp_path, 2, continue_sharded)
    assert [one.pop() for one in found] == [
        {
            "one to two": [[*range(8, 16)], True],  # of both processes: each reads the whole stream
            "shares": [[*range(8 * rank + 4, 8 * rank + 8)], True],
        }
        for rank in (0, 1)
    ]
    assert found == [["ValueError: this checkpoint was written in mid-epoch by 1 proc", 8, 7]] * 2
    READ.clear()
    two = fl.restore(tmp_path / "two", toy())
    assert two.batch == 4 and train(whole_stream(), two, epochs=1).batch == 0
    assert [*range(8, 16)] == READ
    again = attrs.evolve(fl.restore(tmp_path / "one", created()), stop=None)
    assert fl.fit(PLAIN, again, fl.sharded(batches(6)), hooks=()).step == 7


def continue_sharded(folder):
    def again(loader):
        state = attrs.evolve(fl.restore(folder / "one", created()), stop=None)
        return fl.fit(PLAIN, state, loader, epochs=1, hooks=())

    whole = again(batches(3))  # dealt
    on = fl.fit(PLAIN, whole, fl.sharded(batches(6)), epochs=2, hooks=())  # from an epoch's end
    said_of_shards = said(lambda: again(fl.sharded(batches(3))))[:62]
    return [said_of_shards, whole.step, on.step - whole.step, continue_streams(folder)]


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

    share = lambda: fl.sharded(DataLoader(Stream(8, noisy=False, first=8 * rank()), 2))
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
    n, first = 2 + rank(), 8 * rank()
    loaders = (
        lambda: fl.sharded([torch.tensor([i + 1.0 + 10 * rank()]) for i in range(n)]),
        lambda: fl.sharded(DataLoader(Stream(2 * n, noisy=False, first=first), 2)),
    )

    def reached(loader, cut=None):
        state = toy(lr=0.01)
        if cut is not None:
            fl.save(train(loader(), steps=cut), folder / "cut")
            state = fl.restore(folder / "cut", state)
        state = train(loader(), state, epochs=2)
        losses = [r.metrics["train/loss"] for r in state.history if not r.closing]
        return state.model.w.item(), state.step, losses

    return [[reached(loader, cut) for cut in (None, *range(1, 9))] for loader in loaders]
