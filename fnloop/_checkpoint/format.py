"""The format of a checkpoint: its files, what they hold, and the errors that reading them raises.

A checkpoint is a folder:

    model.safetensors       the state_dict of the module; loads into the plain module without fnloop
    optimizer.safetensors   the state of the optimizer, by parameter name
    slots.safetensors       what middleware keep, running metrics, random generators
    state.json              counters, hyper-parameters, where the tensors belong, and the history
                            (the module save makes it)
    manifest.json           size and SHA-256 of each of the others; written last

Nothing is pickled, so reading a checkpoint cannot run code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from fnloop._core.serialize import Json

__all__ = [
    "COUNTERS",
    "FILES",
    "FORMAT",
    "LARGEST_MANIFEST",
    "MANIFEST",
    "PARTS",
    "STATE",
    "TENSORS",
    "CheckpointError",
    "Contents",
    "NewerFormatError",
]

FORMAT = 1
TENSORS = ("model", "optimizer", "slots")
STATE = "state.json"
FILES = (*(f"{name}.safetensors" for name in TENSORS), STATE)
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 << 20  # bytes; a crafted manifest must not fill the memory
PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, too new, or of another run, model or optimizer."""


class NewerFormatError(CheckpointError):
    """A newer fnloop wrote the checkpoint. It is not damaged, so no older one may replace it."""


@attrs.frozen(eq=False)
class Contents:
    """The contents of a checkpoint: three groups of tensors, and facts as JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: the contents of ``state.json``; without the history when they are to be written.
        history: the records to write, one line of JSON each.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Json]
    history: Sequence[str] = ()

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory. It reuses the memory of an earlier copy where that fits."""

        def copy_of(name: str) -> dict[str, Tensor]:
            old: Mapping[str, Tensor] = getattr(buffers, name) if buffers else {}
            return {k: _copy_to_host(v, old.get(k)) for k, v in getattr(self, name).items()}

        return attrs.evolve(self, **{name: copy_of(name) for name in TENSORS})


def _copy_to_host(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer.copy_(tensor)
    if tensor.nbytes < 4 << 20:
        return tensor.to("cpu", copy=True)
    # NumPy requests large pages and torch does not, which halves the time of a first copy.
    memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
