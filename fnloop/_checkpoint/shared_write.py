"""Write a checkpoint by all processes: each its own files, into one temporary folder.

The main process makes the folder. When all have written and flushed their files, it gets their
checksums, writes the manifest, and renames the folder. Whichever process is killed before, there is
no manifest, and so no checkpoint.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from fnloop._backend.collectives import gather_from_all, start_all_reduce_max
from fnloop._backend.public import on_every_process, on_main_process
from fnloop._checkpoint.atomic_write import Writing, write_checkpoint, write_files
from fnloop._checkpoint.format import Contents
from fnloop._core.serialize import Json

__all__ = ["SharedWrite", "write_by_all"]


def write_by_all(contents: Contents, path: Path, what: str) -> Path:
    """Write a checkpoint: by all processes if it has an index, otherwise by the main process.

    Args:
        contents: what this process writes.
        path: as in :func:`write_checkpoint`.
        what: what waits for it, as errors name it.
    """
    if not contents.index:
        return on_main_process(lambda: write_checkpoint(contents, path), what)
    shared = SharedWrite(contents, lambda: Writing(contents, path), what)
    try:
        shared.write()
        files = shared.agree()
        return on_main_process(lambda: shared.commit(files), what)
    finally:
        shared.abandon()


class SharedWrite:
    """A checkpoint that all processes write. Each makes one, and calls the same methods in turn.

    Args:
        contents: what this process writes.
        begin: begins to write, on the main process.
        what: what waits for it, as errors name it.

    Attributes:
        writing: the checkpoint that is being written, on the main process; elsewhere None.
    """

    def __init__(self, contents: Contents, begin: Callable[[], Writing], what: str) -> None:
        self.contents, self._what = contents, what
        self.writing: Writing | None = None
        self._thread: threading.Thread | None = None
        self._files: dict[str, Json] = {}
        self._error: BaseException | None = None
        self._unfinished: Callable[[], list[float]] | None = None
        self._folder = on_main_process(lambda: self._begin(begin), what)

    def _begin(self, begin: Callable[[], Writing]) -> Path:
        self.writing = begin()
        return self.writing.folder

    def write(self) -> None:
        """Write the files of this process. An error is raised by :meth:`agree`."""
        try:
            self._files = write_files(self.contents, self._folder)
        except BaseException as error:
            self._error = error

    def start(self) -> None:
        """Write the files of this process while training continues."""
        self._thread = threading.Thread(target=self.write, name="checkpoint")
        self._thread.start()

    def poll(self) -> bool:
        """Return whether all processes have written their files. No process waits for another.

        Every process must call it equally often. The answer is as of the call before.
        """
        if self._unfinished is not None and not self._unfinished()[0]:
            self._unfinished = None
            return True
        writes = self._thread is not None and self._thread.is_alive()
        self._unfinished = start_all_reduce_max([writes], self._what)
        return False

    def agree(self) -> dict[str, Json]:
        """Wait until all processes have written. Return the entries of all files in the manifest.

        Raises:
            Exception: one of them could not write; the error is raised in every process.
        """
        self._join()
        own = on_every_process(self._outcome, self._what)
        every = gather_from_all(own, self._what)
        return {name: entry for files in every for name, entry in files.items()}

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _outcome(self) -> dict[str, Json]:
        if self._error is not None:
            raise self._error
        return self._files

    def commit(self, files: dict[str, Json]) -> Path:
        """Make it a checkpoint, on the main process. Return the absolute path."""
        assert self.writing is not None
        with contextlib.closing(self.writing) as writing:
            return writing.commit(files)

    def abandon(self) -> bool:
        """Remove what has not been committed. Return whether there was anything.

        It does not wait for other processes, which may have ended.
        """
        self._join()
        writing, self.writing = self.writing, None
        left = writing is not None and writing.folder.exists()
        if writing is not None:
            writing.close()
        return left
