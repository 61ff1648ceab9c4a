"""Batches that are read at once: those of DataLoader, bit for bit, or the plain way."""

import random
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

import fnloop as fl
from fnloop._extensions.loaders.rows import fetch_batch
from fnloop.extend import Source
from fnloop.testing import toy

X = torch.arange(10 * 3 * 4 * 5).float().view(10, 3, 4, 5)
Y = torch.arange(10)


def by_samples(dataset, index):
    many = getattr(dataset, "__getitems__", None)
    return torch.utils.data.default_collate(many(index) if many else [dataset[i] for i in index])


def equal(mine, theirs):
    """Return whether two batches are the same, containers, dtypes and strides included."""
    if not isinstance(theirs, torch.Tensor):
        if isinstance(theirs, str):
            return mine == theirs
        if type(mine) is not type(theirs) or len(mine) != len(theirs):
            return False
        names = list(theirs) if isinstance(theirs, dict) else range(len(theirs))
        return all(equal(mine[name], theirs[name]) for name in names)
    alike = type(mine) is torch.Tensor and mine.dtype == theirs.dtype
    return alike and mine.stride() == theirs.stride() and torch.equal(mine, theirs)


class Doubled(TensorDataset):
    def __getitem__(self, i):
        return tuple(2 * part for part in super().__getitem__(i))


class Chosen(Subset):
    def __getitems__(self, indices):
        return [(torch.zeros(1),) for _ in indices]


def nested():
    part, _ = random_split(TensorDataset(X, Y), [8, 2], torch.Generator().manual_seed(0))
    return Subset(Subset(part, range(7)), np.array([6, 2, 5, 1, 0]))


def in_a_row(make):
    return ConcatDataset([make(X[:2], Y[:2]), make(X[2:], Y[2:])])


def mapped(values):
    """Return values in a file, mapped into memory."""
    with tempfile.NamedTemporaryFile() as file:
        found = np.memmap(file.name, values.numpy().dtype, "w+", shape=tuple(values.shape))
    found[:] = values.numpy()
    return found


def read_only(values):
    """Return a view that is not to be written to, as a memmap is that was opened to be read."""
    found = values.numpy().view()
    found.setflags(write=False)
    return found


class Tripled(ConcatDataset):
    def __getitem__(self, i):
        return tuple(3 * part for part in super().__getitem__(i))


AT_ONCE = {
    "tensors": lambda: TensorDataset(X, Y),
    "one tensor": lambda: TensorDataset(Y),
    "a bare tensor": lambda: X,
    "channels last": lambda: TensorDataset(X.to(memory_format=torch.channels_last), Y),
    "transposed": lambda: TensorDataset(X.transpose(1, 3), X.expand(10, 3, 4, 5)[:, :, 1:]),
    "bool and complex": lambda: TensorDataset(Y > 4, Y.to(torch.complex64), Y.bfloat16()),
    "no elements": lambda: TensorDataset(torch.zeros(10, 0), torch.zeros(10, 1, 1, 1)),
    "a random split": lambda: random_split(TensorDataset(X, Y), [5, 5])[0],
    "subsets of subsets": nested,
    "a subset by tensor": lambda: Subset(TensorDataset(X, Y), torch.tensor([7, 3, 9, 4, 5])),
    "an array": lambda: X.numpy(),
    "a transposed array": lambda: X.numpy().transpose(0, 3, 2, 1),
    "an array of numbers": lambda: np.arange(10, dtype=np.float16),
    "arrays side by side": lambda: StackDataset(X.numpy(), np.arange(10, dtype=np.uint8)),
    "named arrays": lambda: StackDataset(x=X.numpy(), y=Y),
    "datasets side by side": lambda: StackDataset(TensorDataset(X), Subset(X.numpy(), range(10))),
    "datasets in a row": lambda: in_a_row(lambda x, y: TensorDataset(x, y)),
    "arrays in a row": lambda: ConcatDataset([X.numpy()[:3], X.numpy()[3:3], X.numpy()[3:]]),
    "names in a row": lambda: in_a_row(lambda x, y: StackDataset(x=x, y=TensorDataset(y))),
    "rows of rows": lambda: ConcatDataset([in_a_row(TensorDataset), TensorDataset(X, Y)]),
    "a subset of a row": lambda: Subset(in_a_row(TensorDataset), [8, 2, 1, 9, 0]),
    "a memmap": lambda: mapped(X),
    "read-only arrays": lambda: StackDataset(read_only(Y), read_only(Y > 4)),
    "memmaps side by side and in a row": lambda: ConcatDataset(
        [StackDataset(mapped(X[:3]), mapped(Y[:3])), StackDataset(X[3:].numpy(), Y[3:].numpy())]
    ),
}


