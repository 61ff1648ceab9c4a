"""Files of tensors: write one, and read slices of tensors whose parts are in several.

The format is that of safetensors: the length of a header in 8 bytes, the header in JSON, which says
dtype, shape and place of each tensor, and the bytes of the tensors. The package safetensors reads
these files, and this module reads its files.

This module reads and writes by itself, because of how that package treats the disk. It writes to a
temporary file whose mode is 0600 whatever the umask, and reports a failed read as a missing file or
as a RuntimeError, as it would damage. Here a failed read is the OSError or the MemoryError that it
is, and a CheckpointError says that the file itself is wrong.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs
import torch
from torch import Tensor

from fnloop._backend.memory import is_out_of_memory
from fnloop._checkpoint.format import COUNT, CheckpointError, check_shape
from fnloop._core.serialize import Json

__all__ = ["Entry", "Slices", "TensorFile", "decode_index", "write_tensors"]

BLOCK = 4 << 20  # bytes to read at a time of a part of which only some columns are wanted
MOST_OPEN = 64  # files
LARGEST_HEADER = 100_000_000  # bytes, as safetensors limits it
METADATA = "__metadata__"

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float4_e2m1fn_x2: "F4",
}
PACKED = torch.float4_e2m1fn_x2  # two numbers in an element: the format counts the numbers
DTYPES = {code: dtype for dtype, code in CODES.items()}
HEADER = {"dtype": str, "shape": [COUNT], "data_offsets": [COUNT]}
INDEXED = {
    "shape": [COUNT],
    "dtype": str,
    "dim?": (None, COUNT),
    "shards": [{"file": str, "key": str, "offsets": [COUNT]}],
}


# --- one file


def write_tensors(tensors: Mapping[str, Tensor], file: IO[bytes]) -> None:
    """Write tensors to a file. Tensors may share memory; each name gets its own bytes.

    Raises:
        TypeError: the format has no code for the dtype of a tensor.
    """
    # The widest first, so that the bytes of each are aligned where the file is mapped into memory.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Json] = {METADATA: {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES or name == METADATA:
            raise TypeError(f"no file can hold the tensor {name}, of {tensor.dtype}")
        start, end = end, end + tensor.nbytes
        shape, code = [*tensor.shape], CODES[tensor.dtype]
        if tensor.dtype is PACKED:
            shape[-1:] = [2 * n for n in shape[-1:]]
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        plain = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        file.write(_bytes_of(plain))


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a contiguous tensor on the host, as an array of bytes."""
    # A tensor of one element is contiguous with any strides, and reshape would keep them.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


