"""Read slices of tensors whose parts are in several files."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fnloop._backend.memory import is_out_of_memory
from fnloop._checkpoint.format import COUNT, CheckpointError, check_shape
from fnloop._core.serialize import Json

__all__ = ["Entry", "Slices", "decode_index"]

# Bytes of files in memory at a time: what is mapped counts as memory too. The more tensors a file
# has, the longer it takes to open, so a large one is opened at most 16 times.
MOST_MAPPED, MOST_OPENED = 4 << 20, 16


@attrs.frozen
class Piece:
    """A part of a tensor in a file.

    Args:
        file: the name of the file.
        key: the name of the part in it.
        start, stop: what it is of the dimension along which the tensor is split.
    """

    file: str
    key: str
    start: int
    stop: int


@attrs.frozen
class Entry:
    """Where a tensor is.

    Args:
        shape: of the whole tensor.
        dtype: its dtype.
        pieces: its parts, in order.
        dim: the dimension along which it is split, or None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[Piece]
    dim: int | None = None

    def shape_of(self, start: int, stop: int, dim: int | None) -> list[int]:
        """Return the shape of a part of the tensor."""
        shape = [*self.shape]
        if dim is not None:
            shape[dim] = stop - start
        return shape


INDEXED = {
    "shape": [COUNT],
    "dtype": str,
    "dim?": (None, COUNT),
    "shards": [{"file": str, "key": str, "offsets": [COUNT]}],
}


def decode_index(index: Json, files: Collection[str], path: Path) -> dict[str, dict[str, Entry]]:
    """Return the entries of an index by group and name, having checked that each is complete.

    Args:
        index: what ``index.json`` holds.
        files: the names of the files of the checkpoint.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: it is not an index, or a part is missing.
    """
    check_shape(index, {"*": {"*": INDEXED}}, path)
    try:
        return {
            group: {name: _decode_entry(name, entry, files) for name, entry in entries.items()}
            for group, entries in index.items()
        }
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _decode_entry(name: str, entry: Json, files: Collection[str]) -> Entry:
    shape, dim, shards = tuple(entry["shape"]), entry.get("dim"), entry["shards"]
    dtype = getattr(torch, entry["dtype"], None)
    offsets = [shard["offsets"] for shard in shards]
    if not isinstance(dtype, torch.dtype) or not (dim is None or dim < len(shape)):
        raise ValueError(f"the index does not say how {name} is split")
    if not {shard["file"] for shard in shards} <= {*files}:
        raise ValueError(f"the index names a file for {name} that the manifest does not list")
    if any(len(at) != len(shape) for at in offsets):
        raise ValueError(f"its index lacks parts of {name}")
    starts = [0 if dim is None else at[dim] for at in offsets]
    expected = [[start if i == dim else 0 for i in range(len(shape))] for start in starts]
    bounds = [*starts, 1 if dim is None else shape[dim]]
    complete = starts[:1] == [0] and all(a < b for a, b in itertools.pairwise(bounds))
    if dim is not None and 0 in shape:
        complete = not shards
    if not complete or offsets != expected:
        raise ValueError(f"its index lacks parts of {name}")
    places = zip(shards, itertools.pairwise(bounds), strict=True)
    pieces = [Piece(s["file"], s["key"], a, b) for s, (a, b) in places]
    return Entry(shape, dtype, pieces, dim)


