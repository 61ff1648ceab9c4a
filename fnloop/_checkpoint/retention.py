"""Folders of checkpoints: which are the newest and the best, which are removed, and their run.

A run has an identity, ``state.run_id``. It is in every manifest, so a run never removes or ranks
the checkpoints of another. Until a run has saved its first checkpoint, the file ``.run`` in its
folder names it. So a run that is killed before its first save and started again is the same run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fnloop._checkpoint.atomic_write import remove_checkpoint, remove_leftovers
from fnloop._checkpoint.disk import make_folder, replace_file
from fnloop._checkpoint.files import (
    backup_path,
    is_checkpoint,
    manifest_or_none,
    read_manifest,
    serial_or_none,
)
from fnloop._checkpoint.format import FILES, MANIFEST, STATE, CheckpointError
from fnloop._checkpoint.history_blocks import count_blocks, remove_other_blocks
from fnloop._core.monitor import better
from fnloop._core.serialize import Json

__all__ = [
    "CHECKPOINT_NAME",
    "by_phase",
    "candidates",
    "claim_folder",
    "may_be_checkpoint",
    "prune",
    "rank",
    "read_claim",
    "read_run_id",
    "release_claim",
    "run_of",
    "runs_in",
]

# As the hook names them: at which step, after which exception, and with which metrics.
CHECKPOINT_NAME = r"step-\d+(?:\+\d+)?(?:-\w+)?(?:-[\w.-]+=[\w.+-]+)*"
CLAIM = ".run"


def candidates(folder: Path, links: bool = False) -> list[Path]:
    """Return what is or was a checkpoint in a folder, the most recently written first.

    Args:
        folder: the folder.
        links: whether to include links to checkpoints that are elsewhere.
    """
    if not folder.is_dir():
        return []
    found = [
        path
        for path in folder.iterdir()
        if may_be_checkpoint(path) and (links or not path.is_symlink())
    ]
    complete = [path for path in found if not path.name.startswith(".")]
    replaced = [
        folder / path.name[1:].removesuffix(".old") for path in found if path.name.startswith(".")
    ]
    found = [*complete, *(backup_path(path) for path in replaced if not path.exists())]
    keyed = [(key, path) for path in found if (key := _sort_key(path)) is not None]
    return [path for _, path in sorted(keyed, reverse=True)]


def may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder is or was a checkpoint, judged by its name and its files."""
    if not path.is_dir():
        return False
    if path.name.startswith(".") and not path.name.endswith(".old"):
        return False
    names = [name for name in (MANIFEST, *FILES) if (path / name).exists()]
    has_our_name = re.fullmatch(rf"\.?{CHECKPOINT_NAME}(\.old)?", path.name) is not None
    return bool(names) and (
        has_our_name or serial_or_none(path) is not None or {"slots.safetensors", STATE} <= {*names}
    )


def _sort_key(path: Path) -> tuple[float, int, str] | None:
    """Return the key that orders checkpoints by when they were written, or None if one is gone.

    A damaged checkpoint has no serial number. Its last change decides between which others it goes.
    """
    number = sum(map(int, re.findall(r"\d+", path.name.partition("=")[0][:60])))
    serial: float | None = serial_or_none(path)
    if serial is None:
        try:
            changed = path.stat().st_mtime_ns
            before = [
                serial_or_none(p)
                for p in path.parent.iterdir()
                if p.is_dir() and p.stat().st_mtime_ns <= changed
            ]
        except FileNotFoundError:  # another process has just removed a checkpoint
            return None
        serial = max((number for number in before if number is not None), default=0) + 0.5
    return (serial, number, path.name)


def by_phase(
    oldest_first: Iterable[tuple[Path, Mapping[str, Json]]], since: str
) -> list[list[tuple[Path, Mapping[str, Json]]]]:
    """Return checkpoints in the groups that are ranked apart: by "phase", or one for the "run"."""
    groups: dict[Json, list[tuple[Path, Mapping[str, Json]]]] = {}
    for path, manifest in oldest_first:
        phase = manifest.get("phase") if since == "phase" else None
        groups.setdefault(phase, []).append((path, manifest))
    return [*groups.values()]


def rank(
    oldest_first: Iterable[tuple[Path, Mapping[str, Json]]], key: str, mode: str
) -> list[tuple[Path, float]]:
    """Return checkpoints with their values of a metric, the best first, of equals the oldest first.

    Checkpoints without a value, or whose value is NaN, are left out.
    """
    ranked: list[tuple[Path, float]] = []
    for path, manifest in oldest_first:
        value = float(manifest["measured"].get(key, "nan"))
        if value == value:
            worse = (i for i, (_, other) in enumerate(ranked) if better(value, other, mode))
            ranked.insert(next(worse, len(ranked)), (path, value))
    return ranked


