"""What a container is, and that each is taken apart and put together again as it was."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch

from fnloop._backend.containers import (
    IN_BATCHES,
    map_leaves,
    pairs_of,
    parts_of,
    tensors_in,
    with_parts,
)


class Pair(NamedTuple):
    first: object
    second: object


class Labeled(list):
    """A list with an attribute, whose constructor does not take its items alone."""

    def __init__(self, label, items):
        super().__init__(items)
        self.label = label


class Named(dict):
    """A dict of another class, with an attribute."""

    name = "unknown"


MAPPINGS = [
    {"a": 1, "b": 2},
    Named(a=1, b=2),
    OrderedDict(b=1, a=2),
    defaultdict(list, a=1, b=2),
    Counter(a=1, b=2),
    UserDict(a=1, b=2),
    MappingProxyType({"a": 1, "b": 2}),
]
SEQUENCES = [
    [1, 2],
    Labeled("years", [1, 2]),
    (1, 2),
    Pair(1, 2),
    torch.Size([1, 2]),
    deque([1, 2], maxlen=3),
]
LEAVES = ["text", b"bytes", 1, None, {1, 2}, range(2), torch.ones(2)]


def class_of(value):
    return type(value).__name__


@pytest.mark.parametrize("value", MAPPINGS, ids=class_of)
def test_the_parts_of_a_mapping_have_its_keys(value):
    assert list(parts_of(value)) == list(value.items())


@pytest.mark.parametrize("value", SEQUENCES, ids=class_of)
def test_the_parts_of_a_sequence_have_positions(value):
    assert list(parts_of(value)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("value", LEAVES, ids=class_of)
def test_anything_else_is_a_leaf(value):
    assert parts_of(value) is None
    assert map_leaves(value) is value


@pytest.mark.parametrize("value", [*MAPPINGS, *SEQUENCES], ids=class_of)
def test_a_container_with_other_parts_is_of_the_same_kind(value):
    before = list(parts_of(value))
    changed = with_parts(value, [10, 20])
    assert type(changed) is type(value)
    assert list(parts_of(changed)) == [(key, 10 * part) for key, part in before]
    assert list(parts_of(value)) == before
    assert with_parts(changed, [1, 2]) == value


def test_a_copy_keeps_attributes_the_default_and_the_greatest_length():
    named = Named(a=1)
    named.name = "mine"
    assert with_parts(named, [2]).name == "mine"
    assert with_parts(Labeled("years", [1]), [2]).label == "years"
    assert with_parts(defaultdict(list, a=1), [2])["new"] == []
    assert with_parts(deque([1], maxlen=3), [2]).maxlen == 3


def test_every_container_is_put_together_as_it_was():
    nested = {"mappings": [*MAPPINGS], "sequences": (*SEQUENCES,), "leaves": deque(LEAVES)}
    copied = map_leaves(nested)
    assert list(map(type, copied["mappings"])) == list(map(type, MAPPINGS))
    assert copied["mappings"] == MAPPINGS
    assert list(map(type, copied["sequences"])) == list(map(type, SEQUENCES))
    assert copied["sequences"] == nested["sequences"]
    assert all(a is b for a, b in zip(copied["leaves"], LEAVES, strict=True))
    copied["mappings"][0]["a"] = "changed"
    assert nested["mappings"][0]["a"] == 1


def test_a_changed_leaf_is_changed_in_a_copy():
    nested = {"a": (1, [2]), "b": Pair(3, "text")}
    assert map_leaves(nested, lambda leaf: leaf * 2) == {
        "a": (2, [4]),
        "b": Pair(6, "texttext"),
    }
    assert nested == {"a": (1, [2]), "b": Pair(3, "text")}


def test_a_tuple_with_the_same_parts_is_kept():
    kept, copied = (1, "text"), ([1],)
    assert map_leaves(kept) is kept
    assert map_leaves(copied) == copied and map_leaves(copied)[0] is not copied[0]


def test_a_deque_in_a_batch_is_a_leaf():
    assert parts_of(deque([1]), IN_BATCHES) is None
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    batch = UserDict(b=[one, Pair(two, "text")], queue=deque([torch.tensor(4)]), a=(three,))
    assert [tensor.item() for tensor in tensors_in(batch)] == [1, 2, 3]


def test_pairs_are_of_two_mappings_or_two_sequences():
    assert pairs_of({"a": 1, "b": 2}, UserDict(c=0, b=3)) == [("b", 2, 3)]
    assert pairs_of((1, 2), deque([3])) == [(0, 1, 3)]
    assert pairs_of([1], {0: 1}) is None
    assert pairs_of("ab", "ab") is None
    assert pairs_of([1], torch.ones(1)) is None
