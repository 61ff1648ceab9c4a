"""to_csv and to_jsonl: the file equals the history, also after a kill or a rollback."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._checkpoint import files as disk
from fnloop.testing import toy, toy_loss

ONE = [torch.ones(1)]  # an update lowers w by 1, so the training losses are 0, -1, -2, ...
WRITERS = {"csv": fl.to_csv, "jsonl": fl.to_jsonl}


def rows(path):
    """Read a file as one dict for each record, in the form of ``History.to_dicts``."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    return [{**row, "epoch": int(row["epoch"]), "step": int(row["step"])} for row in found]


def train(writer, state=None, loaders=ONE, **kwargs):
    return fl.fit(
        fl.pipeline()(toy_loss),
        state or toy(),
        loaders,
        **{"epochs": 3, "hooks": (writer,), **kwargs},
    )


@pytest.fixture(params=WRITERS)
def writer(request, tmp_path):
    return WRITERS[request.param](tmp_path / "new" / f"a.{request.param}")


def test_the_file_equals_the_history(writer):
    state = train(writer)
    assert [(row["epoch"], row["step"], row["train/loss"]) for row in rows(writer.path)] == [
        (1, 1, 0),
        (2, 2, -1),
        (3, 3, -2),
    ]
    assert rows(writer.path) == state.history.to_dicts()
    assert {path.name for path in writer.path.parent.iterdir()} == {
        writer.path.name,
        f".{writer.path.name}.run",
    }


def test_a_row_is_written_with_its_record(writer):
    seen = []

    def look(state):
        seen.append(len(rows(writer.path)))
        return state

    train(writer, hooks=(writer, look))
    assert seen == [1, 2, 3]


def test_several_calls_of_fit_continue_one_file(writer):
    state = train(writer, train(writer, epochs=1), epochs=2)
    assert rows(writer.path) == state.history.to_dicts() and len(state.history) == 2
    state = train(WRITERS[writer.path.suffix[1:]](writer.path), state)
    assert rows(writer.path) == state.history.to_dicts() and len(state.history) == 3


def test_the_file_of_another_run_is_refused_and_not_touched(writer):
    train(writer, epochs=3)
    before, state = writer.path.read_bytes(), toy()
    with pytest.raises(ValueError, match=r"has the rows of another run.*resume\(folder, state\)"):
        train(writer, state, epochs=1)
    assert state.model.w.item() == 0.0 and writer.path.read_bytes() == before
    assert {path.name for path in writer.path.parent.iterdir()} == {
        writer.path.name,
        f".{writer.path.name}.run",
    }


def test_restoring_a_checkpoint_before_the_first_record_cuts_off_the_rows(writer, tmp_path):
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", keep=None))
    train(writer, loaders=ONE * 4, hooks=(writer, saves), epochs=2)
    assert [row["step"] for row in rows(writer.path)] == [4, 8]
    back = fl.restore(tmp_path / "run" / "step-00000002", toy())
    train(writer, back, loaders=ONE * 4, epochs=1)
    assert [row["step"] for row in rows(writer.path)] == [4]


def test_a_run_killed_at_its_very_end_completes_its_file_the_next_time(writer):
    state = train(writer)
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    train(WRITERS[writer.path.suffix[1:]](writer.path), state)  # nothing to do
    assert writer.path.read_bytes() == whole


def test_a_run_that_restarts_without_a_checkpoint_continues_its_file(writer, tmp_path):
    """A job is killed before its first checkpoint; the folder of checkpoints identifies the run."""

    def fail(state):
        if state.step == 3:
            raise RuntimeError("no")
        return state

    saves = fl.every(steps=100)(fl.checkpoint(tmp_path / "run"))
    with pytest.raises(RuntimeError):
        train(writer, hooks=(writer, saves, fail))
    assert len(rows(writer.path)) == 3 and fl.latest(tmp_path / "run") is None
    with pytest.raises(ValueError, match="has the rows of another run"):
        train(writer, toy())
    state = train(writer, fl.resume(tmp_path / "run", toy()), hooks=(writer, saves), epochs=2)
    assert rows(writer.path) == state.history.to_dicts() and len(state.history) == 2
    assert {path.name for path in writer.path.parent.iterdir()} == {
        writer.path.name,
        f".{writer.path.name}.run",
    }


