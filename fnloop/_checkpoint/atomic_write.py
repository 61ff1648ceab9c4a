"""Write a checkpoint as a folder that is either complete or absent.

It is written to a temporary folder next to its path, flushed to the disk, and renamed. So a folder
with a valid manifest is a complete checkpoint, no matter when the process was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fnloop._checkpoint.disk import (
    checksum_of_file,
    flush,
    flushed_file,
    lock_file,
    make_folder,
    try_lock,
)
from fnloop._checkpoint.files import (
    backup_path,
    checksum_of_manifest,
    has_only_our_files,
    is_checkpoint,
    manifest_or_none,
    read_manifest,
    serial_or_none,
)
from fnloop._checkpoint.format import (
    FILES,
    INDEX,
    MANIFEST,
    STATE,
    CheckpointError,
    Contents,
    NewerFormatError,
)
from fnloop._checkpoint.slices import write_tensors
from fnloop._core.serialize import Json

__all__ = ["Writing", "remove_checkpoint", "remove_leftovers", "write_checkpoint", "write_files"]


def write_checkpoint(
    contents: Contents,
    path: Path,
    facts: Mapping[str, Json] | None = None,
    *,
    in_own_folder: bool = False,
) -> Path:
    """Write contents to a temporary folder, flush them to the disk, and rename the folder.

    Args:
        contents: what to write.
        path: the folder to create. An existing checkpoint or an empty folder is replaced.
        facts: additional entries for the manifest.
        in_own_folder: whether the parent folder belongs to this run and the hook chose the name.
            Then a checkpoint with a damaged manifest is replaced too.

    Returns:
        The absolute path.

    Raises:
        CheckpointError: there is something else at the path.
    """
    with contextlib.closing(Writing(contents, path, facts, in_own_folder)) as writing:
        return writing.commit(write_files(contents, writing.folder))


class Writing:
    """A checkpoint that is being written, of which the main process has one.

    It is a temporary folder next to the path. ``close`` removes the folder, if it is still there.

    Args:
        contents, path, facts, in_own_folder: as in :func:`write_checkpoint`.

    Raises:
        CheckpointError: there is something else at the path.
    """

    def __init__(
        self,
        contents: Contents,
        path: Path,
        facts: Mapping[str, Json] | None = None,
        in_own_folder: bool = False,
    ) -> None:
        self.path = path.resolve()
        _check_replaceable(self.path, in_own_folder, contents.all_files)
        make_folder(self.path.parent)
        remove_leftovers(self.path.parent, re.escape(self.path.name))
        names = ("position", "stop", "measured", "phase", "run", "blocks", "parts")
        kept = {name: contents.facts[name] for name in names if name in contents.facts}
        self._facts = {"format_version": contents.facts["format_version"], **kept, **(facts or {})}
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(_temporary_folder(self.path))

    def commit(self, files: Mapping[str, Json]) -> Path:
        """Write the manifest and rename the folder. Return the absolute path.

        Args:
            files: the entry of each file in the manifest.
        """
        version = self._facts["format_version"]
        serial = _next_serial(self.path)
        manifest = {"format_version": version, "serial": serial, **self._facts, "files": {**files}}
        checked = {**manifest, "check": checksum_of_manifest(manifest)}
        _write_text(self.folder / MANIFEST, json.dumps(checked, indent=1))
        flush(self.folder)
        _commit(self.folder, self.path)
        return self.path

    def close(self) -> None:
        """Remove what has not been committed."""
        self._stack.close()


def write_files(contents: Contents, folder: Path) -> dict[str, Json]:
    """Write the files of this process to a folder, flushed to the disk.

    Returns:
        The entry of each in the manifest.
    """
    with ThreadPoolExecutor(2) as pool:
        entries = pool.map(lambda name: _write_file(contents, folder / name), contents.files)
        files = dict(zip(contents.files, entries, strict=True))
    flush(folder)
    return files


def _check_replaceable(path: Path, even_damaged: bool = False, files: Collection[str] = ()) -> None:
    """Raise unless a path is free, an empty folder, or a checkpoint with no other file in it.

    Args:
        path: the path.
        even_damaged: whether a checkpoint with a damaged manifest may be replaced.
        files: the names of the files that such a checkpoint may have.
    """
    if not os.path.lexists(path) or is_checkpoint(path):
        return
    if not path.is_dir():
        reason = "it is a file"
    else:
        names = {file.name for file in path.iterdir()}
        known = {*FILES, MANIFEST, *files}
        damaged = even_damaged and len(names) > 1 and not _is_newer(path)
        if names <= (known if damaged else set()):
            return
        known |= _files_in_manifest(path)
        reason = f"it contains {min(names - known, default='another manifest')}"
    raise CheckpointError(
        f"{path} exists and is not a checkpoint: save to another path "
        f"({reason}; it was not changed)"
    )


def _files_in_manifest(path: Path) -> set[str]:
    try:
        return {*read_manifest(path)["files"]}
    except (CheckpointError, FileNotFoundError):
        return set()


def _is_newer(path: Path) -> bool:
    try:
        read_manifest(path)
    except NewerFormatError:
        return True
    except (CheckpointError, FileNotFoundError):
        pass
    return False


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, locked by this process, and remove it at the end."""
    temporary = path.with_name(f".{path.name}.writing-{secrets.token_hex(6)}")
    lock = _lock_path(temporary)
    with lock_file(lock):
        try:
            temporary.mkdir()
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _lock_path(temporary: Path) -> Path:
    return temporary.with_name(f"{temporary.name}.lock")


