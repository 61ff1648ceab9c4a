"""Find the files of checkpoints, and verify that they are complete.

A fault in a file is a :class:`CheckpointError`. An ``OSError`` other than "not found" is raised as
it is, because a disk that does not answer says nothing about the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fnloop._checkpoint.disk import checksum_of_file
from fnloop._checkpoint.format import (
    COUNT,
    FILES,
    INDEX,
    LARGEST_MANIFEST,
    MANIFEST,
    MANIFEST_SHAPE,
    SHARDED_FORMAT,
    STATE,
    STATE_SHAPE,
    CheckpointError,
    NewerFormatError,
    check_shape,
    is_file_name,
)
from fnloop._checkpoint.history_blocks import check_blocks, read_blocks
from fnloop._core.serialize import Json

__all__ = [
    "backup_path",
    "checksum_of_manifest",
    "has_only_our_files",
    "is_checkpoint",
    "locate",
    "manifest_or_none",
    "read_json",
    "read_manifest",
    "read_state_file",
    "serial_or_none",
    "verify",
]


def backup_path(path: Path) -> Path:
    """Return where a checkpoint is moved while another one replaces it."""
    return path.with_name(f".{path.name}.old")


def locate(path: Path) -> Path:
    """Return where a checkpoint is: at its path, or at its backup if a replacement was killed."""
    backup = backup_path(path)
    return backup if not path.exists() and backup.exists() else path


def has_only_our_files(folder: Path) -> bool:
    """Return whether a folder contains no file that cannot be of a checkpoint.

    What NFS keeps of a removed file that another process reads (``.nfs...``) is one, and so is a
    file that safetensors had not finished (``.tmp...``), which wrote them in fnloop 0.1.0.
    """
    return all(
        file.name == MANIFEST
        or is_file_name(file.name)
        or re.fullmatch(r"\.nfs[0-9a-f]+|\.tmp\w{6}", file.name)
        for file in folder.iterdir()
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder has a valid manifest, and no file that is not of the checkpoint."""
    try:
        manifest = read_manifest(path)
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return False
    return {file.name for file in path.iterdir()} <= {*FILES, *manifest["files"], MANIFEST}


def verify(
    path: Path, *, deep: bool = True, history: bool = True, share: tuple[int, int] = (0, 1)
) -> dict[str, Json]:
    """Verify a checkpoint, and return its manifest.

    Args:
        path: the folder.
        deep: whether to compare the checksums of the files, not only their sizes.
        history: whether the files with the older records of the history must be there.
        share: of which files to compare the checksums: of every n-th, from the i-th on, as (i, n).

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged; the message names file and fault.
        OSError: a file cannot be read for a reason other than that it does not exist.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a checkpoint: there is no such folder")
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a checkpoint: it has no {MANIFEST} "
            "(for a folder of checkpoints, see latest)"
        ) from None
    for i, (name, facts) in enumerate(manifest["files"].items()):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if (size := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}"
            )
        mine = deep and i % share[1] == share[0]
        if mine and checksum_of_file(file) != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    if history:
        check_blocks(path, manifest.get("blocks", ()), deep)
    return manifest


def read_manifest(path: Path) -> dict[str, Json]:
    """Return the manifest in a folder, after checking that it is valid.

    Raises:
        CheckpointError: it is damaged, or a newer fnloop wrote it.
        OSError: it cannot be read; FileNotFoundError if it does not exist.
    """
    file = path / MANIFEST
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is damaged: it is not a regular file")
    if file.stat().st_size > LARGEST_MANIFEST:
        raise CheckpointError(f"{file} is damaged: it is longer than any manifest")
    manifest = read_json(file)
    check_shape(manifest, dict, file)
    try:
        right = manifest.pop("check", None) == checksum_of_manifest(manifest)
    except RecursionError:  # what is nested just as deeply as it can be read
        right = False
    if not right:
        raise CheckpointError(f"{file} is damaged: its own checksum is wrong")
    check_shape(manifest, {"format_version": COUNT}, file)
    if manifest["format_version"] > SHARDED_FORMAT:
        raise NewerFormatError(
            f"{path} has format {manifest['format_version']}, and this fnloop reads formats "
            f"up to {SHARDED_FORMAT}: pip install -U fnloop"
        )
    check_shape(manifest, MANIFEST_SHAPE, file)
    files = manifest["files"]
    for name in files:
        if not is_file_name(name):
            raise CheckpointError(
                f"{file} is damaged: no file of a checkpoint is named {name!r:.60}"
            )
    if missing := {STATE, INDEX} - {*files} if INDEX in files else {*FILES} - {*files}:
        raise CheckpointError(f"{file} is damaged: it does not list {min(missing)}")
    return manifest


def read_json(file: Path) -> Json:
    """Return what a file of JSON holds.

    Raises:
        CheckpointError: it is not JSON.
        OSError: it cannot be read.
    """
    data = file.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def read_state_file(path: Path, blocks: Iterable[str] = ()) -> dict[str, Json]:
    """Return the contents of ``state.json``, each value of the kind that it has to be.

    Args:
        path: the checkpoint.
        blocks: the blocks of older records, which are put before those that it has.

    Raises:
        CheckpointError: it is something else.
        OSError: it cannot be read.
    """
    facts = read_json(path / STATE)
    check_shape(facts, STATE_SHAPE, path / STATE)
    facts["history"] = [*read_blocks(path, blocks), *facts["history"]]
    return facts


def checksum_of_manifest(manifest: Mapping[str, Json]) -> str:
    """Return the checksum that a manifest carries of its own other entries."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def manifest_or_none(path: Path) -> dict[str, Json] | None:
    """Return the manifest of a checkpoint, or None if the checkpoint is damaged or gone.

    Only the sizes of the files are compared.
    """
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        return verify(path, deep=False, history=False)
    return None


def serial_or_none(path: Path) -> int | None:
    """Return the number that orders checkpoints by when they were written.

    It is None if the checkpoint is damaged or gone, or something else is there.
    """
    with contextlib.suppress(CheckpointError, FileNotFoundError, NotADirectoryError):
        return read_manifest(path).get("serial")
    return None
