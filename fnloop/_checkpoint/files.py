"""The files of a checkpoint: a folder that is whole, or not there at all.

    model.safetensors       the module's state_dict; loads into the plain module anywhere, without fnloop
    optimizer.safetensors   the optimizer's state, by parameter name
    slots.safetensors       what middleware keep, running metrics, generators
    state.json              counters, hyper-parameters, where the tensors belong, and the history, a line for each record
    manifest.json           sizes and SHA-256 of the others; written last

It is written beside its place, flushed to the disk and renamed. So a folder that has a good manifest is a whole checkpoint,
whenever the process was killed. Nothing is pickled: reading one can run no code. What the files say is for ``_checkpoint``.

A fault in a file is a :class:`CheckpointError`. An ``OSError`` other than "not found" is raised as it is: a disk that does not
answer says nothing about the checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fnloop._checkpoint.format import (
    FILES,
    FORMAT,
    LARGEST_MANIFEST,
    MANIFEST,
    TENSORS,
    CheckpointError,
    Contents,
    NewerFormatError,
)
from fnloop._checkpoint.history_blocks import check_blocks, flush, read_blocks

__all__ = [
    "backup_of",
    "clean",
    "existing",
    "is_ours",
    "manifest_of",
    "read_files",
    "read_manifest",
    "serial_of",
    "verify",
    "write",
]

try:
    import fcntl
except ImportError:  # Windows: what a killed process left over stays
    fcntl = None


# --- writing


def write(
    what: Contents,
    path: Path,
    facts: Mapping[str, Any] | None = None,
    *,
    in_own_folder: bool = False,
) -> Path:
    """Write contents beside a path, flush them to the disk, and rename them to it.

    Args:
        what: what to write.
        path: the folder to be. A checkpoint or an empty folder that is there is replaced.
        facts: more for the manifest.
        in_own_folder: whether the path is in a folder that belongs to this run, by a name that only the hook gives. Then a
            checkpoint whose manifest is damaged is replaced too.

    Raises:
        CheckpointError: there is something else at the path.
    """
    path = path.resolve()
    _check_replaceable(path, in_own_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent, re.escape(path.name))
    with _in_progress(path) as beside:
        beside.mkdir()
        with ThreadPoolExecutor(2) as pool:
            sums = pool.map(lambda name: _write_file(what, beside / name), FILES)
            files = dict(zip(FILES, sums, strict=True))
        about = {
            name: what.facts[name] for name in ("position", "stop", "measured", "run", "blocks")
        }
        manifest = {
            "format_version": FORMAT,
            "serial": _next_serial(path),
            **about,
            **(facts or {}),
            "files": files,
        }
        _write_text(
            beside / MANIFEST, json.dumps({**manifest, "check": _check_of(manifest)}, indent=1)
        )
        flush(beside)
        _commit(beside, path)
    return path


def _check_replaceable(path: Path, damaged: bool = False) -> None:
    """Raise unless a path is free, an empty folder, or a checkpoint with nothing else in it: also one that is ``damaged``."""
    if not os.path.lexists(path) or is_ours(path):
        return
    there = {file.name for file in path.iterdir()} if path.is_dir() else {path.name}
    known = {*FILES, MANIFEST} if damaged and not _is_newer(path) and len(there) > 1 else set()
    if path.is_dir() and there <= known:
        return
    why = (
        f"it has {min(there - {*FILES, MANIFEST}, default='another manifest')} in it"
        if path.is_dir()
        else "it is a file"
    )
    raise CheckpointError(
        f"{path} is there, and is no checkpoint: save to another path ({why}; it was not changed)"
    )


def _is_newer(path: Path) -> bool:
    try:
        read_manifest(path)
    except NewerFormatError:
        return True
    except (CheckpointError, FileNotFoundError):
        pass
    return False


def is_ours(path: Path) -> bool:
    """Return whether a folder has a manifest of ours that is whole, and nothing that the manifest does not name."""
    try:
        read_manifest(path)
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return False
    return {file.name for file in path.iterdir()} <= {*FILES, MANIFEST}


@contextlib.contextmanager
def _in_progress(path: Path) -> Iterator[Path]:
    """Yield a folder to be written beside a path, locked by this process. What is left of it at the end is removed.

    The lock is of the open file, so it is free as soon as its process has ended, on whatever machine or in whatever container.
    """
    beside = path.with_name(f".{path.name}.writing-{secrets.token_hex(6)}")
    lock = beside.with_name(f"{beside.name}.lock")
    with _locked(lock):
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _locked(lock: Path) -> IO[str]:
    """Return a file that this process has locked, and that is still at its path: another may have cleaned it away first."""
    while True:
        file = lock.open("w")
        _lock(file, wait=True)
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            return file
        file.close()


def _lock(file: IO[str], wait: bool) -> bool:
    """Lock an open file for this process; return False if another one has it, or if this disk knows no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def clean(folder: Path, name: str) -> None:
    """Remove what killed processes have left of checkpoints whose names match a pattern, in a folder."""
    for path in list(folder.glob(".*")):
        replaced = re.fullmatch(rf"\.({name})\.old", path.name)
        if writing := re.fullmatch(rf"(\.{name}\.writing-[0-9a-f]{{12}})(\.lock)?", path.name):
            _remove_unlocked(path.with_name(writing[1]))
            continue
        removed = re.fullmatch(rf"\.{name}\.removing(-[0-9a-f]+)?", path.name) and _has_only_ours(
            path
        )
        if removed or (
            replaced and manifest_of(path.with_name(replaced[1])) is not None and is_ours(path)
        ):
            shutil.rmtree(path, ignore_errors=True)


