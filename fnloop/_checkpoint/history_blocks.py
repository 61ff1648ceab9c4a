"""The history in checkpoints: the newest records in each checkpoint, older ones in shared files.

Every checkpoint has the whole history. If each wrote all of it, a run with many records would write
more history than model. So complete blocks of records are written once, to the folder ``.records``
next to the checkpoints, each under its checksum. Blocks never change, because a history only grows.
A checkpoint lists the checksums of its blocks and contains the records after them. A short history
has no blocks, and neither has a checkpoint that :func:`fnloop.save` writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import attrs

from fnloop._checkpoint.disk import flush
from fnloop._checkpoint.format import CheckpointError
from fnloop._core.history import Fold, History
from fnloop._core.record import Record
from fnloop._core.serialize import Json, encode
from fnloop._display.checks import describe

__all__ = [
    "EncodedHistory",
    "check_blocks",
    "count_blocks",
    "decode_record",
    "encode_record",
    "make_history_encoder",
    "read_blocks",
    "remove_other_blocks",
    "write_blocks",
]

BLOCK = 1024  # records
FOLDER = ".records"
NAME = r"[0-9a-f]{64}"


@attrs.frozen
class EncodedHistory:
    """A history as JSON.

    Args:
        blocks: the checksum of each complete block of records, the oldest first.
        rest: the records after the blocks, one line each.
    """

    blocks: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()


def make_history_encoder() -> Callable[[History], EncodedHistory]:
    """Return a function that encodes a history, and only the new records in later calls."""
    return Fold(_append_record, EncodedHistory())


def _append_record(encoded: EncodedHistory, record: Record) -> EncodedHistory:
    rest = (*encoded.rest, encode_record(record))
    if len(rest) < BLOCK:
        return EncodedHistory(encoded.blocks, rest)
    return EncodedHistory((*encoded.blocks, _checksum(_join_lines(rest))), ())


def encode_record(record: Record) -> str:
    """Return a record as JSON."""
    row = {"epoch": record.epoch, "step": record.step, **record.metrics, "seconds": record.seconds}
    row |= {"closing": True} if record.closing else {}
    return json.dumps(encode(row, {}, "history"), allow_nan=False, ensure_ascii=False)


def decode_record(row: dict[str, Json]) -> Record:
    """Return a record from JSON."""
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    closing = row.pop("closing", False)
    return Record(epoch, step, row, seconds, closing)


def _join_lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _block_path(folder: Path, block: str) -> Path:
    return folder / FOLDER / f"{block}.jsonl"


def write_blocks(folder: Path, blocks: Sequence[str], history: History, known: set[str]) -> None:
    """Write the blocks of a history that a folder of checkpoints lacks, flushed to the disk.

    Args:
        folder: where the checkpoints are.
        blocks: the checksums of all complete blocks.
        history: the records.
        known: the blocks that were written or verified before; this call adds to it.
    """
    for i, block in enumerate(blocks):
        path = _block_path(folder, block)
        if block in known and path.exists():
            continue
        known.add(block)
        if path.is_file() and _checksum(path.read_bytes()) == block:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_bytes(_join_lines(map(encode_record, history[i * BLOCK : (i + 1) * BLOCK])))
        flush(partial)
        partial.replace(path)
        flush(path.parent)


def check_blocks(path: Path, blocks: Iterable[object], deep: bool) -> None:
    """Raise unless every block that a checkpoint lists exists and is undamaged.

    Raises:
        CheckpointError: a block is missing or damaged.
    """
    for block in blocks:
        if not (isinstance(block, str) and re.fullmatch(NAME, block)):
            raise CheckpointError(
                f"{path} is damaged: {describe(block)} is not the name of a block of records"
            )
        file = _block_path(path.resolve().parent, block)
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks the older records of its history: {FOLDER}/{file.name} is not next "
                f"to it. Copy the folder {FOLDER} too, or restore without the history: "
                "restore(path, state, "
                "only=('model', 'optimizer', 'slots', 'counters', 'metrics', 'extra'))"
            )
        if deep and _checksum(file.read_bytes()) != block:
            raise CheckpointError(
                f"{path} is damaged: the checksum of {FOLDER}/{file.name} next to it is wrong"
            )


def read_blocks(path: Path, blocks: Iterable[str]) -> list[Json]:
    """Return the records of blocks as JSON."""
    files = [_block_path(path.resolve().parent, block) for block in blocks]
    return [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    ]


def count_blocks(folder: Path) -> int:
    """Return the number of blocks in a folder of checkpoints."""
    return len(_list_blocks(folder))


def _list_blocks(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder, including partial ones that killed processes left.

    No other file belongs to fnloop.
    """
    records = folder / FOLDER
    return [
        file
        for file in (records.iterdir() if records.is_dir() else ())
        if re.fullmatch(rf"{NAME}\.(jsonl|part)", file.name) and file.is_file()
    ]


def remove_other_blocks(folder: Path, blocks: Iterable[str]) -> None:
    """Remove every block in a folder of checkpoints except these."""
    kept = {_block_path(folder, block).name for block in blocks}
    for file in _list_blocks(folder):
        if file.name not in kept:
            file.unlink(missing_ok=True)
