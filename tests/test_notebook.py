"""fnloop in a notebook: a real kernel runs cells, and the tests read their outputs."""

import os
from pathlib import Path

import pytest

import fnloop

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow

SETUP = """
import torch, fnloop as fl
from fnloop.testing import toy, toy_loss

torch.set_num_threads(1)
step, batches = fl.pipeline()(toy_loss), [torch.tensor([1.0])] * 4
loaders = {"train": batches, "valid": batches[:1]}
state = fl.fit(step, toy(), loaders, epochs=1, hooks=())
"""


class Notebook:
    """A kernel and its cells."""

    def __init__(self):
        self.book = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": Path(fnloop.__file__).parents[1]}}
        settings = {"timeout": 120, "allow_errors": True, "resources": resources}
        self.client = nbclient.NotebookClient(self.book, kernel_name="python3", **settings)

    def run(self, source):
        """Run a new cell and return it."""
        self.book.cells.append(nbformat.v4.new_code_cell(source))
        return self.again(self.book.cells[-1])

    def again(self, cell):
        """Run a cell again."""
        return self.client.execute_cell(cell, self.book.cells.index(cell))


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook()
    env = os.environ | {"IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    with notebook.client.setup_kernel(env=env):
        assert notebook.run(SETUP).outputs == []
        yield notebook


def shown(cell):
    """Return the kind and the data of each output of a cell."""
    return [(out.output_type, out.get("data", {})) for out in cell.outputs]


def only(cell, mime):
    """Return the only output of a cell, in a format."""
    ((_, data),) = shown(cell)
    return data[mime]


def test_a_run_is_one_output_with_a_row_per_epoch(notebook):
    cell = notebook.run("state = fl.fit(step, toy(), loaders, epochs=5)")
    html = only(cell, "text/html")
    assert html.count("<tr>") == 2 + 5
    assert ">valid</th>" in html
    assert "width:100%" not in html  # the bar is gone
    facts, *_, last, end = only(cell, "text/plain").splitlines()
    assert facts == "Toy on cpu, 1 parameter, float32, 5 epochs of 4 updates, evaluated on valid"
    row = last.replace("│", "").split()
    assert row[:4] == ["5", "20", "-20.0000*", "-17.5000"]  # w falls by 1 per update
    assert end.startswith("done: epoch 5/5, step 20, after ")


def test_running_a_cell_again_adds_no_output(notebook):
    cell = notebook.run("state = fl.fit(step, toy(), loaders, epochs=5)")
    for _ in range(2):
        notebook.again(cell)
        assert [kind for kind, _ in shown(cell)] == ["display_data"]


def test_a_run_that_has_nothing_to_do_says_so_and_not_as_an_error(notebook):
    cell = notebook.run("state = fl.fit(step, state, loaders, epochs=state.epoch)")
    (said,) = cell.outputs
    assert (said.output_type, said.name) == ("stream", "stdout")
    assert said.text.startswith("fit: nothing to do: the state is at epoch ")
    cell = notebook.run(
        "import logging; logging.basicConfig()\n"
        "state = fl.fit(step, state, loaders, epochs=state.epoch)\n"
        "logging.root.handlers.clear()"
    )
    assert [said.name for said in cell.outputs] == ["stderr"]  # where the program logs


def test_live_plot_redraws_one_picture(notebook):
    cell = notebook.run(
        "state = fl.fit(step, toy(), loaders, epochs=5, hooks=(fl.live_plot(refresh=0),))"
    )
    ((kind, data),) = shown(cell)
    assert kind == "display_data"
    assert len(data["image/png"]) > 1000
    notebook.again(cell)
    assert len(cell.outputs) == 1


def test_a_figure_is_shown_once(notebook):
    for ask in ("state.history.plot()", "fl.schedules.plot(fl.schedules.linear(), 10)"):
        ((kind, data),) = shown(notebook.run(ask))
        assert kind == "execute_result" and "image/png" in data


@pytest.mark.parametrize("value", [
    "state", "state.history", "state.history[0]", "step", "fl.pipeline(fl.clip(1.0))",
    "fl.RunInfo(epochs=2)", "fl.schedules.linear()", "step(fl.snapshot(state), batches[0])[1]",
])  # fmt: skip
def test_the_value_of_a_cell_is_shown_as_html_and_as_text(notebook, value):
    ((kind, data),) = shown(notebook.run(value))
    assert (kind, sorted(data)) == ("execute_result", ["text/html", "text/plain"])
    (printed,) = notebook.run(f"print(repr({value}))").outputs
    assert data["text/plain"] == printed["text"].rstrip("\n")
