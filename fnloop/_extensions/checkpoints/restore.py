"""Restore a state from a checkpoint, and find the checkpoint in a folder."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
from torch import Tensor

from fnloop._core.state import (
    TrainState,
    check_not_stale,
    unwrap,
)
from fnloop._extensions import extensions
from fnloop._extensions.checkpoints import disk
from fnloop._extensions.checkpoints.files import (
    explain_nonfinite,
    locate,
    read_json,
    read_manifest,
    read_state_file,
    readable_manifest,
    run_of,
    verify,
)
from fnloop._extensions.checkpoints.foreign import explain_foreign
from fnloop._extensions.checkpoints.format import (
    INDEX,
    OWN,
    PARTS,
    STATE,
    TENSORS,
    TRAINED,
    TRAINING,
    CheckpointError,
    Contents,
    Entry,
    NewerFormatError,
    Slices,
    decode_index,
    is_share,
    log,
    tensors_in,
)
from fnloop._extensions.checkpoints.optimizer import Settings, settings_of, templates_of_optimizers
from fnloop._extensions.checkpoints.partial import (
    check_held,
    explain_partial,
    held_parts,
    is_partial,
    read_parts,
)
from fnloop._extensions.checkpoints.parts import every_part, parts_in
from fnloop._extensions.checkpoints.place import READING, Place, place_at
from fnloop._extensions.checkpoints.retention import (
    Listed,
    by_phase,
    check_visible,
    is_one_checkpoint,
    listed,
    rank,
    read_claim,
    with_manifests,
)
from fnloop._extensions.checkpoints.serialize import Json
from fnloop._extensions.checkpoints.split import extent_in, from_local_part, split_dim
from fnloop._extensions.checkpoints.transfer import Reading
from fnloop.extend import (
    Monitored,
    Ownership,
    checks,
    collectives,
    containers,
    groups,
    on_main_process,
    torch_compat,
)


def restore(
    path: str | os.PathLike[str],
    state: TrainState,
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    shapes: str = "same",
) -> TrainState:
    """Read a checkpoint into a state.

    Args:
        path: the folder, or an address such as ``"s3://bucket/run/step-00000812"``. What is at an
            address is downloaded once, as in :func:`latest`.
        state: a state with the same model and the same optimizer class; of several optimizers, with
            the same names. Its module and optimizers are loaded in place, and it is stale
            afterwards. If anything is wrong with the checkpoint, the state stays as it is.
        only: the parts to restore, out of "model", "optimizer", "slots", "counters", "metrics",
            "history", "extra". All of them by default; ``("model",)`` for fine-tuning. And
            "trained": of the model, the parameters that required gradients when it was saved.
        strict: whether the names and shapes in the model must be the same. False restores those
            that match, and logs the others. The optimizer's state of the others is left out.
        shapes: with "file", parameters and buffers take on the shapes of the file, as after
            density control, or with a vocabulary that has grown. They stay the objects that they
            are, so the optimizer's groups still hold them. With ``only=("model",)`` the optimizer
            has to be new. A model that is sharded over processes is refused. "same" refuses them.

    Returns:
        The saved state; training from it is bit-identical to an uninterrupted run.

    Raises:
        CheckpointError: it is not a checkpoint, is damaged, was written by a newer fnloop, does not
            match the model or the optimizer, has two values for what the model ties, or does not
            hold a part; or another machine of the run does not see it.
        OSError, MemoryError: it cannot be read, or there is no memory for it.
        StaleStateError: the state has been advanced.
        TypeError, ValueError: an argument has the wrong type or value.

    Example:
        >>> import tempfile
        >>> from fnloop import save
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy(lr=0.5), only=("model",)).model.w.item()
        3.0
    """
    check_not_stale(state, "restore")
    parts = read_parts("restore", only)
    checks.flag("restore", "strict", strict)
    checks.choice("restore", "shapes", shapes, SHAPES)
    if shapes == "file" and not {"model", TRAINED} & {*parts}:
        raise ValueError(
            f'restore: shapes="file" gives the model the shapes of the file, and only={parts} '
            'leaves the model out: add it, only=("model", ...)'
        )
    if path is None:
        check_visible(None)
        raise TypeError(
            "restore expects a path; got None, which is what latest(folder) returns if there is no "
            "checkpoint"
        )
    place = place_at("restore", "path", path)
    with place.reading(place.folder):
        source = place.fetch_on_all(place.folder)
        contents = read_checkpoint(source, state, history="history" in parts)
        return restore_contents(contents, state, parts, strict, source, shapes=shapes)


SHAPES = ("same", "file")


def restore_contents(
    contents: Contents,
    state: TrainState,
    parts: Sequence[str],
    strict: bool,
    path: Path,
    settings: Settings | None = None,
    shapes: str = "same",
) -> TrainState:
    """Restore parts of the contents of a checkpoint into a state.

    Everything is checked and decoded before anything is changed.

    Args:
        contents: what was read.
        state, strict, shapes: as in :func:`restore`.
        parts: the parts to restore.
        path: the checkpoint, for messages.
        settings: compares settings of the optimizers, and says which are not restored.

    Raises:
        CheckpointError: the contents are not valid, or do not match the state.
    """
    try:
        check_held(path, contents.facts, parts)
        with contextlib.ExitStack() as undone:
            facts, groups = contents.facts, contents.groups
            saved = Reading(
                facts=facts, groups=groups, state=state, parts=parts, strict=strict, path=path,
                undone=undone, settings=settings, shapes=shapes,
            )  # fmt: skip
            every = every_part(parts, parts_in(facts, state))
            loads = [part.prepare(saved) for part in every]
            for load in loads:
                state = load(state)
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # the files may contain anything
        if containers.is_out_of_memory(error):  # on any device
            raise
        raise CheckpointError(
            f"{path} cannot be restored: {type(error).__name__}: {error}"
        ) from error
    restored = Ownership.take(state)
    Ownership.of(restored).parameters.clear()
    if "counters" in parts:
        Ownership.of(restored).restored = Ownership.generation_of(restored)
    if parts == PARTS:
        for note_restored in extensions("what a restored state trains"):
            note_restored(restored)
    return restored


# --------------------------------------------------------------------------------------------------
# Read a checkpoint, by all processes together: of each tensor the part that a process holds.

SUFFIX = ".safetensors"


def read_checkpoint(
    path: Path,
    state: TrainState,
    *,
    history: bool = True,
    manifest: dict[str, Json] | None = None,
) -> Contents:
    """Return the contents of a checkpoint, with or without the older records of its history.

    Every process must call it. Each compares the checksums of its share of the files, and reads of
    a tensor what it holds of the same tensor in its state. ``manifest`` is what the process has
    read of it already.

    Raises:
        CheckpointError, OSError: as :func:`verify`, in every process.
        MemoryError: there is no memory for the tensors.
    """
    path, backend = locate(path), state.backend
    share, kept = (backend.rank, backend.world_size), dict[str, bytes]()
    checked = collectives.on_every_process(
        lambda: verify(path, history=history, share=share, kept=kept, manifest=manifest), READING
    )
    return collectives.on_every_process(lambda: _read(path, checked, state, history, kept), READING)


def read_alone(path: Path, *, history: bool = True) -> Contents:
    """Return the contents of a checkpoint with whole tensors. Only this process need call it.

    Raises:
        CheckpointError, OSError, MemoryError: as :func:`read_checkpoint`.
    """
    path, kept = locate(path), dict[str, bytes]()
    return _read(path, verify(path, history=history, kept=kept), None, history, kept)


def read_whole_checkpoint(path: Path, state: TrainState) -> Contents | None:
    """Return the contents of a checkpoint, or None if it is partial. Every process must call it."""
    where = locate(path)
    manifest = collectives.on_every_process(lambda: _manifest_of(where), READING)
    return None if is_partial(manifest) else read_checkpoint(where, state, manifest=manifest)


def _manifest_of(path: Path) -> dict[str, Json]:
    """Return a manifest, which a listing has mostly read before. Raise as :func:`verify`."""
    known = readable_manifest(path)
    if known is None or is_partial(known):
        return verify(path, deep=False, history=False)
    return known


def _read(
    path: Path,
    manifest: Mapping[str, Json],
    state: TrainState | None,
    history: bool,
    kept: Mapping[str, bytes],
) -> Contents:
    # The checksums are right. So only what a file says can be wrong with it: an exception that is
    # not a CheckpointError is a fault of memory, of the disk, or of this program.
    files = manifest["files"]
    blocks = manifest.get("blocks", ()) if history else ()
    facts = read_state_file(path, blocks, kept.get(STATE))
    index: dict[str, dict[str, Entry]] = {}
    if INDEX in files:
        index = decode_index(read_json(path / INDEX, kept.get(INDEX)), files, path)
    reader = _Reader(path, state, facts, kept)
    tensors = {group: reader.read_split(group, entries) for group, entries in index.items()}
    for file in files:
        group, suffix = os.path.splitext(file)
        if suffix == SUFFIX and not is_share(file, index):
            tensors[group] = reader.read_whole(group, file)
    if missing := {*TENSORS} - tensors.keys():
        raise CheckpointError(f"{path} is damaged: it has no tensors of the {min(missing)}")
    return Contents(tensors, facts)


class _Reader:
    """Reads of the tensors of a checkpoint what this process holds of them.

    Args:
        path: the folder.
        state: the state that they are for; None reads whole tensors.
        facts: the contents of ``state.json``.
        kept: the contents of files that were read already, by name.
    """

    def __init__(
        self,
        path: Path,
        state: TrainState | None,
        facts: Mapping[str, Json],
        kept: Mapping[str, bytes],
    ) -> None:
        self._path, self._slices, self._kept = path, Slices(path), kept
        self._own = None if state is None else f"{state.backend.rank}/"
        parameters = () if state is None else unwrap(state).parameters()
        self._like = next((p for p in parameters if split_dim(p) is not None), None)
        self._templates: dict[str, Mapping[str, Tensor]] = {}
        if state is not None and self._like is not None:
            self._templates = templates_of(state, facts)

    def read_whole(self, group: str, file: str) -> dict[str, Tensor]:
        """Return a group of tensors that is in one file."""
        if file in self._kept and self._like is None:
            found = tensors_in(self._kept[file], self._path, file)
            if found is not None:
                return {name: found[name] for name in self._own_of(group, found)}
        return self.read_split(group, self._slices.entries_in(file))

    def read_split(self, group: str, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """Return a group of tensors, of each what this process holds of it."""
        templates = self._templates.get(group, {})
        names = self._own_of(group, entries)
        try:
            return {name: self._read(entries[name], templates.get(name)) for name in names}
        finally:
            self._slices.close()

    def _own_of(self, group: str, names: Iterable[str]) -> list[str]:
        """Return those of the names of a group that are not of another process."""
        if group != OWN or self._own is None:
            return [*names]
        return [name for name in names if name.startswith(self._own)]

    def _read(self, entry: Entry, template: Tensor | None) -> Tensor:
        """Return a tensor, sharded as its template is.

        One without a template of its shape is split over the processes of the model, if it was
        split when it was saved.
        """
        if self._like is None:  # nothing here is sharded, and a template may be without a shape
            return self._slices.read(entry)
        like, dim = self._like, entry.dim
        if template is not None and entry.shape[: template.ndim] == template.shape:
            like, dim = template, split_dim(template)
        if dim is None:
            return self._slices.read(entry)
        start, stop, _ = extent_in(like, entry.shape[dim])
        local = self._slices.read(entry, start, stop, dim)
        return from_local_part(local, entry.shape, like, dim)


# --------------------------------------------------------------------------------------------------
# Which tensor of a state each tensor of a checkpoint is for, and so how it is to be sharded.


def templates_of(state: TrainState, facts: Mapping[str, Json]) -> dict[str, Mapping[str, Tensor]]:
    """Return tensors of a state by the groups and names of those in a checkpoint.

    They are of the same shape, or have a prefix of the shape: a complex number may be a pair.

    Args:
        state: the state.
        facts: the contents of ``state.json``.
    """
    module = unwrap(state)
    model = {
        torch_compat.strip_compile_prefix(name): value
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    found: dict[str, Mapping[str, Tensor]] = {TRAINING: model, "model": model}
    found["optimizer"] = templates_of_optimizers(state, facts.get("optimizer", {}))
    for part in parts_in(facts, state):
        found |= {} if part.templates is None else part.templates(state, facts)
    return found


# --------------------------------------------------------------------------------------------------
# Find a checkpoint in a folder: latest, best, resume.

Found = TypeVar("Found")


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest valid checkpoint in a folder.

    Damaged checkpoints are skipped with a warning that names the file and the fault, and so are
    those whose weights or optimizer are not finite (see :func:`fnloop.checkpoint`).

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to: a folder, or an address such as
            ``"s3://bucket/run"``.

    Returns:
        Its path, or None if there is none. For an address, the path of a local copy, in the folder
        ``FNLOOP_CACHE`` or ``~/.cache/fnloop``. It stays there until a later call finds that the
        address no longer has this checkpoint.

    Raises:
        TypeError, ValueError: it is neither a path nor an address.
        ImportError: the package for such addresses is not installed.
        CheckpointError: a newer fnloop wrote the newest checkpoint.
        OSError: a file cannot be read for a reason other than that it does not exist.

    Example:
        >>> latest("no/such/folder") is None
        True
    """
    place = place_at("latest", "folder", folder)
    valid = _skip_unfit(listed(place.look()), place.verify)
    return next((path for path, _ in valid), None)


