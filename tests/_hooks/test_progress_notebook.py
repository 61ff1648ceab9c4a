"""progress in a notebook: one output of a cell, as text."""

import io
from unittest import mock

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import progress
from fnloop._display import tables
from fnloop.testing import toy, toy_loss

ONE = torch.tensor([1.0])  # each update lowers w, and so the next loss, by 1
STEP = fl.pipeline()(toy_loss)


class Cell:
    """Collects what a notebook would show: each drawing of each output, as text."""

    def __init__(self):
        self.outputs = []

    def __enter__(self):
        cell = self

        class Display:
            def show(self, value):
                assert value._repr_html_().count("<tr>") == value.html.count("<tr>")
                if not hasattr(self, "drawings"):
                    self.drawings = []
                    cell.outputs.append(self.drawings)
                self.drawings.append(repr(value).splitlines())

        self.patches = [mock.patch.object(tables, "Display", Display)]
        self.patches.append(mock.patch.object(tables, "in_notebook", lambda: True))
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()


@pytest.fixture
def cell():
    with Cell() as cell:
        yield cell


def rows(drawing):
    """Return the first cell of each row of the table of a drawing."""
    firsts = [line.split("│")[0].split() for line in drawing if "│" in line]
    return [cells[0] for cells in firsts[2:]]


def test_a_cell_has_one_output_which_ends_as_a_table(cell, clock):
    step = fl.pipeline()(clock.timed(toy_loss, 0.125, 0.125))
    fl.fit(step, toy(), {"train": [ONE] * 3, "valid": [ONE]}, epochs=2, hooks=(progress(),))
    (drawings,) = cell.outputs
    facts = "Toy on cpu, 1 parameter, float32, 2 epochs of 3 updates, evaluated on valid"
    assert drawings[0] == [
        facts,
        "epoch 1/2 · 1/3 · 8.00 step/s · loss 0.0000 · lr 1.0e+00 · 1s left",
    ]
    assert drawings[-1] == [
        facts,
        "            │ valid    │ train",
        "epoch  step │    loss  │    loss       lr │ time",
        "    1     3 │ -3.0000  │ -1.0000  1.0e+00 │ 0.5s",
        "    2     6 │ -6.0000* │ -4.0000  1.0e+00 │ 0.5s",
        "done: epoch 2/2, step 6, after 1.0s; best valid/loss -6.0000 at step 6",
    ]


def test_in_a_cell_a_stream_has_a_row_per_interval_and_only_its_middle_is_cut(cell, clock):
    def stream():
        while True:
            yield ONE

    moment, hooks = fl.every(steps=2), (progress(),)
    fl.fit(STEP, toy(), stream, steps=4, hooks=hooks, record_every=moment)
    assert rows(cell.outputs[0][-1])[:2] == ["1", "1"]
    fl.fit(STEP, toy(), stream, steps=400, hooks=hooks, record_every=moment)
    shown = [line.split("│")[0].split() for line in cell.outputs[1][-1] if "│" in line][2:]
    steps = [int(cells[1]) for cells in shown if cells[1].isdigit()]
    assert steps == [*range(2, 22, 2), *range(384, 401, 2), 400]  # the last one is of the run


def test_in_a_cell_a_stream_that_continues_has_the_time_of_its_first_interval(cell, clock):
    def stream():
        while True:
            yield ONE

    step, often = fl.pipeline()(clock.timed(toy_loss, 1.0)), {"record_every": fl.every(steps=2)}
    state = fl.fit(step, toy(), stream, steps=8, hooks=(), **often)
    fl.fit(step, state, stream, steps=12, hooks=(progress(),), **often)
    first = next(line for line in cell.outputs[0][-1] if " 10 │" in line)
    assert first.split("│")[-1].strip() == "2.0s"


def test_in_a_cell_the_means_of_intervals_have_no_column_beside_those_of_epochs(cell, clock):
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(progress(),), record_every=fl.every(steps=2))
    assert not any("recent" in line for line in cell.outputs[0][-1])
    assert rows(cell.outputs[0][-1]) == ["1"]


def test_in_a_cell_the_table_grows_above_the_bar(cell, clock):
    step = fl.pipeline()(clock.timed(toy_loss, 1.0))
    fl.fit(step, toy(), [ONE] * 4, epochs=2, hooks=(progress(),))
    ((*_, last_but_two, last_but_one, _),) = cell.outputs
    assert rows(last_but_two) == ["1"]
    assert last_but_two[-1] == "epoch 2/2 · 3/4 · 1.00 step/s · loss -5.0000 · lr 1.0e+00 · 1s left"
    assert rows(last_but_one) == ["1", "2"]
    assert last_but_one[-1] == "epoch 2/2 · 4/4 · 1.00 step/s · loss -5.5000 · lr 1.0e+00 · 0s left"


