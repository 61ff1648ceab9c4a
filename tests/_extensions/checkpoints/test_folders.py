"""Folders of checkpoints: whose they are, what is found there, and what is kept."""

import errno
import json
import math
import os
import re
import shutil
import threading
from pathlib import Path

import attrs
import pytest
import torch
from crafted import craft
from saved import ONE, contents_of, names, saved_steps, step, train

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.testing import toy

# --- a folder belongs to one run, and no other replaces or removes its checkpoints


UNREADABLE = {
    "readable": lambda path: None,
    "newer": lambda path: craft(path, lambda made: made.update(format_version=99)),
    "a damaged manifest": lambda path: (path / "manifest.json").write_text("{}"),
    "weights alone": lambda path: [f.unlink() for f in path.iterdir() if f.stem != "model"],
    "a file that is cut": lambda path: (path / "slots.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_a_run_that_forgets_to_resume_is_refused_before_its_first_update(tmp_path, damage):
    train(tmp_path, toy(), 5, best="train/loss")
    for path in tmp_path.glob("step-*"):
        UNREADABLE[damage](path)
    state, before = toy(), contents_of(tmp_path)
    expected = rf'of another run.*resume\("{re.escape(str(tmp_path))}", state\)'
    if damage != "readable":
        expected = "checkpoints (of another run|that cannot be read)"
    with pytest.raises(fl.CheckpointError, match=expected):
        train(tmp_path, state, 2)
    assert (state.step, state.model.w.item()) == (0, 0.0)
    assert contents_of(tmp_path) == before


def test_a_run_may_go_back_in_its_own_folder(tmp_path):
    state = train(tmp_path, toy(), 2)
    kept = fl.snapshot(state)
    train(tmp_path, state, 4)
    train(tmp_path, kept, 3)
    assert fl.resume(tmp_path, toy()).step == 3
    train(tmp_path, fl.restore(tmp_path / "step-00000002", toy()), 3)


def test_a_full_restore_keeps_the_identity_and_other_states_get_a_new_one(tmp_path):
    state = toy()
    path = fl.save(state, tmp_path / "a")
    assert fl.restore(path, toy()).run_id == state.run_id == fl.snapshot(state).run_id
    assert fl.restore(path, toy(), only=("model",)).run_id != state.run_id
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = toy().run_id
    assert torch.equal(torch.get_rng_state(), before)
    assert toy().run_id != first


def test_a_checkpoint_of_another_run_is_not_replaced(tmp_path):
    train(tmp_path / "other", toy(w=-9.0), 3, keep=9)
    there = tmp_path / "mine" / "step-00000003"
    copy = lambda state: shutil.copytree(tmp_path / "other" / there.name, there) and state
    intrude = fl.when(lambda state: state.step == 2)(copy)
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path / "mine")), intrude)
    with pytest.raises(fl.CheckpointError, match="is a checkpoint of another run"):
        fl.fit(step, toy(), [ONE] * 4, hooks=hooks)
    assert fl.restore(there, toy()).model.w.item() == -12.0


def test_two_hooks_of_one_folder_are_refused_for_any_spelling_of_it(tmp_path):
    hooks = fl.checkpoint(tmp_path / "a", keep=4), fl.checkpoint(tmp_path / "b" / ".." / "a")
    with pytest.raises(ValueError, match="two checkpoint hooks share"):
        fl.fit(step, toy(), [ONE], hooks=hooks)


def test_checkpoints_without_an_identity_are_identified_by_their_folder(tmp_path):
    """fnloop wrote such checkpoints before runs had identities."""
    forget = lambda made: made.pop("run")
    for name in "ab":
        train(tmp_path / name, toy(), 2)
        for path in (tmp_path / name).iterdir():
            craft(path, forget, forget)
    state = fl.resume(tmp_path / "a", toy())
    with pytest.raises(fl.CheckpointError, match="of another run"):
        train(tmp_path / "b", state, 3)
    train(tmp_path / "a", state, 3, keep=1)
    assert saved_steps(tmp_path / "a") == [3]


def test_only_one_of_two_runs_may_begin_in_an_empty_folder(tmp_path):
    begin = lambda state: (fl.checkpoint(tmp_path).begin(toy()), state)[1]
    hooks = fl.once(begin), fl.every(steps=2)(fl.checkpoint(tmp_path))
    with pytest.raises(fl.CheckpointError, match="another run has begun in"):
        fl.fit(step, toy(), [ONE] * 4, hooks=hooks)


