"""Files that are complete or absent: checksums, power failures, locks, many machines."""

from __future__ import annotations

import bisect
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fnloop._core.history import Fold, History
from fnloop._core.records import Record
from fnloop._display.screen import warn_once
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.foreign import explain_foreign
from fnloop._extensions.checkpoints.format import (
    COUNT,
    FILES,
    INDEX,
    LARGEST_MANIFEST,
    MANIFEST,
    MANIFEST_SHAPE,
    NEWEST_FORMAT,
    STATE,
    STATE_SHAPE,
    CheckpointError,
    Contents,
    NewerFormatError,
    check_shape,
    is_file_name,
)
from fnloop._extensions.checkpoints.serialize import Json, decode, encode
from fnloop.extend import checks, collectives

# --------------------------------------------------------------------------------------------------
# Find the files of checkpoints, and verify that they are complete.
#
# A fault in a file is a `CheckpointError`. An `OSError` other than "not found" is raised as it is,
# because a disk that does not answer says nothing about the checkpoint. So what is there is asked
# of `disk`, and not of `os.path.exists`, which takes each error for absence.

# As the hook names them: at which step, after which exception, and with which metrics.
CHECKPOINT_NAME = r"step-\d+(?:\+\d+)?(?:-\w+)?(?:-[\w.-]+=[\w.+-]+)*"


OBJECTS = "objects"  # in a manifest at an address, the folder of the files (see `remote`)


def backup_path(path: Path) -> Path:
    """Return where a checkpoint is moved while another one replaces it."""
    return path.with_name(f".{path.name}.old")


def locate(path: Path) -> Path:
    """Return where a checkpoint is: at its path, or at its backup if a replacement was killed."""
    backup = backup_path(path)
    return backup if not disk.exists(path) and disk.exists(backup) else path


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
        return has_only_its_files(path, read_manifest(path))
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return False


def has_only_its_files(path: Path, manifest: Mapping[str, Json]) -> bool:
    """Return whether a folder contains no file that is not of the checkpoint with this manifest."""
    return {file.name for file in path.iterdir()} <= {*FILES, *manifest["files"], MANIFEST}


MOST_KEPT = 8 << 20  # bytes of files that are kept after their checksums were compared


def verify(
    path: Path,
    *,
    deep: bool = True,
    history: bool = True,
    share: tuple[int, int] = (0, 1),
    kept: dict[str, bytes] | None = None,
    manifest: dict[str, Json] | None = None,
) -> dict[str, Json]:
    """Verify a checkpoint, and return its manifest.

    Args:
        path: the folder.
        deep: whether to compare the checksums of the files, not only their sizes.
        history: whether the files with the older records of the history must be there.
        share: of which files to compare the checksums: of every n-th, from the i-th on, as (i, n).
        kept: receives the contents of small files whose checksums are right, by name.
        manifest: what was read of the manifest already.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged; the message names file and fault.
        OSError: a file cannot be read for a reason other than that it does not exist.
    """
    if manifest is None and not disk.is_folder(path):
        what = "it is a link to nothing" if path.is_symlink() else "there is no such folder"
        what = f"it is a file. {foreign}" if (foreign := explain_foreign(path)) else what
        raise CheckpointError(f"{path} is not a checkpoint: {what}")
    try:
        manifest = read_manifest(path) if manifest is None else manifest
    except FileNotFoundError:
        foreign = explain_foreign(path)
        what = f". {foreign}" if foreign else " (for a folder of checkpoints, see latest)"
        if any(disk.exists(one / MANIFEST) for one in path.iterdir() if disk.is_folder(one)):
            what = (
                ". It is a folder of checkpoints. For the newest of them, write "
                f'restore(latest("{path}"), state); to continue a run, resume("{path}", state)'
            )
        raise CheckpointError(f"{path} is not a checkpoint: it has no {MANIFEST}{what}") from None
    check_files(path, manifest, deep, share, kept)
    if history:
        check_blocks(path, manifest.get("blocks", ()), deep)
    return manifest


