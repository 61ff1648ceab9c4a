"""A checkpoint knows whether it is finite: NaN never pushes out the last good one."""

import contextlib
import json
import math
import re
import warnings

import numpy as np
import pytest
import torch
from crafted import craft
from safetensors.torch import save_file
from saved import ONE, names, saved_steps, sgd
from torch import nn
from toy_runs import STEP

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.testing import assert_same, toy, toy_loss

NAN, INF = math.nan, math.inf


def train(folder, state, steps, bad=(), **settings):
    """Train with a checkpoint after each update. After those of ``bad``, the weight is NaN."""

    def spoil(state):
        with torch.no_grad():
            state.model.w.fill_(NAN)
        return state

    hooks = (
        fl.when(lambda state: state.step in bad)(spoil),
        fl.every(steps=1)(fl.checkpoint(folder, **settings)),
    )
    return fl.fit(fl.pipeline()(toy_loss), state, [ONE], steps=steps, hooks=hooks)


@contextlib.contextmanager
def passed_over(*steps):
    """Check that these are passed over, each with one warning."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    said = "\n".join(str(warning.message) for warning in seen)
    found = re.findall(r"^passed over: .*step-0*(\d+) are not finite \(w in model", said, re.M)
    assert ([*map(int, found)], len(seen)) == ([*steps], len(steps))


# --- what is kept, and what is found


@pytest.mark.parametrize(("keep", "kept"), [(1, [2, 6]), (2, [2, 5, 6]), (5, [2, 3, 4, 5, 6])])
@pytest.mark.parametrize("background", [False, True])
def test_the_newest_that_is_finite_is_kept_besides(tmp_path, keep, kept, background):
    train(tmp_path, toy(), 6, bad=(3,), keep=keep, background=background)
    assert saved_steps(tmp_path) == kept


def test_nothing_is_kept_besides_where_the_newest_are_finite(tmp_path):
    train(tmp_path, toy(), 6, keep=2)
    assert saved_steps(tmp_path) == [5, 6]


def test_latest_and_resume_pass_over_what_is_not_finite(tmp_path):
    train(tmp_path, toy(), 6, bad=(5,))
    with passed_over(6, 5):
        assert fl.latest(tmp_path).name == "step-00000004"
    with passed_over(6, 5):
        state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (4, -4.0)
    assert math.isnan(fl.restore(tmp_path / "step-00000006", toy()).model.w.item())


def test_the_warning_names_the_caller(tmp_path):
    train(tmp_path, toy(), 2, bad=(2,))
    for find in (lambda: fl.latest(tmp_path), lambda: fl.resume(tmp_path, toy())):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            find()
        assert [warning.filename for warning in seen] == [__file__]


def test_nothing_is_said_of_what_is_older_than_the_newest_that_is_finite(tmp_path):
    train(tmp_path, toy(), 3, bad=(3,))
    with passed_over(3):
        state = fl.resume(tmp_path, toy())
    train(tmp_path, state, 4)  # which saves a step 3 that is finite, and 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fl.resume(tmp_path, toy()).model.w.item() == -4.0


def test_a_run_that_goes_back_ends_as_one_without_the_fault(tmp_path):
    whole = train(tmp_path / "whole", toy(), 6)
    train(tmp_path / "run", toy(), 5, bad=(4,))
    with passed_over(5, 4):
        state = fl.resume(tmp_path / "run", toy())
    assert_same(train(tmp_path / "run", state, 6, keep=2), whole)
    assert saved_steps(tmp_path / "run") == [5, 6]


def test_what_is_not_finite_is_never_the_best(tmp_path):
    """The losses are those of the weights before an update: 0, -1, -2, then NaN."""
    train(tmp_path, toy(), 5, bad=(3,), keep=1, best="train/loss")
    assert saved_steps(tmp_path) == [2, 5]
    train(tmp_path / "all", toy(), 5, bad=(3,), keep=9, best="train/loss")
    with passed_over(3):
        assert fl.best(tmp_path / "all").name == "step-00000002"


def test_where_none_is_finite_latest_and_best_are_none_and_resume_raises(tmp_path):
    train(tmp_path, toy(), 3, bad=(1,), best="train/loss")
    with passed_over(3, 2, 1):
        assert fl.latest(tmp_path) is None
    with passed_over(1):  # the others have no value
        assert fl.best(tmp_path) is None
    message = r"has 3 checkpoints, and none is valid: .*step-00000003 are not finite.*restore\(path"
    with passed_over(3, 2, 1), pytest.raises(fl.CheckpointError, match=message):
        fl.resume(tmp_path, toy())
    message = r"cannot be resumed: .*step-00000003 are not finite .*state = restore\(path, state\)"
    with pytest.raises(fl.CheckpointError, match=message):
        fl.resume(tmp_path / "step-00000003", toy())


def test_partial_checkpoints_know_it_too(tmp_path):
    train(tmp_path, toy(), 5, bad=(3,), keep=1, only=("model",))
    assert saved_steps(tmp_path) == [2, 5]
    with passed_over(5):
        assert fl.latest(tmp_path).name == "step-00000002"


def test_a_checkpoint_of_an_older_version_passes_for_finite(tmp_path):
    train(tmp_path, toy(), 2, bad=(2,))
    craft(tmp_path / "step-00000002", lambda made: made.pop("finite"))
    assert fl.latest(tmp_path).name == "step-00000002"
    assert fl.resume(tmp_path, toy()).step == 2


def test_one_warning_says_it_when_it_is_saved(tmp_path, caplog):
    train(tmp_path, toy(), 6, bad=(2, 4))
    said = [r.getMessage() for r in caplog.records if "NaN or inf" in r.getMessage()]
    assert len(said) == 1 and "in w: resume" in said[0] and "halt_on_nonfinite()" in said[0]


def test_a_search_continues_a_run_that_diverged(tmp_path):
    """Two updates are too much for float32: w is -6e38."""
    states = {"bad": lambda: toy(lr=3e38)}
    search = lambda: fl.search(
        STEP, states, [ONE] * 2, rungs=(1, 2), key="train/loss", mode="min", folder=tmp_path
    )
    for _ in range(2):
        assert len(search().histories["bad"]) == 2


# --- what counts


class Masked(nn.Module):
    """A weight, a frozen one, and a mask."""

    def __init__(self, w=1.0, frozen=1.0, mask=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, w]))
        self.frozen = nn.Parameter(torch.tensor([3.0, frozen]), requires_grad=False)
        self.register_buffer("mask", torch.tensor([4.0, mask]))
        self.register_buffer("count", torch.tensor(5))


@pytest.mark.parametrize(("given", "fault"), [
    ({}, None), ({"w": NAN}, "w"), ({"w": INF}, "w"), ({"w": -INF}, "w"), ({"mask": NAN}, "mask"),
    ({"mask": -NAN}, "mask"), ({"mask": -INF}, None), ({"mask": INF}, None),
    ({"frozen": -INF}, None), ({"frozen": NAN}, "frozen"), ({"w": 3e38}, None),
    ({"w": -3e38, "mask": INF}, None), ({"w": 1e-45}, None), ({"w": -0.0}, None),
])  # fmt: skip
def test_nan_counts_anywhere_in_a_model_and_inf_in_what_is_trained(tmp_path, given, fault):
    path = fl.save(sgd(Masked(**given)), tmp_path / "a")
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["finite"] is (fault is None)
    assert manifest["files"]["model.safetensors"].get("nonfinite") == fault


@pytest.mark.parametrize(("value", "finite"), [(NAN, False), (INF, True), (1.0, True)])
def test_nan_counts_in_an_optimizer_and_inf_does_not(tmp_path, value, finite):
    """An optimizer may begin a minimum at inf."""
    state = sgd(Masked(), momentum=0.5)
    state.optimizer.state[state.model.w]["momentum_buffer"] = torch.tensor([0.0, value])
    manifest = json.loads((fl.save(state, tmp_path / "a") / "manifest.json").read_text())
    assert manifest["finite"] is finite
    path = fl.save(state, tmp_path / "b", only=("model",))
    assert json.loads((path / "manifest.json").read_text())["finite"]


def test_nan_counts_in_an_average_and_not_in_metrics_or_extra(tmp_path):
    step = fl.pipeline(fl.ema(0.5))(toy_loss)
    state = fl.fit(step, toy(), [ONE], hooks=())
    state.extra["mine"] = torch.tensor(NAN)
    assert json.loads((fl.save(state, tmp_path / "a") / "manifest.json").read_text())["finite"]
    with torch.no_grad():
        state.slots["ema"]["w"].fill_(NAN)
    made = json.loads((fl.save(state, tmp_path / "b") / "manifest.json").read_text())
    assert (made["finite"], made["files"]["ema.safetensors"]["nonfinite"]) == (False, "w")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16,
                                   torch.complex64])  # fmt: skip
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF, None])
def test_each_place_of_a_file_is_looked_at(tmp_path, monkeypatch, dtype, bad):
    """Three tensors of eight numbers, among whole numbers, are read 32 bytes at a time."""
    monkeypatch.setattr(files, "PIECE", 32)
    path = tmp_path / "a.safetensors"
    for place in range(24):
        numbers = torch.linspace(-1, 1, 24, dtype=torch.float32).to(dtype)
        if bad is not None:
            numbers[place] = bad
        tensors = {
            f"{n}.{'learning' if n == 1 else 'mask'}": numbers[8 * n : 8 * n + 8].clone()
            for n in range(3)
        }
        whole = torch.full((3,), -1, dtype=torch.int64)  # whose bits are those of NaN
        save_file({**tensors, "first": whole, "last": whole.to(torch.int8)}, path)
        found = files.inspect_tensors(path, {"1.learning"})
        name = [*tensors][place // 8]
        counts = bad is not None and (math.isnan(bad) or name == "1.learning")
        assert found.get("nonfinite") == (name if counts else None)
        assert found["bytes"] == path.stat().st_size
        assert found["sha256"] == files.disk.checksum_of_file(path)


def test_nothing_is_copied_from_a_device_to_look_at_it(tmp_path, monkeypatch):
    """It is the file that is looked at, while its checksum is made."""
    monkeypatch.setattr(torch.Tensor, "isnan", None)
    monkeypatch.setattr(torch.Tensor, "isfinite", None)
    seen, frombuffer = [], np.frombuffer
    monkeypatch.setattr(np, "frombuffer", lambda *a: seen.append(len(a[0])) or frombuffer(*a))
    fl.save(sgd(Masked(), momentum=0.5), tmp_path / "a")
    assert sum(seen) == 3 * 8  # bytes; the optimizer has no state yet


def test_no_name_is_left_of_what_is_written(tmp_path):
    train(tmp_path, toy(), 3, bad=(2,), keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
