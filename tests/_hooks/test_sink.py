"""The tables equal the history: while a run goes on, after a kill, after going back, after a crash in a line."""

import csv
import json
import math
import signal
import subprocess
import sys

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._backend.launch import Backend
from fnloop.testing import toy, toy_loss

ONE = [torch.ones(1)]  # an update lowers w by 1, so the training losses are 0, -1, -2, ...
SINKS = {"csv": fl.to_csv, "jsonl": fl.to_jsonl}


def rows(path):
    """What a reader makes of a file: one dict for each record, in the form of ``History.to_dicts``."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
    return [{**row, "epoch": int(row["epoch"]), "step": int(row["step"])} for row in found]


def train(sink, state=None, loaders=ONE, **kwargs):
    return fl.fit(
        fl.pipeline()(toy_loss),
        state or toy(),
        loaders,
        **{"epochs": 3, "hooks": (sink,), **kwargs},
    )


@pytest.fixture(params=SINKS)
def sink(request, tmp_path):
    return SINKS[request.param](tmp_path / "new" / f"a.{request.param}")


def test_the_file_says_what_the_history_says(sink):
    state = train(sink)
    assert [(row["epoch"], row["step"], row["train/loss"]) for row in rows(sink.path)] == [
        (1, 1, 0),
        (2, 2, -1),
        (3, 3, -2),
    ]
    assert rows(sink.path) == state.history.to_dicts()
    assert {path.name for path in sink.path.parent.iterdir()} == {
        sink.path.name,
        f".{sink.path.name}.run",
    }


def test_a_row_is_there_as_soon_as_its_record(sink):
    seen = []

    def look(state):
        seen.append(len(rows(sink.path)))
        return state

    train(sink, hooks=(sink, look))
    assert seen == [1, 2, 3]


def test_several_runs_go_on_in_one_file(sink):
    state = train(sink, train(sink, epochs=1), epochs=2)
    assert rows(sink.path) == state.history.to_dicts() and len(state.history) == 2
    state = train(SINKS[sink.path.suffix[1:]](sink.path), state)
    assert rows(sink.path) == state.history.to_dicts() and len(state.history) == 3


def test_the_file_of_another_run_is_refused_before_the_first_update_and_not_touched(sink):
    train(sink, epochs=3)
    before, state = sink.path.read_bytes(), toy()
    with pytest.raises(ValueError, match=r"has the rows of another run.*resume\(folder, state\)"):
        train(sink, state, epochs=1)
    assert state.model.w.item() == 0.0 and sink.path.read_bytes() == before
    assert {path.name for path in sink.path.parent.iterdir()} == {
        sink.path.name,
        f".{sink.path.name}.run",
    }


def test_a_run_that_goes_back_to_before_its_first_record_cuts_the_rows_off(sink, tmp_path):
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "run", keep=None))
    train(sink, loaders=ONE * 4, hooks=(sink, saves), epochs=2)
    assert [row["step"] for row in rows(sink.path)] == [4, 8]
    back = fl.restore(tmp_path / "run" / "step-00000002", toy())
    train(sink, back, loaders=ONE * 4, epochs=1)
    assert [row["step"] for row in rows(sink.path)] == [4]


def test_a_run_that_was_killed_at_its_very_end_completes_its_file_the_next_time(sink):
    state = train(sink)
    whole = sink.path.read_bytes()
    sink.path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    train(SINKS[sink.path.suffix[1:]](sink.path), state)  # nothing to do
    assert sink.path.read_bytes() == whole


def test_a_run_that_fails_and_starts_again_without_a_record_continues_its_file(sink, tmp_path):
    """As a job that is killed before its first checkpoint: what tells that it is the same run is the checkpoint's folder."""

    def fail(state):
        if state.step == 3:
            raise RuntimeError("no")
        return state

    saves = fl.every(steps=100)(fl.checkpoint(tmp_path / "run"))
    with pytest.raises(RuntimeError):
        train(sink, hooks=(sink, saves, fail))
    assert len(rows(sink.path)) == 3 and fl.latest(tmp_path / "run") is None
    with pytest.raises(ValueError, match="has the rows of another run"):
        train(sink, toy())
    state = train(sink, fl.resume(tmp_path / "run", toy()), hooks=(sink, saves), epochs=2)
    assert rows(sink.path) == state.history.to_dicts() and len(state.history) == 2
    assert {path.name for path in sink.path.parent.iterdir()} == {
        sink.path.name,
        f".{sink.path.name}.run",
    }


