"""The notebooks run from top to bottom, and again, and what they say is true."""

import copy
import os
import random
import re
from pathlib import Path

import pytest

import fnloop as fl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(fl.__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BOOKS = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
GENERATED = {"reference/index.rst"}  # when the book is built
COMING = BOOKS["coming_from_a_trainer"].cells


def test_every_notebook_is_here():
    assert set(BOOKS) == {
        *("all_of_fnloop", "averages_of_weights", "coming_from_a_trainer", "many_processes"),
        *("one_bad_sample", "recipes", "resume_and_checkpoints", "write_your_own_middleware"),
    }


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_is_stripped_and_knows_no_machine(name):
    nbformat.validate(BOOKS[name])
    assert set(BOOKS[name].metadata) == {"kernelspec", "language_info"}
    for cell in BOOKS[name].cells:
        assert cell.metadata == {}
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), "give the cell a name that stays"
        assert not re.search(r"/(home|root|tmp|work|usr|opt|Users)/|[A-Z]:\\", cell.source)
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), f"strip {cell.id}"


@pytest.mark.parametrize("name", BOOKS)
def test_the_links_of_a_notebook_lead_somewhere(name):
    links = {
        target
        for cell in BOOKS[name].cells
        for target in re.findall(r"\]\(([^):#]+\.(?:ipynb|md|rst|py))\)", cell.source)
    }
    assert {target for target in links if not (ROOT / "notebooks" / target).exists()} <= GENERATED


# Of each notebook a cell is run again; of these, which find what their first run has left, all.
REPEATED = ("all_of_fnloop", "write_your_own_middleware")
OFTEN = ("coming_from_a_trainer", "one_bad_sample")  # the others are long


@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [
    *((name, 1) for name in OFTEN),
    *(pytest.param(name, 1 + (name in REPEATED), marks=pytest.mark.long)
      for name in BOOKS if name not in OFTEN),
])  # fmt: skip
def test_a_notebook_runs_and_runs_again(name, times, tmp_path):
    book = copy.deepcopy(BOOKS[name])
    cells = [(i, cell) for i, cell in enumerate(book.cells) if cell.cell_type == "code"]
    client = nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    settings = {"PYTHONPATH": path, "IPYTHONDIR": str(tmp_path / "ipython"), "OMP_NUM_THREADS": "1"}
    again = random.Random(name).choice(cells[1:-1])
    with client.setup_kernel(env=os.environ | settings):
        for i, cell in [*cells, *((again,) if times == 1 else cells)]:
            client.execute_cell(cell, i)
    texts = [out.text for _, cell in cells for out in cell.outputs if out.output_type == "stream"]
    # Of tqdm, which optuna imports, where ipywidgets are missing
    assert not [text for text in texts if "Warning" in text and "IProgress not found" not in text]


def test_one_bad_sample_has_ten_cells_at_most():
    assert len(BOOKS["one_bad_sample"].cells) <= 10


def lines(code):
    return [line for line in code.splitlines() if line.strip()]


def test_a_recipe_has_at_most_fifteen_lines():
    cells = {cell.id: cell.source for cell in BOOKS["recipes"].cells if cell.cell_type == "code"}
    assert [name for name, source in cells.items() if len(lines(source)) > 15] == []


# --- coming_from_a_trainer


@pytest.mark.parametrize(
    "name", ["pytorch-accelerated", "lightning", "lightning-classifier", "fastnlp"]
)
def test_an_example_has_no_more_lines_than_theirs(name):
    source = {cell.id: cell.source for cell in COMING}
    (theirs,) = re.findall(r"```python\n(.*?)```", source[name], re.S)
    assert len(lines(source[f"{name}-here"])) <= len(lines(theirs))
