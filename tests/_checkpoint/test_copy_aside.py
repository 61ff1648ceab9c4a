"""Copies of a checkpoint's tensors aside, on a stand-in for a GPU: float32 tensors are there."""

import contextlib
import types

import pytest
import torch

from fnloop._checkpoint import format
from fnloop._checkpoint.format import Contents


@pytest.fixture(params=[True, False])
def room(request, monkeypatch):
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    there = property(lambda tensor: tensor.dtype == torch.float32)
    monkeypatch.setattr(torch.Tensor, "is_cuda", there, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(format, "has_room", lambda device, size: request.param)
    return request.param


def tensors_of(contents):
    return contents.groups["model"]["w"], contents.groups["optimizer"]["w.step"]


def test_what_was_copied_aside_is_what_was_there_then(room):
    weight, count = torch.ones(3), torch.ones(2, dtype=torch.float64)
    contents = Contents({"model": {"w": weight}, "optimizer": {"w.step": count}}, {})
    first = contents.copy_aside()
    weight.zero_(), count.zero_()
    saved = first()
    assert [t.tolist() for t in tensors_of(saved)] == [[1.0] * 3, [1.0] * 2]
    memory = [t.data_ptr() for t in tensors_of(saved)]
    again = contents.copy_aside(saved)()
    assert [t.tolist() for t in tensors_of(again)] == [[0.0] * 3, [0.0] * 2]
    assert [t.data_ptr() for t in tensors_of(again)] == memory


def test_a_copy_that_waits_on_the_device_leaves_the_buffers_as_they_were(room):
    """They are written to when the function is called. In host memory they are at once."""
    weight = torch.ones(3)
    contents = Contents({"model": {"w": weight}}, {})
    saved = contents.copy_aside()()
    weight.fill_(2.0)
    later = contents.copy_aside(saved)
    assert saved.groups["model"]["w"].tolist() == ([1.0] * 3 if room else [2.0] * 3)
    assert later().groups["model"]["w"].tolist() == [2.0] * 3
