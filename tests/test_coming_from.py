"""The tables "you wrote ..., you write ..." are code that runs, and know what the library has."""

import inspect
import re
from pathlib import Path

import attrs  # noqa: F401  # this import, and others below, are used in the tables
import pytest
import torch
from accelerate import Accelerator  # noqa: F401
from public_names import MODULES, values
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR  # noqa: F401
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl

FOLDER = Path(fl.__file__).parents[1] / "notebooks" / "coming_from"
LIBRARIES = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
# Words of the right columns that are no code of their own.
WORDS = {
    *("fit", "except", ".state", "state.run", "state -> state", "evaluate_every="),
    *("batch_sampler=", "collate_fn=", "fully_shard(model)", "fl.schedule", "fl.Hook"),
    *("accelerate launch", "torchrun", "save_pretrained", "averaged(state)", 'track("wandb")'),
    "lambda model, batch: model(**batch).loss",  # of a model of transformers
}


def rows(library):
    """Return the rows of the tables of a page: what was written, and what is written."""
    lines = (FOLDER / f"{library}.md").read_text().splitlines()
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert all(len(row) == 2 for row in found), "a | in the code of a row"
    return [row for row in found if row[0] != "you wrote"]


def code_of(library):
    found = {code for _, right in rows(library) for code in re.findall(r"`([^`]+)`", right)}
    return sorted(found - WORDS)


# --- every row is up to date


def replaced():
    """Return what public names replace, as their docstrings say: (name, library, its name)."""
    return [
        (name.removeprefix("fnloop."), library, theirs)
        for name, value in values(*MODULES).items()
        for line in re.findall(r"^Replaces: (.+(?:\n.+)*)$", inspect.getdoc(value) or "", re.M)
        for library, theirs in re.findall(r"(\w+)\.(\w+)", line)
    ]


REPLACED = replaced()


def test_the_docstrings_name_their_counterparts():
    assert len(REPLACED) > 40 and {library for _, library, _ in REPLACED} <= LIBRARIES


@pytest.mark.parametrize(("name", "library", "theirs"), REPLACED, ids="{}".format)
def test_what_a_docstring_replaces_has_its_row(name, library, theirs):
    found = [right for left, right in rows(library) if re.search(rf"\b{theirs}\b", left)]
    own = re.escape(name.rpartition(".")[2])
    assert [right for right in found if re.search(rf"\b{own}\b", right)], (
        f"{library}.md has no row {theirs} -> {name}"
    )


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_no_row_denies_what_there_is(library):
    denied = [left for left, right in rows(library) if "not in fnloop" in right.lower()]
    there = {theirs for _, of, theirs in REPLACED if of == library}
    assert [left for left in denied if there & set(re.findall(r"\w+", left))] == []


# --- the right column runs


def names(folder):
    """Return what the right columns use: data, a trained model, a folder with its checkpoints."""
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
    path, saved, batch = folder / "file", fl.latest(folder), next(iter(train))
    device, number_of_tokens = "cpu", 3
    return globals() | locals()


@pytest.fixture
def settings_of_torch():
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


ALL_CODE = sorted({code for library in LIBRARIES for code in code_of(library)})
NOT_TRAINED = ("fl.cuda_graph()", "fl.compiled()")  # the first needs a GPU, the second a minute


@pytest.mark.slow
@pytest.mark.parametrize("code", ALL_CODE)
def test_a_right_hand_side_is_code_that_runs(code, tmp_path, monkeypatch, settings_of_torch):
    if code in NOT_TRAINED:
        assert isinstance(eval(code), fl.Middleware)
        return
    monkeypatch.chdir(tmp_path)
    known = names(tmp_path)
    if "MulticlassF1Score" in code:
        kinds = pytest.importorskip("torchmetrics.classification")
        known["MulticlassF1Score"] = kinds.MulticlassF1Score
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
    is_function = callable(value) and not isinstance(value, type)
    wants = [*inspect.signature(value).parameters] if is_function else []
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
