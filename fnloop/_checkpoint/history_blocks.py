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

from fnloop._checkpoint.disk import make_folder, replace_file
from fnloop._checkpoint.format import CheckpointError
from fnloop._core.history import Fold, History
from fnloop._core.record import Record
from fnloop._core.serialize import Json, decode, encode
from fnloop._display.checks import describe

__all__ = [
    "EncodedHistory",
    "check_blocks",
    "count_blocks",
    "decode_history",
    "encode_record",
    "make_history_encoder",
    "read_blocks",
    "remove_other_blocks",
    "write_blocks",
]

BLOCK = 1024  # records
FOLDER = ".records"
NAME = r"[0-9a-f]{64}"
PART = rf"{NAME}\.part|\.{NAME}\.jsonl\.part-[0-9a-f]{{12}}"  # the former by 0.1.0


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


def decode_history(rows: Iterable[Json], path: object = "the checkpoint") -> History:
    """Return the history of a checkpoint, from its records as JSON.

    Raises:
        CheckpointError: one of them is not a record.
    """
    try:
        return History(map(_decode_record, rows))
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} is damaged: its history has something else than records: "
            f"{type(error).__name__}: {error}"
        ) from error


def _decode_record(encoded: Json) -> Record:
    row = decode(encoded, {})
    if not isinstance(row, dict):
        raise TypeError(f"a record is {describe(row)}")
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    closing = row.pop("closing", False)
    if not isinstance(closing, bool):
        raise TypeError(f"closing of a record is {describe(closing)}")
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
        make_folder(path.parent)
        replace_file(path, _join_lines(map(encode_record, history[i * BLOCK : (i + 1) * BLOCK])))


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
    """Return the records of blocks as JSON.

    Raises:
        CheckpointError: a block is not JSON.
        OSError: it cannot be read.
    """
    rows: list[Json] = []
    for block in blocks:
        file = _block_path(path.resolve().parent, block)
        lines = file.read_bytes().splitlines()
        try:
            rows += map(json.loads, lines)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    return rows


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
        if re.fullmatch(rf"{NAME}\.jsonl|{PART}", file.name) and file.is_file()
    ]


def remove_other_blocks(folder: Path, blocks: Iterable[str]) -> None:
    """Remove every block in a folder of checkpoints except these."""
    kept = {_block_path(folder, block).name for block in blocks}
    for file in _list_blocks(folder):
        if file.name not in kept:
            file.unlink(missing_ok=True)