@pytest.mark.parametrize("index", [[0], [4, 1, 3], [np.int64(2), 2]], ids=str)
@pytest.mark.parametrize("name", AT_ONCE)
def test_a_batch_read_at_once_has_the_bits_and_strides_of_its_samples_stacked(name, index):
    dataset = AT_ONCE[name]()
    batch = fetch_batch(dataset, index)
    assert batch is not None and equal(batch, by_samples(dataset, index))


PLAIN = {
    "a subclass": lambda: Doubled(X, Y),
    "a subset of a subclass": lambda: Subset(Doubled(X, Y), range(9)),
    "a subclass of a subset": lambda: Chosen(TensorDataset(X, Y), range(9)),
    "a subclass of datasets in a row": lambda: Tripled([TensorDataset(X)]),
    "a subclass in a row": lambda: ConcatDataset([TensorDataset(X[:2]), Doubled(X)]),
    "a subclass side by side": lambda: StackDataset(TensorDataset(X), Doubled(X)),
    "other shapes in a row": lambda: ConcatDataset([TensorDataset(X[:1]), TensorDataset(X[:, 1:])]),
    "other dtypes in a row": lambda: ConcatDataset([Y[:1], X[:, 0, 0, 0]]),
    "other lengths in a row": lambda: ConcatDataset([TensorDataset(X[:1]), TensorDataset(X, Y)]),
    "an array and a tensor in a row": lambda: ConcatDataset([X[:1].numpy(), X]),
    "a parameter": lambda: TensorDataset(torch.nn.Parameter(X)),
    "a history": lambda: TensorDataset(X.clone().requires_grad_() * 2),
    "3-d images, channels last": lambda: TensorDataset(X.view(10, 3, 2, 2, 5).transpose(1, 4)),
    "sparse": lambda: TensorDataset(X.view(10, 60).to_sparse()),
    "strings": lambda: np.array(["a"] * 10),
    "another byte order": lambda: X.numpy().astype(">f4"),
    "negative strides": lambda: X.numpy()[:, ::-1],
    "unsigned 64": lambda: np.arange(10, dtype=np.uint64),
    "a list": lambda: [torch.ones(1)] * 10,
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_might_give_something_else_is_read_sample_by_sample(name):
    assert fetch_batch(PLAIN[name](), [0, 2]) is None


@pytest.mark.parametrize(
    "index", [[-1], [10], [1, 99], [2**63], [], [True, 2], [1.0], (1, 2), 3, Y]
)
def test_indices_that_are_not_surely_rows_are_left_to_the_dataset(index):
    assert fetch_batch(TensorDataset(X, Y), index) is None
    assert fetch_batch(Subset(TensorDataset(X), torch.tensor([0, 10])), [1]) is None
    assert fetch_batch(Subset(TensorDataset(X), torch.tensor([0, 1])), [2]) is None
    assert fetch_batch(TensorDataset(torch.zeros(10, 0)), [10]) is None  # another error of torch's
    assert fetch_batch(in_a_row(TensorDataset), index) is None


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_index_out_of_range_raises_the_error_of_the_dataset(workers):
    data = DataLoader(TensorDataset(X), 2, sampler=[0, 1, 2, 10], num_workers=workers)
    with pytest.raises(IndexError, match="index 10 is out of bounds for dimension 0 with size 10"):
        list(Source.open(data, 0).batches(0, 0, 0))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tensors", "subsets of subsets", "names in a row"])
def test_a_loader_yields_what_DataLoader_yields(name, workers):
    dataset = AT_ONCE[name]()
    mine = Source.open(DataLoader(dataset, 3, num_workers=workers), 0).batches(0, 0, 0)
    theirs = DataLoader(dataset, 3)
    pairs = list(zip(mine, theirs, strict=True))
    assert pairs and all(equal(a, b) for a, b in pairs)


def test_another_collate_is_given_the_samples():
    data = DataLoader(TensorDataset(X, Y), 5, collate_fn=lambda samples: samples)
    first = next(Source.open(data, 0).batches(0, 0, 0))
    assert len(first) == 5 and type(first[0]) is tuple


def test_a_batch_does_not_share_memory_with_the_dataset():
    values = torch.ones(4)
    for array in (values, values.numpy()):
        for batch in Source.open(DataLoader(array, 2), 0).batches(0, 0, 0):
            batch.zero_()
    assert values.sum() == 4


@pytest.mark.slow
def test_an_array_that_is_only_read_has_no_warning():
    """Torch warns once in a process, of what is never written to."""
    code = (
        "import numpy as np, fnloop as fl; from fnloop.testing import toy;"
        "from torch.utils import data;"
        "y = np.arange(4.0); y.setflags(write=False);"
        "print(*[b.tolist() for b in fl.predict(lambda m, b: b, toy(), data.DataLoader(y, 2))])"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True
    )
    assert ran.stdout == "[0.0, 1.0] [2.0, 3.0]\n"


class Recording(list):
    """Samples, and which of them were asked for."""

    def __init__(self, *of):
        super().__init__(*of)
        self.asked = []

    def __getitem__(self, i):
        self.asked.append(i)
        return super().__getitem__(i)


def test_what_cannot_be_read_at_once_is_asked_for_each_sample_once():
    samples = Recording(torch.arange(4))
    loader = DataLoader(ConcatDataset([torch.arange(4), samples]), 4, sampler=[0, 4, 5, 1])
    (batch,) = Source.open(loader, 0).batches(0, 0, 0)
    assert batch.tolist() == [0, 0, 1, 1] and samples.asked == [0, 1]


# --- whole epochs


def one_by_one(samples):
    return torch.utils.data.default_collate(samples)


def drawing(model, batch):
    """Return a loss of the batch and of what torch draws."""
    first, *_ = batch.values() if isinstance(batch, dict) else (batch, None)
    while not isinstance(first, torch.Tensor):
        first, *_ = first.values() if isinstance(first, dict) else first
    return model.w.sum() * first.to(torch.float32).mean() * torch.rand(())


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_run_and_every_generator_afterwards_are_those_of_samples_read_one_by_one(name):
    dataset, found = AT_ONCE[name](), []
    for collate in (None, one_by_one):
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        loader = DataLoader(dataset, 2, shuffle=True, collate_fn=collate)
        state = fl.fit(fl.pipeline()(drawing), toy(), loader, epochs=2, hooks=())
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
        found.append((state.model.w.item(), state.history["train/loss"], drawn))
    assert str(found[0]) == str(found[1])  # also where there are no elements: NaN


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_epoch_continues_in_the_middle_with_the_batches_that_are_left(name):
    loader = DataLoader(AT_ONCE[name](), 2, shuffle=True)
    whole = [*Source.open(loader, 3).batches(1, 0, 0)]
    rest = [*Source.open(loader, 3).batches(1, 2, 4)]
    assert rest and all(equal(a, b) for a, b in zip(whole[2:], rest, strict=True))


# --- datasets of Hugging Face


def table(form, transform=None, **columns):
    datasets = pytest.importorskip("datasets")
    rows = {"x": X.view(10, 60).numpy(), "y": Y.numpy(), "name": [f"n{i}" for i in range(10)]}
    made = datasets.Dataset.from_dict(rows | columns).with_format(form)
    return made.with_transform(transform) if transform else made


FORMATS = {
    "torch": lambda: table("torch"),
    "numpy": lambda: table("numpy"),
    "python": lambda: table(None),
    "some columns": lambda: table("torch").with_format("torch", columns=["y"]),
    "a dtype": lambda: table("torch").with_format("torch", columns=["y"], dtype=torch.int16),
    "chosen rows": lambda: table("torch").select([9, 3, 1, 7, 5]),
    "shuffled": lambda: table("numpy").shuffle(seed=0),
    "a subset": lambda: Subset(table("torch"), [9, 3, 1, 7, 5]),
    "beside an array": lambda: StackDataset(table("torch"), np.arange(10)),
    "named, beside a column": lambda: StackDataset(x=table("torch")["x"], y=table("torch")["y"]),
    "numbers of all types": lambda: table(
        "torch", name=[True, False] * 5, f=[0.5] * 10, z=np.arange(10, dtype=np.uint8)
    ),
    "a column of numbers": lambda: table("torch")["y"],
    "a column of rows": lambda: table("torch")["x"],
    "a subset of a column": lambda: Subset(table("torch")["x"], range(5)),
}


@pytest.mark.parametrize("index", [[0], [4, 1, 3], [2, 2]], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_an_arrow_table_are_those_of_DataLoader(name, index):
    dataset = FORMATS[name]()
    batch = fetch_batch(dataset, index)
    assert batch is not None and equal(batch, by_samples(dataset, index))


ARROW_PLAIN = {
    "a transform": lambda: table(None, lambda rows: {"y": [torch.rand(1) for _ in rows["y"]]}),
    "in a row": lambda: ConcatDataset([table("torch"), table("torch")]),
    "a subset in a row": lambda: ConcatDataset([Subset(table("torch"), range(5))]),
    "a column of words": lambda: table("torch")["name"],
    "a column in another format": lambda: table("numpy")["y"],
    "a column with gaps": lambda: table("torch", y=[1, 2, None] + [3] * 7)["y"],
    "a column of other lengths": lambda: table("torch", y=[[1], [], [2, 3]] + [[4]] * 7)["y"],
}


@pytest.mark.parametrize("name", ARROW_PLAIN)
def test_rows_that_might_be_others_by_themselves_are_read_one_by_one(name):
    assert fetch_batch(ARROW_PLAIN[name](), [0, 2]) is None


def test_a_batch_does_not_share_memory_with_an_arrow_table():
    for form in ("torch", "numpy"):
        rows = table(form).remove_columns("name")
        for batch in Source.open(DataLoader(rows, 5), 0).batches(0, 0, 0):
            batch["x"].zero_(), batch["y"].zero_()
        assert rows[:]["y"].sum() == 45
