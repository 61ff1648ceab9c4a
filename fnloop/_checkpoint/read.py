"""Read a checkpoint, by all processes together: of each tensor the part that a process holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fnloop._backend.fsdp import extent_in, from_local_part, split_dim
from fnloop._backend.public import on_every_process
from fnloop._checkpoint.files import locate, read_json, read_state_file, verify
from fnloop._checkpoint.format import (
    INDEX,
    TENSORS,
    CheckpointError,
    Contents,
    is_share,
)
from fnloop._checkpoint.parts import is_partial
from fnloop._checkpoint.slices import Entry, Slices, decode_index
from fnloop._checkpoint.templates import templates_of
from fnloop._core.serialize import Json
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState

__all__ = ["read_alone", "read_checkpoint", "read_whole_checkpoint"]

SUFFIX = ".safetensors"
WHAT = "the reading of a checkpoint"


def read_checkpoint(path: Path, state: TrainState, *, history: bool = True) -> Contents:
    """Return the contents of a checkpoint, with or without the older records of its history.

    Every process must call it. Each compares the checksums of its share of the files, and reads of
    a tensor what it holds of the same tensor in its state.

    Raises:
        CheckpointError, OSError: as :func:`verify`, in every process.
        MemoryError: there is no memory for the tensors.
    """
    path, backend = locate(path), state.backend
    share = (backend.rank, backend.world_size)
    manifest = on_every_process(lambda: verify(path, history=history, share=share), WHAT)
    return on_every_process(lambda: _read(path, manifest, state, history), WHAT)


def read_alone(path: Path, *, history: bool = True) -> Contents:
    """Return the contents of a checkpoint with whole tensors. Only this process need call it.

    Raises:
        CheckpointError, OSError, MemoryError: as :func:`read_checkpoint`.
    """
    path = locate(path)
    return _read(path, verify(path, history=history), None, history)


def read_whole_checkpoint(path: Path, state: TrainState) -> Contents | None:
    """Return the contents of a checkpoint, or None if it is partial. Every process must call it."""
    where = locate(path)
    manifest = on_every_process(lambda: verify(where, deep=False, history=False), WHAT)
    return None if is_partial(manifest) else read_checkpoint(path, state)


def _read(
    path: Path, manifest: Mapping[str, Json], state: TrainState | None, history: bool
) -> Contents:
    # The checksums are right. So only what a file says can be wrong with it: an exception that is
    # not a CheckpointError is a fault of memory, of the disk, or of this program.
    files = manifest["files"]
    facts = read_state_file(path, manifest.get("blocks", ()) if history else ())
    index: dict[str, dict[str, Entry]] = {}
    if INDEX in files:
        index = decode_index(read_json(path / INDEX), files, path)
    reader = _Reader(path, state, facts)
    tensors = {group: reader.read_split(group, entries) for group, entries in index.items()}
    for file in files:
        group, suffix = os.path.splitext(file)
        if suffix == SUFFIX and not is_share(file, index):
            tensors[group] = reader.read_whole(group, file)
    if missing := {*TENSORS} - tensors.keys():
        raise CheckpointError(f"{path} is damaged: it has no tensors of the {min(missing)}")
    own = {name: tensors.pop(name) for name in TENSORS}
    return Contents(own["model"], own["optimizer"], own["slots"], facts, (), tensors)


class _Reader:
    """Reads of the tensors of a checkpoint what this process holds of them.

    Args:
        path: the folder.
        state: the state that they are for; None reads whole tensors.
        facts: the contents of ``state.json``.
    """

    def __init__(self, path: Path, state: TrainState | None, facts: Mapping[str, Json]) -> None:
        self._path, self._slices = path, Slices(path)
        self._templates = {} if state is None else templates_of(state, facts)
        parameters = () if state is None else unwrap(state).parameters()
        self._like = next((p for p in parameters if split_dim(p) is not None), None)

    def read_whole(self, group: str, file: str) -> dict[str, Tensor]:
        """Return a group of tensors that is in one file."""
        return self.read_split(group, self._slices.entries_in(file))

    def read_split(self, group: str, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """Return a group of tensors, of each what this process holds of it."""
        templates = self._templates.get(group, {})
        try:
            return {name: self._read(entry, templates.get(name)) for name, entry in entries.items()}
        finally:
            self._slices.close()

    def _read(self, entry: Entry, template: Tensor | None) -> Tensor:
        """Return a tensor, sharded as its template is.

        One without a template of its shape is split over the processes of the model, if it was
        split when it was saved.
        """
        if self._like is None:  # nothing here is sharded, and a template may be without a shape
            return self._slices.read(entry)
        like, dim = self._like, entry.dim
        if template is not None and entry.shape[: template.ndim] == template.shape:
            like, dim = template, split_dim(template)
        if dim is None:
            return self._slices.read(entry)
        start, stop, _ = extent_in(like, entry.shape[dim])
        local = self._slices.read(entry, start, stop, dim)
        return from_local_part(local, entry.shape, like, dim)