class Slices:
    """Reads slices of tensors from the files of a checkpoint, and keeps little of them in memory.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, safe_open] = {}
        self._mapped = self._most = 0

    def _file(self, name: str) -> safe_open:
        if name not in self._open:
            path = self._path / name
            with path.open("rb") as file:  # a file that cannot be opened is an error with its cause
                size = os.fstat(file.fileno()).st_size
            with _explained(path):
                self._open[name] = safe_open(path, framework="pt")
            self._most = max(self._most, MOST_MAPPED, size // MOST_OPENED)
        return self._open[name]

    def entries_in(self, file: str) -> dict[str, Entry]:
        """Return an entry for each tensor of a file that has whole tensors."""
        found, opened = {}, self._file(file)
        with _explained(self._path / file):
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                here = opened.get_slice(key)
                shape = tuple(here.get_shape())
                dtype = here[(slice(0, 0),) if shape else (...,)].dtype  # without its elements
                found[key] = Entry(shape, dtype, [Piece(file, key, 0, 1)])
        return found

    def read(self, entry: Entry, start: int = 0, stop: int = 0, dim: int | None = None) -> Tensor:
        """Return a tensor; with a dimension, only its part from ``start`` to ``stop`` along it.

        Raises:
            CheckpointError: a part is not what the entry says.
        """
        shape = entry.shape_of(start, stop, dim)
        first = [start if i == dim else 0 for i in range(len(shape))]
        copies = []
        for piece in entry.pieces:
            base, low = [0] * len(shape), [*first]
            high = [a + n for a, n in zip(first, shape, strict=True)]
            if entry.dim is not None:
                base[entry.dim] = piece.start
                low[entry.dim] = max(low[entry.dim], piece.start)
                high[entry.dim] = min(high[entry.dim], piece.stop)
            if all(a < b for a, b in zip(low, high, strict=True)):
                self._check(piece, entry)
                copies.append((piece, _slices(low, high, base), _slices(low, high, first)))
        made = _empty(shape, entry.dtype, self._path)
        for piece, there, here in copies:
            self._copy(piece, there, made[here])
        return made

    def _check(self, piece: Piece, entry: Entry) -> None:
        opened = self._file(piece.file)
        with _explained(self._path / piece.file):
            found = opened.get_slice(piece.key).get_shape()
        if found != (expected := entry.shape_of(piece.start, piece.stop, entry.dim)):
            raise CheckpointError(
                f"{self._path} is damaged: {piece.key} in {piece.file} has the shape {found} "
                f"instead of {expected}"
            )

    def _copy(self, piece: Piece, where: tuple[slice, ...], target: Tensor) -> None:
        """Copy a slice of a part into a tensor, some rows of the first long dimension at a time."""
        dim = next((i for i, size in enumerate(target.shape) if size > 1), None)
        if dim is None:
            target.copy_(self._slice(piece, where or (...,), target.dtype))
            return
        first, last = where[dim].start, where[dim].stop
        rows = max(1, MOST_MAPPED * target.shape[dim] // target.nbytes)
        for i in range(first, last, rows):
            block = slice(i, min(i + rows, last))
            there = self._slice(piece, (*where[:dim], block, *where[dim + 1 :]), target.dtype)
            target.narrow(dim, i - first, block.stop - i).copy_(there)
            self._mapped += there.nbytes
            del there
            if self._mapped >= self._most:
                self.close()

    def _slice(self, piece: Piece, where: tuple[object, ...], dtype: torch.dtype) -> Tensor:
        opened = self._file(piece.file)
        with _explained(self._path / piece.file):
            found = opened.get_slice(piece.key)[where]
        if found.dtype != dtype:
            raise CheckpointError(
                f"{self._path} is damaged: {piece.key} in {piece.file} is {found.dtype} instead of "
                f"{dtype}"
            )
        return found

    def close(self) -> None:
        """Release the files."""
        self._open.clear()
        self._mapped = self._most = 0


def _empty(shape: Sequence[int], dtype: torch.dtype, path: Path) -> Tensor:
    """Return a new tensor on the host, of a shape that a file says."""
    try:
        return torch.empty([*shape], dtype=dtype)
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"no memory to read {path}: {error}") from error
        raise CheckpointError(f"{path} is damaged: no tensor has the shape {shape}") from error


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise what is true where safetensors or torch cannot read a file.

    The checksum of the file is right. So only what safetensors says of its contents is damage: all
    else that fails is memory, file descriptors or the disk, however it is reported.
    """
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except (RuntimeError, FileNotFoundError) as error:
        # torch cannot map the file: it says so in a RuntimeError. Where safetensors cannot, it says
        # that there is no such file, but it was opened a moment ago.
        if isinstance(error, FileNotFoundError) or is_out_of_memory(error):
            raise MemoryError(f"no memory to read {path}: {error}") from error
        raise OSError(f"{path} cannot be read: {error}") from error


def _slices(low: Sequence[int], high: Sequence[int], base: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from ``low`` to ``high`` of something that begins at ``base``."""
    return tuple(slice(a - c, b - c) for a, b, c in zip(low, high, base, strict=True))
