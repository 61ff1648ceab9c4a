"""Whether the processes of a run, on all its machines, see the same checkpoints."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fnloop._backend.collectives import gather_from_all
from fnloop._checkpoint.files import locate
from fnloop._checkpoint.format import MANIFEST, CheckpointError
from fnloop._checkpoint.retention import candidates
from fnloop._display.log import log

__all__ = ["check_all_empty", "check_visible", "warn_unless_shared"]

_ADVICE = (
    "All machines of a run must share the folder of its checkpoints: mount the same disk there on "
    "each of them, or write the path of a folder on a disk that they share"
)


class _View(NamedTuple):
    """What a process sees.

    Args:
        seen: the path of what it sees, or None.
        missing: what it does not see, in words.
        host: the name of its machine.
    """

    seen: str | None
    missing: str
    host: str


def check_visible(path: Path | None) -> None:
    """Raise in every process if some see a checkpoint and others do not. A collective.

    Args:
        path: the checkpoint; None in a process that has found none.
    """
    if path is None:
        _check(_views(None, "it has found no checkpoint"))
        return
    where = path.absolute()
    lacks = f"its folder {where.parent} has no {where.name}"
    if not where.parent.is_dir():
        lacks = f"it has no folder {where.parent}"
    _check(_views(str(where) if locate(where).exists() else None, lacks))


def check_all_empty(folder: Path) -> None:
    """Raise in every process if one sees checkpoints in a folder. A collective.

    It is called where the main process sees none.
    """
    where = folder.absolute()
    found = [where] if (locate(where) / MANIFEST).exists() else candidates(where, links=True)
    newest = next(iter(found), None)
    lacks = f"its folder {where} has none" if where.is_dir() else f"it has no folder {where}"
    _check(_views(None if newest is None else str(newest), lacks))


def warn_unless_shared(folder: Path) -> None:
    """Warn if a process does not see the folder that the main process writes to. A collective.

    It raises nothing, because a shared disk may need a moment to show a new folder everywhere.
    """
    where = folder.absolute()
    views = _views(str(where) if where.is_dir() else None, f"it has no folder {where}")
    if (blind := _first(views, sees=False)) is not None and views[0].seen is not None:
        log.warning(
            "checkpoint: process 0 on %s writes to %s; process %d on %s does not see it: %s. "
            "Without it, a job that is restarted cannot be resumed. %s",
            *(views[0].host, where, blind, views[blind].host, views[blind].missing, _ADVICE),
        )


def _views(seen: str | None, missing: str) -> list[_View]:
    """Return what each process sees, by rank."""
    view = _View(seen, missing, socket.gethostname())
    return gather_from_all(view, "a look at the folder of checkpoints")


def _first(views: Sequence[_View], sees: bool) -> int | None:
    """Return the first process that sees something, or that does not."""
    return next((rank for rank, view in enumerate(views) if (view.seen is not None) is sees), None)


def _check(views: Sequence[_View]) -> None:
    a, b = _first(views, sees=True), _first(views, sees=False)
    if a is not None and b is not None:
        raise CheckpointError(
            f"process {a} on {views[a].host} sees the checkpoint {views[a].seen}, and process {b} "
            f"on {views[b].host} does not: {views[b].missing}. {_ADVICE}"
        )
