"""Batches that are read at once: those of DataLoader, bit for bit, or the plain way."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset, random_split

from fnloop._data.map_style import fetch_batch
from fnloop._data.source import open_source

X = torch.arange(10 * 3 * 4 * 5).float().view(10, 3, 4, 5)
Y = torch.arange(10)


def by_samples(dataset, index):
    many = getattr(dataset, "__getitems__", None)
    return torch.utils.data.default_collate(many(index) if many else [dataset[i] for i in index])


def equal(mine, theirs):
    """Return whether two batches are the same, containers, dtypes and strides included."""
    if not isinstance(theirs, torch.Tensor):
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
    "datasets in a row": lambda: torch.utils.data.ConcatDataset(
        [TensorDataset(X), TensorDataset(X)]
    ),
    "datasets side by side": lambda: StackDataset(TensorDataset(X), Doubled(X)),
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


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_index_out_of_range_raises_the_error_of_the_dataset(workers):
    data = DataLoader(TensorDataset(X), 2, sampler=[0, 1, 2, 10], num_workers=workers)
    with pytest.raises(IndexError, match="index 10 is out of bounds for dimension 0 with size 10"):
        list(open_source(data, 0).batches(0, 0, 0))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [AT_ONCE["tensors"], nested, AT_ONCE["named arrays"]])
def test_a_loader_yields_what_DataLoader_yields(make, workers):
    dataset = make()
    mine = open_source(DataLoader(dataset, 3, num_workers=workers), 0).batches(0, 0, 0)
    theirs = DataLoader(dataset, 3)
    pairs = list(zip(mine, theirs, strict=True))
    assert pairs and all(equal(a, b) for a, b in pairs)


def test_another_collate_is_given_the_samples():
    data = DataLoader(TensorDataset(X, Y), 5, collate_fn=lambda samples: samples)
    first = next(open_source(data, 0).batches(0, 0, 0))
    assert len(first) == 5 and type(first[0]) is tuple


def test_a_batch_does_not_share_memory_with_the_dataset():
    values = torch.ones(4)
    for array in (values, values.numpy()):
        for batch in open_source(DataLoader(array, 2), 0).batches(0, 0, 0):
            batch.zero_()
    assert values.sum() == 4