@attrs.frozen
class _Held:
    """A tensor in a file: dtype, shape, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """A file of tensors that is open for reading.

    Args:
        path: the file.

    Attributes:
        held: the tensors in it, by name.

    Raises:
        CheckpointError: it is not a file of tensors.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")
        try:
            self.held = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, _Held]:
        size = os.fstat(self._file.fileno()).st_size
        length = int.from_bytes(self._file.read(8), "little")
        begin = 8 + length
        if begin > size or length > LARGEST_HEADER:
            raise self._damaged("its header is cut")
        try:
            header = json.loads(self._file.read(length))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON: {error}") from error
        check_shape(header, dict, self._path)
        header.pop(METADATA, None)
        check_shape(header, {"*": HEADER}, self._path)
        held, ends = {}, []
        for name, entry in header.items():
            dtype, shape = DTYPES.get(entry["dtype"]), tuple(entry["shape"])
            if dtype is None:
                raise self._damaged(f"{name} has the dtype {entry['dtype']}")
            if dtype is PACKED:
                shape = (*shape[:-1], *(n // 2 for n in shape[-1:]))
            nbytes = math.prod(shape) * dtype.itemsize
            if len(entry["data_offsets"]) != 2 or nbytes != entry["data_offsets"][1] - (
                start := entry["data_offsets"][0]
            ):
                raise self._damaged(f"{name} has not as many bytes as its shape says")
            held[name] = _Held(dtype, shape, begin + start)
            ends.append((begin + start, begin + start + nbytes))
        # One after the other, so that no bytes are read twice: a small file takes little memory.
        ends.sort()
        if [begin, *(end for _, end in ends)] != [*(start for start, _ in ends), size]:
            raise self._damaged("its tensors are not one after the other")
        return held

    def _damaged(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {fault}")

    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            CheckpointError: the file has no such tensor, or was cut in the meantime.
            MemoryError: there is no memory for it.
            OSError: it cannot be read.
        """
        held = self.find(name)
        return self.read_rows(name, 0, empty(held.shape, held.dtype, self._path))

    def read_rows(self, name: str, first: int, target: Tensor) -> Tensor:
        """Fill a contiguous tensor with rows of one in the file, from a row on, and return it.

        Raises:
            CheckpointError, OSError: as :meth:`read`.
        """
        held = self.find(name)
        self._file.seek(held.start + first * math.prod(held.shape[1:]) * held.dtype.itemsize)
        if self._file.readinto(_bytes_of(target)) != target.nbytes:
            raise self._damaged(f"{name} is cut")
        return target

    def find(self, name: str) -> _Held:
        """Return what the header says of a tensor.

        Raises:
            CheckpointError: the file has no such tensor.
        """
        if name not in self.held:
            raise self._damaged(f"it has no tensor {name!r:.60}")
        return self.held[name]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def empty(shape: Iterable[int], dtype: torch.dtype, path: Path) -> Tensor:
    """Return a new tensor on the host, of a shape that a file says.

    Raises:
        CheckpointError: no tensor can have the shape.
        MemoryError: there is no memory for it.
    """
    try:
        return torch.empty([*shape], dtype=dtype)
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"no memory to read {path}: {error}") from error
        raise CheckpointError(f"{path} is damaged: no tensor has the shape {shape}") from error


# --- tensors whose parts are in several


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
    """Reads slices of tensors from the files of a checkpoint.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: dict[str, TensorFile] = {}

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if len(self._open) == MOST_OPEN:
                self.close()
            self._open[name] = TensorFile(self._path / name)
        return self._open[name]

    def entries_in(self, file: str) -> dict[str, Entry]:
        """Return an entry for each tensor of a file that has whole tensors."""
        return {
            key: Entry(held.shape, held.dtype, [Piece(file, key, 0, 1)])
            for key, held in self._file(file).held.items()
        }

    def read(self, entry: Entry, start: int = 0, stop: int = 0, dim: int | None = None) -> Tensor:
        """Return a tensor; with a dimension, only its part from ``start`` to ``stop`` along it.

        Raises:
            CheckpointError: a part is not what the entry says.
            OSError, MemoryError: it cannot be read, or there is no memory for it.
        """
        if dim is None and entry.dim is None:
            (piece,) = entry.pieces
            self._check(piece, entry)
            return self._file(piece.file).read(piece.key)
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
        made = empty(shape, entry.dtype, self._path)
        for piece, there, here in copies:
            self._copy(piece, there, made[here])
        return made

    def _check(self, piece: Piece, entry: Entry) -> None:
        held = self._file(piece.file).find(piece.key)
        shape = entry.shape_of(piece.start, piece.stop, entry.dim)
        for found, said in (([*held.shape], shape), (held.dtype, entry.dtype)):
            if found != said:
                raise CheckpointError(
                    f"{self._path} is damaged: {piece.key} in {piece.file} is {found} instead of "
                    f"{said}"
                )

    def _copy(self, piece: Piece, where: tuple[slice, ...], target: Tensor) -> None:
        """Copy a slice of a part into a tensor; some rows at a time, if it is not whole rows."""
        file = self._file(piece.file)
        first, last = where[0].start, where[0].stop
        columns, width = where[1:], file.find(piece.key).shape[1:]
        if target.is_contiguous() and [(c.start, c.stop) for c in columns] == [
            (0, n) for n in width
        ]:
            file.read_rows(piece.key, first, target)
            return
        rows = max(1, BLOCK // (math.prod(width) * target.dtype.itemsize))
        block = empty((min(rows, last - first), *width), target.dtype, self._path)
        for i in range(first, last, rows):
            there = file.read_rows(piece.key, i, block[: last - i])
            target[i - first : i - first + rows].copy_(there[(slice(None), *columns)])

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def _slices(low: Sequence[int], high: Sequence[int], base: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices from ``low`` to ``high`` of something that begins at ``base``."""
    return tuple(slice(a - c, b - c) for a, b, c in zip(low, high, base, strict=True))
