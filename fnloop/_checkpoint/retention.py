"""Folders of checkpoints: which is the newest, which is the best, which may be removed, and whose they are.

A run has an identity, ``state.run_id``. It is in every manifest, so a run never removes or ranks the checkpoints of another.
While a run has no checkpoint yet, a file ``.run`` in its folder says whose the folder is: a run that is killed before its first
save and is started again is the same run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fnloop._checkpoint.files import (
    backup_of,
    clean,
    is_ours,
    manifest_of,
    read_manifest,
    serial_of,
)
from fnloop._checkpoint.format import FILES, MANIFEST, CheckpointError
from fnloop._checkpoint.history_blocks import count, remove_others
from fnloop._core.monitor import better

__all__ = [
    "NAME",
    "candidates",
    "claim",
    "claimed",
    "is_run_id",
    "may_be_checkpoint",
    "prune",
    "ranking",
    "release",
    "run_of",
    "runs_in",
]

NAME = r"step-\d+(?:\+\d+)?(?:-\w+)?"  # what the hook names them


def candidates(folder: Path, links: bool = False) -> list[Path]:
    """Return what is, or was, a checkpoint, the one that was written last first; with ``links``, those elsewhere too."""
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if may_be_checkpoint(path) and (links or not path.is_symlink())
    ]
    whole = [path for path in found if not path.name.startswith(".")]
    replaced = [
        folder / path.name[1:].removesuffix(".old") for path in found if path.name.startswith(".")
    ]
    found = [*whole, *(backup_of(path) for path in replaced if not path.exists())]
    aged = [(age, path) for path in found if (age := _sort_key(path)) is not None]
    return [path for _, path in sorted(aged, reverse=True)]


def may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder is, or was, a checkpoint, by its name and its files."""
    if not path.is_dir():
        return False
    if path.name.startswith(".") and not path.name.endswith(".old"):
        return False
    there = [name for name in (MANIFEST, *FILES) if (path / name).exists()]
    named = re.fullmatch(rf"\.?{NAME}(\.old)?", path.name)
    return bool(there) and (
        bool(named)
        or serial_of(path) is not None
        or {"slots.safetensors", "state.json"} <= {*there}
    )


def _sort_key(path: Path) -> tuple[Any, ...] | None:
    """Return what orders checkpoints: when they were written; of a damaged one, when it was changed last. None: it is gone."""
    named = sum(map(int, re.findall(r"\d+", path.name[:60])))
    serial: float | None = serial_of(path)
    if serial is None:
        try:
            changed = path.stat().st_mtime_ns
            before = [
                serial_of(p)
                for p in path.parent.iterdir()
                if p.is_dir() and p.stat().st_mtime_ns <= changed
            ]
        except FileNotFoundError:  # another process has just removed one
            return None
        serial = max((number for number in before if number is not None), default=0) + 0.5
    return (serial, named, path.name)


def ranking(
    oldest_first: Iterable[tuple[Path, Mapping[str, Any]]], key: str, mode: str
) -> list[tuple[Path, float]]:
    """Order checkpoints by a metric, best first, of equals the oldest first, without those that have none, or NaN."""
    ranked: list[tuple[Path, float]] = []
    for path, manifest in oldest_first:
        value = float(manifest["measured"].get(key, "nan"))
        if value == value:
            place = next(
                (i for i, (_, other) in enumerate(ranked) if better(value, other, mode)),
                len(ranked),
            )
            ranked.insert(place, (path, value))
    return ranked