def best(
    folder: str | os.PathLike[str],
    key: str | None = None,
    mode: str | None = None,
    *,
    since: str | None = None,
) -> Path | None:
    """Return the valid checkpoint with the best value of a metric, of the newest run in a folder.

    Damaged checkpoints, and those that are not finite, are skipped as by :func:`latest`.

    Args:
        folder: what the hook ``checkpoint(folder, best=...)`` writes to: a folder, or an address.
        key: the metric; the hook's by default.
        mode: "min" or "max"; the hook's by default.
        since: which checkpoints count, if the run has phases: those of its newest "phase" that has
            a value, or those of the whole "run"; as the hook's by default.

    Returns:
        Its path, or None if no checkpoint has a value that is not NaN. If several are equal, the
        oldest. For an address, the path of a local copy, as :func:`latest` returns it.

    Raises:
        ValueError: no metric is given and the checkpoints name none; or there is no such mode or
            ``since``.
        TypeError: an argument has the wrong type.
        CheckpointError, OSError: as :func:`latest`.

    Example:
        >>> best("no/such/folder", "valid/loss") is None
        True
    """
    place = place_at("best", "folder", folder)
    if key is not None:
        checks.metric_name("best", "key", key)
    if mode is not None:
        checks.choice("best", "mode", mode, Monitored.MODES)
    if since is not None:
        checks.choice("best", "since", since, Monitored.SINCE, ", or None for the hook's")
    found = with_manifests(place.look(), links=True)
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
    phases = reversed(by_phase(found, since))
    manifests = dict(found)
    ranked = [path for each in phases for path, _ in rank(each, key, mode)]
    ranked = [(path, explain_nonfinite(path, manifests[path])) for path in ranked]
    valid = _skip_unfit(ranked, place.verify)
    return next((path for path, _ in valid), None)


