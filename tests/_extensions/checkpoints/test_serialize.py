"""Plain data and tensors to JSON and back."""

import enum
import json
import math
from collections import Counter, deque

import attrs
import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import fnloop as fl
from fnloop._core.saved import Pending
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.serialize import decode, encode
from fnloop.testing import toy


@pytest.mark.parametrize("value", [
    None, True, 3, 2**63, 0.1, math.inf, "text", [1, [2.0]], (1, (2,)), {"a": {"b": 1}},
    {1: "int key", (2, 3): "tuple key"}, {"$tensor": "not one"}, frozenset({1, 2}), np.float32(0.5),
], ids=repr)  # fmt: skip
def test_plain_data_is_decoded_as_it_was(value):
    tensors = {}
    text = json.dumps(encode(value, tensors, "x"), allow_nan=False)
    assert decode(json.loads(text), tensors) == value


STRIDED = {
    "column-major": torch.arange(12.0).view(3, 4).t(),
    "channels_last": torch.arange(48.0).view(2, 2, 3, 4).to(memory_format=torch.channels_last),
    "a part": torch.arange(24.0).view(4, 6)[:, :3],
    "expanded": torch.ones(3).expand(2, 3),
    "a number": torch.tensor(2.0),
}


@pytest.mark.parametrize("tensor", STRIDED.values(), ids=STRIDED)
def test_dense_strides_are_restored(tmp_path, tensor):
    restored = fl.restore(
        fl.save(attrs.evolve(toy(), extra={"t": tensor}), tmp_path / "a"), toy()
    ).extra["t"]
    assert torch.equal(restored, tensor)
    assert restored.stride() == torch.empty_like(tensor).stride()  # the rule of torch


@pytest.mark.parametrize("value", [
    torch.float16, deque([1.0, torch.ones(1)], maxlen=3),
    torch.tensor([1 + 2j]).to(torch.complex128),
])  # fmt: skip
def test_dtypes_deques_and_complex_tensors_are_decoded_as_they_were(value):
    tensors = {}
    encoded = json.loads(json.dumps(encode(value, tensors, "x")))
    back = decode(encoded, {name: tensor.contiguous() for name, tensor in tensors.items()})
    assert find_difference(value, back, "") is None and getattr(back, "maxlen", 3) == 3


@attrs.frozen
class Seen:
    """A record with containers of every kind."""

    counts: Counter
    recent: deque


def test_objects_in_a_deque_are_materialized_and_a_counter_stays_one():
    saved = Seen(Counter("aab"), deque([Seen(Counter("c"), deque())], maxlen=2))
    template = Seen(Counter("b"), deque([Seen(Counter(), deque())], maxlen=2))
    decoded = decode(json.loads(json.dumps(encode([deque([saved])], {}, "x"))), {})
    assert Pending.is_in(decoded)
    back = Pending.fill([deque([template])], decoded)
    assert back == [deque([saved])]
    assert type(back[0][0].counts) is Counter and back[0][0].recent.maxlen == 2


class Level(enum.IntEnum):
    LOW = 1


@pytest.mark.parametrize(
    "value", [Level.LOW, TwoTensor(torch.ones(1), torch.ones(1))], ids=["enum", "compressed"]
)
def test_values_that_would_be_decoded_as_another_type_are_refused(value):
    with pytest.raises(TypeError, match=r"x\.a is a (Level|tensor \(TwoTensor\))"):
        encode({"a": value}, {}, "x")


@pytest.mark.parametrize("strides", [[1, 100], [0, 0], [1 << 40, 1], [-1, 1], [1]])
def test_strides_that_are_not_dense_are_refused(strides):
    with pytest.raises((ValueError, RuntimeError)):
        decode({"$tensor": "x", "strides": strides}, {"x": torch.ones(3, 4)})


@pytest.mark.parametrize("dtype", ["S40000000", "V40000000", "O", "U9", "f8,O"])
def test_an_array_of_a_crafted_dtype_is_refused(dtype):
    """Eight bytes of a file would become 40 MB, or objects."""
    with pytest.raises(ValueError, match=r"an array of .* is not one that a checkpoint can hold"):
        decode({"$array": "a", "dtype": dtype}, {"a": torch.zeros(1, dtype=torch.float64)})
