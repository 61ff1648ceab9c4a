"""The files of a checkpoint: a folder that is whole, or not there at all.

    model.safetensors       the module's state_dict; loads into the plain module anywhere, without fnloop
    optimizer.safetensors   the optimizer's state, by parameter name
    slots.safetensors       what middleware keep, running metrics, generators
    state.json              counters, history, hyper-parameters, and where the tensors belong
    manifest.json           sizes and SHA-256 of the others; written last

It is written beside its place, flushed to the disk and renamed, so a folder that has a good manifest is a whole checkpoint,
whenever the process was killed. Nothing is pickled: reading one can run no code. What the files say is for ``_checkpoint``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fnloop._history import better

__all__ = [
    "FILES",
    "FORMAT",
    "CheckpointError",
    "Contents",
    "candidates",
    "manifest_of",
    "prune",
    "ranking",
    "read_files",
    "verify",
    "write",
]

FORMAT = 1
TENSORS = ("model", "optimizer", "slots")
FILES = (*(f"{name}.safetensors" for name in TENSORS), "state.json")
_STEP = r"step-\d+(\+\d+)?"  # what the hook names them
_numbers = itertools.count()
_being_written: set[Path] = set()  # by this process, in whatever thread


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, newer than this fnloop, or of another model or optimizer."""


@attrs.frozen(eq=False)
class Contents:
    """What a checkpoint of a state holds: three groups of tensors, and facts in JSON.

    Args:
        model, optimizer, slots: name to tensor.
        facts: what goes into ``state.json``.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def copied(self, buffers: Contents | None = None) -> Contents:
        """Return a copy in host memory, into the buffers of an earlier one where they fit."""

        def copy_of(name: str) -> dict[str, Tensor]:
            old: Mapping[str, Tensor] = getattr(buffers, name) if buffers else {}
            return {k: _copied(v, old.get(k)) for k, v in getattr(self, name).items()}

        return attrs.evolve(self, **{name: copy_of(name) for name in TENSORS})


def _copied(tensor: Tensor, buffer: Tensor | None) -> Tensor:
    if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
        return buffer.copy_(tensor)
    if tensor.nbytes < 4 << 20:
        return tensor.to("cpu", copy=True)
    # numpy asks the system for large pages, and torch doesn't: half the time of a first copy.
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape).copy_(tensor)


# --- writing


def write(what: Contents, path: Path, facts: Mapping[str, Any] | None = None) -> Path:
    """Write contents beside a path, flush them to the disk, and rename them to it.

    Args:
        what: what to write.
        path: the folder to be.
        facts: more for the manifest.
    """
    path = path.resolve()
    ours = path.is_dir() and (not any(path.iterdir()) or any((path / name).exists() for name in (*FILES, "manifest.json")))
    if path.exists() and not ours:
        raise CheckpointError(f"{path} is there, and is no checkpoint: save to another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean(path.parent)
    beside = path.with_name(f".{path.name}.writing-{os.getpid()}-{next(_numbers)}")
    _being_written.add(beside)
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        texts = {"state.json": json.dumps(what.facts, indent=1, allow_nan=False, ensure_ascii=False)}
        with ThreadPoolExecutor(2) as pool:
            sums = pool.map(lambda name: _write_file(what, texts, beside / name), FILES)
            files = dict(zip(FILES, sums, strict=True))
        about = {name: what.facts[name] for name in ("position", "stop", "measured")}
        manifest = {"format_version": FORMAT, "serial": _next_serial(path), **about, **(facts or {}), "files": files}
        _write_text(beside / "manifest.json", json.dumps({**manifest, "check": _check_of(manifest)}, indent=1))
        _flush(beside)
        _put_in_place(beside, path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    finally:
        _being_written.discard(beside)
    return path


def _write_file(what: Contents, texts: Mapping[str, str], path: Path) -> dict[str, Any]:
    if path.name in texts:
        _write_text(path, texts[path.name])
    else:
        # Tied tensors share memory, which safetensors doesn't write twice; each name gets its own copy.
        seen: set[int] = set()
        tensors = {}
        for name, tensor in getattr(what, path.stem).items():
            shared = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in seen
            seen.add(tensor.untyped_storage().data_ptr())
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            whole = whole and not tensor.is_conj() and not tensor.is_neg()
            tensors[name] = tensor if whole and not shared else tensor.clone(memory_format=torch.contiguous_format)
            tensors[name] = tensors[name].resolve_conj().resolve_neg()
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path} can't be written: {error}") from error
        _flush(path)
    return {"bytes": path.stat().st_size, "sha256": _sum_of(path)}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(beside: Path, path: Path) -> None:
    old = _aside(path)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)  # a kill from here to the next rename leaves `old`, which reading falls back to
    beside.rename(path)
    _flush(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _next_serial(path: Path) -> int:
    """Return a number above those of all checkpoints beside a path: the one that was written last is the newest."""
    return max((_serial(p) or 0 for p in path.parent.iterdir() if p.is_dir()), default=0) + 1


# --- reading


def verify(path: Path, *, deep: bool = True) -> dict[str, Any]:
    """Return the manifest of a checkpoint.

    Args:
        path: the folder.
        deep: compare the checksums of the files, not only their sizes.

    Raises:
        CheckpointError: it is none, or is damaged; the message names the file and the fault.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: there is no such folder")
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or manifest.pop("check", None) != _check_of(manifest):
            raise CheckpointError(f"{path}/manifest.json is damaged: its own checksum is wrong")
        if manifest["format_version"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format_version']}, and this fnloop reads up to {FORMAT}: pip install -U fnloop"
            )
        tuple(map(float, manifest["measured"].values())), tuple(map(int, manifest["position"]))
        for name in FILES:
            facts, file = manifest["files"][name], path / name
            if not file.is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing")
            if (size := file.stat().st_size) != facts["bytes"]:
                raise CheckpointError(f"{path} is damaged: {name} has {size:,} bytes instead of {facts['bytes']:,}")
            if deep and _sum_of(file) != facts["sha256"]:
                raise CheckpointError(f"{path} is damaged: the checksum of {name} is wrong")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is no checkpoint: it has no manifest.json (for a folder of them, see latest)") from None
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that somebody has written there
        raise CheckpointError(f"{path}/manifest.json is damaged, or can't be read: {type(error).__name__}: {error}") from error
    return manifest


