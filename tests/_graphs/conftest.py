"""Capture on fake recorders instead of CUDA."""

import sys

import pytest
from fake_recorder import FakeRecorder

from fnloop._middleware import cuda_graph


@pytest.fixture
def recorders(monkeypatch):
    """Capture on recorders; a list of all that were made."""
    made = []
    monkeypatch.setattr(
        cuda_graph, "recorder_on", lambda device: made.append(FakeRecorder()) or made[-1]
    )
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *_, **__: ["cpu"],
    )
    return made
