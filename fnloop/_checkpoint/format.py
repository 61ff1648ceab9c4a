"""The format of a checkpoint: its files, what they hold, and the errors that reading them raises.

A checkpoint is a folder:

    model.safetensors       the state_dict of the module; loads into the plain module without fnloop
    optimizer.safetensors   the state of the optimizer, by parameter name
    slots.safetensors       what middleware keep, running metrics, random generators
    ema.safetensors         an average of weights, by its name: a state_dict of the module with it,
                            which loads into the plain module too; one for each average
    state.json              counters, hyper-parameters, where the tensors belong, and the history
                            (the module save makes it)
    manifest.json           size and SHA-256 of each of the others; written last

A partial checkpoint has the same files. It lists its parts, and what belongs to others is left out.

Nothing is pickled, so reading a checkpoint cannot run code.
"""

from __future__ import annotations

import re
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
    "NEWER_FORMAT",
    "PARTS",
    "STATE",
    "TENSORS",
    "TRAINED",
    "CheckpointError",
    "Contents",
    "NewerFormatError",
    "is_file_name",
]

FORMAT = 1  # of a checkpoint of all parts with one optimizer, without averages and phases
NEWER_FORMAT = 2  # of others, so that an older fnloop does not take them for damaged checkpoints
TENSORS = ("model", "optimizer", "slots")
STATE = "state.json"
FILES = (*(f"{name}.safetensors" for name in TENSORS), STATE)
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 << 20  # bytes; a crafted manifest must not fill the memory
PARTS = ("model", "optimizer", "slots", "counters", "metrics", "history", "extra")
TRAINED = "trained"  # a part of the model: the parameters that require gradients
COUNTERS = ("step", "epoch", "batch", "samples", "skipped", "seed", "stop")


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, too new, or of another run, model or optimizer."""


class NewerFormatError(CheckpointError):
    """A newer fnloop wrote the checkpoint. It is not damaged, so no older one may replace it."""


@attrs.frozen(eq=False)
class Contents:
    """The contents of a checkpoint: groups of tensors, and facts as JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: the contents of ``state.json``; without the history when they are to be written.
        history: the records to write, one line of JSON each.
        averages: name of an average to its group of tensors.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Json]
    history: Sequence[str] = ()
    averages: Mapping[str, Mapping[str, Tensor]] = attrs.field(factory=dict)

    def groups(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the groups of tensors by name. Each is a file."""
        own: dict[str, Mapping[str, Tensor]] = {name: getattr(self, name) for name in TENSORS}
        return own | dict(self.averages)

    @property
    def files(self) -> tuple[str, ...]:
        """The names of the files."""
        return (*(f"{name}.safetensors" for name in self.groups()), STATE)

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory. It reuses the memory of an earlier copy where that fits."""

        earlier = buffers.groups() if buffers else {}

        def copy_of(name: str, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
            old = earlier.get(name, {})
            return {k: _copy_to_host(v, old.get(k)) for k, v in group.items()}

        copies = {name: copy_of(name, group) for name, group in self.groups().items()}
        own = {name: copies.pop(name) for name in TENSORS}
        return attrs.evolve(self, **own, averages=copies)


def is_file_name(name: str) -> bool:
    """Return whether a file of a checkpoint may have a name, besides the manifest."""
    return (
        name in FILES or re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*\.safetensors", name) is not None
    )


def _copy_to_host(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer.copy_(tensor)
    if tensor.nbytes < 4 << 20:
        return tensor.to("cpu", copy=True)
    # NumPy requests large pages and torch does not, which halves the time of a first copy.
    memory = torch.from_numpy(np.empty(tensor.nbytes, np.uint8))
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
