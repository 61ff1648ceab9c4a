"""Profiles of some updates: a trace for each, and a table."""

import json

import pytest
import torch
from after_steps import skipping
from torch import profiler
from toy_runs import fit

import fnloop as fl
from fnloop.testing import toy_loss

NUMBERS = [torch.tensor([float(n)]) for n in range(1, 9)]


def train(*hooks, members=(), loss_fn=toy_loss, **run):
    return fit(*hooks, step=fl.pipeline(*members)(loss_fn), loaders=NUMBERS, **run)


def traced(folder):
    """Return the updates of each trace in a folder, by the end of its name."""
    found = {}
    for path in folder.iterdir():
        name = path.name.removesuffix("-rank-0.pt.trace.json").removeprefix("updates-")
        events = json.loads(path.read_text())["traceEvents"]
        steps = [e for e in events if e.get("name") == "Optimizer.step#SGD.step"]
        found[name] = len(steps)
    return found


def test_the_updates_after_the_first_ones_are_measured(tmp_path, capsys):
    hook = fl.profiled(start=2, updates=3, folder=tmp_path / "new" / "traces")
    state = train(hook, epochs=2)
    assert traced(tmp_path / "new" / "traces") == {"3-to-5": 3}
    printed = capsys.readouterr().out
    assert printed.count("Self CPU time total") == 1
    assert "Optimizer.step#SGD.step" in printed and printed.endswith("-rank-0.pt.trace.json\n")
    assert state.model.w.item() == train(epochs=2).model.w.item()


def test_updates_of_this_process_count_and_skipped_ones_do_too(tmp_path):
    hook = fl.profiled(start=3, updates=4, folder=tmp_path)
    skips = skipping(lambda batch, out: batch.item() % 2 == 1)
    state = train(hook, members=(skips,), steps=1)  # 1 and 2: too short
    assert traced(tmp_path) == {}
    train(hook, members=(skips,), state=state, epochs=1)  # 3 to 8, of which 6 to 8 are measured
    assert traced(tmp_path) == {"4-to-6": 2}


def test_a_window_is_one_update_and_a_hook_may_be_used_again(tmp_path):
    hook = fl.profiled(start=1, updates=2, folder=tmp_path)
    train(hook, members=(fl.accumulate(2),))
    assert traced(tmp_path) == {"2-to-3": 2}
    for path in tmp_path.iterdir():
        path.unlink()
    hook(train(hook, steps=4))
    assert traced(tmp_path) == {"2-to-3": 2}


@pytest.mark.parametrize(("fails_at", "traces"), [(2, {}), (5, {"3-to-4": 2})])
def test_an_exception_ends_the_profile_and_writes_what_there_is(tmp_path, fails_at, traces):
    def loss_fn(model, batch):
        if batch.item() == fails_at:
            raise ZeroDivisionError
        return toy_loss(model, batch)

    with pytest.raises(ZeroDivisionError):
        train(fl.on_main(fl.profiled(start=2, folder=tmp_path)), loss_fn=loss_fn)
    assert traced(tmp_path) == traces
    with profiler.profile(acc_events=True):  # no other one is active
        torch.ones(1)
