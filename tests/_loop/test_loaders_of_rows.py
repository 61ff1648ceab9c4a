"""What looks like samples or like one batch is not taken as batches in silence."""

import collections
import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop.debug import verify
from fnloop.testing import toy, toy_loss

STEP = fl.pipeline()(toy_loss)
X = torch.ones(4)
CALLS = {
    "fit": lambda loader: fl.fit(STEP, toy(), loader, hooks=()),
    "valid": lambda loader: fl.fit(STEP, toy(), {"train": [X], "valid": loader}, hooks=()),
    "evaluate": lambda loader: fl.evaluate(STEP, toy(), loader),
    "predict": lambda loader: [*fl.predict(lambda model, batch: batch, toy(), loader)],
    "find_lr": lambda loader: fl.find_lr(STEP, toy(), loader, updates=10),
    "tune": lambda loader: fl.data.tune(STEP, toy(), loader, seconds=0.01),
    "dry_run": lambda loader: fl.dry_run(STEP, toy(), loader),
    "take": lambda loader: fl.data.take(loader, 1),
    "sharded": fl.sharded,
    "update_batchnorm": lambda loader: fl.update_batchnorm(STEP, toy(), loader),
}  # fmt: skip


def table():
    return pytest.importorskip("pandas").DataFrame({"x": [1.0, 2.0]})


ROWS = {
    "table": (table, r"a DataFrame, .* write list\(torch\.tensor\(x\.to_numpy\(\)\)\.split"),
    "column": (lambda: table()["x"], r"a Series, .* write list\(torch\.tensor\(x\.to_numpy"),
    "pair": (lambda: (X, X), "a pair of tensors, which looks like one batch: write .batch. for"),
    "mapping": (lambda: {"x": X, "y": X}, r"\['x', 'y'\]. If this is one batch, write \[batch\]"),
    "its own mapping": (lambda: collections.UserDict(x=X), "If this is one batch, write .batch."),
    "dataset": (lambda: TensorDataset(X), "a TensorDataset, a dataset of samples: wrap it in a Da"),
    "text": (lambda: "abc", "must be an iterable of batches .*; got 'abc'"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("call", CALLS)
def test_what_has_rows_is_refused_everywhere(call, name):
    make, said = ROWS[name]
    with pytest.raises((TypeError, ValueError), match=said):
        CALLS[call](make())


@pytest.mark.parametrize("call", ["fit", "valid", "evaluate", "predict", "tune", "take", "sharded"])
def test_rows_of_a_tensor_are_batches_and_a_warning_says_so(call, caplog):
    CALLS[call](torch.ones(3, 2))
    (said,) = [r.getMessage() for r in caplog.records if "is taken as a batch" in r.getMessage()]
    assert re.search(r"a Tensor of shape \(3, 2\), .* write list\(x\.split\(32\)\)", said)
    assert call != "valid" or "the valid loader" in said


def test_rows_of_an_array_are_batches_and_a_warning_says_so(caplog):
    assert len([*fl.data.take(np.ones((3, 2)), 2)]) == 2
    assert "of shape (3, 2)" in caplog.text and "list(torch.tensor(x).split(32))" in caplog.text


def test_numbers_in_a_vector_are_batches_of_one(caplog):
    assert fl.fit(STEP, toy(), X, hooks=()).step == 4
    assert not caplog.records


@pytest.mark.parametrize("rows", [lambda: torch.ones(3, 2), lambda: np.ones((3, 2)), table])
def test_what_the_message_says_to_write_is_a_loader(rows):
    values = torch.tensor(np.asarray(rows()))
    assert fl.fit(STEP, toy(), list(values.split(32)), hooks=()).step == 1


@pytest.mark.parametrize("loader", [
    [*X], [X, X], (X, X, X), X.split(1), DataLoader(TensorDataset(X), 2), collections.deque([X]),
], ids=lambda loader: type(loader).__name__)  # fmt: skip
def test_rows_in_a_list_and_batches_in_a_tuple_are_the_users_own(loader):
    loss = lambda model, batch: toy_loss(model, batch[0] if isinstance(batch, list) else batch)
    assert fl.fit(fl.pipeline()(loss), toy(), loader, hooks=()).step > 0


def test_datasets_in_a_tuple_are_loaders():
    for call in ("evaluate", "predict"):
        with pytest.raises(TypeError, match="got a tuple of 2 loaders: take one of them"):
            CALLS[call]((TensorDataset(X), TensorDataset(X)))


def test_verify_reads_its_loaders_likewise():
    with pytest.raises(TypeError, match="whose rows are no batches"):
        verify("runs/a", STEP, toy(), table())