def prune(
    written: Path, run: str, keep: int | None, key: str | None, mode: str, keep_best: int
) -> None:
    """Remove all checkpoints of a run beside one that has just been written, but the newest and the best.

    A function of what is on the disk: nothing is remembered. The one that was just written is kept in any case, so there is
    always one that is whole. Those that are seen to be damaged do not count, and are not touched. Nor are those of other runs,
    those with other names, which were saved by hand, and those in which there are other files.
    """
    written = written.resolve()
    valid = [
        (path, m)
        for path in reversed(candidates(written.parent))
        if (m := manifest_of(path)) is not None
    ]
    valid = [
        (path, m) for path, m in valid if re.fullmatch(NAME, path.name) and run_of(path, m) == run
    ]
    kept = {written, *(path for path, _ in (valid if keep is None else valid[-keep:]))}
    if key is not None:
        kept |= {path for path, _ in ranking(valid, key, mode)[:keep_best]}
    for path in [path for path, _ in valid if path not in kept and is_ours(path)]:
        removing = path.with_name(f".{path.name}.removing-{secrets.token_hex(6)}")
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            path.rename(removing)  # at once: a half-removed one must not look like a checkpoint
        shutil.rmtree(removing, ignore_errors=True)
    clean(written.parent, NAME)
    _prune_blocks(written)


def _prune_blocks(written: Path) -> None:
    """Remove the blocks of records that no checkpoint names any more, if there are more than the newest one has.

    If the manifest of a checkpoint can't be read, all stay.
    """
    folder, newest = written.parent, manifest_of(written)
    if newest is None or count(folder) <= len(newest.get("blocks", ())):
        return
    manifests = [manifest_of(path) for path in candidates(folder)]
    if all(manifest is not None for manifest in manifests):
        remove_others(
            folder,
            (block for manifest in manifests if manifest for block in manifest.get("blocks", ())),
        )


# --- whose they are


def run_of(path: Path, manifest: Mapping[str, Any]) -> str:
    """Return the run that a checkpoint is of. Older ones have no such word: those of one folder are taken to be of one run."""
    found = manifest.get("run")
    return (
        found
        if isinstance(found, str) and found
        else hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:16]
    )


def runs_in(folder: Path) -> dict[str | None, Path]:
    """Return the runs that have checkpoints in a folder, each with its newest one; those saved by hand do not count.

    A checkpoint whose manifest is damaged, or newer than this fnloop, is of no known run: None.
    """
    found: dict[str | None, Path] = {}
    for path in candidates(folder):
        if re.fullmatch(NAME, path.name):
            try:
                run = run_of(path, read_manifest(path))
            except FileNotFoundError:
                run = None
            except CheckpointError:
                run = None
            found.setdefault(run, path)
    return found


def claim(folder: Path, run: str) -> None:
    """Make a folder a run's: before its first update.

    Raises:
        CheckpointError: another run has checkpoints there, or nobody can tell whose they are.
        PermissionError: the folder can't be written to.
    """
    runs = runs_in(folder)
    if theirs := [path for other, path in runs.items() if other not in (run, None)]:
        raise CheckpointError(
            f"{folder} has checkpoints of another run (the newest is {theirs[0].name}), and this one would take their place. "
            f'To continue that run: state = resume("{folder}", state). To begin a new one, give it a folder of its own'
        )
    if None in runs and run not in runs and claimed(folder) != run:
        raise CheckpointError(
            f"{folder} has checkpoints that cannot be read ({runs[None].name} is one), and this run would take their place: "
            "give it a folder of its own"
        )
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    clean(folder, NAME)
    if not runs and claimed(folder) != run:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".run").write_text(run, encoding="utf-8")


def is_run_id(text: str) -> bool:
    """Return whether a text is the identity of a run: a note that was cut short is not."""
    return re.fullmatch(r"[0-9a-f]{16}", text) is not None


def claimed(folder: Path) -> str | None:
    """Return the run that has begun in a folder and has no checkpoint there yet, or None."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not (folder / ".run").is_file():  # it is not there, or would not end
            return None
        text = (folder / ".run").read_text(encoding="utf-8", errors="replace")
        return text if is_run_id(text) else None
    return None


def release(folder: Path) -> None:
    """Take the note away that a folder is a run's: its first checkpoint says so now."""
    (folder / ".run").unlink(missing_ok=True)