def check_files(
    path: Path,
    manifest: Mapping[str, Json],
    deep: bool = False,
    share: tuple[int, int] = (0, 1),
    kept: dict[str, bytes] | None = None,
) -> None:
    """Raise CheckpointError unless the files of a checkpoint are as its manifest says.

    Args:
        path: the folder.
        manifest: what :func:`read_manifest` has returned.
        deep, share, kept: see :func:`verify`.
    """
    room = 0 if kept is None else MOST_KEPT
    for i, (name, facts) in enumerate(manifest["files"].items()):
        file = path / name
        size = disk.size_of_file(file)
        if size is None:
            if not deep and is_stub(path, manifest):
                continue
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if size != facts["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}"
            )
        if not deep or i % share[1] != share[0]:
            continue
        content = file.read_bytes() if size <= room else None
        found = (
            disk.checksum_of_file(file) if content is None else hashlib.sha256(content).hexdigest()
        )
        if found != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
        if kept is not None and content is not None:
            kept[name] = content
            room -= size


def read_manifest(path: Path) -> dict[str, Json]:
    """Return the manifest in a folder, after checking that it is valid.

    Raises:
        CheckpointError: it is damaged, or a newer fnloop wrote it.
        OSError: it cannot be read; FileNotFoundError if it does not exist.
    """
    file = path / MANIFEST
    if (found := disk.status(file)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file} is damaged: it is not a regular file")
    if found.st_size > LARGEST_MANIFEST:
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
    if manifest["format_version"] > NEWEST_FORMAT:
        raise NewerFormatError(
            f"{path} has format {manifest['format_version']}, and this fnloop reads formats "
            f"up to {NEWEST_FORMAT}: install a newer fnloop"
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


def read_json(file: Path, content: bytes | None = None) -> Json:
    """Return what a file of JSON holds.

    Args:
        file: the file.
        content: what was read of it already.

    Raises:
        CheckpointError: it is not JSON.
        OSError: it cannot be read.
    """
    content = file.read_bytes() if content is None else content
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def read_state_file(
    path: Path, blocks: Iterable[str] = (), content: bytes | None = None
) -> dict[str, Json]:
    """Return the contents of ``state.json``, each value of the kind that it has to be.

    Args:
        path: the checkpoint.
        blocks: the blocks of older records, which are put before those that it has.
        content: what was read of the file already.

    Raises:
        CheckpointError: it is something else.
        OSError: it cannot be read.
    """
    facts = read_json(path / STATE, content)
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


def explain_nonfinite(path: Path, manifest: Mapping[str, Json]) -> str | None:
    """Return in words why no run continues from a checkpoint: its weights are not finite. Or None.

    Checkpoints of older versions do not say it, and pass for finite.
    """
    if manifest.get("finite", True):
        return None
    found = ((file, entry.get("nonfinite")) for file, entry in manifest["files"].items())
    where = next((f" ({name} in {file} has NaN or inf)" for file, name in found if name), "")
    return f"the weights or the optimizer in {path} are not finite{where}"


def mark_of(path: Path) -> Path:
    """Return the file that says which checkpoint, of those at a path, is at an address too."""
    return path.with_name(f".{path.name}.remote")


def is_stub(path: Path, manifest: Mapping[str, Json]) -> bool:
    """Return whether the files of a checkpoint may be missing, because they are at an address."""
    plain = {name: value for name, value in manifest.items() if name != OBJECTS}
    try:
        return mark_of(path).read_text() == checksum_of_manifest(plain)
    except FileNotFoundError:
        return False


def run_of(path: Path, manifest: Mapping[str, Json]) -> str:
    """Return the run that a checkpoint belongs to.

    Checkpoints of older versions do not name it. Those in one folder are taken to be of one run.
    """
    found = manifest.get("run")
    if isinstance(found, str) and found:
        return found
    return hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:16]


def serial_or_none(path: Path) -> int | None:
    """Return the number that orders checkpoints by when they were written.

    It is None if the checkpoint is damaged or gone, or something else is there.
    """
    manifest = readable_manifest(path)
    return None if manifest is None else manifest.get("serial")


# The manifests that this process has listed, each with the version of its file. So a save does not
# read those of all checkpoints beside it. A file that was changed so lately that another change may
# have the same time is read again.
_listed: dict[Path, tuple[tuple[int, ...], dict[str, Json]]] = {}
SAME_TIME = 20_000_000  # nanoseconds; the clock of a disk has steps of up to 10 ms


