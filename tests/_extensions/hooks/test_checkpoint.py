"""The hook checkpoint: when it saves, in the background or not, its names and arguments."""

import math
import os
import threading

import pytest
import torch
from sample_hooks import raise_at, stop_at
from saved import names
from toy_runs import ONE, fit

import fnloop as fl
from fnloop.testing import assert_same, stochastic, toy, toy_loss


def saves(folder, every=1, **settings):
    return fl.every(steps=every)(fl.checkpoint(folder, **settings))


def steps(*numbers):
    return [f"step-{n:08d}" for n in numbers]


def test_the_end_of_a_run_is_saved_for_any_reason(tmp_path):
    fit(saves(tmp_path / "a", 9), steps=3)
    assert names(tmp_path / "a") == steps(3)
    fit(saves(tmp_path / "b"), stop_at(1))
    restored = fl.resume(tmp_path / "b", toy())
    # A later hook stopped the run, and that is saved too
    assert (restored.step, restored.stop) == (1, "enough")
    assert names(tmp_path / "b") == steps(1)


@pytest.mark.parametrize("background", [False, True])
def test_saving_in_the_background_saves_the_same(tmp_path, background):
    problem = stochastic()
    step = fl.pipeline(fl.accumulate(2))(problem.loss_fn)
    hooks = (saves(tmp_path / name, keep=99, background=background) for name in "ab")
    given = {"step": step, "loaders": problem.batches, "epochs": 1}
    whole = fit(*hooks, state=problem.state(), **given)
    assert names(tmp_path / "a") == names(tmp_path / "b") == steps(*range(1, 5))
    for path in (tmp_path / "a").iterdir():
        assert_same(fit(state=fl.restore(path, problem.state(seed=9)), **given), whole)


def wait_for_the_writer(state):
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    return state


@pytest.mark.parametrize(("moment", "raised_at"), [
    (fl.every(steps=1), 2), (fl.every(steps=2), 3),  # at the next boundary after the writer failed
    (fl.when(lambda state: state.step == 1), 2),  # also if no save is due
])  # fmt: skip
def test_errors_in_the_background_are_raised(tmp_path, monkeypatch, moment, raised_at):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fnloop._extensions.checkpoints.files.write_files", full)
    hook = moment(fl.checkpoint(tmp_path, background=True))
    with pytest.raises(OSError, match="No space left") as error:
        fit(wait_for_the_writer, hook, train=9)
    assert error.value.state.step == raised_at


# --- the best


def test_a_save_between_evaluations_is_repeated_at_the_next_evaluation(tmp_path):
    values = iter([5.0, 1.0, 3.0, 5.0, 5.0])  # of the evaluations at 4, 8 and 10; and resumed
    loss = lambda m, x: m.w * x.mean() if m.training else torch.tensor(next(values))
    step, run = fl.pipeline()(loss), {"train": 10, "valid": 1, "evaluate_every": fl.every(steps=4)}
    hook = lambda name: saves(tmp_path / name, 3, keep=9, best="valid/loss")
    fit(hook("a"), step=step, **run)
    assert names(tmp_path / "a") == steps(3, 4, 6, 8, 9, 10)
    assert fl.best(tmp_path / "a").name == "step-00000008"
    with pytest.raises(KeyError):
        fit(hook("b"), raise_at(3), step=step, **run)
    fit(hook("b"), step=step, state=fl.resume(tmp_path / "b", toy()), steps=5, **run)
    assert "step-00000004" in names(tmp_path / "b")


FROM_THE_START = fl.at_start() | fl.every(epochs=1)  # when to evaluate


