"""Read the checkpoints of a run as they appear: evaluation beside training."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.files import locate
from fnloop._extensions.checkpoints.format import CheckpointError, NewerFormatError
from fnloop._extensions.checkpoints.partial import held_parts
from fnloop._extensions.checkpoints.place import Place, place_at
from fnloop._extensions.checkpoints.restore import SHAPES, read_checkpoint, restore_contents
from fnloop._extensions.checkpoints.retention import with_manifests
from fnloop.extend import check_not_stale, checks, on_main_process


def follow(
    folder: str | os.PathLike[str],
    state: TrainState,
    poll: float = 10.0,
    *,
    every: bool = False,
    timeout: float | None = None,
    shapes: str = "same",
) -> Iterator[TrainState]:
    """Yield the state of each new checkpoint of a run, as it appears in a folder.

    Use it for evaluations that do not hold up training: in another process, on another GPU, or on
    another machine. The iterator ends when the run has ended, at its target or because a hook has
    stopped it. It waits for an interrupted run to continue.

    If it is slower than the run, it continues with the newest checkpoint, and skips those between.
    It also reads what is there when it begins, and waits for a folder that does not exist yet. A
    checkpoint that the run removes meanwhile is skipped.

    Args:
        folder: what the hook ``checkpoint(folder)`` of the run writes to: a folder, or an address
            such as ``"s3://bucket/run"``.
        state: a new state of the same model and optimizer. Each checkpoint is restored into its
            module, so each state that was yielded is stale after the next one.
        poll: seconds between two looks at the folder.
        every: whether to read every checkpoint, the oldest first, also where it lags.
        timeout: seconds without a new checkpoint after which to end; None waits for ever.
        shapes: with "file", parameters and buffers take on the shapes of each checkpoint, as in
            :func:`restore`; "same" refuses them.

    Returns:
        An iterator of states, as :func:`restore` returns them. Of a partial checkpoint, what it
        holds is restored.

    Raises:
        CheckpointError, OSError, MemoryError: as :func:`restore`. A damaged checkpoint is skipped
            with a warning.
        StaleStateError: a state that was yielded has been trained further.
        TypeError, ValueError: an argument has the wrong type or value.

    Example:
        >>> import tempfile, fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, folder = fl.pipeline()(toy_loss), tempfile.mkdtemp()
        >>> hooks = (fl.every(steps=1)(fl.checkpoint(folder)),)
        >>> state = fl.fit(step, toy(), [torch.ones(1)] * 3, hooks=hooks)
        >>> [(seen.step, seen.model.w.item()) for seen in follow(folder, toy(), every=True)]
        [(1, -1.0), (2, -2.0), (3, -3.0)]
    """
    check_not_stale(state, "follow")
    poll = checks.number("follow", "poll", poll, "seconds between two looks", above=0)
    checks.flag("follow", "every", every, "whether to read every checkpoint")
    if timeout is not None:
        timeout = checks.number(
            "follow", "timeout", timeout, "seconds without a new checkpoint", least=0
        )
    checks.choice("follow", "shapes", shapes, SHAPES)
    return _follow(place_at("follow", "folder", folder), state, poll, every, timeout, shapes)


def _follow(
    place: Place,
    state: TrainState,
    poll: float,
    every: bool,
    timeout: float | None,
    shapes: str,
) -> Iterator[TrainState]:
    seen, began = set[str](), time.monotonic()
    while True:
        # The main process looks, because the others may see other checkpoints.
        listed, late = on_main_process(
            lambda began=began: (
                _listed(place),
                timeout is not None and time.monotonic() - began >= timeout,
            ),
            "fnloop.follow",
        )
        found = [each for each in (listed if every else listed[-1:]) if each.digest not in seen]
        seen.update(each.digest for each in listed)
        for path, parts, _ in found:
            check_not_stale(state, "follow")
            if (restored := _read(place, path, state, parts, shapes)) is not None:
                state = restored
                yield state
                began = time.monotonic()
                if has_ended(state):
                    return
        if not found:
            if late:
                return
            time.sleep(poll)


class _Listed(NamedTuple):
    """A checkpoint, the parts that it holds, and a digest of what its manifest says.

    A serial number does not tell it from others: it begins again where a folder was emptied.
    """

    path: Path
    parts: tuple[str, ...]
    digest: str


def _listed(place: Place) -> list[_Listed]:
    """Return the checkpoints in a place, the oldest first."""
    return [
        _Listed(path, held_parts(manifest), hashlib.sha256(repr(manifest).encode()).hexdigest())
        for path, manifest in with_manifests(place.look(), links=True)
    ]


def _read(
    place: Place, path: Path, state: TrainState, parts: tuple[str, ...], shapes: str
) -> TrainState | None:
    """Return a checkpoint's state; None if it was removed meanwhile, or is damaged."""
    try:
        with place.reading(path):
            source = place.fetch_on_all(path)
            contents = read_checkpoint(source, state, history="history" in parts)
    except NewerFormatError:
        raise
    except (CheckpointError, FileNotFoundError) as error:
        if disk.exists(locate(path)):
            if isinstance(error, FileNotFoundError):
                raise
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=4)
        return None
    return restore_contents(contents, state, parts, True, source, shapes=shapes)


def has_ended(state: TrainState) -> bool:
    """Return whether the run of a state that was saved has no further update to make.

    One that was interrupted has it on its list.
    """
    return state.step > 0 and not any(action.updates for action in state.todo)
