"""The history in checkpoints: the newest records in each of them, and the older ones once, in files beside them.

Every checkpoint has the whole history. For a run with many records that would be more to write than the model. So whole blocks
of records go into the folder ``.records`` beside the checkpoints, each under its checksum, which never changes: a history only
grows. A checkpoint has the checksums of its blocks and the records after them. A short history has no block, and neither has a
checkpoint that ``save`` writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs

from fnloop._checkpoint.format import CheckpointError
from fnloop._core.history import Fold, History
from fnloop._core.record import Record
from fnloop._core.serialize import encode
from fnloop._display.checks import described

__all__ = [
    "Encoded",
    "check_blocks",
    "count",
    "encoder",
    "flush",
    "line_of",
    "read_blocks",
    "remove_others",
    "write_blocks",
]

BLOCK = 1024  # records
FOLDER = ".records"
NAME = r"[0-9a-f]{64}"


@attrs.frozen
class Encoded:
    """A history in JSON.

    Args:
        blocks: the checksum of each whole block of records, the oldest first.
        rest: the records after them, a line each.
    """

    blocks: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()


def encoder() -> Callable[[History], Encoded]:
    """Return a function that encodes a history, and only what is new of one that has grown since."""
    return Fold(_add, Encoded())


def _add(encoded: Encoded, record: Record) -> Encoded:
    rest = (*encoded.rest, line_of(record))
    if len(rest) < BLOCK:
        return Encoded(encoded.blocks, rest)
    return Encoded((*encoded.blocks, _sum_of(_text_of(rest))), ())


def line_of(record: Record) -> str:
    """Return a record in JSON."""
    row = {"epoch": record.epoch, "step": record.step, **record.metrics, "seconds": record.seconds}
    row |= {"closing": True} if record.closing else {}
    return json.dumps(encode(row, {}, "history"), allow_nan=False, ensure_ascii=False)


def _text_of(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _sum_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _file(folder: Path, block: str) -> Path:
    return folder / FOLDER / f"{block}.jsonl"


def write_blocks(folder: Path, blocks: Sequence[str], history: History, known: set[str]) -> None:
    """Write the blocks of a history that are not in a folder of checkpoints yet, flushed to the disk.

    Args:
        folder: where the checkpoints are.
        blocks: the checksums of all whole blocks.
        history: the records.
        known: those that were seen to be whole; more are added.
    """
    for i, block in enumerate(blocks):
        path = _file(folder, block)
        if block in known and path.exists():
            continue
        known.add(block)
        if path.is_file() and _sum_of(path.read_bytes()) == block:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        with beside.open("wb") as file:
            file.write(_text_of(map(line_of, history[i * BLOCK : (i + 1) * BLOCK])))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        flush(path.parent)


def flush(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_blocks(path: Path, blocks: Any, deep: bool) -> None:
    """Raise unless the blocks that a checkpoint names are beside it, and whole.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    for block in blocks:
        if not (isinstance(block, str) and re.fullmatch(NAME, block)):
            raise CheckpointError(
                f"{path} is damaged: {described(block)} is not the name of a block of records"
            )
        file = _file(path.resolve().parent, block)
        if not file.is_file():
            raise CheckpointError(
                f"{path} lacks the older records of its history: {FOLDER}/{file.name} is not beside it. Copy the folder "
                f"{FOLDER} too, or restore without the history: "
                "restore(path, state, only=('model', 'optimizer', 'slots', 'counters', 'metrics', 'extra'))"
            )
        if deep and _sum_of(file.read_bytes()) != block:
            raise CheckpointError(
                f"{path} is damaged: the checksum of {FOLDER}/{file.name} beside it is wrong"
            )


def read_blocks(path: Path, blocks: Iterable[str]) -> list[Any]:
    """Return the records of blocks, as JSON has them."""
    files = [_file(path.resolve().parent, block) for block in blocks]
    return [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    ]


def count(folder: Path) -> int:
    """Return how many blocks there are in a folder of checkpoints."""
    return len(_blocks_in(folder))


def _blocks_in(folder: Path) -> list[Path]:
    """Return the files of blocks in a folder of checkpoints, and what a killed process left of one; nothing else is ours."""
    found = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    return [
        file
        for file in found
        if re.fullmatch(rf"{NAME}\.(jsonl|part)", file.name) and file.is_file()
    ]


def remove_others(folder: Path, blocks: Iterable[str]) -> None:
    """Remove all blocks in a folder of checkpoints but these."""
    kept = {_file(folder, block).name for block in blocks}
    for file in _blocks_in(folder):
        if file.name not in kept:
            file.unlink(missing_ok=True)
