"""Which checkpoints in a folder are kept."""

import math
import shutil

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)
step = fl.pipeline()(toy_loss)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def train(folder, state, steps, every=1, **settings):
    hook = fl.every(steps=every)(fl.checkpoint(folder, **settings))
    return fl.fit(step, state, [ONE] * 100, steps=steps, hooks=(hook,))


def test_the_newest_checkpoints_are_kept_across_a_resume(tmp_path):
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2)),)
    fl.fit(step, toy(), [ONE] * 6, steps=3, hooks=hooks)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=2)),)
    fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 6, hooks=hooks)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert fl.latest(tmp_path).name == "step-00000006"


def losses(values, folder, **kwargs):
    """Return a step whose evaluations give these losses, and hooks that save every epoch."""
    values = iter(values)

    def loss_fn(model, batch):
        return model.w * batch.mean() if model.training else torch.tensor(next(values))

    make = fl.pipeline()(loss_fn)
    hooks = (fl.every(epochs=1)(fl.checkpoint(folder, keep=1, best="valid/loss", **kwargs)),)
    return make, hooks


@pytest.mark.parametrize(
    ("values", "mode", "keep_best", "kept", "winner"),
    [
        ([3.0, 1.0, 2.0, 4.0], "min", 1, [2, 4], 2),
        ([3.0, 1.0, 2.0, 4.0], "max", 1, [4], 4),
        ([3.0, 1.0, 2.0, 4.0], "min", 2, [2, 3, 4], 2),
        ([1.0, 1.0, 1.0], "min", 1, [1, 3], 1),  # of equals, the oldest
        ([math.nan, 2.0, math.nan], "min", 1, [2, 3], 2),
        ([math.nan, math.nan], "min", 1, [2], None),
    ],
)
def test_the_best_checkpoints_are_kept(tmp_path, values, mode, keep_best, kept, winner):
    make, hooks = losses(values, tmp_path, mode=mode, keep_best=keep_best)
    fl.fit(make, toy(), ([ONE], [ONE]), epochs=len(values), hooks=hooks)
    assert names(tmp_path) == [f"step-{n:08d}" for n in kept]
    found = fl.best(tmp_path)
    assert (found and found.name) == (winner and f"step-{winner:08d}")
    assert fl.latest(tmp_path).name == f"step-{len(values):08d}"


def test_a_checkpoint_between_evaluations_is_not_ranked_by_an_earlier_one(tmp_path):
    make, _ = losses([1.0], tmp_path)
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=9, best="valid/loss")),)
    fl.fit(make, toy(), ([ONE] * 3, [ONE]), epochs=1, evaluate_every=fl.every(steps=2), hooks=hooks)
    assert fl.best(tmp_path).name == "step-00000002"


def test_a_checkpoint_saved_by_hand_and_a_link_are_not_pruned(tmp_path):
    fl.save(toy(), tmp_path / "mine")
    fl.save(toy(), tmp_path / "elsewhere" / "a")
    (tmp_path / "runs").mkdir()
    fl.save(toy(), tmp_path / "runs" / "mine")
    (tmp_path / "runs" / "step-00000000").symlink_to(tmp_path / "elsewhere" / "a")
    fl.fit(
        step, toy(), [ONE] * 4, hooks=(fl.every(steps=1)(fl.checkpoint(tmp_path / "runs", keep=1)),)
    )
    assert names(tmp_path / "runs") == ["mine", "step-00000000", "step-00000004"]
    assert fl.restore(tmp_path / "runs" / "step-00000000", toy()).step == 0


def test_another_folder_next_to_the_checkpoints_is_not_touched(tmp_path):
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "model.safetensors").write_text("not ours")
    assert fl.resume(tmp_path, toy()).step == 0
    train(tmp_path, toy(), 2, keep=1)
    assert names(tmp_path) == ["bert", "step-00000002"]


@pytest.mark.parametrize("w", [-9.0, 9.0], ids=["with the best loss", "with the worst loss"])
def test_the_checkpoints_of_another_run_are_neither_pruned_nor_ranked(tmp_path, w):
    """They were copied there while this run was already training."""
    other = train(tmp_path / "other", toy(w=w), 3, keep=9, best="train/loss")
    assert other.step == 3

    def intrude(state):
        if state.step == 2:
            shutil.copytree(
                tmp_path / "other" / "step-00000003",
                tmp_path / "mine" / "step-00000001",
                dirs_exist_ok=True,
            )
        return state

    hook = fl.checkpoint(tmp_path / "mine", keep=1, best="train/loss")
    hooks = (intrude, fl.when(lambda state: state.step >= 2)(hook))
    fl.fit(step, toy(), [ONE], epochs=4, hooks=hooks)
    assert "step-00000001" in names(tmp_path / "mine")
    assert fl.best(tmp_path / "mine").name == "step-00000004"


def test_a_checkpoint_with_a_user_file_in_it_is_not_pruned(tmp_path):
    def predict(state):
        if state.step == 2:
            (tmp_path / "step-00000002" / "predictions.csv").write_text("mine")
        return state

    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=1)), predict)
    fl.fit(step, toy(), [ONE] * 4, hooks=hooks)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
