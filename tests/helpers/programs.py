"""Small programs of users, and what they are told."""

import contextlib

PRELUDE = """
import math
from pathlib import Path
import attrs, torch
import fnloop as fl
from fnloop import *
from fnloop import data, debug, schedules, testing
from fnloop.data import *
from fnloop.schedules import *
from fnloop.testing import *
from torch import nn
from torch.utils.data import DataLoader

def loss_fn(model, batch):
    return model(batch).mean()

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def state_of(model):
    return TrainState.create(model, sgd(model), seed=0)

def adam_of(model):
    return TrainState.create(model, torch.optim.Adam(model.parameters()), seed=0)

def folder_exists(folder):
    return Path(folder).exists()

model = nn.Linear(2, 1)
optimizer = sgd(model)
state = TrainState.create(model, optimizer, seed=0)
step = pipeline()(loss_fn)
batch = torch.ones(3, 2)
loader = loaders = train = valid = batches = [batch] * 4
"""


def run(program, folder, caplog):
    """Run a program; return what it said: the messages of its log, and its error with the notes."""
    caplog.clear()
    names = {"folder": str(folder / "runs"), "path": str(folder / "saved"), "__name__": "__main__"}
    exec(PRELUDE, names)
    error = None
    try:
        with contextlib.redirect_stdout(None):
            exec(compile(program, "program", "exec"), names)
    except Exception as raised:
        error = raised
    said = [*caplog.messages]
    if error is not None:
        said += [str(error.args[0] if isinstance(error, KeyError) else error)]
        said += getattr(error, "__notes__", [])
    return said, error
