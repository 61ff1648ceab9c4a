"""bucketed and pad_collate: samples of different lengths."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from composed_cases import Numbers, read, samples
from torch.utils.data import DataLoader

from fnloop.data import bucketed, pad_collate

DRAWN = torch.randint(1, 60, (500,), generator=torch.Generator().manual_seed(0)).tolist()
padded = lambda batch, lengths: len(batch) * max(lengths[i] for i in batch)


@pytest.mark.parametrize("limits", [
    {"batch_size": 8}, {"max_items": 200}, {"max_items": 50}, {"batch_size": 4, "max_items": 100},
])  # fmt: skip
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_is_in_one_batch_within_the_limits(limits, shuffle):
    for lengths in (DRAWN, [3] * 500, [float(n) for n in DRAWN], torch.tensor(DRAWN)):
        sampler = bucketed(lengths, shuffle=shuffle, **limits)
        lengths = list(map(int, lengths))
        for _ in range(2):
            batches = list(sampler)
            assert len(batches) == len(sampler)
            assert sorted(i for batch in batches for i in batch) == list(range(500))
            for batch in batches:
                assert len(batch) <= limits.get("batch_size", 500)
                assert padded(batch, lengths) <= limits.get("max_items", 480) or len(batch) == 1


def test_little_is_padded():
    items = sum(DRAWN)
    by_chance = torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    assert sum(padded(by_chance[i : i + 8], DRAWN) for i in range(0, 500, 8)) > 1.6 * items
    for limits in ({"batch_size": 8}, {"max_items": 200}):
        assert sum(padded(b, DRAWN) for b in bucketed(DRAWN, **limits)) < 1.15 * items


def test_samples_of_similar_length_meet_others_in_each_epoch():
    sampler = bucketed([float(n) for n in range(500)], batch_size=8)
    together = [{frozenset(batch) for batch in sampler} for _ in range(2)]
    assert not together[0] & together[1]


def test_a_sample_that_is_too_long_is_a_batch_of_its_own():
    assert list(bucketed([4, 90, 4, 4, 70], max_items=10, shuffle=False)) == [[1], [4], [0, 2], [3]]
    assert sorted(map(len, bucketed([4, 90, 4, 4, 70], max_items=10))) == [1, 1, 1, 2]
    assert list(bucketed([0, 0], max_items=1)) in ([[0, 1]], [[1, 0]])


def test_the_order_is_a_function_of_seed_and_epoch_and_elsewhere_of_torchs_generator():
    loader = DataLoader(Numbers(500), batch_sampler=bucketed(DRAWN, batch_size=8))
    torch.manual_seed(0)
    first = samples(read(loader))
    assert samples(read(loader)) == first and samples(read(loader, 1)) != first
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        orders.append(list(loader.batch_sampler))
    assert orders[0] == orders[1] != orders[2]
    assert list(loader.batch_sampler) != orders[2]


class Foreign:
    """A loader that is not a DataLoader. Its sampler of batches has a generator that advances."""

    def __init__(self):
        self.batch_sampler = bucketed(DRAWN, batch_size=8)
        self.batch_sampler.generator = torch.Generator()

    def __iter__(self):
        return map(torch.tensor, self.batch_sampler)


def test_the_generator_of_a_sampler_of_batches_is_a_function_of_seed_and_epoch_too():
    loader = Foreign()
    first = read(loader)
    assert read(loader) == first and read(loader, 1) != first


def test_a_generator_of_its_own_draws_all_of_the_order():
    sampler, orders = bucketed(DRAWN, batch_size=8), []
    for seed in (0, 0, 1):
        sampler.generator = torch.Generator().manual_seed(seed)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(("arguments", "message"), [
    (([1, 2],), "bucketed expects a limit: batch_size=32, .* or max_items=4096"),
    (([1, -2], 8), r"numbers >= 0, one for each sample; got -2 for sample 1"),
    (([1, float("nan")], 8), "got nan for sample 1"),
    (([[1], [2, 3]], 8), "expects lengths as a sequence of numbers"),
])  # fmt: skip
def test_what_bucketed_cannot_do_is_refused(arguments, message):
    lengths, *size = arguments
    with pytest.raises(ValueError, match=message):
        bucketed(lengths, batch_size=size[0] if size else None)


# --- pad_collate


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_sequences_are_padded_at_their_end(kind):
    batch = pad_collate(9)([{"x": kind([1, 2]), "n": 5}, {"x": kind([3]), "n": 6}])
    assert batch["x"].tolist() == [[1, 2], [3, 9]] and batch["x"].dtype == torch.int64
    assert batch["n"].tolist() == [5, 6]
    x, y = pad_collate()([(kind([1.5]), kind([1])), (kind([2.5, 3.5]), kind([2]))])
    assert x.tolist() == [[1.5, 0.0], [2.5, 3.5]] and y.tolist() == [[1], [2]]
    assert pad_collate()([kind([1]), kind([2, 3])]).tolist() == [[1, 0], [2, 3]]


def test_every_dimension_is_padded():
    images = [torch.ones(1, 2, 3), torch.ones(1, 3, 1)]
    (batch,) = pad_collate(-1.0)([(image,) for image in images])
    assert batch.shape == (2, 1, 3, 3)
    assert batch[1, 0].tolist() == [[1.0, -1.0, -1.0]] * 3 and batch.sum() == 6 - 3 + 3 - 6


def test_the_form_of_a_sample_is_kept():
    Pair = namedtuple("Pair", ["text", "label"])
    made = pad_collate()([Pair([1, 2], 0), Pair([3], 1)])
    assert type(made) is Pair and made.text.tolist() == [[1, 2], [3, 0]]
    assert pad_collate()([{"name": "a"}, {"name": "bc"}]) == {"name": ["a", "bc"]}


def test_dtypes_are_those_of_the_numbers():
    assert pad_collate()([[1, 2], []]).dtype == torch.int64
    assert pad_collate()([[1, 2], [0.5]]).dtype == torch.float32
    assert pad_collate()([[True], [True, False]]).tolist() == [[True, False], [True, False]]
    assert pad_collate(float("nan"))([[1.0], [1.0, 2.0]])[0, 1].isnan()


@pytest.mark.parametrize(("padding", "batch", "message"), [
    (0.5, [[1], [1, 2]], "pad_collate.0.5.: samples is torch.int64, which cannot hold 0.5"),
    (-1, [torch.ones(1).byte(), torch.ones(2).byte()], "torch.uint8, which cannot hold -1"),
    (float("nan"), [[1], [1, 2]], "cannot hold nan"),
    (2, [[True], [True, True]], "torch.bool, which cannot hold 2"),
    ({"a": 0}, [{"a": [1], "b": [1]}, {"a": [], "b": []}], "field 'b' differ.*add 'b': 0"),
    ({"c": 0}, [{"a": [1]}], r"a sample has \['a'\], and not 'c'"),
    ({"a": 0}, [[1], [2]], "padding by key, but a sample is a list"),
    (0, [{"a": [1]}, {"b": [1]}], "not every sample of the batch has 'a'"),
    (0, [([1], 2), ([1],)], "not every sample of the batch is a tuple of 2"),
    (0, [[1], [[1, 2]]], r"the same number of dimensions in each sample; got \[1, 2\]"),
    (0, [[1], [[1, 2], [3]]], "expects samples as lists of numbers, arrays or tensors"),
    (0, [{"a": ["x"]}, {"a": ["y", "z"]}], "expects field 'a' as lists of numbers"),
])  # fmt: skip
def test_what_cannot_be_padded_is_refused(padding, batch, message):
    with pytest.raises((TypeError, ValueError), match=message):
        pad_collate(padding)(batch)


@pytest.mark.slow
def test_they_work_together_in_workers():
    data = [{"x": [n] * (n % 7 + 1), "y": n} for n in range(40)]
    sampler = bucketed([len(sample["x"]) for sample in data], max_items=14)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=pad_collate(), num_workers=1)
    batches = list(loader)
    assert sorted(n for batch in batches for n in batch["y"].tolist()) == list(range(40))
    assert max(batch["x"].numel() for batch in batches) <= 14