@pytest.mark.parametrize(("moment", "saved", "best"), [
    (fl.every(epochs=1), [1, 3], 1),  # it is not due at the start: nothing to rank there
    (fl.every(steps=2), [2, 3], 2), (FROM_THE_START, [0, 3], 0),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("background", [False, True])
def test_the_untrained_model_can_be_the_best(moment, saved, best, background, tmp_path):
    """The loss of valid is 0 at first, and rises with each update."""
    rising = {"train": [ONE], "valid": [-ONE]}
    settings = {"loaders": rising, "epochs": 3, "evaluate_every": FROM_THE_START}
    hook = moment(fl.checkpoint(tmp_path, keep=1, best="valid/loss", background=background))
    state = fit(hook, **settings)
    assert state.history["valid/loss"] == (0.0, 1.0, 2.0, 3.0)
    assert fl.best(tmp_path).name == f"step-{best:08d}" and names(tmp_path) == steps(*saved)
    back = fl.restore(fl.best(tmp_path), toy())
    assert (back.step, len(back.history)) == (best, best + 1)
    assert fit(state=back, **settings).history == state.history


@pytest.mark.parametrize("order", [1, -1], ids=["stop first", "checkpoint first"])
@pytest.mark.parametrize("keep", [1, 3])
def test_a_closing_record_of_another_loader_takes_no_metric_from_the_last_checkpoint(
    tmp_path, order, keep
):
    """A hook stops at the best evaluation, and "test" is evaluated at the end."""
    hook = saves(tmp_path, 2, keep=keep, best="valid/loss", named=("valid/loss",))
    loaders = {"train": [ONE] * 6, "valid": [ONE], "test": [ONE]}
    moments = {"valid": fl.every(steps=2), "test": fl.at_end()}
    state = fit(*(stop_at(4), hook)[::order], loaders=loaders, evaluate_every=moments)
    assert [(r.step, r.closing) for r in state.history] == [(2, False), (4, False), (4, True)]
    assert "valid/loss" not in state.history[-1].metrics
    assert fl.best(tmp_path).name == "step-00000004-valid-loss=-4"
    assert fl.restore(fl.best(tmp_path), toy()).history[-1].closing
    assert len(names(tmp_path)) == min(keep, 2)


# --- failures


def test_a_failed_run_is_saved_once_if_asked_for(tmp_path):
    with pytest.raises(KeyError):
        fit(raise_at(2), saves(tmp_path / "not", 2))
    assert fl.latest(tmp_path / "not") is None
    hook, failed = saves(tmp_path / "a", 2, on_exception=True), "step-00000002-exception_KeyError"
    with pytest.raises(KeyError):
        fit(raise_at(2), hook, train=6)
    assert names(tmp_path / "a") == [failed]
    state = fl.resume(tmp_path / "a", toy())
    assert (state.step, state.model.w.item()) == (2, -2.0)
    with pytest.raises(KeyError):
        fit(hook, raise_at(4), state=state, train=6)
    # Step 2 has its boundary, whose first hook had failed; step 4 was saved before the failure.
    assert names(tmp_path / "a") == ["step-00000002", failed, "step-00000004"]


def test_a_failure_after_going_back_is_saved_as_a_new_state(tmp_path):
    fit(saves(tmp_path, keep=None), train=6)
    hook = saves(tmp_path, 100, keep=None, on_exception=True)
    back = fl.restore(tmp_path / "step-00000002", toy())
    with pytest.raises(ValueError, match="no"):
        fit(raise_at(4, ValueError), hook, state=back, loaders=[2 * ONE] * 6)
    assert fl.restore(tmp_path / "step-00000004-exception_ValueError", toy()).model.w.item() == -6.0


# --- arguments


@pytest.mark.parametrize(("settings", "error", "message"), [
    ({"keep_best": 2}, ValueError, "ranks by nothing"),
    ({"mode": "max"}, ValueError, "ranks by nothing"),
    ({"since": "run"}, ValueError, "ranks by nothing"),
    ({"named": "valid/loss"}, TypeError, r"a tuple of metrics, such as \(\"valid/loss\",\); got"),
])  # fmt: skip
def test_wrong_arguments_are_errors_when_composing(settings, error, message):
    with pytest.raises(error, match=message):
        fl.checkpoint("a", **settings)


def test_a_relative_folder_is_fixed_when_the_hook_is_created(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = fl.checkpoint("rel/run", keep=9)
    move = fl.when(lambda state: state.step == 2)(lambda state: os.chdir("elsewhere") or state)
    fit(move, fl.every(steps=1)(hook))
    assert names(tmp_path / "rel" / "run") == steps(1, 2, 3, 4)
    assert names(tmp_path / "elsewhere") == []


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert fl.save(toy(w=2.0), "~/ck/a") == tmp_path / "ck" / "a"
    assert fl.restore("~/ck/a", toy()).model.w.item() == 2.0
    assert fl.resume("~/ck", toy()).model.w.item() == 2.0
    fit(saves("~/run"), fl.to_csv("~/a.csv"))
    assert names(tmp_path) == [".a.csv.run", "a.csv", "ck", "run"]


CALLS = {
    "save": lambda path: fl.save(toy(), path), "restore": lambda path: fl.restore(path, toy()),
    "resume": lambda path: fl.resume(path, toy()), "latest": fl.latest, "best": fl.best,
    "checkpoint": fl.checkpoint, "to_csv": fl.to_csv, "to_jsonl": fl.to_jsonl,
}  # fmt: skip


@pytest.mark.parametrize(("name", "path"), [
    *((name, "gs:/bucket") for name in CALLS),
    *((name, "s3://bucket/a") for name in ("to_csv", "to_jsonl")),
])  # fmt: skip
def test_an_argument_that_is_not_a_local_path_is_refused_by_name(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"(?s){name} .*disks of this machine; got '{path}'"):
        CALLS[name](path)
    assert names(tmp_path) == []


# --- metrics in the names, which nothing depends on

RATES = fl.schedule(lambda i, total: (1, 1, -1, -1, -1)[i])  # w is -1, -2, -1, 0, 1


def named(folder, state=None, train=1, epochs=5, **settings):
    hook = saves(folder, **{"named": ("valid/loss",), **settings})
    step = fl.pipeline(RATES)(toy_loss)
    return fit(hook, state=state, step=step, train=train, valid=1, epochs=epochs)


def test_names_show_metrics_and_the_newest_and_the_best_are_found(tmp_path):
    named(tmp_path, keep=1, best="valid/loss", named=("valid/loss", "train/loss"))
    best, newest = "2-valid-loss=-2-train-loss=-1", "5-valid-loss=1-train-loss=0"
    assert names(tmp_path) == [f"step-0000000{best}", f"step-0000000{newest}"]
    assert fl.best(tmp_path).name == f"step-0000000{best}"
    assert fl.latest(tmp_path).name == f"step-0000000{newest}"


@pytest.mark.parametrize(("name", "value", "shown"), [
    *(("value", value, f"value={value:.4g}") for value in (math.nan, math.inf, -1e-30, 0.43125)),
    ("top 5/é=(a)", 1.0, "top-5-a-=1"),  # what a disk or a shell could not take
])  # fmt: skip
def test_any_number_and_any_name_is_in_a_name(tmp_path, name, value, shown):
    number = fl.metric(**{name: lambda aux, batch: fl.Last(value)})
    hook, step = saves(tmp_path, keep=1, named=(f"valid/{name}",)), fl.pipeline(number)(toy_loss)
    fit(hook, step=step, train=1, valid=1, epochs=2)
    assert names(tmp_path) == [f"step-00000002-valid-{shown}"]


def test_names_that_no_disk_takes_are_refused_at_once(tmp_path):
    # A name has "step-00000001", and for each metric at most "-", its name, "=" and "-1.234e-300".
    longest, one_more = (f"x/{'a' * n}" for n in (185, 186))
    number = fl.measure(lambda state: {"a" * 185: -1.234e-300}, name="x")
    fit(number, saves(tmp_path, named=(longest,)), train=1, epochs=1)
    assert names(tmp_path) == [f"step-00000001-x-{'a' * 185}=-1.234e-300"]
    for names_of in ((one_more,), (longest, "b"), tuple(f"valid/class_{i}" * 3 for i in range(8))):
        with pytest.raises(ValueError, match="named of at most 200 characters"):
            saves(tmp_path, named=names_of)


def test_a_name_is_only_for_the_metrics_of_its_own_boundary(tmp_path):
    named(tmp_path / "a", train=2, epochs=1, keep=None)
    assert names(tmp_path / "a") == ["step-00000001", "step-00000002-valid-loss=-2"]
    # A hook stops the run in mid-epoch after the save, and a closing record is made.
    hook = saves(tmp_path / "b", keep=2, named=("valid/loss",))
    fit(hook, stop_at(3), valid=1)
    assert names(tmp_path / "b") == ["step-00000002", "step-00000003-valid-loss=-3"]
    # Others may be named after a resume.
    state = fl.resume(tmp_path / "a", toy())
    named(tmp_path / "a", state, keep=2, train=2, epochs=2, named=("train/loss",))
    assert names(tmp_path / "a") == ["step-00000003", "step-00000004-train-loss=-1.5"]


def test_what_killed_processes_left_is_used_and_removed(tmp_path):
    named(tmp_path, epochs=3, keep=2)
    half = tmp_path / ".step-00000002-valid-loss=-2.removing-0123456789ab"
    (tmp_path / "step-00000002-valid-loss=-2").rename(half)
    old = tmp_path / "step-00000003-valid-loss=-1"
    backup = old.rename(tmp_path / f".{old.name}.old")
    assert fl.resume(tmp_path, toy()).step == 3
    fl.save(fl.resume(tmp_path, toy()), old)
    named(tmp_path, fl.resume(tmp_path, toy()), epochs=4, keep=1)
    assert not backup.exists() and names(tmp_path) == ["step-00000004-valid-loss=0"]


def test_damaged_ones_are_ordered_by_their_steps(tmp_path):
    for name in ("step-00000002-valid-value=500", "step-00000001-valid-value=1000"):
        fl.save(toy(), tmp_path / name)
        (tmp_path / name / "manifest.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(fl.CheckpointError, match=r"step-00000002.*step-00000001"),
    ):
        fl.resume(tmp_path, toy())
