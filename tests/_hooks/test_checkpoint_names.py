"""Metrics in the names of checkpoints, which nothing depends on."""

import math

import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import assert_same, toy, toy_loss

ONE = torch.ones(1)
RATES = fl.schedule(lambda i, total: (1, 1, -1, -1, -1)[i])  # w is -1, -2, -1, 0, 1
step = fl.pipeline(RATES)(toy_loss)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def trained(folder, state=None, every=None, train=1, epochs=5, **settings):
    every = fl.every(epochs=1) if every is None else every
    saves = fl.checkpoint(folder, **{"named": ("valid/loss",), **settings})
    state = toy() if state is None else state
    return fl.fit(step, state, ([ONE] * train, [ONE]), epochs=epochs, hooks=(every(saves),))


def test_names_show_metrics(tmp_path):
    trained(tmp_path, keep=None, named=("valid/loss", "train/loss"), epochs=2)
    assert names(tmp_path) == [
        "step-00000001-valid-loss=-1-train-loss=0",
        "step-00000002-valid-loss=-2-train-loss=-1",
    ]


def test_the_newest_and_the_best_are_kept_and_found(tmp_path):
    trained(tmp_path, keep=1, best="valid/loss")
    assert names(tmp_path) == ["step-00000002-valid-loss=-2", "step-00000005-valid-loss=1"]
    assert fl.best(tmp_path).name == "step-00000002-valid-loss=-2"
    assert fl.latest(tmp_path).name == "step-00000005-valid-loss=1"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e-30, 1e30, 0.43125])
def test_any_number_is_a_name(tmp_path, value):
    number = fl.metric(value=lambda aux, batch: fl.Last(value))
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=1, named=("valid/value",)))
    fl.fit(fl.pipeline(number)(toy_loss), toy(), ([ONE], [ONE]), epochs=3, hooks=(saves,))
    assert names(tmp_path) == [f"step-00000003-valid-value={value:.4g}"]


def test_a_name_is_only_for_the_metrics_of_its_own_boundary(tmp_path):
    trained(tmp_path, every=fl.every(steps=1), train=2, epochs=1, keep=None)
    assert names(tmp_path) == ["step-00000001", "step-00000002-valid-loss=-2"]


def test_a_state_that_is_measured_after_its_save_has_one_name(tmp_path):
    """A hook stops the run in mid-epoch after the save, and a closing record is made."""
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2, named=("valid/loss",)))
    stop = fl.when(lambda state: state.step == 3)(lambda state: attrs.evolve(state, stop="enough"))
    fl.fit(step, toy(), ([ONE] * 4, [ONE]), hooks=(saves, stop))
    assert names(tmp_path) == ["step-00000002", "step-00000003-valid-loss=-1"]


def test_other_metrics_may_be_named_after_a_resume(tmp_path):
    trained(tmp_path, epochs=3, keep=2)
    state = trained(tmp_path, fl.resume(tmp_path, toy()), keep=2, named=())
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    assert_same(state, trained(tmp_path / "other"))


def test_what_killed_processes_left_is_used_and_removed(tmp_path):
    trained(tmp_path, epochs=3, keep=2)
    half = tmp_path / ".step-00000002-valid-loss=-2.removing-0123456789ab"
    (tmp_path / "step-00000002-valid-loss=-2").rename(half)
    old = tmp_path / "step-00000003-valid-loss=-1"
    backup = old.rename(tmp_path / f".{old.name}.old")
    assert fl.resume(tmp_path, toy()).step == 3
    fl.save(fl.resume(tmp_path, toy()), old)
    trained(tmp_path, fl.resume(tmp_path, toy()), epochs=4, keep=1)
    assert not backup.exists() and names(tmp_path) == ["step-00000004-valid-loss=0"]


def test_damaged_ones_are_ordered_by_their_steps(tmp_path):
    for name in ("step-00000002-valid-value=500", "step-00000001-valid-value=1000"):
        fl.save(toy(), tmp_path / name)
    for name in names(tmp_path):
        (tmp_path / name / "manifest.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(fl.CheckpointError, match=r"step-00000002.*step-00000001"),
    ):
        fl.resume(tmp_path, toy())


def test_names_that_a_disk_or_a_shell_could_not_take(tmp_path):
    odd = fl.metric(**{"top 5/é=(a)": lambda aux, batch: fl.Last(1.0)})
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=1, named=("valid/top 5/é=(a)",)))
    fl.fit(fl.pipeline(odd)(toy_loss), toy(), ([ONE], [ONE]), epochs=2, hooks=(saves,))
    assert names(tmp_path) == ["step-00000002-valid-top-5-a-=1"]


def test_an_unknown_metric_is_named_before_the_first_update(tmp_path):
    with pytest.raises(KeyError, match="checkpoint: there is no metric 'val/loss'"):
        trained(tmp_path, named=("valid/loss", "val/loss"))
    with pytest.raises(KeyError, match="checkpoint: there is no metric 'valid/lss'"):
        trained(tmp_path, named=("valid/lss",))


@pytest.mark.parametrize(("named", "error", "message"), [
    ("valid/loss", TypeError, r"as a tuple of metrics, such as \(\"valid/loss\",\); got 'va"),
    (None, TypeError, "as a tuple of metrics"),
    ((3,), TypeError, "checkpoint expects named as the name of a metric"),
    (("",), ValueError, "got an empty name"),
])  # fmt: skip
def test_wrong_names_are_an_error_when_composing(tmp_path, named, error, message):
    with pytest.raises(error, match=message):
        fl.checkpoint(tmp_path, named=named)