# --- latest, best and resume: what they find, and which faults they report


def test_best_requires_a_metric(tmp_path):
    train(tmp_path, toy(), 1)
    with pytest.raises(ValueError, match=r'write best\(folder, "valid/loss"\)'):
        fl.best(tmp_path)
    assert fl.best(tmp_path, "train/loss").name == "step-00000001"
    assert fl.best(tmp_path / "nowhere") is None is fl.latest(tmp_path / "nowhere")


def test_a_restart_logs_that_the_run_was_stopped(tmp_path, caplog):
    hooks = (lambda state: attrs.evolve(state, stop="enough"), fl.checkpoint(tmp_path))
    fl.fit(step, toy(), [ONE] * 5, hooks=hooks)
    state = fl.fit(step, fl.resume(tmp_path, toy()), [ONE] * 5, hooks=hooks)
    assert state.step == 1 and "stopped (enough)" in caplog.text


def test_the_most_recently_written_checkpoint_is_the_newest(tmp_path):
    train(tmp_path, toy(), 3)
    back = fl.restore(tmp_path / "step-00000001", toy())  # a run that goes back
    back.optimizer.param_groups[0]["lr"] = 50.0
    train(tmp_path, back, 2)
    state = fl.resume(tmp_path, toy())
    assert (state.step, state.model.w.item()) == (2, -51.0)
    assert fl.latest(tmp_path).name == "step-00000002"


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "endless"])
def test_only_regular_files_are_opened(tmp_path, name, kind):
    path = fl.save(toy(), tmp_path / "a")
    (path / name).unlink()
    os.mkfifo(path / name) if kind == "fifo" else (path / name).symlink_to("/dev/zero")
    found = []

    def restore():
        try:
            fl.restore(path, toy())
        except fl.CheckpointError as error:
            found.append(str(error))

    thread = threading.Thread(target=restore, daemon=True)
    thread.start()
    thread.join(10)
    assert len(found) == 1 and ("not a regular file" in found[0] or "is missing" in found[0])


def test_a_checkpoint_that_was_moved_and_linked_is_found(tmp_path):
    train(tmp_path / "run", toy(), 2, keep=1)
    (tmp_path / "run" / "step-00000002").rename(tmp_path / "moved")
    (tmp_path / "run" / "step-00000002").symlink_to(tmp_path / "moved")
    assert fl.resume(tmp_path / "run", toy()).step == 2


def test_a_checkpoint_that_vanishes_while_listing_is_not_an_error(tmp_path, monkeypatch):
    train(tmp_path, toy(), 3)
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    stat = Path.stat

    def vanishing(path, **kwargs):
        if path.name == "step-00000002":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert fl.latest(tmp_path).name == "step-00000003"


def test_the_position_of_a_checkpoint_includes_skipped_updates(tmp_path):
    """It is [attempted updates, epochs, batches]. One of four batches is empty."""
    state = fl.fit(step, toy(), [ONE, torch.ones(0), ONE, ONE], hooks=())
    manifest = json.loads((fl.save(state, tmp_path / "a") / "manifest.json").read_text())
    assert manifest["position"] == [4, 1, 0]


# --- what is kept


def test_the_newest_checkpoints_are_kept_across_a_resume(tmp_path):
    train(tmp_path, toy(), 3, keep=2)
    assert saved_steps(tmp_path) == [2, 3]
    train(tmp_path, fl.resume(tmp_path, toy()), 6, keep=2)
    assert saved_steps(tmp_path) == [5, 6] and fl.latest(tmp_path).name == "step-00000006"


def losses(values, folder, **kwargs):
    """Return a step whose evaluations give these losses, and hooks that save every epoch."""
    values = iter(values)

    def loss_fn(model, batch):
        return model.w * batch.mean() if model.training else torch.tensor(next(values))

    make = fl.pipeline()(loss_fn)
    hooks = (fl.every(epochs=1)(fl.checkpoint(folder, keep=1, best="valid/loss", **kwargs)),)
    return make, hooks


