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


def test_what_was_copied_aside_is_what_was_there_then(room):
    weight, count = torch.ones(3), torch.ones(2, dtype=torch.float64)
    contents = Contents({"w": weight}, {"w.step": count}, {}, {})
    first = contents.copy_aside()
    weight.zero_(), count.zero_()
    saved = first()
    assert (saved.model["w"].tolist(), saved.optimizer["w.step"].tolist()) == ([1.0] * 3, [1.0] * 2)
    memory = [t.data_ptr() for t in (saved.model["w"], saved.optimizer["w.step"])]
    again = contents.copy_aside(saved)()
    assert (again.model["w"].tolist(), again.optimizer["w.step"].tolist()) == ([0.0] * 3, [0.0] * 2)
    assert [t.data_ptr() for t in (again.model["w"], again.optimizer["w.step"])] == memory


def test_a_copy_that_waits_on_the_device_leaves_the_buffers_as_they_were(room):
    """They are written to when the function is called. In host memory they are at once."""
    weight = torch.ones(3)
    contents = Contents({"w": weight}, {}, {}, {})
    saved = contents.copy_aside()()
    weight.fill_(2.0)
    later = contents.copy_aside(saved)
    assert saved.model["w"].tolist() == ([1.0] * 3 if room else [2.0] * 3)
    assert later().model["w"].tolist() == [2.0] * 3
