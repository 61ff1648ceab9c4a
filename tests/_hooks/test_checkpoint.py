"""The hook checkpoint: when it saves, in the background or not, and its arguments."""

import os
import threading

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, stochastic, toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def train(folder, state, steps, every=1, **settings):
    hook = fl.every(steps=every)(fl.checkpoint(folder, **settings))
    return fl.fit(step, state, [ONE] * 100, steps=steps, hooks=(hook,))


def test_the_end_of_a_run_is_saved_for_any_reason(tmp_path):
    fl.fit(
        step, toy(), [ONE] * 5, steps=3, hooks=(fl.every(epochs=9)(fl.checkpoint(tmp_path / "a")),)
    )
    assert names(tmp_path / "a") == ["step-00000003"]
    stop = lambda state: attrs.evolve(state, stop="enough")
    fl.fit(step, toy(), [ONE] * 5, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path / "b")), stop))
    restored = fl.resume(tmp_path / "b", toy())
    # A later hook stopped the run, and that is saved too
    assert (restored.step, restored.stop) == (1, "enough")
    assert names(tmp_path / "b") == ["step-00000001"]


@pytest.mark.parametrize("background", [False, True])
def test_saving_in_the_background_saves_the_same(tmp_path, background):
    problem = stochastic()
    make = fl.pipeline(fl.accumulate(2))(problem.loss_fn)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=99, background=background))
    whole = fl.fit(make, problem.state(), problem.batches, epochs=2, hooks=(saves,))
    assert len(names(tmp_path)) == 8
    for name in names(tmp_path):
        resumed = fl.restore(tmp_path / name, problem.state(seed=9))
        resumed = (
            fl.fit(make, resumed, problem.batches, epochs=2, hooks=())
            if resumed.step < 8
            else resumed
        )
        assert_same(resumed, whole)


def full(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_errors_in_the_background_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("fnloop._hooks.keep.write_checkpoint", full)
    with pytest.raises(OSError, match="No space left") as error:
        fl.fit(
            step,
            toy(),
            [ONE] * 9,
            hooks=(fl.every(steps=2)(fl.checkpoint(tmp_path, background=True)),),
        )
    assert error.value.state.step in (3, 4)  # at the next boundary after the writer failed


def test_errors_in_the_background_are_raised_even_if_no_save_is_due(tmp_path, monkeypatch):
    monkeypatch.setattr("fnloop._hooks.keep.write_checkpoint", full)

    def wait(state):
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        return state

    first = fl.when(lambda state: state.step == 1)
    with pytest.raises(OSError, match="No space left") as error:
        fl.fit(
            step, toy(), [ONE] * 9, hooks=(wait, first(fl.checkpoint(tmp_path, background=True)))
        )
    assert error.value.state.step == 2


def test_two_hooks_in_the_background_write_to_two_folders(tmp_path):
    hooks = [
        fl.every(steps=1)(fl.checkpoint(tmp_path / name, keep=9, background=True)) for name in "ab"
    ]
    fl.fit(step, toy(), [ONE] * 5, hooks=hooks)
    assert len(names(tmp_path / "a")) == len(names(tmp_path / "b")) == 5


def test_changes_by_a_later_hook_at_the_last_boundary_are_saved(tmp_path):
    note = lambda state: attrs.evolve(state, extra={"n": state.step})
    fl.fit(step, toy(), [ONE] * 3, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path)), note))
    assert fl.resume(tmp_path, toy()).extra == {"n": 3}


def test_an_unknown_best_metric_is_an_error_that_names_the_known_ones(tmp_path):
    # The hook before it might add metrics.
    hooks = (lambda state: state, fl.every(epochs=1)(fl.checkpoint(tmp_path, best="valid/losses")))
    with pytest.raises(
        KeyError, match="no metric 'valid/losses'; there are: train/loss, train/lr, valid/loss"
    ) as error:
        fl.fit(step, toy(), ([ONE] * 2, [ONE]), epochs=3, hooks=hooks)
    assert error.value.state.epoch == 1