@pytest.mark.parametrize(("values", "mode", "keep_best", "kept", "winner"), [
    ([3.0, 1.0, 2.0, 4.0], "min", 1, [2, 4], 2), ([3.0, 1.0, 2.0, 4.0], "max", 1, [4], 4),
    ([3.0, 1.0, 2.0, 4.0], "min", 2, [2, 3, 4], 2),
    ([1.0, 1.0, 1.0], "min", 1, [1, 3], 1),  # of equals, the oldest
    ([math.nan, 2.0, math.nan], "min", 1, [2, 3], 2), ([math.nan, math.nan], "min", 1, [2], None),
])  # fmt: skip
def test_the_best_checkpoints_are_kept(tmp_path, values, mode, keep_best, kept, winner):
    make, hooks = losses(values, tmp_path, mode=mode, keep_best=keep_best)
    fl.fit(make, toy(), ([ONE], [ONE]), epochs=len(values), hooks=hooks)
    assert saved_steps(tmp_path) == kept
    found = fl.best(tmp_path)
    assert (found and found.name) == (winner and f"step-{winner:08d}")
    assert fl.latest(tmp_path).name == f"step-{len(values):08d}"


def test_a_checkpoint_between_evaluations_is_not_ranked_by_an_earlier_one(tmp_path):
    make, _ = losses([1.0], tmp_path)
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=9, best="valid/loss")),)
    fl.fit(make, toy(), ([ONE] * 3, [ONE]), epochs=1, evaluate_every=fl.every(steps=2), hooks=hooks)
    assert fl.best(tmp_path).name == "step-00000002"


def test_a_checkpoint_saved_by_hand_and_a_link_are_not_pruned(tmp_path):
    elsewhere = fl.save(toy(), tmp_path / "elsewhere" / "a")
    fl.save(toy(), (runs := tmp_path / "runs") / "mine")
    (runs / "step-00000000").symlink_to(elsewhere)
    train(runs, toy(), 4, keep=1)
    assert names(runs) == ["mine", "step-00000000", "step-00000004"]
    assert fl.restore(runs / "step-00000000", toy()).step == 0


@pytest.mark.parametrize("w", [-9.0, 9.0], ids=["with the best loss", "with the worst loss"])
def test_the_checkpoints_of_another_run_are_neither_pruned_nor_ranked(tmp_path, w):
    """They were copied there while this run was already training."""
    train(tmp_path / "other", toy(w=w), 3, keep=9, best="train/loss")
    theirs, mine = tmp_path / "other" / "step-00000003", tmp_path / "mine"
    copy = lambda state: shutil.copytree(theirs, mine / "step-00000001") and state
    hook = fl.checkpoint(mine, keep=1, best="train/loss")
    hooks = (
        fl.when(lambda state: state.step == 2)(copy), fl.when(lambda state: state.step >= 2)(hook),
    )  # fmt: skip
    fl.fit(step, toy(), [ONE], epochs=4, hooks=hooks)
    assert "step-00000001" in names(mine)
    assert fl.best(mine).name == "step-00000004"


def test_a_checkpoint_with_a_user_file_in_it_is_not_pruned(tmp_path):
    mine = tmp_path / "step-00000002" / "predictions.csv"
    predict = fl.when(lambda state: state.step == 2)(lambda state: mine.write_text("1") and state)
    hooks = (fl.every(steps=1)(fl.checkpoint(tmp_path, keep=1)), predict)
    fl.fit(step, toy(), [ONE] * 4, hooks=hooks)
    assert saved_steps(tmp_path) == [2, 4]


# --- each state is written once, also at the end of a run


@pytest.mark.parametrize("background", [False, True])
def test_the_last_state_is_written_again_only_if_a_later_hook_changes_it(
    tmp_path, monkeypatch, background
):
    """The change is part of the state, so the checkpoint contains it."""
    written, write = [], files.write_files
    monkeypatch.setattr(files, "write_files", lambda *given: written.append(1) or write(*given))
    change = lambda state: attrs.evolve(state, extra={"seen": state.step})
    for folder, hooks, times in ((tmp_path / "a", (), 2), (tmp_path / "b", (change,), 3)):
        written.clear()
        saves = fl.every(steps=2)(fl.checkpoint(folder, background=background))
        fl.fit(step, toy(), [ONE] * 4, hooks=(saves, *hooks))
        assert len(written) == times
        assert fl.resume(folder, toy()).extra == ({"seen": 4} if hooks else {})
