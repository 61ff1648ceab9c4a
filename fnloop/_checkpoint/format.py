"""What a checkpoint is made of: the names of its files, what it holds, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FILES",
    "FORMAT",
    "LARGEST_MANIFEST",
    "MANIFEST",
    "TENSORS",
    "CheckpointError",
    "Contents",
    "NewerFormatError",
]

FORMAT = 1
TENSORS = ("model", "optimizer", "slots")
FILES = (*(f"{name}.safetensors" for name in TENSORS), "state.json")
MANIFEST = "manifest.json"
LARGEST_MANIFEST = (
    16 << 20
)  # bytes: nobody's manifest is longer, and a crafted one must not fill the memory


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, newer than this fnloop, of another run, or of another model or optimizer."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer fnloop. It is not damaged, so no older one is taken in its place."""


@attrs.frozen(eq=False)
class Contents:
    """What a checkpoint of a state holds: three groups of tensors, and facts in JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: what goes into ``state.json``, without the history when it is to be written.
        history: the records in JSON, a line each, when they are to be written.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    history: Sequence[str] = ()

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory, into the buffers of an earlier one where they fit."""

        def copy_of(name: str) -> dict[str, Tensor]:
            old: Mapping[str, Tensor] = getattr(buffers, name) if buffers else {}
            return {k: _copied(v, old.get(k)) for k, v in getattr(self, name).items()}

        return attrs.evolve(self, **{name: copy_of(name) for name in TENSORS})


def _copied(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer.copy_(tensor)
    if tensor.nbytes < 4 << 20:
        return tensor.to("cpu", copy=True)
    # numpy asks the system for large pages, and torch doesn't: half the time of a first copy.
    return (
        torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
        .view(tensor.dtype)
        .view(tensor.shape)
        .copy_(tensor)
    )
