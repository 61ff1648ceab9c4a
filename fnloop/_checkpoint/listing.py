"""The checkpoints of one run, in the order of the run, by what they say without their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from fnloop._checkpoint.counters import check_counters
from fnloop._checkpoint.files import locate, read_manifest, read_state_file, verify
from fnloop._checkpoint.format import MANIFEST, CheckpointError
from fnloop._checkpoint.history_blocks import decode_history
from fnloop._checkpoint.parts import explain_partial, held_parts, is_partial
from fnloop._checkpoint.retention import candidates, may_be_checkpoint, run_of
from fnloop._core.history import History
from fnloop._core.serialize import Json
from fnloop._display.log import log

__all__ = ["Saved", "is_one_checkpoint", "read_facts", "read_history", "saved_in"]


@attrs.frozen
class Saved:
    """A checkpoint of a run.

    Args:
        path: where it is.
        facts: its ``state.json``, without the older records of its history.
    """

    path: Path
    facts: Mapping[str, Json] = attrs.field(repr=False)

    @property
    def step(self) -> int:
        """How many updates were applied."""
        return self.facts["step"]

    @property
    def position(self) -> tuple[int, int, int]:
        """What orders the checkpoints of a run: updates tried, epochs, batches."""
        facts = self.facts
        return facts["step"] + facts["skipped"], facts["epoch"], facts["batch"]


def is_one_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, rather than a folder of checkpoints."""
    where = locate(folder)
    return may_be_checkpoint(where) or (where / MANIFEST).exists()


def saved_in(folder: Path) -> list[Saved]:
    """Return the whole checkpoints of the newest run in a folder, in the order of the run.

    A folder that is a checkpoint itself is the only one. Partial checkpoints are left out, and so
    are damaged ones, with a warning.

    Raises:
        CheckpointError: there is none.
        OSError: a file cannot be read for a reason other than that it does not exist.
    """
    if is_one_checkpoint(folder):
        return [Saved(folder, read_facts(folder))]
    found: list[Saved] = []
    run: str | None = None
    for path in candidates(folder, links=True):  # the newest first
        try:
            manifest = read_manifest(path)
            run = run or run_of(path, manifest)
            if run_of(path, manifest) == run and not is_partial(manifest):
                found.append(Saved(path, read_facts(path)))
        except (CheckpointError, FileNotFoundError) as error:
            log.warning("skipped a damaged checkpoint: %s", error)
    if not found:
        raise CheckpointError(f"{folder} has no whole checkpoint")
    return sorted(found, key=lambda saved: saved.position)


def read_facts(path: Path) -> Mapping[str, Json]:
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


def read_history(path: Path) -> History:
    """Return the whole history that a checkpoint has.

    Raises:
        CheckpointError: it is damaged, or lacks the older records.
    """
    path = locate(path)
    manifest = verify(path)
    return decode_history(read_state_file(path, manifest.get("blocks", ()))["history"], path)
