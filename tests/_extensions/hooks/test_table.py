"""to_csv and to_jsonl: the file equals the history, also after a kill or a rollback."""

import csv
import json
import math
import signal
import subprocess
import sys
from itertools import pairwise

import attrs
import pytest
import torch
from sample_hooks import raise_at
from toy_runs import fit

import fnloop as fl
from fnloop._backend.processes import Backend
from fnloop._extensions.checkpoints import disk
from fnloop.testing import toy, toy_loss

WRITERS = {"csv": fl.to_csv, "jsonl": fl.to_jsonl}


def rows(path):
    """Read a file as one dict for each record, in the form of ``History.to_dicts``."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    return [{**row, "epoch": int(row["epoch"]), "step": int(row["step"])} for row in found]


def steps(path):
    return [row["step"] for row in rows(path)]


def train(*hooks, **run):
    """The training losses are 0, -1, -2, ..."""
    return fit(*hooks, **{"train": 1, "epochs": 3, **run})


def again(writer):
    """Return a writer to the same file, as another process makes it."""
    return WRITERS[writer.path.suffix[1:]](writer.path)


def files(writer):
    return sorted(path.name for path in writer.path.parent.iterdir())


@pytest.fixture(params=WRITERS)
def writer(request, tmp_path):
    return WRITERS[request.param](tmp_path / "new" / f"a.{request.param}")


def check(writer, state, *expected):
    """Check that the file equals the history, which has the records of these steps."""
    assert rows(writer.path) == state.history.to_dicts()
    assert steps(writer.path) == [*expected]
    assert files(writer) == sorted([writer.path.name, f".{writer.path.name}.run"])


# --- rows


def test_the_file_equals_the_history_and_a_row_is_written_with_its_record(writer):
    """The next run continues it, after a closing record, which is marked."""
    seen, name = [], 'a, "b"'  # names are quoted
    step = fl.pipeline(fl.metric(**{name: lambda aux, batch: batch.mean()}))(toy_loss)
    look = lambda state: seen.append(len(rows(writer.path))) or state
    state = train(writer, look, step=step)
    check(writer, state, 1, 2, 3)
    assert seen == [1, 2, 3]
    assert [row["train/loss"] for row in rows(writer.path)] == [0, -1, -2]
    assert [row[f"train/{name}"] for row in rows(writer.path)] == [1, 1, 1]
    for targets in ({"epochs": None, "steps": 5}, {"epochs": 4}):
        state = train(writer, state=state, train=4, **targets)
    assert [row.get("closing") for row in rows(writer.path)[3:]] == [1, None]
    check(writer, state, 1, 2, 3, 5, 7)


def test_several_new_rows_are_appended_at_once(writer):
    """A hook that is called rarely, or a boundary that makes two records, replaces no file."""
    nodes = []

    def look(state):
        nodes.append(writer.path.stat().st_ino if writer.path.exists() else None)
        return state

    rarely = fl.every(steps=3)(writer)
    state = train(rarely, look, record_every=fl.every(steps=1), epochs=8)
    assert len(set(nodes[2:])) == 1
    check(writer, state, *range(1, 9))


def without_times(path):
    """Return the lines of a CSV file without the column of seconds."""
    with path.open(newline="") as file:
        return [",".join([*row[:2], *row[3:]]) for row in csv.reader(file)]


MOMENTS = {"evaluate_every": fl.at_start() | fl.every(epochs=1), "record_every": fl.every(steps=2)}
MIXED = {"train": 5, "valid": 1, **MOMENTS}


def test_records_have_different_metrics_and_names_may_appear_at_any_time(tmp_path):
    """The file is replaced only for a new column, and never if each row has its names."""
    table, lines = fl.to_csv(tmp_path / "a.csv"), fl.to_jsonl(tmp_path / "a.jsonl")
    seen, nodes = {}, {}

    def look(state):
        seen[state.step] = without_times(table.path)
        nodes[state.step] = [writer.path.stat().st_ino for writer in (table, lines)]
        assert rows(lines.path) == state.history.to_dicts()
        return state

    state = train(table, lines, look, steps=7, epochs=None, **MIXED)
    head = "epoch,step,items,valid/loss"
    assert seen[1] == [head, "0,0,0,0.0"]
    assert seen[2] == [f"{head},recent/loss,recent/lr", "0,0,0,0.0,,", "0,2,2,,-0.5,1.0"]
    assert without_times(table.path) == [
        f"{head},recent/loss,recent/lr,train/loss,train/lr,closing",
        "0,0,0,0.0,,,,,",
        "0,2,2,,-0.5,1.0,,,",
        "0,4,4,,-2.5,1.0,,,",
        "1,5,5,-5.0,-4.0,1.0,-2.0,1.0,",
        "1,6,6,,-5.0,1.0,,,",
        "1,7,7,-7.0,-6.0,1.0,-5.5,1.0,1",
    ]
    assert rows(table.path) == rows(lines.path) == state.history.to_dicts()
    tables, kept = zip(*nodes.values(), strict=True)
    changes = [before != after for before, after in pairwise(tables)]
    assert changes == [False, True, False, False, True, False, True] and len(set(kept)) == 1


@pytest.mark.parametrize("saved", [1, 3, 5, 6])
def test_a_resume_has_the_columns_and_rows_of_an_uninterrupted_run(writer, tmp_path, saved):
    whole = WRITERS[writer.path.suffix[1:]](tmp_path / f"whole{writer.path.suffix}")
    train(whole, epochs=2, **MIXED)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", keep=None))
    train(writer, saves, epochs=2, **MIXED)
    state = fl.restore(tmp_path / "run" / f"step-{saved:08}", toy())
    state = train(again(writer), state=state, epochs=2, **MIXED)
    assert rows(writer.path) == state.history.to_dicts()
    one, other = rows(whole.path), rows(writer.path)
    assert [row | {"seconds": 0} for row in one] == [row | {"seconds": 0} for row in other]
    if writer.path.suffix == ".csv":
        assert without_times(writer.path) == without_times(whole.path)


@pytest.mark.parametrize("kind", WRITERS)
def test_nan_and_infinities_can_be_read_back(kind, tmp_path):
    path, state = tmp_path / f"a.{kind}", toy()
    step = fl.pipeline()(lambda model, batch: model.w * 0 + batch.mean())
    for epoch, value in enumerate((math.nan, math.inf, -math.inf, 0.1), 1):
        loaders = [torch.tensor([value])]
        state = train(WRITERS[kind](path), state=state, loaders=loaders, step=step, epochs=epoch)
    found = [row["train/loss"] for row in rows(path)]
    assert math.isnan(found[0]) if kind == "csv" else found[0] is None
    assert found[1:3] == [math.inf, -math.inf]
    assert found[3] == state.history["train/loss"][3]  # bit for bit

    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(path) if kind == "csv" else pandas.read_json(path, lines=True)
    assert table["train/loss"].dtype == "float64"
    assert table["train/loss"].isna().tolist() == [True, False, False, False]
    assert table["train/loss"].tolist()[1:3] == [math.inf, -math.inf]


# --- going back


def test_rows_after_the_restored_state_are_cut_off(writer, tmp_path):
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", keep=None))
    train(writer, saves, train=2, epochs=2)
    assert steps(writer.path) == [2, 4]
    for saved, cut in ((3, [2]), (1, [])):  # 1 is before the first record
        seen, state = [], fl.restore(tmp_path / "run" / f"step-{saved:08}", toy())
        look = lambda state, seen=seen: seen.append(steps(writer.path)) or state
        state = train(again(writer), look, state=state, train=2, epochs=2)
        assert seen[0] == [*cut, saved + 1]
        check(writer, state, 2, 4)


@pytest.mark.parametrize("moment", [
    fl.every(steps=1), fl.when(lambda state: state.step == 3),  # between two calls of the hook
])  # fmt: skip
def test_a_rollback_to_a_snapshot_within_a_run_replaces_the_rows(writer, back_once, moment):
    check(writer, train(moment(writer), back_once, epochs=4), 1, 2, 3, 4)


# --- what a file can look like


def test_a_correct_file_is_not_touched_when_a_run_begins(writer):
    state = train(writer)
    facts = lambda: (writer.path.stat().st_ino, writer.path.stat().st_mtime_ns)
    before = facts()
    again(writer)(state)
    assert facts() == before


@pytest.mark.parametrize("cut", [1, 9, 20, "a row"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_truncated_file_is_repaired(writer, cut, ended):
    """A run that was killed at its very end completes its file the next time."""
    state = train(writer)
    whole = writer.path.read_bytes()
    cut = cut if cut != "a row" else len(whole) - whole[:-1].rindex(b"\n") - 1
    writer.path.write_bytes(whole[:-cut])
    state = train(again(writer), state=state, epochs=4 - ended)
    assert writer.path.read_bytes().startswith(whole)
    check(writer, state, *range(1, 5 - ended))


@pytest.mark.parametrize("lost", ["rows", "all", "table"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_table_that_a_power_failure_has_zeroed_or_lost_is_written_again(writer, lost, ended):
    """Rows are not flushed, and the identity of the run next to them is."""
    state = train(writer, epochs=2)
    whole = writer.path.read_bytes()
    kept = {"rows": whole.index(b"\n") + 1, "all": 0, "table": None}[lost]
    writer.path.unlink()
    if kept is not None:
        writer.path.write_bytes(whole[:kept] + bytes(len(whole) - kept))
    state = train(again(writer), state=state, epochs=3 - ended)
    check(writer, state, *range(1, 4 - ended))


def test_what_a_killed_process_has_left_of_a_table_is_removed(writer):
    folder, name = writer.path.parent, writer.path.name
    state = train(writer, epochs=1)
    held = folder / f".{name}.part-0123456789ab"
    with disk.lock_file(held):  # as if another process was writing it
        for part in (f".{name}.part", f".{name}.part-ba9876543210"):
            (folder / part).write_text("half")
        train(again(writer), state=state, epochs=1)  # nothing to do
        assert files(writer) == sorted([name, f".{name}.run", held.name])
    check(writer, train(again(writer), state=state, epochs=2), 1, 2)


def test_a_file_changed_during_the_run_is_repaired(writer):
    spoil = lambda state: (writer.path.write_text("") and 0) or state
    check(writer, train(writer, fl.when(lambda s: s.step == 2)(spoil)), 1, 2, 3)


def test_a_kill_while_the_file_is_replaced_keeps_the_old_one(writer, monkeypatch):
    state = train(writer)
    before = writer.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.flush(attrs.evolve(state, history=fl.History()))
    assert writer.path.read_bytes() == before


def test_a_link_stays_a_link_and_an_empty_file_is_accepted(writer, tmp_path):
    link = tmp_path / f"link{writer.path.suffix}"
    link.symlink_to(writer.path)
    writer.path.parent.mkdir()
    writer.path.touch()
    check(writer, train(again(writer), WRITERS[link.suffix[1:]](link)), 1, 2, 3)  # two share it
    assert link.is_symlink()


def test_only_the_first_process_writes(writer):
    train(writer, state=attrs.evolve(toy(), backend=Backend("cpu", rank=1, world_size=1)))
    assert not writer.path.exists()


# --- whose file it is


def test_the_file_of_another_run_is_refused_and_not_touched(writer):
    train(writer)
    before, state = writer.path.read_bytes(), toy()
    with pytest.raises(ValueError, match=r"has the rows of another run.*resume\(folder, state\)"):
        train(writer, state=state, epochs=1)
    assert state.model.w.item() == 0.0 and writer.path.read_bytes() == before
    assert files(writer) == sorted([writer.path.name, f".{writer.path.name}.run"])


def test_a_run_that_restarts_without_a_checkpoint_continues_its_file(writer, tmp_path):
    """A job is killed before its first checkpoint; the folder of checkpoints identifies the run."""
    saves = fl.every(steps=100)(fl.checkpoint(tmp_path / "run"))
    with pytest.raises(KeyError):
        train(writer, saves, raise_at(3))
    assert steps(writer.path) == [1, 2, 3] and fl.latest(tmp_path / "run") is None
    with pytest.raises(ValueError, match="has the rows of another run"):
        train(writer)
    state = train(writer, saves, state=fl.resume(tmp_path / "run", toy()), epochs=2)
    check(writer, state, 1, 2)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("content", [
    b"name,age\nAda,36\n", b'{"epoch": 1, "loss": 0.5}\n', bytes(100), b"\0mine",
])  # fmt: skip
def test_a_foreign_file_is_refused_and_not_touched(kind, content, tmp_path):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(content)
    why = rf"to_{kind}\('.*a.{kind}'\): there is something else at that path. Give another"
    with pytest.raises(ValueError, match=why):
        WRITERS[kind](path)
    assert path.read_bytes() == content
    for other in (tmp_path, path / "a"):
        with pytest.raises(ValueError, match="there is something else"):
            WRITERS[kind](other)
    if content == bytes(100) and kind == "jsonl":  # zeros that another run owns
        (tmp_path / f".a.{kind}.run").write_text("0123456789abcdef")
        with pytest.raises(ValueError, match="has the rows of another run"):
            train(WRITERS[kind](path))


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
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    died = subprocess.run(command, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    paths = [tmp_path / "a.csv", tmp_path / "a.jsonl"]
    for path in paths:
        found = [(row["step"], row["train/loss"]) for row in rows(path)]
        assert found == [(1, 0), (2, -1), (3, -2), (4, -3), (5, -4)]
    state = fl.resume(tmp_path / "ck", toy())
    assert state.step == 3
    state = train(fl.to_csv(paths[0]), fl.to_jsonl(paths[1]), state=state, epochs=6)
    for path in paths:
        assert steps(path) == [1, 2, 3, 4, 5, 6]
        assert rows(path) == state.history.to_dicts()


@pytest.mark.parametrize("name", ["a\rb", "a\nb", "a\r\nb", 'a"b', "a,b"])
def test_any_name_of_a_metric_can_be_read_back(writer, name):
    step = fl.pipeline(fl.metric(**{name: lambda aux, batch: batch.sum()}))(toy_loss)
    state = train(writer, step=step)
    check(writer, state, 1, 2, 3)
    state = train(again(writer), step=step, state=state, epochs=4)
    check(writer, state, 1, 2, 3, 4)


def test_of_two_runs_that_begin_before_there_is_a_row_one_has_the_file(writer):
    class Begins(fl.Hook):
        """Begins another run, up to its first record, when the writer of this one has begun."""

        def begin(self, state):
            next(fl.run(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=(again(writer),)))
            return state

        def __call__(self, state):
            return state

    with pytest.raises(ValueError, match="another run has begun to write"):
        train(writer, Begins())
    assert steps(writer.path) == [1]