@pytest.mark.parametrize(("make", "error", "message"), [
    (lambda: fl.checkpoint("a", keep=0), ValueError, "keep as an int >= 1"),
    (lambda: fl.checkpoint("a", keep_best=0), ValueError, "keep_best as an int >= 1"),
    (lambda: fl.checkpoint("a", keep_best=2), ValueError, "ranks by nothing"),
    (lambda: fl.checkpoint("a", mode="max"), ValueError, "ranks by nothing"),
    (lambda: fl.checkpoint("a", since="run"), ValueError, "ranks by nothing"),
    (lambda: fl.checkpoint("a", best=3), TypeError, 'such as "valid/loss"'),
    (lambda: fl.checkpoint("a", mode="lowest"), ValueError, 'mode expects "min"'),
])  # fmt: skip
def test_wrong_arguments_are_errors_when_composing(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_relative_folder_is_fixed_when_the_hook_is_created(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    hook = fl.checkpoint("rel/run", keep=9)

    def move(state):
        if state.step == 2:
            os.chdir(tmp_path / "elsewhere")
        return state

    fl.fit(step, toy(), [ONE] * 4, hooks=(move, fl.every(steps=1)(hook)))
    assert names(tmp_path / "rel" / "run") == [f"step-{n:08d}" for n in (1, 2, 3, 4)]
    assert repr(hook) == "checkpoint('rel/run', keep=9)" and names(tmp_path / "elsewhere") == []


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert fl.save(toy(w=2.0), "~/ck/a") == tmp_path / "ck" / "a"
    assert (
        fl.restore("~/ck/a", toy()).model.w.item() == fl.resume("~/ck", toy()).model.w.item() == 2.0
    )
    train("~/run", toy(), 1)
    fl.fit(step, toy(), [ONE], hooks=(fl.to_csv("~/a.csv"),))
    assert names(tmp_path) == [".a.csv.run", "a.csv", "ck", "run"]


CALLS = {
    "save": lambda path: fl.save(toy(), path),
    "restore": lambda path: fl.restore(path, toy()),
    "resume": lambda path: fl.resume(path, toy()),
    "latest": fl.latest,
    "best": fl.best,
    "checkpoint": fl.checkpoint,
    "to_csv": fl.to_csv,
    "to_jsonl": fl.to_jsonl,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("path", "error", "message"), [
    ("", ValueError, "got an empty one"),
    ("s3://bucket/a", ValueError, "disks of this machine; got 's3://bucket/a'"),
    ("gs:/bucket", ValueError, "disks of this machine"), (5, TypeError, "such as .*; got 5"),
    (b"runs", TypeError, "such as .*; got b'runs'"), (None, TypeError, "got None"),
])  # fmt: skip
def test_an_argument_that_is_not_a_local_path_is_refused_by_name(
    name, path, error, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=rf"(?s){name} .*{message}"):
        CALLS[name](path)
    assert names(tmp_path) == []


def test_a_save_between_evaluations_is_repeated_at_the_next_evaluation(tmp_path):
    values = iter([5.0, 1.0, 3.0, 4.0, 4.0])
    loss = lambda model, batch: (
        model.w * batch.mean() if model.training else torch.tensor(next(values))
    )
    hook = fl.every(steps=3)(fl.checkpoint(tmp_path, keep=9, best="valid/loss", mode="min"))
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    fl.fit(fl.pipeline()(loss), toy(), loaders, evaluate_every=fl.every(steps=4), hooks=(hook,))
    # Evaluations at 4, 8 and 10
    assert names(tmp_path) == [f"step-{n:08d}" for n in (3, 4, 6, 8, 9, 10)]
    assert fl.best(tmp_path).name == "step-00000008"


FROM_THE_START = fl.at_start() | fl.every(epochs=1)  # when to evaluate


@pytest.mark.parametrize(("moment", "saved", "best"), [
    (fl.every(epochs=1), [1, 3], 1),  # it is not due at the start: nothing to rank there
    (fl.every(steps=2), [2, 3], 2), (FROM_THE_START, [0, 3], 0),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("background", [False, True])
def test_the_untrained_model_can_be_the_best(moment, saved, best, background, tmp_path):
    """The loss of valid is 0 at first, and rises with each update."""
    loaders = {"train": [ONE], "valid": [-ONE]}
    settings = {"epochs": 3, "evaluate_every": FROM_THE_START}
    hook = moment(fl.checkpoint(tmp_path, keep=1, best="valid/loss", background=background))
    state = fl.fit(fl.pipeline()(toy_loss), toy(), loaders, hooks=(hook,), **settings)
    assert state.history["valid/loss"] == (0.0, 1.0, 2.0, 3.0)
    assert fl.best(tmp_path).name == f"step-{best:08d}"
    assert names(tmp_path) == [f"step-{n:08d}" for n in saved]
    back = fl.restore(fl.best(tmp_path), toy())
    assert (back.step, len(back.history)) == (best, best + 1)
    resumed = fl.fit(fl.pipeline()(toy_loss), back, loaders, hooks=(), **settings)
    assert resumed.history == state.history


@pytest.mark.parametrize("order", [1, -1], ids=["stop first", "checkpoint first"])
@pytest.mark.parametrize("keep", [1, 3])
def test_a_closing_record_of_another_loader_takes_no_metric_from_the_last_checkpoint(
    tmp_path, order, keep
):
    """A hook stops at the best evaluation, and "test" is evaluated at the end."""
    stop = fl.when(lambda state: state.step == 4)(lambda s: attrs.evolve(s, stop="enough"))
    saves = fl.checkpoint(tmp_path, keep=keep, best="valid/loss", named=("valid/loss",))
    state = fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        {"train": [torch.ones(1)] * 6, "valid": [torch.ones(1)], "test": [torch.ones(1)]},
        hooks=(stop, fl.every(steps=2)(saves))[::order],
        evaluate_every={"valid": fl.every(steps=2), "test": fl.at_end()},
    )
    assert [(r.step, r.closing) for r in state.history] == [(2, False), (4, False), (4, True)]
    assert "valid/loss" not in state.history[-1].metrics
    assert fl.best(tmp_path).name == "step-00000004-valid-loss=-4"
    assert fl.restore(fl.best(tmp_path), toy()).history[-1].closing
    assert len(names(tmp_path)) == min(keep, 2)


def test_a_resumed_run_still_saves_the_next_evaluation(tmp_path):
    loss = lambda model, batch: model.w * batch.mean()
    make = lambda: fl.every(steps=3)(fl.checkpoint(tmp_path, keep=9, best="valid/loss", mode="min"))
    loaders = {"train": [ONE] * 10, "valid": [ONE]}
    settings = {"evaluate_every": fl.every(steps=4)}

    class Killed(BaseException):
        pass

    def kill(state):
        if state.step == 3:
            raise Killed
        return state

    with pytest.raises(Killed):
        fl.fit(fl.pipeline()(loss), toy(), loaders, hooks=(make(), kill), **settings)
    fl.fit(
        fl.pipeline()(loss),
        fl.resume(tmp_path, toy()),
        loaders,
        steps=5,
        hooks=(make(),),
        **settings,
    )
    assert "step-00000004" in names(tmp_path)


def test_a_failed_run_is_saved_once_if_asked_for(tmp_path):
    def fail(state):
        if state.step in (2, 4):
            raise KeyError("no")
        return state

    hook = fl.every(steps=2)(fl.checkpoint(tmp_path, on_exception=True))
    with pytest.raises(KeyError):
        fl.fit(step, toy(), [ONE] * 6, hooks=(fail, hook))
    assert names(tmp_path) == ["step-00000002-exception_KeyError"]
    state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (2, -2.0)
    with pytest.raises(KeyError):
        fl.fit(step, state, [ONE] * 6, hooks=(hook, fail))
    # The latter was saved before the failure
    assert names(tmp_path) == ["step-00000002-exception_KeyError", "step-00000004"]


def test_a_failure_after_going_back_is_saved_as_a_new_state(tmp_path):
    train(tmp_path, toy(), 6, keep=None)

    def fail(state):
        if state.step == 4:
            raise ValueError("no")
        return state

    hook = fl.every(steps=100)(fl.checkpoint(tmp_path, keep=None, on_exception=True))
    back = fl.restore(tmp_path / "step-00000002", toy())
    with pytest.raises(ValueError, match="no"):
        fl.fit(step, back, [2 * ONE] * 100, hooks=(fail, hook))
    assert fl.restore(tmp_path / "step-00000004-exception_ValueError", toy()).model.w.item() == -6.0


def test_a_misspelled_metric_is_an_error_at_the_first_record(tmp_path):
    loaders = {"train": [ONE], "valid": [ONE]}
    for hook in (fl.checkpoint(tmp_path, best="valid/losses"), fl.early_stop("valid/losses")):
        hooks = (lambda state: state, fl.every(epochs=4)(hook))
        with pytest.raises(KeyError, match="no metric 'valid/losses'") as error:
            fl.fit(step, toy(), loaders, epochs=9, hooks=hooks)
        assert error.value.state.epoch == 1


def test_a_failed_run_is_not_saved_by_default(tmp_path):
    def fail(state):
        raise KeyError("no")

    with pytest.raises(KeyError):
        fl.fit(step, toy(), [ONE] * 6, hooks=(fail, fl.every(steps=2)(fl.checkpoint(tmp_path))))
    assert fl.latest(tmp_path) is None