def _sum_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_files(path: Path) -> Contents:
    if not path.exists() and _aside(path).exists():
        path = _aside(path)  # killed between two renames
    verify(path)
    try:
        # Copies: what load_file returns is mapped to the file, and would change with it.
        tensors = {name: {k: v.clone() for k, v in load_file(path / f"{name}.safetensors").items()} for name in TENSORS}
        return Contents(**tensors, facts=json.loads((path / "state.json").read_text(encoding="utf-8")))
    except Exception as error:
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error


# --- folders of them


def candidates(folder: Path) -> list[Path]:
    """Return what is, or was, a checkpoint, the one that was written last first."""
    if not folder.is_dir():
        return []
    found = [
        p
        for p in folder.iterdir()
        if p.is_dir() and not p.is_symlink() and any((p / name).exists() for name in ("manifest.json", *FILES))
    ]
    replaced = [p for p in found if p.name.endswith(".old") and p.name.startswith(".")]
    aside = [p for p in replaced if not (folder / p.name[1:].removesuffix(".old")).exists()]
    return sorted([*(p for p in found if not p.name.startswith(".")), *aside], key=_age, reverse=True)


def _serial(path: Path) -> int | None:
    """Return when a checkpoint was written, in the order of those beside it; None if that can't be read."""
    with contextlib.suppress(Exception):
        return int(json.loads((path / "manifest.json").read_text(encoding="utf-8"))["serial"])
    return None


def _age(path: Path) -> tuple[Any, ...]:
    """Return what orders checkpoints: when they were written; of a damaged one, when it was changed last."""
    named = sum(map(int, re.findall(r"\d+", path.name[:60])))
    serial: float | None = _serial(path)
    if serial is None:
        changed = path.stat().st_mtime_ns
        before = [_serial(p) for p in path.parent.iterdir() if p.is_dir() and p.stat().st_mtime_ns <= changed]
        serial = max((number for number in before if number is not None), default=0) + 0.5
    return (serial, named, path.name)


def manifest_of(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(CheckpointError):
        return verify(path, deep=False)
    return None


def ranking(oldest_first: Iterable[tuple[Path, Mapping[str, Any]]], key: str, mode: str) -> list[tuple[Path, float]]:
    """Order checkpoints by a metric, best first, of equals the oldest first, without those that have none, or NaN."""
    ranked: list[tuple[Path, float]] = []
    for path, manifest in oldest_first:
        value = float(manifest["measured"].get(key, "nan"))
        if value == value:
            place = next((i for i, (_, other) in enumerate(ranked) if better(value, other, mode)), len(ranked))
            ranked.insert(place, (path, value))
    return ranked


def prune(written: Path, keep: int, key: str | None, mode: str, keep_best: int) -> None:
    """Remove all checkpoints beside one that has just been written, but the newest and the best.

    A function of what is on the disk: nothing is remembered. What was written just now is kept in any case, so there is
    always one that is whole. Those that are seen to be damaged don't count, and aren't touched.
    """
    written = written.resolve()
    valid = [(path, m) for path in reversed(candidates(written.parent)) if (m := manifest_of(path)) is not None]
    valid = [(path, m) for path, m in valid if re.fullmatch(_STEP, path.name)]  # what has another name was saved by hand
    kept = {written, *(path for path, _ in valid[-keep:])}
    if key is not None:
        kept |= {path for path, _ in ranking(valid, key, mode)[:keep_best]}
    for path, _ in valid:
        if path not in kept:
            removing = path.with_name(f".{path.name}.removing")
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                path.rename(removing)  # at once: a half-removed one must not look like a checkpoint
            shutil.rmtree(removing, ignore_errors=True)
    _clean(written.parent)


def _clean(folder: Path) -> None:
    """Remove what killed processes have left over."""
    for path in folder.glob(".*"):
        writer = re.fullmatch(r"\..+\.writing-(\d+)(-\d+)?", path.name)
        replaced = re.fullmatch(r"\.(.+)\.old", path.name)
        if (
            (writer and path not in _being_written and not _alive(int(writer[1])))
            or re.fullmatch(rf"\.{_STEP}\.removing", path.name)
            or (replaced and manifest_of(path.with_name(replaced[1])) is not None)
        ):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # of an earlier process with this number: what this one is writing is known
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
