"""Folders of checkpoints: which are the newest and the best, and which are removed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from fnloop._core.history import History
from fnloop._core.records import better
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.files import (
    CHECKPOINT_NAME,
    Writing,
    check_files,
    count_blocks,
    explain_nonfinite,
    has_only_its_files,
    locate,
    make_history_encoder,
    manifest_or_none,
    read_manifest,
    readable_manifest,
    remove_checkpoint,
    remove_leftovers,
    remove_other_blocks,
    run_of,
    serial_or_none,
    write_blocks,
)
from fnloop._extensions.checkpoints.format import (
    FILES,
    MANIFEST,
    STATE,
    CheckpointError,
    Contents,
    log,
)
from fnloop._extensions.checkpoints.serialize import Json
from fnloop.extend import collectives

# --------------------------------------------------------------------------------------------------
# Folders of checkpoints: which are the newest and the best, which are removed, and their run.
#
# A run has an identity, `state.run_id`. It is in every manifest, so a run never removes or ranks
# the checkpoints of another. Until a run has saved its first checkpoint, the file `.run` in its
# folder names it. So a run that is killed before its first save and started again is the same run.

CLAIM = ".run"


def candidates(folder: Path, links: bool = False) -> list[Path]:
    """Return what is or was a checkpoint in a folder, the most recently written first.

    Args:
        folder: the folder.
        links: whether to include links to checkpoints that are elsewhere.
    """
    return [path for path, _ in reversed(_by_age(folder, links))]


Listed = tuple[Path, str | None]  # a checkpoint, and in words why it is passed over, if it is


def listed(folder: Path) -> list[Listed]:
    """Return what is or was a checkpoint in a folder, or is linked there, the newest first.

    Those whose weights are not finite are to be passed over.
    """
    found = reversed(_by_age(folder, links=True))
    return [(path, explain_nonfinite(path, manifest or {})) for path, manifest in found]


def with_manifests(
    folder: Path, links: bool = False, beside: str = ""
) -> list[tuple[Path, dict[str, Json]]]:
    """Return the undamaged checkpoints in a folder with their manifests, the oldest first.

    Args:
        folder: the folder.
        links: whether to include links to checkpoints that are elsewhere.
        beside: what their names begin with.
    """
    whole = []
    for path, manifest in _by_age(folder, links, beside):
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            if manifest is not None:
                check_files(path, manifest)
                whole.append((path, manifest))
    return whole


def _by_age(
    folder: Path, links: bool, beside: str = ""
) -> list[tuple[Path, dict[str, Json] | None]]:
    """Return what is or was a checkpoint in a folder, the oldest first, each with its manifest.

    The manifest is None if it is damaged. With ``beside``, only of names that begin so.
    """
    keyed = []
    for path in folder.iterdir() if disk.is_folder(folder) else ():
        if not path.name.startswith(beside):
            continue
        # What was being replaced when a process was killed counts until there is another.
        whole = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if not may_be_checkpoint(path) or (path.name.startswith(".") and disk.exists(whole)):
            continue
        if links or not path.is_symlink():
            manifest = readable_manifest(path)
            if (key := _sort_key(path, manifest)) is not None:
                keyed.append((key, path, manifest))
    return [(path, manifest) for _, path, manifest in sorted(keyed, key=itemgetter(0))]


def is_one_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, rather than a folder of checkpoints."""
    where = locate(folder)
    return may_be_checkpoint(where) or disk.exists(where / MANIFEST)


def may_be_checkpoint(path: Path) -> bool:
    """Return whether a folder is or was a checkpoint, judged by its name and its files.

    A link to nothing is one whose disk is not mounted, for example.
    """
    if not disk.is_folder(path):
        lost = path.is_symlink() and not disk.exists(path)
        return lost and re.fullmatch(CHECKPOINT_NAME, path.name) is not None
    if path.name.startswith(".") and not path.name.endswith(".old"):
        return False
    if re.fullmatch(rf"\.?{CHECKPOINT_NAME}(\.old)?", path.name) is None:
        names = ("slots.safetensors", STATE)
        return serial_or_none(path) is not None or all(disk.exists(path / name) for name in names)
    return any(disk.exists(path / name) for name in (MANIFEST, *FILES))


