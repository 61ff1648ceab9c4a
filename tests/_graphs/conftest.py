"""Capture on fake recorders instead of CUDA."""

import sys

import pytest
from fake_recorder import Tape

from fnloop._middleware import cuda_graph


@pytest.fixture
def tapes(monkeypatch):
    """Capture on tapes; a list of all that were made."""
    made = []
    monkeypatch.setattr(cuda_graph, "recorder_on", lambda device: made.append(Tape()) or made[-1])
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *_, **__: ["cpu"],
    )
    return made