@pytest.mark.parametrize("lost", ["rows", "all", "table"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_table_that_a_power_failure_has_zeroed_or_lost_is_written_again(writer, lost, ended):
    """Rows are not flushed, and the identity of the run next to them is."""
    state = train(writer, epochs=2)
    whole = writer.path.read_bytes()
    kept = 0 if lost == "all" else whole.index(b"\n") + 1
    writer.path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    if lost == "table":
        writer.path.unlink()
    again = WRITERS[writer.path.suffix[1:]](writer.path)
    state = train(again, state, epochs=2 if ended else 3)
    assert rows(writer.path) == state.history.to_dicts() and len(state.history) == 3 - ended


def test_zeros_that_no_run_owns_are_another_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="there is something else"):
        fl.to_jsonl(path)
    (tmp_path / ".a.jsonl.run").write_text("0123456789abcdef")
    with pytest.raises(ValueError, match="has the rows of another run"):
        train(fl.to_jsonl(path))
    path.write_bytes(b"\0mine")
    with pytest.raises(ValueError, match="there is something else"):
        fl.to_jsonl(path)


def test_what_a_killed_process_has_left_of_a_table_is_removed(writer):
    folder, name = writer.path.parent, writer.path.name
    state = train(writer, epochs=1)
    held = folder / f".{name}.part-0123456789ab"
    with disk.lock_file(held):  # as if another process was writing it
        for part in (f".{name}.part", f".{name}.part-ba9876543210"):
            (folder / part).write_text("half")
        train(WRITERS[writer.path.suffix[1:]](writer.path), state, epochs=1)  # nothing to do
        assert {p.name for p in folder.iterdir()} == {name, f".{name}.run", held.name}
    train(WRITERS[writer.path.suffix[1:]](writer.path), state, epochs=2)
    assert {p.name for p in folder.iterdir()} == {name, f".{name}.run"}


def test_the_identities_of_a_run_are_whole_or_absent_on_the_disk(writer, tmp_path, monkeypatch):
    """They are flushed under another name first: a power failure leaves no empty file."""
    events, fsync, replace = [], os.fsync, os.replace

    def flush(descriptor):
        fsync(descriptor)
        events.append(os.fstat(descriptor).st_ino)

    def move(source, target):
        replace(source, target)
        events.append(Path(target).name)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", move)
    saves = fl.checkpoint(tmp_path / "run")
    state = toy()
    for hook, file in (
        (writer, writer.path.with_name(f".{writer.path.name}.run")),
        (saves, tmp_path / "run" / ".run"),
    ):
        events.clear()
        hook.begin(state)
        assert file.read_text() == state.run_id
        at = events.index(file.name)
        assert file.stat().st_ino in events[:at] and file.parent.stat().st_ino in events[at:]


def test_a_closing_record_is_marked(writer):
    state = train(
        writer, train(writer, loaders=ONE * 4, epochs=None, steps=2), loaders=ONE * 4, epochs=1
    )
    assert [(row["step"], row.get("closing")) for row in rows(writer.path)] == [(2, 1), (4, None)]
    assert rows(writer.path) == state.history.to_dicts()


def test_rows_are_appended_and_the_file_is_replaced_only_for_a_new_column(tmp_path):
    def files(writer):
        nodes = []

        def look(state):
            nodes.append(writer.path.stat().st_ino)
            return state

        valid = {"train": ONE * 3, "valid": ONE}
        state = train(
            writer,
            loaders=valid,
            hooks=(writer, look),
            epochs=2,
            evaluate_every=fl.when(lambda s: s.step == 2),
        )
        return nodes, state

    nodes, state = files(fl.to_csv(tmp_path / "a.csv"))
    assert (
        nodes[0] != nodes[1] and len(set(nodes[1:])) == 1
    )  # before and after step 2, where "valid/loss" appears
    assert (tmp_path / "a.csv").read_text().splitlines()[
        0
    ] == "epoch,step,seconds,train/loss,train/lr,valid/loss"
    assert rows(tmp_path / "a.csv") == [
        {k: v for k, v in row.items() if v == v} for row in state.history.to_dicts()
    ] and [len(row) for row in rows(tmp_path / "a.csv")] == [6, 5, 5]  # fmt: skip

    nodes, state = files(fl.to_jsonl(tmp_path / "a.jsonl"))
    assert len(set(nodes)) == 1
    assert rows(tmp_path / "a.jsonl") == state.history.to_dicts()


MIXED = {
    "loaders": {"train": ONE * 5, "valid": ONE},
    "evaluate_every": fl.at_start() | fl.every(epochs=1),
    "record_every": fl.every(steps=2),
}


def without_times(path):
    """Return the lines of a CSV file without the column of seconds."""
    with path.open(newline="") as file:
        return [",".join([*row[:2], *row[3:]]) for row in csv.reader(file)]


def test_records_have_different_metrics_and_names_may_appear_at_any_time(tmp_path):
    csv_file, jsonl = fl.to_csv(tmp_path / "a.csv"), fl.to_jsonl(tmp_path / "a.jsonl")
    seen = {}

    def look(state):
        seen[state.step] = without_times(csv_file.path)
        assert rows(jsonl.path) == state.history.to_dicts()
        return state

    state = train(None, hooks=(csv_file, jsonl, look), steps=7, epochs=None, **MIXED)
    assert seen[1] == ["epoch,step,valid/loss", "0,0,0.0"]
    assert seen[2] == ["epoch,step,valid/loss,recent/loss,recent/lr", "0,0,0.0,,", "0,2,,-0.5,1.0"]
    assert without_times(csv_file.path) == [
        "epoch,step,valid/loss,recent/loss,recent/lr,train/loss,train/lr,closing",
        "0,0,0.0,,,,,",
        "0,2,,-0.5,1.0,,,",
        "0,4,,-2.5,1.0,,,",
        "1,5,-5.0,-4.0,1.0,-2.0,1.0,",
        "1,6,,-5.0,1.0,,,",
        "1,7,-7.0,-6.0,1.0,-5.5,1.0,1",
    ]
    assert rows(csv_file.path) == rows(jsonl.path) == state.history.to_dicts()


@pytest.mark.parametrize("saved", [1, 3, 5, 6])
def test_a_resume_has_the_columns_and_rows_of_an_uninterrupted_run(writer, tmp_path, saved):
    kind = writer.path.suffix[1:]
    whole = WRITERS[kind](tmp_path / f"whole.{kind}")
    train(whole, epochs=2, **MIXED)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", keep=None))
    train(None, hooks=(writer, saves), epochs=2, **MIXED)
    state = fl.restore(tmp_path / "run" / f"step-{saved:08}", toy())
    again = WRITERS[kind](writer.path)
    state = train(again, state, epochs=2, **MIXED)
    assert rows(again.path) == state.history.to_dicts()
    one, other = rows(whole.path), rows(again.path)
    assert [row | {"seconds": 0} for row in one] == [row | {"seconds": 0} for row in other]
    if kind == "csv":
        assert without_times(again.path) == without_times(whole.path)


def test_several_new_rows_are_appended_at_once(writer):
    """A hook that is called rarely, or a boundary that makes two records, replaces no file."""
    nodes = []

    def look(state):
        nodes.append(writer.path.stat().st_ino if writer.path.exists() else None)
        return state

    rarely = fl.every(steps=3)(writer)
    state = train(None, hooks=(rarely, look), record_every=fl.every(steps=1), epochs=9)
    assert len(set(nodes[2:])) == 1
    assert rows(writer.path) == state.history.to_dicts()
    assert len(rows(writer.path)) == 9


def test_rows_after_the_restored_state_are_cut_off(writer, tmp_path):
    state = train(writer, epochs=1)
    fl.save(state, tmp_path / "kept")
    train(writer, state, epochs=4)
    assert len(rows(writer.path)) == 4
    again = WRITERS[writer.path.suffix[1:]](writer.path)
    seen = []
    state = train(
        again,
        fl.restore(tmp_path / "kept", toy()),
        ONE * 2,
        epochs=2,
        hooks=(again, lambda s: seen.append(rows(writer.path)) or s),
    )
    assert [[row["step"] for row in found] for found in seen] == [[1], [1, 3]]
    assert rows(writer.path) == state.history.to_dicts()


def test_a_rollback_to_a_snapshot_within_a_run_cuts_off_the_rows(writer, back_once):
    state = train(writer, hooks=(writer, back_once))
    assert [row["step"] for row in rows(writer.path)] == [1, 2, 3]
    assert rows(writer.path) == state.history.to_dicts()


def test_a_rollback_between_two_calls_of_the_hook_replaces_the_rows(writer, back_once):
    third = fl.when(lambda state: state.step == 3)(writer)
    state = train(writer, hooks=(third, back_once), epochs=4)
    assert rows(writer.path) == state.history.to_dicts()
    assert [row["step"] for row in rows(writer.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", [1, 9, 20])
def test_a_truncated_last_line_is_repaired(writer, cut):
    state = train(writer)
    whole = writer.path.read_bytes()
    writer.path.write_bytes(whole[:-cut])
    again = WRITERS[writer.path.suffix[1:]](writer.path)
    state = train(again, state, epochs=4)
    assert (
        writer.path.read_bytes().startswith(whole) and rows(writer.path) == state.history.to_dicts()
    )


def test_a_file_changed_during_the_run_is_repaired(writer):
    def spoil(state):
        writer.path.write_text("")
        return state

    state = train(writer, hooks=(writer, fl.when(lambda s: s.step == 2)(spoil)))
    assert rows(writer.path) == state.history.to_dicts()


def test_a_kill_while_the_file_is_replaced_keeps_the_old_one(writer, monkeypatch):
    train(writer)
    before = writer.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.flush(toy())
    assert writer.path.read_bytes() == before


@pytest.mark.parametrize("kind", WRITERS)
def test_nan_and_infinities_can_be_read_back(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    loss = lambda model, batch: model.w * 0 + batch.mean()
    batches = [torch.tensor([x]) for x in (math.nan, math.inf, -math.inf, 0.1)]
    state = toy()
    for epoch, batch in enumerate(batches, 1):
        state = fl.fit(
            fl.pipeline()(loss), state, [batch], epochs=epoch, hooks=(WRITERS[kind](path),)
        )
    found = [row["train/loss"] for row in rows(path)]
    assert (math.isnan(found[0]) if kind == "csv" else found[0] is None) and found[1:3] == [
        math.inf,
        -math.inf,
    ]
    assert found[3] == state.history["train/loss"][3]  # bit for bit

    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(path) if kind == "csv" else pandas.read_json(path, lines=True)
    assert table["train/loss"].dtype == "float64"
    assert table["train/loss"].isna().tolist() == [True, False, False, False]
    assert table["train/loss"].tolist()[1:3] == [math.inf, -math.inf]


def test_names_of_metrics_are_quoted(writer):
    name = 'a, "b"'
    step = fl.pipeline(fl.metric(**{name: lambda aux, batch: batch.mean()}))(toy_loss)
    state = fl.fit(step, toy(), ONE, epochs=1, hooks=(writer,))
    assert (
        rows(writer.path) == state.history.to_dicts()
        and rows(writer.path)[0][f"train/{name}"] == 1.0
    )


def test_called_rarely_it_writes_all_records(writer):
    state = train(fl.every(epochs=2)(writer))
    assert rows(writer.path) == state.history.to_dicts() and len(state.history) == 3


def test_a_correct_file_is_not_touched_when_a_run_begins(writer):
    state = train(writer)
    before = writer.path.stat()
    WRITERS[writer.path.suffix[1:]](writer.path)(state)
    assert (writer.path.stat().st_ino, writer.path.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_a_link_stays_a_link(writer, tmp_path):
    link = tmp_path / f"link{writer.path.suffix}"
    link.symlink_to(writer.path)
    writer.path.parent.mkdir()
    state = train(WRITERS[writer.path.suffix[1:]](link))
    assert link.is_symlink() and rows(writer.path) == state.history.to_dicts()


def test_two_hooks_can_share_a_file(writer):
    other = WRITERS[writer.path.suffix[1:]](writer.path)
    state = train(writer, hooks=(writer, other))
    assert rows(writer.path) == state.history.to_dicts()


def test_only_the_first_process_writes(writer):
    state = attrs.evolve(toy(), backend=Backend("cpu", rank=1, world_size=1))
    train(writer, state)
    assert not writer.path.exists()


def test_a_foreign_file_is_refused_and_not_touched(tmp_path):
    for kind, make in WRITERS.items():
        path = tmp_path / f"a.{kind}"
        path.write_text("name,age\nAda,36\n")
        with pytest.raises(
            ValueError,
            match=rf"to_{kind}\('.*a.{kind}'\): there is something else at that path. Give another",
        ):
            make(path)
        assert path.read_text() == "name,age\nAda,36\n"
        for other in (tmp_path, path / "a"):
            with pytest.raises(ValueError, match="there is something else"):
                make(other)


def test_foreign_json_lines_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"epoch": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match="there is something else"):
        fl.to_jsonl(path)


def test_an_empty_file_is_accepted(writer):
    writer.path.parent.mkdir()
    writer.path.touch()
    state = train(WRITERS[writer.path.suffix[1:]](writer.path))
    assert rows(writer.path) == state.history.to_dicts()


def test_a_missing_path_is_an_error():
    with pytest.raises(
        TypeError, match=r'to_csv expects path as a path, such as "runs/a\.csv"; got None'
    ):
        fl.to_csv(None)
    with pytest.raises(TypeError, match=r"to_jsonl expects path as a path, .* got TrainState"):
        train(fl.to_jsonl)


def test_the_repr_is_the_call():
    assert repr(fl.to_csv("runs/a.csv")) == "to_csv('runs/a.csv')"
    assert repr(fl.to_jsonl("runs/a.jsonl")) == "to_jsonl('runs/a.jsonl')"


KILLED = """
import os, signal, sys, torch, fnloop as fl
from fnloop.testing import toy, toy_loss

folder = sys.argv[1]

def die(state):
    if len(state.history) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return state

writers = (fl.to_csv(folder + "/a.csv"), fl.to_jsonl(folder + "/a.jsonl"))
hooks = (*writers, fl.every(steps=3)(fl.checkpoint(folder + "/ck")), die)
fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=100, hooks=hooks)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this platform has no SIGKILL")
def test_a_kill_loses_no_row_and_a_resume_repeats_none(tmp_path):
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    paths = [tmp_path / "a.csv", tmp_path / "a.jsonl"]
    for path in paths:
        assert [(row["step"], row["train/loss"]) for row in rows(path)] == [
            (1, 0),
            (2, -1),
            (3, -2),
            (4, -3),
            (5, -4),
        ]

    state = fl.resume(tmp_path / "ck", toy())
    assert state.step == 3
    state = train(None, state, epochs=6, hooks=(fl.to_csv(paths[0]), fl.to_jsonl(paths[1])))
    for path in paths:
        assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5, 6]
        assert rows(path) == state.history.to_dicts()