def _sort_key(path: Path, manifest: Mapping[str, Json] | None) -> tuple[float, int, str] | None:
    """Return the key that orders checkpoints by when they were written, or None if one is gone.

    A damaged checkpoint has no serial number. Its last change decides between which others it goes.
    """
    number = sum(map(int, re.findall(r"\d+", path.name.partition("=")[0][:60])))
    serial: float | None = None if manifest is None else manifest.get("serial")
    if serial is None:
        try:
            changed = (disk.status(path) or path.lstat()).st_mtime_ns
            before = [
                serial_or_none(p)
                for p in path.parent.iterdir()
                if disk.is_folder(p) and p.stat().st_mtime_ns <= changed
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


def _prune_blocks(folder: Path, newest: Mapping[str, Json]) -> None:
    """Remove the blocks of records that no checkpoint lists, if there may be any.

    If the manifest of any checkpoint cannot be read, all blocks stay.

    Args:
        folder: the folder of the checkpoints.
        newest: the manifest of the one that was just written.
    """
    if count_blocks(folder) <= len(newest.get("blocks", ())):
        return
    manifests = [manifest_or_none(path) for path in candidates(folder)]
    readable = [manifest for manifest in manifests if manifest is not None]
    if len(readable) == len(manifests):
        listed = (block for manifest in readable for block in manifest.get("blocks", ()))
        remove_other_blocks(folder, listed)


# --- the run that a folder belongs to


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
    if disk.exists(folder) and not disk.is_folder(folder):
        raise CheckpointError(
            f"{folder} is a file, and a run writes its checkpoints into a folder: give it another "
            f'path, such as checkpoint("{folder}-checkpoints")'
        )
    if disk.is_folder(folder) and not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    remove_leftovers(folder, CHECKPOINT_NAME)
    if not runs and read_claim(folder) != run:
        disk.make_folder(folder)
        disk.replace_file(folder / CLAIM, run.encode())


def read_run_id(file: Path) -> str | None:
    """Return the run that a file names, or None if it names none, or does not exist."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if disk.size_of_file(file) is not None:  # not a pipe, for example, which would block
            text = file.read_text(encoding="utf-8", errors="replace")
            # A truncated one is none.
            return text if re.fullmatch(r"[0-9a-f]{16}", text) else None
    return None


def read_claim(folder: Path) -> str | None:
    """Return the run that claims a folder and has no checkpoint in it yet, or None."""
    return read_run_id(folder / CLAIM)


# --------------------------------------------------------------------------------------------------
# What a run does with the folder that it saves to.


class RunFolder:
    """A folder that one run saves to, as the hook ``checkpoint`` does.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.encode_history = make_history_encoder()
        self._known_blocks: set[str] = set()

    def newest(self) -> dict[str, Json] | None:
        """Return the manifest of the newest checkpoint whose weights are finite; None: none is."""
        manifests = ((path, manifest_or_none(path)) for path in candidates(self.path))
        return next((m for path, m in manifests if m and not explain_nonfinite(path, m)), None)

    def write(
        self, contents: Contents, history: History, name: str, facts: Mapping[str, Json]
    ) -> Path:
        """Write a checkpoint of a name, and return its path.

        Args:
            contents: what to write.
            history: the history, whose older records are written once.
            name: the name.
            facts: additional entries for the manifest.

        Raises:
            CheckpointError: another run has begun in the folder.
        """
        return self.begin(contents, history, name, facts).complete()

    def begin(
        self, contents: Contents, history: History, name: str, facts: Mapping[str, Json]
    ) -> Writing:
        """Begin to write a checkpoint by all processes, on the main one: see :meth:`write`."""
        run, path = contents.facts["run"], self.path / name
        existing = manifest_or_none(path)
        if existing is not None and run_of(path, existing) != run:
            raise CheckpointError(
                f"{path} is a checkpoint of another run: give each run a folder of its own"
            )
        if read_claim(self.path) not in (None, run):
            raise CheckpointError(
                f"another run has begun in {self.path}: give each run a folder of its own"
            )
        write_blocks(self.path, contents.facts["blocks"], history, self._known_blocks)
        return Writing(contents, path, facts, in_own_folder=True)

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left of checkpoints."""
        remove_leftovers(self.path, CHECKPOINT_NAME)

    @staticmethod
    def prune(
        written: Path,
        run: str,
        keep: int | None,
        key: str | None,
        mode: str,
        keep_best: int,
        since: str,
        counts: Callable[[Path], bool] = lambda path: True,
    ) -> None:
        """Remove the checkpoints of a run, except the newest and the best.

        The decision depends only on what is on the disk. The checkpoint that was just written is
        always kept, so one complete checkpoint always exists, and so is the newest whose weights
        are finite. Others whose weights are not are never among the best. Damaged checkpoints do
        not count and are not touched. Nor are checkpoints of other runs, those with names that the
        hook does not give, or those that contain other files.

        Args:
            written: the checkpoint that was just written. It names the run from now on, and not
                the claim.
            run: the run.
            keep: how many of the newest to keep, or None for all.
            key, mode: the metric that ranks them, and whether "min" or "max" is best.
            keep_best: how many of the best to keep.
            since: whether these are the best of each "phase", or of the "run".
            counts: whether a checkpoint is there already. One that is to be uploaded is not, so it
                neither replaces another nor is removed.
        """
        (written.parent / CLAIM).unlink(missing_ok=True)
        written = written.resolve()
        # Only one of the same step can be of the same state under another name.
        step = re.match(r"step-\d+", written.name)
        beside = "" if keep is not None or step is None else step[0]
        valid = [
            (path, manifest)
            for path, manifest in with_manifests(written.parent, beside=beside)
            if re.fullmatch(CHECKPOINT_NAME, path.name) and run_of(path, manifest) == run
            if counts(path)
        ]
        newest = next((manifest for path, manifest in valid if path == written), None)
        replaced = [
            path
            for path, manifest in valid
            if path != written and newest is not None and manifest["position"] == newest["position"]
            if "=" in path.name + written.name  # it shows metrics, which may be measured later
        ]
        unwanted = replaced
        if keep is not None:
            others = [(path, manifest) for path, manifest in valid if path not in replaced]
            finite = [pair for pair in others if explain_nonfinite(*pair) is None]
            kept = {written, *(path for path, _ in (*others[-keep:], *finite[-1:]))}
            if key is not None:
                for group in by_phase(finite, since):
                    kept |= {path for path, _ in rank(group, key, mode)[:keep_best]}
            unwanted = [*replaced, *(path for path, _ in others if path not in kept)]
        manifests = dict(valid)
        for path in unwanted:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if has_only_its_files(path, manifests[path]):
                    remove_checkpoint(path)
        remove_leftovers(written.parent, CHECKPOINT_NAME)
        if newest is not None:
            _prune_blocks(written.parent, newest)


# --------------------------------------------------------------------------------------------------
# Whether the processes of a run, on all its machines, see the same checkpoints.

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
    if collectives.rank_and_size()[1] == 1:
        return
    if path is None:
        _check(_views(None, "it has found no checkpoint"))
        return
    where = path.absolute()
    lacks = f"its folder {where.parent} has no {where.name}"
    if not disk.is_folder(where.parent):
        lacks = f"it has no folder {where.parent}"
    _check(_views(str(where) if disk.exists(locate(where)) else None, lacks))


def check_all_empty(folder: Path) -> None:
    """Raise in every process if one sees checkpoints in a folder. A collective.

    It is called where the main process sees none.
    """
    where = folder.absolute()
    found = [where] if disk.exists(locate(where) / MANIFEST) else candidates(where, links=True)
    newest = next(iter(found), None)
    lacks = f"its folder {where} has none" if disk.is_folder(where) else f"it has no folder {where}"
    _check(_views(None if newest is None else str(newest), lacks))


def warn_unless_shared(folder: Path) -> None:
    """Warn if a process does not see the folder that the main process writes to. A collective.

    It raises nothing, because a shared disk may need a moment to show a new folder everywhere.
    """
    where = folder.absolute()
    views = _views(str(where) if disk.is_folder(where) else None, f"it has no folder {where}")
    if (blind := _first(views, sees=False)) is not None and views[0].seen is not None:
        log.warning(
            "checkpoint: process 0 on %s writes to %s; process %d on %s does not see it: %s. "
            "Without it, a job that is restarted cannot be resumed. %s",
            *(views[0].host, where, blind, views[blind].host, views[blind].missing, _ADVICE),
        )


def _views(seen: str | None, missing: str) -> list[_View]:
    """Return what each process sees, by rank."""
    view = _View(seen, missing, socket.gethostname())
    return collectives.gather_from_all(view, "a look at the folder of checkpoints")


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