def test_an_evaluation_has_a_bar_in_the_cell(cell, clock):
    step = fl.pipeline()(clock.timed(toy_loss, 1.0, 1.0))
    fl.fit(step, toy(), ([ONE] * 2, [ONE] * 4), hooks=(progress(),))
    bars = [drawing[-1] for drawing in cell.outputs[0] if "valid " in drawing[-1]]
    assert bars == [
        "epoch 1/1 · valid · 0/4",
        "epoch 1/1 · valid · 1/4 · 1.00 batch/s · 3s left",
        "epoch 1/1 · valid · 2/4 · 1.00 batch/s · 2s left",
        "epoch 1/1 · valid · 3/4 · 1.00 batch/s · 1s left",
        "epoch 1/1 · valid · 4/4 · 1.00 batch/s · 0s left",
    ]


def test_a_cell_has_columns_for_the_metrics_of_its_own_run_only(cell, clock):
    """Even the metric of a record in the middle has its column; the record is the best one."""
    hook, hours = progress(), 13
    state = fl.fit(STEP, toy(), {"train": [ONE], "test": [ONE]}, hooks=())
    seldom = fl.when(lambda state: state.step == hours)
    loaders = {"train": [ONE], "valid": [ONE]}
    fl.fit(STEP, state, loaders, epochs=26, hooks=(hook,), evaluate_every=seldom)
    drawing = cell.outputs[0][-1]
    assert drawing[2].split() == ["epoch", "step", "│", "loss", "│", "loss", "lr", "│", "time"]
    assert drawing[1].split() == ["│", "valid", "│", "train"]
    assert rows(drawing) == [*map(str, range(2, 14)), "…", *map(str, range(17, 27))]


def test_a_cell_shows_the_records_of_its_own_run_only(cell, clock):
    hook = progress()
    state = fl.fit(STEP, toy(), [ONE], epochs=2, hooks=(hook,))
    fl.fit(STEP, state, [ONE], epochs=5, hooks=(hook,))
    first, second = cell.outputs
    assert rows(first[-1]) == ["1", "2"]
    assert rows(second[-1]) == ["3", "4", "5"]


def test_a_cell_marks_the_best_of_all_runs_as_a_log_does(cell, clock):
    losses = iter([0.5, 0.25, 0.75, 0.375, 0.125])

    def loss_fn(model, batch):
        loss, aux = toy_loss(model, batch)
        return (loss if model.training else loss * 0 + next(losses)), aux

    step, loaders = fl.pipeline()(loss_fn), ([ONE], [ONE])
    state = fl.fit(step, toy(), loaders, epochs=2, hooks=(progress(),))
    state = fl.fit(step, state, loaders, epochs=4, hooks=(progress(),))
    fl.fit(step, state, loaders, epochs=5, hooks=(progress(),))
    marked = [[line.split()[0] for line in out[-1] if "*" in line] for out in cell.outputs]
    assert marked == [["2"], [], ["5"]]
    assert cell.outputs[1][-1][-1].endswith("best valid/loss 0.2500 at step 2")


def test_a_cell_leaves_out_the_middle_of_a_long_run(cell, clock):
    fl.fit(STEP, toy(), [ONE], epochs=50, hooks=(progress(),))
    ((_, last),) = cell.outputs
    assert rows(last) == [*map(str, range(1, 11)), "…", *map(str, range(41, 51))]


def test_the_reason_of_a_stop_is_shown_below_the_table(cell, clock):
    stop = fl.when(lambda state: state.step == 2)(lambda state: attrs.evolve(state, stop="enough"))
    fl.fit(STEP, toy(), [ONE] * 4, hooks=(progress(), stop))
    assert cell.outputs[0][-1][1:] == [
        "            │ train",
        "epoch  step │    loss       lr │ time",
        "    1     2 │ -0.5000  1.0e+00 │ 0.0s",
        "stopped: enough; epoch 1/1, step 2, after 0.0s",
    ]


def test_an_exception_leaves_no_bar(cell, clock):
    def fail(state):
        return 1 / (3 - state.step) and state

    with pytest.raises(ZeroDivisionError):
        fl.fit(STEP, toy(), [ONE] * 4, hooks=(progress(), fail))
    _, note = cell.outputs[0][-1]
    assert note == "failed: ZeroDivisionError: division by zero; epoch 1/1, step 3, after 0.0s"


def test_a_run_that_is_abandoned_keeps_its_records(cell, clock):
    states = fl.run(STEP, toy(), [ONE] * 2, epochs=9, hooks=(progress(),))
    for state in states:
        if state.epoch == 2:
            break
    states.close()
    assert rows(cell.outputs[0][-1]) == ["1", "2"]
    assert cell.outputs[0][-1][-1] == "ended early: epoch 2/9, step 4, after 0.0s"


def test_in_a_notebook_it_writes_to_a_file_if_given_one(cell):
    file = io.StringIO()
    fl.fit(STEP, toy(), [ONE], hooks=(progress(file=file),))
    assert cell.outputs == []
    assert "epoch 1/1  step 1  train/loss 0.0000" in file.getvalue()
