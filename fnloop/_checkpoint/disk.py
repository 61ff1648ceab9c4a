"""The disk: checksums, flushing, and file locks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import IO

__all__ = ["checksum_of_file", "flush", "lock_file", "try_lock"]

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
