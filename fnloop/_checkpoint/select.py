"""Find a checkpoint in a folder: latest, best, resume."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.files import (
    locate,
    manifest_or_none,
    read_manifest,
    verify,
)
from fnloop._checkpoint.format import MANIFEST, PARTS, CheckpointError, Contents, NewerFormatError
from fnloop._checkpoint.parts import explain_partial, held_parts
from fnloop._checkpoint.read import read_whole_checkpoint
from fnloop._checkpoint.restore import restore_contents
from fnloop._checkpoint.retention import (
    by_phase,
    candidates,
    may_be_checkpoint,
    rank,
    read_claim,
    run_of,
)
from fnloop._checkpoint.shared import check_all_empty, check_visible
from fnloop._core.monitor import better
from fnloop._core.phase import SINCE
from fnloop._core.state import TrainState, check_not_stale
from fnloop._display.checks import choice, folder_path, metric_name

__all__ = ["best", "latest", "resume"]

Found = TypeVar("Found")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint in a folder.

    Damaged checkpoints are skipped with a warning that names the file and the fault.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.

    Returns:
        Its path, or None if there is none.

    Raises:
        TypeError, ValueError: it is not a path.
        CheckpointError: a newer fnloop wrote the newest checkpoint.
        OSError: a file cannot be read for a reason other than that it does not exist.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    paths = candidates(folder_path("latest", "folder", folder), links=True)
    valid = _skip_damaged(paths, verify)
    return next((path for path, _ in valid), None)


def best(
    folder: str | os.PathLike[str],
    key: str | None = None,
    mode: str | None = None,
    *,
    since: str | None = None,
) -> Path | None:
    """Return the valid checkpoint with the best value of a metric, of the run of the newest one.

    Args:
        folder: what the hook ``checkpoint(folder, best=...)`` writes to.
        key: the metric; the hook's by default.
        mode: "min" or "max"; the hook's by default.
        since: which checkpoints count, if the run has phases: those of its newest "phase" that has
            a value, or those of the whole "run"; as the hook's by default.

    Returns:
        Its path, or None if no checkpoint has a value that is not NaN. Of equals, the oldest.

    Raises:
        ValueError: no metric is given and the checkpoints name none; or there is no such mode or
            ``since``.
        TypeError: an argument is not what it should be.
        CheckpointError, OSError: as :func:`latest`.

    Example:
        >>> best("no/such/folder", "valid/loss") is None
        True
    """
    where = folder_path("best", "folder", folder)
    if key is not None:
        metric_name("best", "key", key)
    if mode is not None:
        better(0.0, 0.0, mode)  # checks it
    if since is not None:
        choice("best", "since", since, SINCE, ", or None for the hook's")
    found = [
        (path, manifest)
        for path in reversed(candidates(where, links=True))
        if (manifest := manifest_or_none(path)) is not None
    ]
    if not found:
        return None
    run = run_of(*found[-1])
    found = [(path, manifest) for path, manifest in found if run_of(path, manifest) == run]
    newest_first = [manifest for _, manifest in reversed(found)]
    key = key or next((m["best"] for m in newest_first if m.get("best")), None)
    mode = mode or next((str(m["mode"]) for m in newest_first if m.get("mode")), "min")
    if key is None:
        raise ValueError(
            f'the checkpoints in {folder} name no metric: write best(folder, "valid/loss")'
        )
    since = since or next((str(m["since"]) for m in newest_first if m.get("since")), "phase")
    groups = reversed(by_phase(found, since))
    ranked = [path for group in groups for path, _ in rank(group, key, mode)]
    valid = _skip_damaged(ranked, verify)
    return next((path for path, _ in valid), None)


def resume(folder: str | os.PathLike[str], state: TrainState) -> TrainState:
    """Return the state of the newest valid checkpoint in a folder, or ``state`` if it has none.

    One line makes a training script restartable:
    ``state = resume("runs/a", TrainState.create(model, optimizer))``. Partial checkpoints, saved
    with ``only=...``, are skipped.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.
        state: a new state of the same model and optimizer.

    Returns:
        The state to continue with.

    Raises:
        CheckpointError: the newest valid checkpoint is of another model or optimizer, all
            checkpoints are damaged or partial, a newer fnloop wrote the newest one, or the machines
            of the run do not share the folder.
        TypeError, ValueError: it is not a path.
        OSError, MemoryError: a file cannot be read for a reason other than that it does not exist,
            or there is no memory for it. This is not damage: no older checkpoint is taken instead.

    Example:
        >>> from fnloop.testing import toy
        >>> resume("no/such/folder", toy()).step
        0
    """
    check_not_stale(state, "resume")
    where = folder_path("resume", "folder", folder)
    # The main process looks, because the others may see other checkpoints.
    alone, paths, claimed_by = on_main_process(lambda: _look_into(where), "fnloop.resume")
    newest = _read_one(where, state) if alone else _read_newest(where, paths, state)
    if newest is None:
        check_all_empty(where)
        return state if claimed_by is None else attrs.evolve(state, run_id=claimed_by)
    path, contents = newest
    return restore_contents(contents, state, PARTS, True, path)


def _look_into(folder: Path) -> tuple[bool, list[Path], str | None]:
    """Return whether a folder is one checkpoint; its checkpoints; and the run that claims it."""
    if _is_one_checkpoint(folder):
        return True, [], None
    paths = candidates(folder, links=True)
    return False, paths, None if paths else read_claim(folder)


def _read_one(path: Path, state: TrainState) -> tuple[Path, Contents]:
    """Return a checkpoint with its contents."""
    check_visible(path)
    contents = read_whole_checkpoint(path, state)
    if contents is None:
        raise CheckpointError(_explain_not_resumable(path))
    return path, contents


def _read_newest(
    folder: Path, paths: Sequence[Path], state: TrainState
) -> tuple[Path, Contents] | None:
    """Return the newest valid checkpoint of a folder with its contents, or None if it has none.

    Args:
        folder: the folder.
        paths: its checkpoints, the newest first.
        state: the state to read for.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged or partial.
    """
    faults: list[str] = []
    partial: list[Path] = []
    for path in paths:
        check_visible(path)
        read = functools.partial(read_whole_checkpoint, state=state)
        for _, contents in _skip_damaged((path,), read, faults, state.backend.main):
            if contents is not None:
                return path, contents
            partial.append(path)
    if partial:
        raise CheckpointError(_explain_not_resumable(partial[0]))
    if faults:
        raise CheckpointError(
            f"{folder} has {len(faults)} checkpoint{'s' * (len(faults) > 1)}, and none is valid: "
            f"{'; '.join(faults[:3])}. To begin a new run, give it another folder"
        )
    return None


def _explain_not_resumable(path: Path) -> str:
    held = held_parts(read_manifest(locate(path)))
    return (
        f"a run cannot be resumed: {explain_partial(path, held)}. To resume runs, save whole "
        "checkpoints, in a folder of their own: checkpoint(folder) without only="
    )


def _is_one_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, rather than a folder of checkpoints."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: resume expects a folder of checkpoints")
    where = locate(folder)
    return may_be_checkpoint(where) or (where / MANIFEST).exists()


def _skip_damaged(
    paths: Iterable[Path],
    read: Callable[[Path], Found],
    faults: list[str] | None = None,
    warn: bool = True,
) -> Iterator[tuple[Path, Found]]:
    """Yield the valid checkpoints, each with what ``read`` returns.

    Args:
        paths: the checkpoints.
        read: reads or verifies one.
        faults: receives the faults of damaged checkpoints, which are skipped.
        warn: whether to warn of them.
    """
    for path in paths:
        try:
            found = read(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if faults is not None:
                faults.append(str(error))
            if warn:  # the caller of the public function
                warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=4)
        else:
            yield path, found
