"""The checkpoints of one run, as values: what they say, and what a process has written to them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from fnloop._core.history import History, Phase
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.counters import (
    Cursor,
    Targets,
    check_counters,
    decode_phases,
    decode_targets,
)
from fnloop._extensions.checkpoints.files import (
    chain,
    check_blocks,
    decode_history,
    locate,
    read_blocks,
    read_manifest,
    read_state_file,
    run_of,
    verify,
)
from fnloop._extensions.checkpoints.format import (
    STATE,
    CheckpointError,
    Contents,
    Slices,
    is_share,
    log,
    shares_in,
)
from fnloop._extensions.checkpoints.partial import explain_partial, held_parts, is_partial
from fnloop._extensions.checkpoints.place import Place
from fnloop._extensions.checkpoints.restore import SUFFIX
from fnloop._extensions.checkpoints.retention import candidates, is_one_checkpoint
from fnloop._extensions.checkpoints.serialize import Json


@attrs.frozen
class Saved:
    """A checkpoint of a run.

    Args:
        path: where it is.
        facts: its ``state.json``, without the older records of its history.
    """

    path: Path
    facts: Mapping[str, Json] = attrs.field(repr=False)

    @staticmethod
    def is_at(folder: Path) -> bool:
        """Return whether a folder is a checkpoint, rather than a folder of checkpoints."""
        return is_one_checkpoint(folder)

    @staticmethod
    def all_in(place: Place | Path, damaged: list[str] | None = None) -> list[Saved]:
        """Return the whole checkpoints of the newest run in a folder, in the order of the run.

        A folder that is a checkpoint itself is the only one. Partial checkpoints are left out, and
        so are damaged ones.

        Args:
            place: the folder, or where it is.
            damaged: receives why they are left out; None: a warning says it.

        Raises:
            CheckpointError: there is none.
            OSError: a file cannot be read for a reason other than that it does not exist.
        """
        place = Place(place) if isinstance(place, Path) else place
        folder = place.look()
        if is_one_checkpoint(folder):
            return [Saved(folder, _read_facts(place.fetch(folder, (STATE,))))]
        found: list[Saved] = []
        run: str | None = None
        for path in candidates(folder, links=True):  # the newest first
            try:
                manifest = read_manifest(path)
                run = run or run_of(path, manifest)
                if run_of(path, manifest) == run and not is_partial(manifest):
                    found.append(Saved(path, _read_facts(place.fetch(path, (STATE,)))))
            except (CheckpointError, FileNotFoundError) as error:
                if damaged is None:
                    log.warning("skipped a damaged checkpoint: %s", error)
                else:
                    damaged.append(str(error))
        if not found:
            what = "has no whole checkpoint" if disk.exists(folder) else "does not exist"
            raise CheckpointError(
                f"{folder} {what}. Checkpoints are written by fit(..., hooks=(checkpoint(folder),))"
            )
        return sorted(found, key=lambda saved: saved.position)

    @property
    def step(self) -> int:
        """How many updates were applied."""
        return self.facts["step"]

    @property
    def position(self) -> tuple[int, int, int]:
        """What orders the checkpoints of a run: updates tried, epochs, batches."""
        facts = self.facts
        return facts["step"] + facts["skipped"], facts["epoch"], facts["batch"]

    @staticmethod
    def position_of(state: TrainState) -> tuple[int, ...]:
        """Return the position that a checkpoint of a state would have."""
        return tuple(Cursor.of(state).place)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that had begun."""
        return decode_phases(self.facts)

    @property
    def targets(self) -> Targets | None:
        """Where the run was to end; None if it was saved outside of one."""
        return decode_targets(self.facts)

    @property
    def processes(self) -> int:
        """Among how many processes the data were dealt."""
        return shares_in(self.facts) or 1

    # --- its history

    def history(self, verified: bool = False) -> History:
        """Return the whole history, after comparing all checksums if it is to be verified.

        Raises:
            CheckpointError: it is damaged, or lacks the older records.
        """
        path = locate(self.path)
        manifest = verify(path) if verified else read_manifest(path)
        return decode_history(read_state_file(path, manifest.get("blocks", ()))["history"], path)

    @property
    def blocks(self) -> list[str]:
        """The names of the files with its older records."""
        return read_manifest(locate(self.path)).get("blocks", [])

    def rows_in(self, block: str) -> list[Json]:
        """Return the records in one of these files, as JSON, after comparing its checksum."""
        path = locate(self.path)
        check_blocks(path, (block,), deep=True)
        return read_blocks(path, (block,))

    @staticmethod
    def digests(digest: str, rows: Iterable[Json]) -> list[str]:
        """Return the digests of a history after each of some records, from that before them."""
        texts = (json.dumps(row, ensure_ascii=False) for row in rows)
        return [*itertools.accumulate(texts, chain, initial=digest)][1:]

    # --- its tensors

    def written(self, made: Contents, is_main: bool) -> Contents:
        """Return what this process has written to it. No checksums are compared.

        Args:
            made: what it would write now.
            is_main: whether it is the main process.
        """
        path = locate(self.path)
        files = dict(made.files) if made.index else {}
        if is_main:
            whole = [name for name in read_manifest(path)["files"] if name.endswith(SUFFIX)]
            groups = {name: name.removesuffix(SUFFIX) for name in whole}
            files |= {k: v for k, v in groups.items() if not is_share(k, made.groups)}
        slices, tensors = Slices(path), {}
        for file, group in files.items():
            if group is not None and disk.exists(path / file):
                entries = slices.entries_in(file)
                tensors[group] = {name: slices.read(entry) for name, entry in entries.items()}
                slices.close()
        return Contents(tensors, read_state_file(path))


def _read_facts(path: Path) -> Mapping[str, Json]:
    """Return the facts of a checkpoint, without the older records of its history.

    Raises:
        CheckpointError: it is not a whole checkpoint, or is damaged.
    """
    path = locate(path)
    manifest = verify(path, deep=False, history=False)
    if is_partial(manifest):
        raise CheckpointError(explain_partial(path, held_parts(manifest)))
    facts = read_state_file(path)
    try:
        check_counters(facts)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    return facts
