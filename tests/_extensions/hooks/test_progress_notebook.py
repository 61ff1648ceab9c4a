"""progress in a notebook: one output of a cell, as text."""

import contextlib
import io

import pytest
from sample_hooks import raise_at, stop_at
from toy_runs import ONE, fit, timed

import fnloop as fl
from fnloop import progress
from fnloop.extend import reprs, tables


@pytest.fixture
def cell(monkeypatch):
    """What a notebook would show: the outputs, each a list of its drawings, as lines."""
    outputs = []

    class Display:
        def show(self, value):
            assert value._repr_html_().count("<tr>") == value.html.count("<tr>")
            if not hasattr(self, "drawings"):
                self.drawings = []
                outputs.append(self.drawings)
            self.drawings.append(repr(value).splitlines())

    monkeypatch.setattr(tables, "Display", Display)
    monkeypatch.setattr(reprs, "in_notebook", lambda: True)
    return outputs


def rows(drawing, column=0):
    """Return one of the first cells of each row of the table of a drawing: epoch or step."""
    firsts = [line.split("│")[0].split() for line in drawing if "│" in line]
    return [cells[column] for cells in firsts[2:] if len(cells) > column]


def stream():
    while True:
        yield ONE


def test_a_cell_has_one_output_which_ends_as_a_table(cell, clock):
    fit(progress(), step=timed(clock, 0.125, 0.125), train=3, valid=1, epochs=2)
    (drawings,) = cell
    facts = "Toy on cpu, 1 parameter, float32, 2 epochs of 3 updates, evaluated on valid"
    assert drawings[0] == [
        facts,
        "epoch 1/2 · 1/3 · 8.00 step/s · loss 0.0000 · lr 1.0e+00 · 1s left",
    ]
    assert drawings[-1] == [
        facts, "            │ valid    │ train", "epoch  step │    loss  │    loss       lr │ time",
        "    1     3 │ -3.0000* │ -1.0000  1.0e+00 │ 0.5s",
        "    2     6 │ -6.0000* │ -4.0000  1.0e+00 │ 0.5s",
        "done: epoch 2/2, step 6, after 1.0s; best valid/loss -6.0000 at step 6",
    ]  # fmt: skip


def test_a_stream_has_a_row_per_interval_and_only_its_middle_is_cut(cell, clock):
    for steps in (4, 400):
        fit(progress(), loaders=stream, steps=steps, record_every=fl.every(steps=2))
    assert rows(cell[0][-1])[:2] == ["1", "1"]
    steps = [int(step) for step in rows(cell[1][-1], 1) if step.isdigit()]
    assert steps == [*range(2, 22, 2), *range(384, 401, 2), 400]  # the last one is of the run


def test_an_evaluation_has_a_bar(cell, clock):
    fit(progress(), step=timed(clock, 1.0, 1.0), train=2, valid=4)
    bars = [drawing[-1] for drawing in cell[0] if "valid " in drawing[-1]]
    assert bars == [
        "epoch 1/1 · valid · 0/4",
        *(f"epoch 1/1 · valid · {i}/4 · 1.00 batch/s · {4 - i}s left" for i in (1, 2, 3, 4)),
    ]


def test_a_cell_has_columns_for_the_metrics_of_its_own_run_only(cell):
    """Even the metric of a record in the middle has its column; the record is the best one."""
    state = fit(loaders={"train": [ONE], "test": [ONE]})
    seldom = fl.when(lambda state: state.step == 13)
    fit(progress(), state=state, train=1, valid=1, epochs=26, evaluate_every=seldom)
    drawing = cell[0][-1]
    assert drawing[2].split() == ["epoch", "step", "│", "loss", "│", "loss", "lr", "│", "time"]
    assert drawing[1].split() == ["│", "valid", "│", "train"]
    assert rows(drawing) == [*map(str, range(2, 14)), "…", *map(str, range(17, 27))]


@pytest.mark.parametrize(("end", "lines"), [
    (stop_at(2), ["    1     2 │ -0.5000  1.0e+00 │ 0.0s",
                  "stopped: enough; epoch 1/1, step 2, after 0.0s"]),
    (raise_at(3, RuntimeError), ["failed: RuntimeError: no; epoch 1/1, step 3, after 0.0s"]),
])  # fmt: skip
def test_how_it_ends_is_shown_below_the_table(cell, clock, end, lines):
    with contextlib.suppress(RuntimeError):
        fit(progress(), end)
    assert cell[0][-1][-len(lines) :] == lines
    assert len(cell[0][-1]) == (2 if "failed" in lines[0] else 5)  # a line, and a head


def test_it_writes_to_a_file_if_given_one(cell):
    file = io.StringIO()
    fit(progress(file=file), train=1)
    assert cell == []
    assert "epoch 1/1  step 1  train/loss 0.0000" in file.getvalue()
