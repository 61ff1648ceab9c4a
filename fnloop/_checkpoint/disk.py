"""The disk: checksums, files that survive a power failure, and file locks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = [
    "checksum_of_file",
    "flush",
    "flushed_file",
    "lock_file",
    "make_folder",
    "remove_parts",
    "replace_file",
    "try_lock",
]

try:
    import fcntl
except ImportError:  # Windows has none: what a killed process leaves behind stays there
    fcntl = None


def checksum_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def flushed_file(path: Path) -> Iterator[IO[bytes]]:
    """Create a file to write to. At the end of the context it is flushed to the disk.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    try:
        with path.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not name its file
        raise


def make_folder(path: Path) -> None:
    """Create a folder and those above it, where they are missing, with their names flushed."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        flush(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, flushed to the disk. It is whole, or what was there before, at any time."""
    remove_parts(path)
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(6)}")
    with lock_file(part):
        try:
            with flushed_file(part) as file:
                file.write(data)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    flush(path.parent)


def remove_parts(path: Path) -> None:
    """Remove what killed processes have left of a file that they were replacing."""
    pattern = rf"{re.escape(f'.{path.name}.part')}(-[0-9a-f]{{12}})?"  # of 0.1.0: without a number
    for part in path.parent.iterdir() if path.parent.is_dir() else ():
        if re.fullmatch(pattern, part.name) and part.is_file():
            with contextlib.suppress(FileNotFoundError), part.open("r+") as file:
                if try_lock(file):
                    part.unlink()


def lock_file(path: Path) -> IO[str]:
    """Create and lock a file, and return it open.

    The lock belongs to the open file. It is released when its process ends, on any machine and in
    any container.
    """
    while True:
        file = path.open("w")
        try_lock(file, wait=True)
        # Another process may have removed the file before it was locked.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


def try_lock(file: IO[str], wait: bool = False) -> bool:
    """Lock an open file. Return False if another process holds it or the disk supports no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