def prune(
    written: Path,
    run: str,
    keep: int | None,
    key: str | None,
    mode: str,
    keep_best: int,
    since: str,
) -> None:
    """Remove the checkpoints of a run, except the newest and the best.

    The decision depends only on what is on the disk. The checkpoint that was just written is always
    kept, so one complete checkpoint always exists. Damaged checkpoints do not count and are not
    touched. Nor are checkpoints of other runs, those with names that the hook does not give, or
    those that contain other files.

    Args:
        written: the checkpoint that was just written.
        run: the run.
        keep: how many of the newest to keep, or None for all.
        key, mode: the metric that ranks them, and whether "min" or "max" is best.
        keep_best: how many of the best to keep.
        since: whether these are the best of each "phase", or of the "run".
    """
    written = written.resolve()
    valid = [
        (path, manifest)
        for path in reversed(candidates(written.parent))
        if (manifest := manifest_or_none(path)) is not None
        and re.fullmatch(CHECKPOINT_NAME, path.name)
        and run_of(path, manifest) == run
    ]
    replaced = [path for path, manifest in valid if _is_renamed(path, manifest, written)]
    valid = [(path, manifest) for path, manifest in valid if path not in replaced]
    kept = {written, *(path for path, _ in (valid if keep is None else valid[-keep:]))}
    if key is not None:
        for group in by_phase(valid, since):
            kept |= {path for path, _ in rank(group, key, mode)[:keep_best]}
    unwanted = [*replaced, *(path for path, _ in valid if path not in kept)]
    for path in filter(is_checkpoint, unwanted):
        remove_checkpoint(path)
    remove_leftovers(written.parent, CHECKPOINT_NAME)
    _prune_blocks(written)


def _is_renamed(path: Path, manifest: Mapping[str, Json], written: Path) -> bool:
    """Return whether a checkpoint is of the state that was just written, under another name.

    The name shows metrics, and some may have been measured after the first save.
    """
    named = "=" in path.name + written.name
    return named and path != written and manifest["position"] == read_manifest(written)["position"]


def _prune_blocks(written: Path) -> None:
    """Remove the blocks of records that no checkpoint lists, if there may be any.

    If the manifest of any checkpoint cannot be read, all blocks stay.
    """
    folder, newest = written.parent, manifest_or_none(written)
    if newest is None or count_blocks(folder) <= len(newest.get("blocks", ())):
        return
    manifests = [manifest_or_none(path) for path in candidates(folder)]
    readable = [manifest for manifest in manifests if manifest is not None]
    if len(readable) == len(manifests):
        listed = (block for manifest in readable for block in manifest.get("blocks", ()))
        remove_other_blocks(folder, listed)


# --- the run that a folder belongs to


def run_of(path: Path, manifest: Mapping[str, Json]) -> str:
    """Return the run that a checkpoint belongs to.

    Checkpoints of older versions do not name it. Those in one folder are taken to be of one run.
    """
    found = manifest.get("run")
    if isinstance(found, str) and found:
        return found
    return hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:16]


def runs_in(folder: Path) -> dict[str | None, Path]:
    """Return the runs that have checkpoints in a folder, each with its newest checkpoint.

    Checkpoints that the user saved under other names do not count. A checkpoint whose manifest is
    damaged, or written by a newer fnloop, belongs to an unknown run: None.
    """
    found: dict[str | None, Path] = {}
    for path in candidates(folder):
        if re.fullmatch(CHECKPOINT_NAME, path.name):
            try:
                run = run_of(path, read_manifest(path))
            except (CheckpointError, FileNotFoundError):
                run = None
            found.setdefault(run, path)
    return found


def claim_folder(folder: Path, run: str) -> None:
    """Claim a folder for a run, before the first update of the run.

    Raises:
        CheckpointError: the folder has checkpoints of another run, or of an unknown one.
        PermissionError: the folder is not writable.
    """
    runs = runs_in(folder)
    if theirs := [path for other, path in runs.items() if other not in (run, None)]:
        raise CheckpointError(
            f"{folder} has checkpoints of another run (the newest is {theirs[0].name}), and this "
            "run would replace them. To continue that run: "
            f'state = resume("{folder}", state). To begin a new run, give it a folder of its own'
        )
    if None in runs and run not in runs and read_claim(folder) != run:
        raise CheckpointError(
            f"{folder} has checkpoints that cannot be read ({runs[None].name} is one), and this "
            "run would replace them: give it a folder of its own"
        )
    if folder.is_dir() and not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    remove_leftovers(folder, CHECKPOINT_NAME)
    if not runs and read_claim(folder) != run:
        make_folder(folder)
        replace_file(folder / CLAIM, run.encode())


def read_run_id(file: Path) -> str | None:
    """Return the run that a file names, or None if it names none, or does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if file.is_file():  # not a pipe, for example, which would block
            text = file.read_text(encoding="utf-8", errors="replace")
            # A truncated one is none.
            return text if re.fullmatch(r"[0-9a-f]{16}", text) else None
    return None


def read_claim(folder: Path) -> str | None:
    """Return the run that claims a folder and has no checkpoint in it yet, or None."""
    return read_run_id(folder / CLAIM)


def release_claim(folder: Path) -> None:
    """Remove the claim on a folder. Its first checkpoint names the run from now on."""
    (folder / CLAIM).unlink(missing_ok=True)
