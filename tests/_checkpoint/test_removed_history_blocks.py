"""Which blocks of a history are removed during a run, and which are written again."""

import shutil

import attrs
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

step = fl.pipeline()(toy_loss)


def history(loss):
    """Return a history long enough for a block of its own."""
    return fl.History(fl.Record(0, 0, {"train/loss": loss}) for _ in range(1030))


def train(folder, meanwhile):
    """Make two updates with a checkpoint after each, and call a hook between them."""
    saves = fl.every(steps=1)(fl.checkpoint(folder, keep=1))
    hooks = (saves, fl.when(lambda state: state.step == 1)(meanwhile))
    state = attrs.evolve(toy(), history=history(1.0))
    return fl.fit(step, state, [torch.ones(1)] * 3, steps=2, hooks=hooks, evaluate_every=None)


def losses_of(state):
    return list(state.history["train/loss"][:1030])


def test_blocks_removed_during_a_run_are_written_again(tmp_path):
    def remove(state):
        shutil.rmtree(tmp_path / ".records")
        return state

    train(tmp_path, remove)
    assert losses_of(fl.resume(tmp_path, toy())) == [1.0] * 1030


def test_blocks_of_a_checkpoint_with_an_unreadable_manifest_are_kept(tmp_path):
    """It may be readable again later. Meanwhile the run has another history."""
    manifest = tmp_path / "step-00000001" / "manifest.json"
    text = []

    def damage(state):
        text.append(manifest.read_text())
        manifest.write_text("{}")
        return attrs.evolve(state, history=history(2.0))

    train(tmp_path, damage)
    manifest.write_text(text[0])
    assert losses_of(fl.restore(tmp_path / "step-00000001", toy())) == [1.0] * 1030
    assert losses_of(fl.restore(tmp_path / "step-00000002", toy())) == [2.0] * 1030


def test_blocks_that_no_checkpoint_names_are_removed(tmp_path):
    train(tmp_path, lambda state: attrs.evolve(state, history=history(2.0)))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    assert len([*(tmp_path / ".records").iterdir()]) == 1
