"""The disk: files that survive a power failure, locks between processes, and work in threads."""

from __future__ import annotations

import _thread
import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

try:
    import fcntl
except ImportError:  # Windows has none: what a killed process leaves behind stays there
    fcntl = None

Item = TypeVar("Item")
Result = TypeVar("Result")

# --------------------------------------------------------------------------------------------------
# What is at a path. An error of the disk other than "not found" is raised, and is not absence.


def status(path: Path) -> os.stat_result | None:
    """Return what the disk says of a path, or None if there is nothing, or a link to nothing.

    Raises:
        OSError: the disk does not say.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return None
        raise


def exists(path: Path) -> bool:
    """Return whether there is something at a path. Raise OSError as :func:`status`."""
    return status(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder at a path. Raise OSError as :func:`status`."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def size_of_file(path: Path) -> int | None:
    """Return the size of a regular file, or None if there is none.

    Raises:
        OSError: as :func:`status`.
    """
    found = status(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def checksum_of_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------
# Files that are whole or absent, and locks.


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
    missing = [folder for folder in (path, *path.parents) if not exists(folder)]
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


# --------------------------------------------------------------------------------------------------
# Several files at a time.


def map_with_help(
    do: Callable[[Item], Result], items: Iterable[Item], helpers: int
) -> list[Result]:
    """Return what a function returns for each item. Some other threads take items too.

    Where no other thread can be had, or it never begins, this thread does all of it. If there is an
    exception, no further item is begun, and it is raised when no thread works on one.

    Args:
        do: the function.
        items: the items.
        helpers: how many other threads to ask for.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    waiting = deque(enumerate(items))

    def work(busy: _thread.LockType) -> None:
        while True:
            with busy:
                try:
                    i, item = waiting.popleft()
                except IndexError:
                    return
                try:
                    results[i] = do(item)
                except BaseException as error:
                    errors.append(error)
                    waiting.clear()

    locks = [_thread.allocate_lock() for _ in range(min(helpers, len(waiting) - 1))]
    for lock in locks:
        # A Thread would be waited for until it says that it runs. One without memory never does.
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(work, (lock,))
    try:
        work(_thread.allocate_lock())
    finally:
        waiting.clear()
        for lock in locks:
            with lock:  # its thread works on no item
                pass
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(results))]
