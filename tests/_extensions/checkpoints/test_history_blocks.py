"""Long histories in checkpoints: older records are written once, next to the checkpoints."""

import hashlib
import json
import shutil

import attrs
import pytest
from crafted import craft
from saved import ONE, check_refused, saved_steps

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.testing import assert_same, toy, toy_loss

step = fl.pipeline()(toy_loss)
steps_of = lambda state: [record.step for record in state.history]
blocks = lambda folder: sorted(path.name for path in (folder / ".records").glob("*"))


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch):
    monkeypatch.setattr(files, "IN_BLOCK", 4)


def train(folder, state, steps, meanwhile=lambda state: state, **settings):
    """Train with a record and a checkpoint after every update, and a hook after the fifth."""
    saves = fl.every(steps=1)(fl.checkpoint(folder, **settings))
    hooks, loaders = (saves, fl.when(lambda s: s.step == 5)(meanwhile)), ([ONE] * 100, [ONE])
    moment = fl.every(steps=1)
    return fl.fit(step, state, loaders, steps=steps, evaluate_every=moment, hooks=hooks)


def test_a_short_history_has_no_blocks_and_only_new_records_are_encoded(tmp_path, monkeypatch):
    encoded, line_of = [], files.encode_record
    note = lambda record: encoded.append(record.step) or line_of(record)
    monkeypatch.setattr(files, "encode_record", note)
    train(tmp_path, toy(), 3, keep=1)
    assert (saved_steps(tmp_path), encoded) == ([3], [1, 2, 3])


def test_complete_blocks_are_written_once_and_a_resume_has_every_record(tmp_path):
    state = train(tmp_path, toy(), 10, keep=2)
    assert len(blocks(tmp_path)) == 2
    facts = json.loads((tmp_path / "step-00000010" / "state.json").read_text())
    assert [row["step"] for row in facts["history"]] == [9, 10] and len(facts["blocks"]) == 2
    restored = fl.resume(tmp_path, toy())
    assert_same(restored, state)
    assert restored.history == state.history and steps_of(restored) == [*range(1, 11)]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / ".records").iterdir()}
    train(tmp_path, restored, 12, keep=2)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert len(blocks(tmp_path)) == 3
    assert steps_of(fl.resume(tmp_path, toy())) == [*range(1, 13)]


def test_a_run_that_goes_back_has_new_blocks_and_unused_ones_are_removed(tmp_path):
    train(tmp_path, toy(), 9, keep=9)
    before, back = blocks(tmp_path), fl.restore(tmp_path / "step-00000005", toy())
    assert steps_of(back) == [1, 2, 3, 4, 5] and len(before) == 2
    train(tmp_path, back, 9, keep=9)  # records 5 to 8 now have other times
    assert len(blocks(tmp_path)) == 2 and len({*blocks(tmp_path)} & {*before}) == 1
    assert steps_of(fl.resume(tmp_path, toy())) == [*range(1, 10)]


def test_the_digest_is_a_chain_of_all_records_and_continues_in_a_resumed_run(tmp_path):
    """Each is the SHA-256 of the one before it and of the record; blocks are of four records."""
    train(tmp_path, toy(), 6, keep=None)
    old = craft(tmp_path / "step-00000006", facts=lambda made: made.pop("digest"))  # as of 0.1.0
    state = train(tmp_path, fl.restore(old, toy()), 10, keep=None)
    digest = ""
    for record in state.history:
        row = files.encode_record(record)
        digest = hashlib.sha256(f"{digest}\n{row}".encode()).hexdigest()
        facts = json.loads((tmp_path / f"step-{record.step:08d}" / "state.json").read_text())
        assert facts.get("digest") == (None if record.step == 6 else digest)
    kept = json.loads((fl.save(state, tmp_path / "saved") / "state.json").read_text())
    assert kept["digest"] == digest


def test_a_checkpoint_written_by_save_is_self_contained(tmp_path):
    state = train(tmp_path / "run", toy(), 10)
    path = shutil.copytree(fl.save(state, tmp_path / "a"), tmp_path / "elsewhere" / "a")
    assert steps_of(fl.restore(path, toy())) == [*range(1, 11)]


@pytest.mark.parametrize(
    "damage",
    [lambda file: file.unlink(), lambda file: file.write_text("{}")],
    ids=["missing", "changed"],
)
def test_a_missing_or_damaged_block_is_named_and_the_weights_still_load(tmp_path, damage):
    train(tmp_path, toy(), 5, keep=1)
    damage(next((tmp_path / ".records").iterdir()))
    path, message = tmp_path / "step-00000005", r"(lacks|is damaged).*\.records/[0-9a-f]{64}\.jsonl"
    check_refused(path, toy(), message)
    assert fl.restore(path, toy(), only=("model", "counters")).step == 5
    skipped = pytest.warns(UserWarning, match="skipped a damaged checkpoint")
    with skipped, pytest.raises(fl.CheckpointError, match="none is valid"):
        fl.resume(tmp_path, toy())


def test_a_block_cannot_name_another_file(tmp_path):
    train(tmp_path, toy(), 5, keep=1)
    other = lambda made: made.update(blocks=["../step-00000005/state"])
    path = craft(tmp_path / "step-00000005", other)
    check_refused(path, toy(), "is not the name of a block of records")


@pytest.mark.parametrize("background", [False, True])
def test_a_run_resumed_repeatedly_ends_as_an_uninterrupted_one(tmp_path, background):
    whole, folder = train(tmp_path / "whole", toy(), 13, keep=1), tmp_path / "parts"
    for steps in (3, 4, 9, 13):
        state = train(folder, fl.resume(folder, toy()), steps, keep=1, background=background)
    assert_same(state, whole)
    assert steps_of(fl.resume(folder, toy())) == [*range(1, 14)]


# --- blocks that are removed during a run


def with_losses(loss):
    """Return a change to a history of one block, which has this loss."""
    records = [fl.Record(0, 0, {"train/loss": loss}) for _ in range(6)]
    return lambda state: attrs.evolve(state, history=fl.History(records))


first_loss = lambda path: fl.restore(path, toy()).history["train/loss"][0]


def test_blocks_removed_during_a_run_are_written_again(tmp_path):
    train(tmp_path, toy(), 7, lambda state: shutil.rmtree(tmp_path / ".records") or state, keep=1)
    assert steps_of(fl.resume(tmp_path, toy())) == [*range(1, 8)]


def test_blocks_of_a_checkpoint_with_an_unreadable_manifest_are_kept(tmp_path):
    """It may be readable again later. Meanwhile the run has another history."""
    manifest, text = tmp_path / "step-00000005" / "manifest.json", []

    def damage(state):
        text.append(manifest.read_text())
        manifest.write_text("{}")
        return with_losses(2.0)(state)

    train(tmp_path, with_losses(1.0)(toy()), 6, damage, keep=1)
    manifest.write_text(text[0])
    assert [first_loss(tmp_path / f"step-0000000{n}") for n in (5, 6)] == [1.0, 2.0]


def test_blocks_that_no_checkpoint_names_are_removed(tmp_path):
    train(tmp_path, with_losses(1.0)(toy()), 6, with_losses(2.0), keep=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000006"]
    assert first_loss(tmp_path / "step-00000006") == 2.0 and len(blocks(tmp_path)) == 1