def resume(
    folder: str | os.PathLike[str],
    state: TrainState,
    given: Sequence[str] = (),
    *,
    shapes: str = "same",
) -> TrainState:
    """Return the state of the newest valid checkpoint in a folder, or ``state`` if it has none.

    One line makes a training script restartable:
    ``state = resume("runs/a", TrainState.create(model, optimizer))``. Partial checkpoints, saved
    with ``only=...``, are skipped. So are damaged ones, and those whose weights or optimizer are
    not finite, with a warning; ``restore(path, state)`` takes any.

    The run continues with the next batch, and its result is bit for bit what it would have been
    without the interruption. You may change the batch size or the number of workers: exactly the
    remaining samples are trained.

    Args:
        folder: what the hook ``checkpoint(folder)`` writes to: a folder, or an address such as
            ``"s3://bucket/run"``. What an earlier process on this machine could not upload to the
            address is uploaded first.
        state: a new state of the same model and optimizer.
        given: the settings of parameter groups, such as ``("lr", "weight_decay")``, to take from
            ``state`` instead of the checkpoint. Under a schedule, it is the initial value that is
            taken. Of other settings that differ, one line of the log says so.
        shapes: with "file", parameters and buffers take on the shapes of the checkpoint, as in
            :func:`restore`; "same" refuses them.

    Returns:
        The state to continue with.

    Raises:
        CheckpointError: the newest valid checkpoint is of another model or optimizer, all
            checkpoints are damaged, partial or not finite, a newer fnloop wrote the newest one, or
            the machines of the run do not share the folder. A scheduler of torch has set what is
            ``given``.
        TypeError, ValueError: it is not a path, or no group has a setting that is ``given``.
        OSError, MemoryError: a file cannot be read for a reason other than that it does not exist,
            or there is no memory for it. This is not damage: no older checkpoint is taken instead.

    Example:
        >>> from fnloop.testing import toy
        >>> resume("no/such/folder", toy()).step
        0

    Replaces: keras.BackupAndRestore, accelerate.load_state, transformers.resume_from_checkpoint
    """
    check_not_stale(state, "resume")
    checks.choice("resume", "shapes", shapes, SHAPES)
    settings = Settings(_read_given(given, state))
    restored = resume_at(place_at("resume", "folder", folder), state, settings, shapes=shapes)
    if state.backend.main and (text := settings.explain()) is not None:
        log.warning("resume: %s", text)
    return restored


