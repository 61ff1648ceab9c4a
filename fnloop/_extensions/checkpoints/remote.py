"""Checkpoints at an address, such as ``s3://bucket/run``: uploaded, found, and downloaded."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Protocol, TypeVar, cast

from fnloop._extensions.checkpoints import disk, retention
from fnloop._extensions.checkpoints.files import (
    CHECKPOINT_NAME,
    FOLDER,
    OBJECTS,
    SendFiles,
    checksum_of_manifest,
    mark_of,
    read_manifest,
    remove_checkpoint,
    verify,
)
from fnloop._extensions.checkpoints.format import (
    LARGEST_MANIFEST,
    MANIFEST,
    CheckpointError,
    Contents,
    is_file_name,
)
from fnloop._extensions.checkpoints.place import READING, Place, Tidy
from fnloop._extensions.checkpoints.retention import CLAIM
from fnloop._extensions.checkpoints.serialize import Json
from fnloop.extend import collectives, on_main_process

log = logging.getLogger("fnloop")

# --------------------------------------------------------------------------------------------------
# What is at an address is mirrored in a local folder, which all other code reads and writes. There
# a checkpoint is whole, or it is a stub: its manifest alone, with a mark beside it that says that
# the files are at the address. `fetch` makes a stub whole.

Result = TypeVar("Result")


# --------------------------------------------------------------------------------------------------
# Ask the file system of an address: again after a while if it fails, since most faults pass.

ATTEMPTS = 7
PAUSE = 1.0  # seconds before the second attempt; doubled after each one, so a minute in all
AT_ONCE = 4  # files that are sent or received at a time
IN_FLIGHT = 2  # checkpoints that are being uploaded, or wait for it
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "s3fs"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "adlfs"),
}
# Their keys are not in folders. To make a folder there would create a bucket.
OBJECT_STORES = {*PACKAGES, "oss", "oci", "r2", "memory", "http", "https"}
# What is wrong with the request, and would be wrong again.
_FINAL = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    TypeError,
    ValueError,
    NotImplementedError,
    MemoryError,
)


def _is_final(error: Exception) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    # Of botocore, which is not imported here.
    return full or isinstance(error, _FINAL) or "Credentials" in type(error).__name__


class FileSystem(Protocol):
    """What is asked of a file system of fsspec."""

    def cat_file(self, path: str, start: int, end: int) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def put_file(self, lpath: str, rpath: str) -> None: ...
    def get_file(self, rpath: str, lpath: str) -> None: ...
    def mv(self, path1: str, path2: str) -> None: ...
    def rm_file(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def makedirs(self, path: str, exist_ok: bool) -> None: ...
    def ls(self, path: str, detail: bool) -> list[dict[str, Json]]: ...
    def find(self, path: str) -> list[str]: ...
    def invalidate_cache(self) -> None: ...


# A package that repeats a request draws a pause from Python's generator, which is that of the run:
# a fault would change the bits of what is trained. These modules get a generator of their own.
_DRAWING = ("botocore.retryhandler", "botocore.utils", "gcsfs.retry")


def _settings_of(scheme: str) -> dict[str, Json]:
    """Return settings of a file system, besides those of the user."""
    if PACKAGES.get(scheme) != "s3fs":
        return {}
    from fsspec.config import conf

    # Newer botocore keeps the generator that it draws from where it cannot be replaced. So it does
    # not repeat requests; this module does.
    given = conf.get(scheme, {})
    retries = {"retries": {"total_max_attempts": 1}, **given.get("config_kwargs", {})}
    # With more parts of a file at a time, s3fs holds 50 MB of each in memory, and it begins to
    # download the file before it asks for its parts. Several files go at a time anyway.
    return {"config_kwargs": retries, "max_concurrency": given.get("max_concurrency", 1)}


class Storage:
    """The file system of an address.

    Args:
        owner: what was called, for messages.
        address: the address.

    Raises:
        ValueError: no file system has such addresses.
        ImportError: its package is not installed.
    """

    def __init__(self, owner: str, address: str) -> None:
        self.scheme, _, rest = address.partition("://")
        self.address, self._process = f"{self.scheme.lower()}://{rest.rstrip('/')}", -1
        # Without the name and the password of a user, which are not for logs.
        self.shown = re.sub(r"//[^/@]*@", "//", self.address)
        try:
            self._connect()
        except ImportError as error:
            package = PACKAGES.get(self.scheme.lower())
            what = f" {package}" if package else f" and what this needs: {error}"
            raise ImportError(
                f"{owner}({self.shown!r}) needs a package that is not installed: "
                f"pip install 'fnloop[remote]'{what}"
            ) from error
        except ValueError as error:
            raise ValueError(
                f"{owner} expects a path, or an address of fsspec such as s3://bucket/run; "
                f"got {self.shown!r}: {error}"
            ) from error

    def _connect(self) -> None:
        from fsspec.core import url_to_fs

        fs, self.root = url_to_fs(self.address, **_settings_of(self.scheme.lower()))
        for name in filter(sys.modules.__contains__, _DRAWING):
            vars(sys.modules[name])["random"] = random.Random()
        self._fs = cast(FileSystem, fs)
        self._process = os.getpid()

    def _ask(self, do: Callable[[FileSystem], Result], attempts: int | None = None) -> Result:
        """Return what a function of the file system returns, after some attempts.

        Raises:
            FileNotFoundError, PermissionError: there is no such file, or access is refused.
            OSError: it has failed for as long as it was tried.
        """
        if self._process != os.getpid():  # a connection does not survive a fork
            self._connect()
        attempts = attempts or ATTEMPTS
        for attempt in range(attempts):
            try:
                return do(self._fs)
            except Exception as error:
                if _is_final(error) or attempt + 1 == attempts:
                    raise self._explain(error) from error
                log.debug("%s: attempt %d: %r", self.shown, attempt + 1, error)
                time.sleep(PAUSE * 2**attempt)
        raise AssertionError

    def _explain(self, error: Exception) -> Exception:
        kinds = (FileNotFoundError, PermissionError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
        if kind is OSError and isinstance(error, _FINAL):
            return error
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return kind(f"{self.shown}: {text}")

    def read(self, path: str) -> bytes | None:
        """Return the contents of a small file, or None if there is none."""
        try:
            return self._ask(lambda fs: _read_start(fs, path))
        except FileNotFoundError:
            return None

    def write(self, path: str, data: bytes) -> None:
        """Write a small file. What was there before is there until it is whole."""

        def replace(fs: FileSystem) -> None:
            if self.scheme.lower() in OBJECT_STORES:
                fs.pipe_file(path, data)
                return
            fs.pipe_file(path + PART, data)
            try:
                fs.mv(path + PART, path)
            except OSError as error:  # smb:// does not rename to what is there
                if not isinstance(error, FileExistsError) and error.errno != errno.EEXIST:
                    raise
                fs.rm_file(path)
                fs.mv(path + PART, path)

        self._ask(lambda fs: self._in_folder(fs, path, lambda: replace(fs)))

    def send(self, file: Path, path: str) -> None:
        """Upload a file."""
        self._ask(lambda fs: self._in_folder(fs, path, lambda: fs.put_file(str(file), path)))

    def receive(self, path: str, file: Path) -> None:
        """Download a file. It is whole, or absent."""
        part = file.with_name(f".tmp{secrets.token_hex(3)}")
        try:
            self._ask(lambda fs: fs.get_file(path, str(part)))
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def _in_folder(self, fs: FileSystem, path: str, do: Callable[[], Result]) -> Result:
        """Do what writes to a path, after making its folder where the file system has folders."""
        try:
            return do()
        except FileNotFoundError:
            if self.scheme.lower() in OBJECT_STORES:
                raise
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return do()

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._ask(lambda fs: fs.rm_file(path))
        except FileNotFoundError:
            pass
        except OSError as error:
            kind = PermissionError if isinstance(error, PermissionError) else OSError
            raise kind(
                f"{path} could not be removed ({error}). What was saved is there. Let this account "
                "delete files, or keep all: checkpoint(..., keep=None)"
            ) from error

    def remove_folder(self, path: str) -> None:
        """Remove a folder if it is empty, where the file system has folders."""
        if self.scheme.lower() not in OBJECT_STORES:
            with contextlib.suppress(OSError):
                self._ask(lambda fs: fs.rmdir(path), attempts=1)

    def folders(self, path: str) -> set[str]:
        """Return the names of the folders in a folder. It may not show what is new."""
        return {name for name, entry in self._list(path).items() if entry["type"] == "directory"}

    def _list(self, path: str) -> dict[str, dict[str, Json]]:
        def list_now(fs: FileSystem) -> list[dict[str, Json]]:
            fs.invalidate_cache()
            return fs.ls(path, detail=True)

        try:
            found = self._ask(list_now)
        except (FileNotFoundError, NotADirectoryError, NotImplementedError):
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}

    def files(self, path: str) -> list[str]:
        """Return all files in a folder, also in those in it, each relative to it."""

        def find_now(fs: FileSystem) -> list[str]:
            fs.invalidate_cache()
            return fs.find(path)

        try:
            found = self._ask(find_now)
        except (FileNotFoundError, NotImplementedError):
            return []
        root = path.strip("/") + "/"
        found = [file.lstrip("/") for file in found]
        return [file.removeprefix(root) for file in found if file.startswith(root)]


def _read_start(fs: FileSystem, path: str) -> bytes:
    return fs.cat_file(path, start=0, end=LARGEST_MANIFEST + 2)


# --------------------------------------------------------------------------------------------------
# The files at an address.
#
# They are those of a folder on a disk: `step-00000812/model.safetensors` and so on, so that a
# copied folder is one that `restore` reads. There are two differences.
#
# A checkpoint that replaces another must not touch its files, for then there would be a moment with
# neither. Its files are in a folder of their own, `step-00000812/3f0c62d1a9be/`, which the manifest
# names. So the manifest, written last, changes one checkpoint into the other at once.
#
# A list of files may lag, so it is not what says which checkpoints exist. Their names are in
# `.checkpoints.json`, before they are there. It names the run too, which has the folder to itself.

CATALOGUE = ".checkpoints.json"
PART = ".part"  # the end of the name of a file that is still being written
HEX = r"[0-9a-f]{12}"


def cache_folder() -> Path:
    """Return where local copies are: in ``FNLOOP_CACHE``, or the user's folder of caches."""
    named = os.environ.get("FNLOOP_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named).expanduser().absolute() if named else Path(caches) / "fnloop"


def _is_ours(name: str) -> bool:
    """Return whether a file may be one of a checkpoint, or a part of one, but for the manifest."""
    return is_file_name(name) or name == MANIFEST + PART


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None


def _manifest_in(data: bytes | None) -> dict[str, Json] | None:
    """Return a manifest, or None if it is none, or damaged."""
    try:
        manifest = json.loads(data or b"")
        files = manifest["files"]
        right = all(map(is_file_name, files)) and re.fullmatch(
            rf"({HEX})?", manifest.get(OBJECTS, "")
        )
        return manifest if right else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _catalogue_in(data: bytes | None) -> tuple[str | None, set[str]] | None:
    """Return the run and the names in a catalogue, or None if it is none, or damaged."""
    try:
        found = json.loads(data or b"")
        run, names = found["run"], found["checkpoints"]
        is_run = run is None or re.fullmatch(r"[0-9a-f]{16}", run)
        return (run, {*names}) if is_run and all(map(_is_name, names)) else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def identity_of(data: bytes) -> str:
    """Return what tells the manifest of a checkpoint from all others."""
    manifest = _manifest_in(data)
    if manifest is None:
        return hashlib.sha256(data).hexdigest()
    return checksum_of_manifest({k: v for k, v in manifest.items() if k not in ("check", OBJECTS)})


class Remote(Place):
    """A folder of checkpoints at an address, or one checkpoint.

    Args:
        owner: what was called, for messages.
        address: the address.

    Attributes:
        folder: the local copies of what was read.
        home: where all local copies of this address are.

    Raises:
        ValueError, ImportError: as :class:`Storage`.
    """

    def __init__(self, owner: str, address: str) -> None:
        self._owner, self._storage = owner, Storage(owner, address)
        self.name, self._root = self._storage.shown, self._storage.root.rstrip("/")
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", self.name)[-60:].strip("-.")
        self.home = cache_folder() / f"{plain}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"
        self.folder = self.home / "copies"
        self._lock: IO[str] | None = None
        self._blocks: set[str] = set()  # of records, that this process has uploaded or found there
        self._uploads = Uploads()

    @property
    def parent(self) -> Remote:
        """The folder that this one is in."""
        scheme, _, rest = self._storage.address.partition("://")
        above, _, _ = rest.rpartition("/")
        if not above and scheme != "memory":
            raise ValueError(
                f"{self._owner} expects the address of a folder in another, such as "
                f"s3://bucket/a; got {self.name!r}"
            )
        return Remote(self._owner, f"{scheme}://{above}")

    # --- see what is there

    def look(self) -> Path:
        """Return the local folder, with a stub for each checkpoint that is not in it."""
        self.mirror(self.folder)
        return self.folder

    def mirror(self, folder: Path) -> None:
        """Make a local folder show the checkpoints, and which run the address belongs to.

        A checkpoint in it that was never uploaded stays.
        """
        disk.make_folder(folder)
        run, names = self._read_catalogue()
        names |= set(filter(_is_name, self._storage.folders(self._root)))
        found = {name: data for name, data in self._manifests(names) if data is not None}
        own = self._storage.read(f"{self._root}/{MANIFEST}")  # it is one checkpoint
        if not (found or own) and self._catalogue_is_damaged():  # and a list may lag
            raise CheckpointError(
                f"{self.name}/{CATALOGUE} is damaged, and no checkpoint is found without it. If "
                "there is none, remove this file"
            )
        with self._locked(folder):
            if own is not None:
                _write_stub(folder, own)
            elif (folder / MANIFEST).exists():
                (folder / MANIFEST).unlink()
                forget(folder)
            for name, data in found.items():
                _write_stub(folder / name, data)
            for mark in folder.glob(".*.remote"):
                name = mark.name.removeprefix(".").removesuffix(".remote")
                if name not in found:
                    if is_marked(folder / name):
                        remove_checkpoint(folder / name)
                    mark.unlink(missing_ok=True)
            if run is not None and not any(re.fullmatch(CHECKPOINT_NAME, name) for name in found):
                disk.replace_file(folder / CLAIM, run.encode())
            else:
                (folder / CLAIM).unlink(missing_ok=True)

    def _manifests(self, names: Iterable[str]) -> list[tuple[str, bytes | None]]:
        read = lambda name: (name, self._storage.read(f"{self._root}/{name}/{MANIFEST}"))
        return disk.map_with_help(read, sorted(names), 4 * AT_ONCE)

    def _read_catalogue(self) -> tuple[str | None, set[str]]:
        """Return the run that has the folder, and the names that checkpoints may have."""
        data = self._storage.read(f"{self._root}/{CATALOGUE}")
        return _catalogue_in(data) or (None, set())

    def _catalogue_is_damaged(self) -> bool:
        data = self._storage.read(f"{self._root}/{CATALOGUE}")
        return data is not None and _catalogue_in(data) is None

    def _write_catalogue(self, run: str | None, names: Iterable[str]) -> None:
        text = json.dumps({"run": run, "checkpoints": sorted(names)}, indent=1)
        self._storage.write(f"{self._root}/{CATALOGUE}", text.encode())

    @contextlib.contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        """Keep other processes of this machine out of a local folder."""
        disk.make_folder(folder.parent)
        with disk.lock_file(lock_of(folder)):
            yield

    @contextlib.contextmanager
    def reading(self, path: Path | None = None) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if path is not None:
                forget(path)
            text = str(error)
            for folder in (self.folder, *self._stagings()):
                text = text.replace(str(folder), self.name)
            if text == str(error):
                raise
            raise type(error)(text) from error

    def _stagings(self) -> list[Path]:
        runs = (*self.home.glob("run-*"), *self.home.glob("save-*")) if self.home.is_dir() else ()
        return [path for path in runs if path.is_dir()]

    def check_all_empty(self) -> None:
        """Do nothing, because the main process alone looks at an address."""

    # --- download

    def fetch(self, path: Path, only: Collection[str] | None = None) -> Path:
        """Return a whole local copy of a checkpoint, or one with the files that ``only`` names.

        What is here already is not downloaded again. A file that is not at the address stays
        missing, as on a damaged disk.
        """
        path = self.folder if path == self.folder else self.folder / path.name
        base = self._root if path == self.folder else f"{self._root}/{path.name}"
        with self._locked(path):
            if (data := self._storage.read(f"{base}/{MANIFEST}")) is None:
                name = self.name if path == self.folder else f"{self.name}/{path.name}"
                raise CheckpointError(
                    f"{name} is not a checkpoint: it has no {MANIFEST} "
                    "(for a folder of checkpoints, see latest)"
                )
            _write_stub(path, data)
            manifest = _manifest_in(data)
            if manifest is None:  # the reader says what is wrong
                return path
            source = "/".join(filter(None, (base, manifest.get(OBJECTS))))
            wanted = {
                path / name: f"{source}/{name}"
                for name, facts in manifest["files"].items()
                if (only is None or name in only) and _size(path / name) != facts["bytes"]
            }
            above = base.rpartition("/")[0]
            for block in manifest.get("blocks", ()):
                if not (file := path.parent / FOLDER / f"{block}.jsonl").exists():
                    disk.make_folder(file.parent)
                    wanted[file] = f"{above}/{FOLDER}/{block}.jsonl"
            disk.map_with_help(self._receive, wanted.items(), AT_ONCE)
        return path

    def _receive(self, wanted: tuple[Path, str]) -> None:
        file, source = wanted
        with contextlib.suppress(FileNotFoundError):
            self._storage.receive(source, file)

    def fetch_on_all(self, path: Path) -> Path:
        return collectives.on_every_process(lambda: self.fetch(path), READING)

    # --- upload

    def save(self, contents: Contents, what: str, send: SendFiles | None = None) -> str:
        """Write one checkpoint to the address, by all processes if it has an index.

        Raises:
            OSError: it could not be uploaded. The error says where its local copy is.
            CheckpointError: there is something else at the address.
        """
        parent, name = self.parent, self.name.rpartition("/")[2]
        folder = on_main_process(parent.new_folder, what)
        sent: list[str] = []

        def send_files(files_in: Path, names: Collection[str], at: str) -> None:
            sent.append(at)
            parent.send_files(files_in, names, name, at)

        def upload() -> None:
            parent.send(folder / name, None, sent[0] if sent else None)

        try:
            with parent.reading():
                Place(folder / name).save(contents, what, send_files)
            on_main_process(upload, what)
        finally:
            if contents.rank == 0 and not is_pending(folder / name):
                shutil.rmtree(folder, ignore_errors=True)
                lock_of(folder).unlink(missing_ok=True)
        return self.name

    def new_folder(self) -> Path:
        """Return a new local folder that shows what is there, for one checkpoint."""
        folder = self.home / f"save-{secrets.token_hex(6)}"
        self.mirror(folder)
        return folder

    def staging(self, run: str) -> Path:
        """Return the local folder to which a run writes its checkpoints first."""
        return self.home / f"run-{run}"

    def begin(self, run: str) -> None:
        """Make the address that of a run, before its first update.

        What an earlier process of the run could not upload is uploaded, and what it left half
        uploaded is removed.
        """
        folder = self.staging(run)
        if self._lock is None:
            self._lock = _training_lock(folder).open("w")
            disk.try_lock(self._lock)
        try:
            self._recover(folder, run)
            other, names = self._read_catalogue()
            if other != run:
                self._write_catalogue(run, names)
            self._sweep()
        except BaseException:
            self.end()
            raise

    def warn_unless_shared(self) -> None:
        """Warn of nothing: each machine has a local folder."""

    def claim(self, folder: Path, run: str) -> None:
        """Make the address that of a run, and show in its folder what is there."""
        self.mirror(folder)
        super().claim(folder, run)
        self.begin(run)

    def end(self) -> None:
        """Let another process of this machine continue the run."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def settle(self) -> None:
        """Upload what the last process of the run on this machine could not upload."""
        run, _ = self._read_catalogue()
        if run is None or not (folder := self.staging(run)).is_dir():
            return
        with _training_lock(folder).open("w") as lock:
            if disk.try_lock(lock):  # otherwise it is still training, and uploading
                self.mirror(folder)
                self._recover(folder, run, copies=True)

    def _recover(self, folder: Path, run: str, copies: bool = False) -> None:
        """Upload the checkpoints of a local folder that are not at the address.

        It is not known here which of them would be kept. The next save removes the others.

        Args:
            folder: the folder.
            run: the run that wrote them.
            copies: whether to keep copies of them, because they are about to be read.
        """
        paths = [p for p in reversed(retention.candidates(folder)) if not p.name.startswith(".")]
        for path in filter(lambda path: not is_marked(path), paths):
            try:
                verify(path)
            except CheckpointError as error:
                log.warning("a local copy was not uploaded to %s: %s", self.name, error)
            else:
                log.info("uploads %s to %s, which an earlier process had not", path, self.name)
                if copies:
                    _link_files(path, self.folder / path.name)
                self.send(path, run)

    def keep(
        self, written: Path, run: str, at: str | None, tidy: Tidy, background: bool = False
    ) -> None:
        """Upload a checkpoint that a run has written, and remove what it replaces."""

        def upload() -> None:
            self.send(written, run, at)
            tidy(is_marked)
            self.remove_pruned(written.parent)

        if background:
            self._uploads.add(upload)
        else:
            upload()

    def check(self) -> None:
        """Raise the error of an upload that has failed."""
        self._uploads.check()

    def wait(self) -> None:
        """Wait until all uploads are finished. Raise the error of one that has failed."""
        self._uploads.wait()

    def send(self, path: Path, run: str | None, at: str | None = None) -> None:
        """Upload a local checkpoint: its files, then its manifest. Then make it a stub.

        Args:
            path: the checkpoint.
            run: the run that writes it; None if a user does.
            at: the folder of its files, if they are there already.

        Raises:
            OSError: it could not be uploaded. The local copy is still there, and the error says
                where.
            CheckpointError: another run has begun at the address.
        """
        try:
            replaced = self._send(path, run, at)
        except OSError as error:
            kinds = (FileNotFoundError, PermissionError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), OSError)
            again = f". The next resume from {self.name} on this machine uploads it" if run else ""
            raise kind(
                f"{path.name} could not be uploaded ({error}). It is whole in {path}{again}"
            ) from error
        if replaced is not None:
            self._remove_files(f"{self._root}/{path.name}", replaced)

    def _send(self, path: Path, run: str | None, at: str | None) -> Json | None:
        """Return the manifest of what the checkpoint has replaced, or None."""
        data, base = (path / MANIFEST).read_bytes(), f"{self._root}/{path.name}"
        manifest = read_manifest(path)
        owner, names = self._read_catalogue()
        if run is not None and owner not in (None, run):
            raise CheckpointError(
                f"another run has begun in {self.name}: give each run a folder of its own"
            )
        before, replaced = self._storage.read(f"{base}/{MANIFEST}"), None
        if before is None:
            self._check_free(base, path.name)
        if before is None or identity_of(before) != identity_of(data):
            if at is None:
                at = "" if before is None else secrets.token_hex(6)
                self.send_files(path, manifest["files"], path.name, at)
            self._send_blocks(path, manifest)
            self._write_catalogue(run or owner, {*names, path.name})
            self._storage.write(f"{base}/{MANIFEST}", _with_objects(manifest, at) if at else data)
            replaced = _manifest_in(before)
        mark(path, data)
        forget(path)
        return replaced

    def send_files(self, folder: Path, names: Collection[str], name: str, at: str) -> None:
        """Upload files of a checkpoint.

        Args:
            folder: where they are.
            names: which ones.
            name: the name of the checkpoint.
            at: the folder of its files at the address.
        """
        target = "/".join(filter(None, (self._root, name, at)))
        send = lambda file: self._storage.send(folder / file, f"{target}/{file}")
        disk.map_with_help(send, names, AT_ONCE)

    def sender(self, name: str) -> SendFiles:
        """Return what uploads files of a checkpoint of that name."""
        return lambda folder, names, at: self.send_files(folder, names, name, at)

    def _send_blocks(self, path: Path, manifest: Json) -> None:
        """Upload the blocks of records that no checkpoint at the address lists."""
        folder, blocks = path.parent, {*manifest.get("blocks", ())}
        if blocks <= self._blocks:
            return
        there = {
            block
            for other in retention.candidates(folder)
            if other != path and is_marked(other)
            for block in read_manifest(other).get("blocks", ())
        }
        for block in sorted(blocks - there):
            file = f"{FOLDER}/{block}.jsonl"
            self._storage.send(folder / file, f"{self._root}/{file}")
        self._blocks |= blocks

    def _check_free(self, base: str, name: str) -> None:
        """Raise if there is something at the place of a new checkpoint that is none."""
        other = [
            file
            for file in self._storage.files(base)
            if not re.fullmatch(rf"({HEX}/)?[^/]+", file) or not _is_ours(file.rpartition("/")[2])
        ]
        if other:
            raise CheckpointError(
                f"{self.name}/{name} exists and is not a checkpoint: save to another address "
                f"(it contains {min(other)}; it was not changed)"
            )

    # --- remove

    def remove_pruned(self, folder: Path) -> None:
        """Remove what was removed from a local folder at the address too."""
        gone = []
        for mark in folder.glob(".*.remote"):
            name = mark.name.removeprefix(".").removesuffix(".remote")
            if not (folder / name).exists():
                gone.append((name, mark))
        if not gone:
            return
        blocks: set[str] = set()
        for name, mark in gone:
            base = f"{self._root}/{name}"
            manifest = _manifest_in(self._storage.read(f"{base}/{MANIFEST}"))
            # Without a manifest it is not there, whatever remains of its files.
            self._storage.remove(f"{base}/{MANIFEST}")
            if manifest is not None:
                self._remove_files(base, manifest)
                blocks |= {*manifest.get("blocks", ())}
            mark.unlink(missing_ok=True)
        for block in blocks:
            if not (folder / FOLDER / f"{block}.jsonl").exists():
                self._storage.remove(f"{self._root}/{FOLDER}/{block}.jsonl")
                self._blocks.discard(block)

    def _remove_files(self, base: str, manifest: Json) -> None:
        source = "/".join(filter(None, (base, manifest.get(OBJECTS))))
        files = [f"{source}/{name}" for name in manifest["files"]]
        disk.map_with_help(self._storage.remove, files, AT_ONCE)
        self._storage.remove_folder(source)

    def _sweep(self) -> None:
        """Remove files of checkpoints that a killed process has not completed."""
        found: dict[str, list[str]] = {}
        for file in self._storage.files(self._root):
            match = re.fullmatch(rf"({CHECKPOINT_NAME})/(?:{HEX}/)?([^/]+)", file)
            if match and _is_ours(match[2]):
                found.setdefault(match[1], []).append(file)
        for name, data in self._manifests(found):
            manifest, listed = _manifest_in(data), set()
            if manifest is not None:
                source = "/".join(filter(None, (name, manifest.get(OBJECTS))))
                listed = {f"{source}/{file}" for file in manifest["files"]}
            elif data is not None:  # it is damaged, and says nothing about its files
                continue
            for file in found[name]:
                if file not in listed:
                    self._storage.remove(f"{self._root}/{file}")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def _with_objects(manifest: Json, at: str) -> bytes:
    changed = {**manifest, OBJECTS: at}
    return json.dumps({**changed, "check": checksum_of_manifest(changed)}, indent=1).encode()


def _write_stub(path: Path, data: bytes) -> None:
    """Make a local folder show the checkpoint with a manifest. What is right in it stays.

    A local checkpoint that is newer, and was not uploaded, stays as it is.
    """
    identity = identity_of(data)
    if (here := _manifest_here(path)) is not None and identity_of(here) != identity:
        if not is_marked(path) and _serial(here) > _serial(data):
            return
        forget(path)
    disk.make_folder(path)
    if here is None or identity_of(here) != identity:
        disk.replace_file(path / MANIFEST, data)
    if not is_marked(path):
        mark(path, data)


def _manifest_here(path: Path) -> bytes | None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (path / MANIFEST).read_bytes()
    return None


def _serial(data: bytes) -> int:
    found = (_manifest_in(data) or {}).get("serial")
    return found if isinstance(found, int) else 0


def mark(path: Path, data: bytes) -> None:
    """Say that the checkpoint at a local path, with this manifest, is at the address too."""
    disk.replace_file(mark_of(path), identity_of(data).encode())


def is_marked(path: Path) -> bool:
    """Return whether the checkpoint at a local path is at the address too."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return mark_of(path).read_text() == identity_of((path / MANIFEST).read_bytes())
    return False


def _link_files(path: Path, copy: Path) -> None:
    """Make a local copy of a checkpoint, but for its manifest, which takes no room."""
    disk.make_folder(copy)
    forget(copy)
    for file in path.iterdir():
        if is_file_name(file.name):
            with contextlib.suppress(OSError):  # it is downloaded then
                os.link(file, copy / file.name)


def forget(path: Path) -> None:
    """Remove the files of a local copy, but for its manifest."""
    for file in path.glob("*.*"):
        if file.name != MANIFEST and is_file_name(file.name):
            file.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Upload while training continues.


class Uploads:
    """Uploads one after the other, in a thread. At most ``IN_FLIGHT`` are unfinished."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def add(self, do: Callable[[], None]) -> None:
        """Upload something, after what was added before. Wait while too many are unfinished."""
        self._pool = self._pool or ThreadPoolExecutor(1, "upload")
        unfinished = [job for job in self._jobs if not job.done()]
        for job in unfinished[: 1 - IN_FLIGHT]:
            job.exception()
        self._jobs.append(self._pool.submit(do))

    def check(self) -> None:
        """Raise the error of an upload that has failed."""
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.remove(job)
            job.result()

    def wait(self) -> None:
        """Wait until all are finished. Raise the error of one that has failed."""
        for job in [*self._jobs]:
            job.exception()
        self.check()


def _training_lock(folder: Path) -> Path:
    """Return the file that a process locks while it trains the run of a local folder."""
    return folder.with_name(f".{folder.name}.training")


def lock_of(folder: Path) -> Path:
    """Return the file that a process locks while it changes a local folder."""
    return folder.with_name(f".{folder.name}.lock")


def is_pending(path: Path) -> bool:
    """Return whether a local path has a checkpoint that is not at the address."""
    return (path / MANIFEST).exists() and not is_marked(path)
