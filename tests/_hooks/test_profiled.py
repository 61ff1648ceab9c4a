"""Profiles of some updates: a trace for each, and a table."""

import json

import pytest
import torch
from torch import profiler

import fnloop as fl
from fnloop.testing import toy, toy_loss

NUMBERS = [torch.tensor([float(n)]) for n in range(1, 9)]


def fit(hook, numbers=NUMBERS, members=(), loss_fn=toy_loss, state=None, **settings):
    step = fl.pipeline(*members)(loss_fn)
    return fl.fit(step, state or toy(), numbers, hooks=(hook,), **settings)


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
    state = fit(hook, epochs=2)
    assert traced(tmp_path / "new" / "traces") == {"3-to-5": 3}
    printed = capsys.readouterr().out
    assert printed.count("Self CPU time total") == 1
    assert "Optimizer.step#SGD.step" in printed and printed.endswith("-rank-0.pt.trace.json\n")
    assert state.model.w.item() == fit(lambda state: state, epochs=2).model.w.item()


def test_updates_of_this_process_count_and_skipped_ones_do_too(tmp_path):
    skips = fl.Middleware(
        "skips", forward=lambda step: lambda state, batch: leave_out(*step(state, batch), batch)
    )

    def leave_out(state, out, batch):
        return state, (fl.Output(out.loss, 1, {}, {}, "odd") if batch.item() % 2 else out)

    hook = fl.profiled(start=3, updates=4, folder=tmp_path)
    state = fit(hook, members=(skips,), steps=1)  # 1 and 2: too short
    assert traced(tmp_path) == {}
    fit(hook, members=(skips,), state=state, epochs=1)  # 3 to 8, of which 6 to 8 are measured
    assert traced(tmp_path) == {"4-to-6": 2}


def test_a_window_is_one_update(tmp_path):
    fit(fl.profiled(start=1, updates=2, folder=tmp_path), members=(fl.accumulate(2),))
    assert traced(tmp_path) == {"2-to-3": 2}


@pytest.mark.parametrize(("fails_at", "traces"), [(2, {}), (5, {"3-to-4": 2})])
def test_an_exception_ends_the_profile_and_writes_what_there_is(tmp_path, fails_at, traces):
    def loss_fn(model, batch):
        if batch.item() == fails_at:
            raise ZeroDivisionError
        return toy_loss(model, batch)

    with pytest.raises(ZeroDivisionError):
        fit(fl.on_main(fl.profiled(start=2, folder=tmp_path)), loss_fn=loss_fn)
    assert traced(tmp_path) == traces
    with profiler.profile(acc_events=True):  # no other one is active
        torch.ones(1)


def test_a_hook_may_be_used_again_and_prints_as_typed(tmp_path):
    hook = fl.profiled(start=1, updates=1, folder=tmp_path)
    fit(hook, steps=3)
    for path in tmp_path.iterdir():
        path.unlink()
    hook(fit(hook, steps=4))
    assert traced(tmp_path) == {"2-to-2": 1}
    assert repr(fl.profiled(folder="a")) == "profiled(folder='a')"
    assert repr(fl.profiled(5, 20, folder="a")) == "profiled(start=5, updates=20, folder='a')"


def test_wrong_settings_are_refused(tmp_path):
    for name in ("start", "updates"):
        with pytest.raises(ValueError, match=f"profiled expects {name} as an int >= 1"):
            fl.profiled(folder=tmp_path, **{name: 0})
    with pytest.raises(TypeError, match="profiled expects folder as a path"):
        fl.profiled(folder=None)
    with pytest.raises(TypeError, match="folder"):
        fl.profiled()