def test_a_closing_record_is_marked(sink):
    state = train(
        sink, train(sink, loaders=ONE * 4, epochs=None, steps=2), loaders=ONE * 4, epochs=1
    )
    assert [(row["step"], row.get("closing")) for row in rows(sink.path)] == [(2, 1), (4, None)]
    assert rows(sink.path) == state.history.to_dicts()


def test_a_row_is_appended_and_the_file_replaced_only_for_a_new_column(tmp_path):
    def files(sink):
        nodes = []

        def look(state):
            nodes.append(sink.path.stat().st_ino)
            return state

        valid = {"train": ONE * 3, "valid": ONE}
        state = train(
            sink,
            loaders=valid,
            hooks=(sink, look),
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
    ] == "epoch,step,seconds,train/loss,valid/loss"
    assert rows(tmp_path / "a.csv") == [
        {k: v for k, v in row.items() if v == v} for row in state.history.to_dicts()
    ] and [len(row) for row in rows(tmp_path / "a.csv")] == [5, 4, 4]  # fmt: skip

    nodes, state = files(fl.to_jsonl(tmp_path / "a.jsonl"))
    assert len(set(nodes)) == 1
    assert rows(tmp_path / "a.jsonl") == state.history.to_dicts()


def test_rows_behind_the_state_that_a_run_goes_on_from_are_cut_off(sink, tmp_path):
    state = train(sink, epochs=1)
    fl.save(state, tmp_path / "kept")
    train(sink, state, epochs=4)
    assert len(rows(sink.path)) == 4
    again = SINKS[sink.path.suffix[1:]](sink.path)
    seen = []
    state = train(
        again,
        fl.restore(tmp_path / "kept", toy()),
        ONE * 2,
        epochs=2,
        hooks=(again, lambda s: seen.append(rows(sink.path)) or s),
    )
    assert [[row["step"] for row in found] for found in seen] == [[1], [1, 3]]
    assert rows(sink.path) == state.history.to_dicts()


def test_going_back_to_a_snapshot_within_a_run_cuts_the_rows_off_too(sink):
    kept = []

    def back_once(state):
        if state.step == 1 and not kept:
            kept.append(fl.snapshot(state))
        elif state.step == 3 and len(kept) == 1:
            kept.append(None)
            return kept[0]
        return state

    state = train(sink, hooks=(sink, back_once))
    assert [row["step"] for row in rows(sink.path)] == [1, 2, 3]
    assert rows(sink.path) == state.history.to_dicts()


@pytest.mark.parametrize("torn", [1, 9, 20])
def test_a_torn_last_line_is_mended(sink, torn):
    state = train(sink)
    whole = sink.path.read_bytes()
    sink.path.write_bytes(whole[:-torn])
    again = SINKS[sink.path.suffix[1:]](sink.path)
    state = train(again, state, epochs=4)
    assert sink.path.read_bytes().startswith(whole) and rows(sink.path) == state.history.to_dicts()


def test_a_file_that_somebody_changes_in_between_is_mended(sink):
    def spoil(state):
        sink.path.write_text("")
        return state

    state = train(sink, hooks=(sink, fl.when(lambda s: s.step == 2)(spoil)))
    assert rows(sink.path) == state.history.to_dicts()


def test_a_kill_while_the_file_is_replaced_leaves_the_old_one(sink, monkeypatch):
    train(sink)
    before = sink.path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        sink.flush(toy())
    assert sink.path.read_bytes() == before