def readable_manifest(path: Path) -> dict[str, Json] | None:
    """Return the manifest in a folder, or None if there is none, or a damaged one.

    Its files are not looked at. What has not changed is not read again, so whether the disk can be
    read now, only :func:`read_manifest` says.

    Raises:
        OSError: it cannot be read.
    """
    file = path / MANIFEST
    found = disk.status(file)
    if found is None:
        _listed.pop(file, None)
        return None
    version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if file in _listed and _listed[file][0] == version:
        return _listed[file][1]
    try:
        manifest = read_manifest(path)
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None
    if time.time_ns() - found.st_ctime_ns > SAME_TIME:
        _listed[file] = version, manifest
    return manifest


# --------------------------------------------------------------------------------------------------
# Write a checkpoint as a folder that is either complete or absent.
#
# It is written to a temporary folder next to its path, flushed to the disk, and renamed. So a
# folder with a valid manifest is a complete checkpoint, no matter when the process was killed.


class Writing:
    """A checkpoint that is being written, of which the main process has one.

    It is a temporary folder next to the path. ``close`` removes the folder, if it is still there.

    Args:
        contents: what to write.
        path: the folder to create. An existing checkpoint or an empty folder is replaced.
        facts: additional entries for the manifest.
        in_own_folder: whether the parent folder belongs to this run and the hook chose the name.
            Then a checkpoint with a damaged manifest is replaced too.

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
        dangling = path.is_symlink() and not disk.exists(path)  # it is refused, and not followed
        self.path = path.parent.resolve() / path.name if dangling else path.resolve()
        _check_replaceable(self.path, in_own_folder, contents.all_files)
        disk.make_folder(self.path.parent)
        remove_leftovers(self.path.parent, re.escape(self.path.name))
        names = ("position", "stop", "measured", "phase", "run", "blocks", "parts")
        kept = {name: contents.facts[name] for name in names if name in contents.facts}
        self._facts = {"format_version": contents.facts["format_version"], **kept, **(facts or {})}
        self._stack = contextlib.ExitStack()
        self.folder = self._stack.enter_context(_temporary_folder(self.path))
        self._contents = contents

    def complete(self) -> Path:
        """Write all files, and make it a checkpoint. Return the absolute path."""
        with contextlib.closing(self):
            return self.commit(write_files(self._contents, self.folder))

    def commit(self, files: Mapping[str, Json]) -> Path:
        """Write the manifest and rename the folder. Return the absolute path.

        Args:
            files: the entry of each file in the manifest.
        """
        version = self._facts["format_version"]
        serial = _next_serial(self.path)
        finite = not any("nonfinite" in entry for entry in files.values())
        said = {"serial": serial, **self._facts, "finite": finite}
        manifest = {"format_version": version, **said, "files": {**files}}
        checked = {**manifest, "check": checksum_of_manifest(manifest)}
        _write_text(self.folder / MANIFEST, json.dumps(checked, indent=1))
        disk.flush(self.folder)
        _commit(self.folder, self.path)
        for entry in () if finite else files.values():
            if "nonfinite" in entry:
                warn_once(
                    f"a checkpoint is saved with NaN or inf in {entry['nonfinite']}: resume, "
                    "latest and best pass over it, and keep= does not remove the newest that is "
                    "finite. To stop such a run: hooks=(halt_on_nonfinite(), ...). It looks every "
                    "100 updates; to look more often, halt_on_nonfinite(steps=10)"
                )
                break
        return self.path

    def close(self) -> None:
        """Remove what has not been committed."""
        self._stack.close()


def write_files(contents: Contents, folder: Path) -> dict[str, Json]:
    """Write the files of this process to a folder, flushed to the disk.

    Returns:
        The entry of each in the manifest.
    """
    entries = disk.map_with_help(
        lambda name: _write_file(contents, folder / name), contents.files, helpers=1
    )
    disk.flush(folder)
    return dict(zip(contents.files, entries, strict=True))


def _check_replaceable(path: Path, even_damaged: bool = False, files: Collection[str] = ()) -> None:
    """Raise unless a path is free, an empty folder, or a checkpoint with no other file in it.

    Args:
        path: the path.
        even_damaged: whether a checkpoint with a damaged manifest may be replaced.
        files: the names of the files that such a checkpoint may have.
    """
    if not (disk.exists(path) or path.is_symlink()) or is_checkpoint(path):
        return
    if not disk.is_folder(path):
        reason = "it is a file" if disk.exists(path) else "it is a link to nothing"
    else:
        names, known = {file.name for file in path.iterdir()}, {*FILES, MANIFEST, *files}
        listed: Collection[str] = ()
        try:
            listed = read_manifest(path)["files"]
        except NewerFormatError:
            even_damaged = False
        except (CheckpointError, FileNotFoundError):
            pass
        damaged = even_damaged and len(names) > 1
        if names <= (known if damaged else set()):
            return
        known |= {*listed}
        reason = f"it contains {min(names - known, default='another manifest')}"
    raise CheckpointError(
        f"{path} exists and is not a checkpoint: save to another path "
        f"({reason}; it was not changed)"
    )


@contextlib.contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, locked by this process, and remove it at the end."""
    temporary = path.with_name(f".{path.name}.writing-{secrets.token_hex(6)}")
    lock = _lock_path(temporary)
    with disk.lock_file(lock):
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
        group = contents.files[path.name] or ""
        _write_tensors(contents.groups[group], path)
        if group != "slots":  # metrics and the like, where NaN may be right
            return inspect_tensors(path, contents.learning)
    return {"bytes": path.stat().st_size, "sha256": disk.checksum_of_file(path)}


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # safetensors refuses tensors that share memory, so every name of a tied tensor gets a copy.
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shared = tensor.numel() > 0 and storage.data_ptr() in seen
        seen.add(storage.data_ptr())
        if shared or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        plain[name] = tensor.resolve_conj().resolve_neg()
    try:
        with path.open("xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # as the umask gives it
        save_file(plain, path, metadata={"format": "pt"})
        path.chmod(mode)  # safetensors renames a temporary file, which only its owner may read
        disk.flush(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not name its file
        raise


def _write_text(path: Path, text: str) -> None:
    with disk.flushed_file(path) as file:
        file.write(text.encode())


def _commit(temporary: Path, path: Path) -> None:
    """Rename a complete temporary folder to its path, replacing what is there."""
    old = backup_path(path)
    if disk.exists(path):
        if disk.exists(old):
            if not (disk.is_folder(old) and has_only_our_files(old)):
                _check_replaceable(old)  # raises
            remove_checkpoint(path, backup=True)
        # If the process is killed between the two renames, readers fall back to `old`.
        path.rename(old)
    temporary.rename(path)
    disk.flush(path.parent)
    with contextlib.suppress(OSError):  # it is written: the next save removes the backup
        if old.is_dir() and has_only_our_files(old):
            remove_checkpoint(path, backup=True)


def remove_checkpoint(path: Path, *, backup: bool = False) -> None:
    """Remove a checkpoint or its backup: under another name, as half of one must not look like one.

    What cannot be removed then is removed by a later save (:func:`remove_leftovers`).
    """
    removing = path.with_name(f".{path.name}.removing-{secrets.token_hex(6)}")
    _listed.pop(path / MANIFEST, None)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        (backup_path(path) if backup else path).rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def _next_serial(path: Path) -> int:
    """Return a number greater than that of every checkpoint next to a path."""
    newest = 0
    with os.scandir(path.parent) as neighbours:
        for neighbour in neighbours:
            try:
                newest = max(newest, serial_or_none(path.parent / neighbour.name) or 0)
            except OSError:
                if re.fullmatch(CHECKPOINT_NAME, neighbour.name):  # rather than a folder of others
                    raise
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
        if disk.try_lock(file):
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


# --------------------------------------------------------------------------------------------------
# Write a checkpoint by all processes: each its own files, into one temporary folder.
#
# The main process makes the folder. When all have written and flushed their files, it gets their
# checksums, writes the manifest, and renames the folder. Whichever process is killed before, there
# is no manifest, and so no checkpoint.


SendFiles = Callable[[Path, Collection[str], str], None]


def write_by_all(contents: Contents, path: Path, what: str, send: SendFiles | None = None) -> Path:
    """Write a checkpoint: by all processes if it has an index, otherwise by the main process.

    Args:
        contents: what this process writes.
        path: the folder to create, as in :class:`Writing`.
        what: what waits for it, as errors name it.
        send: as in :class:`SharedWrite`.
    """
    if not contents.index:
        return collectives.on_main_process(lambda: Writing(contents, path).complete(), what)
    shared = SharedWrite(contents, lambda: Writing(contents, path), what, send)
    try:
        shared.write()
        files = shared.agree()
        written = collectives.on_main_process(lambda: shared.commit(files), what)
        shared.check_sent()
        return written
    finally:
        shared.abandon()


class SharedWrite:
    """A checkpoint that all processes write. Each makes one, and calls the same methods in turn.

    Args:
        contents: what this process writes.
        begin: begins to write, on the main process.
        what: what waits for it, as errors name it.
        send: uploads files of this process: from a folder, some names, to a folder of that name at
            the address. Then the other machines need not see the folder of the main process.

    Attributes:
        writing: the checkpoint that is being written, on the main process; elsewhere None.
        at: the folder at the address.
        faults: why processes could not upload their files.
    """

    def __init__(
        self,
        contents: Contents,
        begin: Callable[[], Writing],
        what: str,
        send: SendFiles | None = None,
    ) -> None:
        self.contents, self._what, self._send = contents, what, send
        self._fault: str | None = None  # why this process could not upload its files
        self.faults: list[str] = []
        self.writing: Writing | None = None
        self._thread: threading.Thread | None = None
        self._files: dict[str, Json] = {}
        self._error: BaseException | None = None
        self._unfinished: Callable[[], list[float]] | None = None
        self._folder = collectives.on_main_process(lambda: self._begin(begin), what)
        self.at = self._folder.name[-12:]
        self._is_elsewhere = send is not None and not disk.exists(self._folder)

    def _begin(self, begin: Callable[[], Writing]) -> Path:
        self.writing = begin()
        return self.writing.folder

    def write(self) -> None:
        """Write the files of this process. An error is raised by :meth:`agree`."""
        try:
            if self._is_elsewhere:
                self._folder.mkdir(parents=True, exist_ok=True)
            self._files = write_files(self.contents, self._folder)
        except BaseException as error:
            self._error = error
            return
        if self._send is not None:
            try:
                self._send(self._folder, [*self._files], self.at)
            except Exception as error:  # what is written is kept all the same
                self._fault = f"{type(error).__name__}: {error}"

    def start(self) -> None:
        """Write the files of this process while training continues."""
        self._thread = threading.Thread(target=self.write, name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Return whether all processes have written their files. No process waits for another.

        Every process must call it equally often. The answer is as of the call before.
        """
        if self._unfinished is not None and not self._unfinished()[0]:
            self._unfinished = None
            return True
        writes = self._thread is not None and self._thread.is_alive()
        self._unfinished = collectives.start_all_reduce_max([writes], self._what)
        return False

    def agree(self) -> dict[str, Json]:
        """Wait until all processes have written. Return the entries of all files in the manifest.

        Raises:
            Exception: one of them could not write; the error is raised in every process.
        """
        self._join()
        own = collectives.on_every_process(self._outcome, self._what)
        every = collectives.gather_from_all((own, self._fault), self._what)
        self.faults = [fault for _, fault in every if fault is not None]
        if self._is_elsewhere and not self.faults:
            self._remove_own()
        return {name: entry for files, _ in every for name, entry in files.items()}

    def _remove_own(self) -> None:
        with contextlib.suppress(OSError):
            for name in self._files:
                (self._folder / name).unlink(missing_ok=True)
            self._folder.rmdir()  # the last process of this machine does

    def check_sent(self) -> None:
        """Raise in every process if one of them could not upload its files.

        Raises:
            OSError: it could not; the message says where the local copy is.
        """
        if self.faults:
            name = self._folder.name[1:].rpartition(".writing-")[0]
            raise OSError(
                f"{name} could not be uploaded ({self.faults[0]}). It is whole in "
                f"{self._folder.with_name(name)}"
            )

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _outcome(self) -> dict[str, Json]:
        if self._error is not None:
            raise self._error
        return self._files

    def commit(self, files: dict[str, Json]) -> Path:
        """Make it a checkpoint, on the main process. Return the absolute path."""
        assert self.writing is not None
        with contextlib.closing(self.writing) as writing:
            return writing.commit(files)

    def abandon(self) -> bool:
        """Remove what has not been committed. Return whether there was anything.

        It does not wait for other processes, which may have ended.
        """
        self._join()
        writing, self.writing = self.writing, None
        left = writing is not None and writing.folder.exists()
        if writing is not None:
            writing.close()
        return left


# --------------------------------------------------------------------------------------------------
# Checksums of files of tensors, and whether the tensors are finite.

PIECE = 1 << 18  # bytes that are read at a time, so that they are in the cache


# How a file of tensors names a dtype, with an integer of its size, and the bits of inf. The bits of
# NaN are above them, apart from the sign.
_BITS = {
    "F64": (np.int64, 0x7FF0 << 48),
    "F32": (np.int32, 0x7F80 << 16),
    "C64": (np.int32, 0x7F80 << 16),
    "F16": (np.int16, 0x7C00),
    "BF16": (np.int16, 0x7F80),
}


def inspect_tensors(path: Path, learning: Collection[str] = ()) -> dict[str, int | str]:
    """Return the entry in the manifest of a file of tensors, which is read once.

    If a tensor has NaN, or inf where that counts, the entry says its name, as "nonfinite".

    Args:
        path: the file.
        learning: the names of the tensors in which inf counts too: of weights that are trained. A
            mask may have it, and so may what an optimizer keeps.
    """
    digest, size, fault = hashlib.sha256(), 0, None
    buffer = memoryview(bytearray(PIECE))
    with path.open("rb") as file:
        header = file.read(8)
        header += file.read(int.from_bytes(header, "little"))
        digest.update(header)
        spans = _spans_in(json.loads(header[8:]))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            fault = fault or _find_nonfinite(buffer[:count], size, spans, learning)
            size += count
    entry = {"bytes": len(header) + size, "sha256": digest.hexdigest()}
    return entry if fault is None else {**entry, "nonfinite": fault}


_Span = tuple[int, int, str, str]  # where a tensor begins and ends, its dtype, and its name


def _spans_in(header: Mapping[str, Json]) -> list[list[_Span]]:
    """Return where the tensors of a file are, those of one dtype after the other in one list."""
    found = [
        (*facts["data_offsets"], facts["dtype"], name)
        for name, facts in header.items()
        if facts.get("dtype") in _BITS  # the metadata have none
    ]
    return [[*group] for _, group in itertools.groupby(sorted(found), lambda span: span[2])]


def _find_nonfinite(
    data: memoryview, first: int, spans: Sequence[Sequence[_Span]], learning: Collection[str]
) -> str | None:
    """Return the name of a tensor that is not finite in a part of a file, or None.

    Args:
        data: the part.
        first: where it begins.
        spans, learning: as above.
    """
    for group in spans:
        kind, infinite = _BITS[group[0][2]]
        start, stop = group[0][0], group[-1][1]
        if _largest(data, start - first, stop - first, kind) < infinite:
            continue
        for low, high, _, name in group[max(0, bisect.bisect(group, (first,)) - 1) :]:
            if low >= first + len(data):
                break
            found = _largest(data, low - first, high - first, kind)
            if found > infinite or (found == infinite and name in learning):
                return name
    return None


def _largest(data: memoryview, start: int, stop: int, kind: type[np.signedinteger]) -> int:
    """Return the largest number by its bits, apart from the signs, or -1 if there is none."""
    start, stop = max(start, 0), min(stop, len(data))
    if start >= stop:
        return -1
    bits = np.frombuffer(data[start:stop], kind)
    sign = 1 << (8 * bits.itemsize - 1)
    return max(int(bits.max()), int(bits.view(f"u{bits.itemsize}").max()) - sign)


# --------------------------------------------------------------------------------------------------
# The history in checkpoints: the newest records in each checkpoint, older ones in shared files.
#
# Every checkpoint has the whole history. If each wrote all of it, a run with many records would
# write more history than model. So complete blocks of records are written once, to the folder
# `.records` next to the checkpoints, each under its checksum. Blocks never change, because a
# history only grows. A checkpoint lists the checksums of its blocks and contains the records after
# them. A short history has no blocks, and neither has a checkpoint that `save` writes.

IN_BLOCK = 1024  # records
FOLDER = ".records"
NAME = r"[0-9a-f]{64}"
PART = rf"{NAME}\.part|\.{NAME}\.jsonl\.part-[0-9a-f]{{12}}"  # the former by 0.1.0


@attrs.frozen
class EncodedHistory:
    """A history as JSON.

    Args:
        blocks: the checksum of each complete block of records, the oldest first.
        rest: the records after the blocks, one line each.
        digest: of all records, each chained to the one before it.
    """

    blocks: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    digest: str = ""

    @staticmethod
    def of_all(history: History) -> EncodedHistory:
        """Return a history as it is in a checkpoint that has no files next to it."""
        rows = tuple(map(encode_record, history))
        return EncodedHistory(rest=rows, digest=functools.reduce(chain, rows, ""))


def make_history_encoder() -> Callable[[History], EncodedHistory]:
    """Return a function that encodes a history, and only the new records in later calls."""
    return Fold(_append_record, EncodedHistory())


def _append_record(encoded: EncodedHistory, record: Record) -> EncodedHistory:
    row = encode_record(record)
    rest, digest = (*encoded.rest, row), chain(encoded.digest, row)
    if len(rest) < IN_BLOCK:
        return EncodedHistory(encoded.blocks, rest, digest)
    return EncodedHistory((*encoded.blocks, _checksum(_join_lines(rest))), (), digest)


def chain(digest: str, row: str) -> str:
    """Return the digest of a history with one more record, from that of those before it.

    So a checkpoint vouches for the records of all earlier ones: an edited record changes every
    digest after it.

    Args:
        digest: that of the records before; "" if there are none.
        row: the record as JSON.
    """
    return _checksum(f"{digest}\n{row}".encode())


def encode_record(record: Record) -> str:
    """Return a record as JSON."""
    row = {"epoch": record.epoch, "step": record.step, **record.metrics, "seconds": record.seconds}
    row |= {"closing": True} if record.closing else {}
    row |= {} if record.items is None else {"items": record.items}
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
        raise TypeError(f"a record is {checks.describe(row)}")
    epoch, step, seconds = (row.pop(name) for name in ("epoch", "step", "seconds"))
    closing = row.pop("closing", False)
    if not isinstance(closing, bool):
        raise TypeError(f"closing of a record is {checks.describe(closing)}")
    items = row.pop("items", None)
    return Record(epoch, step, row, seconds, closing, items)


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
        if block in known and disk.exists(path):
            continue
        known.add(block)
        if disk.size_of_file(path) is not None and _checksum(path.read_bytes()) == block:
            continue
        disk.make_folder(path.parent)
        disk.replace_file(
            path, _join_lines(map(encode_record, history[i * IN_BLOCK : (i + 1) * IN_BLOCK]))
        )


def check_blocks(path: Path, blocks: Iterable[object], deep: bool) -> None:
    """Raise unless every block that a checkpoint lists exists and is undamaged.

    Raises:
        CheckpointError: a block is missing or damaged.
    """
    for block in blocks:
        if not (isinstance(block, str) and re.fullmatch(NAME, block)):
            raise CheckpointError(
                f"{path} is damaged: {checks.describe(block)} is not the name of a block of records"
            )
        file = _block_path(path.resolve().parent, block)
        if disk.size_of_file(file) is None:
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
        for file in (records.iterdir() if disk.is_folder(records) else ())
        if re.fullmatch(rf"{NAME}\.jsonl|{PART}", file.name) and file.is_file()
    ]


def remove_other_blocks(folder: Path, blocks: Iterable[str]) -> None:
    """Remove every block in a folder of checkpoints except these."""
    kept = {_block_path(folder, block).name for block in blocks}
    for file in _list_blocks(folder):
        if file.name not in kept:
            file.unlink(missing_ok=True)