def _has_only_ours(path: Path) -> bool:
    return path.is_dir() and {file.name for file in path.iterdir()} <= {*FILES, MANIFEST}


def _remove_unlocked(beside: Path) -> None:
    """Remove a half-written folder and its lock, unless a process is writing it."""
    lock = beside.with_name(f"{beside.name}.lock")
    try:
        file = lock.open("r+")
    except FileNotFoundError:  # it is made before the folder, and removed after it
        if _has_only_ours(beside):
            shutil.rmtree(beside, ignore_errors=True)
        return
    with file:
        if _lock(file, wait=False):
            shutil.rmtree(beside, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _write_file(what: Contents, path: Path) -> dict[str, Any]:
    if path.name == "state.json":
        facts = json.dumps(dict(what.facts), indent=1, allow_nan=False, ensure_ascii=False)
        records = ",\n  ".join(what.history)
        _write_text(path, f'{facts[:-2]},\n "history": [\n  {records}\n ]\n}}')
    else:
        _write_tensors(getattr(what, path.stem), path)
    return {"bytes": path.stat().st_size, "sha256": _sum_of(path)}


def _write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    # Tied tensors share memory, which safetensors doesn't write twice; each name gets its own copy.
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        shared = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in seen
        seen.add(tensor.untyped_storage().data_ptr())
        whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        whole = whole and not tensor.is_conj() and not tensor.is_neg()
        plain[name] = (
            tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)
        )
        plain[name] = plain[name].resolve_conj().resolve_neg()
    try:
        save_file(plain, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} can't be written: {error}") from error
    flush(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    flush(path)


def _commit(beside: Path, path: Path) -> None:
    old = backup_of(path)
    if path.exists():
        if old.exists():
            _check_replaceable(old)
            shutil.rmtree(old)
        path.rename(
            old
        )  # a kill from here to the next rename leaves `old`, which reading falls back to
    beside.rename(path)
    flush(path.parent)
    if old.exists() and is_ours(old):
        shutil.rmtree(old, ignore_errors=True)


def backup_of(path: Path) -> Path:
    """Return where a checkpoint is while another one takes its place."""
    return path.with_name(f".{path.name}.old")


def _next_serial(path: Path) -> int:
    """Return a number above those of all checkpoints beside a path: the one that was written last is the newest."""
    return max((serial_of(p) or 0 for p in path.parent.iterdir() if p.is_dir()), default=0) + 1


# --- reading


def existing(path: Path) -> Path:
    """Return where a checkpoint is: at its path, or beside it if a process was killed while it replaced it."""
    backup = backup_of(path)
    return backup if not path.exists() and backup.exists() else path


def verify(path: Path, *, deep: bool = True, history: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        path: the folder.
        deep: compare the checksums of the files, not only their sizes.
        history: whether the files beside it that older records are in have to be there.

    Raises:
        CheckpointError: it is not a checkpoint, or is damaged; the message names the file and the fault.
        OSError: a file can't be read, for another reason than that it is not there.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: there is no such folder")
    try:
        manifest = read_manifest(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no manifest.json (for a folder of them, see latest)"
        ) from None
    for name in FILES:
        facts, file = manifest["files"][name], path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if (size := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}"
            )
        if deep and _sum_of(file) != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    if history:
        check_blocks(path, manifest.get("blocks", ()), deep)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest in a folder, having checked that it is one of ours, and whole.

    Raises:
        CheckpointError: it is damaged, or newer.
        OSError: it can't be read; FileNotFoundError if it is not there.
    """
    file = path / MANIFEST
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is damaged: it is not a regular file")
    if file.stat().st_size > LARGEST_MANIFEST:
        raise CheckpointError(f"{file} is damaged: it is longer than any manifest")
    data = file.read_bytes()
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict) or manifest.pop("check", None) != _check_of(manifest):
            raise CheckpointError(f"{file} is damaged: its own checksum is wrong")
        if manifest["format_version"] > FORMAT:
            raise NewerFormatError(
                f"{path} has format {manifest['format_version']}, and this fnloop reads up to {FORMAT}: pip install -U fnloop"
            )
        tuple(map(float, manifest["measured"].values()))  # checks them
        tuple(map(int, manifest["position"]))
        sizes = [
            (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]) for name in FILES
        ]
        if not isinstance(manifest.get("blocks", []), list) or not all(
            isinstance(size, int) and isinstance(digest, str) for size, digest in sizes
        ):
            raise TypeError("a size or a checksum")
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that the file says
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error
    return manifest


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_files(path: Path, *, history: bool = True) -> Contents:
    """Return what a checkpoint holds, with or without the older records of its history.

    Raises:
        CheckpointError, OSError: as :func:`verify`.
    """
    path = existing(path)
    blocks = verify(path, history=history).get("blocks", ())
    try:
        # Copies: what load_file returns is mapped to the file, and would change with it.
        tensors = {
            name: {k: v.clone() for k, v in load_file(path / f"{name}.safetensors").items()}
            for name in TENSORS
        }
        facts = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if history and blocks:
            facts["history"] = [*read_blocks(path, blocks), *facts["history"]]
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError) as error:
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error
    return Contents(tensors["model"], tensors["optimizer"], tensors["slots"], facts)


def manifest_of(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint, or None if it is damaged or gone, as far as sizes of its own files show that."""
    with contextlib.suppress(CheckpointError, FileNotFoundError):
        return verify(path, deep=False, history=False)
    return None


def serial_of(path: Path) -> int | None:
    """Return when a checkpoint was written, in the order of those beside it; None if that can't be read."""
    with contextlib.suppress(CheckpointError, OSError, KeyError, ValueError):
        return int(read_manifest(path)["serial"])
    return None
