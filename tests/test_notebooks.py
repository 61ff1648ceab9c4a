"""The notebooks run from top to bottom, and again, and what they say is true."""

import copy
import inspect
import itertools  # noqa: F401  # this import, and others below, are used in the table
import os
import random
import re
from pathlib import Path

import attrs  # noqa: F401
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR  # noqa: F401
from torch.utils.data import DataLoader, Subset, TensorDataset  # noqa: F401

import fnloop as fl

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(fl.__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BOOKS = {path.stem: nbformat.read(path, as_version=4) for path in NOTEBOOKS}
COMING = BOOKS["coming_from_a_trainer"].cells


def test_every_notebook_is_here_and_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert set(BOOKS) == {
        *("all_of_fnloop", "averages_of_weights", "coming_from_a_trainer", "many_processes"),
        *("one_bad_sample", "recipes", "resume_and_checkpoints", "write_your_own_middleware"),
    }
    assert [path.name for path in NOTEBOOKS if path.name not in readme] == []


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_is_stripped_and_knows_no_machine(name):
    nbformat.validate(BOOKS[name])
    assert set(BOOKS[name].metadata) == {"kernelspec", "language_info"}
    for cell in BOOKS[name].cells:
        assert cell.metadata == {}
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), (
            f"give the cell {cell.id} a name of words, which stays"
        )
        assert not re.search(r"/(home|root|tmp|work|usr|opt|Users)/|[A-Z]:\\", cell.source)
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), (
                f"strip the outputs of {cell.id}"
            )


@pytest.mark.parametrize("name", BOOKS)
def test_the_links_of_a_notebook_lead_somewhere(name):
    links = {
        target
        for cell in BOOKS[name].cells
        for target in re.findall(r"\]\(([^):]+\.ipynb)\)", cell.source)
    }
    assert {target for target in links if not (ROOT / "notebooks" / target).exists()} == set()


# These find what their first run has left. Of each notebook a cell is run again.
PROCESSES = "many_processes"
REPEATED = ("all_of_fnloop", "resume_and_checkpoints", "write_your_own_middleware")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    [
        *((name, 1) for name in BOOKS if name != PROCESSES),
        pytest.param(PROCESSES, 1, marks=pytest.mark.long),  # as much as all the others together
        *(pytest.param(name, 2, marks=pytest.mark.long) for name in REPEATED),
    ],
)
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


def right_hand_sides():
    (table,) = (cell.source for cell in COMING if cell.id == "table")
    rows = [
        line.strip("| ").split(" | ")
        for line in table.splitlines()
        if line.startswith("| ") and "you wrote" not in line
    ]
    assert all(len(row) == 2 for row in rows), "a | in the code of a row"
    return [
        code for _, right in rows for code in re.findall(r"`([^`]+)`", right) if code not in WORDS
    ]


WORDS = (
    "fit",
    "except",
    ".state",
    "state.run",
    "state -> state",
    "evaluate_every=",
    "batch_sampler=",
    "collate_fn=",
    "fully_shard(model)",
    "fl.schedule",
)


def names(folder):
    """Return what the right column uses: data, a trained model, a folder with its checkpoints."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    dataset = TensorDataset(torch.randn(1000, 3), torch.arange(1000) % 2)
    train, valid, test = (DataLoader(dataset, batch_size=250) for _ in range(3))
    loss_fn = fl.supervised(criterion)
    accuracy = fl.metric(
        accuracy=lambda aux, batch: (aux["output"].argmax(1) == batch[1]).float().mean()
    )
    step = fl.pipeline(fl.schedule(fl.schedules.constant()), accuracy)(loss_fn)
    saves = fl.checkpoint(folder, best="valid/loss")
    state = fl.fit(
        step, fl.TrainState.create(model, optimizer), (train, valid), epochs=1, hooks=(saves,)
    )
    hook, other_loss_fn, out = (lambda state: state), loss_fn, fl.Output(torch.tensor(0.0), 1)
    path, saved, device, number_of_tokens, batch = (
        folder / "file",
        fl.latest(folder),
        "cpu",
        3,
        next(iter(train)),
    )
    return globals() | locals()


@pytest.fixture
def settings_of_torch():
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.slow
@pytest.mark.parametrize("code", right_hand_sides())
def test_a_right_hand_side_is_code_that_runs(code, tmp_path, monkeypatch, settings_of_torch):
    monkeypatch.chdir(tmp_path)
    known = names(tmp_path)
    if "MulticlassF1Score" in code:
        known["MulticlassF1Score"] = pytest.importorskip(
            "torchmetrics.classification"
        ).MulticlassF1Score
    if "tensorboard" in code:
        pytest.importorskip("tensorboard")
    if re.match(r"def |[a-z, ]+ = ", code):
        exec(code, known)
        use(known["loss_fn"] if code.startswith("def") else None, known)
    else:
        use(eval(code, known), known)


def use(value, known):
    """Train with what a piece of code has made; if that is a state, continue from it."""
    settings = {"step": known["step"], "loaders": (known["train"], known["valid"]), "hooks": ()}
    wants = (
        [*inspect.signature(value).parameters]
        if callable(value) and not isinstance(value, type)
        else []
    )
    if isinstance(value, fl.TrainState):
        known["state"] = value
    elif isinstance(value, fl.Middleware):
        settings["step"] = fl.pipeline(value)(known["loss_fn"])
    elif hasattr(value, "evaluate"):
        settings["step"] = value
    elif wants == ["model", "batch"]:
        settings["step"] = fl.pipeline()(value)
    elif wants == ["state"]:
        settings["hooks"] = (value,)
    elif hasattr(value, "due"):
        settings["evaluate_every"] = value
    elif isinstance(value, tuple) and value[0] is known["train"]:
        settings["loaders"] = value
    elif value is not None:
        return  # a number, a table, a module, ...: it exists, and cannot be trained with
    state = known["state"]
    updates = state.step + 2
    state = fl.fit(state=state, steps=updates, **settings)
    assert state.step == updates or state.stop