def resume_at(
    place: Place | Path,
    state: TrainState,
    settings: Settings | None = None,
    nonfinite: bool = False,
    shapes: str = "same",
) -> TrainState:
    """Return the state of the newest valid checkpoint of a place, as :func:`resume` does.

    Args:
        place: the place, or a folder.
        state: the state to read for.
        settings: those of parameter groups to take from the state, and what becomes of the others.
        nonfinite: whether to take checkpoints whose weights are not finite.
        shapes: as in :func:`restore`.
    """
    place = Place(place) if isinstance(place, Path) else place
    with place.reading():
        # The main process looks, because the others may see other checkpoints.
        alone, found, claimed_by = on_main_process(lambda: _look_into(place), "fnloop.resume")
        if nonfinite:
            found = [(path, None) for path, _ in found]
        newest = _read_one(place, state) if alone else _read_newest(place, found, state)
        if newest is None:
            place.check_all_empty()
            return state if claimed_by is None else attrs.evolve(state, run_id=claimed_by)
        path, contents = newest
        return restore_contents(contents, state, PARTS, True, path, settings, shapes)


def _read_given(given: Sequence[str], state: TrainState) -> tuple[str, ...]:
    """Return the settings to take from a state, checked."""
    expected = 'resume expects given as a tuple of settings of parameter groups, such as ("lr",)'
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(f"{expected}; got {checks.describe(given)}")
    known = dict.fromkeys(key for group in groups(state).values() for key in settings_of(group))
    for key in given:
        if key not in known:
            raise ValueError(
                f"{expected}; got {checks.describe(key)}, which no group has. They have "
                f"{checks.join_names([*known], 12)}"
            )
    return tuple(given)


