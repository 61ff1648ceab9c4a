"""Batches are moved to the device."""

import contextlib
import types
from collections import namedtuple

import torch

from fnloop._backend import containers
from fnloop._backend.containers import to_device

Pair = namedtuple("Pair", ["x", "y"])


def test_nested_batches_are_moved_and_keep_their_structure():
    x = torch.ones(2)
    batch = {"pair": Pair(x, [x, (x, "text")]), "n": 3}
    moved = to_device(batch, torch.device("meta"))
    first, (second, (third, text)) = moved["pair"]
    assert isinstance(moved["pair"], Pair) and moved["n"] == 3 and text == "text"
    assert {part.device.type for part in (first, second, third)} == {"meta"}
    assert to_device(batch, torch.device("cpu")) is batch or torch.accelerator.is_available()


# --- copies on a side stream


class Opaque:
    """Like a batch of torch_geometric: it moves its tensors by itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        return Opaque(self.x.clone())


class Pairs(list):
    """A list that checks what is in it."""

    def __init__(self, parts):
        super().__init__(parts)
        assert all(isinstance(part, torch.Tensor) for part in self)


def test_a_batch_copied_on_a_side_stream_has_its_memory_recorded(monkeypatch):
    """A tensor made on one stream and used on another has to be recorded there."""
    made, recorded = [], []
    elsewhere = torch.device("meta")  # so that no batch is there already
    stream = types.SimpleNamespace(wait_stream=lambda other: None, device=elsewhere)
    side = lambda stream: made.append("side") or contextlib.nullcontext()
    record = lambda tensor, stream: recorded.append(tensor.shape[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(containers, "may_need_transfer", lambda device: True)
    copied = containers.copy_on_side_stream(torch.device("cpu"))
    nested = {"x": torch.ones(1), "deep": [(torch.ones(2), "a")]}
    for batch in (nested, Pairs([torch.ones(3)])):
        assert type(copied(batch)) is type(batch)
    assert (recorded, len(made)) == ([1, 2, 3], 2)
    # What is not known to hold all of its tensors is copied where it is used.
    hiding = Opaque(torch.ones(1))
    assert copied((torch.ones(1), hiding))[1] is not hiding
    copied(torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]))
    stream.device = torch.device("cpu")
    assert copied(nested) is nested  # it is there
    assert (recorded, len(made)) == ([1, 2, 3], 2)