def _write_file(contents: Contents, path: Path) -> dict[str, int | str]:
    """Write one file of a checkpoint, and return its entry in the manifest."""
    if path.name == STATE:
        facts = json.dumps(dict(contents.facts), indent=1, allow_nan=False, ensure_ascii=False)
        records = ",\n  ".join(contents.history)
        _write_text(path, f'{facts[:-2]},\n "history": [\n  {records}\n ]\n}}')
    elif path.name == INDEX:
        _write_text(path, json.dumps(contents.index, ensure_ascii=False))
    else:
        group = contents.groups()[contents.files[path.name] or ""]
        with flushed_file(path) as file:
            write_tensors(group, file)
    return {"bytes": path.stat().st_size, "sha256": checksum_of_file(path)}


def _write_text(path: Path, text: str) -> None:
    with flushed_file(path) as file:
        file.write(text.encode())


def _commit(temporary: Path, path: Path) -> None:
    """Rename a complete temporary folder to its path, replacing what is there."""
    old = backup_path(path)
    if path.exists():
        if old.exists():
            if not (old.is_dir() and has_only_our_files(old)):
                _check_replaceable(old)  # raises
            remove_checkpoint(path, backup=True)
        # If the process is killed between the two renames, readers fall back to `old`.
        path.rename(old)
    temporary.rename(path)
    flush(path.parent)
    with contextlib.suppress(OSError):  # it is written: the next save removes the backup
        if old.is_dir() and has_only_our_files(old):
            remove_checkpoint(path, backup=True)


def remove_checkpoint(path: Path, *, backup: bool = False) -> None:
    """Remove a checkpoint or its backup: under another name, as half of one must not look like one.

    What cannot be removed then is removed by a later save (:func:`remove_leftovers`).
    """
    removing = path.with_name(f".{path.name}.removing-{secrets.token_hex(6)}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        (backup_path(path) if backup else path).rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def _next_serial(path: Path) -> int:
    """Return a number greater than that of every checkpoint next to a path."""
    newest = 0
    for neighbour in path.parent.iterdir():
        with contextlib.suppress(OSError):  # a folder of others that cannot be read, for example
            if neighbour.is_dir():
                newest = max(newest, serial_or_none(neighbour) or 0)
    return newest + 1


# --- after killed processes


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what killed processes left in a folder, of checkpoints whose names match a pattern."""
    for path in list(folder.glob(".*")):
        with contextlib.suppress(OSError):  # it stays, and a save does not fail because of it
            if writing := re.fullmatch(rf"(\.{name}\.writing-[0-9a-f]{{12}})(\.lock)?", path.name):
                _remove_unlocked(path.with_name(writing[1]))
            elif replaced := _replaced_by(path, name):
                remove_checkpoint(replaced, backup=True)
            elif _is_being_removed(path, name):
                shutil.rmtree(path, ignore_errors=True)


def _remove_unlocked(temporary: Path) -> None:
    """Remove a temporary folder and its lock, unless a process is still writing it."""
    lock = _lock_path(temporary)
    try:
        file = lock.open("r+")
    except FileNotFoundError:  # the lock is created before the folder and removed after it
        if temporary.is_dir() and has_only_our_files(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        return
    with file:
        if try_lock(file):
            shutil.rmtree(temporary, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _replaced_by(path: Path, name: str) -> Path | None:
    """Return the checkpoint that has replaced the one whose backup is at a path, or None."""
    found = re.fullmatch(rf"\.({name})\.old", path.name)
    if found is None or manifest_or_none(path.with_name(found[1])) is None:
        return None
    return path.with_name(found[1]) if path.is_dir() and has_only_our_files(path) else None


def _is_being_removed(path: Path, name: str) -> bool:
    """Return whether a folder is a checkpoint that was renamed in order to be removed."""
    found = re.fullmatch(rf"\.{name}\.removing(-[0-9a-f]+)?", path.name)
    return found is not None and path.is_dir() and has_only_our_files(path)