def _look_into(place: Place) -> tuple[bool, list[Listed], str | None]:
    """Return whether a place is one checkpoint; its checkpoints; and the run that claims it."""
    place.settle()
    folder = place.look()
    if disk.exists(folder) and not disk.is_folder(folder):
        foreign = explain_foreign(folder)
        raise CheckpointError(
            f"{folder} is a file: resume expects a folder of checkpoints"
            f"{f'. {foreign}' if foreign else ''}"
        )
    if is_one_checkpoint(folder):
        return True, [], None
    found = listed(folder)
    if not found and (foreign := explain_foreign(folder)) is not None:
        raise CheckpointError(
            f"{folder} has no checkpoint of fnloop. {foreign}. For a new run, name another folder"
        )
    return False, found, None if found else read_claim(folder)


def _read_one(place: Place, state: TrainState) -> tuple[Path, Contents]:
    """Return a checkpoint with its contents."""
    path = place.fetch_on_all(place.folder)
    contents = read_whole_checkpoint(path, state)
    if contents is None:
        raise CheckpointError(_explain_not_resumable(path))
    where = locate(path)
    if (fault := explain_nonfinite(where, read_manifest(where))) is not None:
        raise CheckpointError(f"a run cannot be resumed: {fault}. {_TAKE_IT}")
    return path, contents