@pytest.mark.parametrize("kind", SINKS)
def test_numbers_that_are_none_are_read_as_what_they_are(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    loss = lambda model, batch: model.w * 0 + batch.mean()
    batches = [torch.tensor([x]) for x in (math.nan, math.inf, -math.inf, 0.1)]
    state = toy()
    for epoch, batch in enumerate(batches, 1):
        state = fl.fit(
            fl.pipeline()(loss), state, [batch], epochs=epoch, hooks=(SINKS[kind](path),)
        )
    found = [row["train/loss"] for row in rows(path)]
    assert (math.isnan(found[0]) if kind == "csv" else found[0] is None) and found[1:3] == [
        math.inf,
        -math.inf,
    ]
    assert found[3] == state.history["train/loss"][3]  # to the bit

    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(path) if kind == "csv" else pandas.read_json(path, lines=True)
    assert table["train/loss"].dtype == "float64"
    assert table["train/loss"].isna().tolist() == [True, False, False, False]
    assert table["train/loss"].tolist()[1:3] == [math.inf, -math.inf]


def test_names_are_quoted(sink):
    name = 'a, "b"'
    step = fl.pipeline(fl.metric(**{name: lambda aux, batch: batch.mean()}))(toy_loss)
    state = fl.fit(step, toy(), ONE, epochs=1, hooks=(sink,))
    assert (
        rows(sink.path) == state.history.to_dicts() and rows(sink.path)[0][f"train/{name}"] == 1.0
    )


def test_one_that_runs_rarely_writes_all_that_there_is(sink):
    state = train(fl.every(epochs=2)(sink))
    assert rows(sink.path) == state.history.to_dicts() and len(state.history) == 3


def test_a_file_that_is_right_is_not_touched_when_a_run_begins(sink):
    state = train(sink)
    before = sink.path.stat()
    SINKS[sink.path.suffix[1:]](sink.path)(state)
    assert (sink.path.stat().st_ino, sink.path.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_a_link_stays_one(sink, tmp_path):
    link = tmp_path / f"link{sink.path.suffix}"
    link.symlink_to(sink.path)
    sink.path.parent.mkdir()
    state = train(SINKS[sink.path.suffix[1:]](link))
    assert link.is_symlink() and rows(sink.path) == state.history.to_dicts()


def test_two_hooks_of_one_file_write_it_once(sink):
    other = SINKS[sink.path.suffix[1:]](sink.path)
    state = train(sink, hooks=(sink, other))
    assert rows(sink.path) == state.history.to_dicts()


def test_only_the_first_process_writes(sink):
    state = attrs.evolve(toy(), backend=Backend("cpu", rank=1, world_size=1))
    train(sink, state)
    assert not sink.path.exists()


def test_what_somebody_else_wrote_is_left_alone(tmp_path):
    for kind, make in SINKS.items():
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


def test_json_lines_of_somebody_else_are_left_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"epoch": 1, "loss": 0.5}\n')
    with pytest.raises(ValueError, match="there is something else"):
        fl.to_jsonl(path)


def test_an_empty_file_will_do(sink):
    sink.path.parent.mkdir()
    sink.path.touch()
    state = train(SINKS[sink.path.suffix[1:]](sink.path))
    assert rows(sink.path) == state.history.to_dicts()


def test_a_path_is_asked_for():
    with pytest.raises(
        TypeError, match=r'to_csv expects path as a path, such as "runs/a\.csv"; got None'
    ):
        fl.to_csv(None)
    with pytest.raises(TypeError, match=r"to_jsonl expects path as a path, .* got TrainState"):
        train(fl.to_jsonl)


def test_it_shows_itself_as_it_was_typed():
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

hooks = (fl.to_csv(folder + "/a.csv"), fl.to_jsonl(folder + "/a.jsonl"), fl.every(steps=3)(fl.checkpoint(folder + "/ck")), die)
fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=100, hooks=hooks)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_a_kill_loses_nothing_and_the_run_that_goes_on_doubles_nothing(tmp_path):
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
