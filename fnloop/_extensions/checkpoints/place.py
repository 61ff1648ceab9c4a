"""Where checkpoints are: in a folder on a disk, or at an address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from fnloop._extensions import extensions
from fnloop._extensions.checkpoints.files import SendFiles, verify, write_by_all
from fnloop._extensions.checkpoints.format import Contents
from fnloop._extensions.checkpoints.retention import (
    check_all_empty,
    check_visible,
    claim_folder,
    warn_unless_shared,
)
from fnloop._extensions.checkpoints.serialize import Json
from fnloop.extend import checks

READING = "the reading of a checkpoint"
Tidy = Callable[[Callable[[Path], bool]], None]


class Place:
    """A folder on a disk.

    Args:
        folder: the folder.

    Attributes:
        folder: where the checkpoints are seen on this machine.
        name: the folder, as errors name it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)

    def look(self) -> Path:
        """Return the folder, after making it show what is there."""
        return self.folder

    def settle(self) -> None:
        """Complete what an earlier process has left undone. Only the main process calls it."""

    def fetch(self, path: Path, only: Collection[str] | None = None) -> Path:
        """Return a checkpoint in the folder, after downloading what it lacks.

        Args:
            path: the checkpoint.
            only: the names of the files to download, besides the records; None for all.
        """
        return path

    def fetch_on_all(self, path: Path) -> Path:
        """Return a checkpoint that the main process has seen, on every process."""
        check_visible(path)
        return path

    def check_all_empty(self) -> None:
        """Raise if another process sees checkpoints where the main process sees none."""
        check_all_empty(self.folder)

    @contextlib.contextmanager
    def reading(self, path: Path | None = None) -> Iterator[None]:
        """Name the place in errors as the user does.

        Args:
            path: what is read. If it is a copy that is damaged, it is removed, and so the next
                reader downloads it again.
        """
        yield

    def verify(self, path: Path) -> dict[str, Json]:
        """Verify a checkpoint, after downloading what is not here, and return its manifest."""
        with self.reading(path):
            return verify(self.fetch(path))

    # --- written to by a run, or once

    def save(self, contents: Contents, what: str, send: SendFiles | None = None) -> Path | str:
        """Write a checkpoint to this place. All processes must call it.

        Args:
            contents: what this process writes.
            what: what waits for it.
            send: sends files of this process elsewhere, as they are written.
        """
        return write_by_all(contents, self.folder, what, send)

    def staging(self, run: str) -> Path:
        """Return the folder to which a run writes its checkpoints first."""
        return self.folder

    def warn_unless_shared(self) -> None:
        """Warn if a process does not see the folder. A collective."""
        warn_unless_shared(self.folder)

    def claim(self, folder: Path, run: str) -> None:
        """Make this the place of a run, which writes to a folder first."""
        claim_folder(folder, run)

    def keep(
        self, written: Path, run: str, at: str | None, tidy: Tidy, background: bool = False
    ) -> None:
        """Complete a checkpoint that a run has written.

        Args:
            written: where it is.
            run: the run.
            at: where its files are already, as what ``sender`` returned was told.
            tidy: removes what it replaces, given which checkpoints count.
            background: whether what takes long may be done while training continues.
        """
        tidy(lambda path: True)

    def sender(self, name: str) -> SendFiles | None:
        """Return what sends files of a checkpoint as they are written, if they go elsewhere."""
        return None

    def check(self) -> None:
        """Raise the error of what was done in the background."""

    def wait(self) -> None:
        """Wait for what is done in the background."""

    def end(self) -> None:
        """Let another process continue the run."""


def place_at(owner: str, argument: str, value: str | os.PathLike[str]) -> Place:
    """Return the place that a path or an address means.

    Args:
        owner, argument: what was called, for messages.
        value: what was given.

    Raises:
        TypeError, ValueError: it is neither a path nor an address.
        ImportError: the package for such addresses is not installed.
    """
    if checks.is_address(value):
        if not (text := os.fspath(value)).partition("://")[2].strip("/"):
            raise ValueError(f"{owner} expects the address of a folder; got {text!r}")
        for remote in extensions("checkpoints at an address"):
            return remote(owner, text)
    return Place(checks.folder_path(owner, argument, value))