def _read_newest(
    place: Place, found: Sequence[Listed], state: TrainState
) -> tuple[Path, Contents] | None:
    """Return the newest valid checkpoint of a place with its contents, or None if it has none.

    Args:
        place: the place.
        found: its checkpoints, the newest first.
        state: the state to read for.

    Raises:
        CheckpointError: there are checkpoints, and all are damaged, partial or not finite.
    """
    faults: list[str] = []
    partial: list[Path] = []

    def read(path: Path) -> Contents | None:
        with place.reading(path):
            return read_whole_checkpoint(path, state)

    for path, unfit in found:
        here = path if unfit is not None else place.fetch_on_all(path)
        checkpoint = ((here, unfit),)
        for _, contents in _skip_unfit(checkpoint, read, faults, state.backend.main, depth=5):
            if contents is not None:
                return here, contents
            partial.append(path)
    if partial:
        raise CheckpointError(_explain_not_resumable(partial[0]))
    if faults:
        many = f"{len(faults)} checkpoint{'s' * (len(faults) > 1)}"
        take = "" if all(fault is None for _, fault in found) else f"{_TAKE_IT}. "
        raise CheckpointError(
            f"{place.name} has {many}, and none is valid: {'; '.join(faults[:3])}. {take}"
            "To begin a new run, give it another folder"
        )
    return None


_TAKE_IT = "To take one that is not finite all the same: state = restore(path, state)"


def _explain_not_resumable(path: Path) -> str:
    held = held_parts(read_manifest(locate(path)))
    return (
        f"a run cannot be resumed: {explain_partial(path, held)}. To resume runs, save whole "
        "checkpoints, in a folder of their own: checkpoint(folder) without only="
    )


def _skip_unfit(
    checkpoints: Iterable[Listed],
    read: Callable[[Path], Found],
    faults: list[str] | None = None,
    warn: bool = True,
    depth: int = 4,
) -> Iterator[tuple[Path, Found]]:
    """Yield the valid checkpoints, each with what ``read`` returns.

    Args:
        checkpoints: the checkpoints. Those that are not finite are passed over.
        read: reads or verifies one.
        faults: receives the faults of those that are skipped.
        warn: whether to warn of them.
        depth: how many frames above is the caller of the public function.
    """
    for path, unfit in checkpoints:
        try:
            if unfit is not None:
                raise CheckpointError(unfit)
            found = read(path)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            if faults is not None:
                faults.append(str(error))
            if warn:
                what = "skipped a damaged checkpoint" if unfit is None else "passed over"
                warnings.warn(f"{what}: {error}", stacklevel=depth)
        else:
            yield path, found
