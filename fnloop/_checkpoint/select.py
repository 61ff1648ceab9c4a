"""Which checkpoint of a folder: latest, best, resume."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from fnloop._backend.public import on_main_process
from fnloop._checkpoint.files import existing, manifest_of, read_files, verify
from fnloop._checkpoint.format import MANIFEST, CheckpointError, NewerFormatError
from fnloop._checkpoint.restore import restore, restore_from
from fnloop._checkpoint.retention import candidates, claimed, may_be_checkpoint, ranking, run_of
from fnloop._checkpoint.save import PARTS
from fnloop._core.monitor import better
from fnloop._core.state import TrainState, check_not_stale
from fnloop._display.checks import folder_path, metric_name

__all__ = ["best", "latest", "resume"]


# --- folders of them


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint in a folder.

    Damaged ones are passed over with a warning that names the file and the fault.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.

    Returns:
        Its path, or None if there is none.

    Raises:
        TypeError, ValueError: it is not a path.
        CheckpointError: the newest was written by a newer fnloop.
        OSError: a file can't be read, for another reason than that it is not there.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    return next(
        (
            path
            for path, _ in _whole(candidates(folder_path("latest", "folder", folder), links=True))
        ),
        None,
    )


def _whole(
    paths: Iterable[Path], check: Callable[[Path], Any] = verify, faults: list[str] | None = None
) -> Iterator[Any]:
    """Yield the checkpoints that are valid, each with what its check found. Warn of the others, and note their faults."""
    for path in paths:
        try:
            found = check(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if faults is not None:
                faults.append(str(error))
            warnings.warn(f"passed over: {error}", stacklevel=4)
        else:
            yield path, found


def best(
    folder: str | os.PathLike[str], key: str | None = None, mode: str | None = None
) -> Path | None:
    """Return the valid checkpoint with the best value of a metric, of the run that wrote the newest one.

    Args:
        folder: what the hook ``checkpoint(folder, best=...)`` writes to.
        key: the metric; the hook's by default.
        mode: "min" or "max"; the hook's by default.

    Returns:
        Its path, or None if no checkpoint has a value that isn't NaN. Of equals, the oldest.

    Raises:
        ValueError: no metric is given, and the checkpoints name none; or there is no such mode.
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
    ranked = [
        (path, m)
        for path in reversed(candidates(where, links=True))
        if (m := manifest_of(path)) is not None
    ]
    if not ranked:
        return None
    run = run_of(*ranked[-1])
    ranked = [(path, m) for path, m in ranked if run_of(path, m) == run]
    key = key or next((m["best"] for _, m in reversed(ranked) if m.get("best")), None)
    mode = mode or next((str(m["mode"]) for _, m in reversed(ranked) if m.get("mode")), "min")
    if key is None:
        raise ValueError(
            f'the checkpoints in {folder} name no metric: write best(folder, "valid/loss")'
        )
    return next((path for path, _ in _whole(path for path, _ in ranking(ranked, key, mode))), None)


def _if_checkpoint(folder: Path) -> Path | None:
    """Return where a checkpoint is if that is what was given, and not a folder of them."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: resume expects a folder of checkpoints")
    return (
        folder
        if may_be_checkpoint(existing(folder)) or (existing(folder) / MANIFEST).exists()
        else None
    )


def resume(folder: str | os.PathLike[str], state: TrainState) -> TrainState:
    """Return the state of the newest valid checkpoint in a folder, or the state as it is if there is none.

    One line makes a training script restartable: ``state = resume("runs/a", TrainState.create(model, optimizer))``.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to.
        state: a new state of the same model and optimizer.

    Returns:
        The state to continue with.

    Raises:
        CheckpointError: the newest valid checkpoint is of another model or optimizer, or there are checkpoints and all of
            them are damaged, or the newest was written by a newer fnloop.
        TypeError, ValueError: it is not a path.
        OSError: a file can't be read, for another reason than that it is not there.

    Example:
        >>> from fnloop.testing import toy
        >>> resume("no/such/folder", toy()).step
        0
    """
    check_not_stale(state, "resume")
    where = folder_path("resume", "folder", folder)
    if state.backend.world_size > 1:  # the main process decides: others may see others
        path, _, run = on_main_process(lambda: _newest(where, verify), "fnloop.resume")
        if path is not None:
            return restore(path, state)
    else:
        path, read, run = _newest(where, read_files)
        if path is not None:
            return restore_from(read, state, PARTS, True, path)
    return state if run is None else attrs.evolve(state, run_id=run)


def _newest(folder: Path, check: Callable[[Path], Any]) -> tuple[Path | None, Any, str | None]:
    """Return the newest valid checkpoint, with what its check found; or, if there is none, the run that began in the folder.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged.
    """
    if (given := _if_checkpoint(folder)) is not None:
        return given, check(existing(given)), None
    faults: list[str] = []
    for path, found in _whole(candidates(folder, links=True), check, faults):
        return path, found, None
    if faults:
        raise CheckpointError(
            f"{folder} has {len(faults)} checkpoint{'s' * (len(faults) > 1)}, and none is whole: {'; '.join(faults[:3])}. "
            "To begin a new run, give it another folder"
        )
    return None, None, claimed(folder)
